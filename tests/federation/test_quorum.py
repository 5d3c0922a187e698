"""The cloud's reaction to too few clients, errors in hooks and implausible uploads, in one process."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.config import settings
from coterie.core.method import ClientId
from coterie.engine import codec
from coterie.engine.fault_isolation import MethodFailedError, contain
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.errors import CoterieError
from coterie.federation.cloud import membership, waiting
from coterie.federation.cloud import status as st
from coterie.federation.cloud.dispatch import Dispatcher
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.cloud.status_file import StatusFile
from coterie.federation.cloud.upload_bounds import UsualSizes, judge_answers
from coterie.federation.cloud.waiting import QuorumError
from coterie.federation.policy import quarantine
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import Attached, Hello
from coterie.federation.transport import Cause, NodeReplies
from coterie.methods.fedavg import FedAvg
from coterie.runtimes.base import Interrupted
from coterie.testing import events
from support.in_process_link import Federation, HandLink, federation, simulated

QUIET: dict[str, Any] = {"join": 1.0, "watch": False, "final_trained": False, "eval_every": 9}
BAD = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(membership, "_RETURN", 0.0)


def rules(f: Federation, **changes: Any) -> None:
    f.runtime.waiting.rules = replace(f.runtime.waiting.rules, **changes)


def paused(f: Federation) -> list[str]:
    return [line for line in f.runtime.liveness.errors if line.startswith("paused")]


# ---- a quorum ------------------------------------------------------------------------------------------------------
def test_below_the_quorum_the_run_pauses_and_ends_after_the_longest_pause(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", **QUIET) as f:
        rules(f, min_clients=3, seconds=0.7)
        f.loop.start()
        f.loop.step()
        for i in (0, 1):
            del f.link.handlers[f"device-{i}"]
        with pytest.raises(QuorumError, match=r"too few clients for 0\.7 s: 2 of at least 3 clients are connected"):
            f.loop.step()
        assert [e["round"] for e in events(tmp_path / "run")] == [1] and f.loop.done == 1
        assert len(paused(f)) == 1 and f.runtime.waiting.paused


def test_a_paused_run_resumes_when_devices_return_and_can_be_stopped(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", **QUIET) as f:
        rules(f, min_clients=4)
        f.loop.start()
        f.loop.step()
        gone, looks = f.link.handlers.pop("device-1"), []
        nodes = f.link.nodes

        def back() -> list[str]:
            looks.append(f.runtime.waiting.paused)
            if len(looks) == 3:
                f.link.handlers["device-1"] = gone
            return nodes()

        f.link.nodes = back  # type: ignore[method-assign]
        assert f.loop.run()
        assert any(looks) and not f.runtime.waiting.paused and len(paused(f)) == 1
        simulation = simulated(tmp_path / "simulation", f.session)
        assert codec.equal(f.loop.server, simulation.server)
        assert (tmp_path / "run/events.jsonl").read_bytes() == (tmp_path / "simulation/events.jsonl").read_bytes()
        f.link.handlers.clear()
        rules(f, stopped=lambda: True)
        with pytest.raises(Interrupted):
            f.runtime.waiting.for_quorum()


def test_a_round_with_too_few_answers_is_repeated_with_identical_results(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", **QUIET) as f:
        rules(f, min_clients=4)
        handler, refusals = f.link.handlers["device-2"], []

        def late(kind: str, round: int, shared: Any, own: Any) -> memoryview:
            if kind == "train" and round == 2 and len(refusals) < 2:
                refusals.append(round)
                raise CoterieError("busy")
            return handler(kind, round, shared, own)

        f.link.handlers["device-2"] = late
        assert f.loop.run()
        assert refusals == [2, 2] and len(paused(f)) == 1
        assert any("round 2 is repeated: 3 of at least 4 clients count" in line for line in paused(f))
        simulated(tmp_path / "simulation", f.session)
    assert (tmp_path / "run/events.jsonl").read_bytes() == (tmp_path / "simulation/events.jsonl").read_bytes()


def test_absent_sampled_clients_do_not_stop_a_run_with_a_quorum(tmp_path: Path) -> None:
    """Half of the clients are sampled. A round of absent clients passes, because enough others are connected."""
    with federation(tmp_path, "fedavg", **{**QUIET, "join": 0.5, "rounds": 6}) as f:
        rules(f, min_clients=2)
        for i in (0, 1):
            del f.link.handlers[f"device-{i}"]
        assert f.loop.run()
        assert [e["round"] for e in events(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("shape", [(), (1, 4, 4)])
def test_a_quorum_that_can_never_be_reached_is_refused(shape: tuple[int, ...]) -> None:
    chosen = settings(method="fedavg", data="digits", subset=100, clients=2, model="mlp")
    with pytest.raises(CoterieError, match="min_clients = 3 can never be reached: there are 2 places"):
        open_session(chosen, CloudSettings("none", min_clients=3, shape=shape, classes=3))


# ---- errors in hooks -----------------------------------------------------------------------------------------------
def ones(*ids: ClientId) -> list[frozenset[ClientId]]:
    return [frozenset({i}) for i in ids]


def failing(test: Callable[[set[int]], bool]) -> Callable[[frozenset[int]], set[int]]:
    def compute(left_out: frozenset[int]) -> set[int]:
        there = {0, 1, 2, 3} - left_out
        if there and test(there):
            raise IndexError("out of range")
        return there

    return compute


def test_the_sender_that_causes_an_error_is_identified() -> None:
    groups = ones(0, 1, 2, 3)
    fine = contain(groups, failing(lambda there: False))
    assert fine.result == {0, 1, 2, 3} and not fine.left_out
    one = contain(groups, failing(lambda there: 2 in there))
    assert (one.left_out, one.certain, one.result) == ((frozenset({2}),), True, {0, 1, 3})
    mixed = contain(groups, failing(lambda there: 0 in there and len(there) > 1))
    assert mixed.left_out == (frozenset({0}),) and mixed.certain, "it fails only together with others"
    two = contain(groups, failing(lambda there: bool(there & {1, 3})))
    assert two.left_out == (frozenset({1}), frozenset({3})) and two.result == {0, 2}
    pair = contain(groups, failing(lambda there: {1, 2} <= there))
    assert pair.left_out == (frozenset({1}),) and not pair.certain, "either could be the cause"
    with pytest.raises(IndexError):
        contain(groups, failing(lambda there: True))


@pytest.mark.parametrize("hook", ["aggregate", "facts", "down"])
def test_a_sender_that_causes_errors_in_a_hook_is_refused_and_later_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """The error is raised when the upload is aggregated, or when the new server state is used."""
    aggregate = FedAvg.aggregate

    def marked(self: Any, server: Any, uploads: Any, round: int) -> Any:
        bad = any(float(u.tree["fc1.weight"][0, 0]) == 0.125 for u in uploads)
        if bad and hook == "aggregate":
            raise IndexError("index 99 is out of range")
        return {**aggregate(self, server, uploads, round), **({"bad": 1} if bad else {})}

    def fails(real: Any) -> Any:
        def hooked(self: Any, server: Any, *more: Any) -> Any:
            if "bad" in server:
                raise IndexError("index 99 is out of range")
            return real(self, server, *more)

        return hooked

    monkeypatch.setattr(FedAvg, "aggregate", marked)
    if hook != "aggregate":
        monkeypatch.setattr(FedAvg, hook, fails(getattr(FedAvg, hook)))

    def spoil(answer: Any) -> Any:
        if not isinstance(answer, TrainAnswer):
            return answer
        w = answer.upload["fc1.weight"].clone()
        w[0, 0] = 0.125
        return replace(answer, upload={**answer.upload, "fc1.weight": w})

    with federation(tmp_path, "fedavg", **{**QUIET, "rounds": 5}) as f:
        f.runtime.quarantine.after = 2
        f.link.spoil["device-1"] = spoil
        f.loop.start()
        for _ in range(4):
            f.loop.step()
        rounds = events(tmp_path / "run")
        assert [e["failed"] for e in rounds] == [[BAD]] * 4
        assert (
            rounds[0]["reasons"]["1"] == "device-1: FedAvg failed on the upload: IndexError: index 99 is out of range"
        )
        assert rounds[2]["reasons"]["1"] == "device-1: it is in quarantine"
        asked = {t for kind, name, t, _ in f.link.sizes if kind == "train" and name == "device-1"}
        assert asked == {1, 2} and "device-1" in f.runtime.membership.excluded
        del f.link.spoil["device-1"]
        (tmp_path / "run/cloud.json").write_text("{}")
        with pytest.raises(CoterieError, match='did you mean "device-1"'):
            quarantine.release_sender(tmp_path / "run", "device-2")
        quarantine.release_sender(tmp_path / "run", "device-1")
        assert f.loop.run()
        assert events(tmp_path / "run")[-1]["failed"] == [] and f.runtime.membership.excluded == {}
        with pytest.raises(CoterieError, match="no sender is in quarantine"):
            quarantine.release_sender(tmp_path / "run", "device-1")


def test_an_error_that_no_sender_causes_ends_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, server: Any, uploads: Any, round: int) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(FedAvg, "aggregate", broken)
    reason = "FedAvg failed in round 1, whoever is left out: ZeroDivisionError: division by zero"
    with federation(tmp_path, "fedavg", **QUIET) as f, pytest.raises(MethodFailedError, match=reason):
        f.loop.run()
    assert not f.runtime.quarantine.offenders, "no sender is counted"


# ---- bounds --------------------------------------------------------------------------------------------------------
def round_of(changes: dict[int, float], samples: dict[int, int] | None = None) -> Any:
    sent = {"w": torch.ones(100), "b": torch.zeros(3)}
    requests = [TrainRequest(i, 1, shared=sent) for i in changes]
    answers = {
        i: TrainAnswer(i, {"w": sent["w"] + c, "b": sent["b"] + c}, {}, (samples or {}).get(i, 10), 1, 0.0)
        for i, c in changes.items()
    }
    return requests, answers


def test_only_an_upload_far_larger_than_the_others_is_refused() -> None:
    for size in (10.0, 1e8, 3e38):
        judged = judge_answers(*round_of({0: 0.1, 1: size, 2: 0.02, 3: 0.5}), factor=50.0, usual=UsualSizes())
        assert judged.refused.keys() == {1} and "times as large as usual" in judged.refused[1]
    honest = {0: 0.1, 1: 0.0, 2: 0.0, 3: 1.5, 4: 0.0}  # stragglers send their download back
    assert not judge_answers(*round_of(honest), factor=50.0, usual=UsualSizes()).refused
    assert not judge_answers(*round_of({0: 0.1, 1: 1e8, 2: 0.02}), factor=0.0, usual=UsualSizes()).refused
    tiny = {0: 1e-9, 1: 1e-9, 2: 1e-9, 3: 0.01}  # a change by a hundredth of the model is never too large
    assert not judge_answers(*round_of(tiny), factor=50.0, usual=UsualSizes()).refused


def test_with_two_clients_the_usual_size_comes_from_earlier_rounds() -> None:
    memory = UsualSizes()
    assert not judge_answers(*round_of({0: 0.1, 1: 10.0}), factor=50.0, usual=memory).refused
    first = judge_answers(*round_of({0: 0.1, 1: 1e8}), factor=50.0, usual=memory)
    assert first.refused.keys() == {1} and "as what was sent" in first.refused[1]
    for t in (1, 2, 3):
        memory.add(t, judge_answers(*round_of({0: 0.1, 1: 0.2}), 50.0, memory).usual([0, 1]))
    assert judge_answers(*round_of({0: 0.1, 1: 10.0}), factor=50.0, usual=memory).refused.keys() == {1}
    memory.add(2, {"w": 1.0})
    assert sorted(memory.rounds) == [1, 2], "a run that went back forgets later rounds"


def test_a_claim_of_implausibly_many_samples_is_refused() -> None:
    judged = judge_answers(*round_of({0: 0.1, 1: 0.1, 2: 0.1}, {1: 10**9}), factor=50.0, usual=UsualSizes())
    assert judged.refused == {1: "it claims 1000000000 samples, more than 1000 times the median of this round"}


def test_a_hostile_client_is_quarantined_and_honest_clients_are_not(tmp_path: Path) -> None:
    def huge(answer: Any) -> Any:
        if not isinstance(answer, TrainAnswer):
            return answer
        return replace(answer, upload={k: v + 1e8 for k, v in answer.upload.items() if v.is_floating_point()})

    with federation(tmp_path, "fedavg", **{**QUIET, "rounds": 4}) as f:
        f.link.spoil["device-1"] = huge
        assert f.loop.run()
        rounds = events(tmp_path / "run")
        assert [e["failed"] for e in rounds] == [[BAD]] * 4 and not any(e["nonfinite"] for e in rounds)
        assert "device-1: the upload is" in rounds[0]["reasons"]["1"]
        assert f.runtime.quarantine.out.keys() == {"device-1"}
        again = Quarantine(tmp_path / "run")
        assert again.out == f.runtime.quarantine.out and again.memory.rounds.keys() == {1, 2, 3, 4}
        assert all(float(v.abs().max()) < 1e3 for v in codec.tensors_of(f.loop.server) if v.is_floating_point())


def test_a_device_with_changed_data_is_greeted_again(tmp_path: Path) -> None:
    """An answer with a number of samples that was not announced is refused; after a new hello it is accepted."""
    with federation(tmp_path, "fedavg", **QUIET) as f:
        f.loop.start()
        f.runtime.membership.update()
        entry = f.runtime.membership.roster.entries[BAD]
        f.runtime.membership.roster.entries[BAD] = replace(entry, hello=Hello(BAD, entry.hello.samples + 7))
        assert f.loop.run()
        assert [e["failed"] for e in events(tmp_path / "run")] == [[BAD], [], []]


# ---- the status ----------------------------------------------------------------------------------------------------
def test_the_status_shows_the_state_and_the_reason_of_a_failure(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", **QUIET) as f:
        status = StatusFile(tmp_path / "status.json", f.session)
        status.watch(f.runtime)
        f.runtime.liveness.changed = status.publish
        f.runtime.membership.update()
        assert st.read_status(tmp_path)["state"] == "waiting"
        rules(f, min_clients=5, seconds=0.1)
        f.runtime.membership.begun = True
        with pytest.raises(QuorumError) as e:
            f.runtime.waiting.for_quorum()
        status_now = st.read_status(tmp_path)
        assert (status_now["state"], status_now["reason"]) == ("paused", "4 of at least 5 clients are connected")
        f.runtime.waiting.paused = ""
        f.runtime.membership.update()
        assert st.read_status(tmp_path)["state"] == "running"
        status.end("failed", str(e.value))
    status_now = st.read_status(tmp_path)
    assert (
        status_now["state"] == "failed"
        and status_now["reason"].startswith("too few clients")
        and st.state_of(status_now) == "failed"
    )
    assert "too few clients" in "\n".join(st.status_lines(status_now))


def test_a_dead_cloud_is_not_shown_as_running(tmp_path: Path) -> None:
    about = {"state": "running", "round": 3, "rounds": 9, "time": time.time(), "pid": os.getpid(), "clients": {}}

    def shown(**changes: Any) -> str:
        (tmp_path / "status.json").write_text(json.dumps({**about, **changes}))
        return st.state_of(st.read_status(tmp_path))

    old = {"heartbeat": time.time() - 600}
    assert shown() == "running"
    assert shown(**old) == "silent (last heartbeat 10 minutes ago)"
    assert shown(**old, pid=2**22 + 1) == "dead (last heartbeat 10 minutes ago)"
    assert shown(**old, host="elsewhere") == "dead (last heartbeat 10 minutes ago)"
    assert shown(**old, state="ended") == "ended"
    with pytest.raises(CoterieError, match=r"has no status\.json"):
        st.read_status(tmp_path / "none")


# ---- the end -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("edges", [0, 2])
def test_devices_and_edges_learn_that_the_run_has_ended(
    tmp_path: Path, edges: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), federation(tmp_path, "fedrep", edges, **{**QUIET, "watch": True}) as f:
        handlers = [h.__self__ for link in (f.link, *f.links.values()) for h in link.handlers.values()]  # type: ignore[attr-defined]
        ended: list[int] = []
        for i, handler in enumerate(handlers):
            handler.ended = lambda i=i: ended.append(i)
        assert f.loop.run()
    assert sorted(ended) == list(range(4 + edges))
    lines = [r.getMessage() for r in caplog.records if r.name == "coterie.device"]
    assert any("round 2 of 3: trained, accuracy" in line for line in lines)
    assert any("after round 3 of 3: personal model, accuracy" in line for line in lines)
    assert sum("has ended after 3 rounds; the personal model is" in line for line in lines) == 4


# ---- edges that are slow to answer -----------------------------------------------------------------------------------
@dataclass
class SlowLink(HandLink):
    """Nodes in `mute` do not answer `send`, and answer an open exchange when they are removed from `mute`."""

    sent: list[list[str]] = field(default_factory=list)

    def send(self, payloads: Any, *more: Any, **named: Any) -> NodeReplies:
        self.sent.append(sorted(payloads))
        return super().send(payloads, *more, **named)

    def begin(self, payloads: Any, kind: str, round: int, deadline: float, *more: Any) -> Any:
        link = self

        class Open:
            def __init__(self) -> None:
                self.waiting = set(payloads)

            def poll(self) -> NodeReplies:
                now = {n: payloads[n] for n in self.waiting - link.mute}
                self.waiting -= now.keys()
                return HandLink.send(link, now, kind, round, deadline, *more)

        return Open()


def test_a_late_edge_is_included_as_soon_as_it_answers() -> None:
    """This also holds for an edge that was killed and reconnected before the cloud noticed."""
    hello = codec.pack(Attached({"alice": Hello(0, 5)}, {}))
    link = SlowLink({"north": lambda *_: hello, "south": lambda *_: hello}, mute={"north"})
    dispatcher = Dispatcher(link, "", "", None)  # type: ignore[arg-type]
    hellos, errors = dispatcher.greet_edges({"north", "south"})
    assert list(hellos) == ["south"] and errors["north"].cause is Cause.LATE
    assert list(dispatcher.greet_edges({"north", "south"})[0]) == ["south"]
    assert link.sent == [["north", "south"], ["south"]]  # the second call does not wait for north
    link.mute.clear()
    assert list(dispatcher.greet_edges({"north", "south"})[0]) == ["north", "south"]
    assert list(dispatcher.greet_edges({"north", "south"})[0]) == ["north", "south"] and link.sent[-1] == [
        "north",
        "south",
    ]
