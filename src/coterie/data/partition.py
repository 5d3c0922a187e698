"""Partitions: which client each sample of a pool goes to.

A scheme deals whole pools at once with array operations, so 100,000 clients take seconds. Every draw is keyed by
(seed, scheme, attempt); a partition that leaves somebody below the minimum size is drawn again, within bounds.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coterie.core.rng import numpy_rng
from coterie.data.partition_spec import Scheme, parse_scheme
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def deal(
    labels: Ints, owner: Ints | None, classes: int, n_clients: int, settings: PartitionSettings, seed: int
) -> Ints:
    """The client of each sample [n]; -1 for samples whose natural client is left out."""
    scheme = settings.scheme
    if scheme.name == "natural":
        return _natural(owner, settings)
    least = max(settings.min_size, 1)
    if n_clients > len(labels):
        raise CoterieError(f"clients = {n_clients} is more than the {len(labels)} samples there are to deal out")
    if n_clients * least > len(labels):
        raise CoterieError(
            f"{len(labels)} samples cannot give {n_clients} clients min_size = {least} each; lower clients or min_size"
        )
    if scheme.name == "iid":
        return _iid(len(labels), n_clients, numpy_rng(seed, "partition", "iid"))
    if scheme.name == "shards":
        return _shards(labels, n_clients, int(scheme["s"]), least, numpy_rng(seed, "partition", "shards"))
    if scheme.name == "exdir":
        return _exdir(labels, classes, n_clients, settings, seed)
    return _dirichlet(labels, classes, n_clients, settings, seed)


def _iid(n: int, n_clients: int, rng: np.random.Generator) -> Ints:
    """Equal shares of a shuffled pool; sizes differ by one at most."""
    client = np.empty(n, np.int64)
    client[rng.permutation(n)] = np.arange(n) * n_clients // n
    return client


def _shards(labels: Ints, n_clients: int, per_client: int, least: int, rng: np.random.Generator) -> Ints:
    """Sort by label, cut into per_client * n_clients equal shards, deal each client per_client of them at random."""
    n, shards = len(labels), per_client * n_clients
    if shards > n:
        raise CoterieError(
            f"shards({per_client}) over {n_clients} clients needs {shards} shards, but there are only {n} samples"
        )
    if n // shards * per_client < least:
        raise CoterieError(
            f"shards({per_client}) over {n_clients} clients can leave {n // shards * per_client} samples to a client, "
            f"fewer than min_size = {least}; lower clients, shards or min_size"
        )
    order = _by_class(labels, rng)
    holder = rng.permutation(shards) // per_client
    client = np.empty(n, np.int64)
    client[order] = holder[np.arange(n) * shards // n]
    return client


def _natural(owner: Ints | None, settings: PartitionSettings) -> Ints:
    """The clients the data name, renumbered from 0; those with fewer than min_size samples are left out."""
    if owner is None:
        raise CoterieError("partition natural needs data that name their clients (client_train), and these do not")
    _, client, size = np.unique(owner, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(size >= max(settings.min_size, 2))
    if len(kept) == 0:
        raise CoterieError(f"no natural client has min_size = {settings.min_size} samples; lower min_size")
    wanted = settings.clients or len(kept)
    if wanted > len(kept):
        raise CoterieError(
            f"clients = {wanted} is more than the {len(kept)} natural clients with at least {settings.min_size} samples"
        )
    number = np.full(len(size), -1, np.int64)
    number[kept[:wanted]] = np.arange(wanted)
    return number[client]


def _dirichlet(labels: Ints, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> Ints:
    """Per class, shares ~ Dir(alpha) over the clients."""
    scheme = settings.scheme
    alpha = np.full(n_clients, scheme["alpha"])
    per_class = np.bincount(labels, minlength=classes)
    limit = len(labels) / n_clients if settings.cap else None

    def draw(rng: np.random.Generator) -> Ints:
        shares = rng.dirichlet(alpha, size=classes)  # [classes, clients]
        if limit is None:
            return _cut(shares, per_class)
        return _capped(shares, per_class, limit, lambda c, opened: opened / opened.sum())

    if settings.short == "fill":
        rng = numpy_rng(seed, "partition", scheme.name, 0)
        return _filled(_spread(labels, draw(rng), rng), n_clients, settings.min_size, rng)
    mend = "raise alpha, lower clients or min_size, or set short = fill"
    return _redrawn(draw, labels, classes, n_clients, settings, seed, mend)


def _exdir(labels: Ints, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> Ints:
    """Every client draws C labels; per class, shares ~ Dir(alpha) over the clients that hold it."""
    C, alpha = int(settings.scheme["C"]), settings.scheme["alpha"]
    per_class = np.bincount(labels, minlength=classes)
    if classes < C:
        raise CoterieError(f"exdir({C}, {alpha:g}) asks for {C} labels per client, but the data have {classes} classes")
    holds = _holders(C, classes, n_clients, settings, seed)  # [classes, clients]
    limit = len(labels) / n_clients if settings.exdir_cap else np.inf
    where = [np.flatnonzero(row) for row in holds]

    def draw(rng: np.random.Generator) -> Ints:
        shares = np.zeros((classes, n_clients))
        for c, ids in enumerate(where):
            each = alpha if settings.exdir_prior == "indicator" else alpha / len(ids)
            shares[c, ids] = rng.dirichlet(np.full(len(ids), each))
        # When all holders are at the cap, what is left goes to the last of them.
        return _capped(shares, per_class, limit, lambda c, opened: np.arange(n_clients) == where[c][-1])

    mend = "raise alpha or C, or lower clients or min_size"
    return _redrawn(draw, labels, classes, n_clients, settings, seed, mend)


def _holders(C: int, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> NDArray[np.bool_]:
    """Who holds which label [classes, clients]; drawn again until every label has enough holders."""
    least = settings.exdir_min_holders or max(1, C * n_clients // classes // 2)
    for attempt in range(_attempts(n_clients * classes)):
        rng = numpy_rng(seed, "partition", "exdir-labels", attempt)
        drawn = np.argpartition(rng.random((n_clients, classes), dtype=np.float32), C - 1, axis=1)[:, :C]
        holds = np.zeros((classes, n_clients), bool)
        holds[drawn.ravel(), np.repeat(np.arange(n_clients), C)] = True
        if holds.sum(axis=1).min() >= least:
            return holds
    raise CoterieError(
        f"{settings.scheme} over {n_clients} clients leaves some of {classes} labels with fewer than {least} holders "
        "every time; raise C or clients, or lower exdir_min_holders"
    )


def _redrawn(
    draw: Callable[[np.random.Generator], Ints],
    labels: Ints,
    classes: int,
    n_clients: int,
    settings: PartitionSettings,
    seed: int,
    mend: str,
) -> Ints:
    """The first draw that gives every client min_size samples."""
    attempts = _attempts(n_clients * classes)
    for attempt in range(attempts):
        rng = numpy_rng(seed, "partition", settings.scheme.name, attempt)
        counts = draw(rng)
        if counts.sum(axis=0).min() >= settings.min_size:
            return _spread(labels, counts, rng)
    raise CoterieError(
        f"{settings.scheme} over {n_clients} clients left a client with fewer than min_size = {settings.min_size} "
        f"samples in each of {attempts} draws; {mend}"
    )


def _attempts(work: int) -> int:
    """Few for huge federations, so that giving up takes seconds, never a matter of the machine's speed."""
    return max(20, min(2000, 50_000_000 // work))


def _cut(shares: Floats, per_class: Ints) -> Ints:
    """Counts [classes, clients]: each class cut at floor(cumsum * n), the last client taking the rest."""
    edges = np.floor(np.cumsum(shares, axis=1) * per_class[:, None]).astype(np.int64)
    edges = np.minimum(edges, per_class[:, None])
    edges[:, -1] = per_class
    return np.diff(edges, axis=1, prepend=0)


def _capped(
    shares: Floats, per_class: Ints, limit: float, instead: Callable[[int, Floats], NDArray[np.float64 | np.bool_]]
) -> Ints:
    """Like _cut, class after class, without those who hold `limit` samples; `instead` when nobody is left to share."""
    counts = np.zeros(shares.shape, np.int64)
    held = np.zeros(shares.shape[1], np.int64)
    for c, n in enumerate(per_class):
        if n == 0:
            continue
        opened = held < limit
        share = shares[c] * opened
        if not share.sum() > 0:
            share = instead(c, opened.astype(float)).astype(float)
        last = int(np.flatnonzero(share)[-1])  # rounding leftovers go to a client that is not full
        edges = np.floor(np.cumsum(share / share.sum()) * n).astype(np.int64)
        edges[last:] = n
        counts[c] = np.diff(np.minimum(edges, n), prepend=0)
        held += counts[c]
    return counts


def _by_class(labels: Ints, rng: np.random.Generator) -> Ints:
    """Sample numbers sorted by label, shuffled within each."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _spread(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Assign the shuffled samples of each class to clients, by the given counts [classes, clients]."""
    client = np.empty(len(labels), np.int64)
    client[_by_class(labels, rng)] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return client


def _filled(client: Ints, n_clients: int, least: int, rng: np.random.Generator) -> Ints:
    """Cut the largest clients to a common level and give what they lose to those below `least`."""
    size = np.bincount(client, minlength=n_clients)
    lacking = np.maximum(least - size, 0)
    need = int(lacking.sum())
    if need == 0:
        return client
    low, high = least, int(size.max())
    while low < high:  # the highest level at which enough is left over
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(size - level, 0).sum() >= need else (low, level - 1)
    shuffled = rng.permutation(len(client))
    order = shuffled[np.argsort(client[shuffled], kind="stable")]
    rank = np.arange(len(client)) - np.repeat(np.cumsum(size) - size, size)  # of a sample within its client
    spare = order[rank >= low]
    given = client.copy()
    given[rng.permutation(spare)[:need]] = np.repeat(np.arange(n_clients), lacking)
    return given


__all__ = ["Scheme", "deal", "parse_scheme"]
