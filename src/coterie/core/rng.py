"""Keyed randomness: every draw is a function of (seed, purpose, keys), independent of earlier draws."""

import hashlib

import numpy as np
import torch


def key(seed: int, purpose: str, *keys: int | str) -> int:
    """Return a 63-bit key; equal arguments give equal keys on every machine."""
    text = "\x1f".join([str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_rng(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, purpose, *keys))


def numpy_rng(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    return np.random.default_rng(key(seed, purpose, *keys))
