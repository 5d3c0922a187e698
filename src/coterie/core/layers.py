"""Layers and groups of any nn.Module, found by type, never by substring."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from coterie.errors import CoterieError, unknown

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Names(frozenset[str]):
    """A set of names with a fixed order of iteration, so that sums over it do not depend on Python's hash seed."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__sub__(other))

    def __and__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__and__(other))

    def __or__(self, other: AbstractSet[Any]) -> Any:
        return _named(super().__or__(other))


def _named(found: Any) -> Any:
    return found if found is NotImplemented else Names(found)  # Python then asks the other operand (a view of keys)


@dataclass(frozen=True)
class Layout:
    """Layers in order of execution and the state-dict names that belong to each group.

    Groups: all, conv, fc, bn (affine and statistics), bn_stats, norm (norms of any type), lora, lora:A, lora:B
    (adapters), head, body, unused, layer:<name>. Frozen tensors are
    constants of the model and in no group; a tensor that several layers share belongs to the first of them.
    """

    layers: tuple[str, ...]  # layers that take part in a prediction
    kinds: Mapping[str, str]  # layer -> conv | fc | bn | other
    head: str | None  # the last linear layer, if its output is the model's and no other layer shares its weights
    groups: Mapping[str, Names] = field(repr=False)
    called: Names  # layers that are called as modules, whose inputs can be observed
    weighted: tuple[str, ...]  # layers with weights, without norms, free parameters and parts of attention
    frozen: Names

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Return the layers of this kind whose inputs can be observed, without projections inside attention."""
        return tuple(name for name in self.layers if self.kinds[name] == kind and name in self.called)

    def group(self, name: str) -> Names:
        if name not in self.groups:
            raise unknown("layer group", name, self.groups)
        return self.groups[name]


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def tensor_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and floating buffers; batch-norm counters are neither sent nor averaged."""
    names = [k for k, _ in module.named_parameters()]
    return names + [k for k, v in module.named_buffers() if v.is_floating_point()]


def layout(module: nn.Module, example: Tensor) -> Layout:
    """Run the module once on `example` [2, ...] to learn which layers take part, and in which order."""
    names = set(tensor_names(module))
    own = {
        path: [n for k in [*sub._parameters, *sub._buffers] if (n := f"{path}.{k}" if path else k) in names]
        for path, sub in module.named_modules()
    }
    leaves = {path: sub for path, sub in module.named_modules() if own[path]}
    probe = _Probe(module, leaves, example)
    frozen = _frozen(leaves, own, [*probe.order, *(path for path in leaves if path not in probe.order)])
    own = {path: [n for n in own[path] if n not in frozen] for path in leaves}
    leaves = {path: sub for path, sub in leaves.items() if own[path]}
    kinds = {path: _kind(sub, f"{path}.weight" if path else "weight", own[path]) for path, sub in leaves.items()}
    idle = {path for path in leaves if path not in probe.order or probe.is_idle(path)}
    layers = tuple(path for path in probe.order if path in leaves and path not in idle)

    linear = [path for path in layers if kinds[path] == "fc" and path in probe.outputs]
    last = linear[-1] if linear else None
    alone = last is not None and _alone(module, leaves[last], set(own[last]), f"{last}." if last else "")
    head = last if last is not None and probe.outputs[last] is probe.result and alone else None
    groups: dict[str, Names] = {f"layer:{path}": Names(own[path]) for path in leaves}
    for kind in ("conv", "fc", "bn"):
        groups[kind] = Names(n for path in leaves if kinds[path] == kind for n in own[path])
    groups["norm"] = Names(n for path in leaves if isinstance(leaves[path], NORMS) for n in own[path])
    parameters = {k for k, _ in module.named_parameters()}
    for half in ("A", "B"):  # names of this package and of peft
        groups[f"lora:{half}"] = Names(n for n in names - frozen if f"lora_{half}" in n.split("."))
    groups["lora"] = groups["lora:A"] | groups["lora:B"]
    groups["all"] = Names(names) - frozen
    groups["bn_stats"] = Names(n for n in groups["bn"] if n not in parameters)
    groups["head"] = Names(own[head]) if head is not None else Names()
    groups["body"] = groups["all"] - groups["head"]
    groups["unused"] = Names(n for path in idle for n in own[path])
    weighted = tuple(path for path in layers if _counts(leaves[path], kinds[path]) and not _inside(path, module))
    called = Names(path for path in layers if path in probe.outputs)
    return Layout(layers, {k: v for k, v in kinds.items() if k in layers}, head, groups, called, weighted, frozen)


def _kind(module: nn.Module, weight: str, own: Sequence[str]) -> str:
    """Return the kind of a layer by its type; a tied, computed or frozen weight makes it `other`."""
    if isinstance(module, _ConvNd | nn.Linear):
        return "other" if weight not in own else "conv" if isinstance(module, _ConvNd) else "fc"
    return "bn" if is_batch_norm(module) else "other"


def _counts(module: nn.Module, kind: str) -> bool:
    others = (nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag, nn.Bilinear, nn.MultiheadAttention)
    return kind in ("conv", "fc") or isinstance(module, others)


def _inside(path: str, module: nn.Module) -> bool:
    """True if the layer is a part of attention."""
    return bool(path) and isinstance(module.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)


