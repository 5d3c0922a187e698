"""A client's four steps of a secure sum, as pure functions: (participant, message) -> (participant, answer).

A participant refuses every step out of order and every repetition. It never masks twice with the same keys, and it
reveals for each other client either a share of the mask key or a share of the seed, once.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from coterie.errors import CoterieError
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.messages import (
    KEY_BYTES,
    SEALED_BYTES,
    SUM_STEPS,
    IncomingShares,
    MaskedWords,
    NeighbourKeys,
    PublicKeys,
    RevealedShares,
    SealedShares,
    SumTerms,
    Survivors,
    check_bytes,
    check_keys,
    rows_tensor,
    to_bytes,
    to_tensor,
    words_tensor,
)
from coterie.privacy.secure_sum.neighbours import neighbour_graph
from coterie.privacy.secure_sum.primitives import (
    commitment,
    derived_key,
    mask_words,
    open_sealed,
    public_key,
    seal_share,
    shared_key,
)
from coterie.privacy.secure_sum.shamir import SHARE_BYTES, Draw, split_secret

Sign = Callable[[bytes], bytes]
Verify = Callable[[PublicKeys, bytes], None]  # raises CoterieError unless the signature of this text is the client's


@dataclass(frozen=True)
class Participant:
    """A client's memory during one sum. It is secret, and it is dropped after the last step."""

    terms: SumTerms
    client: int
    mask_key: bytes = field(repr=False)
    cipher_key: bytes = field(repr=False)
    seed: bytes = field(repr=False)  # seed of the client's own mask
    done: str = "keys"  # the last step
    neighbours: Mapping[int, PublicKeys] = field(default_factory=dict, repr=False)
    threshold: int = 0  # number of shares that recover the client's own secrets
    held: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)  # shares of (mask key, seed)

    def advance(self, step: str) -> None:
        """Raise CoterieError unless this step is the next one."""
        if SUM_STEPS.index(step) != SUM_STEPS.index(self.done) + 1:
            raise CoterieError(f'a secure sum asks for the step "{step}" after "{self.done}"')


def _nothing(text: bytes) -> bytes:
    return b""


def _trust(keys: PublicKeys, text: bytes) -> None:
    return None


def offer_keys(
    terms: SumTerms, client: int, draw: Draw = secrets.token_bytes, sign: Sign = _nothing
) -> tuple[Participant, PublicKeys]:
    """Draw the secrets of a sum, and return the public keys."""
    if terms.least < 2 or not 0 <= terms.share < 1:
        raise CoterieError(f"a secure sum needs at least 2 clients and a share below 1, not {terms}")
    me = Participant(terms, client, draw(KEY_BYTES), draw(KEY_BYTES), draw(KEY_BYTES))
    mask, cipher = to_tensor(public_key(me.mask_key)), to_tensor(public_key(me.cipher_key))
    committed = to_tensor(commitment(me.seed, terms.session, client))
    keys = PublicKeys(client, mask, cipher, committed, to_tensor(b""))
    return me, replace(keys, signature=to_tensor(sign(keys.signed_text(terms.session))))


def share_secrets(
    me: Participant, offer: NeighbourKeys, draw: Draw = secrets.token_bytes, verify: Verify = _trust
) -> tuple[Participant, SealedShares]:
    """Check the neighbours and their keys, and return shares of this client's secrets, sealed for each of them."""
    me.advance("shares")
    if offer.members.dtype != torch.bool or offer.members.ndim != 1:
        raise CoterieError("the clients of a secure sum must be a list of marks")
    members = torch.nonzero(offer.members).flatten().tolist()
    if me.client not in members:
        raise CoterieError("a secure sum was asked of a client that is not part of it")
    neighbours = {k.client: k for k in sorted(offer.keys, key=lambda k: k.client)}
    if tuple(neighbours) != neighbour_graph(members, me.terms.session)[me.client] or len(neighbours) < len(offer.keys):
        raise CoterieError("the keys for a secure sum are not those of the neighbours that the session decides")
    threshold = me.terms.threshold(len(neighbours) + 1)
    if threshold > len(neighbours) + 1:
        raise CoterieError(f"a secure sum needs at least {threshold} clients, and {len(neighbours) + 1} are here")
    for keys in neighbours.values():
        check_keys(keys)
        verify(keys, keys.signed_text(me.terms.session))
    if len({to_bytes(k.mask) for k in neighbours.values()} | {public_key(me.mask_key)}) <= len(neighbours):
        raise CoterieError("two clients of a secure sum have the same key")
    holders = [me.client, *neighbours]
    mask_shares = split_secret(me.mask_key, holders, threshold, draw)
    seed_shares = split_secret(me.seed, holders, threshold, draw)
    sealed = [
        seal_share(_sealing_key(me, keys, me.client, j), mask_shares[j] + seed_shares[j], _label(me, me.client, j))
        for j, keys in neighbours.items()
    ]
    own = {me.client: (mask_shares[me.client], seed_shares[me.client])}
    after = replace(me, done="shares", neighbours=neighbours, threshold=threshold, held=own)
    return after, SealedShares(me.client, rows_tensor(sealed, SEALED_BYTES))


