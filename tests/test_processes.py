"""Results are the same in any process: nothing depends on Python's hash seed, on addresses or on the time."""

import json
import os
import subprocess
import sys

SCRIPT = """
import hashlib, json, sys, tempfile
from pathlib import Path
from coterie import codec
from coterie.methods import find, known
from coterie.testing import Bench, decided

out = {}
for name in known():
    with tempfile.TemporaryDirectory() as tmp:
        loop = Bench(find(name), {}).play(Path(tmp))
        parts = bytes(codec.pack(decided(loop))) + (Path(tmp) / "events.jsonl").read_bytes()
        out[name] = hashlib.sha256(parts).hexdigest()
print(json.dumps(out))
"""


def test_every_method_gives_the_same_bits_in_another_process() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    one, two = (json.loads(p.communicate(timeout=300)[0].splitlines()[-1]) for p in processes)
    assert one.keys() == two.keys() and len(one) > 30
    assert not [name for name in one if one[name] != two[name]]
