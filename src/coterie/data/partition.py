"""Partitions: assign each sample of a pool to a client.

A scheme deals a whole pool with array operations, so 100,000 clients take seconds. Every draw is keyed by (seed,
scheme, attempt); a partition that leaves a client below the minimum size is drawn again, a limited number of times.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coterie.core.rng import numpy_rng
from coterie.data.dataset import Ints
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError

_Floats = NDArray[np.float64]


def deal(
    labels: Ints, owner: Ints | None, classes: int, n_clients: int, settings: PartitionSettings, seed: int
) -> Ints:
    """Return the client of each sample [n]; -1 for samples whose natural client is left out."""
    scheme = settings.scheme
    if scheme.name == "natural":
        return _natural(owner, settings)
    min_size = max(settings.min_size, 1)
    if n_clients > len(labels):
        raise CoterieError(f"clients = {n_clients} is more than the number of samples, {len(labels)}")
    if n_clients * min_size > len(labels):
        raise CoterieError(
            f"{len(labels)} samples are too few for {n_clients} clients with min_size = {min_size}; lower one of these"
        )
    if scheme.name == "iid":
        return _iid(len(labels), n_clients, numpy_rng(seed, "partition", "iid"))
    if scheme.name == "shards":
        return _shards(labels, n_clients, int(scheme["s"]), min_size, numpy_rng(seed, "partition", "shards"))
    if scheme.name == "exdir":
        return _exdir(labels, classes, n_clients, settings, seed)
    if scheme.name == "labels":
        return _labels(labels, classes, n_clients, settings, seed)
    return _dirichlet(labels, classes, n_clients, settings, seed)


def _iid(n: int, n_clients: int, rng: np.random.Generator) -> Ints:
    """Deal equal shares of a shuffled pool; sizes differ by at most one."""
    client = np.empty(n, np.int64)
    client[rng.permutation(n)] = np.arange(n) * n_clients // n
    return client


def _shards(labels: Ints, n_clients: int, per_client: int, min_size: int, rng: np.random.Generator) -> Ints:
    """Sort by label, cut into per_client * n_clients equal shards, and deal per_client of them to each client."""
    n, shards = len(labels), per_client * n_clients
    if shards > n:
        raise CoterieError(
            f"shards({per_client}) over {n_clients} clients needs {shards} shards, but there are only {n} samples"
        )
    if n // shards * per_client < min_size:
        raise CoterieError(
            f"shards({per_client}) over {n_clients} clients can leave {n // shards * per_client} samples to a client, "
            f"fewer than min_size = {min_size}; lower clients, shards or min_size"
        )
    order = _by_class(labels, rng)
    holder = rng.permutation(shards) // per_client
    client = np.empty(n, np.int64)
    client[order] = holder[np.arange(n) * shards // n]
    return client


def _natural(owner: Ints | None, settings: PartitionSettings) -> Ints:
    """Take the clients that the data name, renumbered from 0; leave out those with fewer than min_size samples."""
    if owner is None:
        raise CoterieError("partition natural needs data that name their clients (client_train), and these do not")
    _, client, size = np.unique(owner, return_inverse=True, return_counts=True)
    large = np.flatnonzero(size >= max(settings.min_size, 2))
    if len(large) == 0:
        raise CoterieError(f"no natural client has min_size = {settings.min_size} samples; lower min_size")
    wanted = settings.clients or len(large)
    if wanted > len(large):
        raise CoterieError(
            f"clients = {wanted} is more than the {len(large)} natural clients with {settings.min_size} or more samples"
        )
    number = np.full(len(size), -1, np.int64)
    number[large[:wanted]] = np.arange(wanted)
    return number[client]


def _dirichlet(labels: Ints, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> Ints:
    """Deal each class by shares ~ Dir(alpha) over the clients."""
    scheme = settings.scheme
    alpha = np.full(n_clients, scheme["alpha"])
    per_class = np.bincount(labels, minlength=classes)
    limit = len(labels) / n_clients if settings.cap else None

    def draw(rng: np.random.Generator) -> Ints:
        shares = rng.dirichlet(alpha, size=classes)  # [classes, clients]
        if limit is None:
            return _cut(shares, per_class)
        return _capped(shares, per_class, limit, lambda c, below: below / below.sum())

    if settings.short == "fill":
        rng = numpy_rng(seed, "partition", scheme.name, 0)
        return _filled(_spread(labels, draw(rng), rng), n_clients, settings.min_size, rng)
    remedy = "raise alpha, lower clients or min_size, or set short = fill"
    return _redrawn(draw, labels, classes, n_clients, settings, seed, remedy)


def _exdir(labels: Ints, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> Ints:
    """Draw C labels for every client, then deal each class by shares ~ Dir(alpha) over the clients that hold it."""
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
        # When all holders of a class are at the cap, the last of them takes the rest.
        return _capped(shares, per_class, limit, lambda c, below: np.arange(n_clients) == where[c][-1])

    remedy = "raise alpha or C, lower clients or min_size, or set exdir_cap"
    return _redrawn(draw, labels, classes, n_clients, settings, seed, remedy)


def _labels(labels: Ints, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> Ints:
    """Draw k labels for every client, and deal each class in equal parts to the clients that hold it."""
    k = int(settings.scheme["k"])
    per_class = np.bincount(labels, minlength=classes)
    if classes < k:
        raise CoterieError(f"labels({k}) asks for {k} labels per client, but the data have {classes} classes")
    if n_clients * k < classes:
        raise CoterieError(f"labels({k}) over {n_clients} clients leaves some of {classes} classes without a client")

    def draw(rng: np.random.Generator) -> Ints:
        score = rng.random((n_clients, classes))
        turn = np.arange(max(n_clients, classes))
        score[turn % n_clients, rng.permutation(classes)[turn % classes]] = -1  # every label has a holder
        holds = np.zeros((classes, n_clients), bool)
        holds[np.argsort(score, axis=1)[:, :k].ravel(), np.repeat(np.arange(n_clients), k)] = True
        edges: Ints = np.cumsum(holds, axis=1) * per_class[:, None] // holds.sum(axis=1, keepdims=True)
        return np.diff(edges, axis=1, prepend=0)

    return _redrawn(draw, labels, classes, n_clients, settings, seed, "raise k, or lower clients or min_size")


def _holders(C: int, classes: int, n_clients: int, settings: PartitionSettings, seed: int) -> NDArray[np.bool_]:
    """Draw which clients hold which label [classes, clients], until every label has enough holders."""
    min_holders = settings.exdir_min_holders or max(1, C * n_clients // classes // 2)
    for attempt in range(_attempts(n_clients * classes)):
        rng = numpy_rng(seed, "partition", "exdir-labels", attempt)
        drawn = np.argpartition(rng.random((n_clients, classes), dtype=np.float32), C - 1, axis=1)[:, :C]
        holds = np.zeros((classes, n_clients), bool)
        holds[drawn.ravel(), np.repeat(np.arange(n_clients), C)] = True
        if holds.sum(axis=1).min() >= min_holders:
            return holds
    raise CoterieError(
        f"{settings.scheme} over {n_clients} clients leaves some of {classes} labels with fewer than {min_holders} "
        "holders in every draw; raise C or clients, or lower exdir_min_holders"
    )


def _redrawn(
    draw: Callable[[np.random.Generator], Ints],
    labels: Ints,
    classes: int,
    n_clients: int,
    settings: PartitionSettings,
    seed: int,
    remedy: str,
) -> Ints:
    """Return the first draw that gives every client min_size samples."""
    attempts = _attempts(n_clients * classes)
    for attempt in range(attempts):
        rng = numpy_rng(seed, "partition", settings.scheme.name, attempt)
        counts = draw(rng)
        if counts.sum(axis=0).min() >= settings.min_size:
            return _spread(labels, counts, rng)
    raise CoterieError(
        f"{settings.scheme} over {n_clients} clients left a client with fewer than min_size = {settings.min_size} "
        f"samples in each of {attempts} draws; {remedy}"
    )


def _attempts(work: int) -> int:
    """Return how often to draw: less often for huge federations, so that giving up takes seconds on any machine."""
    return max(20, min(2000, 50_000_000 // work))


def _cut(shares: _Floats, per_class: Ints) -> Ints:
    """Return counts [classes, clients]: each class is cut at floor(cumsum * n), and the last client takes the rest."""
    edges = np.floor(np.cumsum(shares, axis=1) * per_class[:, None]).astype(np.int64)
    edges = np.minimum(edges, per_class[:, None])
    edges[:, -1] = per_class
    return np.diff(edges, axis=1, prepend=0)


def _capped(
    shares: _Floats, per_class: Ints, limit: float, fallback: Callable[[int, _Floats], NDArray[np.float64 | np.bool_]]
) -> Ints:
    """Return counts like _cut, but class by class and without the clients that already hold `limit` samples.

    `fallback` gives the shares of a class if no client with a share in it is below the limit.
    """
    counts = np.zeros(shares.shape, np.int64)
    held = np.zeros(shares.shape[1], np.int64)
    for c, n in enumerate(per_class):
        if n == 0:
            continue
        below = held < limit
        share = shares[c] * below
        if not share.sum() > 0:
            share = fallback(c, below.astype(float)).astype(float)
        last = int(np.flatnonzero(share)[-1])  # the rest of rounding goes to a client below the limit
        edges = np.floor(np.cumsum(share / share.sum()) * n).astype(np.int64)
        edges[last:] = n
        counts[c] = np.diff(np.minimum(edges, n), prepend=0)
        held += counts[c]
    return counts


def _by_class(labels: Ints, rng: np.random.Generator) -> Ints:
    """Return sample indices sorted by label and shuffled within each label."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _spread(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Assign the shuffled samples of each class to clients by counts [classes, clients]."""
    client = np.empty(len(labels), np.int64)
    client[_by_class(labels, rng)] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return client


def _filled(client: Ints, n_clients: int, min_size: int, rng: np.random.Generator) -> Ints:
    """Cut the largest clients to a common size and give the freed samples to clients below `min_size`."""
    size = np.bincount(client, minlength=n_clients)
    lacking = np.maximum(min_size - size, 0)
    need = int(lacking.sum())
    if need == 0:
        return client
    low, high = min_size, int(size.max())
    while low < high:  # the highest level that frees enough samples
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(size - level, 0).sum() >= need else (low, level - 1)
    shuffled = rng.permutation(len(client))
    order = shuffled[np.argsort(client[shuffled], kind="stable")]
    rank = np.arange(len(client)) - np.repeat(np.cumsum(size) - size, size)  # rank of each sample within its client
    spare = order[rank >= low]
    given = client.copy()
    given[rng.permutation(spare)[:need]] = np.repeat(np.arange(n_clients), lacking)
    return given
