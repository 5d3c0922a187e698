"""Optimisers of the server: a stage of the combiner that moves the parameters of the combined upload.

The mean change of the parameters in a round is the gradient of the server. FedAvgM: Hsu et al., 2019, arXiv
1909.06335. FedAdagrad, FedAdam and FedYogi: Reddi et al., ICLR 2021, arXiv 2003.00295, Algorithm 2, without bias
correction and with v = tau^2 before the first round.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core.calls import WrittenCall, bind_call, parse_calls
from coterie.core.method import Method, Upload
from coterie.core.tree import Tree
from coterie.engine.combining import Memory, moved_names, title_of
from coterie.errors import CoterieError


# ---- rules: (change, memory of one entry) -> (step, memory), with the parameters that the setting gives --------------
def _fedavgm(lr: float = 1.0, momentum: float = 0.9, *, change: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m = momentum * m + change
    return lr * m, m, v


def _adaptive(second: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def rule(
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        *,
        change: Tensor,
        m: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, ...]:
        m = beta1 * m + (1 - beta1) * change
        v = second(v, change.square(), beta2)
        return lr * m / (v.sqrt() + tau), m, v

    return rule


def _adagrad(lr: float = 0.01, tau: float = 1e-3, *, change: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    v = v + change.square()
    return lr * change / (v.sqrt() + tau), m, v


RULES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "fedavgm": _fedavgm,
    "fedadagrad": _adagrad,
    "fedadam": _adaptive(lambda v, d, beta: beta * v + (1 - beta) * d),
    "fedyogi": _adaptive(lambda v, d, beta: v - (1 - beta) * d * torch.sign(v - d)),
}


@cache
def _call(text: str) -> WrittenCall:
    return parse_calls("server_optimizer", text)[0]


def check_server_optimiser(text: str) -> str:
    """Return the setting `server_optimizer` in its usual spelling; raise CoterieError if it is invalid."""
    calls = parse_calls("server_optimizer", text)
    if len(calls) > 1:
        raise CoterieError(f"server_optimizer = {text} is invalid: it must be one optimiser")
    values = bind_call("server_optimizer", calls[0], RULES).arguments
    for name, value in values.items():
        top = 1.0 if name in ("momentum", "beta1", "beta2") else 1e6
        low_ok = isinstance(value, int | float) and (value > 0 if name in ("lr", "tau") else value >= 0)
        if not low_ok or value >= top:
            raise CoterieError(f"server_optimizer = {text} is invalid: {name} = {value} is out of its range")
    return str(calls[0])


@dataclass(frozen=True)
class ServerOptimiser:
    """An optimiser of the server; its memory holds moments by kind, then by entry of the model."""

    setting: ClassVar[str] = "server_optimizer"
    text: str  # the setting, such as fedadam(lr=0.03)

    def move(self, method: Method, sent: Tree, upload: Upload, round: int, memory: Memory) -> tuple[Upload, Memory]:
        """Return the upload with its parameters moved from `sent` by the optimiser, and the moments after it."""
        call = _call(self.text)
        tau = float(bind_call("server_optimizer", call, RULES).arguments.get("tau", 0.0))
        tree, moments = dict(upload.tree), Memory(m=dict(memory.get("m", {})), v=dict(memory.get("v", {})))
        for name in moved_names(method, upload.tree):
            old = sent[name]
            m = moments["m"].get(name, torch.zeros_like(old))
            v = moments["v"].get(name, torch.full_like(old, tau**2))
            change = tree[name] - old
            step, m, v = RULES[call.name](*call.values, **dict(call.options), change=change, m=m, v=v)
            tree[name], moments["m"][name], moments["v"][name] = old + step, m, v
        return replace(upload, tree=tree), moments

    def check(self, method: Method) -> None:
        """Raise CoterieError if the method does not average parameters that it has sent."""
        up, down = method.schema("up").entries, method.schema("down").entries
        names = moved_names(method, up)
        if not names or any(name not in down or down[name].shape != up[name].shape for name in names):
            raise CoterieError(
                f"server_optimizer = {self.text} needs a method that sends and averages parameters; "
                f"{title_of(method)} does not"
            )

    def facts(self, memory: Memory) -> dict[str, Any]:
        """Return nothing: moments are not logged."""
        return {}
