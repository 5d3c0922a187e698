"""A round is a value: planned and closed by pure functions, whatever happens to its clients in between."""

import builtins
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coterie.config import Engine
from coterie.config import settings as chosen
from coterie.core import tree as T
from coterie.core.edges import ANNOUNCE, EdgeMethod
from coterie.core.method import Download, Upload
from coterie.core.schema import Entry, Schema
from coterie.engine import codec, ledger
from coterie.engine.edge_steps import merge, preview, relay
from coterie.engine.messages import TrainAnswer
from coterie.engine.round import RoundAnswers, Rules, close, plan
from coterie.engine.session import Callbacks, execute, prepare
from coterie.errors import CoterieError
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.results.run import Run
from coterie.storage.run_folder import Folder
from coterie.testing import close_loop
from support.toy import Toy, W, begin, clients, events, mlp, models, near, open_toy, play, same, state

RULES = Rules(seed=0, watch=False)


class TwoEdges(EdgeMethod):
    """Edge 10 serves clients 0 and 3, edge 20 serves 1 and 4, and client 2 talks to the cloud; edges count rounds."""

    def edges(self, server):
        return {10: [0, 3], 20: [1, 4]}

    def merge(self, edge, uploads, round):
        _, upload = super().merge(edge, uploads, round)
        return {"rounds": edge.state.get("rounds", 0) + 1}, upload


def answered(cls, tmp_path, **settings):
    """A loop before its first round, the plan of that round, and what its clients answer."""
    loop = begin(open_toy(cls, tmp_path, **settings))
    planned = plan(loop.method, loop.server, loop.edges, 1, RULES)
    return loop, planned, loop.runtime.run(planned)


def closed(loop, planned, trained, **more):
    """The round with these answers of its clients; edges merge them anew."""
    merged = {}
    for task in planned.edges:
        _, down = relay(loop.method, task)
        theirs = [trained[r.client] for r in task.requests if r.client in trained]
        merged[task.edge.id] = merge(loop.method, task, theirs, down)
    return close(loop.method, loop.server, loop.edges, planned, RoundAnswers(trained, merged, **more))


# ---- pure ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", [FedAvg, Ditto, TwoEdges])
def test_plan_and_close_give_the_same_for_the_same_and_leave_what_they_are_given_alone(cls, tmp_path):
    loop, planned, answers = answered(cls, tmp_path, join=0.8)
    given = [loop.server, loop.edges, answers.trained, answers.merged]
    before = codec.deep_copy(given)
    again = plan(loop.method, loop.server, loop.edges, 1, RULES)
    assert codec.equal([again.direct, again.edges], [planned.direct, planned.edges])
    assert replace(again, direct=(), edges=()) == replace(planned, direct=(), edges=())
    one, two = (close(loop.method, loop.server, loop.edges, planned, answers) for _ in range(2))
    assert codec.equal([one.server, one.edges, one.bytes], [two.server, two.edges, two.bytes])
    assert codec.equal(given, before)
    assert not codec.equal(one.server, loop.server)


@pytest.mark.parametrize("cls", [FedAvg, TwoEdges])
def test_answers_may_come_in_any_order(cls, tmp_path):
    loop, planned, answers = answered(cls, tmp_path)
    want = close(loop.method, loop.server, loop.edges, planned, answers)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        got = closed(loop, planned, {i: answers.trained[i] for i in order})
        backwards = RoundAnswers({i: answers.trained[i] for i in order}, dict(reversed(answers.merged.items())))
        for result in (got, close(loop.method, loop.server, loop.edges, planned, backwards)):
            assert codec.equal([result.server, result.edges], [want.server, want.edges])
            assert (result.accepted, result.bytes) == ([0, 1, 2, 3, 4], want.bytes)


