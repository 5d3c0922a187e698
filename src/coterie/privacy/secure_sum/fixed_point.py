"""Numbers as 32-bit fixed point, so that sums over clients are exact and do not depend on the order of summation."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]  # numbers modulo 2^32
LARGEST_WORD = 2**31 - 1


@dataclass(frozen=True)
class FixedPoint:
    """Numbers between -bound and bound whose sum over `clients` clients never wraps around.

    The unit is a power of two, so that a sum is decoded without rounding.
    """

    bound: float
    clients: int

    @cached_property
    def exponent(self) -> int:
        """The largest e with clients * round(bound * 2^e) <= LARGEST_WORD."""
        e = math.frexp(LARGEST_WORD / (self.clients * self.bound))[1]
        while self.clients * round(math.ldexp(self.bound, e)) > LARGEST_WORD:
            e -= 1
        return e

    @property
    def unit(self) -> float:
        """The distance between two neighbouring numbers."""
        return math.ldexp(1.0, -self.exponent)

    def encode(self, values: npt.NDArray[np.float64]) -> Words:
        """Round to the nearest multiple of the unit; values beyond the bound become the bound."""
        steps = np.rint(np.clip(values, -self.bound, self.bound) * math.ldexp(1.0, self.exponent))
        return steps.astype(np.int64).astype(np.uint32)

    def decode(self, words: Words) -> npt.NDArray[np.float64]:
        """Return the numbers that words, or sums of words, stand for."""
        return words.view(np.int32).astype(np.float64) * self.unit
