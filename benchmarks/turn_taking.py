"""How contenders take turns: bench.py tells one of them at a time to do a round, and hears how long it took.

A contender waits for a line "round participant participant ..." and answers with a line of JSON. Nothing but the
standard library is used here, so that a peer may live in an environment of its own.
"""

import json
import sys
from pathlib import Path


def say(**what: object) -> None:
    print("@" + json.dumps(what), flush=True)


def next_round() -> tuple[int, list[int]] | None:
    """Which round, with whom; None when there are no more."""
    line = sys.stdin.readline().split()
    return (int(line[0]), [int(i) for i in line[1:]]) if line else None


def family(pid: int) -> list[int]:
    """A process and everything it started, as far as it still lives."""
    try:
        children = [c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(p for c in children for p in family(int(c)))]


def pss(pid: int) -> int:
    """Memory of a process and everything it started, in bytes; what several share is counted once."""
    total = 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total