def test_a_round_opens_no_file_and_starts_no_process(tmp_path, monkeypatch):
    loop, _, answers = answered(TwoEdges, tmp_path)

    def forbidden(*args, **kwargs):
        raise AssertionError("a round has no business outside")

    for place, name in ((builtins, "open"), (os, "open"), (os, "fork"), (Path, "open"), (Path, "mkdir")):
        monkeypatch.setattr(place, name, forbidden)
    planned = plan(loop.method, loop.server, loop.edges, 1, RULES)
    result = close(loop.method, loop.server, loop.edges, planned, answers)
    monkeypatch.undo()
    assert result.accepted == [0, 1, 2, 3, 4]


def test_a_plan_is_a_function_of_the_seed_and_the_round_alone(tmp_path):
    loop = begin(open_toy(FedAvg, tmp_path, data=clients(20), join=0.4, epochs=4))
    rules = Rules(seed=7, dropout=0.4, stragglers=0.5, watch=False)

    def drawn(t, rules):
        p = plan(loop.method, loop.server, {}, t, rules)
        return p.participants, p.failing, tuple((r.client, r.share) for r in p.direct)

    assert drawn(3, rules) == drawn(3, rules)
    assert len({drawn(t, rules) for t in (1, 2, 3)} | {drawn(3, replace(rules, seed=8))}) == 4
    participants, failing, shares = drawn(3, rules)
    assert len(participants) == 8 and failing <= set(participants)
    assert [i for i, _ in shares] == [i for i in participants if i not in failing]
    assert all(0 <= s <= 1 for _, s in shares) and 0 < sum(s < 1 for _, s in shares) < len(shares)
    calm = drawn(3, Rules(seed=7))
    assert calm[0] == participants and not calm[1] and {s for _, s in calm[2]} == {1.0}


# ---- who is refused --------------------------------------------------------------------------------------------------
SPOILED = {
    "an entry nobody declared": lambda t: {**t, "x:extra": torch.zeros(2)},
    "an entry missing": lambda t: T.drop(t, lambda k: k == "2.bias"),
    "another shape": lambda t: {**t, "2.bias": torch.zeros(4)},
    "another type": lambda t: {**t, "2.bias": torch.zeros(3, dtype=torch.float64)},
    "a huge number": lambda t: {**t, "2.bias": torch.full((3,), 1e20)},
    "nan": lambda t: {**t, "2.bias": torch.full((3,), math.nan)},
    "nan and an entry nobody declared": lambda t: {"2.bias": torch.full((3,), math.nan), **t, "y": torch.zeros(2)},
    "infinity": lambda t: {**t, "0.bias": torch.full((6,), -math.inf)},
    "nothing": lambda t: {},
}


@pytest.mark.parametrize("cls", [FedAvg, TwoEdges])
@pytest.mark.parametrize("what", SPOILED)
def test_a_refused_upload_leaves_the_server_as_if_the_client_had_been_missing(what, cls, tmp_path):
    loop, planned, answers = answered(cls, tmp_path)
    for victim in (2, 3):  # at the cloud, and with TwoEdges at an edge
        there = answers.trained[victim]
        spoiled = {**answers.trained, victim: replace(there, upload=SPOILED[what](there.upload))}
        got = closed(loop, planned, spoiled)
        others = {i: a for i, a in answers.trained.items() if i != victim}
        gone = closed(loop, planned, others, missing={victim: "it is not connected"})
        assert codec.equal([got.server, got.edges], [gone.server, gone.edges])
        assert got.accepted == gone.accepted == [i for i in range(5) if i != victim]
        if what in ("nan", "infinity", "a huge number"):
            assert (got.nonfinite, got.failed, got.reasons) == ([victim], [], {})
        else:
            assert (got.nonfinite, got.failed, list(got.reasons)) == ([], [victim], [victim])
            assert got.reasons[victim].startswith("the upload ") and "\n" not in got.reasons[victim]
        assert gone.reasons == {victim: "it is not connected"}


