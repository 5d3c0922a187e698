"""Hosts work together if they speak the same protocol: its number is raised when its messages change."""

import hashlib
import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.config import RunSettings
from coterie.data.settings import PartitionSettings
from coterie.engine import messages
from coterie.federation import protocol
from coterie.federation.protocol import messages as federation_messages
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.protocol.version import PROTOCOL

CARRIED = 6, "830d80ca9ad9f353"  # the protocol, and a digest of what it carries


def test_the_protocol_is_raised_when_what_it_carries_changes() -> None:
    """After a change of messages, plan or settings raise PROTOCOL, if it was released, and put the new digest here."""
    typed = [c for module in (messages, federation_messages) for c in vars(module).values() if isinstance(c, type)]
    about = {c.__name__: [(f.name, str(f.type)) for f in fields(c)] for c in typed if is_dataclass(c)}
    about |= {c.__name__: sorted(c.model_fields) for c in (FederationPlan, RunSettings, PartitionSettings)}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == CARRIED


def test_the_generated_code_is_that_of_the_protocol_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    folder = Path(protocol.__file__).parent
    source = folder.parents[2]
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    name = "coterie/federation/protocol/coterie.proto"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{source}", *out, name], cwd=source, check=True)
    made = sorted((tmp_path / name).parent.iterdir())
    assert [path.name for path in made] == ["coterie_pb2.py", "coterie_pb2.pyi", "coterie_pb2_grpc.py"]
    for path in made:
        assert path.read_text() == (folder / path.name).read_text(), f"run make protocol: {path.name} is not current"