def mask_input(me: Participant, incoming: IncomingShares, words: Words) -> tuple[Participant, MaskedWords]:
    """Open the neighbours' shares, and return the words with the client's own mask and one for each neighbour."""
    me.advance("masked")
    senders = incoming.senders
    if list(senders) != sorted(set(senders)) or not set(senders) <= me.neighbours.keys():
        raise CoterieError("shares for a secure sum come from clients that are not neighbours")
    if len(senders) + 1 < me.threshold:
        raise CoterieError(f"a secure sum needs at least {me.threshold} clients, and {len(senders) + 1} are left")
    check_bytes(incoming.sealed, [len(senders), SEALED_BYTES], "the shares for a secure sum")
    held = dict(me.held)
    for j, row in zip(senders, incoming.sealed, strict=True):
        try:
            opened = open_sealed(
                _sealing_key(me, me.neighbours[j], j, me.client), to_bytes(row), _label(me, j, me.client)
            )
        except CoterieError as e:
            raise CoterieError(f"client {j}: {e}") from None
        held[j] = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
    masked = words + mask_words(own_mask_key(me.seed, me.terms.session, me.client), len(words))
    for j in senders:
        add_pair_mask(masked, me.mask_key, to_bytes(me.neighbours[j].mask), me.terms.session, me.client, j)
    return replace(me, done="masked", held=held), MaskedWords(me.client, words_tensor(masked))


def reveal_shares(me: Participant, survivors: Survivors) -> tuple[Participant, RevealedShares]:
    """Return the shares that let the server remove the masks of the sum."""
    me.advance("unmask")
    alive = {*survivors.clients, me.client}
    if not alive <= me.held.keys() or len(alive) != len(survivors.clients) + 1:
        raise CoterieError("a secure sum names survivors that have not taken part in it")
    if len(alive) < me.threshold:
        raise CoterieError(f"a secure sum needs at least {me.threshold} clients, and {len(alive)} are left")
    rows = [me.held[j][1] if j in alive else me.held[j][0] for j in sorted(me.held)]
    return replace(me, done="unmask", held={}), RevealedShares(me.client, rows_tensor(rows, SHARE_BYTES))


# ---- what both sides compute -----------------------------------------------------------------------------------------
def own_mask_key(seed: bytes, session: str, client: int) -> bytes:
    """Return the generator's key for a client's own mask, which no neighbour knows."""
    return derived_key(seed, "own mask", session, client)


def add_pair_mask(words: Words, private: bytes, public: bytes, session: str, client: int, other: int) -> None:
    """Add the mask of a pair for one of its clients, in place. The other client of the pair adds the negative mask."""
    low, high = sorted((client, other))
    key = shared_key(private, public, "pair mask", session, low, high)
    mask = mask_words(key, len(words))
    if client == low:
        words += mask
    else:
        words -= mask


def _sealing_key(me: Participant, other: PublicKeys, sender: int, receiver: int) -> bytes:
    return shared_key(me.cipher_key, to_bytes(other.cipher), "share", me.terms.session, sender, receiver)


def _label(me: Participant, sender: int, receiver: int) -> str:
    return f"{me.terms.session}\x1f{sender}\x1f{receiver}"
