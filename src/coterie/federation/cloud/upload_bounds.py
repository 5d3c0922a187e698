"""Uploads that are implausibly large beside those of other senders, or that claim implausibly many samples.

A sender is a client, or an edge with what it has merged. The size of an upload is the Euclidean norm of its difference
to what its sender was sent (of entries that were not sent: of the entry itself). It is held against what an upload with
these entries usually has: the median of each entry over the uploads of the round, or, where fewer than three senders
change an entry, over earlier rounds. Uploads without any change (of stragglers, for example) say nothing about what is
usual. Where nothing says what is usual, a change is held against the norm of what was sent.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from coterie.core.tree import Tree
from coterie.engine.messages import TrainAnswer, TrainRequest

ENOUGH = 3  # values from which a median tells who is the odd one
ROUNDS = 10  # rounds that are remembered
SAMPLES = 1000.0  # times the median number of samples of the others
SMALL = 1e-3  # of the norm of what was sent: a median below this is taken for this

Sizes = dict[str, float]  # by entry


@dataclass
class UsualSizes:
    """The usual size of every entry in the last rounds whose uploads were accepted."""

    rounds: dict[int, Sizes] = field(default_factory=dict)

    def add(self, round: int, usual: Sizes) -> None:
        kept = {r: sizes for r, sizes in self.rounds.items() if r < round}
        self.rounds = dict(list({**kept, round: usual}.items())[-ROUNDS:])

    def usual(self, entry: str) -> float | None:
        found = [sizes[entry] for sizes in self.rounds.values() if entry in sizes]
        return median(found) if len(found) >= ENOUGH else None


@dataclass(frozen=True)
class Judgement:
    refused: dict[int, str]  # why, by sender
    sizes: Mapping[int, Sizes]

    def usual(self, accepted: Iterable[int]) -> Sizes:
        """Of the uploads of these senders."""
        return _usual([self.sizes[i] for i in accepted if i in self.sizes], 1)


def judge(
    requests: Iterable[TrainRequest], answers: Mapping[int, TrainAnswer], factor: float, memory: UsualSizes
) -> Judgement:
    """The uploads of clients, and their numbers of samples."""
    sent = {r.client: r.download for r in requests if r.client in answers}
    judged = judge_uploads(sent, {i: answers[i].upload for i in sent}, factor, memory)
    return Judgement({**judged.refused, **_samples({i: answers[i].samples for i in sent})}, judged.sizes)


def judge_uploads(
    sent: Mapping[int, Tree], uploads: Mapping[int, Tree], factor: float, memory: UsualSizes
) -> Judgement:
    """Refuse uploads larger than `factor` times what is usual (0: none).

    Uploads with NaN or infinity are left to the schema, which knows where NaN is allowed.
    """
    found = {i: sizes(upload, sent[i]) for i, upload in sorted(uploads.items())}
    floors = {i: sizes(sent[i], {}) for i in found}
    entries = {k for each in found.values() for k in each}
    before = {k: v for k in entries if (v := memory.usual(k)) is not None}
    usual = {**before, **_usual(list(found.values()), ENOUGH)}
    refused: dict[int, str] = {}
    for i, each in found.items() if factor > 0 else ():
        known, model = [k for k in each if k in usual], [k for k in each if k in floors[i]]
        start = math.hypot(*(floors[i][k] for k in model))
        if known:
            size, what = math.hypot(*(each[k] for k in known)), "as usual"
            typical = max(math.hypot(*(usual[k] for k in known)), SMALL * start)
        else:
            size, what, typical = math.hypot(*(each[k] for k in model)), "as what was sent", start
        if typical > 0 and size > factor * typical:
            refused[i] = f"the upload is {size / typical:.3g} times as large {what}, the bound is {factor:g} times"
    return Judgement(refused, found)


def _usual(found: Sequence[Sizes], least: int) -> Sizes:
    """The median of every entry that so many uploads change."""
    changed: dict[str, list[float]] = {}
    for each in found:
        for k, v in each.items():
            if v > 0:
                changed.setdefault(k, []).append(v)
    return {k: median(values) for k, values in sorted(changed.items()) if len(values) >= least}


def sizes(upload: Tree, sent: Tree) -> Sizes:
    """The norm of every floating-point entry's change; empty if the upload has infinity in it, or is no upload."""
    out: Sizes = {}
    for k, v in upload.items():
        if not v.is_floating_point():
            continue
        change = v.detach().to(torch.float64)
        if k in sent and sent[k].shape == v.shape:
            change = change - sent[k].to(torch.float64)
        norm = float(torch.linalg.vector_norm(torch.where(change.isnan(), 0.0, change)))
        if not math.isfinite(norm):
            return {}
        out[k] = norm
    return out


def median(values: Sequence[float]) -> float:
    """The lower one of an even number."""
    return sorted(values)[(len(values) - 1) // 2]


def _samples(counts: Mapping[int, int]) -> dict[int, str]:
    if len(counts) < ENOUGH:
        return {}
    most = SAMPLES * max(1.0, median([float(n) for n in counts.values()]))
    return {
        i: f"it claims {n} samples, more than {SAMPLES:g} times the median of this round"
        for i, n in counts.items()
        if n > most
    }


__all__ = ["Judgement", "UsualSizes", "judge", "judge_uploads"]
