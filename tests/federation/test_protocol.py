"""Hosts work together if they speak the same protocol and have the same code of the method."""

import hashlib
import importlib
import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie import parts
from coterie.config import RunSettings
from coterie.data.settings import PartitionSettings
from coterie.engine import messages
from coterie.federation.protocol import messages as federation_messages
from coterie.federation.protocol.plan import Plan, source
from coterie.federation.protocol.version import PROTOCOL
from coterie.methods import find


def test_the_digest_of_a_method_covers_its_folder_and_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "digested"
    package.mkdir()
    code = "from coterie import Method\nfrom digested.votes import N\nclass M(Method):\n    n = N\n"
    (package / "__init__.py").write_text(code)
    (package / "votes.py").write_text("N = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    method = importlib.import_module("digested").M
    before = source(method)
    assert source(method) == before != source(find("fedavg"))
    (package / "votes.py").write_text("N = 2\n")
    assert source(method) != before


def test_the_digest_of_a_method_has_the_parts_that_it_imports_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "coterie" / "parts"
    shutil.copytree(Path(parts.__file__).parent, folder)
    monkeypatch.setattr(parts, "__file__", str(folder / "__init__.py"))
    before = {name: source(find(name)) for name in ("fedavg", "fedproto", "fedcpmd")}
    with (folder / "prototypes.py").open("a") as f:
        f.write("# another version\n")
    changed = {name for name, was in before.items() if source(find(name)) != was}
    assert changed == {"fedproto"}


CARRIED = 5, "60498de144ca9983"  # the protocol, and a digest of what it carries


def test_the_protocol_is_raised_when_what_it_carries_changes() -> None:
    """After a change of messages, plan or settings raise PROTOCOL, if it was released, and put the new digest here."""
    typed = [c for module in (messages, federation_messages) for c in vars(module).values() if isinstance(c, type)]
    about = {c.__name__: [(f.name, str(f.type)) for f in fields(c)] for c in typed if is_dataclass(c)}
    about |= {c.__name__: sorted(c.model_fields) for c in (Plan, RunSettings, PartitionSettings)}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == CARRIED
