"""Shamir's shares: any threshold of them gives the secret, fewer fit every secret, and wrong ones are found."""

import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.privacy.secure_sum.shamir import PRIME, SHARE_BYTES, recover_secret, split_secret

secret_bytes = st.binary(min_size=32, max_size=32)


@st.composite
def sharings(draw: st.DrawFn) -> tuple[bytes, list[int], int]:
    holders = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True))
    return draw(secret_bytes), holders, draw(st.integers(1, len(holders)))


@settings(max_examples=40, deadline=None)
@given(sharings(), st.randoms())
def test_any_threshold_of_shares_gives_the_secret(sharing: tuple[bytes, list[int], int], rng: object) -> None:
    secret, holders, threshold = sharing
    shares = split_secret(secret, holders, threshold, secrets.token_bytes)
    assert all(len(s) == SHARE_BYTES for s in shares.values())
    chosen = rng.sample(holders, threshold)  # type: ignore[attr-defined]
    found = recover_secret({i: shares[i] for i in chosen}, threshold, lambda s: s == secret)
    assert found.secret == secret and found.liars == ()


@settings(max_examples=20, deadline=None)
@given(secret_bytes, secret_bytes, st.integers(2, 8))
def test_fewer_shares_fit_every_secret(one: bytes, other: bytes, threshold: int) -> None:
    shares = split_secret(one, range(threshold), threshold, secrets.token_bytes)
    few = {i: shares[i] for i in range(threshold - 1)}
    with pytest.raises(CoterieError, match=f"{threshold - 1} shares of at least {threshold}"):
        recover_secret(few, threshold, lambda s: True)
    # there is a last share with which they give any other secret: the value at the last holder's point of the
    # polynomial through that secret and these shares
    points = {0: int.from_bytes(other), **{i + 1: int.from_bytes(s) for i, s in few.items()}}
    value = 0
    for x, y in points.items():
        term = y
        for z in points:
            if z != x:
                term = term * (threshold - z) * pow(x - z, -1, PRIME) % PRIME
        value = (value + term) % PRIME
    forged = {**few, threshold - 1: value.to_bytes(SHARE_BYTES)}
    assert recover_secret(forged, threshold, lambda s: s == other).secret == other


def test_the_field_is_prime() -> None:
    assert all(pow(a, PRIME - 1, PRIME) == 1 for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))


def test_wrong_shares_are_found_and_named() -> None:
    secret = secrets.token_bytes(32)
    shares = split_secret(secret, range(9), 5, secrets.token_bytes)
    lying = {**shares, 2: bytes(SHARE_BYTES), 7: (PRIME + 1).to_bytes(SHARE_BYTES), 8: b"\xff" * SHARE_BYTES}
    found = recover_secret(lying, 5, lambda s: s == secret)
    assert found.secret == secret and found.liars == (2, 7, 8)


def test_too_many_wrong_shares_are_one_sentence() -> None:
    secret = secrets.token_bytes(32)
    shares = split_secret(secret, range(4), 3, secrets.token_bytes)
    wrong = {i: bytes(SHARE_BYTES) if i < 2 else s for i, s in shares.items()}
    with pytest.raises(CoterieError, match="do not give the secret"):
        recover_secret(wrong, 3, lambda s: s == secret)


@pytest.mark.parametrize("threshold", [0, 4])
def test_an_impossible_threshold_is_refused(threshold: int) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split_secret(bytes(32), range(3), threshold, secrets.token_bytes)