def test_what_a_client_may_send_can_depend_on_client_and_round(tmp_path):
    class Picky(FedAvg):
        """Client 1 sends its biases alone, from the second round on."""

        def schema(self, link, now=None):
            whole = super().schema(link, now)
            if link == "up" and now is not None and now.client == 1 and now.round > 1:
                return Schema({k: e for k, e in whole.entries.items() if k.endswith("bias")})
            return whole

    loop = begin(open_toy(Picky, tmp_path))
    loop.runtime.trusted = False  # as if the clients were other people's
    loop.step()
    loop.step()
    first, second = events(loop)
    assert first["failed"] == [] and second["failed"] == [1]
    assert second["reasons"] == {"1": "the upload has an entry '0.weight' that is not declared"}
    # what was refused has crossed the link, under a heading of its own
    assert second["bytes"]["device-cloud"]["up"] == {"model": 4 * W * 4, "refused": 4 * W}
    loop.runtime.trusted = True
    with pytest.raises(CoterieError, match="Picky does not send what its schema declares"):
        loop.step()
    close_loop(loop)


def test_when_nobody_answers_the_server_stays_as_it_is(tmp_path):
    loop, planned, _ = answered(TwoEdges, tmp_path)
    result = closed(loop, planned, {}, missing=dict.fromkeys(range(5), "it is not connected"))
    assert result.server is loop.server and result.edges == loop.edges == {}
    assert result.accepted == [] and result.failed == [0, 1, 2, 3, 4]
    silent = close(loop.method, loop.server, {}, planned, RoundAnswers({}, {}, dict.fromkeys(range(5), "gone")))
    assert silent.server is loop.server and silent.bytes["device-edge"] == {"down": {}}


def test_an_answer_of_a_client_nobody_asked_counts_for_nothing(tmp_path):
    loop, planned, answers = answered(FedAvg, tmp_path, join=0.6)
    stranger = next(i for i in range(5) if i not in planned.participants)
    forged = TrainAnswer(stranger, T.clone(loop.server["w"]), {}, 10**9, 1, 0.0)
    got = closed(loop, planned, {**answers.trained, stranger: forged})
    want = closed(loop, planned, answers.trained)
    assert codec.equal(got.server, want.server) and got.bytes == want.bytes
    assert got.accepted == want.accepted


def test_an_edge_speaks_for_its_own_clients_alone(tmp_path):
    loop, planned, answers = answered(TwoEdges, tmp_path)
    bold = replace(answers.merged[10], senders=(0, 1, 3), refused={4: "I say so"}, nonfinite=(2,))
    merged = {**answers.merged, 10: bold, 30: replace(answers.merged[10], edge=30)}
    got = close(loop.method, loop.server, {}, planned, RoundAnswers(answers.trained, merged))
    want = close(loop.method, loop.server, {}, planned, answers)
    assert codec.equal([got.server, got.edges], [want.server, want.edges])
    assert (got.accepted, got.failed, got.nonfinite) == ([0, 1, 2, 3, 4], [], [])


# ---- bytes and edges -------------------------------------------------------------------------------------------------
def test_bytes_are_counted_per_link_where_they_cross(tmp_path):
    model = 4 * W
    loop = play(TwoEdges, tmp_path, rounds=2)
    assert events(loop)[0]["bytes"] == {
        "edge-cloud": {"down": {"model": 2 * model}, "up": {"model": 2 * model}},
        "device-edge": {"down": {"model": 4 * model}, "up": {"model": 4 * model}},
        "device-cloud": {"down": {"model": model}, "up": {"model": model}},
    }
    assert loop.bytes == ledger.total(e["bytes"] for e in events(loop))
    assert loop.bytes["device-edge"]["up"] == {"model": 2 * 4 * model}


def test_edges_that_hand_on_and_average_give_what_fedavg_gives(tmp_path):
    plain, tiered = play(FedAvg, tmp_path, rounds=2), play(TwoEdges, tmp_path, rounds=2)
    assert near(tiered.server["w"], plain.server["w"], atol=1e-6)
    assert tiered.edges == {10: {"rounds": 2}, 20: {"rounds": 2}}


