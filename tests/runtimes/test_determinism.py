"""Results are the same in any process: nothing depends on Python's hash seed, on addresses or on the time."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, json, sys, tempfile
from pathlib import Path
from coterie.engine import codec
from coterie.cli.words import parents
from coterie.methods import find, method_names
from coterie.testing import Bench, decided

out, above = {}, parents({name: find(name) for name in method_names()})
for name in (n for n in above if bool(above[n]) == (sys.argv[1] == "variants")):
    with tempfile.TemporaryDirectory() as tmp:
        loop = Bench(find(name), {}).play(Path(tmp))
        parts = bytes(codec.pack(decided(loop))) + (Path(tmp) / "events.jsonl").read_bytes()
        out[name] = hashlib.sha256(parts).hexdigest()
print(json.dumps(out))
"""


@pytest.mark.parametrize("which", ["methods", pytest.param("variants", marks=pytest.mark.long)])
def test_every_method_gives_the_same_bits_in_another_process(which: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, which],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, two = (json.loads(p.communicate(timeout=800)[0].splitlines()[-1]) for p in processes)
    assert one.keys() == two.keys() and len(one) > 20
    assert not [name for name in one if one[name] != two[name]]
