"""Rounds continue without the senders of invalid answers, and the reason names the sender."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.engine import codec
from coterie.engine.messages import TrainAnswer
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import EdgeAnswer
from coterie.methods import find
from coterie.testing import events
from support.in_process_link import Federation, federation
from support.methods import PARAMETERS

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
BAD = 1  # number of the hostile device


def largest(tree: dict[str, torch.Tensor]) -> str:
    return max(tree, key=lambda k: tree[k].numel())


def filled(value: float, kind: Callable[[torch.Tensor], bool]) -> Change:
    def change(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: torch.full_like(v, value) if kind(v) else v for k, v in tree.items()}

    return change


def is_integer(v: torch.Tensor) -> bool:
    return v.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


WRONG: dict[str, Change] = {
    "ids of 99": filled(99, is_integer),
    "negative counts": filled(-5, is_integer),
    "huge values": filled(3e38, torch.is_floating_point),
    "wrong lengths": lambda tree: {k: torch.cat([v, v]) if v.ndim else v[None] for k, v in tree.items()},
    "empty rows": lambda tree: {k: v[:0] if v.ndim else v for k, v in tree.items()},
    "an entry too much": lambda tree: {**tree, "more": torch.zeros(3)},
    "an entry too few": lambda tree: {k: v for k, v in tree.items() if k != largest(tree)},
    "a different type": lambda tree: {k: v.double() for k, v in tree.items()},
    "nothing": lambda tree: {},
    "NaN": filled(float("nan"), torch.is_floating_point),
}


def lying(change: Change) -> Callable[[Any], Any]:
    def spoil(answer: Any) -> Any:
        if not isinstance(answer, TrainAnswer) or not answer.upload:
            return answer
        return replace(answer, upload=change(answer.upload))

    return spoil


def run_without_bad(f: Federation, folder: Path) -> list[dict[str, Any]]:
    """Run to the end; assert that only the hostile device failed, and that all states are finite. Return the events."""
    assert f.loop.run()
    rounds = events(folder / "run")
    assert [e["round"] for e in rounds] == list(range(f.loop.first, f.session.settings.rounds + 1))
    for e in rounds:
        assert set(e["failed"]) | set(e["nonfinite"]) <= {BAD}, e
    for v in codec.tensors_of([f.loop.server, f.loop.edges]):
        assert not v.is_floating_point() or not bool(torch.isinf(v).any() or (v.abs() > 1e6).any())
    return rounds


MERGED = ("fedpc", "fedgmh", "fedcpmd", "sc-fpfl", "ecs-fl", "fedproto", "cd2-pfed", "fedavg")


@pytest.mark.parametrize("edges", [0, 2])
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", MERGED)
def test_a_hostile_upload_stops_neither_cloud_nor_edge(tmp_path: Path, name: str, what: str, edges: int) -> None:
    with federation(tmp_path, name, edges, join=1.0, watch=False, final_trained=False) as f:
        f.device_link(BAD).spoil[f"device-{BAD}"] = lying(WRONG[what])
        rounds = run_without_bad(f, tmp_path)
        sender = f.runtime.membership.roster.entries[BAD].name
        if any(e["failed"] or e["nonfinite"] for e in rounds):
            assert all(f"{sender}: " in line for line in f.runtime.liveness.errors), f.runtime.liveness.errors
        else:  # the change does not affect this method's uploads
            assert what in ("ids of 99", "negative counts", "nothing", "empty rows")


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_method_refuses_uploads_with_huge_values(tmp_path: Path, name: str) -> None:
    """All values are too large, in the rounds that upload any."""
    full: dict[str, Any] = {"join": 1.0, "rounds": 2, "watch": False, "final_trained": False}
    with federation(tmp_path, name, **full) as f:
        change = lambda tree: filled(3e38, torch.is_floating_point)(filled(2**30, is_integer)(tree))  # noqa: E731
        f.link.spoil[f"device-{BAD}"] = lying(change)
        assert any(e["failed"] or e["nonfinite"] for e in run_without_bad(f, tmp_path)) or name == "local"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: replace(a, client=0), "the answer is of client 0, the request was for client 1"),
        (lambda a: replace(a, samples=10**9), "the hello reported"),
        (lambda a: replace(a, upload=[1]), "the field upload of a TrainAnswer"),
        (lambda a: {"client": 1}, "expected a TrainAnswer, got a dict"),
        (lambda a: None, "expected a TrainAnswer"),
        (lambda a: replace(a, note={"x": 1e300}), "in the note, 'x' is 1e"),
        (lambda a: replace(a, upload={"x": torch.zeros(10**7)}), "is larger than"),
    ],
)
def test_an_invalid_answer_is_refused_with_the_name_of_its_sender(tmp_path: Path, change: Any, reason: str) -> None:
    with federation(tmp_path, "fedrep", join=1.0, rounds=2) as f:
        f.link.spoil[f"device-{BAD}"] = lambda a: change(a) if isinstance(a, TrainAnswer) else a
        for e in run_without_bad(f, tmp_path):
            assert e["failed"] == [BAD]
            assert e["reasons"][str(BAD)].startswith(f"device-{BAD}: ") and reason in e["reasons"][str(BAD)]


@pytest.mark.parametrize("edges", [0, 2])
def test_counts_of_more_samples_than_the_sender_has_are_refused(tmp_path: Path, edges: int) -> None:
    """Such an upload would outweigh all others where prototypes are averaged by their counts."""
    own = {"partition": "rotate(2)", "join": 1.0, "rounds": 1, "watch": False, "final_trained": False}
    own["weighting"] = "samples"
    with federation(tmp_path, "fedpc", edges, **own) as f:
        change = lying(lambda tree: {k: torch.full_like(v, 999) if k == "x:counts" else v for k, v in tree.items()})
        f.device_link(BAD).spoil[f"device-{BAD}"] = change
        last = run_without_bad(f, tmp_path)[-1]
        assert last["failed"] == [BAD]
        assert re.search(r"counts \d+ samples in x:counts, its sender has \d+", last["reasons"][str(BAD)])


# ---- a hostile edge ----------------------------------------------------------------------------------------------
EDGE = "edge-0"  # hostile edge, with devices 0 and 1


def first(answer: EdgeAnswer, **changes: Any) -> EdgeAnswer:
    """Return the answer with a change in its first merged cluster."""
    if not answer.merged:
        return answer
    return replace(answer, merged=(replace(answer.merged[0], **changes), *answer.merged[1:]))


LIES: dict[str, tuple[Callable[[EdgeAnswer], Any], str]] = {
    "no answer": (lambda a: {}, "expected a"),
    "no merge": (lambda a: replace(a, merged=()), "it was not merged"),
    "a different edge": (lambda a: first(a, edge=7), "it was not merged"),
    "other clients": (lambda a: first(a, senders=(0, 1, 2, 3)), "merged from other clients"),
    "samples": (lambda a: first(a, samples=10**9), "a different number of samples"),
    "bytes": (lambda a: first(a, up=dict.fromkeys(a.merged[0].up, 2**50)), "are more than"),
    "negative bytes": (lambda a: first(a, down={"model": -1}), "unknown headings"),
    "headings": (lambda a: first(a, down={"x": 1}), "unknown headings"),
    "state": (lambda a: first(a, state={"x": torch.full((3,), float("inf"))}), "infinite or too large"),
    "upload": (lambda a: first(a, upload={k: v + 3e38 for k, v in a.merged[0].upload.items()} if a.merged else {}), ""),
    "empty": (lambda a: first(a, upload={}), "lacks|empty"),
    "a foreign client": (lambda a: replace(a, answers=tuple(replace(x, client=3) for x in a.answers)), "not asked"),
    "twice": (lambda a: replace(a, answers=(*a.answers, *a.answers)), "or answers twice"),
    "silence": (lambda a: replace(a, answers=(), missing={}), "gave no answer"),
    "wire": (lambda a: replace(a, wire=replace(a.wire, total_up=-1)), "impossible byte counts"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_hostile_edge_affects_only_its_own_devices(tmp_path: Path, what: str) -> None:
    change, reason = LIES[what]
    own = {"partition": "rotate(2)", "join": 1.0, "watch": False, "final_trained": False}
    with federation(tmp_path, "fedpc", 2, **own) as f:

        def spoil(answer: Any) -> Any:
            merging = isinstance(answer, EdgeAnswer) and answer.merged
            return change(answer) if merging else answer

        f.link.spoil[EDGE] = spoil
        assert f.loop.run()
        rounds = events(tmp_path / "run")
        assert [e["round"] for e in rounds] == [0, 1, 2, 3]
        failed = {i for e in rounds for i in e["failed"]}
        assert failed and failed <= {0, 1}, [e.get("reasons") for e in rounds]
        for v in codec.tensors_of([f.loop.server, f.loop.edges]):
            assert not v.is_floating_point() or not bool((v.abs() > 1e6).any())
        assert any(EDGE in line and re.search(reason, line) for line in f.runtime.liveness.errors), (
            f.runtime.liveness.errors
        )


@pytest.mark.parametrize("hook", ["relay", "merge"])
@pytest.mark.parametrize("edges", [0, 2])
def test_an_error_in_the_part_of_one_edge_affects_only_that_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, edges: int
) -> None:
    cls = find("ecs-fl")
    real = getattr(cls, hook)

    def fails(self: Any, edge: Any, *more: Any) -> Any:
        if edge.id == 0 and more[-1] == 2:
            raise IndexError("out of range")
        return real(self, edge, *more)

    monkeypatch.setattr(cls, hook, fails)
    with federation(tmp_path, "ecs-fl", edges, join=1.0, n_edges=2, watch=False, eval_every=3) as f:
        assert f.loop.run()
        rounds = {e["round"]: e for e in events(tmp_path / "run")}
    assert rounds[1]["failed"] == [] and rounds[3]["failed"] == []
    assert rounds[2]["failed"] and all("edge 0 could not be" in why for why in rounds[2]["reasons"].values())
    assert len(rounds[2]["failed"]) < 4


def test_accepted_answers_make_up_for_rare_refusals(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, after=3)
    for round in range(1, 100):  # refused in every tenth round
        if round % 10:
            quarantine.accept(["alice", "bob"])
        else:
            assert not quarantine.refuse("alice", round, "too large")
    assert quarantine.offenders["alice"].refusals == 9 and not quarantine.out
    assert [quarantine.refuse("alice", round, "too large") for round in (100, 101, 102)] == [False, False, True]
    quarantine.accept(["alice"])
    assert Quarantine(tmp_path).holds("alice")  # until it is released
    outcomes = []
    for round in range(1, 30):  # refused in every second round
        quarantine.accept(["mallory"])
        outcomes.append(quarantine.refuse("mallory", round, "too large"))
    assert outcomes.index(True) == 3
