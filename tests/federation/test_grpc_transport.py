"""The gRPC transport: what it promises to a cloud and its nodes, and what it refuses from strangers."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from support.in_process_link import reasons

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import numpy as np

from coterie.errors import CoterieError
from coterie.federation.identity import admin as nodes
from coterie.federation.identity import authority as certs
from coterie.federation.identity.authority import Certs
from coterie.federation.localhost import processes
from coterie.federation.localhost.processes import Child
from coterie.federation.protocol.coterie_pb2 import Answer, Error, FromNode, Join
from coterie.federation.protocol.coterie_pb2_grpc import FederationServiceStub
from coterie.federation.transport import NodeReplies, credentials, exchange, server
from coterie.federation.transport import channel as w
from coterie.federation.transport.channel import grpc
from coterie.federation.transport.event_loop import event_loop, run_on_loop, start_on_loop
from coterie.federation.transport.node import Node
from coterie.federation.transport.server import GrpcServer, wait_for_port


class Served:
    """A link, and nodes in threads of this process."""

    def __init__(self, root: Path):
        self.certs = certs.init(root / "certs", [])
        self.port = processes.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.link = GrpcServer(self.certs, "127.0.0.1", self.port)
        self.nodes: dict[str, tuple[Node, threading.Thread]] = {}
        self.calls: list[tuple[str, str]] = []
        self.pause = threading.Event()  # what "slow" waits for

    def join(self, name: str, answer: Callable[..., bytes] | None = None) -> Node:
        if name not in self.certs.nodes():
            certs.add_node(self.certs.root, name)
        node = Node(self.address, self.certs.ca, self.certs.key(name), answer or self._answer(name))
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        self.nodes[name] = node, thread
        self.until(lambda: name in self.link.nodes())
        return node

    def _answer(self, name: str) -> Callable[..., bytes]:
        def handle(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
            self.calls.append((name, kind))
            if kind == "fail":
                raise CoterieError("no data today")
            if kind == "slow":
                self.pause.wait(20)
            if kind == "aligned":
                assert shared is not None
                return str([np.frombuffer(x, np.uint8).ctypes.data % 64 for x in (shared, own)]).encode()
            return (b"" if shared is None else bytes(shared)) + bytes(own)

        return handle

    @staticmethod
    def until(true: Callable[[], object], seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end
            time.sleep(0.02)

    def cut(self, name: str) -> None:
        """As a network that breaks."""
        event_loop().call_soon_threadsafe(self.link.exchanges.streams[name].end, "cut by the test")

    def leave(self, name: str) -> None:
        node, thread = self.nodes.pop(name)
        node.stopping.set()
        thread.join(10)
        assert not thread.is_alive()

    def stop(self) -> None:
        self.pause.set()
        for name in list(self.nodes):
            self.leave(name)
        self.link.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    made.link.open()
    try:
        yield made
    finally:
        made.stop()


# ---- messages --------------------------------------------------------------------------------------------------------
def test_payloads_go_both_ways_and_every_byte_of_them_is_counted(served: Served) -> None:
    for name in ("alice", "bob"):
        served.join(name)
    shared = os.urandom(2 * w.CHUNK_BYTES + 5)
    found = served.link.send({"alice": b"1", "bob": b""}, "train", 3, 20, shared=shared)
    assert found.errors == {} and found.answers == {"alice": shared + b"1", "bob": shared}
    about = found.traffic["alice"]
    assert about.payload_down == about.payload_up == len(shared) + 1
    # down: request, three chunks of shared, one of own, permit; up: answer, three chunks. gRPC adds 5 bytes to each.
    assert 0 < about.total_down - about.payload_down - 6 * w.GRPC_PREFIX_BYTES < 200
    assert 0 < about.total_up - about.payload_up - 4 * w.GRPC_PREFIX_BYTES < 100
    assert served.link.send({"alice": b""}, "train", 4, 20).answers == {"alice": b""}
    assert served.link.send({"alice": b"x"}, "aligned", 4, 20, shared=b"y" * 100).answers == {"alice": b"[0, 0]"}


def test_reasons_come_back_and_who_is_not_there_is_not_waited_for(served: Served) -> None:
    served.join("alice")
    found = served.link.send({"alice": b"", "carol": b""}, "fail", 4, 20)
    assert found.answers == {}
    assert reasons(found) == {"alice": "alice: no data today", "carol": "carol is not connected"}
    found = served.link.send({"alice": bytes(5000)}, "echo", 5, 20, largest=4999)
    assert reasons(found) == {"alice": "alice: the payload of 5000 bytes is larger than the 4999 allowed"}
    served.nodes["alice"][0].largest = 10  # the node's own limit is read when it starts
    assert served.link.send({"alice": b"ok"}, "echo", 6, 20).answers == {"alice": b"ok"}


def test_a_download_over_the_limit_of_the_node_is_refused_there(served: Served) -> None:
    certs.add_node(served.certs.root, "small")
    node = Node(served.address, served.certs.ca, served.certs.key("small"), lambda k, r, s, own: b"", largest=1000)
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    served.nodes["small"] = node, thread
    served.until(lambda: "small" in served.link.nodes())
    found = served.link.send({"small": bytes(3 * w.CHUNK_BYTES)}, "train", 1, 20)
    assert reasons(found) == {
        "small": f"small: the payload of {3 * w.CHUNK_BYTES} bytes is larger than the 1000 allowed"
    }
    assert served.link.send({"small": b"1"}, "train", 1, 20).answers == {"small": b""}


# ---- connections that break ------------------------------------------------------------------------------------------
def test_a_node_cut_off_at_work_answers_once_over_its_next_connection(served: Served) -> None:
    served.join("alice")

    def breaks() -> None:
        served.until(lambda: ("alice", "slow") in served.calls)
        first = served.link.exchanges.streams["alice"]
        served.cut("alice")
        served.until(lambda: served.link.exchanges.streams.get("alice") not in (None, first))
        served.pause.set()

    threading.Thread(target=breaks, daemon=True).start()
    found = served.link.send({"alice": b"7"}, "slow", 1, 20, shared=bytes(1000))
    assert found.answers == {"alice": bytes(1000) + b"7"} and served.calls == [("alice", "slow")]
    assert found.traffic["alice"].total_down < 1500  # the question was not sent again


def test_a_node_that_died_at_work_and_comes_back_is_asked_again(served: Served) -> None:
    def stuck(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
        served.calls.append(("alice", "stuck"))
        served.pause.wait(20)
        raise CoterieError("too late")

    first = served.join("alice", stuck)

    def returns() -> None:
        served.until(lambda: ("alice", "stuck") in served.calls)
        # as after a crash: another process with the key, which knows nothing of the question
        elsewhere = served.certs.root / "again.key"
        elsewhere.write_bytes(served.certs.key("alice").read_bytes())
        elsewhere.with_suffix(".crt").write_bytes(served.certs.certificate("alice").read_bytes())
        first.stopping.set()
        node = Node(served.address, served.certs.ca, elsewhere, served._answer("alice"))
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        served.nodes["again"] = node, thread

    threading.Thread(target=returns, daemon=True).start()
    found = served.link.send({"alice": b"7"}, "train", 1, 20)
    assert found.answers == {"alice": b"7"} and ("alice", "train") in served.calls


def test_a_late_answer_is_not_taken_for_that_of_the_next_question(served: Served) -> None:
    served.join("alice")
    found = served.link.send({"alice": b"old"}, "slow", 1, 0.5)
    assert reasons(found) == {"alice": "alice did not answer within 0.5 s"}
    threading.Timer(0.2, served.pause.set).start()
    assert served.link.send({"alice": b"new"}, "train", 2, 20).answers == {"alice": b"new"}


def test_who_said_goodbye_or_vanished_is_given_up_after_a_while(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(exchange, "LOOK_SECONDS", 0.1)
    node = served.join("alice")
    threading.Timer(0.5, node.stopping.set).start()
    began = time.monotonic()
    found = served.link.send({"alice": b""}, "slow", 1, 60)
    assert reasons(found) == {"alice": "alice is not connected any more"} and time.monotonic() - began < 20
    served.pause.set()


def test_a_new_server_program_gets_the_nodes_of_the_one_before(served: Served) -> None:
    served.join("alice")
    served.link.close()
    served.link = GrpcServer(served.certs, "127.0.0.1", served.port)
    served.link.open()
    served.until(lambda: served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}


# ---- keys and certificates -------------------------------------------------------------------------------------------
def refused(served: Served, **changes: Any) -> str:
    given: dict[str, Any] = {"address": served.address, "ca": served.certs.ca, "patience": 0.0, **changes}
    with pytest.raises(CoterieError) as found:
        Node(handle=lambda kind, round, shared, own: own, **given).run()
    return str(found.value)


NOT_REGISTERED = "this certificate is not registered, or not valid any more"


def test_certificates_come_and_go(served: Served, tmp_path: Path) -> None:
    assert "cannot be read" in refused(served, key=tmp_path / "none.key")
    node = served.join("alice")
    with pytest.raises(CoterieError, match="a different process is already connected with the key"):
        Node(served.address, served.certs.ca, served.certs.key("alice"), lambda k, r, s, own: own).run()
    registered = served.certs.certificate("alice").read_bytes()
    (tmp_path / "alice.key").write_bytes(served.certs.key("alice").read_bytes())
    (tmp_path / "alice.crt").write_bytes(registered)
    served.certs.certificate("alice").unlink()
    served.until(lambda: not node.connected.is_set(), 5)  # nothing asks for the nodes meanwhile
    assert served.link.nodes() == []
    assert NOT_REGISTERED in refused(served, key=tmp_path / "alice.key")
    served.certs.certificate("alice").write_bytes(registered)  # the same certificate may come back
    served.until(lambda: served.link.nodes() == ["alice"])


def test_a_renewed_server_certificate_is_shown_without_a_restart(served: Served) -> None:
    served.join("alice")
    before = ssl.get_server_certificate(("127.0.0.1", served.port))
    certs.renew(served.certs.root, [])
    assert before != ssl.get_server_certificate(("127.0.0.1", served.port))
    served.cut("alice")
    served.until(lambda: served.nodes["alice"][0].connected.is_set() and served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}


def test_an_authority_is_changed_with_an_overlap(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node with the old files connects until the overlap is over, and afterwards once it has the new files."""
    certs.add_node(served.certs.root, "alice")
    trusted, key, own = tmp_path / "ca.crt", tmp_path / "alice.key", tmp_path / "alice.crt"
    for path, content in ((trusted, served.certs.ca), (key, served.certs.key("alice")),
                          (own, served.certs.certificate("alice"))):  # fmt: skip
        path.write_bytes(content.read_bytes())
    node = Node(served.address, trusted, key, lambda kind, round, shared, own: own)
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    served.until(lambda: served.link.nodes() == ["alice"])
    certs.renew_ca(served.certs.root, overlap=30)
    both, new = served.certs.ca.read_bytes(), served.certs.next_certificate("alice").read_bytes()
    served.cut("alice")
    served.until(lambda: node.connected.is_set() and served.link.nodes() == ["alice"])  # with the old files
    certs.switch_now(served.certs.root)
    served.until(lambda: any("not trusted" in r.getMessage() for r in caplog.records))
    assert thread.is_alive() and served.link.nodes() == []
    trusted.write_bytes(both)  # made with the new authority
    own.write_bytes(new)
    served.until(lambda: served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}
    assert sum("not trusted" in r.getMessage() for r in caplog.records) == 1
    node.stopping.set()
    thread.join(10)


