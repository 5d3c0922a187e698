"""A device that answers wrongly, a different way in every round; run as a process by test_federation_hostile.py."""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from coterie.runtimes.flower import plan
from coterie.runtimes.flower.device import Member, join
from coterie.runtimes.flower.transport import wire

HONEST = (1, 9)
WRONGS = {  # round -> what is wrong, and what the cloud must say
    2: ("nan", "NaN or infinity"),
    3: ("shape", "of shape"),
    4: ("type", "of type"),
    5: ("large", "larger than"),
    6: ("names", "other entries than declared|missing or unknown"),
    7: ("replay", "it is a reply of round 1, asked was round 7"),
    8: ("state", "unknown fields: state"),
}


def spoil(what: str, answer: dict[str, Any]) -> dict[str, Any]:
    tree = dict(answer["tree"])
    name = max(tree, key=lambda k: tree[k].numel())
    if what == "nan":
        tree[name] = torch.full_like(tree[name], float("nan"))
    elif what == "shape":
        tree[name] = tree[name][:-1]
    elif what == "type":
        tree[name] = tree[name].double()
    elif what == "large":
        tree["more"] = torch.zeros(10 * sum(v.numel() for v in tree.values()))
    elif what == "names":
        del tree[name]
    elif what == "state":
        return {**answer, "state": {"own": tree}}
    return {**answer, "tree": tree}


class Hostile(Member):
    def handle(self, kind: str, round: int, value: Any) -> Any:
        answer = super().handle(kind, round, value)
        return spoil(WRONGS[round][0], answer) if kind == "train" and round in WRONGS else answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["wrong", "version"])
    for name in ("--cloud", "--ca", "--key", "--data", "--state", "--client"):
        parser.add_argument(name, required=True)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if a.mode == "version":
        plan.source = lambda method: "another"
    content, kept = wire.content, {}

    def replaying(head: wire.Head, parts: Any) -> Any:
        made = content(head, parts)
        if head.kind == "train" and head.round in (1, 7):
            return kept.setdefault("first", made)  # in round 7 the answer of round 1 is sent again
        return made

    wire.content = replaying  # type: ignore[assignment]
    join(a.cloud, Path(a.ca), Path(a.key), Hostile(a.data, Path(a.state), int(a.client)))


if __name__ == "__main__":
    main()
