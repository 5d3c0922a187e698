"""A diverged model goes back to an earlier state, and the honest senders who report it are not blamed."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.config import settings
from coterie.engine import codec
from coterie.engine.messages import ScoreAnswer, TrainAnswer
from coterie.engine.round import RoundAnswers, RoundResult
from coterie.engine.session.combiner import weight_cap_of
from coterie.federation.cloud.divergence import DivergenceWatch
from coterie.federation.cloud.program import CloudSettings, known_samples, open_session
from coterie.storage.checkpoint import load_checkpoint
from coterie.storage.run_folder import checkpoints, round_of
from coterie.testing import events
from support.in_process_link import SMALL, federation

FULL: dict[str, Any] = {"join": 1.0, "rounds": 6, "watch": False, "final_trained": False, "eval_every": 6}


def in_rounds(rounds: set[int], change: Callable[[TrainAnswer], TrainAnswer]) -> Callable[[Any], Any]:
    """Change the answers of these rounds, counted by the device."""
    seen: list[int] = []

    def spoil(answer: Any) -> Any:
        if not isinstance(answer, TrainAnswer):
            return answer
        seen.append(1)
        return change(answer) if len(seen) in rounds else answer

    return spoil


def state_after(folder: Path, round: int) -> Any:
    path = next(p for p in checkpoints(folder) if round_of(p) == round)
    return load_checkpoint(path, "FedRep").server


SHARED_FAULTS: dict[str, tuple[Callable[[TrainAnswer], TrainAnswer], str]] = {
    "huge": (lambda a: replace(a, loss=1e300), "the training of 3 of 4 clients diverged"),
    "infinite": (lambda a: replace(a, loss=math.inf), "the training of 3 of 4 clients diverged"),
    "nan": (lambda a: replace(a, upload={k: v * math.nan for k, v in a.upload.items()}), "3 of 4 clients diverged"),
    "type": (lambda a: replace(a, upload={k: v.double() for k, v in a.upload.items()}), "3 of 4 answers have one"),
}


@pytest.mark.parametrize("what", [
    "huge", "type", *(pytest.param(what, marks=pytest.mark.long) for what in ("infinite", "nan")),
])  # fmt: skip
def test_a_fault_of_most_sets_the_model_back_and_blames_nobody(tmp_path: Path, what: str) -> None:
    change, says = SHARED_FAULTS[what]
    with federation(tmp_path, "fedrep", **FULL) as f:
        for i in (0, 1, 2):
            f.link.spoil[f"device-{i}"] = in_rounds({4, 5}, change)
        f.loop.folder.keep = 10
        assert f.loop.run()
        rounds = events(tmp_path / "run")
        assert [e["round"] for e in rounds] == [1, 2, 3, 4, 5, 6]
        assert [e.get("set_back_to") for e in rounds] == [None, None, None, 2, 1, None]
        after = {t: state_after(tmp_path / "run", t) for t in range(1, 7)}
        assert codec.equal(after[4], after[2])
        assert codec.equal(after[5], after[1])
        assert not codec.equal(after[6], after[1])
        assert f.runtime.quarantine.offenders == {}
        assert any(says in line for line in f.runtime.liveness.errors), f.runtime.liveness.errors


def test_a_diverged_first_round_starts_from_the_initial_model(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", **{**FULL, "rounds": 2}) as f:
        for i in range(4):
            f.link.spoil[f"device-{i}"] = in_rounds({1}, lambda a: replace(a, loss=math.nan))
        assert f.loop.run()
        assert [e.get("set_back_to") for e in events(tmp_path / "run")] == [0, None]
        assert codec.equal(state_after(tmp_path / "run", 1), f.session.method.setup())


def test_an_enormous_loss_of_one_sender_is_no_refusal(tmp_path: Path) -> None:
    def huge(answer: Any) -> Any:
        if isinstance(answer, ScoreAnswer):
            return replace(answer, scores={k: replace(s, loss=1e200) for k, s in answer.scores.items()})
        return replace(answer, loss=1e200) if isinstance(answer, TrainAnswer) else answer

    with federation(tmp_path, "fedrep", **{**FULL, "rounds": 3}) as f:
        f.link.spoil["device-1"] = huge
        assert f.loop.run()
        assert all(not e["failed"] and "set_back_to" not in e for e in events(tmp_path / "run"))
        assert f.runtime.quarantine.offenders == {}


def test_a_loss_is_enormous_only_beside_the_lowest_so_far() -> None:
    def answer(i: int, loss: float) -> TrainAnswer:
        return TrainAnswer(i, {}, {}, 10, 5, loss)

    def fault(watch: DivergenceWatch, losses: list[float]) -> str:
        result = RoundResult({}, {}, [], [], [], {}, {}, {})
        return watch.fault(RoundAnswers({i: answer(i, v) for i, v in enumerate(losses)}), result, str)

    watch = DivergenceWatch()
    assert fault(watch, [3e12, 4e12, 5e12]) == ""  # a regression without a scale
    assert fault(watch, [3e11, 4e11, 5e17]) == ""
    assert fault(watch, [3e10, 4e18, 5e18]) != ""
    assert fault(watch, [3e18, 4e18]) == ""  # too few to blame the model


def test_numbers_of_samples_are_checked_by_the_partition_or_capped() -> None:
    named = settings(method="fedavg", **SMALL)
    session = open_session(named, CloudSettings("none"))
    known = known_samples(session.federation)
    assert known is not None
    assert [known(i, 1) for i in range(4)] == session.federation.sizes("train").tolist()
    assert weight_cap_of(session.settings, session.federation) is None
    more = {k: v for k, v in SMALL.items() if k not in ("data", "subset", "public", "partition")}
    own = open_session(settings(method="fedavg", **more), CloudSettings("none", shape=(1, 8, 8), classes=10))
    assert known_samples(own.federation) is None
    assert weight_cap_of(own.settings, own.federation) == 10
    assert weight_cap_of(own.settings.model_copy(update={"weight_cap": 0}), own.federation) is None
    assert weight_cap_of(own.settings.model_copy(update={"weight_cap": 3}), own.federation) == 3


def test_a_device_that_claims_more_than_its_part_is_refused(tmp_path: Path) -> None:
    with federation(tmp_path, "fedavg", **{**FULL, "rounds": 2}) as f:
        f.runtime.admission.known_samples = lambda client, round: (
            f.session.federation.size(client, "train", round) + (client == 2)
        )
        assert f.loop.run()
        for e in events(tmp_path / "run"):
            assert e["failed"] == [2]
            assert "the partition gives client 2" in e["reasons"]["2"]


def test_a_median_protects_a_federation_from_one_liar_of_five(tmp_path: Path) -> None:
    """Without the median the model is destroyed."""

    def flipped(answer: Any) -> Any:
        if not isinstance(answer, TrainAnswer):
            return answer
        return replace(answer, upload={k: v if "running" in k else -v for k, v in answer.upload.items()})

    accuracy = {}
    for robust in (None, "median"):
        with federation(tmp_path / str(robust), "fedavg", **{**FULL, "clients": 5, "robust": robust}) as f:
            f.link.spoil["device-1"] = flipped
            torch.manual_seed(0)
            assert f.loop.run()
            accuracy[robust] = events(tmp_path / str(robust) / "run")[-1]["eval"]["personal/test"]["mean"]
            assert f.runtime.quarantine.offenders.keys() <= {"device-1"}
    assert accuracy["median"] > accuracy[None] + 0.1
