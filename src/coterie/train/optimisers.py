"""The optimiser of local training: any optimiser of torch.optim by name, or one that a function of the user makes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from coterie.core.calls import WrittenCall, parse_calls
from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown

MakeOptimiser = Callable[..., torch.optim.Optimizer]  # (parameter groups, lr) -> optimiser
_OF_THE_RUN = {"params", "lr", "weight_decay"}  # settings of the run instead of options
_TECHNICAL = {"foreach", "fused", "capturable", "differentiable", "maximize"}
# names of an optimiser's state in version 0.1
_KINDS_OF_0_1 = {"first": "exp_avg", "second": "exp_avg_sq", "count": "step", "momentum": "momentum_buffer"}


@dataclass(frozen=True)
class Optimiser:
    """The optimiser of a run, as its settings say."""

    kind: str = "sgd"  # name in torch.optim, in lower case, or module:name of a function of the user
    momentum: float = 0.0  # used by sgd
    weight_decay: float = 0.0
    keep: bool = False  # True: the state lasts from one local training of a client to its next
    clip: float | None = None  # largest gradient norm
    options: tuple[tuple[str, Any], ...] = ()  # further arguments of the optimiser
    make: MakeOptimiser | None = None  # the function of the user

    @property
    def loop_only(self) -> str:
        """The reason why clients with this optimiser are trained one by one; empty if stacks are possible."""
        if self.keep:
            return "optimisers keep their memory, which stacks do not have (opt_state = keep)"
        if self.kind not in ("sgd", "adam", "adamw") or self.options:
            return f"stacks know sgd, adam and adamw without options only (optimizer = {self.kind})"
        return ""

    def build(self, leaves: Sequence[Tensor], decays: Sequence[float], lr: float) -> torch.optim.Optimizer:
        """Return the optimiser of these tensors, one group for each weight decay."""
        chosen = {d: [p for p, own in zip(leaves, decays, strict=True) if own == d] for d in dict.fromkeys(decays)}
        if self.make is not None:
            return self.make([{"params": own, "weight_decay": d} for d, own in chosen.items()], lr=lr)
        cls = known_optimisers()[self.kind]
        options = {**dict(self.options), **({"momentum": self.momentum} if self.kind == "sgd" else {})}
        if "weight_decay" not in inspect.signature(cls).parameters:
            if any(decays):
                raise ValueError("it has no weight decay")
            return cls([*leaves], lr=lr, **options)  # type: ignore[call-arg]  # every one of them has an lr
        groups = [{"params": own, "weight_decay": d} for d, own in chosen.items()]
        return cls(groups, lr=lr, **options)  # type: ignore[call-arg]


def optimiser(text: str, make: MakeOptimiser | None = None, **more: Any) -> Optimiser:
    """Return the optimiser that the setting `optimizer` names, with the run's other settings of it."""
    if make is not None:
        return Optimiser(text, make=make, **more)
    (call,) = parse_calls("optimizer", text)
    return Optimiser(call.name, options=call.options, **more)


@cache
def known_optimisers() -> Mapping[str, type[torch.optim.Optimizer]]:
    """Return the optimisers of torch.optim by their names in lower case."""
    exported = (getattr(torch.optim, name) for name in dir(torch.optim))
    return {
        cls.__name__.lower(): cls
        for cls in exported
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }


def named_optimiser(given: object) -> str | None:
    """Return the setting that names a class of torch.optim, or a functools.partial of one; None for other objects."""
    cls: object = given.func if isinstance(given, partial) and not given.args else given
    options = given.keywords if isinstance(given, partial) else {}
    name = getattr(cls, "__name__", "").lower()
    if name in known_optimisers() and known_optimisers()[name] is cls:
        return check_optimiser(str(WrittenCall(name, (), tuple(options.items()))))
    return None


