"""The server's part of a secure sum, as pure functions over the answers of one step after the other.

Each function drops the clients that did not answer. `SumFailed` is raised as soon as the sum cannot be found any more;
before the last step the server knows nothing but masked numbers, which are uniformly random to it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from coterie.errors import CoterieError
from coterie.privacy.secure_sum.client import add_pair_mask, own_mask_key
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.messages import (
    SEALED_BYTES,
    IncomingShares,
    MaskedWords,
    NeighbourKeys,
    PublicKeys,
    RevealedShares,
    SealedShares,
    SummedWords,
    SumTerms,
    Survivors,
    check_bytes,
    check_keys,
    tensor_words,
    to_bytes,
)
from coterie.privacy.secure_sum.neighbours import neighbour_graph
from coterie.privacy.secure_sum.primitives import commitment, mask_words, public_key
from coterie.privacy.secure_sum.shamir import SHARE_BYTES, recover_secret


class SumFailed(CoterieError):  # noqa: N818  # not an error of a program: too few clients are left
    """The sum cannot be found: too few clients are left, or clients lied."""


@dataclass(frozen=True)
class Summation:
    """The server's knowledge of one sum. Clients can only leave it."""

    terms: SumTerms
    count: int  # words of a client
    keys: Mapping[int, PublicKeys]  # keys by client, for the clients that sent them
    graph: Mapping[int, tuple[int, ...]]
    sealed: Mapping[int, SealedShares] = field(default_factory=dict, repr=False)  # sealed shares by sender
    survivors: tuple[int, ...] = ()  # clients whose masked words are in `total`
    total: Words | None = field(default=None, repr=False)

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the clients that hold shares of this client's secrets."""
        return tuple(sorted((client, *self.graph[client])))

    def threshold(self, client: int) -> int:
        """Return the number of shares that recover a secret of this client."""
        return self.terms.threshold(len(self.graph[client]) + 1)


def begin_sum(terms: SumTerms, count: int, answers: Iterable[PublicKeys], places: int) -> Summation:
    """Begin a sum with the clients that gave keys; `places` is larger than every client's number."""
    keys = {k.client: k for k in sorted(answers, key=lambda k: k.client)}
    if len(keys) < terms.least:
        raise SumFailed(f"a secure sum needs at least {terms.least} clients, and {len(keys)} are here")
    if any(not 0 <= i < places for i in keys):
        raise CoterieError("a client's number is beyond the places")
    return Summation(terms, count, keys, neighbour_graph(list(keys), terms.session))


def check_public_keys(keys: PublicKeys, client: int) -> PublicKeys:
    """Return a client's keys; raise CoterieError if they are not well formed."""
    check_keys(keys)
    check_bytes(keys.committed, [32], "the commitment")
    if keys.client != client:
        raise CoterieError(f"the keys are of client {keys.client}, not of client {client}")
    return keys


def neighbour_keys(s: Summation, places: int) -> dict[int, NeighbourKeys]:
    """Return what each client needs to share its secrets."""
    members = torch.zeros(places, dtype=torch.bool)
    members[list(s.keys)] = True
    shown = {i: replace(k, committed=k.committed[:0]) for i, k in s.keys.items()}
    return {i: NeighbourKeys(members, tuple(shown[j] for j in s.graph[i])) for i in s.keys}


def check_sealed(s: Summation, shares: SealedShares, client: int) -> SealedShares:
    """Return a client's sealed shares; raise CoterieError if they are not for all its neighbours."""
    check_bytes(shares.sealed, [len(s.graph[client]), SEALED_BYTES], "the shares")
    if shares.client != client:
        raise CoterieError(f"the shares are of client {shares.client}, not of client {client}")
    return shares


def take_sealed(s: Summation, answers: Iterable[SealedShares]) -> Summation:
    """Go on with the clients that shared their secrets."""
    given = {a.client: a for a in sorted(answers, key=lambda a: a.client)}
    left = _enough(s, given)
    if len(left) < s.terms.least:
        raise SumFailed(f"a secure sum needs at least {s.terms.least} clients, and {len(left)} shared their keys")
    return replace(s, sealed={i: given[i] for i in sorted(left)})


