"""A whole secure sum in one process, with clients that drop out at given steps; for tests and measurements."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coterie.privacy.secure_sum import server
from coterie.privacy.secure_sum.client import Participant, mask_input, offer_keys, reveal_shares, share_secrets
from coterie.privacy.secure_sum.fixed_point import Words
from coterie.privacy.secure_sum.messages import PublicKeys, SummedWords, SumTerms, tensor_bytes
from coterie.privacy.secure_sum.primitives import keyed_draw

Spoil = Callable[[Any], Any]


@dataclass
class SumRehearsal:
    """The course of a secure sum: its result, the bytes of its messages and the seconds of its steps."""

    terms: SumTerms
    words: Mapping[int, Words]  # words of each client
    draw_key: bytes | None = None  # None: the system's randomness
    dropping: Mapping[str, Collection[int]] = field(default_factory=dict)  # clients that do not answer a step
    spoil: Mapping[tuple[str, int], Spoil] = field(default_factory=dict)  # changes of answers, by step and client
    up: Counter[str] = field(default_factory=Counter)  # bytes of all clients by step
    down: Counter[str] = field(default_factory=Counter)
    client_seconds: float = 0.0  # sum over all clients
    server_seconds: float = 0.0
    masked: dict[int, Words] = field(default_factory=dict)  # masked words of each client, which the server sees
    result: SummedWords | None = None

    def run(self) -> Words:
        """Run all steps and return the sum; raise CoterieError as server and clients do."""
        places, count = max(self.words) + 1, len(next(iter(self.words.values())))
        me: dict[int, Participant] = {}

        def answers(step: str, clients: Mapping[int, Any], act: Callable[[int, Any], tuple[Participant, Any]]) -> Any:
            for i, request in clients.items():
                self.down[step] += tensor_bytes(request)
                if i in self.dropping.get(step, ()):
                    continue
                with self._timed("client_seconds"):
                    me[i], answer = act(i, request)
                answer = self.spoil.get((step, i), lambda a: a)(answer)
                self.up[step] += tensor_bytes(answer)
                yield answer

        def offer(i: int, request: SumTerms) -> tuple[Participant, PublicKeys]:
            return offer_keys(request, i) if self.draw_key is None else offer_keys(request, i, self._draw("keys", i))

        def share(i: int, request: Any) -> Any:
            if self.draw_key is None:
                return share_secrets(me[i], request)
            return share_secrets(me[i], request, self._draw("shares", i))

        def mask(i: int, request: Any) -> Any:
            after, answer = mask_input(me[i], request, self.words[i])
            self.masked[i] = answer.words.numpy().view("uint32")
            return after, answer

        keys = list(answers("keys", dict.fromkeys(sorted(self.words), self.terms), offer))
        with self._timed("server_seconds"):
            s = server.begin_sum(self.terms, count, keys, places)
            offered = server.neighbour_keys(s, places)
        sealed = list(answers("shares", offered, share))
        with self._timed("server_seconds"):
            s = server.take_sealed(s, sealed)
            incoming = server.incoming_shares(s)
        masked = list(answers("masked", incoming, mask))
        with self._timed("server_seconds"):
            s = server.add_masked(s, masked)
            survivors = server.survivors_of(s)
        revealed = list(answers("unmask", survivors, lambda i, request: reveal_shares(me[i], request)))
        with self._timed("server_seconds"):
            self.result = server.finish_sum(s, revealed)
        return self.result.words

    def _draw(self, *purpose: str | int) -> Callable[[int], bytes]:
        assert self.draw_key is not None
        return keyed_draw(self.draw_key + repr(purpose).encode())

    @contextmanager
    def _timed(self, name: str) -> Any:
        begun = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begun)