def test_a_new_certificate_replaces_the_old_one_without_a_restart(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_LOOK_SECONDS", 0.1)
    certs.add_node(served.certs.root, "alice")
    key = tmp_path / "alice.key"
    for path, content in ((key, served.certs.key("alice")), (tmp_path / "alice.crt", served.certs.certificate("alice")),
                          (tmp_path / "old.key", served.certs.key("alice")),
                          (tmp_path / "old.crt", served.certs.certificate("alice"))):  # fmt: skip
        path.write_bytes(content.read_bytes())
    node = Node(served.address, served.certs.ca, key, served._answer("alice"))
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    served.until(lambda: served.link.nodes() == ["alice"])
    signed = nodes.rotate_key(served.certs.root, "alice", certs.make_request(tmp_path / "new.key", "alice"))
    issued = signed.read_bytes()
    served.cut("alice")
    served.until(lambda: node.connected.is_set() and served.link.nodes() == ["alice"])  # either is accepted

    def renew() -> None:
        served.until(lambda: ("alice", "slow") in served.calls)
        key.write_bytes((tmp_path / "new.key").read_bytes())
        (tmp_path / "alice.crt").write_bytes(issued)
        served.until(lambda: not signed.exists())
        served.pause.set()

    threading.Thread(target=renew, daemon=True).start()  # while the node works on a request
    assert served.link.send({"alice": b"1"}, "slow", 1, 30).answers == {"alice": b"1"}
    assert NOT_REGISTERED in refused(served, key=tmp_path / "old.key")
    assert served.calls == [("alice", "slow")]
    node.stopping.set()
    thread.join(10)


def test_an_exchange_that_waits_for_a_mute_node_delays_no_other(served: Served) -> None:
    for name in ("alice", "mute"):
        served.join(name)
    served.until(lambda: served.link.nodes() == ["alice", "mute"])
    asked = served.link.begin({"mute": b""}, "slow", 0, 60)
    assert asked.poll() == NodeReplies({}, {}, {}) and asked.waiting == {"mute"}
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}
    assert asked.waiting == {"mute"}
    served.pause.set()  # it answers after all
    served.until(lambda: asked.answers)
    assert list(asked.poll().answers) == ["mute"] and asked.waiting == set()
    late = served.link.begin({"nobody": b""}, "train", 0, 0.05)
    served.until(lambda: time.monotonic() > late.until)
    assert reasons(late.poll()) == {"nobody": "nobody did not answer within 0.05 s"} and late.waiting == set()


