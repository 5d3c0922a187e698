"""The frozen beginning of a network, whose outputs can be computed once per sample.

`find_prefix` looks for the last module whose output is a constant of the sample: everything that runs before it is
frozen, nothing in it is random, and all that follows depends on the item through this output only. The network then
takes such outputs in place of items, and runs its remaining part on them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from coterie.core.layers import Layout


class _ReachedError(Exception):
    """Ends a forward pass at the end of the prefix."""


@dataclass(frozen=True)
class FrozenPrefix:
    """The modules up to `last`, and what stands for their outputs while the rest of the network runs."""

    last: str  # path of the module whose output is a sample's features
    shape: tuple[int, ...]  # shape of one sample's features
    blank: Tensor  # an item of zeros [1, ...]
    skipped: Mapping[str, Any]  # outputs of zeros, by the path of modules that are not called

    def on(self, device: torch.device) -> "FrozenPrefix":
        """Return the same prefix for a module on this device."""
        placed = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, dict(self.skipped))
        return replace(self, blank=self.blank.to(device), skipped=placed)

    def takes(self, x: Tensor) -> bool:
        """True if x are features, and not items."""
        return x.is_floating_point() and tuple(x.shape[1:]) == self.shape

    def rest(self, module: nn.Module, z: Tensor) -> Any:
        """Run the module from the features z [batch, ...] on."""
        n = z.shape[0]

        def standing(value: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: tree_map(lambda v: _repeated(v, n), value)

        outputs = {path: standing(value) for path, value in self.skipped.items()}
        with _replaced(module, {**outputs, self.last: lambda *args, **kwargs: z}):
            return module(_repeated(self.blank, n))

    def features(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the features of items; the module is in evaluation mode."""
        found: list[Tensor] = []

        def stop(_m: nn.Module, _args: Any, out: Tensor) -> None:
            found.append(out)
            raise _ReachedError

        handle = module.get_submodule(self.last).register_forward_hook(stop)
        try:
            module(x)
        except _ReachedError:
            pass
        finally:
            handle.remove()
        return found[0]


def _repeated(value: Any, n: int) -> Any:
    return value.expand(n, *value.shape[1:]) if isinstance(value, Tensor) and value.shape[:1] == (1,) else value


@contextmanager
def _replaced(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    parts = [module.get_submodule(path) for path in functions]
    for part, function in zip(parts, functions.values(), strict=True):
        part.__dict__["forward"] = function
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["forward"]


@dataclass(frozen=True)
class _Call:
    """A call of a module in an observed pass: when it began and ended, and its output."""

    path: str
    begin: int
    end: int
    output: Any


def find_prefix(
    module: nn.Module, layers: Layout, example: Tensor, moves: Callable[[FrozenPrefix], bool]
) -> FrozenPrefix | None:
    """Return the longest frozen prefix of a module; None if no frozen prefix can be used.

    The module computes gradients of all that trains, and `example` holds a few items. `moves` says whether the features
    of a prefix are different in training.
    """
    calls = _observed(module, lambda: module(example))
    expected = module(example).detach()
    once = {c.path for c in calls if sum(other.path == c.path for other in calls) == 1}
    fixed = {path for path, part in module.named_modules() if path and _is_fixed(path, part, layers)}
    for call in sorted(calls, key=lambda c: -c.end):
        out = call.output
        if call.path not in fixed or call.path not in once or not _is_constant(out, len(example)):
            continue
        before = [c for c in calls if c.end <= call.begin]
        if any(c.path not in fixed for c in before):
            continue
        top = [c for c in before if not any(c.begin > o.begin and c.end < o.end for o in before)]
        if any(c.path not in once for c in top) or tuple(out.shape[1:]) == tuple(example.shape[1:]):
            continue
        blanks = {c.path: tree_map(lambda v: _blank(v, len(example)), c.output) for c in top}
        for fill in (0, 1):  # the outputs must not depend on what stands for the items
            blank = torch.full_like(example[:1], fill)
            prefix = FrozenPrefix(call.path, tuple(out.shape[1:]), blank, blanks)
            try:
                with torch.no_grad():
                    same = torch.equal(prefix.rest(module, out), expected)
            except Exception:  # the user's code between the modules may need real items
                same = False
            if not same:
                break
        else:
            if not moves(prefix):
                return prefix
    return None


def _is_constant(out: Any, batch: int) -> bool:
    return isinstance(out, Tensor) and out.is_floating_point() and out.shape[:1] == (batch,) and not out.requires_grad


def _is_fixed(path: str, part: nn.Module, layers: Layout) -> bool:
    """True if no tensor of a module can change in training."""
    buffers = all(f"{path}.{k}" in layers.frozen for k, v in part.named_buffers() if v.is_floating_point())
    return buffers and not any(p.requires_grad for p in part.parameters())


def _blank(value: Any, batch: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value[:1]) if value.shape[:1] == (batch,) else torch.zeros_like(value)


def _observed(module: nn.Module, run: Callable[[], Any]) -> list[_Call]:
    """Run a module and return the calls of its parts."""
    clock = iter(range(10**9))
    begun: dict[str, list[int]] = {}
    calls: list[_Call] = []
    handles = []
    for path, part in module.named_modules():
        if path:

            def enter(_m: nn.Module, _args: Any, path: str = path) -> None:
                begun.setdefault(path, []).append(next(clock))

            def leave(_m: nn.Module, _args: Any, out: Any, path: str = path) -> None:
                calls.append(_Call(path, begun[path].pop(), next(clock), out))

            handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls
