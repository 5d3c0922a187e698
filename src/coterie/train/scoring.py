"""Scores of models on splits: the counts of the task and the summed loss; one by one, or many clients at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.context import PER_PASS, Extras, Split
from coterie.core.method import Method
from coterie.core.tasks import Task
from coterie.core.tree import Tree
from coterie.engine.messages import Score
from coterie.train.vmap.step import Extra, UnstackableError, truly_batched

TOGETHER = 32  # models in one stacked pass


class Case(NamedTuple):
    """A model and the split that it is scored on."""

    params: Tree
    extras: Extras
    split: Split


@torch.no_grad()
def score_model(method: Method, params: Tree, extras: Extras, split: Split, shared: bool = False) -> Score:
    """Score one model on one split; `shared`: the tree is the global model and predict_global is used."""
    task, loss = method.ctx.task, torch.zeros((), dtype=torch.float64)
    parts = [torch.zeros(0, task.outputs)]
    for a in range(0, len(split), PER_PASS):
        x, y = split.x[a : a + PER_PASS], split.y[a : a + PER_PASS]
        parts.append(method.predict_global(params, x) if shared else method.predict(params, x, extras))
        if not task.whole:
            loss += task.total(parts[-1], y).double()
    outputs = torch.cat(parts)
    if task.whole:
        loss = task.total(outputs, split.y).double()
    return Score(task.count(outputs, split.y), float(loss), _kept(task, outputs, split.y))


class Scorer:
    """Scores many cases: cases with the identical model in one pass over all their samples, others stacked by vmap.

    Logits agree with those of `score` up to rounding, as in stacked training. Models that vmap does not support, and
    models with convolutions (which would lose their native code), are scored one by one.
    """

    def __init__(self, method: Method):
        self.method = method
        self.convolves = bool(method.ctx.net.layout.of_kind("conv"))
        self._none = torch.zeros(0, method.ctx.task.outputs)
        self._failed = False  # True if vmap failed before, because it would fail again

    def __call__(self, cases: Sequence[Case], shared: bool = False) -> list[Score]:
        if len(cases) > 1 and (shared or _one_model(cases)):
            return self._one_pass(cases, shared)
        out: list[Score | None] = [None] * len(cases)
        if not self.convolves and not self._failed:
            for group in self._groups(cases):
                for a in range(0, len(group), TOGETHER):
                    part = group[a : a + TOGETHER]
                    for i, s in zip(part, self._stacked([cases[i] for i in part]), strict=False):
                        out[i] = s
        return [s or score_model(self.method, *c, shared=shared) for s, c in zip(out, cases, strict=True)]

    @torch.no_grad()
    def _one_pass(self, cases: Sequence[Case], shared: bool) -> list[Score]:
        params, extras, _ = cases[0]
        x, y, who = _joined([c.split for c in cases])
        parts = torch.split(x, PER_PASS)
        logits = [
            self.method.predict_global(params, p) if shared else self.method.predict(params, p, extras) for p in parts
        ]
        return self._counted(torch.cat([*logits, self._none]), y, who, len(cases))

    def _groups(self, cases: Sequence[Case]) -> list[list[int]]:
        """Group cases whose trees and extras have the same shapes, longest splits first to limit padding."""
        by_shape: dict[object, list[int]] = {}
        for i, (params, extras, split) in enumerate(cases):
            try:
                key = Extra.of(extras).key
            except UnstackableError:
                continue
            tree = tuple((k, tuple(v.shape), v.dtype) for k, v in params.items())
            by_shape.setdefault((tree, key, tuple(split.x.shape[1:])), []).append(i)
        groups = [sorted(g, key=lambda i: -len(cases[i].split)) for g in by_shape.values()]
        return [g for g in groups if len(g) > 1]

    @torch.no_grad()
    def _stacked(self, cases: list[Case]) -> list[Score]:
        """Return the scores of these cases, or None if vmap does not support the method."""
        like = Extra.of(cases[0].extras)
        params = {k: torch.stack([c.params[k] for c in cases]) for k in cases[0].params}
        each = [Extra.of(c.extras).stacked() for c in cases]
        extras = [torch.stack([e[j] for e in each]) for j in range(len(each[0]))]

        def predict(tree: Tree, more: list[Tensor], x: Tensor) -> Tensor:
            return self.method.predict(tree, x, like.with_values(more))

        longest, logits = max(len(c.split) for c in cases), []
        for a in range(0, longest, PER_PASS):
            rows = [c.split.x[a : a + PER_PASS] for c in cases]
            real = [len(r) for r in rows]
            active = sum(n > 0 for n in real)  # cases come longest first
            x = torch.nn.utils.rnn.pad_sequence(rows[:active], batch_first=True)  # [cases, samples, ...]
            active_params = {k: v[:active] for k, v in params.items()}
            try:
                with truly_batched():
                    out = torch.vmap(predict)(active_params, [e[:active] for e in extras], x)
            except Exception:  # random numbers or a branch on a value: score one by one instead
                self._failed = True
                return []
            logits.append([row[:n] for row, n in zip(out, real, strict=False)])
        flat = [chunk[i] for i in range(len(cases)) for chunk in logits if i < len(chunk)]
        _, y, who = _joined([c.split for c in cases])
        return self._counted(torch.cat(flat), y, who, len(cases)) if flat else []

    def _counted(self, outputs: Tensor, y: Tensor, who: Tensor, cases: int) -> list[Score]:
        """Return the scores by case from all outputs [samples, outputs]; `who` [samples] is the case of each sample."""
        task = self.method.ctx.task
        sizes = torch.bincount(who, minlength=cases).tolist()
        parts = list(zip(torch.split(outputs, sizes), torch.split(y, sizes), strict=True))
        if task.whole:
            loss = torch.stack([task.total(*part).double() for part in parts])
        else:
            each = task.each(outputs, y).double()
            loss = torch.zeros(cases, dtype=torch.float64).index_add_(0, who, each)
        counted = zip(task.count_all(parts), loss, parts, strict=True)
        return [Score(counts, float(x), _kept(task, *part)) for counts, x, part in counted]


def _kept(task: Task, outputs: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return predictions and targets if a metric is computed from them; otherwise nothing."""
    return (task.predictions(outputs), y) if task.prediction_metrics else ()


def _one_model(cases: Sequence[Case]) -> bool:
    """True if all cases have the identical model: the same tensor objects, not only equal values."""
    first = cases[0].params
    return all(
        not c.extras and c.params.keys() == first.keys() and all(v is first[k] for k, v in c.params.items())
        for c in cases
    )


def _joined(splits: Sequence[Split]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all samples concatenated, and the case of each sample."""
    who = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor([len(s) for s in splits]))
    return torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]), who