def test_an_edge_merges_its_own_clients_in_the_order_of_ids(tmp_path):
    loop, planned, answers = answered(TwoEdges, tmp_path)
    task = planned.edges[0]
    assert (task.edge.id, task.clients, [r.client for r in task.requests]) == (10, (0, 3), [0, 3])
    requests, down = relay(loop.method, task)
    assert down == {"model": 2 * 4 * W} and all(same(r.download, loop.server["w"]) for r in requests)
    a, b = answers.trained[0], answers.trained[3]
    got = merge(loop.method, task, [b, a], down)
    assert codec.equal(got, answers.merged[10])
    assert (got.senders, got.samples, got.up, got.refused) == ((0, 3), 7 + 12, {"model": 2 * 4 * W}, {})
    assert same(got.upload, T.mean([a.upload, b.upload], [7.0, 12.0]))
    nobody = merge(loop.method, task, [], down)
    assert (nobody.senders, nobody.samples, nobody.upload, nobody.state, nobody.up) == ((), 0, {}, {}, {})


def test_a_refused_edge_is_as_if_it_had_been_missing(tmp_path):
    loop, planned, answers = answered(TwoEdges, tmp_path)
    spoiled = {**answers.merged, 20: replace(answers.merged[20], upload={"w": torch.zeros(1)})}
    got = close(loop.method, loop.server, {}, planned, RoundAnswers(answers.trained, spoiled))
    without = {i: a for i, a in answers.trained.items() if i not in (1, 4)}
    gone = close(loop.method, loop.server, {}, planned, RoundAnswers(without, {10: answers.merged[10]}))
    assert codec.equal([got.server, got.edges], [gone.server, gone.edges]) and 20 not in got.edges
    assert got.accepted == [0, 2, 3] and got.reasons == dict.fromkeys((1, 4), "the upload of edge 20 lacks 0.weight")
    assert got.bytes["edge-cloud"]["up"] == {"model": 4 * W}


class Called(TwoEdges):
    """Devices announce a number; an edge calls for the models of those that announce the largest."""

    def schema(self, link, now=None):
        whole = super().schema(link, now)
        return whole | Schema({ANNOUNCE + "id": Entry((1,), part="announcement")}) if link == "up" else whole

    def end(self, state, trained, data, round):
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, ANNOUNCE + "id": torch.tensor([float(data.client)])})

    def calls(self, edge, announced, round):
        assert all(set(u.tree) == {ANNOUNCE + "id"} for u in announced)
        return [max(announced, key=lambda u: float(u.tree[ANNOUNCE + "id"])).sender]

    def merge(self, edge, uploads, round):
        assert [len(u.tree) for u in uploads] == [1, 5]
        return {}, Upload(T.drop(uploads[-1].tree, lambda k: k.startswith(ANNOUNCE)))

    def aggregate(self, server, uploads, round):
        bare = [replace(u, tree=T.drop(u.tree, lambda k: k.startswith(ANNOUNCE))) for u in uploads]
        return super().aggregate(server, bare, round)


def test_of_those_an_edge_does_not_call_only_the_announcement_crosses(tmp_path):
    loop, _, answers = answered(Called, tmp_path)
    for e, caller in ((10, 3), (20, 4)):
        got = answers.merged[e]
        assert got.up == {"model": 4 * W, "announcement": 2 * 4}
        assert same(got.upload, T.drop(answers.trained[caller].upload, lambda k: k.startswith(ANNOUNCE)))
    loop.step()
    assert loop.bytes["device-edge"]["up"] == {"model": 2 * 4 * W, "announcement": 4 * 4}


