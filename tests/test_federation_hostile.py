"""Answers that do not fit are refused with a reason and the node's name, and the federation goes on without them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.runtimes.flower import processes
from coterie.runtimes.flower.local import Local
from coterie.runtimes.flower.processes import Child
from hostile import HONEST, WRONGS
from replay import same_as_replay

pytest.importorskip("flwr", reason="a federation needs the extra flower")
pytestmark = pytest.mark.long

ROUNDS = max(HONEST)
GIVEN: dict[str, Any] = {
    "data": "digits", "subset": 600, "model": "mlp", "partition": "dirichlet(0.5)", "join": 1.0, "epochs": 1,
    "rounds": ROUNDS, "eval_every": ROUNDS, "final_trained": False,
}  # fmt: skip


def test_wrong_answers_and_other_versions_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    f = Local(tmp_path / "federation", "fedrep", 4, 0, GIVEN, deadline=60, min_clients=3, late=(1, 3))
    with f:
        for i, mode in ((1, "wrong"), (3, "version")):
            argv = [sys.executable, str(Path(__file__).with_name("hostile.py")), mode, *f._device(i)[1:]]
            env = processes.bound({**processes.flower_env(f.folder / "flwr"), "OMP_NUM_THREADS": "1"})
            f.children[f"device-{i}"] = Child(f"device-{i}", argv, f.folder / "logs" / f"device-{i}.log", env).start()
        f.wait(300)
        log = f.children["cloud"].log.read_text()
    events = {e["round"]: e for e in f.events()}
    assert sorted(events) == list(range(1, ROUNDS + 1))
    for t, e in events.items():
        assert set(e["failed"]) == ({3} if t in HONEST else {1, 3}), (t, e.get("reasons"))
    for t, (what, sentence) in WRONGS.items():
        reason = events[t]["reasons"]["1"]
        assert "device-1" in reason and re.search(sentence, reason), (what, reason)
        assert reason.removeprefix("device-1: ") in log
    assert 'device-3 is not in the run: the method "fedrep" has other code here than at the cloud' in log
    assert not f.model(3).exists()
    same_as_replay(f, tmp_path / "replay")
