"""Runs with differential privacy of clients: participants, budget, ledger, resume, and what stays on a device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import config
from coterie.engine import codec
from coterie.engine.messages import Score, ScoreAnswer, TrainAnswer
from coterie.engine.round import Rules, plan
from coterie.engine.session import Callbacks, execute, prepare
from coterie.engine.session.resume import rebuild
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.fedavg import FedAvg
from coterie.privacy.budget import LEDGER, ClientBudget, append_line, count_lines
from coterie.privacy.device_side import DeviceSide
from coterie.privacy.setting import privacy_setting
from coterie.testing import Bench, decided, events
from coterie.testing.fixtures import open_loop, play
from support.short_runs import plain
from support.toy import bind, mlp

pytest.importorskip("opacus")
DP = "client(epsilon=20, clip=0.5)"
BENCH = Bench(FedAvg, {}, plain)
SMALL: dict[str, Any] = {
    "data": "digits", "subset": 300, "model": "mlp", "clients": 6, "partition": "iid", "epochs": 1, "eval_every": 2,
}  # fmt: skip


def test_every_client_takes_part_with_the_same_probability_and_rounds_may_be_empty() -> None:
    method = bind(FedAvg, model=mlp(), join=0.3)
    server, counts = method.setup(), np.zeros(5)
    plans = [plan(method, server, {}, t, Rules(0, poisson=True)) for t in range(1, 301)]
    for p in plans:
        counts[list(p.participants)] += 1
    assert ((counts > 60) & (counts < 120)).all()
    assert any(not p.participants for p in plans) and len({len(p.participants) for p in plans}) > 3
    secret = [plan(method, server, {}, 1, Rules(0, poisson=True, secret=True)).participants for _ in range(20)]
    assert len(set(secret)) > 1


def test_epsilon_is_in_every_event_and_equal_to_the_budget_at_the_end(tmp_path: Path) -> None:
    loop = BENCH.play(tmp_path, dp=DP, join=0.3, rounds=4)
    rows = events(tmp_path)
    spent = [row["privacy"]["epsilon"] for row in rows]
    assert spent == sorted(spent) and len(set(spent)) == 4
    assert 0.99 * 20 < spent[-1] <= 20
    assert rows[-1]["privacy"] == {**rows[0]["privacy"], "epsilon": spent[-1], "releases": 4}
    assert any(len(row["participants"]) != 2 for row in rows)
    assert torch.isfinite(loop.server["w"]["fc1.weight"]).all()


@pytest.mark.long
def test_workers_and_interruptions_do_not_change_a_bit(tmp_path: Path) -> None:
    dp = "client(sigma=1, clip=0.5, adaptive=0.5)"
    whole = decided(BENCH.play(tmp_path / "one", dp=dp, rounds=4))
    assert codec.equal(whole, decided(BENCH.play(tmp_path / "two", workers=2, dp=dp, rounds=4)))
    loop = open_loop(BENCH.session(dp=dp, rounds=4), tmp_path / "three")
    loop.start()
    loop.step()
    loop.step()
    loop.folder.timing(round=2, seconds=0.0)
    loop.checkpoint()
    loop.step()  # lost
    loop.runtime.close()
    loop.folder.close()
    again = open_loop(BENCH.session(dp=dp, rounds=4), tmp_path / "three")
    again.resume()
    assert again.budget is not None and again.budget.spent == 2
    assert codec.equal(whole, decided(play(again)))
    assert events(tmp_path / "three")[-1]["privacy"]["releases"] == 4


def test_a_run_ends_before_it_breaks_its_budget_and_cannot_be_extended(tmp_path: Path) -> None:
    given = config.settings("fedavg", **SMALL, rounds=9, dp="client(epsilon=8, sigma=1, clip=0.5)")
    session = prepare(given)
    assert execute(session, tmp_path / "run", Callbacks())
    rows = events(tmp_path / "run")
    last = rows[-1]
    assert last["round"] < 9 and "the privacy budget epsilon = 8 is spent" in last["ended"]
    assert last["privacy"]["epsilon"] <= 8 and "trained/test" in last["eval"]
    budget = ClientBudget(privacy_setting(given.dp or ""), session.method)
    assert budget.epsilon(last["round"] + 1) > 8
    with pytest.raises(CoterieError, match="ended early"):
        execute(rebuild(tmp_path / "run", rounds=12), tmp_path / "run", resume=True)


def test_a_round_that_a_federation_repeats_after_a_crash_is_counted_again(tmp_path: Path) -> None:
    method, setting, ledger = bind(FedAvg, model=mlp(), join=0.5), privacy_setting("client(sigma=2)"), tmp_path / LEDGER
    first = ClientBudget(setting, method, ledger)
    first.spend(0)  # an opening round releases nothing
    first.spend(1)
    first.spend(2)
    resumed = ClientBudget(setting, method, ledger)  # the cloud died after round 2 was sent, before its checkpoint
    resumed.go_to(1)
    resumed.spend(2)
    assert resumed.facts()["releases"] == 3
    assert resumed.facts()["epsilon"] == pytest.approx(resumed.epsilon(3), abs=1e-6) and first.spent == 2
    ledger.write_bytes(ledger.read_bytes() + b'{"round": 3')  # the disk was full
    append_line(ledger, {"round": 3})
    assert count_lines(ledger) == 5
    assert json.loads(ledger.read_text().splitlines()[0])["round"] == 1


def test_a_device_keeps_counts_losses_and_notes_unless_the_plan_says_that_they_leave() -> None:
    score = Score({"hits": torch.tensor([3]), "total": torch.tensor([5])}, 2.5)
    trained = TrainAnswer(0, {}, {"drift": 2.0}, 10, 5, 0.7, score, score)
    scored = ScoreAnswer(0, {"personal/test": score}, 10)
    device = DeviceSide(privacy_setting(DP), deployed=True)
    answer = device.trained(trained)
    assert answer.before is answer.after is None and not answer.note and answer.loss != answer.loss
    left = device.scored(scored).scores["personal/test"]
    assert left.loss == 0 and not any(v.any() for v in left.counts.values())
    for other in (DeviceSide(privacy_setting("client(epsilon=8, scores=True)"), True), DeviceSide(privacy_setting(DP))):
        assert other.trained(trained) is trained and other.scored(scored) is scored


@pytest.mark.parametrize(("method", "more", "words"), [
    ("ifca", {}, "needs a method that only averages uploads; IFCA needs single ones"),
    ("scaffold", {}, "SCAFFOLD needs single ones, of the model, c:"),
    ("fedproto", {}, "FedProto needs single ones"),
    ("fedavg", {"weighting": "samples"}, "weighting = samples would make one client count more"),
    ("fedavg", {"clients": 1}, "needs at least 2 clients"),
    ("fedavg", {"dp": "client(epsilon=0.001, sigma=1)"}, "one round with sigma = 1 costs more than epsilon"),
])  # fmt: skip
def test_what_cannot_be_protected_is_refused_before_any_work(method: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        prepare(config.settings(method, **{**SMALL, "rounds": 2, "dp": DP, **more}))


def test_noise_that_drowns_the_clients_is_said() -> None:
    session = prepare(config.settings("fedavg", **SMALL, rounds=2, dp="client(epsilon=1)"))
    assert any("times as long as the largest change that 3 clients can agree on" in s for s in session.warnings())


@pytest.mark.long
@pytest.mark.parametrize("dp", [DP, "example(epsilon=6, delta=1e-3)"])
def test_a_federation_writes_every_release_down_and_sends_no_scores(dp: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    import coterie

    given = {**SMALL, "clients": 3, "join": 1.0, "rounds": 2, "eval_every": 1, "dp": dp}
    run = coterie.run(
        "fedavg", given.pop("data"), given.pop("model"), runtime="federation", out=tmp_path / "run", **given
    )
    for row in run.events:
        assert not row["failed"] and row["eval"] == row["watch"] == row["notes"] == {} and row["loss"] is None
        assert row["privacy"]["releases"] == row["round"]
    ledgers = sorted((tmp_path / "run").rglob(LEDGER))
    assert [count_lines(p) for p in ledgers] == ([2] if dp == DP else [2, 2, 2])


def test_a_method_that_sends_nothing_spends_nothing(tmp_path: Path) -> None:
    """A comparison has Local-Only as a row."""
    loop = Bench(find("local"), {}, plain).play(tmp_path, dp=DP, rounds=1)
    assert loop.budget is None and loop.combiner is None and "privacy" not in events(tmp_path)[0]
