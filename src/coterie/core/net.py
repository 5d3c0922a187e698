"""A module that is called with the tensors of a tree and holds no state itself."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from coterie.core.frozen_prefix import FrozenPrefix, find_prefix
from coterie.core.layers import Layout, Names, is_batch_norm, layout
from coterie.core.tree import Tree
from coterie.errors import CoterieError


class Net:
    """A callable for `module` with the tensors of a tree.

    A batch-norm layer in training mode uses batch statistics, and updates the running ones in the tree, if and only if
    its own weight is being trained, so that frozen parts do not change. Parameters with requires_grad=False are
    constants of the module: no tree has them.
    """

    def __init__(self, module: nn.Module, example: Tensor | None, known: Layout | None = None):
        """Learn the layout from a pass of `example` [2, ...], unless it is known."""
        self.module = module
        if known is None:
            assert example is not None
            known = layout(module, example)
        self.layout = known
        self.training = False
        self.half: torch.dtype | None = None  # type of the operations that autocast chooses it for; None: no autocast
        self.prefix: FrozenPrefix | None = None  # see cut_prefix
        module.eval()
        canonical: dict[int, str] = {}  # a tied tensor has one entry in the tree, under its first name
        fixed: set[str] = set()
        self._slots: list[tuple[dict[str, Tensor | None], str, str]] = []
        self._norms: list[tuple[nn.Module, str | None]] = []  # norms, each with the entry that it is trained with
        self._still: list[nn.Module] = []  # frozen norms, which are always in evaluation mode
        frozen = self.layout.frozen
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        for path, sub in module.named_modules():
            dot = f"{path}." if path else ""
            for local, p in sub._parameters.items():
                if p is not None:
                    name = canonical.setdefault(id(p), dot + local)
                    if name not in frozen:
                        self._slots.append((sub._parameters, local, name))
            for local, b in sub._buffers.items():
                if b is not None and b.is_floating_point():
                    name = canonical.setdefault(id(b), dot + local)
                    if name not in frozen:
                        self._slots.append((sub._buffers, local, name))
                        fixed.add(name)
                elif b is not None and isinstance(sub, _NormBase):
                    sub._buffers[local] = None  # the batch counter, which a fixed momentum does not need
            if isinstance(sub, _NormBase):
                if sub.momentum is None and sub.track_running_stats:
                    raise CoterieError(f'the norm layer "{path}" has momentum=None; give it a number, such as 0.1')
                weight = sub._parameters.get("weight")
                entry = canonical[id(weight)] if weight is not None else self._neighbour(path)
                if entry in frozen or any(dot + k in frozen for k in sub._buffers):
                    self._still.append(sub)
                else:
                    self._norms.append((sub, entry))
        # parts that the setting `freeze` names, with norms and dropout (models/adaptation.py)
        self._still += [m for m in module.modules() if getattr(m, "always_eval", False) and m not in self._still]
        self.has_batch_norm = any(is_batch_norm(norm) for norm, _ in self._norms)
        self.names = list(dict.fromkeys(full for _, _, full in self._slots))
        self.fixed = Names(fixed)  # buffers
        self.trainable = Names(self.names) - self.fixed
        if not self.trainable:
            why = "all its parameters have requires_grad=False" if frozen else "it has no parameters"
            raise CoterieError(f"the model has nothing to train: {why}")
        self._head = None if self.layout.head is None else module.get_submodule(self.layout.head)

    def cut_prefix(self, example: Tensor) -> bool:
        """Let the network take features of its frozen prefix in place of items; False if it has no such prefix."""
        params = {k: v.requires_grad_(k in self.trainable) for k, v in self.state().items()}
        self.load(params)
        if not self.layout.frozen:
            return False

        def moves(prefix: FrozenPrefix) -> bool:  # dropout
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                given = prefix.features(self.module, example)
                with self.train_mode():
                    self.load(params)
                    return not torch.equal(prefix.features(self.module, example), given)

        self.prefix = find_prefix(self.module, self.layout, example, moves)
        self.load({k: v.detach() for k, v in params.items()})
        return self.prefix is not None

    @torch.no_grad()
    def prefix_features(self, x: Tensor) -> Tensor:
        """Return the features of items that the network takes in place of them."""
        assert self.prefix is not None
        was = self.module.training
        self.module.eval()
        try:
            return self.prefix.features(self.module, x)
        finally:
            self.module.train(was)

    def _neighbour(self, path: str) -> str | None:
        """Return the layer that a norm without weights belongs to: the previous one, or the next if it is the first."""
        weights = [f"{layer}.weight" if layer else "weight" for layer in self.layout.layers]
        at = self.layout.layers.index(path) if path in self.layout.layers else 0
        near = [*reversed(weights[:at]), *weights[at:]]
        return next((w for w in near if w in self.layout.groups["all"]), None)

    def on(self, device: torch.device) -> "Net":
        """Return the net for trees on this device; its module is a copy."""
        module = copy.deepcopy(self.module)
        placed: dict[int, Tensor] = {}  # tied tensors stay tied
        for sub in module.modules():
            for held in (sub._parameters, sub._buffers):
                for name, v in held.items():
                    if v is not None and id(v) not in placed:
                        new = v.detach().to(device)
                        parameter = isinstance(v, nn.Parameter)
                        placed[id(v)] = nn.Parameter(new, v.requires_grad) if parameter else new
                    if v is not None:
                        held[name] = placed[id(v)]  # type: ignore[assignment]
        net = Net(module, None, self.layout)
        net.half, net.prefix = self.half, None if self.prefix is None else self.prefix.on(device)
        return net

    def state(self) -> Tree:
        """Return clones of the tensors that the module holds now."""
        return {full: slot[local].detach().clone() for slot, local, full in self._slots if slot[local] is not None}  # type: ignore[union-attr]

    def constants(self) -> Tree:
        """Return the frozen tensors by name; they are in the module and in no tree."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {k: v.detach() for k, v in named.items() if k in self.layout.frozen}

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
            for part in self._still:
                part.training = False

    def forward(self, params: Tree, x: Tensor) -> Tensor:
        """Return the logits [batch, classes]; x are items, or features of the frozen prefix."""
        self.load(params)
        run: Callable[[Tensor], Any] = self.module
        if self.prefix is not None and self.prefix.takes(x):
            run = partial(self.prefix.rest, self.module)
        if self.half is None:
            return run(x)  # type: ignore[no-any-return]
        with torch.autocast(x.device.type, self.half):
            out = run(x)
        return out.float()  # type: ignore[no-any-return]

    __call__ = forward

    def both(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the features (inputs of the head) [batch, d] of one pass."""
        logits, seen = self._capture(params, x, [self._need_head()])
        return logits, seen[0]

    def features(self, params: Tree, x: Tensor) -> Tensor:
        return self.both(params, x)[1]

    def logits(self, params: Tree, z: Tensor) -> Tensor:
        """Return the head's outputs for features z [batch, d]."""
        weight, bias = self.head_names
        return nn.functional.linear(z, params[weight], params[bias] if bias else None)

    @property
    def head_names(self) -> tuple[str, str | None]:
        """State-dict names of the head's weight and bias (None without one)."""
        self._need_head()
        names = self.layout.groups["head"]
        dot = f"{self.layout.head}." if self.layout.head else ""
        return f"{dot}weight", b if (b := f"{dot}bias") in names else None

    @property
    def width(self) -> int:
        """The number d of features that enter the head."""
        return int(self._need_head().in_features)  # type: ignore[arg-type]

    def inputs(self, params: Tree, x: Tensor, layers: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Return the logits and the input of each named layer (for a hidden layer, the previous layer's output)."""
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
        return logits, [seen[id(m)] if self.half is None else seen[id(m)].float() for m in modules]

    def _need_head(self) -> nn.Module:
        if self._head is None:
            raise CoterieError(
                "this model has no head: its last layer must be an nn.Linear with weights of its own "
                "whose output is the model's output"
            )
        return self._head


def initial(module: nn.Module, seed: int) -> None:
    """Re-initialise the module's parameters from the seed (its own reset_parameters, in module order).

    Parts marked `keep_initial` (pre-trained, or made from a seed already) stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _reset(module)


def _reset(module: nn.Module) -> None:
    if getattr(module, "keep_initial", False):
        return
    # attention and transformers name it with an underscore and reset their children too
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
    for child in module.children():
        _reset(child)
