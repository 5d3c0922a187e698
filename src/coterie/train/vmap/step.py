"""One gradient step of many clients at once: vmap over the pure loss, traced once per shape to straight-line calls."""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from coterie.core.context import Batch
from coterie.core.method import Loss, Method, TaskLoss
from coterie.train.optimisers import Optimiser

StackedStep = Callable[..., Sequence[Tensor]]
TRACE_AFTER = 12  # a trace costs some 100 ms, as much as a few dozen untraced steps
MOST_TRACES = 96


class UnstackableError(Exception):
    """A phase must be trained client by client; the message says why."""


@contextmanager
def truly_batched() -> Iterator[None]:
    """Raise UnstackableError for operations that vmap runs one by one (recurrent layers, fused attention).

    They would take thirty times as long as a loop, with a warning for each call.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        yield


def identity(f: Any) -> Any:
    """Return a key that is equal for equal functions; raise UnstackableError if they hold values without equality."""
    if f is None or isinstance(f, bool | int | float | str):
        return type(f).__name__, f
    if isinstance(f, Method):
        return id(f)
    if isinstance(f, TaskLoss):
        return TaskLoss, id(f.ctx), f.tag, f.pull, f.reference
    if inspect.ismethod(f):
        return f.__func__, identity(f.__self__)
    if isinstance(f, functools.partial):
        return identity(f.func), tuple(map(identity, f.args)), tuple((k, identity(v)) for k, v in f.keywords.items())
    if inspect.isfunction(f):
        held = [cell.cell_contents for cell in f.__closure__ or ()]
        return f.__code__, tuple(map(identity, [*held, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]))
    raise UnstackableError(f"its loss holds a {type(f).__name__} of its own")


@dataclass(frozen=True)
class Extra:
    """The extras of one client in two parts: tensors and numbers to stack, and values equal for the whole stack."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, extras: Any) -> "Extra":
        leaves, spec = tree_flatten(extras)
        key: list[Any] = []
        for v in leaves:
            if isinstance(v, Tensor):
                key.append(("tensor", tuple(v.shape), v.dtype))
            elif isinstance(v, float):
                key.append(("number",))
            elif v is None or isinstance(v, bool | int | str):
                key.append(("fixed", type(v).__name__, v))
            else:
                raise UnstackableError(f"its extras hold a {type(v).__name__}")
        return cls(spec, tuple(leaves), (repr(spec), *key))

    def stacked(self, device: torch.device) -> list[Tensor]:
        """The values that differ between clients, on the device."""
        dtypes = [v.dtype if isinstance(v, Tensor) else torch.float32 for v in self._varying()]
        return [torch.as_tensor(v, dtype=d, device=device) for v, d in zip(self._varying(), dtypes, strict=True)]

    @property
    def width(self) -> int:
        return len(self._varying())

    def _varying(self) -> list[Any]:
        return [v for v in self.leaves if isinstance(v, Tensor | float)]

    def with_values(self, values: Sequence[Tensor]) -> Any:
        remaining = iter(values)
        whole = [next(remaining) if isinstance(v, Tensor | float) else v for v in self.leaves]
        return tree_unflatten(whole, self.spec)


