"""Names the layers and groups of any nn.Module by type, never by substring."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from coterie.errors import CoterieError, unknown


class Names(frozenset[str]):
    """A set of names that is always walked in the same order: sums over it must not depend on Python's hash seed."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__sub__(other))

    def __and__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__and__(other))

    def __or__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__or__(other))


def _named(found: Any) -> Any:
    return found if found is NotImplemented else Names(found)  # then Python asks the other side (a view of keys)


@dataclass(frozen=True)
class Layout:
    """Layers in order of execution and the state-dict names that belong to each group.

    Groups: all, conv, fc, bn (affine and statistics), bn_stats, head, body, layer:<name>.
    """

    layers: tuple[str, ...]
    kinds: Mapping[str, str]  # layer -> conv | fc | bn | other
    head: str | None  # the last linear layer, if its output is the model's and no other layer shares its weights
    groups: Mapping[str, Names] = field(repr=False)

    def of_kind(self, kind: str) -> tuple[str, ...]:
        return tuple(name for name in self.layers if self.kinds[name] == kind)

    def group(self, name: str) -> Names:
        if name not in self.groups:
            raise unknown("layer group", name, self.groups)
        return self.groups[name]


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def tensor_names(module: nn.Module) -> list[str]:
    """Parameters and floating buffers; the counters of batch norm are neither sent nor averaged."""
    names = [k for k, _ in module.named_parameters()]
    return names + [k for k, v in module.named_buffers() if v.is_floating_point()]


def layout(module: nn.Module, example: Tensor) -> Layout:
    """Runs the module once on `example` [2, ...] to learn the order of its layers."""
    names = set(tensor_names(module))
    own = {
        path: [n for k in [*sub._parameters, *sub._buffers] if (n := f"{path}.{k}" if path else k) in names]
        for path, sub in module.named_modules()
    }
    leaves = {path: sub for path, sub in module.named_modules() if own[path]}
    order, outputs = _order(module, leaves, example)
    layers = _complete(order, leaves)
    kinds = {path: _kind(leaves[path]) for path in layers}
    linear = [path for path in order if kinds[path] == "fc"]
    head = linear[-1] if linear and outputs[linear[-1]] and _alone(module, leaves[linear[-1]]) else None
    groups: dict[str, Names] = {f"layer:{path}": Names(own[path]) for path in layers}
    for kind in ("conv", "fc", "bn"):
        groups[kind] = Names(n for path in layers if kinds[path] == kind for n in own[path])
    parameters = {k for k, _ in module.named_parameters()}
    groups["all"] = Names(names)
    groups["bn_stats"] = Names(n for n in groups["bn"] if n not in parameters)
    groups["head"] = Names(own[head]) if head is not None else Names()
    groups["body"] = groups["all"] - groups["head"]
    return Layout(layers, kinds, head, groups)


def _kind(module: nn.Module) -> str:
    if isinstance(module, _ConvNd):
        return "conv"
    if isinstance(module, nn.Linear):
        return "fc"
    return "bn" if is_batch_norm(module) else "other"


def _complete(order: list[str], leaves: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Adds layers that are never called themselves, such as the projection inside attention, after their parent."""
    out = list(order)
    for path in leaves:
        if path not in out:
            parent = path
            while parent and parent not in out:
                parent = parent.rpartition(".")[0]
            out.insert(out.index(parent) + 1 if parent else len(out), path)
    return tuple(out)


def _alone(module: nn.Module, layer: nn.Module) -> bool:
    """Does the layer have a weight of its own? A tied or computed one cannot be kept apart from the body."""
    own = {id(p) for p in layer._parameters.values() if p is not None}
    others = {id(p) for sub in module.modules() if sub is not layer for p in sub._parameters.values()}
    return layer._parameters.get("weight") is not None and not own & others


def _order(module: nn.Module, leaves: Mapping[str, nn.Module], example: Tensor) -> tuple[list[str], dict[str, bool]]:
    """Leaf names in order of their first call, and whether each one's output is the model's output."""
    order: list[str] = []
    seen: dict[str, Tensor] = {}
    hooks = []
    for path, sub in leaves.items():

        def hook(_m: nn.Module, _i: object, out: object, path: str = path) -> None:
            if path not in seen:
                order.append(path)
            if isinstance(out, Tensor):
                seen[path] = out

        hooks.append(sub.register_forward_hook(hook))
    was = module.training
    module.eval()
    try:
        with torch.no_grad():
            result = module(example)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as e:
        shape = "x".join(map(str, example.shape[1:]))
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise CoterieError(f"the model does not fit the data: one item has shape {shape} ({reason})") from e
    finally:
        for h in hooks:
            h.remove()
        module.train(was)
    if not isinstance(result, Tensor) or result.ndim != 2:
        raise CoterieError("a model must return logits of shape [batch, classes]")
    return order, {path: out is result for path, out in seen.items()}
