"""The gRPC transport: what it promises to a cloud and its nodes, and what it refuses from strangers."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from coterie.federation.transport import NodeReplies, authentication, exchange
from coterie.federation.transport import frames as w
from coterie.federation.transport.event_loop import event_loop, run_on_loop, start_on_loop
from coterie.federation.transport.frames import frame_fields, grpc, make_frame
from coterie.federation.transport.node import Node
from coterie.federation.transport.proof import server_certificate, sign_challenge
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
    # down: Q, three pieces of shared, one of own, G; up: A, three pieces. gRPC adds 5 bytes to each, we a letter.
    assert 0 < about.total_down - about.payload_down - 6 * w.GRPC_PREFIX_BYTES - 4 < 400
    assert 0 < about.total_up - about.payload_up - 4 * w.GRPC_PREFIX_BYTES - 3 < 200
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


def test_strangers_are_refused_and_keys_come_and_go(served: Served, tmp_path: Path) -> None:
    eve = certs.new_key(tmp_path / "eve.key")
    assert "this key is not registered" in refused(served, key=eve)
    assert "cannot be read" in refused(served, key=tmp_path / "none.key")
    node = served.join("alice")
    with pytest.raises(CoterieError, match="a different process is already connected with the key"):
        Node(served.address, served.certs.ca, served.certs.key("alice"), lambda k, r, s, own: own).run()
    public = served.certs.public("alice").read_bytes()
    served.certs.public("alice").unlink()
    served.until(lambda: served.link.nodes() == [] and not node.connected.is_set())
    served.certs.public("alice").write_bytes(public)  # the same key may come back
    served.until(lambda: served.link.nodes() == ["alice"])


def test_a_renewed_certificate_is_shown_without_a_restart(served: Served) -> None:
    served.join("alice")
    before = run_on_loop(server_certificate(served.address, served.certs.ca))
    certs.renew(served.certs.root, [])
    after = run_on_loop(server_certificate(served.address, served.certs.ca))
    assert before != after
    served.cut("alice")
    served.until(lambda: served.nodes["alice"][0].connected.is_set() and served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}


def test_a_node_that_does_not_trust_the_server_keeps_trying_and_reads_its_authority_anew(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The authority is changed with an overlap: a node with the old file connects until it is over, not after."""
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(served.certs.ca.read_bytes())
    certs.add_node(served.certs.root, "alice")
    node = Node(served.address, trusted, served.certs.key("alice"), lambda kind, round, shared, own: own)
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    served.until(lambda: served.link.nodes() == ["alice"])
    certs.renew_ca(served.certs.root, overlap=30)
    both = served.certs.ca.read_bytes()
    served.cut("alice")
    served.until(lambda: node.connected.is_set() and served.link.nodes() == ["alice"])  # with the old file
    certs.switch_now(served.certs.root)
    served.cut("alice")
    served.until(lambda: any("not trusted" in r.getMessage() for r in caplog.records))
    assert thread.is_alive() and served.link.nodes() == []
    trusted.write_bytes(both)  # what was made with the new authority
    served.until(lambda: served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}
    assert sum("not trusted" in r.getMessage() for r in caplog.records) == 1
    node.stopping.set()
    thread.join(10)


def test_a_new_key_takes_the_place_of_the_old_when_it_is_seen(served: Served, tmp_path: Path) -> None:
    old = served.join("alice")
    nodes.rotate_key(served.certs.root, "alice", certs.new_key(tmp_path / "new.key").with_suffix(".pub"))
    served.cut("alice")
    served.until(lambda: old.connected.is_set() and served.link.nodes() == ["alice"])  # either is accepted
    served.leave("alice")
    shutil.copy(served.certs.key("alice"), tmp_path / "old.key")
    node = Node(served.address, served.certs.ca, tmp_path / "new.key", lambda kind, round, shared, own: b"new")
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    served.until(lambda: served.link.nodes() == ["alice"])
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"new"}
    assert "this key is not registered" in refused(served, key=tmp_path / "old.key")
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


