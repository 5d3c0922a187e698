"""A short version of benchmarks/day.py: after all its faults, a federation has the results of its replay."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytest.importorskip("grpc", reason="a federation needs the extra federation")

DAY = ROOT / "benchmarks" / "day.py"


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedrep", "sc-fpfl"])
def test_a_day_of_faults_ends_with_the_results_of_its_replay(tmp_path: Path, method: str) -> None:
    size = ["--behind", "4", "--direct", "4"]
    command = [sys.executable, str(DAY), "--method", method, "--out", str(tmp_path / "day"), *size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "equal to the replay, to the bit; no state was lost" in done.stdout