def test_a_certificate_nobody_would_trust_and_a_port_in_use_are_sentences(served: Served, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=f"port {served.port} on 127.0.0.1 cannot be used"):
        quick = GrpcServer(served.certs, "127.0.0.1", served.port)
        wait_for_port("127.0.0.1", served.port, 0.0)
        quick.open()
    mixed, other = certs.init(tmp_path / "mixed", []), certs.init(tmp_path / "another", [])
    mixed.ca.write_bytes(other.ca.read_bytes())
    with pytest.raises(CoterieError, match=r"server\.crt is not signed by .*ca\.crt"):
        GrpcServer(mixed, "127.0.0.1", processes.free_port()).open()
    mixed.server_key.write_bytes(other.server_key.read_bytes())
    with pytest.raises(CoterieError, match="does not match its key"):
        GrpcServer(mixed, "127.0.0.1", processes.free_port()).open()


# ---- clients that are not nodes of ours ------------------------------------------------------------------------------
class Raw:
    """A stream whose messages the test writes, with a registered certificate or a different one."""

    def __init__(self, served: Served, key: Path, certificate: Path | None = None, raw: bool = False):
        files = (served.certs.ca, key, certificate or key.with_suffix(".crt"))
        made = grpc.ssl_channel_credentials(*(path.read_bytes() for path in files))
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.secure_channel(served.address, made, options=options)
        method = "/coterie.federation.v1.FederationService/Connect"
        self.call = self.channel.stream_stream(method)() if raw else FederationServiceStub(self.channel).Connect()

    async def __aenter__(self) -> "Raw":
        return self

    async def __aexit__(self, *about: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def join(self) -> str:
        return await self.after(FromNode(join=Join(max_bytes=2**30)))

    async def after(self, message: Any) -> str:
        """Return the kind of the server's reply to a message, or the reason why it ended the stream."""
        try:
            await self.call.write(message)
            reply = await self.call.read()
            return "the end" if reply is grpc.aio.EOF else str(reply.WhichOneof("content"))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return str(await self.call.details())


JOIN = FromNode(join=Join(max_bytes=2**30)).SerializeToString()


@pytest.mark.parametrize(
    "content",
    [
        FromNode(chunk=b"123").SerializeToString(),
        FromNode(answer=Answer()).SerializeToString() + b"\xff",
        FromNode(join=Join()).SerializeToString(),
        b"",
        b"\x0a\x03\x0a\x01\xff",
        b"\xaa\x06\x00",
        os.urandom(1000),
    ],
    ids=["chunk", "truncated", "second join", "empty", "no UTF-8", "unknown field", "noise"],
)
def test_a_message_at_the_wrong_time_ends_the_stream_of_its_sender_alone(served: Served, content: bytes) -> None:
    certs.add_node(served.certs.root, "eve")
    served.join("alice")

    async def tried() -> str:
        async with Raw(served, served.certs.key("eve"), raw=True) as raw:
            await raw.call.write(JOIN)
            assert b"eve" in await raw.call.read()
            try:
                await raw.call.write(content)
                return str(await raw.call.read())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return str(await raw.call.details())

    assert run_on_loop(tried()) in (
        "it sent a message that is not part of Coterie's protocol",
        "it sent a message at the wrong time",
    )
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}