# ---- who speaks the protocol without a node of ours ------------------------------------------------------------------
class Raw:
    """A stream whose frames the test writes."""

    def __init__(self, address: str, certs: Certs):
        self.address, self.certs = address, certs

    async def __aenter__(self) -> "Raw":
        self.der = await server_certificate(self.address, self.certs.ca)
        trusted = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(self.der).encode())
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.secure_channel(self.address, trusted, options=options)
        self.call = self.channel.stream_stream(f"/{w.RPC_SERVICE}/{w.RPC_METHOD}")()
        return self

    async def __aexit__(self, *about: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def challenge(self) -> dict[str, Any]:
        return frame_fields(await self.call.read())

    def proof(self, challenge: dict[str, Any], name: str, der: bytes | None = None) -> bytes:
        digest = hashlib.sha256(self.der if der is None else der).digest()
        nonce, session = (bytes.fromhex(challenge[k]) for k in ("nonce", "session"))
        pem, made = sign_challenge(certs.load_key(self.certs.key(name)), nonce, session, digest)
        return make_frame(b"P", key=pem.decode(), certificate=digest.hex(), signature=made.hex(), ticket="")

    async def after(self, frame: bytes) -> str:
        """What the server says to a frame: the letter of its own, or why it ended the stream."""
        try:
            await self.call.write(frame)
            found = await self.call.read()
            return "the end" if found is grpc.aio.EOF else found[:1].decode()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return str(await self.call.details())


def test_a_proof_is_worth_nothing_on_another_stream_or_for_another_server(served: Served, tmp_path: Path) -> None:
    certs.add_node(served.certs.root, "alice")
    served.link.nodes()
    other = ssl.PEM_cert_to_DER_cert(certs.init(tmp_path / "other", []).server.read_text())

    async def tried() -> list[str]:
        async with Raw(served.address, served.certs) as one, Raw(served.address, served.certs) as two:
            mine = one.proof(await one.challenge(), "alice")
            await two.challenge()
            return [await two.after(mine), await one.after(mine)]

    async def elsewhere() -> str:
        async with Raw(served.address, served.certs) as raw:
            return await raw.after(raw.proof(await raw.challenge(), "alice", der=other))

    assert run_on_loop(tried()) == ["the signature does not match the key", "W"]
    assert run_on_loop(elsewhere()) == "the proof is for a different server"


@pytest.mark.parametrize(
    "frames",
    [[b"D123"], [b"A{}"], [b"A" + b"[" * 9000], [make_frame(b"A", ticket=5)], [b""], [b"X" * (w.MAX_HEAD_BYTES + 1)]],
    ids=["data", "empty", "nested", "number", "nothing", "long"],
)
def test_frames_that_are_none_end_the_stream_of_their_sender_alone(served: Served, frames: list[bytes]) -> None:
    certs.add_node(served.certs.root, "eve")
    served.join("alice")

    async def tried() -> str:
        async with Raw(served.address, served.certs) as raw:
            assert await raw.after(raw.proof(await raw.challenge(), "eve")) == "W"
            return await raw.after(frames[0])

    said = run_on_loop(tried())
    assert said not in ("W", "G", "N", "the end") and said
    assert served.link.send({"alice": b"1"}, "train", 1, 20).answers == {"alice": b"1"}


@pytest.mark.parametrize("more", [1, -1], ids=["longer", "larger"])
def test_an_answer_longer_than_it_says_costs_its_sender_the_round(served: Served, more: int) -> None:
    certs.add_node(served.certs.root, "eve")
    served.link.nodes()

    async def lies() -> None:
        async with Raw(served.address, served.certs) as raw:
            await raw.after(raw.proof(await raw.challenge(), "eve"))
            asked = frame_fields(await raw.call.read())
            await raw.call.read()
            about = {"kind": asked["kind"], "round": asked["round"], "ticket": asked["ticket"]}
            size = 10 if more > 0 else 2**40
            assert await raw.after(make_frame(b"A", **about, size=size)) == ("G" if more > 0 else "N")
            if more > 0:
                await raw.after(b"D" + bytes(11))

    future = start_on_loop(lies())
    served.until(lambda: served.link.nodes() == ["eve"])
    found = served.link.send({"eve": b"1"}, "train", 1, 20, largest=1000)
    assert "longer than announced" in reasons(found)["eve"] or "larger than the 1000 allowed" in reasons(found)["eve"]
    future.result(20)


def test_frames_too_large_and_too_many_or_silent_strangers_are_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "MAX_UNAUTHENTICATED", 1)

    async def large() -> str:
        async with Raw(served.address, served.certs) as raw:
            await raw.challenge()
            return await raw.after(b"P" + bytes(w.CHUNK_BYTES + 1))

    async def ended(raw: Raw) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await raw.call.read()
        return str(e.value.details())

    async def silent(seconds: float, *more: Raw) -> str:
        monkeypatch.setattr(authentication, "HANDSHAKE_SECONDS", seconds)
        async with Raw(served.address, served.certs) as one:
            await one.challenge()
            for other in more:
                async with other:
                    await other.challenge()
            return await ended(one)

    assert "larger than max" in run_on_loop(large())
    assert run_on_loop(silent(0.5)) == "the node did not prove its identity in time"
    began = time.monotonic()
    assert (
        run_on_loop(silent(1000.0, Raw(served.address, served.certs))) == "the node did not prove its identity in time"
    )
    assert time.monotonic() - began < 100  # it gave its place to the other
    served.join("alice")


