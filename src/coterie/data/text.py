"""Texts as token ids by a small hashed vocabulary: no vocabulary file, and the same ids everywhere."""

import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 8192  # ids 1..8191 are words, 0 is padding
LENGTH = 64  # words of a text that are kept


def tokens(texts: NDArray[Any]) -> NDArray[np.int64]:
    """[n, LENGTH] ids of the lower-case words, padded with 0."""
    words = [re.findall(r"\w+", t.lower())[:LENGTH] for t in texts.tolist()]
    size = np.array([len(w) for w in words])
    flat = np.array([w for text in words for w in text], dtype=str)
    known, at = np.unique(flat, return_inverse=True)
    ids = np.array([1 + zlib.crc32(w.encode()) % (VOCABULARY - 1) for w in known.tolist()], np.int64)
    out = np.zeros((len(words), LENGTH), np.int64)
    if len(flat):
        out[np.arange(LENGTH) < size[:, None]] = ids[at]
    return out
