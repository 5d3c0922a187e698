"""Refuse uploads that are implausibly large compared with other uploads, or that claim implausibly many samples.

A sender is a client, or an edge with its merged upload. The size of an upload is the Euclidean norm of its difference
to the download of its sender; for an entry that was not sent, the norm of the entry itself. It is compared with the
usual size of an upload with these entries: the median of each entry over the uploads of the round, or, where fewer than
three senders change an entry, over earlier rounds. Uploads without any change, as stragglers may send them, are left
out of the medians. An entry without a usual size is compared with the norm of the download.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from coterie.core.tree import Tree
from coterie.engine.messages import TrainAnswer, TrainRequest

_ENOUGH = 3  # values that a median needs to tell an outlier
_ROUNDS = 10  # rounds that are remembered
_SAMPLES = 1000.0  # largest number of samples, as a multiple of the round's median
_SMALL = 1e-3  # least usual size, as a share of the norm of the download

EntrySizes = dict[str, float]  # norms by name of the entry


@dataclass
class UsualSizes:
    """The usual size of every entry in the last rounds, from the uploads that were accepted."""

    rounds: dict[int, EntrySizes] = field(default_factory=dict)

    def add(self, round: int, usual: EntrySizes) -> None:
        """Remember the usual sizes of a round and forget those of later rounds, which a run that went back repeats."""
        earlier = {r: sizes for r, sizes in self.rounds.items() if r < round}
        self.rounds = dict(list({**earlier, round: usual}.items())[-_ROUNDS:])

    def usual(self, entry: str) -> float | None:
        """Return the median of an entry over the rounds; None if too few rounds have it."""
        sizes = [round_sizes[entry] for round_sizes in self.rounds.values() if entry in round_sizes]
        return _median(sizes) if len(sizes) >= _ENOUGH else None


@dataclass(frozen=True)
class Judgement:
    """The senders whose uploads are refused, and the sizes of all uploads."""

    refused: Mapping[int, str] = field(default_factory=dict)  # reason by sender
    sizes: Mapping[int, EntrySizes] = field(default_factory=dict)  # by sender

    def __or__(self, other: "Judgement") -> "Judgement":
        """Return the judgement of uploads that came in two parts."""
        sizes = {i: {**self.sizes.get(i, {}), **other.sizes.get(i, {})} for i in {**self.sizes, **other.sizes}}
        return Judgement({**self.refused, **other.refused}, sizes)

    def usual(self, accepted: Iterable[int]) -> EntrySizes:
        """Return the usual size of every entry in the uploads of these senders."""
        return _medians([self.sizes[i] for i in accepted if i in self.sizes], 1)


def judge_answers(
    requests: Iterable[TrainRequest], answers: Mapping[int, TrainAnswer], factor: float, usual: UsualSizes
) -> Judgement:
    """Judge the uploads of clients and the numbers of samples that they claim."""
    sent = {r.client: r.download for r in requests if r.client in answers}
    judged = judge_uploads(sent, {i: answers[i].upload for i in sent}, factor, usual)
    return Judgement({**judged.refused, **_too_many_samples({i: answers[i].samples for i in sent})}, judged.sizes)


def judge_uploads(sent: Mapping[int, Tree], uploads: Mapping[int, Tree], factor: float, usual: UsualSizes) -> Judgement:
    """Refuse uploads larger than `factor` times the usual size; 0 refuses none.

    Uploads with NaN or infinity are left to the schema, which knows where NaN is allowed.
    """
    sizes = {i: entry_sizes(upload, sent[i]) for i, upload in sorted(uploads.items())}
    sent_sizes = {i: entry_sizes(sent[i], {}) for i in sizes}
    entries = {k for entry in sizes.values() for k in entry}
    before = {k: v for k in entries if (v := usual.usual(k)) is not None}
    medians = {**before, **_medians(list(sizes.values()), _ENOUGH)}
    refused: dict[int, str] = {}
    for i, changes in sizes.items() if factor > 0 else ():
        known, in_download = [k for k in changes if k in medians], [k for k in changes if k in sent_sizes[i]]
        download = math.hypot(*(sent_sizes[i][k] for k in in_download))
        if known:
            size, compared = math.hypot(*(changes[k] for k in known)), "as usual"
            typical = max(math.hypot(*(medians[k] for k in known)), _SMALL * download)
        else:
            size, compared = math.hypot(*(changes[k] for k in in_download)), "as what was sent"
            typical = download
        if typical > 0 and size > factor * typical:
            refused[i] = f"the upload is {size / typical:.3g} times as large {compared}, the bound is {factor:g} times"
    return Judgement(refused, sizes)


def entry_sizes(upload: Tree, sent: Tree) -> EntrySizes:
    """Return the norm of the change of every floating-point entry; empty if a norm is infinite."""
    out: EntrySizes = {}
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


def _medians(sizes: Sequence[EntrySizes], enough: int) -> EntrySizes:
    """Return the median change of every entry that at least `enough` uploads change."""
    changed: dict[str, list[float]] = {}
    for upload in sizes:
        for k, v in upload.items():
            if v > 0:
                changed.setdefault(k, []).append(v)
    return {k: _median(values) for k, values in sorted(changed.items()) if len(values) >= enough}


def _median(values: Sequence[float]) -> float:
    """Return the median, which for an even number of values is the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _too_many_samples(counts: Mapping[int, int]) -> dict[int, str]:
    if len(counts) < _ENOUGH:
        return {}
    most = _SAMPLES * max(1.0, _median([float(n) for n in counts.values()]))
    return {
        i: f"it claims {n} samples, more than {_SAMPLES:g} times the median of this round"
        for i, n in counts.items()
        if n > most
    }
