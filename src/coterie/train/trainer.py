"""Local training of one client: its phases, one after the other, from tensors in memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Context, Extras
from coterie.core.losses import class_weights
from coterie.core.method import Method, Phase, Start, Trained, task_loss
from coterie.core.rng import key, torch_rng
from coterie.core.schedules import lr_factor
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.parts.gradient import clipped
from coterie.train.augmentation import augmented, mixes
from coterie.train.chain.natives import Natives, native_rule, plain_tree
from coterie.train.chain.program import Pull, StepRule
from coterie.train.devices import CPU, start_noise
from coterie.train.optimisers import Optimiser, Stepper
from coterie.train.private_steps import PrivateSteps

FEWEST = 4  # samples of a last batch, with batch norm
EPOCHS_MOVED = 64  # orders of epochs that are moved to a device together


@dataclass(frozen=True)
class Effort:
    """The work of one local training: gradient steps, samples seen, and the mean loss."""

    steps: int
    samples: int
    loss: float


class PhaseResult(NamedTuple):
    """The result of one phase of one client."""

    params: Tree
    extras: Extras
    aux: list[Any]  # second results of the loss, one per step
    steps: int
    samples: int
    loss: Tensor  # summed over steps


def train(
    ctx: Context,
    rule: Optimiser,
    phases: Sequence[Phase],
    start: Start,
    data: ClientData,
    round: int,
    share: float = 1.0,
    memory: Tree | None = None,
    natives: Natives | None = None,
    private: PrivateSteps | None = None,
) -> tuple[Trained, Effort]:
    """Run local training on a clone of the start's parameters.

    `share` < 1 makes the client a straggler that does fewer epochs (at least one). `memory` is the optimisers' memory
    from one local training to the next and is updated in place; None: they have none. With `natives` the compiled
    kernels run the phases that they know, equal to PyTorch up to rounding. `private`: steps of DP-SGD.
    """
    params, extras, aux = T.clone(start.params), start.extras, list[Any]()
    steps = samples = 0
    total = torch.zeros((), device=ctx.device)
    with ExitStack() as stack:
        ready = False  # the kernels need neither noise nor the module
        for i, phase in enumerate(phases if start.train else ()):
            kept = None if memory is None else (memory, f"{i}/")
            done = (
                None
                if natives is None or private is not None
                else _native_phase(natives, ctx, phase, params, extras, data, round, share)
            )
            if done is None:
                if not ready:
                    # dropout and other noise inside the model
                    start_noise(ctx.device, key(ctx.seed, "noise", round, data.client))
                    stack.enter_context(ctx.net.train_mode())
                    ready = True
                done = run_phase(
                    ctx, rule, phase, params, extras, start.per_sample, data, round, share, kept, private, i
                )
            params, extras, aux = done.params, done.extras, done.aux or aux
            steps, samples, total = steps + done.steps, samples + done.samples, total + done.loss
    return Trained(params, extras, aux, steps), Effort(steps, samples, float(total / max(steps, 1)))


def run_phase(
    ctx: Context,
    rule: Optimiser,
    phase: Phase,
    params: Tree,
    extras: Extras,
    per_sample: Tensor | None,
    data: ClientData,
    round: int,
    share: float,
    kept: tuple[Tree, str] | None = None,
    private: PrivateSteps | None = None,
    number: int = 0,
) -> PhaseResult:
    """Run one phase of one client, in training mode; parameters move in place.

    Only trained entries require a gradient, so no other entry can change. `number` is the phase's place in its round.
    """
    if private is not None:
        return _private_phase(ctx, rule, phase, params, extras, data, round, share, kept, private, number)
    if phase.update is not None:
        params, steps, seen = _updates(ctx, phase, params, extras, data, round, share)
        return PhaseResult(params, extras, [], steps, seen, torch.zeros((), device=ctx.device))
    names = trained_names(ctx, phase, params)
    leaves = [params[k].requires_grad_() for k in names]
    lr = phase_lr(ctx, phase, round)
    step = Stepper(rule, leaves, weight_decays(rule, phase, names), lr)
    if kept is not None:
        step.recall(names, *kept)
    objective, clip = phase.objective, largest_norm(rule, phase)
    assert objective is not None
    planned = steps_planned(ctx, phase, len(data.train), share)
    auxes: list[Any] = []
    total, steps, seen = torch.zeros((), device=ctx.device), 0, 0
    if leaves:
        for epoch in _epochs(ctx, phase, data, round, share, per_sample):
            for batch in epoch:
                loss = objective(params, batch, extras)
                if isinstance(loss, tuple):
                    loss, aux = loss
                    auxes.append(aux)
                if loss.requires_grad:
                    slopes: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
                    now = lr * lr_factor(ctx.lr_steps, steps, planned)
                    step(slopes if clip is None else clipped(slopes, clip), now)
                total += loss.detach()
                steps += 1
                seen += len(batch.y) if isinstance(batch, Batch) else sum(len(b.y) for b in batch)
            if phase.every_epoch is not None:
                with torch.no_grad():
                    new, extras = phase.every_epoch(params, extras, data)
                    for k, v in new.items():
                        if v is not params[k]:
                            params[k].copy_(v)
    for leaf in leaves:
        leaf.requires_grad_(False)
    if kept is not None:
        step.remember(names, *kept)
    return PhaseResult(params, extras, auxes, steps, seen, total)


def _native_phase(
    natives: Natives,
    ctx: Context,
    phase: Phase,
    params: Tree,
    extras: Extras,
    data: ClientData,
    round: int,
    share: float,
) -> PhaseResult | None:
    """Run one phase as one call of the compiled kernels; None if they do not know it, and nothing has changed then."""
    if natives.why_not(ctx, phase):
        return None
    loss, rule = task_loss(phase.loss), native_rule(natives.rule, largest_norm(natives.rule, phase))
    assert loss is not None and isinstance(rule, StepRule)
    params |= {k: v.contiguous() for k, v in params.items() if not v.is_contiguous()}
    model = plain_tree(params, loss.tag)
    names = trained_names(ctx, phase, model, loss.name)
    x, y = (t.contiguous() for t in data.train)
    program = natives.program(ctx, frozenset(names), x)
    if isinstance(program, str) or not program.fits(x, y):
        return None
    steps, n = steps_planned(ctx, phase, len(x), share), len(x)
    if not steps or not names:
        return PhaseResult(params, extras, [], 0, 0, torch.zeros(())) if names else None
    begins = [span.start for span in batch_spans(ctx, n)] + [n]
    drawn = torch.stack([order for order, _ in orders(ctx, phase, data, round, share)])
    lr = phase_lr(ctx, phase, round)
    rates = [lr] * steps if ctx.lr_steps is None else [lr * lr_factor(ctx.lr_steps, i, steps) for i in range(steps)]
    decays = weight_decays(natives.rule, phase, map(loss.name, names))
    by_name = {k: d for k, d in zip(names, decays, strict=True) if d}
    pull = Pull(loss.pull, extras[loss.reference], frozenset(ctx.net.trainable)) if loss.pull else None
    if pull is not None and any(k not in program.names for k in pull.names):
        return None  # entries that the model does not use are pulled too
    total = program.train(rule, by_name, frozenset(names), model, x, y, drawn, begins, rates, pull)
    if total is None:
        return None
    each = len(begins) - 1
    seen = steps // each * n + begins[steps % each]
    return PhaseResult(params, extras, [], steps, seen, torch.tensor(total))


def _private_phase(
    ctx: Context,
    rule: Optimiser,
    phase: Phase,
    params: Tree,
    extras: Extras,
    data: ClientData,
    round: int,
    share: float,
    kept: tuple[Tree, str] | None,
    private: PrivateSteps,
    number: int,
) -> PhaseResult:
    """Run one phase of one client with steps of DP-SGD."""
    names, n = trained_names(ctx, phase, params), len(data.train)
    leaves, lr = [params[k] for k in names], phase_lr(ctx, phase, round)
    step, clip = Stepper(rule, leaves, weight_decays(rule, phase, names), lr), largest_norm(rule, phase)
    if kept is not None:
        step.recall(names, *kept)
    planned = steps_planned(ctx, phase, n, share) if leaves else 0
    total, seen = torch.zeros((), device=ctx.device), 0
    for i in range(planned):
        keys = round, data.client, number, i
        picked = private.picked(ctx, n, keys).to(ctx.device)
        batch = Batch(data.train.x[picked], data.train.y[picked])
        slopes, loss = private.gradient(ctx, phase, params, names, batch, extras, n, keys)
        step(slopes if clip is None else clipped(slopes, clip), lr * lr_factor(ctx.lr_steps, i, planned))
        total += loss
        seen += len(picked)
    if kept is not None:
        step.remember(names, *kept)
    return PhaseResult(params, extras, [], planned, seen, total)


def trained_names(ctx: Context, phase: Phase, params: Tree, full: Callable[[str], str] = str) -> list[str]:
    """Return the entries that a phase trains; `full` gives the name by which the phase knows an entry."""
    return [k for k, v in params.items() if v.is_floating_point() and _trainable(ctx, k) and phase.trains(full(k))]


def weight_decays(rule: Optimiser, phase: Phase, names: Iterable[str]) -> list[float]:
    """Return the weight decay of each entry."""
    return [rule.weight_decay if phase.weight_decay is None else phase.weight_decay(k) for k in names]


def largest_norm(rule: Optimiser, phase: Phase) -> float | None:
    """Return the largest gradient norm of a phase; None if gradients are not clipped."""
    return rule.clip if phase.clip is None else phase.clip


def phase_lr(ctx: Context, phase: Phase, round: int) -> float:
    return ctx.lr_at(round) if phase.lr is None else phase.lr


def _updates(
    ctx: Context, phase: Phase, params: Tree, extras: Extras, data: ClientData, round: int, share: float
) -> tuple[Tree, int, int]:
    """Run a phase with its own update rule."""
    assert phase.update is not None
    rng = torch_rng(ctx.seed, "update", round, data.client, phase.stream)
    steps = seen = 0
    for epoch in _epochs(ctx, phase, data, round, share):
        for batch in epoch:
            params = phase.update(params, batch, extras, rng)
            steps += 1
            seen += len(batch.y) if isinstance(batch, Batch) else sum(len(b.y) for b in batch)
    return {k: v.detach() for k, v in params.items()}, steps, seen


def _trainable(ctx: Context, name: str) -> bool:
    """False for batch-norm statistics, other buffers and frozen parameters; tags of further models are ignored."""
    return T.plain(name) not in ctx.net.fixed


def _epochs(
    ctx: Context, phase: Phase, data: ClientData, round: int, share: float, per_sample: Tensor | None = None
) -> Iterator[Iterator[Any]]:
    """Yield the batches of each epoch."""
    spans = batch_spans(ctx, len(data.train))
    weights = class_weights(ctx.class_weights, ctx.fixed_weights, data.train.y, ctx.classes)
    weights = None if weights is None else weights.to(ctx.device)
    if per_sample is not None and mixes(ctx.augment):
        raise CoterieError("augment = mixup is not possible: the method has a value for each single training sample")
    for epoch, (order, limit) in enumerate(_on_device(ctx.device, orders(ctx, phase, data, round, share))):
        columns = [*data.train, *(() if per_sample is None else (per_sample,))]
        keys = round, data.client, phase.stream, epoch
        yield _batches(ctx, [c[order] for c in columns], weights, spans, phase.batches_per_step, limit, keys)


def _on_device(device: torch.device, drawn: Iterator[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the orders on the device; those of many epochs are moved together."""
    if device == CPU:
        yield from drawn
    while block := list(islice(drawn, EPOCHS_MOVED)):
        moved = torch.stack([order for order, _ in block]).to(device)
        yield from zip(moved, (limit for _, limit in block), strict=True)


