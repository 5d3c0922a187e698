"""Optimisers on lists of tensors: PyTorch's own update rules without its per-step bookkeeping."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

Step = Callable[[Sequence[Tensor | None]], None]
Memory = dict[str, list[Tensor | None]]  # an optimiser's state by kind, one entry per leaf


@dataclass(frozen=True)
class Optimiser:
    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    keep: bool = False  # True: the state lasts from one local training of a client to its next


def blank(rule: Optimiser, leaves: Sequence[Tensor]) -> Memory:
    """Return the memory before the first step."""
    if rule.kind != "sgd":
        return {
            "first": [torch.zeros_like(p) for p in leaves],
            "second": [torch.zeros_like(p) for p in leaves],
            "count": [torch.zeros(()) for _ in leaves],
        }
    return {"momentum": [None] * len(leaves)} if rule.momentum else {}


def stepper(
    rule: Optimiser, leaves: list[Tensor], decays: Sequence[float], lr: float, memory: Memory | None = None
) -> Step:
    """Return a function of gradients that updates `leaves` and `memory` in place; None keeps an entry of both."""
    memory = blank(rule, leaves) if memory is None else memory
    groups = [
        _group(rule, [i for i, d in enumerate(decays) if d == decay], leaves, lr, decay, memory)
        for decay in dict.fromkeys(decays)
    ]

    def step(gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            for g in groups:
                g(gradients)

    return step


def _group(rule: Optimiser, where: list[int], leaves: list[Tensor], lr: float, decay: float, memory: Memory) -> Step:
    if rule.kind == "sgd" and not rule.momentum:

        def plain(gradients: Sequence[Tensor | None]) -> None:
            moved = [(leaves[i], g) for i in where if (g := gradients[i]) is not None]
            if moved:
                targets, slopes = map(list, zip(*moved, strict=True))
                if decay:
                    slopes = list(torch._foreach_add(slopes, targets, alpha=decay))
                torch._foreach_add_(targets, slopes, alpha=-lr)

        return plain
    if rule.kind == "sgd":
        buffers = memory["momentum"]

        def heavy(gradients: Sequence[Tensor | None]) -> None:
            live = [i for i in where if gradients[i] is not None]
            mine = [buffers[i] for i in live]
            sgd(
                [leaves[i] for i in live],
                [g for i in live if (g := gradients[i]) is not None],
                mine,
                foreach=True,
                weight_decay=decay,
                momentum=rule.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            for i, m in zip(live, mine, strict=True):
                buffers[i] = m

        return heavy
    return _adam(adamw if rule.kind == "adamw" else adam, where, leaves, lr, decay, memory)


def _adam(
    update: Callable[..., None], where: list[int], leaves: list[Tensor], lr: float, decay: float, memory: Memory
) -> Step:
    first, second, count = (memory[k] for k in ("first", "second", "count"))

    def step(gradients: Sequence[Tensor | None]) -> None:
        live = [i for i in where if gradients[i] is not None]
        update(
            [leaves[i] for i in live],
            [g for i in live if (g := gradients[i]) is not None],
            [first[i] for i in live],
            [second[i] for i in live],
            [],
            [count[i] for i in live],
            foreach=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )

    return step
