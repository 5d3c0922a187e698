"""Local training and scoring of a chain of layers, each as one call into the compiled kernels."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.tasks import Binary, Classification, EventCount, MultiLabel, Regression, Task
from coterie.core.tree import Tree
from coterie.train.chain.tape import LINEAR, ChainLayer, NoChainError
from coterie.train.native.library import DONE, Chain, Layer, Library, ModelEntry, Scoring, Training

# numbers of the losses in chain.c, by the exact type of the task: a subclass may compute anything
LOSSES: dict[type[Task], int] = {Classification: 0, Binary: 0, Regression: 1, MultiLabel: 2, EventCount: 3}
ROLES = ("weight", "bias", "gamma", "beta", "mean", "var")
OPTIMISERS = {"sgd": 0, "adam": 1, "adamw": 2}


class StepRule(NamedTuple):
    """The optimiser's settings, as far as they are the same for all entries."""

    optimiser: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0  # 0: gradients are not clipped


@dataclass(frozen=True)
class Pull:
    """A pull of the model towards a reference."""

    strength: float
    reference: Tree
    names: frozenset[str]  # entries that count in the distance


class Program:
    """A chain with its tensors; it holds nothing that a call changes, so threads may share it."""

    def __init__(self, library: Library, links: Sequence[ChainLayer], tree: Tree, constants: Tree, task: Task):
        if type(task) not in LOSSES:
            raise NoChainError(f"the loss of the task {task.name} has no native code")
        self.library, self.task = library, task
        self.classes = LOSSES[type(task)] == 0
        used = [name for link in links for name in link.tensors.values()]
        self.names = tuple(used)
        self.sizes = tuple((tree[k] if k in tree else constants[k]).numel() for k in used)
        self.constants = {k: v.contiguous() for k, v in constants.items() if k in used}
        self.item_shape = links[0].before
        self.outputs = links[-1].after[0]
        if not all(v.dtype is torch.float32 for v in (*constants.values(), *(tree[k] for k in used if k in tree))):
            raise NoChainError("its values are not float32")
        padded = False  # behind a linear layer, items fill whole vectors
        for a, b in zip(links, [*links[1:], None], strict=True):
            padded = a.kind == LINEAR or (padded and a.before == a.after)
            if b is not None and padded and a.after != b.before:
                raise NoChainError("it makes a picture of what a linear layer gives")
        if self.outputs != task.outputs or prod(links[-1].after) != self.outputs:
            raise NoChainError("its outputs are not those of its last layer")
        at = {k: i for i, k in enumerate(used)}
        self._layers = (Layer * len(links))(*(_layer(link, at) for link in links))
        transposed = {link.tensors["weight"]: link.after[0] for link in links if link.kind == LINEAR}
        self._shapes = tuple((n, transposed.get(k, 0)) for k, n in zip(used, self.sizes, strict=True))
        self._chains: dict[Any, tuple[Chain, Any]] = {}

    def _chain(self, trained: frozenset[str], pulled: frozenset[str], decays: Mapping[str, float]) -> Chain:
        """Return the structure of the model with these trained entries; it is made once."""
        key = trained, pulled, tuple(decays.items())
        if key not in self._chains:
            entries = (ModelEntry * max(1, len(self.names)))(
                *(
                    ModelEntry(size, outputs, k in trained, k in pulled, decays.get(k, 0.0))
                    for k, (size, outputs) in zip(self.names, self._shapes, strict=True)
                )
            )
            chain = Chain(
                len(self._layers), len(self.names), LOSSES[type(self.task)], prod(self.item_shape), self.outputs,
                ctypes.addressof(self._layers), ctypes.addressof(entries),
            )  # fmt: skip
            self._chains[key] = chain, entries
        return self._chains[key][0]

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """True if the kernels can read these samples and targets."""
        if not (x.dtype is torch.float32 and x.is_contiguous() and y.is_contiguous() and x.is_cpu and y.is_cpu):
            return False
        if self.classes:
            return y.dtype is torch.int64 and y.ndim == 1
        return y.dtype is torch.float32 and y.numel() == len(y) * self.outputs

    def _pointers(self, tree: Mapping[str, Tensor], names: frozenset[str] | None = None) -> Any:
        """Return the addresses of the entries, by default of all, or None if one is not plain memory."""
        addresses = (c_void_p * max(1, len(self.names)))()
        for i, (k, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            if names is not None and k not in names:
                continue
            v = tree[k] if k in tree else self.constants[k]
            if v.numel() != size or v.dtype is not torch.float32 or not (v.is_contiguous() and v.is_cpu):
                return None
            addresses[i] = v.data_ptr()
        return addresses

    def train(
        self,
        rule: StepRule,
        decays: Mapping[str, float],
        trained: frozenset[str],
        tree: Tree,
        x: Tensor,
        y: Tensor,
        order: Tensor,
        spans: Sequence[int],
        rates: Sequence[float],
        pull: Pull | None = None,
    ) -> float | None:
        """Train the entries of `tree` in place, one step for each rate; return the sum of the losses of the steps.

        `order` [epochs, n] are the samples of each epoch and `spans` the positions where its batches begin, with the
        end of the last. Return None, and change nothing, if the kernels do not take these arguments.
        """
        pulled = frozenset() if pull is None else pull.names
        values = self._pointers(tree)
        anchors = None if pull is None else self._pointers(pull.reference, pulled)
        if values is None or (pull is not None and anchors is None) or not self.fits(x, y):
            return None
        chain = self._chain(trained, pulled, decays)
        counts = (c_double * max(1, len(self.names)))()
        steps, begins = len(rates), (c_int64 * len(spans))(*spans)
        lr = (c_double * steps)(*rates)
        call = Training(
            ctypes.addressof(chain), len(x), x.data_ptr(), y.data_ptr(), order.data_ptr(), ctypes.addressof(begins),
            len(spans) - 1, steps, ctypes.addressof(lr), rule.optimiser, int(rule.nesterov), rule.momentum, rule.beta1,
            rule.beta2, rule.eps, rule.clip, 0.0 if pull is None else pull.strength, ctypes.addressof(values),
            None if anchors is None else ctypes.addressof(anchors), None, None, ctypes.addressof(counts), 0.0,
        )  # fmt: skip
        return float(call.loss) if self.library.train(byref(call)) == DONE else None

    def outputs_of(self, tree: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
        """Return the outputs [n, outputs] of the model; None if the kernels do not take these arguments."""
        values = self._pointers(tree)
        if values is None or not (x.dtype is torch.float32 and x.is_contiguous() and x.is_cpu):
            return None
        out = torch.empty(len(x), self.outputs)
        chain = self._chain(frozenset(), frozenset(), {})
        call = Scoring(
            ctypes.addressof(chain),
            len(x),
            x.data_ptr(),
            None,
            ctypes.addressof(values),
            out.data_ptr(),
            None,
            None,
            0.0,
        )
        return out if self.library.score(byref(call)) == DONE else None

    def score(self, tree: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """Return hits and samples by class [classes], and the summed loss; None if the kernels do not take these."""
        values = self._pointers(tree)
        if values is None or not self.classes or not self.fits(x, y):
            return None
        hits, total = torch.zeros(2, self.outputs, dtype=torch.int64)
        chain = self._chain(frozenset(), frozenset(), {})
        call = Scoring(
            ctypes.addressof(chain), len(x), x.data_ptr(), y.data_ptr(), ctypes.addressof(values), None,
            hits.data_ptr(), total.data_ptr(), 0.0,
        )  # fmt: skip
        return (hits, total, float(call.loss)) if self.library.score(byref(call)) == DONE else None


def _layer(link: ChainLayer, at: Mapping[str, int]) -> Layer:
    (ic, h, w), (oc, oh, ow) = link.before, link.after
    numbers = [at[link.tensors[role]] if role in link.tensors else -1 for role in ROLES]
    return Layer(
        link.kind, ic, h, w, oc, oh, ow, *link.kernel, *link.stride, *link.padding, *link.dilation, link.groups,
        link.mode, *numbers, link.eps, link.momentum,
    )  # fmt: skip