def test_a_preview_is_what_the_next_round_would_send(tmp_path):
    class Own(TwoEdges):
        """Something for everybody, for the clients of an edge, and for one client."""

        def schema(self, link, now=None):
            return super().schema(link, now) | Schema({"tag": Entry((1,), optional=True)})

        def down(self, server, ids, round):
            each = {i: {"tag": torch.tensor([float(i)])} for i in ids if i in (2, 4)}
            return Download(server["w"], each, {10: {"tag": torch.tensor([10.0])}})

    loop = begin(open_toy(Own, tmp_path))
    planned = plan(loop.method, loop.server, {}, 1, RULES)
    sent = {r.client: r for r in planned.direct}
    for task in planned.edges:
        sent |= {r.client: r for r in relay(loop.method, task)[0]}
    seen = preview(loop.method, loop.server, {}, range(5), 1)
    assert {i: {**shared, **own}.get("tag") for i, (shared, own) in seen.items()} == {0: 10, 1: None, 2: 2, 3: 10, 4: 4}
    assert all(same(sent[i].shared, shared) and same(sent[i].own, own) for i, (shared, own) in seen.items())
    assert planned.edges_down == {"model": 2 * 4 * W + 4 + 4}


def test_a_page_of_the_ledger_adds_up():
    page: ledger.Page = {}
    ledger.add_bytes(page, "device-cloud", "up", {"model": 80, "mask": 3})
    ledger.add_bytes(page, "device-cloud", "up", {"model": 8})
    ledger.add_bytes(page, "device-cloud", "down", {})
    assert page == {"device-cloud": {"up": {"model": 88, "mask": 3}, "down": {}}}
    other: ledger.Page = {"edge-cloud": {"up": {"model": 1}}, "device-cloud": {"up": {"mask": 2}}}
    assert ledger.total([page, other, page]) == {
        "device-cloud": {"up": {"model": 176, "mask": 8}, "down": {}}, "edge-cloud": {"up": {"model": 1}},
    }  # fmt: skip
    assert ledger.summed([{"a": 1, "b": 2}, {"b": 3}, {}]) == {"a": 1, "b": 5}


# ---- rounds in which things go wrong ---------------------------------------------------------------------------------
class Diverging(FedAvg):
    """Clients 1 and 3 send NaN and infinity in round 2."""

    def end(self, state, trained, data, round):
        _, upload = super().end(state, trained, data, round)
        bad = {1: math.nan, 3: math.inf}.get(data.client) if round == 2 else None
        tree = upload.tree if bad is None else {**upload.tree, "2.bias": torch.full((3,), bad)}
        return {"rounds": [*state.get("rounds", []), round]}, Upload(tree)


def test_uploads_that_are_not_finite_are_left_out_counted_and_reported(tmp_path):
    loop = play(Diverging, tmp_path)
    assert [e["nonfinite"] for e in events(loop)] == [[], [1, 3], []]
    assert all(e["bytes"]["device-cloud"]["up"]["model"] == 4 * W * 5 for e in events(loop))
    assert T.finite(loop.server["w"])
    assert [state(loop, i)["rounds"] for i in (0, 1)] == [[1, 2, 3], [1, 3]]  # their state is as it was before
    sound = [0, 2, 4]
    plain = begin(open_toy(FedAvg, tmp_path))
    plain.step()
    plain.method.sample = lambda server, round, rng: sound
    plain.step()
    again = play(Diverging, tmp_path, rounds=2)
    assert same(again.server["w"], plain.server["w"])
    close_loop(plain)


def test_a_round_without_any_sound_upload_changes_nothing(tmp_path):
    data = Toy([(x * math.nan, y) for x, y in clients().parts], 3)
    loop = play(FedAvg, tmp_path, data=data, rounds=1)
    assert events(loop)[0]["nonfinite"] == [0, 1, 2, 3, 4] and events(loop)[0]["loss"] is None
    assert same(loop.server["w"], loop.method.ctx.w0)


def test_dropout_and_stragglers_are_keyed_by_the_seed(tmp_path):
    def run(**change):
        given = {"dropout": 0.4, "stragglers": 0.5, **change}
        loop = play(Local, tmp_path, data=clients(8), epochs=4, rounds=3, watch=False, **given)
        return [(e["failed"], e["steps"]) for e in events(loop)]

    base = run()
    assert run() == base == run(workers=2) and run(seed=1) != base
    calm = run(dropout=0.0, stragglers=0.0)
    assert all(failed == [] for failed, _ in calm)
    assert 2 <= sum(len(failed) for failed, _ in base) <= 18  # of 24
    slow = run(dropout=0.0)
    assert all(s[1] < c[1] for s, c in zip(slow, calm, strict=True))