def check_optimiser(text: str) -> str:
    """Return the setting `optimizer` in its usual spelling; raise CoterieError if it is invalid.

    A function of the user, module:name, is not imported.
    """
    if ":" in text:
        return text
    calls = parse_calls("optimizer", text)
    call = calls[0]
    if len(calls) > 1 or call.values:
        raise CoterieError(f"optimizer = {text} is invalid: it must be one name, with options such as {_EXAMPLE}")
    if call.name not in known_optimisers():
        raise unknown("optimizer", call.name, known_optimisers())
    parameters = inspect.signature(known_optimisers()[call.name]).parameters
    for name, _ in call.options:
        if name in _OF_THE_RUN or (name == "momentum" and call.name == "sgd"):
            raise CoterieError(f"{name} is a setting of the run: set {name} instead of an option of {call.name}")
        if name not in parameters or name in _TECHNICAL:
            raise unknown(f"option of {call.name}", name, set(parameters) - _OF_THE_RUN - _TECHNICAL)
    return str(WrittenCall(call.name, (), tuple(sorted(call.options))))


_EXAMPLE = "adamw(betas=(0.9, 0.99))"


def check_fit(rule: Optimiser, leaves: Sequence[Tensor]) -> None:
    """Raise CoterieError if the optimiser cannot be made or cannot take a step for parameters of these shapes."""
    copies = [torch.zeros_like(leaf).requires_grad_() for leaf in leaves]
    try:
        stepper = Stepper(rule, copies, [rule.weight_decay] * len(copies), 0.1)
        stepper([torch.zeros_like(c) for c in copies], 0.1)
    except Exception as e:  # whatever torch or a function of the user raises
        why = (str(e).splitlines() or [type(e).__name__])[0][:200]
        if rule.options and isinstance(e, TypeError | IndexError):
            why = f"torch.optim does not take these values of its options ({why})"
        shown = str(WrittenCall(rule.kind, (), rule.options)) if rule.make is None else rule.kind
        raise CoterieError(f"optimizer = {shown} cannot train this model: {why}") from None


class Stepper:
    """Steps of an optimiser on given tensors; entries without a gradient (None) keep their values and states."""

    def __init__(self, rule: Optimiser, leaves: Sequence[Tensor], decays: Sequence[float], lr: float):
        self.leaves, self.decays, self.lr = list(leaves), list(decays), lr
        plain = rule.kind == "sgd" and not rule.momentum and not rule.options
        self.inner = None
        if leaves and not plain:
            self.inner = rule.build(self.leaves, self.decays, lr)
            if not isinstance(self.inner, torch.optim.Optimizer):
                raise TypeError(f"{rule.kind} returned a {type(self.inner).__name__} instead of a torch optimiser")

    def __call__(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Take one step in place."""
        if self.inner is None:
            self._plain(gradients, lr)
            return
        if lr != self.lr:
            self.lr = lr
            for group in self.inner.param_groups:
                group["lr"] = lr
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.grad = gradient
        self.inner.step()
        for leaf in self.leaves:
            leaf.grad = None

    @torch.no_grad()
    def _plain(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        """Take a step of SGD without momentum, which needs no object of torch.optim and so half the time."""
        for decay in dict.fromkeys(self.decays):
            moved = [
                (p, g)
                for p, g, d in zip(self.leaves, gradients, self.decays, strict=True)
                if g is not None and d == decay
            ]
            if moved:
                targets, slopes = map(list, zip(*moved, strict=True))
                if decay:
                    slopes = list(torch._foreach_add(slopes, targets, alpha=decay))
                torch._foreach_add_(targets, slopes, alpha=-lr)

    def recall(self, names: Sequence[str], tree: Tree, mark: str) -> None:
        """Take the optimiser's state of these entries from `tree`; other entries start without one."""
        leaf_of = dict(zip(names, self.leaves, strict=True))
        for key in [k for k in tree if k.startswith(mark)] if self.inner is not None else []:
            kind, _, name = key.removeprefix(mark).partition("/")
            if name in leaf_of:
                assert self.inner is not None
                stored = tree.pop(key) if kind in _KINDS_OF_0_1 else tree[key]
                self.inner.state[leaf_of[name]][_KINDS_OF_0_1.get(kind, kind)] = stored.clone()  # steps work in place

    def remember(self, names: Sequence[str], tree: Tree, mark: str) -> None:
        """Put the optimiser's state into `tree`."""
        for name, leaf in zip(names, self.leaves, strict=True):
            for kind, value in (self.inner.state[leaf] if self.inner is not None else {}).items():
                if value is not None:
                    tree[f"{mark}{kind}/{name}"] = torch.as_tensor(value)