def batch_spans(ctx: Context, n: int) -> list[slice]:
    """Return the positions of the batches of an epoch over n samples.

    If the model has batch norm, a last batch of fewer than FEWEST samples joins the batch before it, because statistics
    of so few samples are useless, and a client with one sample has no batch. Otherwise the last batch holds the rest.
    """
    norm, left = ctx.net.has_batch_norm, n % ctx.batch
    starts = list(range(0, n, ctx.batch))
    if norm and len(starts) > 1 and 0 < left < FEWEST:
        starts.pop()
    return [] if norm and n == 1 else [slice(a, b) for a, b in pairwise([*starts, n])]


def steps_planned(ctx: Context, phase: Phase, n: int, share: float) -> int:
    """Return the steps of a phase over n samples; a straggler does a share of them."""
    batches = len(batch_spans(ctx, n))
    local = ctx.local_steps if phase.epochs is None and phase.steps is None else None
    if local is not None:
        return (max(1, math.floor(local * share)) if share < 1.0 else local) if batches else 0
    epochs = ctx.epochs if phase.epochs is None else phase.epochs
    if share < 1.0 and epochs > 0:
        epochs = max(min(1.0, epochs), math.floor(epochs * share))
    each = math.ceil(batches / phase.batches_per_step)
    return (phase.steps if phase.steps is not None else math.ceil(epochs * each)) if batches else 0