@pytest.mark.parametrize("size", [10, 2**40, 2**64 - 1])
def test_an_answer_longer_than_it_says_costs_its_sender_the_round(served: Served, size: int) -> None:
    certs.add_node(served.certs.root, "eve")

    async def lies() -> None:
        async with Raw(served, served.certs.key("eve")) as raw:
            assert await raw.join() == "welcome"
            ticket = (await raw.call.read()).request.ticket
            await raw.call.read()
            said = await raw.after(FromNode(answer=Answer(ticket=ticket, kind="train", round=1, size=size)))
            assert said == ("permit" if size == 10 else "reject")
            if size == 10:
                await raw.after(FromNode(chunk=bytes(11)))

    future = start_on_loop(lies())
    served.until(lambda: served.link.nodes() == ["eve"])
    found = served.link.send({"eve": b"1"}, "train", 1, 20, largest=1000)
    assert "longer than announced" in reasons(found)["eve"] or "larger than the 1000 allowed" in reasons(found)["eve"]
    future.result(20)


def test_an_error_of_a_node_is_one_printable_line_of_limited_length(served: Served) -> None:
    certs.add_node(served.certs.root, "eve")

    async def errs() -> None:
        async with Raw(served, served.certs.key("eve")) as raw:
            await raw.join()
            ticket = (await raw.call.read()).request.ticket
            error = Error(reason="no\n2026 INFO bob is client 7\x1b[2J" + "x" * 5000)
            assert await raw.after(FromNode(answer=Answer(ticket="guessed", error=error))) == "chunk"
            await raw.after(FromNode(answer=Answer(ticket=ticket, error=error)))

    future = start_on_loop(errs())
    served.until(lambda: served.link.nodes() == ["eve"])
    said = reasons(served.link.send({"eve": b"1"}, "train", 1, 20))["eve"]
    assert said.isprintable() and said.startswith("eve: no 2026") and len(said) < 2100
    future.result(20)


