"""Turn texts into token ids by hashing words: without a vocabulary file, and with the same ids everywhere."""

import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 8192  # ids 1..8191 are words, 0 is padding
LENGTH = 64  # words per text; further ones are cut off


def tokens(texts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the ids of the lower-case words [n, LENGTH], padded with 0."""
    words = [re.findall(r"\w+", t.lower())[:LENGTH] for t in texts.tolist()]
    size = np.array([len(w) for w in words])
    flat = np.array([w for text in words for w in text], dtype=str)
    distinct, position = np.unique(flat, return_inverse=True)
    ids = np.array([1 + zlib.crc32(w.encode()) % (VOCABULARY - 1) for w in distinct.tolist()], np.int64)
    out = np.zeros((len(words), LENGTH), np.int64)
    if len(flat):
        out[np.arange(LENGTH) < size[:, None]] = ids[position]
    return out