def steps_per_round(method: Method, n: int) -> int:
    """Return the largest number of steps that a client with n samples takes in a round of the run."""
    ctx = method.ctx
    rounds = range(1, ctx.planned_rounds + 1)
    return max(sum(steps_planned(ctx, phase, n, 1.0) for phase in method.phases(t)) for t in rounds)


def orders(ctx: Context, phase: Phase, data: ClientData, round: int, share: float) -> Iterator[tuple[Tensor, int]]:
    """Yield the order of the samples and the number of steps of each epoch, keyed by (seed, round, client, stream)."""
    n = len(data.train)
    each, steps = math.ceil(len(batch_spans(ctx, n)) / phase.batches_per_step), steps_planned(ctx, phase, n, share)
    for epoch in range(math.ceil(steps / each) if steps else 0):
        order = torch.randperm(n, generator=torch_rng(ctx.seed, "batches", round, data.client, phase.stream, epoch))
        yield order, min(each, steps - epoch * each)


def _batches(
    ctx: Context,
    columns: Sequence[Tensor],
    weights: Tensor | None,
    spans: list[slice],
    group: int,
    limit: int,
    keys: tuple[int, ...],
) -> Iterator[Any]:
    """Yield the batches of an epoch; one generator with these keys serves its augmentations, batch after batch."""
    rng = None if ctx.augment is None else torch_rng(ctx.seed, "augment", *keys)

    def batch(span: slice) -> Batch:
        x, y, *per_sample = (c[span] for c in columns)
        if rng is not None and ctx.augment is not None:
            x, y = augmented(ctx.augment, x, y, rng)
        return Batch(x, y, None, per_sample[0] if per_sample else None, weights)

    if group == 1:
        for span in spans[:limit]:
            yield batch(span)
        return
    for i in range(limit):
        # a step that needs more batches than are left takes the rest from the beginning of the same order
        yield tuple(batch(spans[(i * group + j) % len(spans)]) for j in range(group))
