"""The checks of the battery. Each is a property that every method must have."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.config import shared_names
from coterie.core import tree as T
from coterie.core.context import ClientId
from coterie.core.edges import EdgeMethod, is_announced
from coterie.core.method import Client, Method, Moment
from coterie.core.schema import Entry, Schema
from coterie.engine import codec
from coterie.engine.combining import mean_upload
from coterie.engine.edge_steps import merge, preview, relay
from coterie.engine.loop import Loop
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.round import RoundAnswers, RoundPlan, close, receive
from coterie.engine.session import Callbacks, Objects
from coterie.errors import CoterieError
from coterie.methods import build_method, find
from coterie.runtimes.base import Replies
from coterie.testing.fixtures import Bench, SmallNet, close_loop, decided, events, open_loop, small_numbers
from coterie.testing.spies import Watched, standard


def same_bits_for_any_number_of_workers(bench: Bench, tmp: Path) -> None:
    one, two = standard(bench), bench.play(tmp / "2", workers=2)
    assert events(one.folder) == events(tmp / "2"), "events differ between 1 and 2 workers"
    assert codec.equal(decided(one.loop), decided(two)), "state differs between 1 and 2 workers"


def same_bits_after_a_resume(bench: Bench, tmp: Path) -> None:
    whole = standard(bench)
    loop = open_loop(bench.session(), tmp)
    assert not loop.run(Callbacks(should_stop=lambda: loop.done >= 1))
    close_loop(loop)
    again = open_loop(bench.session(), tmp)
    assert again.resume() == []
    assert again.done == 1
    again.run()
    close_loop(again)
    assert events(whole.folder) == events(tmp), "events differ after a resume"
    assert codec.equal(decided(whole.loop), decided(again)), "state differs after a resume"


def an_unsampled_client_keeps_its_state(bench: Bench, tmp: Path) -> None:
    made = standard(bench)
    last = decided(made.loop)["clients"]
    after = [*(w.states for w in made.rounds[1:]), last]
    for watched, new in zip(made.rounds, after, strict=True):
        for i in set(new) - set(watched.plan.participants):
            same = codec.equal(watched.states[i], new[i])
            assert same, f"client {i} changed in round {watched.plan.round} without being sampled"


def permuting_ids_permutes_results(bench: Bench, tmp: Path) -> None:
    """A client's result depends on its data, not on its id, if batches are whole and the participants always the same.

    A method may draw fewer participants than `join` asks for, so the permuted run takes those of the plain run.
    """
    order = [3, 0, 4, 1, 2]
    scores = []
    for name, permutation in (("plain", None), ("mixed", order)):
        session = bench.session(join=1.0, batch=1000, lr=0.05, eval_every=3, checkpoint_every=3)
        if permutation is not None:
            drawn = {e["round"]: [order.index(i) for i in e["participants"]] for e in events(tmp / "plain")}
            session = replace(session, federation=_Renamed(session.federation, permutation))  # type: ignore[arg-type]
            vars(session.method)["sample"] = lambda server, round, rng, drawn=drawn: drawn[round]
        bench.play(tmp / name, session)
        with np.load(tmp / name / "eval" / "000003.npz") as z:
            scores.append(z["personal/test/loss"])
    plain, mixed = scores
    expected = plain[order]
    assert np.allclose(mixed, expected, rtol=2e-3, atol=1e-2), f"{mixed} is not {plain} permuted by {order}"


class _Renamed:
    """A federation with permuted client ids: client i has the data of order[i]."""

    def __init__(self, federation: Any, order: Sequence[int]):
        self._federation, self._order = federation, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def data(self, client: int, round: int = 1) -> Any:
        return replace(self._federation.data(self._order[client], round), client=client)

    def test(self, client: int, round: int = 1) -> Any:
        return self._federation.test(self._order[client], round)

    def sizes(self, part: str) -> Any:
        return self._federation.sizes(part)[list(self._order)]

    def label_counts(self, part: str = "train") -> Any:
        return self._federation.label_counts(part)[list(self._order)]


def any_subset_of_answers_is_aggregated(bench: Bench, tmp: Path) -> None:
    """Clients fail and straggle in every round, including the opening; then no client answers the first round."""
    quiet: dict[str, Any] = {"watch": False, "final_trained": False, "eval_every": 100, "checkpoint_every": 100}
    loops = [bench.play(tmp / "some", dropout=0.6, stragglers=0.5, rounds=5, join=1.0, **quiet)]
    loop = open_loop(bench.session(join=1.0, **quiet), tmp / "none")
    train, first = loop.runtime.train, loop.first

    def silent_at_first(requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        silent = {r.client: "it is not connected" for r in requests if r.round == first}
        answers, missing = train([r for r in requests if r.client not in silent])
        return answers, {**missing, **silent}

    loop.runtime.train = silent_at_first  # type: ignore[method-assign]
    loop.run()
    close_loop(loop)
    for done in [*loops, loop]:
        tensors = codec.tensors_of([done.server, done.edges])
        assert all(_sound(t) for t in tensors), "the server's state is not finite"


def _sound(t: Tensor) -> bool:
    """True if no value is infinite; NaN is allowed, because it marks absent values."""
    return not t.is_floating_point() or not bool(torch.isinf(t).any())


def payload_is_what_is_declared(bench: Bench, tmp: Path) -> None:
    """Every payload is what the schema of its link declares for this client and round, to the byte."""
    made = standard(bench)
    method = made.session.method
    labels = (made.session.federation.label_counts("train") > 0).sum(1)
    for w in made.rounds:
        t, declared = w.plan.round, {"up": 0, "down": 0}
        uncalled = _uncalled(method, w)
        for i, request in w.requests.items():
            answer = w.answers.trained[i]
            for link, tree in (("down", request.download), ("up", answer.upload)):
                exact = method.schema(link, Moment(w.server, i, t))  # type: ignore[arg-type]
                exact.check(tree, f"round {t}, {link} of client {i}")
                method.schema(link).check(tree, f"round {t}, {link} of client {i}, in general")  # type: ignore[arg-type]
                if link == "up" and i in uncalled:
                    exact = exact.keep(is_announced)
                if tree or not exact.may_be_empty:
                    declared[link] += exact.nbytes(labels=int(labels[i]))
        for e, merged in w.answers.merged.items():
            method.schema("edge_up", Moment(w.server, e, t)).check(merged.upload, f"round {t}, edge {e}")
            method.schema("edge_up").check(merged.upload, f"round {t}, edge {e}, in general")
        for way, promised in declared.items():
            counted = w.bytes.get(("device-edge", way), 0) + w.bytes.get(("device-cloud", way), 0)
            assert counted == promised, f"round {t}, {way}: {counted} bytes sent, {promised} declared"


def _uncalled(method: Method, w: Watched) -> set[ClientId]:
    """Return the clients whose edge received their announcement and did not call for the rest."""
    uncalled: set[ClientId] = set()
    for task in w.plan.edges:
        assert isinstance(method, EdgeMethod)
        answers = [w.answers.trained[r.client] for r in task.requests]
        heard = receive(task.schemas, sorted(answers, key=lambda a: a.client)).uploads
        ahead = [replace(u, tree=T.keep(u.tree, is_announced)) for u in heard]
        called = method.calls(task.edge, ahead, w.plan.round)
        uncalled |= set() if called is None else {u.sender for u in heard} - set(called)
    return uncalled


def a_spoiled_upload_is_refused(bench: Bench, tmp: Path) -> None:
    """Spoil each entry of an upload of each round in turn: it is refused with one sentence, and the round goes on."""
    made = standard(bench)
    method = made.session.method
    for w in made.rounds:
        victim = next((i for i in sorted(w.requests) if w.answers.trained[i].upload), None)
        if victim is None:
            continue
        schema = method.schema("up", Moment(w.server, victim, w.plan.round))
        tree = w.answers.trained[victim].upload
        worst: tuple[str, dict[str, Tensor]] | None = None
        for what, spoiled in _spoiled(schema, tree):
            answer = replace(w.answers.trained[victim], upload=spoiled)
            received = receive({victim: schema}, [answer])
            assert not received.uploads, f"round {w.plan.round}: an upload with {what} was accepted"
            reason = received.refused.get(victim, "")
            assert "\n" not in reason
            worst = (what, spoiled)
        assert worst is not None
        with_it = _closed(method, w, {victim: worst[1]})
        without = _closed(method, w, {victim: None})
        assert victim in with_it.reasons or victim in with_it.nonfinite
        same = codec.equal([with_it.server, with_it.edges], [without.server, without.edges])
        assert same, f"an upload with {worst[0]} changed the server although it was refused"


def _spoiled(schema: Schema, tree: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "an entry of an unknown name", {**tree, "x:unknown": torch.zeros(3)}
    for name, v in tree.items():
        e = schema.entries[name]
        if not e.optional and (len(tree) > 1 or not schema.may_be_empty):
            yield f"no {name}", {k: x for k, x in tree.items() if k != name}
        for what, bad in _wrong(e, v):
            yield f"{what} in {name}", {**tree, name: bad}


def _wrong(e: Entry, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "a different type", v.to(torch.float64 if v.dtype != torch.float64 else torch.float32)
    yield "a different number of axes", v[None]
    if v.numel() and not isinstance(e.shape[0] if e.shape else 0, str):
        yield "a different length", torch.cat([v, v]) if v.ndim else torch.stack([v, v])
    if not v.numel() or v.dtype == torch.bool:
        return
    if v.is_floating_point():
        if not e.nan:
            yield "NaN", torch.full_like(v, float("nan"))
        yield "infinity", torch.full_like(v, float("inf"))
        yield "huge values", torch.full_like(v, 3e38 if v.dtype == torch.float32 else 1e300)
        return
    limits = torch.iinfo(v.dtype)
    for bad in (e.low - 1, e.high + 1):
        if limits.min <= bad <= limits.max:
            yield f"{bad:g}", torch.full_like(v, int(bad))
    if e.distinct and v.numel() > 1:
        yield "equal ids", v[:1].expand_as(v).clone()


def _closed(method: Method, w: Watched, changed: Mapping[ClientId, Mapping[str, Tensor] | None]) -> Any:
    """Close the round again with changed uploads of some clients (None: no answer)."""
    trained = dict(w.answers.trained)
    for i, tree in changed.items():
        if tree is None:
            del trained[i]
        else:
            trained[i] = replace(trained[i], upload=dict(tree))
    merged = {}
    for task in w.plan.edges:
        assert isinstance(method, EdgeMethod)
        _, down = relay(method, task)
        answers = [trained[r.client] for r in task.requests if r.client in trained]
        merged[task.edge.id] = merge(method, task, answers, down)
    return close(method, w.server, w.edges, w.plan, RoundAnswers(trained, merged))


def nothing_private_is_uploaded(bench: Bench, tmp: Path) -> None:
    """Compare by value: no upload holds a private entry, under any name.

    An entry that is not declared to hold parameters (`model`, `update`) must not be a parameter of the client's model.
    """
    made = standard(bench)
    method = made.session.method
    w0 = method.ctx.w0
    names = [k for k in w0 if w0[k].numel() >= 8]
    for w, new in zip(made.rounds, [*(x.states for x in made.rounds[1:]), decided(made.loop)["clients"]], strict=True):
        for i in w.requests:
            upload = w.answers.trained[i].upload
            schema = method.schema("up", Moment(w.server, i, w.plan.round))
            for name in upload:
                assert name not in w0 or not method.stays(name), f"{name} is private and was uploaded"
            held = {}
            for k, v in _named_tensors(new[i] or {}):
                plain = T.plain(k.rsplit("/", 1)[-1])
                if plain in names and v.shape == w0[plain].shape and not torch.equal(v, w0[plain]):
                    held[k] = (plain, v)
            for sent, v in upload.items():
                declared = schema.entries[sent].kind in ("model", "update")
                for plain, own in held.values():
                    if (method.private(plain) or not declared) and _contains(v, own):
                        raise AssertionError(f"{plain} of the client's own model was uploaded as {sent}")


def _named_tensors(value: Any, at: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield at, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _named_tensors(v, f"{at}/{k}")
    elif isinstance(value, list | tuple):
        for k, v in enumerate(value):
            yield from _named_tensors(v, f"{at}/{k}")


def _contains(sent: Tensor, own: Tensor) -> bool:
    """True if more than nine tenths of the values of `own` are among those sent."""
    if not sent.is_floating_point() or sent.numel() < own.numel():
        return False
    sent_too = torch.isin(own.reshape(-1).float(), sent.reshape(-1).float())
    return bool(sent_too.float().mean() > 0.9) and len(torch.unique(own)) > 4


def label_information_is_declared(bench: Bench, tmp: Path) -> None:
    """Look for the labels of clients in their uploads; an entry that shows them is declared as label information.

    A server can read a client's classes from rows that came back as they were sent, from rows without values, from
    lengths, and from numbers that are counts, shares or ids. An entry shows labels if one of these ways is right for
    every client that lacks a class.
    """
    session = bench.session(partition="dirichlet(0.1)", join=1.0, watch=False, eval_every=100, final_trained=False)
    counts = torch.as_tensor(np.asarray(session.federation.label_counts("train")))
    found: dict[str, list[set[str]]] = {}
    undeclared = set[str]()
    loop = open_loop(session, tmp)
    run, train, requests = loop.runtime.run, loop.runtime.train, dict[ClientId, TrainRequest]()

    def keep_requests(asked: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        requests.update({r.client: r for r in asked})
        return train(asked)

    def keep_answers(plan: RoundPlan) -> RoundAnswers:
        answers = run(plan)
        for i, answer in answers.trained.items():
            if bool((counts[i] > 0).all()):
                continue  # A client with all classes shows nothing.
            entries = session.method.schema("up", Moment(loop.server, i, plan.round)).entries
            for name, sent in answer.upload.items():
                found.setdefault(name, []).append(_ways_to_labels(sent, requests[i].download.get(name), counts[i]))
                if "label information" not in entries[name].kinds:
                    undeclared.add(name)
        return answers

    loop.runtime.train, loop.runtime.run = keep_requests, keep_answers  # type: ignore[method-assign, assignment]
    loop.run()
    close_loop(loop)
    for name, ways in found.items():
        always = set.intersection(*ways)
        assert not (always and name in undeclared), (
            f"{name} shows which classes a client has ({min(always)}); declare it with shows_labels=True in the schema"
        )


def _ways_to_labels(sent: Tensor, received: Tensor | None, counts: Tensor) -> set[str]:
    """Return the ways in which an entry shows the classes of its sender, given its true counts per class."""
    ways, present = set[str](), counts > 0
    if sent.ndim and len(sent) == len(counts):
        rows = sent.reshape(len(sent), -1)
        if received is not None and received.shape == sent.shape:
            same = (rows == received.reshape(len(sent), -1)).all(1)
            ways |= {"rows that came back unchanged"} if torch.equal(same, ~present) else set()
        empty = (rows == 0).all(1) | rows.isnan().all(1)
        ways |= {"rows without values"} if torch.equal(empty, ~present) else set()
        if rows.shape[1] == 1 and float(total := rows.double().sum()):
            share = counts / counts.sum()
            ways |= {"counts"} if torch.allclose(rows[:, 0].double() / total, share.double(), atol=1e-6) else set()
    elif sent.ndim and len(sent) == int(present.sum()):
        ways.add("its length")
    return ways


def hooks_do_not_change_what_they_are_given(bench: Bench, tmp: Path) -> None:
    changed = standard(bench).changed
    assert not changed, f"{changed[0]} changed one of its arguments"


def use_of_planned_rounds_is_declared(bench: Bench, tmp: Path) -> None:
    hooks = standard(bench).plan_used
    assert not hooks or bench.method.plans_ahead, f"{hooks[0]} reads ctx.planned_rounds: declare plans_ahead = True"


def uploads_are_combined_as_declared(bench: Bench, tmp: Path) -> None:
    """A method with `combines = "mean"` computes the same state from the mean of the uploads as from all of them."""
    made = standard(bench)
    method = made.session.method
    if method.combines != "mean" or isinstance(method, EdgeMethod):
        return
    for w in (w for w in made.rounds if w.plan.round > 0):
        uploads = receive(
            {i: method.schema("up", Moment(w.server, i, w.plan.round)) for i in w.answers.trained},
            [w.answers.trained[i] for i in sorted(w.answers.trained)],
        ).uploads
        each = method.aggregate(w.server, uploads, w.plan.round)
        one = method.aggregate(w.server, [mean_upload(method, uploads)], w.plan.round)
        same = codec.equal(codec.deep_copy(each), one) or _close(each, one)
        assert same, (
            f'round {w.plan.round}: the mean of the uploads gives a different state; declare combines = "uploads"'
        )


def _close(a: Any, b: Any) -> bool:
    """True if two states hold the same tensors up to rounding."""
    pairs = zip(_named_tensors(a), _named_tensors(b), strict=True)
    return all(x == y and torch.allclose(v, w, atol=1e-6, equal_nan=True) for (x, v), (y, w) in pairs)


def state_survives_the_codec(bench: Bench, tmp: Path) -> None:
    parts = decided(standard(bench).loop)
    assert codec.equal(codec.unpack(codec.pack(parts)), parts)


def learns_a_small_task(bench: Bench, tmp: Path) -> None:
    quiet: dict[str, Any] = {"watch": False, "final_trained": False, "checkpoint_every": 100, "eval_every": 12}
    loop = bench.play(tmp, rounds=12, join=1.0, epochs=2, partition="dirichlet(0.3)", **quiet)
    result = events(tmp)[-1]["eval"]
    views = ("personal/test", "adapted/test", "trained/test")
    best = max(result[v]["mean"] for v in views if v in result)
    assert best > 0.5, f"only {best:.2f} after {loop.done} rounds on ten classes"


def numbers_are_learned_or_refused(bench: Bench, tmp: Path) -> None:
    """Run a regression task: a method that needs classes refuses it before any work, every other one learns it."""
    torch.manual_seed(0)
    objects = Objects(bench.method, small_numbers(), SmallNet(4, 1))
    quiet: dict[str, Any] = {"watch": False, "final_trained": False, "checkpoint_every": 100}
    changes: dict[str, Any] = {"partition": "natural", "clients": 3, "public": 9, "join": 1.0, **quiet}
    if "classes" in bench.method.needs:
        try:
            bench.session(objects, **changes)
        except CoterieError as e:
            assert "needs class labels" in str(e) and "\n" not in str(e)
            return
        raise AssertionError("the method declares that it needs classes, and accepts a regression task")
    bench.play(tmp, bench.session(objects, rounds=8, epochs=2, eval_every=8, **changes))
    result = events(tmp)[-1]["eval"]
    views = ("personal/test", "adapted/test", "trained/test")
    best = max(result[v]["pooled R2"] for v in views if v in result)
    assert best > 0.25, f"explains only {best:.2f} of the variance of a line with noise"


def bad_settings_get_a_sentence(bench: Bench, tmp: Path) -> None:
    bad: list[dict[str, Any]] = [{"no_such_setting": 1}, {"no_such_setting": "x"}]
    for name, info in bench.method.Settings.model_fields.items():
        if info.annotation in (int, float):
            bad += [{name: "many"}, {name: float("inf")}, {name: float("nan")}]
    for one in bad:
        try:
            build_method(bench.method, one)
        except CoterieError as e:
            assert next(iter(one)) in str(e) and "\n" not in str(e)
        else:
            raise AssertionError(f"{one} was accepted")


def settings_have_names_of_their_own(bench: Bench, tmp: Path) -> None:
    """A setting with the name of a run or federation setting could not be set: the value would reach the other one."""
    twice = shared_names(bench.method)
    assert not twice, f"{twice[0]} is also a setting of every run; rename the method's setting"


def a_newcomer_gets_a_model(bench: Bench, tmp: Path) -> None:
    loop = bench.play(tmp, newcomers=1, watch=False, eval_every=3, checkpoint_every=3, final_trained=False)
    with np.load(tmp / "eval" / "000003.npz") as z:
        assert z["newcomer"].sum() == 1
        assert np.isfinite(z["personal/test/loss"][z["newcomer"]]).all()
    left = left_untrained(loop)
    assert not left, (
        f"a newcomer has the initial {left[0]}, although clients have sent trained values of it; "
        'let model(view, client) return the received values for the view "newcomer"'
    )


def left_untrained(loop: Loop) -> list[str]:
    """Return the entries of a newcomer's model with initial values although clients have sent trained ones.

    Parts that never leave a client, such as a private head, have initial values for every newcomer.
    """
    method, new = loop.method, len(loop.method.ctx.clients)
    data = loop.runtime.clients.federation.data(new)  # type: ignore[attr-defined]
    shared, own = preview(method, loop.server, loop.edges, [new], loop.done + 1)[new]
    model = method.model("newcomer", Client(method.init_client(data), {**shared, **own}, data, loop.done + 1))
    assert model is not None
    params = model.params
    entries = method.schema("up").entries.items()
    sent = {T.plain(k) for k, e in entries if e.kind in ("model", "update")} & method.ctx.net.trainable
    first = {k: method.ctx.w0.get(T.plain(k)) for k in params if T.plain(k) in sent}
    return [k for k, v in first.items() if v is not None and torch.equal(v, params[k])]


CHECKS: dict[str, Callable[[Bench, Path], None]] = {
    f.__name__: f
    for f in (
        same_bits_for_any_number_of_workers,
        same_bits_after_a_resume,
        an_unsampled_client_keeps_its_state,
        permuting_ids_permutes_results,
        any_subset_of_answers_is_aggregated,
        payload_is_what_is_declared,
        a_spoiled_upload_is_refused,
        nothing_private_is_uploaded,
        label_information_is_declared,
        hooks_do_not_change_what_they_are_given,
        use_of_planned_rounds_is_declared,
        uploads_are_combined_as_declared,
        state_survives_the_codec,
        learns_a_small_task,
        numbers_are_learned_or_refused,
        bad_settings_get_a_sentence,
        settings_have_names_of_their_own,
        a_newcomer_gets_a_model,
    )
}


def check(method: str | type[Method], name: str, **own: Any) -> None:
    """Run one check of the battery on a method, with these settings of the method."""
    cls = find(method) if isinstance(method, str) else method
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[name](Bench(cls, own), Path(folder))