@dataclass(frozen=True)
class Recipe:
    """The definition of one step of a phase, equal for all clients of a stack."""

    loss: Loss
    names: tuple[str, ...]  # names of the whole tree, in its order
    trains: tuple[str, ...]
    moves: tuple[str, ...]  # buffers that a forward pass may change
    decays: tuple[float, ...]  # weight decay of each trained entry
    rule: Optimiser
    clip: float | None
    extra: Extra
    padded: bool

    @property
    def rest(self) -> tuple[str, ...]:
        known = {*self.trains, *self.moves}
        return tuple(k for k in self.names if k not in known)

    def without(self, names: Collection[str]) -> "Recipe":
        """Return the same step without training these entries."""
        kept = [(k, d) for k, d in zip(self.trains, self.decays, strict=True) if k not in names]
        return replace(self, trains=tuple(k for k, _ in kept), decays=tuple(d for _, d in kept))

    def memory(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """The optimiser's state at the start of a phase."""
        return [torch.zeros_like(p) for _ in range(self._slots) for p in trained]

    @property
    def _slots(self) -> int:
        return 2 if self.rule.kind != "sgd" else int(self.rule.momentum > 0)

    def stacked(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Take the step of all clients.

        The arguments are entries [clients, ...] in the order of `_one`, then weight, x, y, the values per sample if
        there are any, lr and the number of the step.
        """
        *columns, lr, count = flat
        one = functools.partial(self._one, lr, count)
        out: tuple[Tensor, ...] = torch.vmap(one, randomness="error")(*columns)
        return out

    def _one(self, lr: Tensor, count: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        """Take the step of one client; return its next entries, the loss, and the second result of the loss."""
        a, b, c = len(self.trains), len(self.moves), len(self.rest)
        slots = self._slots * a
        trained, moves, rest = flat[:a], flat[a : a + b], flat[a + b : a + b + c]
        varying = a + b + c + slots + self.extra.width
        memory, extras = flat[a + b + c : a + b + c + slots], flat[a + b + c + slots : varying]
        weight, x, y, *per_sample = flat[varying:]

        def objective(trained: tuple[Tensor, ...]) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
            moved = [v.clone() for v in moves]  # batch norm updates its statistics in place
            values = dict(zip([*self.trains, *self.moves, *self.rest], [*trained, *moved, *rest], strict=True))
            tree = {k: values[k] for k in self.names}
            batch = Batch(x, y, weight if self.padded else None, *per_sample)
            loss = self.loss(tree, batch, self.extra.with_values(extras))
            given: list[Tensor] = []
            if isinstance(loss, tuple):
                loss, aux = loss
                if not isinstance(aux, Tensor):
                    raise UnstackableError("its loss gives more than tensors")
                given.append(aux.detach())
            return loss, (moved, given)

        gradients, (loss, (moved, given)) = torch.func.grad_and_value(objective, has_aux=True)(tuple(trained))
        new, kept = self._update(list(trained), list(gradients), list(memory), lr, count)
        return (*new, *moved, *kept, loss, *given)

    def _update(
        self, params: list[Tensor], gradients: list[Tensor], memory: list[Tensor], lr: Tensor, count: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Apply the rules of optimisers.py to one client; `count` is the number of this step, from 1."""
        rule, n = self.rule, len(params)
        if self.clip is not None:
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
            gradients = [g * factor for g in gradients]
        if rule.kind != "adamw":
            gradients = [g + d * p if d else g for p, g, d in zip(params, gradients, self.decays, strict=True)]
        if rule.kind == "sgd" and not rule.momentum:
            return [p - lr * g for p, g in zip(params, gradients, strict=True)], []
        if rule.kind == "sgd":
            memory = [rule.momentum * m + g for m, g in zip(memory, gradients, strict=True)]
            return [p - lr * m for p, m in zip(params, memory, strict=True)], memory
        if rule.kind == "adamw":
            params = [p * (1 - lr * d) if d else p for p, d in zip(params, self.decays, strict=True)]
        first = [torch.lerp(m, g, 0.1) for m, g in zip(memory[:n], gradients, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(memory[n:], gradients, strict=True)]
        pace, scale = lr / (1 - 0.9**count), (1 - 0.999**count).sqrt()
        moved = [p - pace * m / (v.sqrt() / scale + 1e-8) for p, m, v in zip(params, first, second, strict=True)]
        return moved, [*first, *second]


def traced(step: StackedStep, flat: Sequence[Tensor]) -> StackedStep:
    """Return the step as straight-line calls for these shapes, without Python in between."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    module = make_fx(step)(*flat)
    _simplify(module.graph)
    module.recompile()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated, and shapes are fixed on purpose
        try:
            return torch.jit.trace(lambda *a: tuple(module(*a)), tuple(flat), check_trace=False)  # type: ignore[no-any-return,no-untyped-call]
        except RuntimeError:  # a call that scripts do not support (batch norm's backward): call it from Python
            return module


_SAME = {torch.ops.aten.expand.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def _simplify(graph: Graph) -> None:
    """Remove calls that return their input: detach, views of the same shape, factors of one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        same = _shape(node) is not None and _shape(node) == _shape(source)
        if (
            node.target is torch.ops.aten.detach.default
            or (node.target in _SAME and same)
            or (node.target is torch.ops.aten.mul.Scalar and node.args[1] == 1 and same)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _shape(node: Node) -> Any:
    meta: Any = node.meta.get("tensor_meta")
    return (tuple(meta.shape), meta.dtype) if hasattr(meta, "shape") else None


class Steps:
    """Steps by recipe and shape: called as they are while rare, traced once they are frequent."""

    def __init__(self, patient: bool = True) -> None:
        self._rare = TRACE_AFTER if patient else 0
        self._uses: dict[Any, int] = {}
        self._traced: dict[Any, StackedStep] = {}

    def __call__(self, key: Any, step: StackedStep, flat: Sequence[Tensor]) -> Sequence[Tensor]:
        at = (key, flat[0].shape[:1], flat[-5].shape)  # the stack, and x
        if (ready := self._traced.get(at)) is not None:
            return ready(*flat)
        self._uses[at] = self._uses.get(at, 0) + 1
        if self._uses[at] > self._rare and len(self._traced) < MOST_TRACES:
            self._traced[at] = ready = traced(step, flat)
            return ready(*flat)
        return step(*flat)
