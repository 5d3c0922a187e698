"""The setting `secure`: the stage of the combiner that makes one upload of all uploads by a secure sum.

A simulation adds the words without masks. The result has the same bits, because masks cancel. A federation computes the
sum with its devices, and this stage only decodes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.core.calls import bind_call, parse_calls
from coterie.core.method import Method, Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree, value_bytes
from coterie.engine.combining import Memory, title_of
from coterie.engine.ledger import DEVICE_CLOUD, Page
from coterie.errors import CoterieError
from coterie.privacy.secure_sum.messages import KEY_BYTES, SEALED_BYTES, SIGNATURE_BYTES, SummedWords, SumTerms
from coterie.privacy.secure_sum.neighbours import NEIGHBOURS
from coterie.privacy.secure_sum.shamir import SHARE_BYTES
from coterie.privacy.secure_sum.uploads import UploadWords, weight_of


class SumParameters(NamedTuple):
    """The parameters of the setting."""

    t: int  # the fewest clients in a sum
    clip: float  # bound of the change of a value
    weight: int | None  # the largest weight of a client; None: that of the largest client
    share: float  # more than this share of the holders of a client's shares must answer in the last step


def _sum(t: int = 3, clip: float = 8.0, weight: int | None = None, share: float = 0.5) -> SumParameters:
    return SumParameters(t, clip, weight, share)


_KNOWN: dict[str, Callable[..., SumParameters]] = {"sum": _sum}


def check_secure(text: str) -> str:
    """Return the setting `secure` in its usual spelling; raise CoterieError if it is invalid."""
    calls = parse_calls("secure", text)
    if len(calls) > 1:
        raise CoterieError(f"secure = {text} is invalid: it must be one sum(...)")
    p = sum_parameters(text)
    for good, words in (
        (type(p.t) is int and 2 <= p.t <= NEIGHBOURS + 1, f"t must be a whole number from 2 to {NEIGHBOURS + 1}"),
        (_is_number(p.clip) and 1e-9 <= p.clip <= 1e9, "clip must be a number above 0"),
        (p.weight is None or (type(p.weight) is int and p.weight > 0), "weight must be a whole number above 0"),
        (_is_number(p.share) and 0 <= p.share < 1, "share must be a number from 0 and below 1"),
    ):
        if not good:
            raise CoterieError(f"secure = {text} is invalid: {words}")
    return str(calls[0])


def sum_parameters(text: str) -> SumParameters:
    """Return the parameters of the setting."""
    call = parse_calls("secure", text)[0]
    bound = bind_call("secure", call, _KNOWN)
    return _KNOWN[call.name](*bound.args, **bound.kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class SecureSum:
    """The mean of a round from the sum of its clients' words."""

    text: str  # the setting, such as sum(t=5, clip=2)
    samples: int | None = None  # samples of the largest client; None: this host does not know them
    setting: str = field(default="secure", init=False)

    @property
    def parameters(self) -> SumParameters:
        return sum_parameters(self.text)

    @property
    def fewest(self) -> int:
        """The fewest clients in a sum; a round with fewer changes nothing."""
        return self.parameters.t

    def check(self, method: Method) -> None:
        """Raise CoterieError if uploads of the method cannot be summed, or its rounds have too few clients."""
        p, title = self.parameters, title_of(method)
        for name, e in method.schema("up").entries.items():
            if why := _not_summable(e):
                raise CoterieError(f"secure = {self.text} cannot add up {name}, which {title} sends: {why}")
        if (n := method.ctx.participants()) < p.t:
            raise CoterieError(f"secure = {self.text} needs {p.t} clients in a round, and only {n} take part (join)")
        largest = self.largest(method)
        if len(method.ctx.clients) * largest >= 2**32:
            raise CoterieError(f"secure = {self.text} cannot add weights up to {largest}: set weight to a smaller one")

    def largest(self, method: Method) -> int:
        """Return the weight that counts as one; raise CoterieError if it must be set."""
        if method.weights([Upload({}, samples=1)]) is None:
            return 1
        if (largest := self.parameters.weight or self.samples) is None:
            raise CoterieError(
                f"secure = {self.text} needs weight=N, the largest number of samples that counts, because only the "
                "devices know how many they have; or weighting = uniform"
            )
        return largest

    def words(self, method: Method) -> UploadWords:
        """Return how uploads become words."""
        return UploadWords.of(method, self.parameters.clip, self.largest(method))

    def terms(self, session: str) -> SumTerms:
        """Return the terms of one sum."""
        return SumTerms(session, self.parameters.t, self.parameters.share)

    def estimate(
        self, method: Method, sent: Tree, uploads: Sequence[Upload], round: int, memory: Memory
    ) -> tuple[Upload, Memory]:
        """Return the mean of the uploads as the secure sum gives it."""
        words = self.words(method)
        total = np.zeros(words.count, np.uint32)
        for u in uploads:
            total += words.encode(sent, u.tree, weight_of(method, u))
        senders = tuple(u.sender for u in uploads)
        return self.decoded(method, sent, SummedWords(total, senders), sum(u.samples for u in uploads))

    def decoded(self, method: Method, sent: Tree, summed: SummedWords, samples: int) -> tuple[Upload, Memory]:
        """Return the mean upload from the sum of words, and the stage's memory."""
        mean = self.words(method).decode(sent, summed.words)
        return Upload(mean.tree, samples=samples), {"clients": len(summed.clients), "clipped": mean.clipped}

    def traffic(self, method: Method, clients: int) -> Page:
        """Return the declared bytes of a sum over this number of clients, all of which answer."""
        k, members = min(clients - 1, NEIGHBOURS), value_bytes(len(method.ctx.clients), torch.bool)
        up = 3 * KEY_BYTES + SIGNATURE_BYTES + k * SEALED_BYTES + (k + 1) * SHARE_BYTES
        down = members + k * (2 * KEY_BYTES + SIGNATURE_BYTES) + k * SEALED_BYTES
        return {
            DEVICE_CLOUD: {
                "up": {"masked": clients * 4 * self.words(method).count, "keys": clients * up},
                "down": {"keys": clients * down},
            }
        }

    def facts(self, memory: Memory) -> dict[str, Any]:
        """Return how many clients the last sum had, and how many of them had a clipped value."""
        return {"secure_sum": dict(memory)} if memory else {}


def _not_summable(entry: Entry) -> str:
    """Return why an entry cannot be part of a sum; empty if it can."""
    if not entry.summable or not entry.dtype.is_floating_point or entry.nan:
        return f"a sum of {entry.kind} values is not what its server needs"
    if entry.optional or any(isinstance(n, str) for n in entry.shape):
        return "not every client sends it in the same shape"
    return ""