def _frozen(leaves: Mapping[str, nn.Module], own: Mapping[str, list[str]], order: Sequence[str]) -> Names:
    """Return the parameters with requires_grad=False, the statistics of the norms among them, and frozen modules.

    A norm without weights belongs to the previous layer, or to the next one if it is the first layer.
    """
    fixed = {
        f"{path}.{k}" if path else k
        for path, sub in leaves.items()
        for k, p in sub._parameters.items()
        if isinstance(p, nn.Parameter) and not p.requires_grad
    }
    out = set(fixed)
    out |= {n for path, sub in leaves.items() if getattr(sub, "always_eval", False) for n in own[path]}
    weights = {path: f"{path}.weight" if path else "weight" for path in order}
    for at, path in enumerate(order):
        if isinstance(leaves[path], _NormBase):
            near = [path, *reversed(order[:at]), *order[at + 1 :]]
            weight = next((weights[p] for p in near if weights[p] in own[p]), None)
            if weight in fixed:
                out |= {f"{path}.{k}" if path else k for k in leaves[path]._buffers}
    return Names(out & {n for found in own.values() for n in found})


def _alone(module: nn.Module, layer: nn.Module, own: AbstractSet[str], dot: str) -> bool:
    """True if the layer has weights of its own; tied, computed or frozen ones cannot be separated from the body."""
    mine = {id(p) for p in layer._parameters.values() if p is not None}
    others = {id(p) for sub in module.modules() if sub is not layer for p in sub._parameters.values()}
    return all(dot + k in own for k, p in layer._parameters.items() if p is not None) and not mine & others


class _Uses(TorchFunctionMode):
    """Reports every tensor that is an operand of an operation; reading a shape or a device does not count."""

    def __init__(self, tell: Callable[[int], None]):
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(v, Tensor) for v in tree_leaves(out)):
            for v in tree_leaves((args, kwargs)):
                if isinstance(v, Tensor):
                    self.tell(id(v))
        return out


class _Probe:
    """An observed pass of the model: the order in which layers are first used, and their outputs."""

    def __init__(self, module: nn.Module, leaves: Mapping[str, nn.Module], example: Tensor):
        self.module, self.leaves, self.example = module, leaves, example
        self.order: list[str] = []
        self.outputs: dict[str, object] = {}  # outputs of layers that were called as modules
        owner: dict[int, str] = {}
        for path, sub in leaves.items():
            for tensor in _tensors(sub):
                owner.setdefault(id(tensor), path)  # the first of the layers that share it

        def use(path: str | None) -> None:
            if path is not None and path not in self.order:
                self.order.append(path)

        hooks = []
        for path, sub in leaves.items():

            def hook(_m: nn.Module, _i: object, out: object, path: str = path) -> None:
                use(path)
                self.outputs[path] = out

            hooks.append(sub.register_forward_hook(hook))
        try:
            with torch.enable_grad(), _Uses(lambda tensor: use(owner.get(tensor))):
                self.result = self._run()
        except CoterieError:
            raise
        except Exception as e:  # a user's model may raise anything
            shape = "x".join(map(str, example.shape[1:]))
            reason = (str(e).splitlines() or [""])[0]
            if not isinstance(e, RuntimeError | ValueError | TypeError) or not reason:
                reason = f"{type(e).__name__}: {reason}".removesuffix(": ")
            raise CoterieError(f"the model does not fit the data: one item has shape {shape} ({reason})") from e
        finally:
            for h in hooks:
                h.remove()
        if not isinstance(self.result, Tensor) or self.result.ndim != 2:
            given = (
                f"shape {list(self.result.shape)}" if isinstance(self.result, Tensor) else type(self.result).__name__
            )
            raise CoterieError(
                "a model must return a tensor of shape [batch, outputs] (logits of classes, or numbers; [batch, 1] for "
                f"one number), and for two items this one returns {given}"
            )
        self._reached = leaves_of(self.result)

    def _run(self) -> Any:
        was = self.module.training
        self.module.eval()
        try:
            return self.module(self.example)
        finally:
            self.module.train(was)

    def is_idle(self, path: str) -> bool:
        """True if the layer's output is not used, as that of an auxiliary output which is discarded.

        No gradient reaches such a layer, and the result is the same without it. Gradients alone are not enough, because
        a part of the model may run in torch.no_grad.
        """
        tensors = _tensors(self.leaves[path])
        if not self._reached or any(id(t) in self._reached for t in tensors):
            return False
        held = [t.detach().clone() for t in tensors]
        with torch.no_grad():
            for t in tensors:
                t.add_(1.0)
            try:
                return torch.equal(self._run(), self.result)
            finally:
                for t, v in zip(tensors, held, strict=True):
                    t.copy_(v)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters and floating buffers."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return [t for t in own if t is not None and t.is_floating_point()]


def leaves_of(result: Tensor) -> set[int]:
    """Return the ids of the parameters that a gradient of the result reaches.

    The graph is walked instead of computing a gradient: that would start threads of a GPU in this process, and
    processes forked from it could not train.
    """
    if result.grad_fn is None:
        return {id(result)} if result.requires_grad else set()
    reached, known, waiting = set[int](), set[object](), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            reached.add(id(leaf))
        new = {n for n, _ in node.next_functions if n is not None} - known
        known |= new
        waiting += new
    return reached