def test_who_fails_was_sent_to_but_sends_nothing_and_keeps_its_state(tmp_path):
    loop = play(Ditto, tmp_path, dropout=0.5, rounds=1, seed=3)
    event = events(loop)[0]
    failed = set(event["failed"])
    assert 0 < len(failed) < 5
    assert event["bytes"]["device-cloud"]["down"]["model"] == 4 * W * 5
    assert event["bytes"]["device-cloud"]["up"]["model"] == 4 * W * (5 - len(failed))
    assert {i for i in range(5) if state(loop, i) is None} == failed


def test_a_client_that_gives_a_reason_instead_of_an_answer_is_reported_and_keeps_its_state(tmp_path):
    loop = begin(open_toy(Ditto, tmp_path))
    train = loop.runtime.train

    def without_two(requests):
        found, _ = train([r for r in requests if r.client != 2])
        return found, {2: "it is not connected"}

    loop.runtime.train = without_two
    loop.step()
    event = events(loop)[0]
    assert event["failed"] == [2] and event["reasons"] == {"2": "it is not connected"}
    assert [i for i in range(5) if state(loop, i) is None] == [2]
    close_loop(loop)


def test_the_sample_of_a_round_does_not_depend_on_earlier_rounds(tmp_path):
    method = open_toy(FedAvg, tmp_path, join=0.4).method
    picks = [method.sample({}, t, method.ctx.rng("sample", t)) for t in (3, 1, 2, 3)]
    assert picks[0] == picks[3] and all(p == sorted(p) and len(p) == 2 for p in picks)


# ---- what is written down --------------------------------------------------------------------------------------------
def test_events_are_json_and_equal_for_equal_settings(tmp_path):
    a, b = (play(FedAvg, tmp_path, model=mlp(True)) for _ in range(2))
    lines = (a.folder.path / "events.jsonl").read_bytes()
    assert lines == (b.folder.path / "events.jsonl").read_bytes()
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [1, 2, 3]
    assert same(models(a), models(b))


def test_events_are_json_that_any_language_reads(tmp_path):
    folder = Folder(tmp_path)
    folder.open_logs()
    folder.event(round=1, loss=float("nan"), deep={"a": [1.5, float("inf")]}, t=torch.tensor([1, 2]))
    folder.close()
    text = (tmp_path / "events.jsonl").read_text()
    plain = {"round": 1, "loss": None, "deep": {"a": [1.5, None]}, "t": [1, 2]}
    assert {k: v for k, v in json.loads(text).items() if k != "crc"} == plain
    assert "NaN" not in text and "Infinity" not in text


def test_optimisers_remember_on_disk_through_workers_and_a_resumed_run(tmp_path):
    def ends(name, engine, stop=0, **more):
        s = chosen(method="fedper", clients=4, epochs=1, join=0.5, rounds=4, checkpoint_every=2, momentum=0.9, **more)
        looks = iter(range(100))
        done = execute(prepare(s, engine), tmp_path / name, Callbacks(should_stop=lambda: 0 < stop <= next(looks)))
        assert done == (not stop)
        if stop:
            execute(prepare(s, engine), tmp_path / name, resume=True)
        return Run(tmp_path / name).clients()["personal/test"].tolist()

    whole = ends("whole", Engine(workers=1), opt_state="keep")
    cut = ends("cut", Engine(workers=2, state="disk"), stop=2, opt_state="keep")
    assert whole == cut != ends("reset", Engine(workers=1))
    with pytest.raises(CoterieError, match="engine = stack is not possible: optimisers keep their memory"):
        ends("no", Engine(workers=1, engine="stack"), opt_state="keep")
