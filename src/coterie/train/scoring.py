"""Scores of models on splits: the counts of the task and the summed loss; one by one, or many clients at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.context import PER_PASS, Extras, Split
from coterie.core.method import Method
from coterie.core.tasks import Classification, Task
from coterie.core.tree import Tree
from coterie.engine.messages import Score
from coterie.train.chain.natives import Natives, scores_plainly
from coterie.train.devices import CPU, out_of_memory
from coterie.train.vmap.step import Extra, UnstackableError, truly_batched

TOGETHER = 32  # models in one stacked pass


class Case(NamedTuple):
    """A model and the split that it is scored on."""

    params: Tree
    extras: Extras
    split: Split


@torch.no_grad()
def score_model(
    method: Method,
    params: Tree,
    extras: Extras,
    split: Split,
    shared: bool = False,
    natives: Natives | None = None,
) -> Score:
    """Score one model on one split; `shared`: the tree is the global model and predict_global is used.

    With `natives` the compiled kernels compute the models that they know, equal to PyTorch up to rounding.
    """
    if natives is not None and (found := _native_score(natives, method, params, split, shared)) is not None:
        return found
    task, device = method.ctx.task, method.ctx.device
    parts = [torch.zeros(0, task.outputs, device=device)]
    for x in torch.split(split.x, PER_PASS) if len(split) else ():
        parts.append(method.predict_global(params, x) if shared else method.predict(params, x, extras))
    outputs, y = torch.cat(parts).to(CPU), split.y.to(CPU)
    if task.whole:
        loss = task.total(outputs, y).double()
    else:
        loss = torch.zeros((), dtype=torch.float64)
        for a in range(0, len(y), PER_PASS):
            loss += task.total(outputs[a : a + PER_PASS], y[a : a + PER_PASS]).double()
    return Score(task.count(outputs, y), float(loss), _kept(task, outputs, y))


def _native_score(natives: Natives, method: Method, params: Tree, split: Split, shared: bool) -> Score | None:
    """Score a model with the compiled kernels; None if they do not know it."""
    if not len(split) or not scores_plainly(method, shared):
        return None
    params, split = {k: v.contiguous() for k, v in params.items()}, Split(*(t.contiguous() for t in split))
    program = natives.scoring(method.ctx, split.x)
    if isinstance(program, str):
        return None
    task = method.ctx.task
    if type(task) is Classification and not task.added:
        counted = program.score(params, *split)
        return None if counted is None else Score({"hits": counted[0], "total": counted[1]}, counted[2], ())
    outputs = program.outputs_of(params, split.x)
    if outputs is None:
        return None
    loss = float(task.total(outputs, split.y).double())
    return Score(task.count(outputs, split.y), loss, _kept(task, outputs, split.y))


class Scorer:
    """Scores many cases: cases with the identical model in one pass over all their samples, others stacked by vmap.

    Logits agree with those of `score` up to rounding, as in stacked training. Models that vmap does not support, and
    models with convolutions on the processor (which would lose their native code), are scored one by one.
    """

    def __init__(self, method: Method):
        self.method = method
        self.one_by_one = method.ctx.device == CPU and bool(method.ctx.net.layout.of_kind("conv"))
        self._none = torch.zeros(0, method.ctx.task.outputs, device=method.ctx.device)
        self._failed = False  # True if vmap failed before, because it would fail again

    def __call__(self, cases: Sequence[Case], shared: bool = False) -> list[Score]:
        if len(cases) > 1 and (shared or _one_model(cases)):
            return self._one_pass(cases, shared)
        out: list[Score | None] = [None] * len(cases)
        if not self.one_by_one and not self._failed:
            for group in self._groups(cases):
                for a in range(0, len(group), TOGETHER):
                    part = group[a : a + TOGETHER]
                    for i, s in zip(part, self._stacked([cases[i] for i in part]), strict=False):
                        out[i] = s
        return [s or score_model(self.method, *c, shared=shared) for s, c in zip(out, cases, strict=True)]

    @torch.no_grad()
    def _one_pass(self, cases: Sequence[Case], shared: bool) -> list[Score]:
        params, extras, _ = cases[0]
        parts = torch.split(torch.cat([c.split.x for c in cases]), PER_PASS)
        logits = [
            self.method.predict_global(params, p) if shared else self.method.predict(params, p, extras) for p in parts
        ]
        return self._counted(torch.cat([*logits, self._none]), [c.split.y for c in cases])

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
        each = [Extra.of(c.extras).stacked(self.method.ctx.device) for c in cases]
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
            except Exception as e:  # random numbers or a branch on a value: score one by one instead
                if out_of_memory(e):
                    raise
                self._failed = True
                return []
            logits.append([row[:n] for row, n in zip(out, real, strict=False)])
        flat = [chunk[i] for i in range(len(cases)) for chunk in logits if i < len(chunk)]
        return self._counted(torch.cat(flat), [c.split.y for c in cases]) if flat else []

    def _counted(self, outputs: Tensor, targets: Sequence[Tensor]) -> list[Score]:
        """Return the scores by case from all outputs [samples, outputs], and the targets of each case."""
        task, y, sizes = self.method.ctx.task, torch.cat([*targets]).to(CPU), [len(t) for t in targets]
        outputs = outputs.to(CPU)
        parts = list(zip(torch.split(outputs, sizes), torch.split(y, sizes), strict=True))
        if task.whole:
            loss = torch.stack([task.total(*part).double() for part in parts])
        else:
            each = task.each(outputs, y).double()
            who = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            loss = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, who, each)
        counted = zip(task.count_all(parts), loss.tolist(), parts, strict=True)
        return [Score(counts, x, _kept(task, *part)) for counts, x, part in counted]


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