def _enough(s: Summation, clients: Collection[int]) -> set[int]:
    """Return these clients without those whose secrets could not be recovered because too few holders are left."""
    left = set(clients)
    while poor := {i for i in left if len(left & set(s.holders(i))) < s.threshold(i)}:
        left -= poor
    return left


def incoming_shares(s: Summation) -> dict[int, IncomingShares]:
    """Return what each client gets from its neighbours."""
    at = {i: {j: row for row, j in enumerate(s.graph[i])} for i in s.sealed}
    messages = {}
    for i in s.sealed:
        senders = tuple(j for j in s.graph[i] if j in s.sealed)
        rows = [s.sealed[j].sealed[at[j][i]] for j in senders]
        messages[i] = IncomingShares(senders, torch.stack(rows) if rows else torch.zeros(0, SEALED_BYTES).byte())
    return messages


def check_masked(s: Summation, masked: MaskedWords, client: int) -> MaskedWords:
    """Return a client's masked words; raise CoterieError if there are not as many as expected."""
    if masked.client != client or masked.words.dtype != torch.int32 or list(masked.words.shape) != [s.count]:
        raise CoterieError(f"the masked numbers must be {s.count} words of client {client}")
    return masked


def add_masked(s: Summation, answers: Iterable[MaskedWords]) -> Summation:
    """Go on with the clients that sent masked words; only their sum is kept."""
    total, survivors = np.zeros(s.count, np.uint32), list[int]()
    for a in answers:
        total += tensor_words(a.words)
        survivors.append(a.client)
    made = replace(s, survivors=tuple(sorted(survivors)), total=total)
    alive = set(survivors)
    if len(alive) < s.terms.least or _enough(made, alive) != alive:
        raise SumFailed(f"a secure sum of {len(s.sealed)} clients cannot be found: only {len(alive)} sent their part")
    return made


def survivors_of(s: Summation) -> dict[int, Survivors]:
    """Return which neighbours of each surviving client are part of the sum."""
    alive = set(s.survivors)
    return {i: Survivors(tuple(j for j in s.graph[i] if j in alive)) for i in s.survivors}


def check_revealed(s: Summation, revealed: RevealedShares, client: int) -> RevealedShares:
    """Return the shares that a client reveals; raise CoterieError if they are not one of each sender."""
    senders = sum(j in s.sealed for j in s.graph[client])
    check_bytes(revealed.shares, [1 + senders, SHARE_BYTES], "the revealed shares")
    if revealed.client != client:
        raise CoterieError(f"the revealed shares are of client {revealed.client}, not of client {client}")
    return revealed


def finish_sum(s: Summation, answers: Iterable[RevealedShares]) -> SummedWords:
    """Remove all masks from the sum; raise SumFailed if too few clients revealed shares, or too many lied."""
    assert s.total is not None
    shares: dict[int, dict[int, bytes]] = {i: {} for i in s.sealed}  # each client's shares, by holder
    for a in answers:
        known = [j for j in s.holders(a.client) if j == a.client or j in s.sealed]
        for j, row in zip(known, a.shares, strict=True):
            shares[j][a.client] = to_bytes(row)
    total, alive, liars = s.total.copy(), set(s.survivors), set[int]()
    session = s.terms.session
    for i in s.sealed:
        if i not in alive and not alive & set(s.graph[i]):
            continue  # it is not in the sum, and shares no mask with a client that is
        try:
            recovered = recover_secret(shares[i], s.threshold(i), partial(_fits, s, i, i in alive))
        except CoterieError as e:
            raise SumFailed(f"the mask of client {i} cannot be removed: {e}") from None
        liars |= set(recovered.liars)
        if i in alive:
            total -= mask_words(own_mask_key(recovered.secret, session, i), s.count)
        else:
            for j in sorted(alive & set(s.graph[i])):  # remove the mask that j has added for the pair
                add_pair_mask(total, recovered.secret, to_bytes(s.keys[j].mask), session, i, j)
    return SummedWords(total, s.survivors, tuple(sorted(liars)))


def _fits(s: Summation, client: int, alive: bool, secret: bytes) -> bool:
    """True for the seed that a client of the sum is committed to, or the mask key of one that is not in it."""
    keys = s.keys[client]
    if alive:
        return commitment(secret, s.terms.session, client) == to_bytes(keys.committed)
    return public_key(secret) == to_bytes(keys.mask)
