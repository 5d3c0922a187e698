"""The combiner between uploads and the method: one mean upload, moved by an optimiser of the server.

A method with `combines = "mean"` may be handed one combined upload, because its next state depends on the mean of the
uploads only. FedAvgM: Hsu et al., 2019, arXiv 1909.06335. FedAdagrad, FedAdam and FedYogi: Reddi et al., ICLR 2021,
arXiv 2003.00295, Algorithm 2, without bias correction and with v = tau^2 before the first round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.calls import WrittenCall, bind_call, parse_calls
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method, Upload
from coterie.core.tree import Tree
from coterie.errors import CoterieError

Memory = dict[str, Tree]  # moments by kind, then by entry of the model


def mean_upload(method: Method, uploads: Sequence[Upload]) -> Upload:
    """Return one upload that stands for all: the mean with the method's weights, and the sum of their samples."""
    tree = T.mean([u.tree for u in uploads], method.weights(uploads))
    return Upload(tree, samples=sum(u.samples for u in uploads))


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
    """An optimiser of the server with its memory; a value, so that a round stays a pure step."""

    text: str  # the setting, such as fedadam(lr=0.03)
    memory: Memory = field(default_factory=dict)

    def combined(self, method: Method, sent: Tree, uploads: Sequence[Upload]) -> tuple[Upload, "ServerOptimiser"]:
        """Return the mean upload with its parameters moved from `sent` by the optimiser, and the optimiser after it."""
        call = _call(self.text)
        upload = mean_upload(method, uploads)
        tau = float(bind_call("server_optimizer", call, RULES).arguments.get("tau", 0.0))
        tree, memory = dict(upload.tree), Memory(m=dict(self.memory.get("m", {})), v=dict(self.memory.get("v", {})))
        for name in moved_names(method, upload.tree):
            old = sent[name]
            m = memory["m"].get(name, torch.zeros_like(old))
            v = memory["v"].get(name, torch.full_like(old, tau**2))
            change = tree[name] - old
            step, m, v = RULES[call.name](*call.values, **dict(call.options), change=change, m=m, v=v)
            tree[name], memory["m"][name], memory["v"][name] = old + step, m, v
        return replace(upload, tree=tree), replace(self, memory=memory)


def moved_names(method: Method, entries: Mapping[str, object]) -> list[str]:
    """Return the entries that a server optimiser moves: trained parameters; statistics of batch norm are averaged."""
    return [name for name in entries if T.plain(name) in method.ctx.net.trainable]


def check_combines(method: Method, text: str) -> None:
    """Raise CoterieError if a method does not combine its uploads by a mean of parameters that it has sent."""
    title = method.card.title or type(method).__name__
    if method.combines != "mean" or isinstance(method, EdgeMethod):
        raise CoterieError(f"server_optimizer = {text} needs a method that only averages uploads; {title} does not")
    up, down = method.schema("up").entries, method.schema("down").entries
    names = moved_names(method, up)
    if not names or any(name not in down or down[name].shape != up[name].shape for name in names):
        raise CoterieError(
            f"server_optimizer = {text} needs a method that sends and averages parameters; {title} does not"
        )
