"""Flower's HTTP clients with errors as sentences, counted bytes and no hidden retries.

Flower's own retry helper sends its process SIGINT when a server answers 401; so it is not used.
"""

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from coterie.errors import CoterieError
from coterie.runtimes.flower.transport import flower_api as fl
from coterie.runtimes.flower.transport.base import RefusedError, UnreachableError, UntrustedError

HEADER = "x-coterie-control-key"  # what guard.py asks of who controls the SuperLink,
KEY = "COTERIE_CONTROL_KEY"  # and the variable that tells it where the key lies


class Meter:
    """Counts bodies and headers of requests and responses (TLS records and TCP are not seen from here)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        response = call_next(context)
        with self._lock:
            self.bytes += _size(context.request) + _size(response)
        return response


class Header:
    """Adds one header to every request, once it has a value."""

    def __init__(self, name: str, value: str = ""):
        self.name, self.value = name, value

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        if self.value:
            context.request.headers[self.name] = self.value
        return call_next(context)


def client(kind: Any, address: str, ca: Path, component: str, interceptors: Sequence[Any] = ()) -> Any:
    """A Flower HTTP client of class `kind` over TLS that trusts `ca` only; its `meter` counts bytes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CoterieError(f'address "{address}" must be HOST:PORT')
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as e:
        raise CoterieError(f"the authority's certificate {ca} cannot be read: {e}") from e
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    meter = Meter()
    made = kind(
        f"https://{address}",
        interceptors=[fl.RuntimeVersionHttpInterceptor(component_name=component), *interceptors, meter],
        verify=context,
        timeout=60.0,
    )
    made.meter, made.tls = meter, context
    return made


def call(function: Callable[[Any], Any], request: Any) -> Any:
    """One request; what can go wrong becomes UnreachableError, RefusedError or a plain CoterieError."""
    try:
        return function(request)
    except httpx.HTTPStatusError as e:
        status, where = e.response.status_code, e.request.url.path
        reason = _reason(e.response.text) or e.response.reason_phrase
        if status >= 500:
            raise UnreachableError(f"the SuperLink reports an error: {status} {reason}") from e
        if status in (401, 403, 404) or where.endswith("/activate-node"):
            raise RefusedError(f"the SuperLink refused {where}: {status} {reason}") from e
        raise CoterieError(f"the SuperLink refused {where}: {status} {reason}") from e
    except httpx.TransportError as e:
        text = str(e)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise UntrustedError(f"the server's certificate is not trusted: {_verdict(text)}") from e
        if "WRONG_VERSION_NUMBER" in text:
            raise CoterieError("the server does not speak TLS; plain HTTP is not used") from e
        raise UnreachableError(f"the SuperLink does not answer: {text or type(e).__name__}") from e
    except SystemExit as e:  # Flower's way to say that versions differ
        raise CoterieError("the SuperLink runs another version of Flower than this program") from e


class Objects:
    """The parts of messages, which both ends of the wire push, pull and confirm one by one."""

    def __init__(self, client: Any, node: int, run: int):
        self._client, self._run, self._node = client, run, fl.NodeId(node_id=node)

    def put(self, session: str, key: str, raw: bytes) -> bool:
        request = fl.objects.PushObjectRequest(
            node=self._node, run_id=self._run, object_id=key, object_content=raw, session_id=session
        )
        return bool(call(self._client.PushObject, request).stored)

    def get(self, key: str) -> bytes | None:
        """None while it is still on its way."""
        request = fl.objects.PullObjectRequest(node=self._node, run_id=self._run, object_id=key)
        found = call(self._client.PullObject, request)
        if not found.object_found:
            raise CoterieError("a part of the message is gone")
        return found.object_content if found.object_available else None

    def confirm(self, message: str) -> None:
        """The SuperLink may forget the message."""
        request = fl.objects.ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=message)
        call(self._client.ConfirmMessageReceived, request)


def _verdict(text: str) -> str:
    """OpenSSL's own words, without where in its source they stand."""
    return text.partition("verify failed: ")[2].partition(" (_ssl")[0] or text


def _reason(text: str) -> str:
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return str(found.get("message") or found.get("detail") or "")
    return ""


def _size(message: Any) -> int:
    return len(message.content) + sum(len(k) + len(v) + 4 for k, v in message.headers.raw)
