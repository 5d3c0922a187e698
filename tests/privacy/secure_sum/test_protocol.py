"""The secure sum: equal to the plain one whoever drops out, uniform to the server, and strict with liars."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.errors import CoterieError
from coterie.privacy.secure_sum import neighbours, server
from coterie.privacy.secure_sum.client import Participant, mask_input, offer_keys, reveal_shares, share_secrets
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.messages import (
    SUM_STEPS,
    IncomingShares,
    NeighbourKeys,
    PublicKeys,
    SumTerms,
    Survivors,
    tensor_words,
    to_tensor,
)
from coterie.privacy.secure_sum.neighbours import neighbour_graph
from coterie.privacy.secure_sum.rehearsal import SumRehearsal

TERMS = SumTerms("a session", 3, 0.5)


def inputs(clients: int, count: int = 50) -> dict[int, Words]:
    rng = np.random.default_rng(clients)
    return {i: rng.integers(0, 2**32, count, dtype=np.uint32) for i in range(clients)}


def plain(words: dict[int, Words], clients: Iterator[int] | set[int]) -> Words:
    return sum((words[i] for i in clients), np.zeros(50, np.uint32))


def rehearse(clients: int = 6, **more: Any) -> SumRehearsal:
    r = SumRehearsal(TERMS, inputs(clients), **more)
    r.run()
    return r


# ---- the sum ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", SUM_STEPS)
@pytest.mark.parametrize("dropping", [0.0, 0.01, 0.3])
def test_the_sum_is_exact_when_clients_drop_out_at_any_step(step: str, dropping: float) -> None:
    n = 10
    gone = set(range(0, n, n // max(1, round(np.ceil(dropping * n))))) if dropping else set()
    gone = set(sorted(gone)[: int(np.ceil(dropping * n))])
    words = inputs(n)
    r = SumRehearsal(TERMS, words, dropping={step: gone})
    total = r.run()
    counted = set(words) - (gone if step != "unmask" else set())
    assert r.result is not None and set(r.result.clients) == counted and r.result.liars == ()
    assert np.array_equal(total, plain(words, counted))


def test_clients_may_drop_out_at_every_step_of_one_sum() -> None:
    n = 20
    words = inputs(n)
    dropping = dict(zip(SUM_STEPS, ({0, 1, 2}, {3, 4}, {5, 6, 7}, {8, 9}), strict=True))
    r = SumRehearsal(SumTerms("s", 4, 0.2), words, dropping=dropping)
    assert np.array_equal(r.run(), plain(words, set(range(8, n))))


def test_the_sparse_graph_gives_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NEIGHBOURS", 8)
    words = inputs(40)
    gone = {"shares": {1, 7}, "masked": {3, 11, 25}, "unmask": {12}}
    r = SumRehearsal(SumTerms("s", 3, 0.4), words, dropping=gone)
    assert np.array_equal(r.run(), plain(words, set(words) - {1, 7, 3, 11, 25}))
    graph = neighbour_graph(range(40), "s")
    assert all(len(graph[i]) == 8 and all(i in graph[j] for j in graph[i]) for i in graph)
    assert graph != neighbour_graph(range(40), "another session")


def test_a_keyed_rehearsal_repeats_bit_by_bit_and_a_real_one_does_not() -> None:
    one, two = (rehearse(draw_key=b"seed") for _ in range(2))
    assert all(np.array_equal(one.masked[i], two.masked[i]) for i in one.masked)
    assert not np.array_equal(rehearse().masked[0], rehearse().masked[0])


@pytest.mark.parametrize("step", SUM_STEPS)
def test_too_few_clients_are_one_sentence_at_every_step(step: str) -> None:
    with pytest.raises(CoterieError, match=r"at least \d|cannot be (found|removed)"):
        rehearse(6, dropping={step: {0, 1, 2, 3}})


# ---- what the server sees --------------------------------------------------------------------------------------------
def test_masked_words_are_uniform_and_independent_of_the_input() -> None:
    words = {i: np.zeros(100_000, np.uint32) for i in range(3)}
    r = SumRehearsal(TERMS, words, draw_key=b"fixed, so that this test does not fail by chance")
    r.run()
    for masked in r.masked.values():
        for shift in (0, 8, 16, 24):
            counts = np.bincount((masked >> shift) & 255, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
        assert stats.kstest(masked / 2**32, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(masked[:-1].astype(float), masked[1:].astype(float))[0, 1]) < 0.015
    a, b = r.masked[0], r.masked[1]
    assert stats.kstest((a + b) / 2**32, "uniform").pvalue > 1e-4  # nor is a sum of some of them


def test_messages_before_the_last_step_hold_no_secret() -> None:
    me, keys = offer_keys(TERMS, 0)
    others = [offer_keys(TERMS, i) for i in range(1, 4)]
    everyone = torch.ones(4, dtype=torch.bool)
    me, shared = share_secrets(me, NeighbourKeys(everyone, tuple(k for _, k in others)))
    sent = b"".join(t.numpy().tobytes() for t in (keys.mask, keys.cipher, keys.committed, shared.sealed))
    assert not any(s in sent for s in (me.mask_key, me.cipher_key, me.seed))
    assert repr(me.seed)[2:12] not in repr(me)


# ---- what a client refuses -------------------------------------------------------------------------------------------
class Group:
    """Four clients, whose messages a test may change."""

    def __init__(self, terms: SumTerms = TERMS):
        made = [offer_keys(terms, i) for i in range(4)]
        self.me, self.keys = [m for m, _ in made], [k for _, k in made]
        self.members = torch.ones(4, dtype=torch.bool)

    def offer(self, i: int = 0) -> NeighbourKeys:
        return NeighbourKeys(self.members, tuple(k for k in self.keys if k.client != i))

    def shared(self) -> list[IncomingShares]:
        both = [share_secrets(self.me[i], self.offer(i)) for i in range(4)]
        self.me = [m for m, _ in both]
        s = server.begin_sum(TERMS, 5, self.keys, 4)
        incoming = server.incoming_shares(server.take_sealed(s, [a for _, a in both]))
        return [incoming[i] for i in range(4)]

    def masked(self) -> Participant:
        incoming = self.shared()[0]
        return mask_input(self.me[0], incoming, np.zeros(5, np.uint32))[0]


def changed_key(offer: NeighbourKeys) -> NeighbourKeys:
    return replace(offer, keys=(replace(offer.keys[0], mask=offer.keys[1].mask), *offer.keys[1:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: replace(o, keys=o.keys[:2]), "not those of the neighbours"),
        (lambda o: replace(o, keys=(*o.keys, o.keys[0])), "not those of the neighbours"),
        (lambda o: replace(o, members=torch.tensor([False, True, True, True])), "not part of it"),
        (lambda o: replace(o, members=torch.tensor([True, True, False, False]), keys=o.keys[:1]), "at least 3 clients"),
        (changed_key, "same key"),
        (lambda o: replace(o, keys=(replace(o.keys[0], cipher=to_tensor(bytes(32))), *o.keys[1:])), "not a point"),
        (lambda o: replace(o, keys=(replace(o.keys[0], mask=to_tensor(b"1")), *o.keys[1:])), "must be bytes of shape"),
    ],
)
def test_a_client_refuses_keys(change: Callable[[NeighbourKeys], NeighbourKeys], words: str) -> None:
    g = Group()
    with pytest.raises(CoterieError, match=words):
        share_secrets(g.me[0], change(g.offer()))


def test_a_client_refuses_keys_that_are_not_signed_by_their_owner() -> None:
    g = Group()

    def verify(keys: PublicKeys, text: bytes) -> None:
        if keys.client == 2:
            raise CoterieError("the signature is wrong")

    with pytest.raises(CoterieError, match="the signature is wrong"):
        share_secrets(g.me[0], g.offer(), verify=verify)


def test_a_client_refuses_shares_that_were_changed_or_are_for_another_client() -> None:
    g = Group()
    incoming = g.shared()
    zeros = np.zeros(5, np.uint32)
    flipped = incoming[0].sealed.clone()
    flipped[1, 0] ^= 1
    with pytest.raises(CoterieError, match="client 2: a sealed share was changed"):
        mask_input(g.me[0], replace(incoming[0], sealed=flipped), zeros)
    with pytest.raises(CoterieError, match="client 1: a sealed share was changed"):
        mask_input(g.me[0], replace(incoming[0], sealed=incoming[3].sealed), zeros)
    with pytest.raises(CoterieError, match="at least 3 clients, and 2 are left"):
        mask_input(g.me[0], IncomingShares((1,), incoming[0].sealed[:1]), zeros)
    with pytest.raises(CoterieError, match="not neighbours"):
        mask_input(g.me[0], replace(incoming[0], senders=(1, 2, 9)), zeros)


def test_a_client_never_masks_or_reveals_twice() -> None:
    g = Group()
    incoming = g.shared()[0]
    zeros = np.zeros(5, np.uint32)
    with pytest.raises(CoterieError, match='step "unmask" after "shares"'):
        reveal_shares(g.me[0], Survivors((1, 2, 3)))
    me, _ = mask_input(g.me[0], incoming, zeros)
    with pytest.raises(CoterieError, match='step "masked" after "masked"'):
        mask_input(me, incoming, zeros)
    me, _ = reveal_shares(me, Survivors((1, 2, 3)))
    with pytest.raises(CoterieError, match='step "unmask" after "unmask"'):
        reveal_shares(me, Survivors((1, 2)))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ((1,), "at least 3 clients"),
        ((1, 2, 9), "not taken part"),
        ((0, 1, 2), "not taken part"),
        ((1, 1, 2), "not tak"),
    ],
)
def test_a_client_refuses_survivors(clients: tuple[int, ...], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        reveal_shares(Group().masked(), Survivors(clients))


def test_two_lists_of_survivors_never_give_both_secrets_of_a_client() -> None:
    """A server that tells half of the clients that client 3 is alive, and the others that it is gone."""
    for n in range(3, 9):
        for told in range(n + 1):
            assert min(told, n - told) < SumTerms("s", 2, 0.5).threshold(n)


@pytest.mark.parametrize(("least", "share"), [(1, 0.5), (3, 1.0), (3, -0.1)])
def test_a_client_refuses_terms_that_protect_nothing(least: int, share: float) -> None:
    with pytest.raises(CoterieError, match="at least 2 clients"):
        offer_keys(SumTerms("s", least, share), 0)


# ---- clients that lie ------------------------------------------------------------------------------------------------
def test_a_client_that_reveals_wrong_shares_is_named_and_the_sum_is_right() -> None:
    words = inputs(8)
    wrong = {("unmask", 5): lambda a: replace(a, shares=torch.zeros_like(a.shares))}
    r = SumRehearsal(TERMS, words, spoil=wrong, dropping={"masked": {2}})
    assert np.array_equal(r.run(), plain(words, set(words) - {2}))
    assert r.result is not None and r.result.liars == (5,)


def test_secrets_that_were_shared_wrongly_end_the_sum_and_give_no_wrong_one() -> None:
    def other_commitment(keys: PublicKeys) -> PublicKeys:
        return replace(keys, committed=torch.zeros_like(keys.committed))

    with pytest.raises(server.SumFailed, match="mask of client 4 cannot be removed"):
        rehearse(6, spoil={("keys", 4): other_commitment})


def test_the_server_refuses_malformed_answers() -> None:
    g = Group()
    incoming = g.shared()
    s = server.begin_sum(TERMS, 5, g.keys, 4)
    both = [share_secrets(offer_keys(TERMS, 0)[0], g.offer())[1]]
    with pytest.raises(CoterieError, match="must be bytes of shape"):
        server.check_sealed(s, replace(both[0], sealed=both[0].sealed[:1]), 0)
    with pytest.raises(CoterieError, match="of client 0, not of client 1"):
        server.check_sealed(s, both[0], 1)
    with pytest.raises(CoterieError, match="of client 0, not of client 2"):
        server.check_public_keys(g.keys[0], 2)
    masked = mask_input(g.me[0], incoming[0], np.zeros(5, np.uint32))[1]
    assert server.check_masked(s, masked, 0) is masked and len(tensor_words(masked.words)) == 5
    with pytest.raises(CoterieError, match="must be 5 words of client 0"):
        server.check_masked(s, replace(masked, words=masked.words[:4]), 0)
