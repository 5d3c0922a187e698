"""Keys and certificates: private, never overwritten, and accepted by the libraries that use them."""

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.errors import CoterieError
from coterie.federation.identity import admin as nodes
from coterie.federation.identity import authority as certs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> certs.Certs:
    root = tmp_path_factory.mktemp("federation") / "certs"
    found = certs.init(root, ["cloud.example.org", "192.0.2.7"])
    certs.add_node(root, "alice")
    return found


def handshake(server: certs.Certs, trusted: Path, host: str) -> None:
    """A TLS handshake in memory; raises what a client would see."""
    accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepts.load_cert_chain(server.server, server.server_key)
    calls = ssl.create_default_context(cafile=str(trusted))
    calls.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = calls.wrap_bio(down, up, server_hostname=host)
    answer = accepts.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (client, answer):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["cloud.example.org", "192.0.2.7", "127.0.0.1", "localhost"])
def test_the_server_certificate_holds_for_its_hosts(made: certs.Certs, host: str) -> None:
    handshake(made, made.ca, host)


def test_the_server_certificate_does_not_hold_for_other_hosts(made: certs.Certs) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)hostname mismatch"):
        handshake(made, made.ca, "elsewhere.example.org")


def test_another_authority_is_not_trusted(made: certs.Certs, tmp_path: Path) -> None:
    other = certs.init(tmp_path / "other", [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.ca, "127.0.0.1")


def test_secrets_are_readable_by_their_owner_only(made: certs.Certs) -> None:
    for path in (made.ca_key, made.server_key, made.key("alice")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", [])
    certs.add_node(found.root, "alice")
    before = {p: p.read_bytes() for p in found.root.rglob("*") if p.is_file()}
    with pytest.raises(CoterieError, match=r"exists already"):
        certs.init(found.root, [])
    with pytest.raises(CoterieError, match=r'node "alice" exists already'):
        certs.add_node(found.root, "alice")
    with pytest.raises(CoterieError, match="not overwritten"):
        certs.make_request(found.key("alice"))
    assert before == {p: p.read_bytes() for p in found.root.rglob("*") if p.is_file()}


def test_a_node_key_is_on_a_nist_curve_and_its_certificate_is_for_clients_only(made: certs.Certs) -> None:
    key = certs.load_key(made.key("alice"))
    assert key.curve.name == "secp256r1"
    assert certs.check_node_files(made.key("alice"), made.certificate("alice"), made.ca) == ""
    text = ssl._ssl._test_decode_cert(str(made.certificate("alice")))  # type: ignore[attr-defined]
    assert text["subject"] == ((("commonName", "alice"),),)
    trust = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(made.ca))
    assert trust.verify_mode is ssl.CERT_REQUIRED
    files = certs.Certs(made.root)
    assert files.valid("alice") == [certs.read_node(made.certificate("alice")).digest]
    assert files.valid("bob") == files.valid("../nodes/alice") == files.valid("") == []


def test_a_key_made_on_the_device_never_leaves_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from coterie.cli.federation import federation_app

    root, device = certs.init(tmp_path / "c", []).root, tmp_path / "device"
    device.mkdir()

    def cli(*arguments: object) -> str:
        done = CliRunner().invoke(federation_app, ["certs", *map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "bob.csr" in cli("request", device / "bob.key")
    assert "bob.crt" in cli("sign", root, device / "bob.csr")
    files = certs.Certs(root)
    assert files.nodes() == ["bob"] and list(root.rglob("*.key")) == [files.ca_key, files.server_key]
    (device / "bob.crt").write_bytes(files.certificate("bob").read_bytes())
    assert certs.check_node_files(device / "bob.key", device / "bob.crt", files.ca) == ""
    assert stat.S_IMODE((device / "bob.key").stat().st_mode) == 0o600
    with pytest.raises(CoterieError, match=r'is for "bob", not for "eve"'):
        certs.add_node(root, "eve", device / "bob.csr")
    with pytest.raises(CoterieError, match='node "bob" exists already'):
        certs.add_node(root, "bob", device / "bob.csr")
    certs.remove_node(root, "bob")
    assert files.nodes() == [] and files.valid("bob") == []


def test_one_key_belongs_to_one_node(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.hashes import SHA256

    root = certs.init(tmp_path / "c", []).root
    certs.add_node(root, "bob", certs.make_request(tmp_path / "bob.key"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "eve")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name)
    signed = request.sign(certs.load_key(tmp_path / "bob.key"), SHA256())
    (tmp_path / "eve.csr").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(CoterieError, match='already belongs to node "bob"'):
        certs.add_node(root, "eve", tmp_path / "eve.csr")
    for content in (
        b"",
        b"nonsense",
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
    ):
        (tmp_path / "eve.csr").write_bytes(content)
        with pytest.raises(CoterieError, match="is not a certificate request"):
            certs.add_node(root, "eve", tmp_path / "eve.csr")


def test_a_certificate_under_a_different_name_is_refused(tmp_path: Path) -> None:
    files = certs.init(tmp_path / "c", [])
    certs.add_node(files.root, "bob")
    files.certificate("eve").write_bytes(files.certificate("bob").read_bytes())
    with pytest.raises(CoterieError, match=r'eve\.crt is for "bob", not for "eve"'):
        files.valid("eve")


def test_certificates_of_nodes_that_expire_soon_are_named(tmp_path: Path) -> None:
    files = certs.init(tmp_path / "c", [])
    certs.add_node(files.root, "alice", days=20)
    certs.add_node(files.root, "bob")
    (warning,) = files.expiring_nodes()
    assert warning.startswith("the certificate of alice expires on") and "coterie nodes rotate" in warning
    assert "expires on" in certs.check_node_files(files.key("alice"), files.certificate("alice"), files.ca)


def test_a_new_authority_issues_new_certificates_for_the_keys_of_all_nodes(tmp_path: Path) -> None:
    files = certs.init(tmp_path / "c", [])
    certs.add_node(files.root, "alice")
    certs.add_node(files.root, "north", role="edge", devices=["a"])
    old, secret = files.valid("alice"), files.key("alice").read_bytes()
    certs.renew_ca(files.root, overlap=30)
    assert set(old) < set(files.valid("alice")) and len(files.valid("alice")) == 2
    certs.switch_now(files.root)
    assert len(files.valid("alice")) == 1 and files.valid("alice") != old
    assert files.key("alice").read_bytes() == secret and files.roles()["north"].is_edge
    assert certs.check_node_files(files.key("alice"), files.certificate("alice"), files.ca) == ""
    nodes.rotate_key(files.root, "alice")
    with pytest.raises(CoterieError, match='node "alice" is changing its key'):
        certs.renew_ca(files.root)


def test_a_new_server_certificate_keeps_the_authority(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", [])
    authority = found.ca.read_bytes()
    certs.renew(found.root, ["new.example.org"])
    assert found.ca.read_bytes() == authority
    handshake(found, found.ca, "new.example.org")


def test_renewing_that_fails_leaves_the_old_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = certs.init(tmp_path / "c", [])
    before = found.server.read_bytes(), found.server_key.read_bytes()
    write = certs._write

    def full(path: Path, content: bytes, secret: bool = False) -> None:
        if found.server.name in path.name:
            raise OSError(28, "No space left on device")
        write(path, content, secret)

    with monkeypatch.context() as m:
        m.setattr(certs, "_write", full)
        with pytest.raises(OSError, match="No space"):
            certs.renew(found.root, [])
    assert (found.server.read_bytes(), found.server_key.read_bytes()) == before
    certs.renew(found.root, [])  # what the failure left behind is no hindrance
    handshake(found, found.ca, "localhost")
    assert stat.S_IMODE(found.server_key.stat().st_mode) == 0o600


def test_a_role_is_written_with_the_key_and_goes_with_it(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", [])
    certs.add_node(found.root, "alice")
    certs.add_node(found.root, "north", role="edge", devices=["ward-*", "bob"])
    certs.add_node(found.root, "south", certs.make_request(tmp_path / "south.key"), "edge", ["a"])
    found.role_file("alice").unlink()  # a directory of version 0.1
    assert {n: (r.role, r.devices) for n, r in found.roles().items()} == {
        "alice": ("device", ()), "north": ("edge", ("ward-*", "bob")), "south": ("edge", ("a",)),
    }  # fmt: skip
    certs.remove_node(found.root, "north")
    certs.add_node(found.root, "north")
    assert not found.roles()["north"].is_edge
    with pytest.raises(CoterieError, match="needs the names of its devices"):
        certs.add_node(found.root, "west", role="edge")
    assert list(found.nodes()) == ["alice", "north", "south"]


def test_an_edge_is_added_on_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from coterie.cli.federation import federation_app

    root = certs.init(tmp_path / "c", []).root
    runner = CliRunner()
    found = runner.invoke(federation_app, ["certs", "add-node", str(root), "north", "--edge", "--devices", "a, ward-*"])
    assert found.exit_code == 0 and "north.key" in found.output
    assert certs.Certs(root).roles()["north"].devices == ("a", "ward-*")
    found = runner.invoke(federation_app, ["certs", "add-node", str(root), "south", "--devices", "a"])
    assert isinstance(found.exception, CoterieError) and "only an edge" in str(found.exception)
    assert list(certs.Certs(root).nodes()) == ["north"]


@pytest.mark.parametrize("name", ["", "../alice", "a b", "-x", "a" * 64])
def test_node_names_that_are_no_file_names_are_refused(made: certs.Certs, name: str) -> None:
    with pytest.raises(CoterieError, match="node name"):
        certs.add_node(made.root, name)


@pytest.mark.parametrize("host", ["https://x", "x:9092", ""])
def test_hosts_are_names_or_addresses(tmp_path: Path, host: str) -> None:
    with pytest.raises(CoterieError, match="host"):
        certs.init(tmp_path / "c", [host])
    assert not (tmp_path / "c").exists()


def test_a_damaged_key_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.key").write_text("nonsense")
    with pytest.raises(CoterieError, match="is not a PEM private key"):
        certs.load_key(tmp_path / "x.key")


def test_a_new_certificate_is_for_the_hosts_of_the_old(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", ["a.example.org", "192.0.2.7"])
    certs.renew(found.root)
    handshake(found, found.ca, "a.example.org")
    handshake(found, found.ca, "192.0.2.7")


def test_an_expired_certificate_is_one_sentence(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", [], days=20)
    (server, authority) = found.check_dates()
    assert "server.crt expires on" in server and f"coterie certs renew {found.root} --ca" in authority
    now = datetime.now(UTC)
    for days, sentence in (
        (21, rf"server\.crt expired on .* renew it with coterie certs renew {found.root}$"),
        (-1, r"server\.crt is not valid before .* clock right"),
    ):
        with pytest.raises(CoterieError, match=sentence):
            found.check_dates(now + timedelta(days=days))
    certs.renew(found.root)
    assert len(found.check_dates()) == 1  # the authority's 20 days remain
    with pytest.raises(CoterieError, match=rf"ca\.crt expired on .* certs renew {found.root} --ca$"):
        found.check_dates(now + timedelta(days=21))


def test_devices_with_either_authority_connect_until_the_new_one_takes_over(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", ["a.example.org"])
    old = tmp_path / "old.crt"
    old.write_bytes(found.ca.read_bytes())
    certs.renew_ca(found.root, overlap=30)
    new = tmp_path / "new.crt"
    new.write_bytes(found.ca.read_bytes())
    for trusted in (old, new):
        handshake(found, trusted, "a.example.org")
    for command in (lambda: certs.renew(found.root), lambda: certs.renew_ca(found.root)):
        with pytest.raises(CoterieError, match="is changing its authority"):
            command()
    assert not found.switch()
    certs.switch_now(found.root)
    for trusted in (new, found.ca):
        handshake(found, trusted, "a.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(found, old, "a.example.org")
    assert found.ca.read_bytes() != new.read_bytes()  # the old authority is in it no more
    with pytest.raises(CoterieError, match="no new authority"):
        certs.switch_now(found.root)
    certs.renew(found.root)
    handshake(found, new, "a.example.org")
    assert found.check_dates() == []


def test_an_overlap_beyond_the_end_of_the_old_authority_is_refused(tmp_path: Path) -> None:
    found = certs.init(tmp_path / "c", [], days=10)
    with pytest.raises(CoterieError, match="choose a shorter --overlap"):
        certs.renew_ca(found.root)
    certs.renew_ca(found.root, overlap=0)
    handshake(found, found.ca, "localhost")
    assert found.check_dates() == []