def test_messages_too_large_and_silent_nodes_are_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.add_node(served.certs.root, "eve")

    async def large() -> str:
        async with Raw(served, served.certs.key("eve")) as raw:
            return await raw.after(FromNode(chunk=bytes(w.MAX_MESSAGE_BYTES)))

    async def ended(raw: Raw) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await raw.call.read()
        return str(e.value.details())

    async def silent() -> str:
        async with Raw(served, served.certs.key("eve")) as raw:
            return await ended(raw)

    async def replaced() -> list[str]:
        async with Raw(served, served.certs.key("eve")) as one:
            assert await one.join() == "welcome"
            async with Raw(served, served.certs.key("eve")) as two:
                return [await two.join(), await ended(one)]

    async def waiting() -> set[str]:
        async with Raw(served, served.certs.key("eve")) as one, Raw(served, served.certs.key("eve")) as two:
            ends = [asyncio.create_task(ended(raw)) for raw in (one, two)]
            done, rest = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            return {task.result() for task in done}

    assert "larger than max" in run_on_loop(large())
    assert run_on_loop(replaced()) == ["welcome", "a newer connection of the same node has replaced this one"]
    assert run_on_loop(waiting()) == {"the node did not join in time"}  # the newer stream has taken its place
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    assert run_on_loop(silent()) == "the node did not join in time"
    served.join("alice")


