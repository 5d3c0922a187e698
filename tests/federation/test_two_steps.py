"""Uploads in two steps: devices announce, and only those that are called send the rest."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.core import tree as T
from coterie.core.edges import is_announced
from coterie.engine import codec
from coterie.engine.messages import SendAnswer, TrainAnswer
from coterie.engine.round import Rules, plan
from coterie.engine.session import make_loop
from coterie.errors import CoterieError
from coterie.federation.policy.audit import AUDIT_FILE
from coterie.federation.policy.reveal import ANYTHING
from coterie.federation.replay import ReplayRuntime
from coterie.methods.ecsfl.text import ECSFL
from coterie.storage.run_folder import Folder
from support.federations import SMALL
from support.federations import simulated as of_simulation
from support.in_process_link import ALLOW, Federation, Handle, federation, simulated
from support.paced import Paced
from support.replayed import same_as_replay

METHODS: dict[str, dict[str, Any]] = {
    "ecs-fl": {"two_stage": True, "select_fraction": 0.4},
    "ecs-fl-mended": {"select_least": 1, "select_fraction": 0.4, "projection": 16},
}
QUIET: dict[str, Any] = {
    "clients": 5, "join": 1.0, "rounds": 2, "watch": False, "final_trained": False, "eval_every": 9, "epsilon": 0,
}  # fmt: skip


def audit_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_text().splitlines()]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def said(folder: Path, i: int) -> list[dict[str, Any]]:
    """The lines of a device's audit log about uploads that left it."""
    lines = audit_lines(folder / "devices" / str(i))
    return [x for x in lines if x["way"] == "out" and x["message"] in ("train", "send") and "refused" not in x]


def asked_to_send(f: Federation, round: int) -> list[str]:
    links = [f.link, *f.links.values()]
    return sorted(x[1] for link in links for x in link.sizes if x[0] == "send" and x[2] == round and "device" in x[1])


def without_failed(folder: Path, f: Federation, failed: dict[int, set[int]]) -> Any:
    """Simulate the run without the clients that failed."""
    folder.mkdir()
    states = f.session.states(folder)
    loop = make_loop(f.session, Folder(folder), ReplayRuntime(f.session.clients(), states, failed))
    assert loop.run()
    loop.folder.close()
    return loop


TREES = [  # hosts that are edges, and edges of the method
    pytest.param(0, {}),
    pytest.param(1, {}, marks=pytest.mark.long),
    pytest.param(2, {"n_edges": 2}),
    pytest.param(0, {"n_edges": 2}, marks=pytest.mark.long),
    pytest.param(2, {}),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("edges", "own"), TREES)
def test_only_the_chosen_send_their_models_and_ledger_wire_and_audit_agree(
    tmp_path: Path, name: str, edges: int, own: dict[str, Any]
) -> None:
    with federation(tmp_path, name, edges, **QUIET, **METHODS[name], **own) as f:
        assert f.loop.run()
        simulation = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
        ledger = f.loop.bytes["device-edge"]["up"]
        model = T.nbytes(f.session.method.ctx.w0)
        lines = [x for i in range(5) for x in said(tmp_path, i)]
        links = list(f.links.values()) if edges else [f.link]
        wire = [x for link in links for x in link.sizes if x[0] in ("train", "send") and x[1].startswith("device")]
    assert events(tmp_path / "run") == events(tmp_path / "simulation")
    assert codec.equal([f.loop.server, f.loop.bytes], [simulation.server, simulation.bytes])
    chosen = 2 * (3 if own else 2)  # with two edges ceil(0.4 * 3) + ceil(0.4 * 2) in each round
    assert ledger["model"] == chosen * model
    assert sum(x["sizes"].get("model", 0) for x in lines) == ledger["model"]
    assert sum(x["sizes"].get("statistic", 0) for x in lines) == ledger["selection"]
    assert len([x for x in lines if x["message"] == "send"]) == chosen and len(lines) == 10 + chosen
    assert all(is_announced(k) for x in lines if x["message"] == "train" for k in x["entries"])
    crossed = sum(x[3].payload_up for x in wire)
    assert 0 <= crossed - sum(ledger.values()) <= (10 + chosen) * 4096


Die = Callable[[Federation, str], None]


