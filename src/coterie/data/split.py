"""Split each client's samples into train, validation and test parts, and hold out public samples."""

from collections.abc import Sequence

import numpy as np

from coterie.core.rng import numpy_rng
from coterie.data.dataset import Ints
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError

_TOO_FEW = "test_from = official has too few test samples to give every client one; lower clients"


def hold_out_public(
    pool: Ints, official: Ints | None, settings: PartitionSettings, seed: int
) -> tuple[Ints, Ints | None, Ints]:
    """Return (pool, official, public); public samples are removed from the part they are drawn from."""
    k = settings.public
    if k == 0 or settings.public_from == "noise":
        return pool, official, pool[:0]
    source = official if settings.public_from == "test" and official is not None else pool
    if k >= len(source):
        raise CoterieError(f"public = {k} leaves none of the {len(source)} samples that it is drawn from; lower public")
    picked = np.sort(numpy_rng(seed, "public").permutation(source)[:k])
    rest = np.setdiff1d(source, picked, assume_unique=True)
    return (rest, official, picked) if source is pool else (pool, rest, picked)


def draw_grouped_parts(
    client: Ints,
    labels: Ints,
    group: Ints,
    settings: PartitionSettings,
    own_test: bool,
    seed: int,
    names: Sequence[str],
) -> Ints:
    """Return parts like draw_parts, but draw whole groups of each client, stratified by their most common label."""
    pairs, position = np.unique(np.stack([client, group]), axis=1, return_inverse=True)
    owner, position = pairs[0], position.reshape(-1)  # [groups], [samples]
    classes = int(labels.max(initial=0)) + 1
    counts = np.bincount(position * classes + labels, minlength=len(owner) * classes).reshape(-1, classes)
    if own_test and (few := np.flatnonzero(np.bincount(owner) < 2)).size:
        raise CoterieError(
            f"client {names[few[0]]} has all its samples in one group and cannot have both training and test data"
        )
    return draw_parts(owner, counts.argmax(1), settings, own_test, seed)[position]


def draw_parts(client: Ints, labels: Ints, settings: PartitionSettings, own_test: bool, seed: int) -> Ints:
    """Return 0 (train), 1 (validation) or 2 (test) for each sample; train and test are never empty."""
    size = np.bincount(client)
    if own_test and size.min() < 2:
        raise CoterieError(
            "a client with one sample cannot have both training and test data; set min_size to 2 or more"
        )
    part = np.zeros(len(client), np.int64)
    if own_test:
        tests = np.clip(np.floor(settings.test_share * size + 0.5).astype(np.int64), 1, size - 1)
        part[_picked(client, labels, tests, settings.stratify, seed, "test")] = 2
        size = size - tests
    if settings.val_share > 0:
        rest = np.flatnonzero(part == 0)
        vals = np.minimum(np.maximum(np.floor(settings.val_share * size + 0.5).astype(np.int64), 1), size - 1)
        part[rest[_picked(client[rest], labels[rest], vals, settings.stratify, seed, "val")]] = 1
    return part


def _picked(client: Ints, labels: Ints, wanted: Ints, stratify: bool, seed: int, purpose: str) -> Ints:
    """Draw exactly wanted[i] samples of each client i, if `stratify` in proportion to its classes.

    Systematic sampling: step through each client's samples, class by class, in equal steps from a random start. Every
    class then gives its share up to one sample, and the totals are exact.
    """
    rng = numpy_rng(seed, "split", purpose)
    n = len(client)
    shuffled = rng.permutation(n)
    key = client[shuffled] * (int(labels.max(initial=0)) + 1) + labels[shuffled] if stratify else client[shuffled]
    order = shuffled[np.argsort(key, kind="stable")]
    size = np.bincount(client, minlength=len(wanted))
    start = rng.integers(0, np.maximum(size, 1))
    owner = client[order]
    position = np.arange(n) - (np.cumsum(size) - size)[owner]
    step, length, first = wanted[owner], size[owner], start[owner]
    taken = (position * step + step + first) // length > (position * step + first) // length
    return order[taken]


def deal_official_test(client: Ints, labels: Ints, test_labels: Ints, classes: int, seed: int) -> tuple[Ints, Ints]:
    """Deal test samples by each client's share of every class; return positions of dealt samples and their clients.

    Samples of a class without training samples are not dealt. A client whose shares round to zero gets one sample of
    its most common class from the client that got the most samples.
    """
    n = int(client.max()) + 1
    held = np.bincount(labels * n + client, minlength=classes * n).reshape(classes, n)
    total = held.sum(axis=1)
    per_class = np.where(total > 0, np.bincount(test_labels, minlength=classes), 0)
    if per_class.sum() < n:
        raise CoterieError(_TOO_FEW)
    # Integer arithmetic: floor(cumsum(share) * n_c) without rounding errors.
    edges = np.cumsum(held, axis=1) * per_class[:, None] // np.maximum(total, 1)[:, None]
    counts = np.diff(edges, axis=1, prepend=0)
    for empty in np.flatnonzero(counts.sum(axis=0) == 0):
        _borrow(counts, held[:, empty], int(empty))
    shuffled = numpy_rng(seed, "split", "official").permutation(len(test_labels))
    order = shuffled[np.argsort(test_labels[shuffled], kind="stable")]
    order = order[per_class[test_labels[order]] > 0]
    return order, np.repeat(np.tile(np.arange(n), classes), counts.ravel())


def _borrow(counts: Ints, held: Ints, empty: int) -> None:
    for c in np.argsort(-held, kind="stable"):
        if held[c] == 0:
            break
        richest = np.where(counts[c] > 0, counts.sum(axis=0), 0)
        giver = int(np.argmax(richest))
        if richest[giver] > 1:
            counts[c, giver] -= 1
            counts[c, empty] += 1
            return
    raise CoterieError(_TOO_FEW)