# ---- certificates that a server must not accept ----------------------------------------------------------------------
def issue(served: Served, path: Path, name: str = "alice", **changes: Any) -> Path:
    """Make a key and a certificate of the server's authority, or of `by`, which is not registered; return the key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    by: Certs = changes.get("by", served.certs)
    ca = x509.load_pem_x509_certificates(by.ca.read_bytes())[0]
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n) for n in changes.get("names", [name])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=changes.get("begins", -1)))
        .not_valid_after(now + timedelta(days=changes.get("ends", 1)))
        .add_extension(x509.ExtendedKeyUsage([changes.get("usage", x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH)]), False)
    )
    if "sans" in changes:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, changes["sans"]))), False)
    certificate = builder.sign(certs.load_key(by.ca_key), SHA256())
    path.write_bytes(certs._pem(key))
    path.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def joins(served: Served, key: Path) -> str:
    async def tried() -> str:
        async with Raw(served, key) as raw:
            return await raw.join()

    return run_on_loop(tried())


def test_only_registered_certificates_of_the_authority_get_past_the_handshake(served: Served, tmp_path: Path) -> None:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    served.join("alice")
    foreign = certs.init(tmp_path / "foreign", [])
    at_the_handshake: dict[str, dict[str, Any]] = {
        "other authority": {"by": foreign},
        "expired": {"begins": -3, "ends": -1},
        "not yet valid": {"begins": 1, "ends": 3},
        "for servers": {"usage": ExtendedKeyUsageOID.SERVER_AUTH},
    }
    for case, changes in at_the_handshake.items():
        said = joins(served, issue(served, tmp_path / "x.key", **changes))
        assert "failed to connect" in said, (case, said)
    of_the_authority: dict[str, dict[str, Any]] = {
        "same name": {},
        "two names": {"names": ["alice", "eve"]},
        "two names, last": {"names": ["eve", "alice"]},
        "alternative name": {"names": ["eve"], "sans": ["alice"]},
        "path": {"names": ["../nodes/alice"]},
        "zero byte": {"names": ["alice\0eve"]},
        "no name": {"names": []},
    }
    for case, changes in of_the_authority.items():
        said = joins(served, issue(served, tmp_path / "x.key", **changes))
        assert said == NOT_REGISTERED or "failed to connect" in said, (case, said)
    assert served.link.nodes() == ["alice"]

    async def without() -> str:
        trusted = grpc.ssl_channel_credentials(served.certs.ca.read_bytes())
        async with grpc.aio.secure_channel(served.address, trusted) as channel:
            try:
                call = FederationServiceStub(channel).Connect()
                await call.write(FromNode(join=Join()))
                return str(await call.read())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return str(await call.details())

    assert "failed to connect" in run_on_loop(without())


def test_a_certificate_that_expires_while_connected_ends_the_stream(served: Served, tmp_path: Path) -> None:
    key = issue(served, tmp_path / "carol.key", "carol", ends=2.5 / 86_400)
    shutil.copy(key.with_suffix(".crt"), served.certs.certificate("carol"))

    async def held() -> str:
        async with Raw(served, key) as raw:
            assert await raw.join() == "welcome"
            try:
                return str(await raw.call.read())
            except grpc.aio.AioRpcError as e:
                return str(e.details())

    assert run_on_loop(held()) == NOT_REGISTERED


def test_a_node_says_why_its_certificate_is_refused(served: Served, tmp_path: Path) -> None:
    foreign = certs.init(tmp_path / "foreign", [])
    certs.add_node(foreign.root, "alice")
    assert "does not accept this node's certificate" in refused(served, key=foreign.key("alice"))
    late = issue(served, tmp_path / "late.key", "late", begins=-3, ends=-1)
    assert "not now; ask the operator for a new one" in refused(served, key=late)
    shutil.copy(foreign.certificate("alice"), tmp_path / "late.crt")
    assert "does not match the key" in refused(served, key=late)


def http2_reply(served: Served, newest: ssl.TLSVersion, key: Path | None) -> bytes:
    """Open a stream over TLS of at most this version and return the server's reply; empty if it gives none."""
    context = ssl.create_default_context(cafile=str(served.certs.ca))
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    if key is not None:
        context.load_cert_chain(key.with_suffix(".crt"), key)
    fields = {":method": "POST", ":scheme": "https", ":path": "/coterie.federation.v1.FederationService/Connect",
              ":authority": "x", "te": "trailers", "content-type": "application/grpc"}  # fmt: skip
    block = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    join = b"\0" + len(JOIN).to_bytes(4, "big") + JOIN

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content

    reply = b""
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", served.port), 10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        tls.settimeout(0.7)
        tls.sendall(hello + frame(1, 4, 1, block) + frame(0, 0, 1, join))
        while part := tls.recv(10_000):
            reply += part
    return reply


