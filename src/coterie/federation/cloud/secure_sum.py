"""The cloud's part in a secure sum: four exchanges with the devices whose training has ended."""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coterie.core.context import ClientId
from coterie.engine import ledger
from coterie.engine.ledger import DEVICE_CLOUD
from coterie.errors import CoterieError
from coterie.federation.cloud.round_trip import Collected
from coterie.federation.identity.signatures import certificate_fingerprint, check_signed
from coterie.federation.protocol.messages import OfferedKeys, SignedKeys, SumAnswer, SumRequest
from coterie.privacy.secure_sum import server
from coterie.privacy.secure_sum.messages import (
    MaskedWords,
    RevealedShares,
    SealedShares,
    SummedWords,
    SumTerms,
    tensor_bytes,
    to_bytes,
)

log = logging.getLogger("coterie.cloud")
_A = TypeVar("_A")


@dataclass
class SumOutcome:
    """The outcome of a secure sum."""

    summed: SummedWords | None = None
    missing: dict[ClientId, str] = field(default_factory=dict)  # why an asked client is not in the sum
    absent: set[ClientId] = field(default_factory=set)  # clients in `missing` that are not connected or too late
    refused: dict[ClientId, str] = field(default_factory=dict)
    bytes: ledger.Page = field(default_factory=dict)
    spent: bool = False  # devices were asked for masked numbers, which they give once in a round


@dataclass
class SumExchange:
    """One secure sum."""

    terms: SumTerms
    count: int  # words of a client
    round: int
    places: int
    ask: Callable[[Sequence[SumRequest]], Collected]
    name: Callable[[ClientId], str]  # the node that has a client's seat
    ca: Path | None  # certificates of the authority; None: signatures are left to the devices
    outcome: SumOutcome = field(default_factory=SumOutcome)

    def run(self, clients: Collection[ClientId]) -> SumOutcome:
        """Take the four steps; a client that fails in one of them is not asked again."""
        try:
            self.outcome.summed = self._sum(sorted(clients))
        except CoterieError as e:
            lost = {i: str(e) for i in clients if i not in {*self.outcome.missing, *self.outcome.refused}}
            self.outcome.missing |= lost
            self.outcome.absent |= lost.keys()
        counted = set(self.outcome.summed.clients) if self.outcome.summed else set()
        for i in counted:  # it was lost in the last step, when its part was in the sum
            self.outcome.missing.pop(i, None)
            self.outcome.refused.pop(i, None)
        return self.outcome

    def _sum(self, clients: Sequence[ClientId]) -> SummedWords:
        certificates: dict[ClientId, bytes] = {}
        knows: dict[ClientId, Mapping[int, str]] = {}

        def check_signed_keys(given: SignedKeys, client: ClientId) -> SignedKeys:
            keys = server.check_public_keys(given.keys, client)
            certificates[client], knows[client] = to_bytes(given.certificate), given.knows
            text = keys.signed_text(self.terms.session)
            if self.ca is not None:
                signer = check_signed(certificates[client], self.ca, text, to_bytes(keys.signature))
                if signer != self.name(client):
                    raise CoterieError(f"its keys are signed by {signer}")
            return given

        signed = self._step("keys", dict.fromkeys(clients, self.terms), SignedKeys, check_signed_keys)
        s = server.begin_sum(self.terms, self.count, (a.keys for a in signed.values()), self.places)
        offers = {}
        for i, neighbours in server.neighbour_keys(s, self.places).items():
            ders = {k.client: signed[k.client].certificate for k in neighbours.keys}
            new = {j: der for j, der in ders.items() if knows[i].get(j) != certificate_fingerprint(certificates[j])}
            offers[i] = OfferedKeys(neighbours, new)
        sealed = self._step("keys", offers, SealedShares, lambda a, i: server.check_sealed(s, a, i))
        s = server.take_sealed(s, sealed.values())
        self.outcome.spent = True
        incoming = server.incoming_shares(s)
        masked = self._step("masked", incoming, MaskedWords, lambda a, i: server.check_masked(s, a, i))
        s = server.add_masked(s, masked.values())
        del masked
        shares = self._step("keys", server.survivors_of(s), RevealedShares, lambda a, i: server.check_revealed(s, a, i))
        return server.finish_sum(s, shares.values())

    def _step(
        self, part: str, messages: Mapping[ClientId, Any], kind: type[_A], check: Callable[[_A, ClientId], _A]
    ) -> dict[ClientId, _A]:
        """Ask all clients, and return the answers that pass the check."""
        outcome, given = self.outcome, dict[ClientId, _A]()
        came = self.ask([SumRequest(i, self.round, message) for i, message in messages.items()])
        outcome.missing |= came.missing
        outcome.absent |= came.absent
        outcome.refused |= came.refused
        for i, answer in sorted(came.answers.items()):
            try:
                if not isinstance(answer, SumAnswer) or not isinstance(answer.give, kind):
                    raise CoterieError("the answer is of a different step of the secure sum")
                given[i] = check(answer.give, i)
            except CoterieError as e:
                outcome.refused[i] = f"{self.name(i)}: {e}"
        down, up = sum(map(tensor_bytes, messages.values())), sum(tensor_bytes(a) for a in given.values())
        ledger.add_bytes(outcome.bytes, DEVICE_CLOUD, "down", {"keys": down})
        ledger.add_bytes(outcome.bytes, DEVICE_CLOUD, "up", {part: up})
        return given


def new_session(run: str, round: int) -> str:
    """Return the name of a new secure sum."""
    return f"{run}/{round}/{secrets.token_hex(8)}"
