"""Keys and certificates of a federation: one authority, one server certificate, one key per node, one control key.

A directory made by `init` belongs on the cloud's host. A device needs two files: `ca.crt` and its own `NAME.key`. The
public halves in `nodes/` are the list of who may connect: add a file and the node is known, remove it and it is not.
Beside it lies what the node may do, NAME.json (registry.py); in `nodes/next/` the new keys of nodes that change theirs.
"""

import contextlib
import ipaddress
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.identity.roles import NODE_NAME, NodeRole, Role
from coterie.storage.atomic import write_atomic

SOON = 30  # days before the end of a certificate from which on it is said
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Certs:
    """Paths of the files of a federation."""

    root: Path

    @property
    def ca(self) -> Path:
        return self.root / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.root / "ca.key"

    @property
    def server(self) -> Path:
        return self.root / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.root / "server.key"

    @property
    def next_ca(self) -> Path:
        """The authority that follows: already in `ca`, not yet behind `server`."""
        return self.root / "next" / "ca.crt"

    @property
    def next_server(self) -> Path:
        return self.root / "next" / "server.crt"

    @property
    def next_server_key(self) -> Path:
        return self.root / "next" / "server.key"

    @property
    def switch_file(self) -> Path:
        """When the next authority takes over, in seconds since 1970."""
        return self.root / "next" / "from"

    def key(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.key"

    def public(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.pub"

    def nodes(self) -> dict[str, bytes]:
        """The registered nodes: name to public key (PEM), by name."""
        found: dict[str, bytes] = {}
        for path in sorted((self.root / "nodes").glob("*.pub")):
            with contextlib.suppress(FileNotFoundError):  # removed while we look
                found[path.stem] = _public_pem(path)
        return found

    def next_key(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.key"

    def next_public(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.pub"

    def accepted(self) -> dict[bytes, str]:
        """Public keys (PEM) that may connect now, with the node's name. While a key is rotated, a node has two."""
        found = {pem: name for name, pem in self.nodes().items()}
        for path in sorted((self.root / "nodes" / "next").glob("*.pub")):
            name = path.stem
            with contextlib.suppress(FileNotFoundError):
                new = _public_pem(path)
                until = NodeRole.read(self.role_file(name)).old_key_until
                if not self.public(name).is_file():
                    continue  # removed
                if until is not None and time.time() >= until:
                    found = {pem: n for pem, n in found.items() if n != name}
                found[new] = name
        return found

    def seen(self, name: str, pem: bytes) -> bool:
        """A node has connected with this key. If it is its new one, the old is void; True if that was news."""
        path = self.next_public(name)
        try:
            if not path.is_file() or _public_pem(path) != pem:
                return False
            role = NodeRole.read(self.role_file(name))
            self.key(name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self.next_key(name).replace(self.key(name))
            path.replace(self.public(name))
            write_atomic(self.role_file(name), replace(role, old_key_until=None).text().encode())
        except FileNotFoundError:  # removed, or somebody else was faster
            return False
        return True

    def role_file(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.json"

    def roles(self) -> dict[str, NodeRole]:
        """What every registered node may be, by name; one without a role file is a device."""
        names = sorted(path.stem for path in (self.root / "nodes").glob("*.pub"))
        return {name: NodeRole.read(self.role_file(name)) for name in names}

    def check(self) -> None:
        """A sentence if the directory is not complete."""
        for path in (self.ca, self.server, self.server_key):
            if not path.is_file():
                raise CoterieError(
                    f"certs {self.root} has no {path.name}; create the directory with coterie certs init"
                )

    def check_dates(self, now: datetime | None = None) -> list[str]:
        """A sentence if a certificate does not hold now; warnings about those that end soon."""
        found, now = [], now or datetime.now(UTC)
        for what, begins, ends, command in self.dates():
            if now >= ends:
                raise CoterieError(f"the {what} expired on {ends:%Y-%m-%d %H:%M} UTC; renew it with coterie {command}")
            if now < begins:
                raise CoterieError(
                    f"the {what} holds only from {begins:%Y-%m-%d %H:%M} UTC on; is this host's clock right?"
                )
            if now + timedelta(days=SOON) > ends:
                found.append(f"the {what} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it with coterie {command}")
        return found

    def dates(self) -> list[tuple[str, datetime, datetime, str]]:
        """What holds from when to when, and the command that renews it: the server certificate and its authority."""
        server = _read_certificates(self.server)[0]
        signed_by = [c for c in _read_certificates(self.ca) if _signed(server, c)]
        if not signed_by:
            raise CoterieError(f"the server certificate {self.server} is not signed by {self.ca}")
        renew, whole = f"certs renew {self.root}", f"certs renew {self.root} --ca"
        found = [(f"server certificate {self.server}", server, renew)]
        found += [(f"authority's certificate {self.ca}", c, whole) for c in signed_by]
        return [(what, c.not_valid_before_utc, c.not_valid_after_utc, command) for what, c, command in found]

    def switches_at(self) -> float | None:
        """When the next authority takes over; None if there is no next one."""
        try:
            return float(self.switch_file.read_text())
        except (OSError, ValueError):
            return None

    def switch(self) -> bool:
        """Let the next authority take over if it is time; True if it did."""
        at = self.switches_at()
        if at is None or time.time() < at or not self.next_server.is_file():
            return False
        self.next_server_key.replace(self.server_key)  # a reader that meets a half-done pair keeps what it has
        self.next_server.replace(self.server)
        write_atomic(self.ca, self.next_ca.read_bytes())
        for path in (self.next_ca, self.switch_file):
            path.unlink(missing_ok=True)
        return True


def init(root: Path, hosts: Sequence[str], days: int = 825) -> Certs:
    """Make an authority, a server certificate for `hosts` (and 127.0.0.1, localhost) and a control key."""
    certs = Certs(root)
    names = _subjects(hosts)
    for path in (certs.ca, certs.ca_key, certs.server, certs.server_key):
        if path.exists():
            raise CoterieError(f"{path} exists already; choose another directory or remove it yourself")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    (root / "nodes").mkdir(exist_ok=True, mode=0o700)
    _authority(certs, days)
    _issue(certs, names, days)
    return certs


def renew(root: Path, hosts: Sequence[str] = (), days: int = 825) -> Certs:
    """A new server certificate from the same authority. Devices need nothing; a running server takes it by itself.

    Without `hosts` it is for those of the present certificate.
    """
    certs = _with_authority(root)
    if certs.switches_at() is not None:
        raise CoterieError(
            f"{root} is changing its authority, which comes with a new server certificate; coterie certs switch {root} "
            "lets it take over now"
        )
    _issue(certs, _subjects(hosts or _hosts(certs)), days)
    return certs


def renew_ca(root: Path, hosts: Sequence[str] = (), days: int = 825, overlap: float = 30.0) -> Certs:
    """A new authority, which takes over after `overlap` days; until then ca.crt holds both.

    At once, ca.crt is to be given to all devices: it trusts the old authority and the new one. The server keeps a
    certificate of the old one until the overlap is over, so devices with either file connect. Then a certificate of the
    new authority takes its place, and ca.crt is the new authority's alone.
    """
    certs = _with_authority(root)
    if certs.switches_at() is not None:
        raise CoterieError(f"{root} is changing its authority already; finish with coterie certs switch {root}")
    names = _subjects(hosts or _hosts(certs))
    old = certs.ca.read_bytes()
    end = max(c.not_valid_after_utc for c in _read_certificates(certs.ca))
    if overlap > 0 and datetime.now(UTC) + timedelta(days=overlap) > end:
        raise CoterieError(
            f"the present authority ends on {end:%Y-%m-%d %H:%M} UTC, before an overlap of {overlap:g} days; "
            "give a shorter --overlap (0: take over at once, and devices need the new ca.crt to connect)"
        )
    next_root = root / "next"
    next_root.mkdir(exist_ok=True, mode=0o700)
    for path in next_root.iterdir():
        path.unlink()
    new = Certs(next_root)
    _authority(new, days)
    _issue(new, names, days)
    new.ca_key.replace(certs.ca_key)  # from now on, what is signed is signed by the new one
    write_atomic(certs.switch_file, repr(time.time() + overlap * 86_400).encode())
    write_atomic(certs.ca, new.ca.read_bytes() + old)
    certs.switch()
    return certs


def switch_now(root: Path) -> None:
    """End the overlap: the new authority takes over now."""
    certs = Certs(root)
    if certs.switches_at() is None:
        raise CoterieError(f"{root} has no new authority that could take over; make one with coterie certs renew --ca")
    write_atomic(certs.switch_file, b"0")
    certs.switch()


def _with_authority(root: Path) -> Certs:
    certs = Certs(root)
    if not certs.ca_key.is_file():
        raise CoterieError(f"certs {root} has no ca.key; a new certificate needs the authority's key")
    return certs


def _hosts(certs: Certs) -> list[str]:
    """Of the present server certificate."""
    x509, _, _ = _crypto()
    try:
        names = _read_certificates(certs.server)[0].extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (CoterieError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names.value]


def add_node(
    root: Path, name: str, public: Path | None = None, role: Role = "device", devices: Sequence[str] = ()
) -> Path:
    """Register a node: make its key pair (private key returned), or take the `public` half made on the device.

    An edge speaks for `devices` alone: names in its own list of nodes, or patterns such as ward-*.
    """
    certs = Certs(root)
    about = NodeRole.of(role, devices)
    if not NODE_NAME.fullmatch(name):
        raise CoterieError(f'node name "{name}" must be letters, digits, dot, dash or underscore, at most 63')
    if not certs.ca.is_file():
        raise CoterieError(f"{root} is not a certificate directory; create one with coterie certs init")
    if certs.public(name).exists() or certs.key(name).exists():
        raise CoterieError(f'node "{name}" exists already in {root}')
    if public is not None:
        check_unused(certs, public)
        certs.role_file(name).write_text(about.text())  # before the key, so that no edge is ever taken for a device
        _write(certs.public(name), public.read_bytes())
        return certs.public(name)
    certs.role_file(name).write_text(about.text())
    return new_key(certs.key(name))


def check_unused(certs: Certs, public: Path) -> None:
    """A sentence if the file is no public key, or that of a node already."""
    try:
        known = certs.accepted().get(_public_pem(public))
    except FileNotFoundError as e:
        raise CoterieError(f"public key {public} does not exist") from e
    if known is not None:
        raise CoterieError(f'public key {public} is already that of node "{known}"')


def new_key(path: Path) -> Path:
    """A node's key pair: `path` (OpenSSH, 0600) and the same name with .pub. May be run on the device itself."""
    _, serialization, ec = _crypto()
    key = ec.generate_private_key(ec.SECP256R1())
    encoding = serialization.Encoding
    private = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    _write(path, private, secret=True)
    _write(
        path.with_suffix(".pub"), key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return path


def remove_node(root: Path, name: str) -> None:
    """Remove a node: a running cloud refuses it from the next round on. Its seat in a run stays its own (nodes.py)."""
    certs = Certs(root)
    if not certs.public(name).exists():
        raise CoterieError(f'no node "{name}" in {root}; known: {", ".join(certs.nodes()) or "none"}')
    for path in (
        certs.next_public(name), certs.next_key(name), certs.public(name), certs.key(name), certs.role_file(name)
    ):  # fmt: skip
        path.unlink(missing_ok=True)


def load_key(path: Path) -> Any:
    """A node's private key, as Flower's node authentication takes it (EC, OpenSSH)."""
    _, serialization, ec = _crypto()
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as e:
        raise CoterieError(f"node key {path} cannot be read: {e.strerror}") from e
    except (ValueError, TypeError) as e:
        raise CoterieError(f"node key {path} is not an OpenSSH private key without a passphrase") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CoterieError(f"node key {path} must be an elliptic-curve key")
    return key


def _authority(certs: Certs, days: int) -> None:
    x509, serialization, ec = _crypto()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coterie federation")])
    authority = (
        _certificate(name, name, key.public_key(), key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(x509, "key_cert_sign", "crl_sign"), critical=True)
        .sign(key, _sha256())
    )
    _write(certs.ca_key, _pem(key), secret=True)
    _write(certs.ca, authority.public_bytes(serialization.Encoding.PEM))


def _issue(certs: Certs, names: list[Any], days: int) -> None:
    x509, serialization, ec = _crypto()
    ca_key = serialization.load_pem_private_key(certs.ca_key.read_bytes(), None)
    ca = _read_certificates(certs.ca)[0]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coterie cloud")])
    certificate = (
        _certificate(subject, ca.subject, key.public_key(), ca.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, "digital_signature", "key_agreement"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, _sha256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    new = {path: path.with_name(f".{path.name}.new") for path in (certs.server_key, certs.server)}
    for path, content in zip(new, (_pem(key), pem), strict=True):
        new[path].unlink(missing_ok=True)
        _write(new[path], content, secret=path == certs.server_key)
    for path, fresh in new.items():  # both lie there whole before either takes the old one's place
        fresh.replace(path)


def _read_certificates(path: Path) -> list[Any]:
    x509, _, _ = _crypto()
    try:
        return list(x509.load_pem_x509_certificates(path.read_bytes()))
    except OSError as e:
        raise CoterieError(f"certificate {path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CoterieError(f"certificate {path} is damaged") from e


def _signed(certificate: Any, authority: Any) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # of several kinds, all of which mean no
        return False
    return True


def _certificate(subject: Any, issuer: Any, public: Any, issuer_public: Any, days: int) -> Any:
    """A builder with what both kinds of certificate have; key identifiers are what strict verifiers ask for."""
    x509, _, _ = _crypto()
    start = datetime.now(UTC) - timedelta(hours=1)  # clocks of devices may be behind
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_public), critical=False)
    )


def _usage(x509: Any, *allowed: str) -> Any:
    every = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: name in allowed for name in every})


def _subjects(hosts: Sequence[str]) -> list[Any]:
    """Subject alternative names; 127.0.0.1 and localhost are always there."""
    x509, _, _ = _crypto()
    names: list[Any] = []
    for host in dict.fromkeys([*hosts, "127.0.0.1", "localhost"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not HOST.fullmatch(host):
                raise CoterieError(f'host "{host}" is neither an address nor a host name (give no port)') from None
            names.append(x509.DNSName(host))
    return names


def _public_pem(path: Path) -> bytes:
    """A public key file (OpenSSH) as PEM, the form in which a SuperLink knows nodes."""
    _, serialization, ec = _crypto()
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as e:
        raise CoterieError(f"public key {path} is not in OpenSSH format") from e
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CoterieError(f"public key {path} must be an elliptic-curve key (NIST P-256, P-384 or P-521)")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.PEM, form))


def _pem(key: Any) -> bytes:
    _, serialization, _ = _crypto()
    form = serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Create, never overwrite; a secret is unreadable to others from its first byte on."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError as e:
        raise CoterieError(f"{path} exists already and is not overwritten") from e
    with os.fdopen(handle, "wb") as f:
        f.write(content)


def _sha256() -> Any:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _crypto() -> tuple[Any, Any, Any]:
    """Cryptography comes with the extra `flower`; nothing else here needs it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as e:
        raise CoterieError('certificates need the extra "federation": pip install coterie[federation]') from e
    return x509, serialization, ec
