"""Successive halving: promotion of trials, their cost, and the result of a killed search."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import coterie
from coterie import testing
from coterie.cli import app
from coterie.errors import CoterieError
from coterie.results.search import Budget, SearchPlan

FEW = {"clients": 4, "epochs": 5, "join": 1.0, "partition": "iid", "workers": 1, "val_share": 0.3}
SPACE = {"lr": [0.0001, 0.2], "mu": [0.01, 1.0]}


def test_a_plan_halves_and_counts_rounds() -> None:
    plan = SearchPlan.of(9, 27, 3)
    assert plan.rounds == (3, 9, 27) and plan.trials == (9, 3, 1) and plan.cost == 27 + 18 + 18
    assert SearchPlan.of(1, 20, 3) == SearchPlan((20,), (1,))
    assert SearchPlan.of(8, 20, 2).rounds == (2, 4, 8, 20) and SearchPlan.of(8, 20, 2).trials == (8, 4, 2, 1)
    assert SearchPlan.of(9, 27, 3).cost * 3 <= 9 * 27
    assert Budget(rounds=63).fits(20, 27) == 9 and Budget(trials=4).fits(9, 27) == 4
    assert SearchPlan.of(9, 27, 3).cost == 63 < SearchPlan.of(10, 27, 3).cost
    with pytest.raises(CoterieError, match="less than the 27 rounds of one trial"):
        Budget(rounds=20).fits(9, 27)


def digest(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("events.jsonl"))}


def rounds_done(folder: Path) -> int:
    return sum(log.count(b"\n") for log in digest(folder).values())


def test_the_winner_is_bit_identical_to_a_single_run(tmp_path: Path) -> None:
    data = testing.small_data(200)
    found = coterie.tune(
        "fedprox", data, "mlp", space=SPACE, rounds=4, eta=2, eval_every=3, out=tmp_path / "t", **FEW
    )  # trials are evaluated at each step, whatever eval_every is
    assert found.complete and found.plan.rounds == (1, 2, 4) and found.plan.trials == (4, 2, 1)
    assert found.spent == 4 * 1 + 2 * 1 + 1 * 2 and found.whole == 16
    first = {i: v[1] for i, v in found.values.items()}
    second = [i for i, v in found.values.items() if 2 in v]
    assert len(first) == 4 and min(first[i] for i in second) >= max(first[i] for i in first if i not in second)
    best = found.best
    assert best is not None and best.chosen["lr"] == 0.2
    alone = coterie.run("fedprox", data, "mlp", out=tmp_path / "alone", rounds=4, eval_every=1, watch=False,
                        final_trained=False, checkpoint_every=1, **{**FEW, **best.chosen})  # fmt: skip
    assert (alone.path / "events.jsonl").read_bytes() == (best.cell.out / "events.jsonl").read_bytes()
    frame = found.frame()
    assert frame.index[0] == best.number and frame["rounds"].tolist() == [4, 2, 1, 1]
    assert (tmp_path / "t" / "tune.png").exists() and "--lr 0.2" in found.command()
    before = digest(tmp_path / "t")
    again = coterie.tune("fedprox", data, "mlp", space=SPACE, rounds=4, eta=2, eval_every=3, out=tmp_path / "t", **FEW)
    assert again.frame().equals(frame) and digest(tmp_path / "t") == before


def test_a_subset_of_the_combinations_is_drawn_by_the_seed(tmp_path: Path) -> None:
    data, tried = testing.small_data(200), set()
    for seed in (0, 1):
        few = {**FEW, "epochs": 1, "rounds": 1, "trials": 1, "seed": seed}
        found = coterie.tune("fedprox", data, "mlp", space=SPACE, out=tmp_path / str(seed), **few)
        (number,) = found.values
        assert found.best is not None and found.best.number == number and found.spent == 1
        tried.add(number)
    assert tried != {0}


def test_mistakes_are_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = testing.small_data(200)

    def tried(sentence: str, methods: object = "fedprox", space: object = SPACE, **more: object) -> None:
        with pytest.raises(CoterieError, match=sentence):
            coterie.tune(methods, data, "mlp", space=space, out=tmp_path / "t", **{"rounds": 2, **FEW, **more})

    tried('unknown setting "lrr"; did you mean "lr"', space={"lrr": [1, 2]})
    tried('unknown setting "nu"', space={"nu": [1, 2]})
    tried("no client has any", val_share=0.0)
    tried("a setting that is searched has a list", space={"lr": 3})
    tried("it is the same for all trials", space={"seed": [1, 2]})
    tried("eta = 1 is invalid", eta=1)
    tried('unknown sampler "optun"; did you mean "optuna"', sampler="optun")
    tried("is named twice", methods=["fedprox", "fedprox"])
    tried("FedProx: mu = -1 is invalid", space={"mu": [0.1, -1]})
    tried("budget = 0 is invalid", budget=0)
    tried('unknown model "ml"', space={"model": ["mlp", "ml"]})
    tried("no client has any", space={"val_share": [0.1, 0.0]})
    tried("lr has the value 0.1 twice", space={"lr": [0.1, 0.1]})
    tried("eval_every cannot be searched", space={"eval_every": [1, 2]})
    tried("stop_after cannot be set", stop_after=2)
    tried("stop_at cannot be set", stop_at=0.9)
    monkeypatch.setitem(sys.modules, "optuna", None)
    tried(r"needs a package: pip install 'coterie\[tune\]'", sampler="optuna")
    assert not (tmp_path / "t").exists()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "settings.json").touch()
    tried("is the folder of a run")
    (tmp_path / "t" / "settings.json").unlink()
    with pytest.raises(CoterieError, match="give values to choose from"):
        app.app(["tune", "fedprox", "--out", str(tmp_path / "t")], standalone_mode=False)


COMMAND = ["tune", "fedprox", "fedper", "--set", "lr=0.01,0.1,0.3", "--set", "mu=0.01,1.0", "--rounds", "18",
           "--clients", "6", "--epochs", "1", "--model", "mlp", "--workers", "2", "-q"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["grid", "optuna"])
def test_a_killed_search_ends_with_the_same_result(sampler: str, tmp_path: Path) -> None:
    if sampler == "optuna":
        pytest.importorskip("optuna")
    call = [sys.executable, "-m", "coterie", *COMMAND, "--sampler", sampler, "--trials", "7"]
    subprocess.run([*call, "--out", tmp_path / "whole"], check=True)
    for kill in (1, 2, 3):
        process = subprocess.Popen([*call, "--out", tmp_path / "killed"], start_new_session=True)
        while rounds_done(tmp_path / "killed") < kill * rounds_done(tmp_path / "whole") // 4:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*call, "--out", tmp_path / "killed"], check=True)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    for name in ("best.json", "table.csv"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