def raising(f: Federation, name: str) -> None:
    """The device declines the second message, as one that was started again does."""
    link = f.device_link(int(name[-1]))
    handle: Handle = link.handlers[name]

    def once(kind: str, round: int, shared: Any, own: Any) -> memoryview:
        if kind == "send" and round == 1:
            raise CoterieError("it was started again")
        return handle(kind, round, shared, own)

    link.handlers[name] = once


def spoiling(f: Federation, name: str) -> None:
    """The device sends a model with a tensor of the wrong shape."""

    def spoil(answer: Any) -> Any:
        if not isinstance(answer, SendAnswer) or answer.upload["fc1.bias"].isnan().any():
            return answer
        return SendAnswer(answer.client, {**answer.upload, "fc1.bias": torch.zeros(1)}, answer.samples)

    f.device_link(int(name[-1])).spoil[name] = spoil


def enlarging(f: Federation, name: str) -> None:
    """The device announces a small change and sends a model that is a thousand times as large as others."""

    def spoil(answer: Any) -> Any:
        if not isinstance(answer, SendAnswer):
            return answer
        return SendAnswer(answer.client, T.scaled(answer.upload, 1e4), answer.samples)

    f.device_link(int(name[-1])).spoil[name] = spoil


QUICK: list[tuple[Die, str, int]] = [
    (raising, "ecs-fl", 0), (raising, "ecs-fl-mended", 1), (spoiling, "ecs-fl", 1), (enlarging, "ecs-fl-mended", 0),
]  # fmt: skip
FAULTS = [
    pytest.param(die, words, name, edges, marks=() if (die, name, edges) in QUICK else pytest.mark.long)
    for die, words in [
        (raising, "it was started again"), (spoiling, "fc1.bias of shape"), (enlarging, "times as large"),
    ]
    for name in METHODS
    for edges in (0, 1, 2)
]  # fmt: skip


@pytest.mark.parametrize(("die", "words", "name", "edges"), FAULTS)
def test_another_device_is_called_if_a_chosen_one_fails(
    tmp_path: Path, die: Die, words: str, name: str, edges: int
) -> None:
    settings = {**QUIET, **METHODS[name], "rounds": 1}
    with federation(tmp_path / "a", name, edges, **settings) as f:
        assert f.loop.run()
        usual = asked_to_send(f, 1)
    with federation(tmp_path / "b", name, edges, **settings) as f:
        die(f, usual[0])
        assert f.loop.run()
        (event,) = events(tmp_path / "b/run")
        victim = int(usual[0][-1])
        assert event["failed"] == [victim] and words in event["reasons"][str(victim)]
        assert sum(event["facts"]["selected"]) == 2 and event["facts"]["selected"][victim] == 0
        if name == "ecs-fl":  # the nearest that remain: the one that was chosen, and the next
            sent = {i for i in range(5) for x in said(tmp_path / "b", i) if x["message"] == "send"} - {victim}
            assert {int(usual[1][-1])} < sent and len(sent) == 2
        again = without_failed(tmp_path / "again", f, {1: {victim}})
        assert codec.equal([f.loop.server, f.loop.edges], [again.server, again.edges])


def test_all_chosen_devices_may_fail_one_after_the_other(tmp_path: Path) -> None:
    with federation(tmp_path, "ecs-fl", **{**QUIET, **METHODS["ecs-fl"], "rounds": 1}) as f:
        for i in range(5):
            raising(f, f"device-{i}")
        f.loop.start()
        answers = f.runtime.run(plan(f.session.method, f.loop.server, {}, 1, Rules(seed=3, watch=False)))
        assert answers.missing.keys() == {0, 1, 2, 3, 4} and not answers.trained
        assert answers.merged[0].senders == () and answers.merged[0].up == {"selection": 5 * 4}


def test_a_device_holds_its_model_for_the_announced_round_only(tmp_path: Path) -> None:
    with federation(tmp_path, "ecs-fl-mended", **{**QUIET, **METHODS["ecs-fl-mended"]}) as f:
        assert f.loop.run()
        rounds = [x["round"] for i in range(5) for x in said(tmp_path, i) if x["message"] == "send"]
        assert sorted(set(rounds)) == [1, 2]
        found = f.runtime._call([0], 1)  # round 1 is over
        assert not found.answers and "is over or never comes" in found.missing[0]


ANY = replace(ALLOW, reveal=ANYTHING)  # any learning rate


