"""A device's part in secure sums: it holds the upload of a round back, and gives masked numbers only.

All secrets are in memory and are drawn from the operating system. A file remembers the last round whose upload was
masked: two sums of the same upload over different clients would show it, so a round is never masked twice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coterie.core.context import ClientId
from coterie.core.method import Upload
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.session import Session
from coterie.engine.session.combiner import combiner_of
from coterie.errors import CoterieError
from coterie.federation.identity.signatures import NodeFiles, certificate_fingerprint, check_signed
from coterie.federation.protocol.messages import DeviceJob, OfferedKeys, SignedKeys, SumAnswer, SumRequest
from coterie.privacy.secure_sum.client import Participant, mask_input, offer_keys, reveal_shares, share_secrets
from coterie.privacy.secure_sum.messages import (
    IncomingShares,
    MaskedWords,
    PublicKeys,
    SumTerms,
    Survivors,
    to_bytes,
    to_tensor,
)
from coterie.privacy.secure_sum.setting import SecureSum
from coterie.privacy.secure_sum.uploads import weight_of
from coterie.storage.atomic import write_atomic

_FILE = "summed.json"


def secure_sum_of(session: Session) -> SecureSum | None:
    """Return the secure sum of a run; None if the run has none."""
    combiner = combiner_of(session.settings, session.method, session.federation)
    secure = None if combiner is None else combiner.secure
    assert secure is None or isinstance(secure, SecureSum)
    return secure


@dataclass(frozen=True)
class HeldSum:
    """The upload of the last round that was trained."""

    run: str
    request: TrainRequest
    upload: Upload = field(repr=False)


@dataclass
class SumMember:
    """The memory of a device between the steps of a secure sum."""

    state: Path  # folder of the private states
    files: NodeFiles | None = None
    held: HeldSum | None = field(default=None, repr=False)
    me: Participant | None = field(default=None, repr=False)
    certificates: dict[ClientId, bytes] = field(default_factory=dict, repr=False)  # certificates of other clients

    def hold(self, run: str, request: TrainRequest, answer: TrainAnswer) -> TrainAnswer:
        """Keep the upload, and return the answer without it."""
        upload = Upload(answer.upload, sender=answer.client, samples=answer.samples)
        self.held, self.me = HeldSum(run, request, upload), None
        return replace(answer, upload={})

    def answer(self, session: Session, job: DeviceJob) -> SumAnswer:
        """Do the next step of a secure sum; raise CoterieError if it is not the next one, or does not protect."""
        request, held, secure = job.request, self.held, secure_sum_of(session)
        assert isinstance(request, SumRequest)
        if secure is None:
            raise CoterieError("this run has no secure sums")
        if held is None or (held.run, held.request.client, held.request.round) != (
            job.run, request.client, request.round,
        ):  # fmt: skip
            raise CoterieError(f"there is no upload of round {request.round}, or the device was started again since")
        ask, client = request.ask, request.client
        if isinstance(ask, SumTerms):
            return SumAnswer(client, self._keys(ask, secure, held))
        if self.me is None:
            raise CoterieError("a secure sum begins with the exchange of keys")
        me, self.me = self.me, None  # a step that fails ends this device's part
        if isinstance(ask, OfferedKeys):
            self.me, shares = share_secrets(me, ask.neighbours, verify=self._verifier(ask))
            return SumAnswer(client, shares)
        if isinstance(ask, IncomingShares):
            after, masked = self._masked(session, secure, held, me, ask)
            self._spend(held)  # before anything leaves
            self.me = after
            return SumAnswer(client, masked)
        assert isinstance(ask, Survivors)
        _, revealed = reveal_shares(me, ask)
        self.held = None
        return SumAnswer(client, revealed)

    def _keys(self, terms: SumTerms, secure: SecureSum, held: HeldSum) -> SignedKeys:
        if self.files is None:
            raise CoterieError("secure sums need devices with certificates of their own")
        if terms != secure.terms(terms.session) or not terms.session.startswith(f"{held.run}/{held.request.round}/"):
            raise CoterieError("the terms of a secure sum are not those of the plan")
        self.me, keys = offer_keys(terms, held.request.client, sign=self.files.sign)
        knows = {i: certificate_fingerprint(der) for i, der in self.certificates.items()}
        return SignedKeys(keys, to_tensor(self.files.der()), knows)

    def _verifier(self, offer: OfferedKeys) -> "_Verifier":
        assert self.files is not None
        self.certificates |= {i: to_bytes(der) for i, der in offer.certificates.items()}
        return _Verifier(self.files, self.certificates, {own_name(self.files)})

    def _spend(self, held: HeldSum) -> None:
        """Record that the upload of a round is masked; raise CoterieError if it was before."""
        path, round = self.state / held.run / _FILE, held.request.round
        if path.is_file() and round <= int(json.loads(path.read_text())["round"]):
            raise CoterieError(f"the upload of round {round} was part of a secure sum already")
        write_atomic(path, json.dumps({"round": round}).encode())

    def _masked(
        self, session: Session, secure: SecureSum, held: HeldSum, me: Participant, incoming: IncomingShares
    ) -> tuple[Participant, MaskedWords]:
        method, sent = session.method, held.request.shared
        words = secure.words(method).encode(sent, held.upload.tree, weight_of(method, held.upload))
        return mask_input(me, incoming, words)


def own_name(files: NodeFiles) -> str:
    """Return the name in a node's own certificate."""
    return check_signed(files.der(), files.ca, b"own name", files.sign(b"own name"))


@dataclass
class _Verifier:
    """Checks the keys of other clients: each is signed by a different node of this federation's authority."""

    files: NodeFiles
    certificates: Mapping[ClientId, bytes]
    names: set[str]

    def __call__(self, keys: PublicKeys, text: bytes) -> None:
        if keys.client not in self.certificates:
            raise CoterieError(f"there is no certificate of client {keys.client}")
        name = check_signed(self.certificates[keys.client], self.files.ca, text, to_bytes(keys.signature))
        if name in self.names:
            raise CoterieError(f"two clients of a secure sum have the certificate of {name}")
        self.names.add(name)
