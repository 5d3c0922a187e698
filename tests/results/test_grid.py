"""Sweeps: finished runs are skipped, failed ones named, and killed ones resumed bit-identically."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.config import Engine, settings
from coterie.engine import provenance
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.results import grid as module
from coterie.results.grid import Cell, sweep
from coterie.results.run import Run
from coterie.storage.run_folder import Folder
from coterie.testing import SmallNet
from support import TESTS
from support.grid_cells import SMALL, cells


def test_a_broken_cell_is_reported_and_does_not_stop_the_others(tmp_path: Path) -> None:
    mine = cells(tmp_path)
    bad = [
        Cell(settings(method="fedavg", **{**SMALL, "data": "no-such-data"}), tmp_path / "gone"),
        Cell(settings(method="fedavg", **{**SMALL, "clients": 100_000}), tmp_path / "crowd"),
    ]
    status = sweep([bad[0], mine[0], bad[1], *mine[1:]], Engine(workers=2))
    assert set(status.failed) == {b.out for b in bad} and "no-such-data" in status.failed[bad[0].out]
    assert all("\n" not in reason for reason in status.failed.values())
    assert all(c.finished() for c in mine)


def test_data_are_loaded_once_and_finished_cells_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = module.load_dataset
    monkeypatch.setattr(module, "load_dataset", lambda *a: asked.append(a) or real(*a))
    seen: list[float | None] = []
    first = sweep(cells(tmp_path, 2), Engine(workers=2), lambda s: seen.append(s.seconds_left()))
    assert len(asked) == 1 and first.done() == first.total() == 6 and first.skipped == 0
    assert any(s is not None and s > 0 for s in seen) and seen[-1] == 0
    again = sweep(cells(tmp_path, 2), Engine(workers=2))
    assert again.skipped == 6 and len(asked) == 2  # loaded again, to see whether the data have changed
    with pytest.raises(CoterieError, match="different settings"):
        sweep(cells(tmp_path, 2, rounds=4), Engine(workers=2))


def test_a_finished_cell_without_its_last_checkpoint_is_computed_again(tmp_path: Path) -> None:
    mine = cells(tmp_path, 1)
    sweep(mine, Engine(workers=1))
    events = (mine[0].out / "events.jsonl").read_bytes()
    for path in (mine[0].out / "checkpoints").glob("*.state"):
        path.unlink()  # as if it had been killed between the last event and the last checkpoint
    assert not mine[0].finished() and not sweep(mine, Engine(workers=1)).failed
    assert (mine[0].out / "events.jsonl").read_bytes() == events and Run(mine[0].out).personal(0) is not None


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("changed", ["data", "method", "model"])
def test_cells_whose_data_or_code_have_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, finished: bool
) -> None:
    rng = np.random.default_rng(0)
    file, y = tmp_path / "mine.npz", np.arange(80) % 2
    np.savez(file, x=rng.normal(size=(80, 1, 8, 8)).astype(np.float32), y=y)
    mine = cells(tmp_path / "c", 1, data=str(file), partition="iid", model="coterie.testing:SmallNet")
    sweep([replace(mine[0], until=None if finished else 1)], Engine(workers=1))
    if changed == "data":
        np.savez(file, x=rng.normal(size=(80, 1, 8, 8)).astype(np.float32), y=y)
    else:
        edited, read = {"method": find("fedavg"), "model": SmallNet}[changed].__module__, provenance._read_module

        def reading(name: str) -> tuple[str, str] | None:
            module = read(name)
            return (f"{module[0]}\nX = 1\n", module[1]) if module is not None and name == edited else module

        monkeypatch.setattr(provenance, "_read_module", reading)
    words = f"the data of .* have changed|the code of the {changed} .* has changed"
    if finished:
        with pytest.raises(CoterieError, match=f"({words}).*; choose a new folder or remove it"):
            sweep(mine, Engine(workers=1))
    else:
        assert re.search(words, sweep(mine, Engine(workers=1)).failed[mine[0].out])


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.grid_cells import cells
from coterie.config import Engine
from coterie.results.grid import sweep
sweep(cells(Path({out!r}), 2, rounds=40, checkpoint_every=2), Engine(workers=2))
"""


def await_lock(folder: Path) -> None:
    """Wait until a killed cell has released its lock."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return Folder(folder).close()
        except CoterieError:
            assert time.monotonic() < deadline, f"{folder} is still locked"
            time.sleep(0.02)


def test_a_killed_sweep_continues_to_the_same_bits(tmp_path: Path) -> None:
    text = CHILD.format(tests=str(TESTS), out=str(tmp_path / "killed"))
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "killed").glob("*/checkpoints/*.state")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # the sweep and its cells
    process.wait()
    for s in ("s0", "s1"):
        await_lock(tmp_path / "killed" / s)
    wanted = {"rounds": 40, "checkpoint_every": 2}
    assert not sweep(cells(tmp_path / "killed", 2, **wanted), Engine(workers=2)).failed
    sweep(cells(tmp_path / "whole", 2, **wanted), Engine(workers=1))
    for s in ("s0", "s1"):
        assert Run(tmp_path / "killed" / s).finished
        same = [(tmp_path / w / s / "events.jsonl").read_bytes() for w in ("killed", "whole")]
        assert same[0] == same[1]


def test_a_stopped_sweep_reports_its_progress_and_continues(tmp_path: Path) -> None:
    mine = cells(tmp_path, 3)
    done = [0]

    def tell(status: module.SweepStatus) -> None:
        done[0] = status.done()

    first = sweep(mine, Engine(workers=1), tell, lambda: done[0] >= 3)
    assert 3 <= first.done() < 9
    assert sweep(mine, Engine(workers=1)).done() == 9 and all(c.finished() for c in mine)
