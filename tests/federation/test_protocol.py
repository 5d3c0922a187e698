"""Hosts work together if they speak the same protocol: its number is raised when its messages change."""

import hashlib
import json
from dataclasses import fields, is_dataclass

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.config import RunSettings
from coterie.data.settings import PartitionSettings
from coterie.engine import messages
from coterie.federation.protocol import messages as federation_messages
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.protocol.version import PROTOCOL

CARRIED = 6, "c3bd0e6522be049b"  # the protocol, and a digest of what it carries


def test_the_protocol_is_raised_when_what_it_carries_changes() -> None:
    """After a change of messages, plan or settings raise PROTOCOL, if it was released, and put the new digest here."""
    typed = [c for module in (messages, federation_messages) for c in vars(module).values() if isinstance(c, type)]
    about = {c.__name__: [(f.name, str(f.type)) for f in fields(c)] for c in typed if is_dataclass(c)}
    about |= {c.__name__: sorted(c.model_fields) for c in (FederationPlan, RunSettings, PartitionSettings)}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == CARRIED
