"""Short runs of registered methods on the small data of `coterie.testing`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import testing
from coterie.core import tree as T
from coterie.core.method import Method, Upload
from coterie.core.tree import Tree
from coterie.engine.loop import Loop
from coterie.engine.session import Session
from coterie.methods import find
from support.toy import handed as handed
from support.toy import near as near
from support.toy import same as same
from support.toy import state as state

HEAD = {"classifier.weight", "classifier.bias"}
BN = {"bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"}
STATS = {"bn1.running_mean", "bn1.running_var"}
CLIENTS = range(5)  # ids of the clients of testing.Bench
FAST: dict[str, Any] = {"watch": False, "final_trained": False, "eval_every": 100, "checkpoint_every": 100}


def session(method: str | type[Method], model: nn.Module | None = None, **changes: Any) -> Session:
    """Return a session of the method; `own` holds the method's settings, `model` replaces the small net."""
    own = changes.pop("own", {})
    cls = find(method) if isinstance(method, str) else method
    net = testing.SmallNet if model is None else lambda: model
    return testing.Bench(cls, own, net).session(**{**FAST, **changes})


def plain() -> nn.Module:
    """Return the small net without batch norm."""
    torch.manual_seed(0)
    return testing.SmallNet(norm=False)


def play(method: str | type[Method], model: nn.Module | None = None, **changes: Any) -> Loop:
    """Run a method to the end."""
    loop, _ = watch(session(method, model, **changes))
    return loop


def watch(s: Session) -> tuple[Loop, list[list[Upload]]]:
    """Run a session to its end; return the loop and the uploads of each aggregation."""
    seen: list[list[Upload]] = []
    aggregate = s.method.aggregate

    def spy(server: Any, uploads: Sequence[Upload], round: int) -> Any:
        seen.append(list(uploads))
        return aggregate(server, uploads, round)

    setattr(s.method, "aggregate", spy)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        loop = testing.play(testing.open_loop(s, Path(folder)))
        loop.events = testing.events(Path(folder))  # type: ignore[attr-defined]
    return loop, seen


def traffic(loop: Loop, direction: str) -> list[float]:
    """Return the mean bytes of a participant in each round."""
    return [
        sum(e["bytes"].get("device-cloud", {}).get(direction, {}).values()) / len(e["participants"])
        for e in loop.events  # type: ignore[attr-defined]
    ]


def bound(method: str | type[Method], model: nn.Module | None = None, **changes: Any) -> Method:
    return session(method, model, **changes).method


def jittered(tree: Tree, seed: int, scale: float = 0.1) -> Tree:
    """Return the tree with random noise added."""
    rng = torch.Generator().manual_seed(seed)
    return {k: v + scale * torch.rand(v.shape, generator=rng) for k, v in tree.items()}


def upload(method: Method, sender: int, tree: Tree, samples: int = 10) -> Upload:
    return Upload(T.drop(tree, method.stays), {}, sender, samples)


def upload_tree(method: Method, seed: int) -> Tree:
    """Return the part of a random model that a client uploads."""
    return T.drop(jittered(method.ctx.w0, seed), method.stays)


def size(tree: Tree, names: set[str] | None = None) -> int:
    return sum(4 * v.numel() for k, v in tree.items() if names is None or k in names)