def test_a_device_whose_training_diverged_declines_before_it_announces(tmp_path: Path) -> None:
    settings = {**QUIET, **METHODS["ecs-fl-mended"], "rounds": 1, "lr": 1e6, "epochs": 3}
    with federation(tmp_path, "ecs-fl-mended", allow=dict.fromkeys(range(5), ANY), **settings) as f:
        f.loop.start()
        answers = f.runtime.run(plan(f.session.method, f.loop.server, {}, 1, Rules(seed=3, watch=False)))
        assert answers.missing.keys() == {0, 1, 2, 3, 4}
        assert all("the upload made here has" in why for why in answers.missing.values())
        assert not [x for i in range(5) for x in said(tmp_path, i)]


def test_clients_without_an_edge_of_an_announcing_method_all_send(tmp_path: Path, monkeypatch: Any) -> None:
    def mean(self: ECSFL, server: Any, uploads: Any, round: int) -> Any:
        return {**server, "w": T.mean([T.untagged(u.tree) for u in uploads])}

    monkeypatch.setattr(ECSFL, "edges", lambda self, server: None)
    monkeypatch.setattr(ECSFL, "aggregate", mean)
    with federation(tmp_path, "ecs-fl", **QUIET, **METHODS["ecs-fl"]) as f:
        assert f.loop.run()
        simulation = simulated(tmp_path / "simulation", f.session)
        assert asked_to_send(f, 2) == [f"device-{i}" for i in range(5)]
    assert codec.equal([f.loop.server, f.loop.bytes], [simulation.server, simulation.bytes])


def test_a_model_that_comes_unasked_with_the_announcement_is_refused(tmp_path: Path) -> None:
    with federation(tmp_path, "ecs-fl-mended", **{**QUIET, **METHODS["ecs-fl-mended"], "rounds": 1}) as f:

        def spoil(answer: Any) -> Any:
            if not isinstance(answer, TrainAnswer):
                return answer
            return codec.deep_copy(TrainAnswer(
                answer.client, {**answer.upload, **f.session.method.ctx.w0}, answer.note, answer.samples, answer.steps,
                answer.loss, seen=answer.seen,
            ))  # fmt: skip

        f.link.spoil["device-3"] = spoil
        assert f.loop.run()
        (event,) = events(tmp_path / "run")
    assert event["failed"] == [3] and "not declared" in event["reasons"]["3"]


# ---- real processes --------------------------------------------------------------------------------------------------
REAL: dict[str, Any] = {
    **SMALL, "subset": 600, "rounds": 4, "eval_every": 4, "watch": False, "final_trained": False, "epsilon": 0,
}  # fmt: skip


def chosen_in(events: list[dict[str, Any]], round: int) -> list[int]:
    """The devices that were aggregated in a round."""
    counts = [[0] * 6, *(e["facts"]["selected"] for e in events)]
    return [i for i, (a, b) in enumerate(zip(counts[round - 1], counts[round], strict=True)) if b > a]


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("edges", "own"), [(0, {}), (2, {"n_edges": 2}), (1, {})])
def test_a_device_that_is_killed_when_it_is_called_is_replaced(
    tmp_path: Path, name: str, edges: int, own: dict[str, Any]
) -> None:
    """Six devices in real processes: wire, ledger and audit logs agree, and the replay has the same bits."""
    given = {**REAL, **METHODS[name], **own}
    alone = of_simulation(tmp_path / "simulation", name, 6, given)
    victim = chosen_in(events(alone.path), 2)[0]
    f = Paced(tmp_path, name, 6, edges, given=given, deadline=120.0, min_clients=4)  # it may begin with four devices
    f.modes = {f"device-{victim}": "dies"}
    with f:
        f.wait(400)
        assert f.children[f"device-{victim}"].wait(1) == 9
        found = f.events()
    died = max(x["round"] for x in audit_lines(f.state(victim)) if x["way"] == "out" and x["message"] == "train")
    assert victim in found[died - 1]["failed"] and victim not in chosen_in(found, died)
    assert len(chosen_in(found, died)) == (4 if own else 3)
    same_as_replay(f, tmp_path / "replay")
    wire = f.status()["wire"]["device-edge" if edges else "device-cloud"]["up"]["payload"]
    logs = [x for i in range(6) for x in audit_lines(f.state(i)) if x["way"] == "out" and x["message"] != "hello"]
    left = sum(n for x in logs for kind, n in x.get("sizes", {}).items() if kind in ("model", "statistic"))
    ledger = f.status()["ledger"]["device-edge"]["up"]
    assert left == ledger and 0 <= wire - ledger <= 4096 * len(logs)