TLS_1_2 = """
import socket, ssl, sys
from pathlib import Path
from coterie.federation.identity.authority import Certs
from coterie.federation.transport.server import GrpcServer
root, port = Path(sys.argv[1]), int(sys.argv[2])
with GrpcServer(Certs(root), "127.0.0.1", port):
    for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=str(root / "ca.crt"))
        context.maximum_version = newest
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            try:
                print(context.wrap_socket(raw, server_hostname="127.0.0.1").version())
            except OSError as e:
                print("refused")
"""


def test_tls_is_1_3_and_plain_text_gets_no_answer(served: Served, tmp_path: Path) -> None:
    made = certs.init(tmp_path / "more", [])  # in a process that has not loaded gRPC before
    command = [sys.executable, "-c", TLS_1_2, str(made.root), str(processes.free_port())]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split() == ["refused", "TLSv1.3"]

    class Old:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"ssl_tls_version": [b"TLSv1.2"]}

    with pytest.raises(CoterieError, match=r"TLS 1\.3 is needed"):
        run_on_loop(served.link.authentication.challenge(Old()))
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
    served.until(lambda: served.link.nodes() == [], 2 * w.MAX_SILENCE_SECONDS)
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
    Served.until(lambda: not node.connected.is_set(), 2 * w.MAX_SILENCE_SECONDS)
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

    async def streams() -> list[Raw]:
        found = []
        for _ in range(100):  # streams that send what they may and no proof
            raw = await Raw(served.address, served.certs).__aenter__()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await raw.call.write(b"P" + bytes(w.CHUNK_BYTES - 1))
            found.append(raw)
        return found

    held = run_on_loop(streams())
    found = served.link.send({"alice": b"0"}, "slow", 1, 60)
    assert found.errors == {}
    late = node_process(served, "bob", tmp_path)
    assert resident(os.getpid()) - before < 150 * 2**20  # both ends of the crowd are in this process

    async def over() -> None:
        for raw in held:
            await raw.__aexit__()

    run_on_loop(over())
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
            async with Raw(served.address, served.certs) as raw:
                assert await raw.after(raw.proof(await raw.challenge(), "mallory")) == "W"

    run_on_loop(come_and_go())
    assert served.link.send({"alice": b"0"}, "echo", 1, 60).errors == {}
    exchange.poll()
    assert [r.message for r in caplog.records if "has reconnected" in r.message] == [
        "mallory has reconnected; its request is sent again"
    ]
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")], caplog.text