def test_streams_use_tls_1_3_with_a_certificate_and_plain_text_gets_no_answer(served: Served) -> None:
    certs.add_node(served.certs.root, "eve")
    key = served.certs.key("eve")
    for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        assert http2_reply(served, newest, None) == b""  # no further than the handshake
    assert b"TLS 1.3 is needed" in http2_reply(served, ssl.TLSVersion.TLSv1_2, key)
    reply = http2_reply(served, ssl.TLSVersion.TLSv1_3, key)
    assert b"eve" in reply and b"is needed" not in reply
    with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in raw.recv(1000)


@pytest.mark.parametrize(("secure", "reason"), [(False, "does not speak TLS"), (True, "does not speak gRPC")])
def test_a_port_of_another_service_is_an_error_and_not_tried_again(
    served: Served, tmp_path: Path, secure: bool, reason: str
) -> None:
    certs.add_node(served.certs.root, "alice")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served.certs.server, served.certs.server_key)
    context.set_alpn_protocols(["http/1.1"])

    def answer(service: socket.socket) -> None:
        for _ in range(10):
            with contextlib.suppress(OSError):
                peer = service.accept()[0]
                with context.wrap_socket(peer, server_side=True) if secure else peer as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as service:
        threading.Thread(target=answer, args=(service,), daemon=True).start()
        address = f"127.0.0.1:{service.getsockname()[1]}"
        said = refused(served, address=address, key=served.certs.key("alice"), patience=30.0)
    assert said == f"{address} {reason}; is it the port of a Coterie cloud or edge?"


# ---- real processes --------------------------------------------------------------------------------------------------
NODE = """
import sys, time
from pathlib import Path
from coterie.federation.localhost.processes import die_with_parent
from coterie.federation.transport.node import Node
die_with_parent()
def handle(kind, round, shared, own):
    if kind == "slow":
        time.sleep(float(bytes(own)))
    return own if shared is None else shared
Node(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), handle).stop_on_signals().run()
"""
SERVER = """
import sys, time
from pathlib import Path
from coterie.federation.identity.authority import Certs
from coterie.federation.localhost.processes import die_with_parent
from coterie.federation.transport.server import GrpcServer
die_with_parent()
with GrpcServer(Certs(Path(sys.argv[1])), "127.0.0.1", int(sys.argv[2])) as link:
    while not link.nodes():
        time.sleep(0.05)
    print("asking", flush=True)
    print(link.send({"alice": b"7"}, "slow", 1, 120).errors, flush=True)
"""


def node_process(served: Served, name: str, tmp_path: Path) -> Child:
    if name not in served.certs.nodes():
        certs.add_node(served.certs.root, name)
    argv = [sys.executable, "-c", NODE, served.address, str(served.certs.ca), str(served.certs.key(name))]
    child = Child(name, argv, tmp_path / f"{name}.log", processes.bound(os.environ)).start()
    served.until(lambda: name in served.link.nodes(), 60)
    return child


def resident(pid: int, peak: bool = False) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM" if peak else "VmRSS")) * 1024


