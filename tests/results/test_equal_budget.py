"""Counts of local training, equal budgets, and controls that train as much as a method."""

import math

import pytest

import coterie
from coterie.api import comparison_cells
from coterie.config import engine
from coterie.errors import CoterieError
from coterie.results.equal_budget import equalised, matched_controls

SMALL = {"clients": 3, "partition": "iid", "join": 1, "epochs": 1, "batch": 64, "eval_every": 4, "subset": 200}


def test_steps_and_samples_are_those_of_all_local_epochs(tmp_path) -> None:
    run = coterie.run("fedavg-ft", rounds=2, finetune_epochs=3, out=tmp_path / "r", workers=1, **SMALL)
    sizes = [len(run.session().federation.data(i).train) for i in range(3)]
    steps = sum(math.ceil(n / 64) for n in sizes)
    trained = run.work("personal")
    assert (trained["steps"], trained["samples"]) == (2 * steps, 2 * sum(sizes))
    adapted = run.work("adapted")
    assert (adapted["steps"], adapted["samples"]) == (5 * steps, 5 * sum(sizes))
    assert 0 < trained["cpu"] < run.rounds["seconds"].sum() + 1


def test_a_method_that_trains_twice_as_much_gets_half_of_the_rounds(tmp_path) -> None:
    cells = comparison_cells(["fedavg", "ditto"], "digits", None, 2, tmp_path, rounds=6, **SMALL)
    how = engine(workers=1)
    made = equalised(cells, tmp_path, how, "steps")
    assert {c.out.name: c.settings.rounds for c in made} == {
        "local-s0": 6, "local-s1": 6, "fedavg-s0": 6, "fedavg-s1": 6, "ditto-s0": 3, "ditto-s1": 3
    }  # fmt: skip
    assert not (tmp_path / "trial").exists()
    by_bytes = equalised(cells[:4], tmp_path / "b", how, "bytes")
    assert [c.settings.rounds for c in by_bytes] == [6] * 4  # Local-Only sends nothing and keeps its rounds
    assert equalised(cells, tmp_path, None, "steps") == made  # from the file, without a trial
    with pytest.raises(CoterieError, match="a different budget"):
        equalised(cells, tmp_path, how, "samples")
    with pytest.raises(CoterieError, match='unknown budget "hours"'):
        equalised(cells, tmp_path, how, "hours")


class Worked:
    def __init__(self, cell, samples, tuning=0):
        self.path, self.samples, self.tuning = cell.out, samples, tuning
        self.settings = {"method": cell.settings.method, "rounds": cell.settings.rounds, "seed": cell.settings.seed}

    def work(self, view=""):
        return {"samples": self.samples + (self.tuning if view == "adapted" else 0)}


def test_controls_are_matched_to_methods_that_train_more(tmp_path) -> None:
    cells = comparison_cells(["ditto", "fedavg-ft"], "digits", None, 1, tmp_path, rounds=10, **SMALL)
    local, ditto, tuned = cells
    runs = [Worked(local, 100), Worked(ditto, 300), Worked(tuned, 100, tuning=50)]
    added = matched_controls(runs, cells)
    assert [(c.settings.method, c.settings.rounds) for c in added] == [("local", 30), ("fedavg-ft", 25)]
    assert [c.out.name for c in added] == ["local-30-rounds-s0", "fedavg-ft-25-rounds-s0"]
    assert matched_controls([Worked(local, 100), Worked(ditto, 109), Worked(tuned, 100)], cells) == []
