"""A module as a way to call trees: the tree is the truth, the module holds nothing of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from coterie.errors import CoterieError
from coterie.models.layers import Layout, is_batch_norm, layout
from coterie.tree import Tree


class Net:
    """Calls `module` with the tensors of a tree. In training mode a batch-norm layer uses batch statistics, and moves
    its running ones in the tree itself, exactly when its own weight is being trained: frozen parts do not move."""

    def __init__(self, module: nn.Module, example: Tensor):
        self.module = module
        self.layout: Layout = layout(module, example)
        self.training = False
        module.eval()
        canonical: dict[int, str] = {}
        self._slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        self._norms: list[tuple[nn.Module, str | None]] = []
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        for path, sub in module.named_modules():
            dot = f"{path}." if path else ""
            for local, p in sub._parameters.items():
                if p is not None:
                    name = canonical.setdefault(id(p), dot + local)
                    self._slots.append((sub._parameters, local, name))
            for local, b in sub._buffers.items():
                if b is not None and b.is_floating_point():
                    self._slots.append((sub._buffers, local, canonical.setdefault(id(b), dot + local)))
                elif b is not None and is_batch_norm(sub):
                    sub._buffers[local] = None  # the counter: not needed with a fixed momentum
            if is_batch_norm(sub):
                self._norms.append((sub, f"{dot}weight" if sub._parameters.get("weight") is not None else None))
        self.has_batch_norm = bool(self._norms)
        self.names = list(dict.fromkeys(full for _, _, full in self._slots))
        self.trainable = frozenset(n for n in canonical.values() if n not in self.layout.groups["bn_stats"])
        self._head: nn.Module | None = dict(module.named_modules())[self.layout.head] if self.layout.head else None

    def state(self) -> Tree:
        """The tensors the module holds now, cloned."""
        return {full: slot[local].detach().clone() for slot, local, full in self._slots if slot[local] is not None}  # type: ignore[union-attr]

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        was, self.training = self.training, True
        self.module.train()
        try:
            yield
        finally:
            self.training = was
            self.module.train(was)

    def load(self, params: Tree) -> None:
        """Point the module at the tensors of the tree (no copy)."""
        try:
            for slot, local, full in self._slots:
                slot[local] = params[full]
        except KeyError as e:
            raise CoterieError(f"the tree lacks {e.args[0]!r}, which the model needs") from None
        for m in self._recurrent:
            m._flat_weights = [getattr(m, n, None) for n in m._flat_weights_names]
        if self.training:
            for norm, weight in self._norms:
                norm.training = weight is None or params[weight].requires_grad

    def forward(self, params: Tree, x: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        self.load(params)
        return self.module(x)  # type: ignore[no-any-return]

    __call__ = forward

    def both(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features (what enters the head) [batch, d] of one pass."""
        logits, seen = self._capture(params, x, [self._need_head()])
        return logits, seen[0]

    def features(self, params: Tree, x: Tensor) -> Tensor:
        return self.both(params, x)[1]

    def logits(self, params: Tree, z: Tensor) -> Tensor:
        """The head on features z [batch, d]."""
        weight, bias = self.head_names
        return nn.functional.linear(z, params[weight], params[bias] if bias else None)

    @property
    def head_names(self) -> tuple[str, str | None]:
        """State-dict names of the head's weight and bias (None without one)."""
        self._need_head()
        names = self.layout.groups["head"]
        return f"{self.layout.head}.weight", b if (b := f"{self.layout.head}.bias") in names else None

    @property
    def width(self) -> int:
        """d: how many features enter the head."""
        return int(self._need_head().in_features)  # type: ignore[arg-type]

    def inputs(self, params: Tree, x: Tensor, layers: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Logits and what enters each named layer (for a hidden layer that is the output of the one before it)."""
        modules = dict(self.module.named_modules())
        return self._capture(params, x, [modules[name] for name in layers])

    def _capture(self, params: Tree, x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, list[Tensor]]:
        seen: dict[int, Tensor] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[id(module)] = args[0]

        hooks = [m.register_forward_pre_hook(hook) for m in modules]
        try:
            logits = self.forward(params, x)
        finally:
            for h in hooks:
                h.remove()
        return logits, [seen[id(m)] for m in modules]

    def _need_head(self) -> nn.Module:
        if self._head is None:
            raise CoterieError(
                "this model has no head: its last layer must be an nn.Linear whose output is the model's output"
            )
        return self._head


def initial(module: nn.Module, seed: int) -> None:
    """Draw the module's parameters anew from the seed (its own reset_parameters, in module order)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for sub in module.modules():
            if callable(reset := getattr(sub, "reset_parameters", None)):
                reset()
