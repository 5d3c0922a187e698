"""Coterie on a real SuperLink and real SuperNodes, started by `flwr run`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.federation.replay import replay_differences
from coterie.flower.project import write_project
from coterie.storage.run_folder import EVENTS, read_evaluation, read_log

pytest.importorskip("flwr", reason="needs Flower: pip install 'coterie[flower]'")
from support.flower_processes import FlowerDeployment

SETTINGS: dict[str, Any] = {
    "data": "digits", "subset": 400, "clients": 4, "join": 1.0, "epochs": 1, "partition": "dirichlet(0.5)",
    "rounds": 10, "eval_every": 5,
}  # fmt: skip
ROUND_SECONDS = 120.0  # on a busy machine


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_personal_scores_through_flower_are_those_of_a_simulation(tmp_path: Path) -> None:
    """Three methods, one of them with an opening round, and a SuperNode that is killed and started again."""
    with FlowerDeployment(tmp_path, nodes=4) as flower:
        for method in ("fedrep", "ditto", "fedpc"):
            given, out = {"method": method, **SETTINGS}, tmp_path / "runs" / method
            write_project(tmp_path / method, given, {"min_clients": 4, "out": out})
            flower.run(tmp_path / method)
            if method == "ditto":
                flower.wait(out, ROUND_SECONDS * 4, round=2)
                flower.kill_node(3)
                flower.start_node(3)
            flower.wait(out, ROUND_SECONDS * 12)
            simulated = tmp_path / "simulated" / method
            coterie.run(**given, out=simulated, workers=1)
            events = read_log(out / EVENTS).rows
            assert [e["failed"] for e in events] == [[]] * len(events)
            for event, other in zip(events, read_log(simulated / EVENTS).rows, strict=True):
                assert ("evaluation" in event) == ("evaluation" in other)
                if "evaluation" in event:
                    scores, expected = read_evaluation(out, event), read_evaluation(simulated, other)
                    assert scores.keys() == expected.keys()
                    assert all(np.array_equal(v, expected[k], equal_nan=v.dtype.kind == "f") for k, v in scores.items())
            states = {i: flower.state(i) for i in range(4)}
            assert replay_differences(out, tmp_path / "again" / method, states) == []
