"""Keys and certificates of a federation: one authority, one server certificate, and one certificate per node.

The directory that `init` makes belongs on the host of the cloud or edge. A device needs three files: `ca.crt`, its own
`NAME.key` and, next to the key, `NAME.crt`. The certificates in `nodes/` are the list of registered nodes: a server
accepts exactly these certificates, so that removing a file revokes a certificate. Next to each is the node's role,
NAME.json (roles.py); `nodes/next/` has the new certificates while they are rotated.
"""

import functools
import hashlib
import ipaddress
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.roles import NODE_NAME, NodeRole, Role
from coterie.storage.atomic import write_atomic

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
except ImportError as e:
    raise CoterieError('certificates need the extra "federation": pip install coterie[federation]') from e

SOON = timedelta(days=30)  # time before the end of a certificate at which warnings begin
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

    def certificate(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.crt"

    def next_key(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.key"

    def next_certificate(self, name: str) -> Path:
        return self.root / "nodes" / "next" / f"{name}.crt"

    def nodes(self) -> list[str]:
        """Return the names of the registered nodes."""
        return sorted(path.stem for path in (self.root / "nodes").glob("*.crt"))

    def valid(self, name: str) -> list[bytes]:
        """Return the digests of a node's certificates that are valid now: two during a rotation, else at most one."""
        if not NODE_NAME.fullmatch(name):
            return []
        try:
            certificates = [read_node(self.certificate(name))]
            if self.next_certificate(name).is_file():
                until = NodeRole.read(self.role_file(name)).old_key_until
                if until is not None and time.time() >= until:
                    certificates = []
                certificates.append(read_node(self.next_certificate(name)))
        except FileNotFoundError:  # the node is not registered
            return []
        now = datetime.now(UTC)
        return [c.digest for c in certificates if c.begins <= now < c.ends]

    def seen(self, name: str, digest: bytes) -> bool:
        """Note that a node has connected with this certificate; return True if that ends its rotation."""
        try:
            if not self.next_certificate(name).is_file() or read_node(self.next_certificate(name)).digest != digest:
                return False
            self._promote(name)
        except FileNotFoundError:  # the node was removed, or a different process has done this
            return False
        return True

    def _promote(self, name: str) -> None:
        """Replace a node's certificate by its next one, and its key if a new one was made here."""
        role = NodeRole.read(self.role_file(name))
        if self.next_key(name).is_file():
            self.next_key(name).replace(self.key(name))
        elif read_node(self.next_certificate(name)).key != read_node(self.certificate(name)).key:
            self.key(name).unlink(missing_ok=True)  # the new key is on the node's host
        self.next_certificate(name).replace(self.certificate(name))
        write_atomic(self.role_file(name), replace(role, old_key_until=None).text().encode())

    def role_file(self, name: str) -> Path:
        return self.root / "nodes" / f"{name}.json"

    def roles(self) -> dict[str, NodeRole]:
        """Return the roles of the registered nodes, by name."""
        return {name: NodeRole.read(self.role_file(name)) for name in self.nodes()}

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
            if now + SOON > ends:
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

    def expiring_nodes(self) -> list[str]:
        """Return warnings about certificates of nodes that have expired or expire soon."""
        warnings, soon = [], datetime.now(UTC) + SOON
        for name in self.nodes():
            ends = max(read_node(p).ends for p in (self.certificate(name), self.next_certificate(name)) if p.is_file())
            if ends < soon:
                warnings.append(
                    f"the certificate of {name} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it with "
                    f"coterie nodes rotate {self.root} {name}"
                )
        return warnings

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
        for name in self.nodes():  # their certificates of the old authority end with it
            if self.next_certificate(name).is_file():
                self._promote(name)
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

    Until then ca.crt contains both authorities. It should be given to all nodes, each with its new certificate, which
    is in nodes/next/ and is for the key that the node has. The server keeps a certificate of the old authority during
    the overlap, so that nodes with the old or the new files can connect. Afterwards the server has a certificate of
    the new authority, and ca.crt contains the new authority only.
    """
    certs = _with_authority(root)
    if certs.switches_at() is not None:
        raise CoterieError(f"{root} is changing its authority already; finish with coterie certs switch {root}")
    for name in certs.nodes():
        if certs.next_certificate(name).is_file():
            raise CoterieError(f'node "{name}" is changing its key and has not yet connected with the new one')
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
    until = time.time() + overlap * 86_400
    write_atomic(certs.switch_file, repr(until).encode())
    write_atomic(certs.ca, new.ca.read_bytes() + old)
    for name in certs.nodes():
        public = _read_certificates(certs.certificate(name))[0].public_key()
        set_next_certificate(certs, name, public, until, days)
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
    if not certs.ca.is_file():
        raise CoterieError(f"{root} is not a certificate directory; create one with coterie certs init")
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
    root: Path,
    name: str,
    request: Path | None = None,
    role: Role = "device",
    devices: Sequence[str] = (),
    days: int = 825,
) -> Path:
    """Register a node. Return its new private key, or with a `request` of the node's host its certificate.

    An edge speaks only for `devices`: names in its own list of nodes, or patterns such as ward-*.
    """
    node_role = NodeRole.of(role, devices)
    _check_name(name)
    certs = _with_authority(root)
    if certs.certificate(name).exists() or certs.key(name).exists():
        raise CoterieError(f'node "{name}" exists already in {root}; coterie nodes rotate changes its certificate')
    if request is None:
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key()
    else:
        public = read_request(request, name)
        _check_unused(certs, public)
    certs.role_file(name).write_text(node_role.text())  # before the certificate: no edge ever counts as a device
    if request is None:
        _write(certs.key(name), _pem(key), secret=True)
    _write(certs.certificate(name), _issue_node(certs, name, public, days))
    return certs.certificate(name) if request is not None else certs.key(name)


def set_next_certificate(certs: Certs, name: str, public: Any, until: float, days: int = 825) -> None:
    """Issue a node's next certificate, for the key `public`; the present one is valid until then."""
    # the time is written first: without it, both certificates would be valid for ever
    role = NodeRole.read(certs.role_file(name))
    write_atomic(certs.role_file(name), replace(role, old_key_until=until).text().encode())
    certs.next_certificate(name).parent.mkdir(exist_ok=True, mode=0o700)
    write_atomic(certs.next_certificate(name), _issue_node(certs, name, public, days))


def replace_key(certs: Certs, name: str, request: Path | None, until: float, days: int = 825) -> Path:
    """Issue a certificate for a node's new key, which is made here or is that of a `request`; return as add_node."""
    if request is not None:
        public = read_request(request, name)
        _check_unused(certs, public, but=name)
        set_next_certificate(certs, name, public, until, days)
        return certs.next_certificate(name)
    key = ec.generate_private_key(ec.SECP256R1())
    certs.next_key(name).parent.mkdir(exist_ok=True, mode=0o700)
    certs.next_key(name).unlink(missing_ok=True)
    _write(certs.next_key(name), _pem(key), secret=True)
    set_next_certificate(certs, name, key.public_key(), until, days)
    return certs.next_key(name)


def make_request(path: Path, name: str | None = None) -> Path:
    """Make a private key (mode 0600) on the node's own host, and return the certificate request next to it (.csr)."""
    name = path.stem if name is None else name
    _check_name(name)
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_common_name(name)).sign(key, SHA256())
    csr = path.with_suffix(".csr")
    if csr.exists():
        raise CoterieError(f"{csr} exists already and is not overwritten")
    _write(path, _pem(key), secret=True)
    _write(csr, request.public_bytes(serialization.Encoding.PEM))
    return csr


def read_request(path: Path, name: str) -> Any:
    """Return the public key of a certificate request for the node `name`; all other wishes in it are ignored."""
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        valid = request.is_signature_valid
    except OSError as e:
        raise CoterieError(f"certificate request {path} cannot be read: {e.strerror}") from e
    except Exception as e:  # parsing raises several exception types
        raise CoterieError(f"{path} is not a certificate request (PEM)") from e
    if not valid:
        raise CoterieError(f"the certificate request {path} is not signed with its own key")
    if requested_name(path) != name:
        raise CoterieError(f'the certificate request {path} is for "{requested_name(path)}", not for "{name}"')
    if not isinstance(request.public_key(), ec.EllipticCurvePublicKey):
        raise CoterieError(f"the key of {path} must be an elliptic-curve key (NIST P-256, P-384 or P-521)")
    return request.public_key()


def requested_name(path: Path) -> str:
    """Return the name of the node in a certificate request; raise CoterieError if there is not exactly one."""
    try:
        return _name_of(x509.load_pem_x509_csr(path.read_bytes()).subject)
    except OSError as e:
        raise CoterieError(f"certificate request {path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CoterieError(f"{path} is not a certificate request (PEM)") from e


class NodeCertificate(NamedTuple):
    """The facts of a registered certificate that a server compares."""

    digest: bytes  # SHA-256 of the certificate (DER)
    key: bytes  # SHA-256 of its public key (DER)
    begins: datetime
    ends: datetime


def read_node(path: Path) -> NodeCertificate:
    """Return a node's certificate; raise CoterieError if it is damaged or for a different name."""
    about = path.stat()
    return _read_node(path, about.st_mtime_ns, about.st_size, about.st_ino)


@functools.lru_cache(maxsize=16_384)
def _read_node(path: Path, *version: int) -> NodeCertificate:
    """Read a file again only when it has changed: a server looks at all of them every second."""
    certificate = _read_certificates(path)[0]
    if (name := _name_of(certificate.subject)) != path.stem:
        raise CoterieError(f'the certificate {path} is for "{sentence(name)}", not for "{path.stem}"')
    return NodeCertificate(
        certificate_digest(certificate.public_bytes(serialization.Encoding.DER)),
        _key_digest(certificate.public_key()),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )


def certificate_digest(der: bytes) -> bytes:
    """Return the SHA-256 digest by which servers recognise a certificate."""
    return hashlib.sha256(der).digest()


def check_node_files(key: Path, certificate: Path, ca: Path) -> str:
    """Raise CoterieError if a node cannot connect with these files; return a warning if they expire soon, or "".

    The key is read by its owner only, here and by gRPC.
    """
    own = _read_certificates(certificate)[0]
    if not matches(certificate.read_bytes(), load_key(key)):
        raise CoterieError(f"the certificate {certificate} does not match the key {key}")
    now, ends = datetime.now(UTC), own.not_valid_after_utc
    if not own.not_valid_before_utc <= now < ends:
        raise CoterieError(
            f"the certificate {certificate} is valid from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{ends:%Y-%m-%d %H:%M} UTC, not now; ask the operator for a new one"
        )
    _read_certificates(ca)
    if now + SOON > ends:
        return f"the certificate {certificate} expires on {ends:%Y-%m-%d %H:%M} UTC; ask the operator for a new one"
    return ""


def matches(certificate: bytes, key: Any) -> bool:
    """True if a certificate (PEM) was issued for this private key; raises ValueError if it is damaged."""
    return bool(x509.load_pem_x509_certificate(certificate).public_key() == key.public_key())


def _check_name(name: str) -> None:
    if not NODE_NAME.fullmatch(name):
        raise CoterieError(
            f'node name "{name}" must be letters, digits, dot, dash or underscore, at most 63 characters'
        )


def _check_unused(certs: Certs, public: Any, but: str = "") -> None:
    """Raise CoterieError if a key already belongs to a different node."""
    for name in certs.nodes():
        for path in (certs.certificate(name), certs.next_certificate(name)):
            if name != but and path.is_file() and read_node(path).key == _key_digest(public):
                raise CoterieError(f'the key of this request already belongs to node "{name}"')


def remove_node(root: Path, name: str) -> None:
    """Remove a node and revoke its certificate; a running server disconnects it at once.

    Its seat is not freed (admin.py).
    """
    certs = Certs(root)
    if name not in certs.nodes():
        raise CoterieError(f'no node "{name}" in {root}; known: {", ".join(certs.nodes()) or "none"}')
    for path in (
        certs.next_certificate(name), certs.certificate(name), certs.next_key(name), certs.key(name),
        certs.role_file(name),
    ):  # fmt: skip
        path.unlink(missing_ok=True)


def load_key(path: Path) -> Any:
    """Return a private key; raise CoterieError if it is not an elliptic-curve key in PEM format."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as e:
        raise CoterieError(f"key {path} cannot be read: {e.strerror}") from e
    except (ValueError, TypeError) as e:
        raise CoterieError(f"key {path} is not a PEM private key without a passphrase") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CoterieError(f"key {path} must be an elliptic-curve key")
    return key


def _authority(certs: Certs, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("coterie federation")
    authority = (
        _certificate(name, name, key.public_key(), key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .sign(key, SHA256())
    )
    _write(certs.ca_key, _pem(key), secret=True)
    _write(certs.ca, authority.public_bytes(serialization.Encoding.PEM))


def _issue(certs: Certs, names: list[Any], days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject, usage = _common_name("coterie cloud"), x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
    pem = _sign(certs, subject, key.public_key(), days, usage, x509.SubjectAlternativeName(names))
    new = {path: path.with_name(f".{path.name}.new") for path in (certs.server_key, certs.server)}
    for path, content in zip(new, (_pem(key), pem), strict=True):
        new[path].unlink(missing_ok=True)
        _write(new[path], content, secret=path == certs.server_key)
    for path, fresh in new.items():  # both files are complete before either replaces the old one
        fresh.replace(path)


def _issue_node(certs: Certs, name: str, public: Any, days: int) -> bytes:
    """Return the certificate (PEM) of a node: its name is the subject, and it is for clients only."""
    return _sign(certs, _common_name(name), public, days, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH)


def _sign(certs: Certs, subject: Any, public: Any, days: int, usage: Any, *more: Any) -> bytes:
    """Return a certificate of the authority whose key is in the directory: the first one in ca.crt."""
    ca = _read_certificates(certs.ca)[0]
    builder = (
        _certificate(subject, ca.subject, public, ca.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature", "key_agreement"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    return bytes(builder.sign(load_key(certs.ca_key), SHA256()).public_bytes(serialization.Encoding.PEM))


def _common_name(name: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _name_of(subject: Any) -> str:
    """Return the common name of a subject; raise CoterieError if it has none or several."""
    names = subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    if len(names) != 1:
        raise CoterieError(f"a node's certificate must have one common name, not {len(names)}")
    return str(names[0].value)


def _key_digest(public: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).digest()


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