@pytest.mark.long
def test_a_stopped_node_is_taken_for_gone_and_a_killed_one_is_asked_again(served: Served, tmp_path: Path) -> None:
    child = node_process(served, "alice", tmp_path)
    child.signal(signal.SIGSTOP)
    served.until(lambda: served.link.nodes() == [], 4 * w.KEEPALIVE_SECONDS)
    child.signal(signal.SIGCONT)
    served.until(lambda: served.link.nodes() == ["alice"], 30)

    def crash() -> None:
        time.sleep(1.0)
        child.kill()
        child.start()

    threading.Thread(target=crash, daemon=True).start()
    began = time.monotonic()
    assert served.link.send({"alice": b"3"}, "slow", 1, 60).answers == {"alice": b"3"}
    assert time.monotonic() - began > 4  # it began again
    child.stop()
    assert child.process is not None and child.process.returncode == 0


@pytest.mark.long
def test_a_server_that_was_stopped_for_a_while_gets_the_answer(tmp_path: Path) -> None:
    made, port = certs.init(tmp_path / "certs", []), processes.free_port()
    certs.add_node(made.root, "alice")
    at_work = threading.Event()

    def handle(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
        at_work.set()
        time.sleep(3)
        return b"done"

    node = Node(f"127.0.0.1:{port}", made.ca, made.key("alice"), handle)
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    argv = [sys.executable, "-c", SERVER, str(made.root), str(port)]
    server = Child("server", argv, tmp_path / "server.log", processes.bound(os.environ)).start()
    assert at_work.wait(30)
    server.signal(signal.SIGSTOP)
    Served.until(lambda: not node.connected.is_set(), 4 * w.KEEPALIVE_SECONDS)
    server.signal(signal.SIGCONT)
    assert server.wait(60) == 0 and server.tail().endswith("{}"), server.tail()
    node.stopping.set()
    thread.join(10)


@pytest.mark.long
def test_half_a_gigabyte_goes_both_ways_in_little_more_memory_than_it_has(served: Served, tmp_path: Path) -> None:
    child = node_process(served, "alice", tmp_path)
    data = bytes(1000) * 500_000
    pids = {"server": os.getpid(), "node": child.pid}
    for pid in pids.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget earlier peaks
    before = {name: resident(pid, peak=True) for name, pid in pids.items()}
    found = served.link.send({"alice": b""}, "echo", 1, 600, shared=data)
    grown = {name: (resident(pid, peak=True) - before[name]) / len(data) for name, pid in pids.items()}
    child.stop()
    assert found.errors == {} and found.answers["alice"] == data
    assert max(grown.values()) < 1.3, grown
    assert found.traffic["alice"].total_up < 1.001 * len(data)


@pytest.mark.long
def test_a_crowd_of_strangers_costs_little_memory_and_keeps_no_node_out(served: Served, tmp_path: Path) -> None:
    child = node_process(served, "alice", tmp_path)
    before = resident(os.getpid())
    context = ssl.create_default_context(cafile=str(served.certs.ca))
    context.set_alpn_protocols(["h2"])
    crowd: list[Any] = []
    for i in range(400):  # connected, half of them with TLS, and silent
        crowd.append(socket.create_connection(("127.0.0.1", served.port), 30))
        if i % 2:
            crowd[-1] = context.wrap_socket(crowd[-1], server_hostname="127.0.0.1")

    found = served.link.send({"alice": b"0"}, "slow", 1, 60)
    assert found.errors == {}
    late = node_process(served, "bob", tmp_path)
    assert resident(os.getpid()) - before < 150 * 2**20  # both ends of the crowd are in this process
    for one in crowd:
        one.close()
    for process in (child, late):
        process.stop()


@pytest.mark.long
def test_a_node_that_reconnects_in_a_loop_while_it_is_asked_is_noted_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Its streams break while the question is being sent, in whatever way; the log does not grow with them."""
    served.join("alice")
    certs.add_node(served.certs.root, "mallory")
    served.link.nodes()
    caplog.set_level("INFO")
    exchange = served.link.begin({"mallory": bytes(2**22)}, "echo", 1, 60)

    async def come_and_go() -> None:
        for _ in range(150):
            async with Raw(served, served.certs.key("mallory")) as raw:
                assert await raw.join() == "welcome"

    run_on_loop(come_and_go())
    assert served.link.send({"alice": b"0"}, "echo", 1, 60).errors == {}
    exchange.poll()
    assert [r.message for r in caplog.records if "has reconnected" in r.message] == [
        "mallory has reconnected; its request is sent again"
    ]
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")], caplog.text
