"""Stacked training: many clients at once on a leading axis; phases that cannot be stacked run client by client.

Clients of one stack have trees and extras of the same shapes. Short batches are padded with samples of weight 0 to a
size that depends on the client alone, so that its result does not depend on its neighbours; batch norm would see the
padding, so in models with batch norm only batches of equal size share a step. Clients are sorted by their number of
steps; clients that have finished leave the stack.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, Context
from coterie.core.method import Phase
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.parts.gradient import clipped
from coterie.train.devices import first_noise, noise_state, out_of_memory, restore_noise
from coterie.train.optimisers import Optimiser, Stepper
from coterie.train.trainer import (
    FEWEST,
    batch_spans,
    largest_norm,
    orders,
    phase_lr,
    run_phase,
    trained_names,
    weight_decays,
)
from coterie.train.vmap.phase import LARGEST_STACK, Draws, Member, Stack
from coterie.train.vmap.step import Extra, Recipe, Steps, UnstackableError, identity, truly_batched

PADDING = 8  # short batches are filled up to a multiple of this
AGREES = 1e-4  # largest difference between the first step and the same step of one client alone


class Stacker:
    """Stacked training of one process, with the steps it has traced and the reasons where it had to give up."""

    def __init__(self, ctx: Context, rule: Optimiser, patient: bool = True):
        self.ctx, self.rule = ctx, rule
        self.steps = Steps(patient)
        self.reasons: dict[Any, str] = {}  # reason why a phase is trained client by client, by phase
        self._checked: dict[Any, tuple[bool, tuple[str, ...]]] = {}  # may be padded; names without a gradient

    def train(self, phases: Sequence[Phase], members: Sequence[Member], round: int) -> None:
        """Train all members locally, with the results of trainer.train up to rounding."""
        for m in members:
            m.params = T.clone(m.params)
            m.noise = first_noise(self.ctx.device, key(self.ctx.seed, "noise", round, m.data.client))
        awake = [m for m in members if m.train]
        with self.ctx.net.train_mode():
            for i, phase in enumerate(phases):
                self._phase(i, phase, awake, round)

    def _phase(self, at: int, phase: Phase, members: Sequence[Member], round: int) -> None:
        try:
            if phase.update is not None or phase.every_epoch is not None or phase.batches_per_step > 1:
                raise UnstackableError("it has a step of its own")
            name = (at, identity(phase.objective))
            if name in self.reasons:
                raise UnstackableError(self.reasons[name])
            groups: dict[Any, list[Member]] = {}
            for m in members:
                groups.setdefault(self._signature(m), []).append(m)
        except UnstackableError as e:
            self._alone(at, phase, members, round, str(e))
            return
        for signature, group in groups.items():
            for a in range(0, len(group), LARGEST_STACK):
                part = group[a : a + LARGEST_STACK]
                try:
                    self._together((name, signature), phase, part, round)
                except UnstackableError as e:
                    self.reasons[name] = str(e)
                    self._alone(at, phase, part, round, str(e))

    def _alone(self, at: int, phase: Phase, members: Sequence[Member], round: int, why: str) -> None:
        self.reasons.setdefault(at, why)
        for m in members:
            restore_noise(self.ctx.device, m.noise)
            done = run_phase(self.ctx, self.rule, phase, m.params, m.extras, m.per_sample, m.data, round, m.share)
            m.noise = noise_state(self.ctx.device)
            m.params, m.extras, m.aux = done.params, done.extras, done.aux or m.aux
            m.steps, m.samples, m.loss = m.steps + done.steps, m.samples + done.samples, m.loss + done.loss

    def _signature(self, m: Member) -> Any:
        """Return the properties that all clients of one stack share."""
        tree = tuple((k, tuple(v.shape), v.dtype) for k, v in m.params.items())
        x = m.data.train.x
        per_sample = [tuple(c.shape[1:]) for c in m.columns[2:]]
        return tree, Extra.of(m.extras).key, tuple(x.shape[1:]), self._width(len(x)), tuple(per_sample)

    def _width(self, n: int) -> int:
        """Return the size to which batches of a client with n samples are padded; batch norm allows no padding."""
        if self.ctx.net.has_batch_norm:
            return self.ctx.batch + FEWEST - 1
        return min(self.ctx.batch, -(-n // PADDING) * PADDING)

    def _together(self, name: Any, phase: Phase, members: list[Member], round: int) -> None:
        draws = [_draws(self.ctx, phase, m, round, self._width(len(m.data.train))) for m in members]
        ranked = sorted(range(len(members)), key=lambda i: -len(draws[i][1]))
        members, draws = [members[i] for i in ranked], [draws[i] for i in ranked]
        if not draws or not draws[0][1]:
            return
        recipe = self._recipe(name, phase, members[0], draws[0])
        if recipe is None:
            return
        at = (name, recipe.padded, recipe.trains, recipe.decays, recipe.rule, recipe.clip)
        Stack(self.steps, at, recipe, members, draws, torch.tensor(phase_lr(self.ctx, phase, round))).run()

    def _recipe(self, name: Any, phase: Phase, first: Member, draws: Draws) -> Recipe | None:
        """Return the recipe of a step, checked once against a step of one client alone; None if nothing is trained."""
        trains = trained_names(self.ctx, phase, first.params)
        if not trains:
            return None
        objective = phase.objective
        assert objective is not None
        moves = tuple(k for k, v in first.params.items() if v.is_floating_point() and T.plain(k) in self.ctx.net.fixed)
        recipe = Recipe(
            objective,
            tuple(first.params),
            tuple(trains),
            moves,
            tuple(weight_decays(self.rule, phase, trains)),
            self.rule,
            largest_norm(self.rule, phase),
            Extra.of(first.extras),
            not self.ctx.net.has_batch_norm,
        )
        at = (name, recipe.trains, recipe.decays, recipe.clip)
        if at not in self._checked:
            self._checked[at] = _check(recipe, first, draws[0][0], draws[1][0])
        padded, unused = self._checked[at]
        return replace(recipe.without(unused), padded=recipe.padded and padded)


def _draws(ctx: Context, phase: Phase, m: Member, round: int, width: int) -> Draws:
    """Return the samples of each step of a client [steps, width], padded with its first, and counts of real ones."""
    spans = batch_spans(ctx, len(m.data.train))
    batches = list(orders(ctx, phase, m.data, round, m.share))
    if not batches:
        return torch.zeros(0, width, dtype=torch.int64), []
    steps = sum(limit for _, limit in batches)
    sizes = torch.tensor([span.stop - span.start for span in spans])
    within = torch.arange(width)
    at = (torch.tensor([span.start for span in spans])[:, None] + within) * (
        within < sizes[:, None]
    )  # [batches, width]
    rows = torch.stack([o for o, _ in batches])[:, at].reshape(-1, width)[
        :steps
    ]  # only the last epoch may be cut short
    return rows, (sizes.tolist() * len(batches))[:steps]


def _check(recipe: Recipe, m: Member, drawn: Tensor, real: int) -> tuple[bool, tuple[str, ...]]:
    """Compare a step of one client alone and in a stack of one; return padding and names without gradient."""
    columns = m.columns
    short = max(1, real - 1) if recipe.padded else real
    tree = T.clone(m.params)
    leaves = [tree[k].requires_grad_() for k in recipe.trains]
    with torch.random.fork_rng(devices=[]):
        rows = drawn.to(m.data.train.y.device)
        x, y, *per_sample = (c[rows[:short]] for c in columns)
        got: Any = recipe.loss(tree, Batch(x, y, None, *per_sample), m.extras)
    loss: Tensor = got[0] if isinstance(got, tuple) else got
    if not loss.requires_grad:
        raise UnstackableError("its loss has no gradient")
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
    unused = tuple(k for k, g in zip(recipe.trains, gradients, strict=True) if g is None)
    gradients = gradients if recipe.clip is None else clipped(gradients, recipe.clip)
    rule = replace(recipe.rule, kind="sgd", momentum=0.0)  # plain SGD reveals a wrong gradient best
    Stepper(rule, leaves, recipe.decays, 0.1)(gradients, 0.1)
    recipe = replace(recipe.without(unused), rule=rule)
    for padded in (True, False) if recipe.padded else (False,):
        took = rows if padded else rows[:short]
        weight = (torch.arange(len(took)) < short).float().to(took.device)
        trial = replace(recipe, padded=padded)
        new = _try(trial, m, weight, *(c[took] for c in columns))
        if all(torch.allclose(a, tree[k].detach(), AGREES, AGREES, True) for k, a in new.items()):
            return padded, unused
    raise UnstackableError("a stacked step gives another result")


def _try(recipe: Recipe, m: Member, *batch: Tensor) -> Tree:
    names = [*recipe.trains, *recipe.moves, *recipe.rest]
    flat = [v[None] for v in (*(m.params[k] for k in names), *recipe.extra.stacked(batch[0].device), *batch)]
    try:
        with truly_batched():
            out = recipe.stacked(*flat, torch.tensor(0.1), torch.tensor(1.0))
    except UnstackableError:
        raise
    except Exception as e:  # any error of vmap: random numbers, a branch on a value
        if out_of_memory(e):
            raise
        raise UnstackableError(_said(e)) from None
    return {k: v[0] for k, v in zip([*recipe.trains, *recipe.moves], out, strict=False)}


def _said(e: Exception) -> str:
    text = str(e)
    if "randomness" in text:
        return "it draws random numbers"
    if "batching rule" in text:
        operation = re.search(r"aten::(\w+)", text)
        return f"vmap has no rule for {operation[1] if operation else 'one of its operations'}"
    if "item()" in text or "control flow" in text or "data-dependent" in text:
        return "it branches on values"
    return f"vmap cannot follow it ({(text.splitlines() or [''])[0][:80].strip()})"
