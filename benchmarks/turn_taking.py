"""The protocol of contenders: bench.py asks one of them at a time for a round, and gets its duration.

A contender waits for a line "round participant participant ..." and answers with a line of JSON. This module uses the
standard library only, so that a peer may have its own environment.
"""

import json
import sys
from pathlib import Path


def say(**answer: object) -> None:
    """Send an answer."""
    print("@" + json.dumps(answer), flush=True)


def next_round() -> tuple[int, list[int]] | None:
    """Return the next round and its participants, or None after the last round."""
    line = sys.stdin.readline().split()
    return (int(line[0]), [int(i) for i in line[1:]]) if line else None


def family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    try:
        children = [c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(p for c in children for p in family(int(c)))]


def pss(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes; shared memory is counted once."""
    total = 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total
