"""Keys and certificates of a federation: one authority, one server certificate, and one key per node.

The directory that `init` makes belongs on the host of the cloud or edge. A device needs two files: `ca.crt` and its own
`NAME.key`. The public keys in `nodes/` are the list of registered nodes: adding or removing a file adds or removes a
node. Next to each is the node's role, NAME.json (roles.py); `nodes/next/` has the new keys while keys are rotated.
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

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
except ImportError as e:
    raise CoterieError('certificates need the extra "federation": pip install coterie[federation]') from e

_SOON = 30  # days before the end of a certificate at which warnings begin
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Certs:
    """The directory of a federation's keys and certificates."""

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
        """The certificate of the next authority: already part of `ca`, not yet used for `server`."""
        return self.root / "next" / "ca.crt"

    @property
    def next_server(self) -> Path:
        return self.root / "next" / "server.crt"

    @property
    def next_server_key(self) -> Path:
        return self.root / "next" / "server.key"

    @property
    def switch_file(self) -> Path:
        """The file with the time at which the next authority takes over, in seconds since 1970."""
        return self.root / "next" / "from"

    def key(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.key"

    def public(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.pub"

    def nodes(self) -> dict[str, bytes]:
        """Return the public keys (PEM) of the registered nodes, by name."""
        keys: dict[str, bytes] = {}
        for path in sorted((self.root / "nodes").glob("*.pub")):
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                keys[path.stem] = _public_pem(path)
        return keys

    def next_key(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.key"

    def next_public(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.pub"

    def accepted(self) -> dict[bytes, str]:
        """Return the public keys (PEM) that are valid now, with the nodes' names; a node has two during a rotation."""
        names = {pem: name for name, pem in self.nodes().items()}
        for path in sorted((self.root / "nodes" / "next").glob("*.pub")):
            name = path.stem
            with contextlib.suppress(FileNotFoundError):
                new = _public_pem(path)
                until = NodeRole.read(self.role_file(name)).old_key_until
                if not self.public(name).is_file():
                    continue  # the node was removed
                if until is not None and time.time() >= until:
                    names = {pem: n for pem, n in names.items() if n != name}
                names[new] = name
        return names

    def seen(self, name: str, pem: bytes) -> bool:
        """Note that a node has connected with this key; return True if that ends the rotation of its key."""
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
        except FileNotFoundError:  # the node was removed, or a different process has done this
            return False
        return True

    def role_file(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.json"

    def roles(self) -> dict[str, NodeRole]:
        """Return the roles of the registered nodes, by name."""
        names = sorted(path.stem for path in (self.root / "nodes").glob("*.pub"))
        return {name: NodeRole.read(self.role_file(name)) for name in names}

    def check(self) -> None:
        """Raise CoterieError if the directory is incomplete."""
        for path in (self.ca, self.server, self.server_key):
            if not path.is_file():
                raise CoterieError(
                    f"certs {self.root} has no {path.name}; create the directory with coterie certs init"
                )

    def check_dates(self, now: datetime | None = None) -> list[str]:
        """Return warnings about certificates that expire soon; raise CoterieError if one is not valid now."""
        warnings, now = [], now or datetime.now(UTC)
        for name, begins, ends, command in self.dates():
            if now >= ends:
                raise CoterieError(f"the {name} expired on {ends:%Y-%m-%d %H:%M} UTC; renew it with coterie {command}")
            if now < begins:
                raise CoterieError(
                    f"the {name} is not valid before {begins:%Y-%m-%d %H:%M} UTC; is this host's clock right?"
                )
            if now + timedelta(days=_SOON) > ends:
                warnings.append(f"the {name} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it with coterie {command}")
        return warnings

    def dates(self) -> list[tuple[str, datetime, datetime, str]]:
        """Return name, first and last moment, and renewing command of the server certificate and its authority."""
        server = _read_certificates(self.server)[0]
        signed_by = [c for c in _read_certificates(self.ca) if _signed(server, c)]
        if not signed_by:
            raise CoterieError(f"the server certificate {self.server} is not signed by {self.ca}")
        renew, whole = f"certs renew {self.root}", f"certs renew {self.root} --ca"
        certificates = [(f"server certificate {self.server}", server, renew)]
        certificates += [(f"authority's certificate {self.ca}", c, whole) for c in signed_by]
        return [(name, c.not_valid_before_utc, c.not_valid_after_utc, command) for name, c, command in certificates]

    def switches_at(self) -> float | None:
        """Return the time at which the next authority takes over; None without a next authority."""
        try:
            return float(self.switch_file.read_text())
        except (OSError, ValueError):
            return None

    def switch(self) -> bool:
        """Let the next authority take over if it is time; return True if it did."""
        at = self.switches_at()
        if at is None or time.time() < at or not self.next_server.is_file():
            return False
        self.next_server_key.replace(self.server_key)  # servers ignore a pair that does not match
        self.next_server.replace(self.server)
        write_atomic(self.ca, self.next_ca.read_bytes())
        for path in (self.next_ca, self.switch_file):
            path.unlink(missing_ok=True)
        return True


def init(root: Path, hosts: Sequence[str], days: int = 825) -> Certs:
    """Make an authority and a server certificate for `hosts`, 127.0.0.1 and localhost."""
    certs = Certs(root)
    names = _subjects(hosts)
    for path in (certs.ca, certs.ca_key, certs.server, certs.server_key):
        if path.exists():
            raise CoterieError(f"{path} exists already; choose a different directory or remove the file")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    (root / "nodes").mkdir(exist_ok=True, mode=0o700)
    _authority(certs, days)
    _issue(certs, names, days)
    return certs


def renew(root: Path, hosts: Sequence[str] = (), days: int = 825) -> Certs:
    """Issue a new server certificate of the same authority; a running server uses it without a restart.

    The certificate is for `hosts`, or else for the hosts of the present certificate.
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
    """Make a new authority, which takes over after `overlap` days.

    Until then ca.crt contains both authorities, and it should be given to all devices. The server keeps a certificate
    of the old authority during the overlap, so that devices with the old or the new file can connect. Afterwards the
    server has a certificate of the new authority, and ca.crt contains the new authority only.
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
            "choose a shorter --overlap (0: the new authority takes over now, and devices need the new ca.crt)"
        )
    next_root = root / "next"
    next_root.mkdir(exist_ok=True, mode=0o700)
    for path in next_root.iterdir():
        path.unlink()
    new = Certs(next_root)
    _authority(new, days)
    _issue(new, names, days)
    new.ca_key.replace(certs.ca_key)  # the new authority signs all later certificates
    write_atomic(certs.switch_file, repr(time.time() + overlap * 86_400).encode())
    write_atomic(certs.ca, new.ca.read_bytes() + old)
    certs.switch()
    return certs


def switch_now(root: Path) -> None:
    """End the overlap and let the new authority take over now."""
    certs = Certs(root)
    if certs.switches_at() is None:
        raise CoterieError(f"{root} has no new authority; make one with coterie certs renew --ca")
    write_atomic(certs.switch_file, b"0")
    certs.switch()


def _with_authority(root: Path) -> Certs:
    certs = Certs(root)
    if not certs.ca_key.is_file():
        raise CoterieError(f"certs {root} has no ca.key; a new certificate needs the authority's key")
    return certs


def _hosts(certs: Certs) -> list[str]:
    """Return the hosts of the present server certificate."""
    try:
        names = _read_certificates(certs.server)[0].extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (CoterieError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names.value]


def add_node(
    root: Path, name: str, public: Path | None = None, role: Role = "device", devices: Sequence[str] = ()
) -> Path:
    """Register a node and return its key file: a new private key, or a copy of the given `public` key.

    An edge speaks only for `devices`: names in its own list of nodes, or patterns such as ward-*.
    """
    certs = Certs(root)
    node_role = NodeRole.of(role, devices)
    if not NODE_NAME.fullmatch(name):
        raise CoterieError(
            f'node name "{name}" must be letters, digits, dot, dash or underscore, at most 63 characters'
        )
    if not certs.ca.is_file():
        raise CoterieError(f"{root} is not a certificate directory; create one with coterie certs init")
    if certs.public(name).exists() or certs.key(name).exists():
        raise CoterieError(f'node "{name}" exists already in {root}')
    if public is not None:
        check_unused(certs, public)
        certs.role_file(name).write_text(node_role.text())  # before the key: no edge ever counts as a device
        _write(certs.public(name), public.read_bytes())
        return certs.public(name)
    certs.role_file(name).write_text(node_role.text())
    return new_key(certs.key(name))


def check_unused(certs: Certs, public: Path) -> None:
    """Raise CoterieError if a file is not a public key, or already the key of a node."""
    try:
        known = certs.accepted().get(_public_pem(public))
    except FileNotFoundError as e:
        raise CoterieError(f"public key {public} does not exist") from e
    if known is not None:
        raise CoterieError(f'public key {public} already belongs to node "{known}"')


def new_key(path: Path) -> Path:
    """Make a node's key pair: `path` (OpenSSH format, mode 0600), and the public key with the suffix .pub."""
    key = ec.generate_private_key(ec.SECP256R1())
    encoding = serialization.Encoding
    private = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    _write(path, private, secret=True)
    _write(
        path.with_suffix(".pub"), key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return path


def remove_node(root: Path, name: str) -> None:
    """Remove a node; a running cloud disconnects it before the next round. Its seat is not freed (admin.py)."""
    certs = Certs(root)
    if not certs.public(name).exists():
        raise CoterieError(f'no node "{name}" in {root}; known: {", ".join(certs.nodes()) or "none"}')
    for path in (
        certs.next_public(name), certs.next_key(name), certs.public(name), certs.key(name), certs.role_file(name)
    ):  # fmt: skip
        path.unlink(missing_ok=True)


def load_key(path: Path) -> Any:
    """Return a node's private key; raise CoterieError if it is not an elliptic-curve key in OpenSSH format."""
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
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coterie federation")])
    authority = (
        _certificate(name, name, key.public_key(), key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .sign(key, SHA256())
    )
    _write(certs.ca_key, _pem(key), secret=True)
    _write(certs.ca, authority.public_bytes(serialization.Encoding.PEM))


def _issue(certs: Certs, names: list[Any], days: int) -> None:
    ca_key = serialization.load_pem_private_key(certs.ca_key.read_bytes(), None)
    ca = _read_certificates(certs.ca)[0]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coterie cloud")])
    certificate = (
        _certificate(subject, ca.subject, key.public_key(), ca.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature", "key_agreement"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    new = {path: path.with_name(f".{path.name}.new") for path in (certs.server_key, certs.server)}
    for path, content in zip(new, (_pem(key), pem), strict=True):
        new[path].unlink(missing_ok=True)
        _write(new[path], content, secret=path == certs.server_key)
    for path, fresh in new.items():  # both files are complete before either replaces the old one
        fresh.replace(path)


def _read_certificates(path: Path) -> list[Any]:
    try:
        return list(x509.load_pem_x509_certificates(path.read_bytes()))
    except OSError as e:
        raise CoterieError(f"certificate {path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CoterieError(f"certificate {path} is damaged") from e


def _signed(certificate: Any, authority: Any) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # verification raises several exception types; all mean failure
        return False
    return True


def _certificate(subject: Any, issuer: Any, public: Any, issuer_public: Any, days: int) -> Any:
    """Return a builder for either kind of certificate; strict verifiers require the key identifiers."""
    start = datetime.now(UTC) - timedelta(hours=1)  # the clocks of devices may be slow
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


def _usage(*allowed: str) -> Any:
    every = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: name in allowed for name in every})


def _subjects(hosts: Sequence[str]) -> list[Any]:
    """Return the subject alternative names of a server certificate; 127.0.0.1 and localhost are always included."""
    names: list[Any] = []
    for host in dict.fromkeys([*hosts, "127.0.0.1", "localhost"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not _HOST.fullmatch(host):
                raise CoterieError(f'host "{host}" is neither an address nor a host name (without a port)') from None
            names.append(x509.DNSName(host))
    return names


def _public_pem(path: Path) -> bytes:
    """Return a public key file (OpenSSH format) as PEM, the form in which nodes present their keys."""
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
    form = serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Create a file; raise CoterieError if it exists. A secret file is readable by its owner only."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError as e:
        raise CoterieError(f"{path} exists already and is not overwritten") from e
    with os.fdopen(handle, "wb") as f:
        f.write(content)
