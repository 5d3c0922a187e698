"""Results are the same in any process: nothing depends on Python's hash seed, on addresses or on the time."""

import json
import os
import subprocess
import sys

import pytest

from coterie.methods import method_names
from support.methods import METHODS

SCRIPT = """
import hashlib, json, sys, tempfile
from pathlib import Path
from coterie.engine import codec
from coterie.methods import find
from coterie.testing import Bench, decided

out = {}
for name in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as tmp:
        loop = Bench(find(name), {}).play(Path(tmp))
        parts = bytes(codec.pack(decided(loop))) + (Path(tmp) / "events.jsonl").read_bytes()
        out[name] = hashlib.sha256(parts).hexdigest()
print(json.dumps(out))
"""


def same_bits_in_two_processes(names: list[str]) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *names],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, two = (json.loads(p.communicate(timeout=800)[0].splitlines()[-1]) for p in processes)
    assert list(one) == list(two) == names
    assert not [name for name in names if one[name] != two[name]]


def test_some_methods_give_the_same_bits_in_another_process() -> None:
    same_bits_in_two_processes(["autopilot", "cfl", "ecs-fl", "fedcpmd", "fedgmh", "fedpc", "fedproto", "sc-fpfl"])


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_every_method_gives_the_same_bits_in_another_process(part: int) -> None:
    same_bits_in_two_processes([*METHODS, *(n for n in method_names() if n not in METHODS)][part::3])
