"""The TLS credentials of both ends, which are read again when their files change, without a restart.

Both ends prove their key in gRPC's TLS handshake. A server admits only certificates of the authority in its ca.crt, so
that a stranger gets no further than the handshake. gRPC's Python interface cannot set the lowest TLS version; the
server ends each stream that does not use TLS 1.3 (server.py).
"""

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.federation.identity.authority import Certs, check_node_files, load_key, matches
from coterie.federation.transport.base import RefusedError, UnreachableError, UntrustedError
from coterie.federation.transport.channel import HANDSHAKE_SECONDS, grpc

_LOOK_SECONDS = 5.0  # pause between looks at the files of a connected node
_ALERT_SECONDS = 2.0  # time for a server to refuse a certificate after the handshake


class ServerCredentials:
    """The certificate that the server presents, and the authorities of its nodes."""

    def __init__(self, certs: Certs):
        self._certs = certs
        self._files = (certs.server, certs.server_key, certs.ca)
        self._modified: tuple[int, ...] = ()  # modification times of the files that were loaded
        self._configuration: Any = None
        self._lock = threading.Lock()

    def make(self) -> Any:
        """Return gRPC's server credentials; raise CoterieError if certificate and key do not match."""
        self.reload()
        if self._configuration is None:
            raise CoterieError(f"the certificate {self._certs.server} does not match its key; renew it")
        return grpc.dynamic_ssl_server_credentials(self._configuration, self.reload, require_client_authentication=True)

    def reload(self) -> Any:
        """Return the new configuration if the files have changed, otherwise None; gRPC calls this at each handshake."""
        with self._lock:
            try:
                modified = tuple(p.stat().st_mtime_ns for p in self._files)
                if modified == self._modified:
                    return None
                certificate, key, ca = (path.read_bytes() for path in self._files)
                if not matches(certificate, load_key(self._certs.server_key)):
                    return None  # the two files are being replaced
                self._configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], ca)
                self._modified = modified
                return self._configuration
            except (OSError, ValueError, CoterieError):
                return None


class NodeCredentials:
    """The files with which a node connects: the authority, its key, and its certificate."""

    def __init__(self, ca: Path, key: Path, certificate: Path | None):
        self.ca, self.key, self.certificate = ca, key, certificate or key.with_suffix(".crt")
        self.warning = ""  # the certificate expires soon
        self._loaded: Any = None
        self._versions: list[int] = []

    def load(self) -> Any:
        """Return gRPC's channel credentials; raise CoterieError if the files do not fit together.

        Files that are unreadable or being replaced do not disturb a node that has loaded them before.
        """
        versions = self._modified()
        if versions != self._versions or self._loaded is None:
            try:
                self.warning = check_node_files(self.key, self.certificate, self.ca)
                ca, key, certificate = (path.read_bytes() for path in (self.ca, self.key, self.certificate))
                self._loaded = grpc.ssl_channel_credentials(ca, key, certificate)
                self._versions = versions
            except (OSError, CoterieError) as e:
                if self._loaded is None:
                    raise CoterieError(str(e)) from e
        return self._loaded

    async def changed(self) -> None:
        """Return when the files have changed and fit together."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._modified() != self._versions:
                with contextlib.suppress(CoterieError):
                    check_node_files(self.key, self.certificate, self.ca)
                    return

    def _modified(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [path.stat().st_mtime_ns for path in (self.ca, self.key, self.certificate)]
        return self._versions

    async def explain(self, address: str) -> CoterieError:
        """Return the reason why no connection can be made, which gRPC does not tell: try a TLS handshake."""
        host, _, port = address.rpartition(":")
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            context.load_cert_chain(self.certificate, self.key)
        except OSError as e:  # ssl.SSLError is an OSError
            return UnreachableError(f"the files of this node cannot be read: {e}")
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        except ssl.SSLCertVerificationError as e:
            return UntrustedError(f"the server's certificate is not trusted: {e.verify_message}")
        except (OSError, TimeoutError) as e:
            if "WRONG_VERSION_NUMBER" in str(e):
                return CoterieError(f"{address} does not speak TLS; is it the port of a Coterie cloud or edge?")
            return UnreachableError(f"{address} does not answer: {e or type(e).__name__}")
        try:
            if writer.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
                return CoterieError(f"{address} does not speak gRPC; is it the port of a Coterie cloud or edge?")
            async with asyncio.timeout(_ALERT_SECONDS):
                if await reader.read(1):  # the server's HTTP/2 settings: the handshake is complete
                    return UnreachableError(f"the connection to {address} is lost")
        except TimeoutError:
            return UnreachableError(f"{address} does not answer")
        except OSError:  # a TLS 1.3 server refuses a certificate after the client's handshake
            pass
        finally:
            writer.transport.abort()
        return RefusedError("the server does not accept this node's certificate: is it of the server's authority?")
