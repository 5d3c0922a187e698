"""The wire between cloud and devices: its format, and real processes on 127.0.0.1."""

import ast
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from wireless import reasons

pytest.importorskip("flwr", reason="a federation needs the extra flower")

from coterie.errors import CoterieError
from coterie.runtimes.flower import certs, processes
from coterie.runtimes.flower.processes import Child
from coterie.runtimes.flower.transport import Node, flower_env, limits, wire
from coterie.runtimes.flower.transport import flower_api as fl
from coterie.runtimes.flower.transport.guard import Guard
from coterie.runtimes.flower.transport.http import HEADER, call
from coterie.runtimes.flower.transport.limits import LARGEST_OF_OURS, LARGEST_REQUEST
from coterie.runtimes.flower.transport.link import FlowerLink
from coterie.runtimes.flower.transport.node import FlowerNode
from coterie.runtimes.flower.transport.superlink import start

SOURCE = Path(wire.__file__).parents[3]
TRANSPORT = Path(wire.__file__).parent


# ---- what is Flower's ----------------------------------------------------------------------------------------------
def imports(path: Path, package: str) -> set[str]:
    """Dotted names that a file imports from a package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {name for name in found if f"{name}.".startswith(f"{package}.")}


def test_only_the_transport_knows_flower() -> None:
    knowing = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if imports(path, "flwr")}
    assert knowing == {(TRANSPORT / name).relative_to(SOURCE) for name in ("flower_api.py", "guard.py")}


def test_others_use_of_the_transport_what_it_offers() -> None:
    from coterie.runtimes.flower import transport

    offered = {f"{transport.__name__}.{name}" for name in transport.__all__}
    for path in SOURCE.rglob("*.py"):
        if TRANSPORT not in path.parents:
            assert imports(path, transport.__name__) <= offered, path


USED = {  # an upgrade of Flower begins with reading what has become of these
    "flwr.app": "Array ArrayRecord ConfigRecord Error Message MessageType Metadata RecordDict",
    "flwr.app.message": "make_message remove_content_from_message",
    "flwr.common.constant": "ErrorCode SUPERLINK_NODE_ID SubStatus",
    "flwr.common.serde": "message_from_proto message_to_proto",
    "flwr.proto": "control_pb2 fleet_pb2 message_pb2 runtime_pb2",
    "flwr.proto.fab_pb2": "Fab",
    "flwr.proto.heartbeat_pb2": "SendNodeHeartbeatRequest",
    "flwr.proto.node_pb2": "Node",
    "flwr.server.superlink.linkstate": "SqlLinkState",
    "flwr.supercore": "sql_mixin",
    "flwr.supercore.constant": "TASK_TOKEN_HEADER TaskType",
    "flwr.supercore.control": "ControlHttpClient",
    "flwr.supercore.inflatable.inflatable_object": (
        "get_all_nested_objects get_object_body get_object_head_values_from_object_content get_object_tree "
        "no_object_id_recompute"
    ),
    "flwr.supercore.inflatable.inflatable_utils": "inflatable_class_registry",
    "flwr.supercore.interceptors": "RuntimeVersionHttpInterceptor",
    "flwr.supercore.primitives.asymmetric": "bytes_to_public_key public_key_to_bytes verify_signature",
    "flwr.supercore.runtime": "RuntimeHttpClient",
    "flwr.superlink": "extensions",
    "flwr.superlink.cli": "flower_superlink",
    "flwr.supernode.fleet_http_client": "FleetHttpClient",
    "flwr.supernode.node_auth_http_interceptor": "NodeAuthHttpInterceptor",
}


def test_these_names_of_flower_are_used_and_no_others() -> None:
    found = imports(TRANSPORT / "flower_api.py", "flwr") | imports(TRANSPORT / "guard.py", "flwr")
    assert found == {f"{module}.{name}" for module, names in USED.items() for name in names.split()}


# ---- format ------------------------------------------------------------------------------------------------------
def test_a_reply_of_another_round_or_ticket_is_refused() -> None:
    asked = wire.Head("train", 5, "secret")
    wire.Head("train", 5, "secret", wire=10).refuse_unless(asked)
    with pytest.raises(CoterieError, match="round 4, asked was round 5"):
        wire.Head("train", 4, "secret").refuse_unless(asked)
    with pytest.raises(CoterieError, match="replay"):
        wire.Head("train", 5, "another").refuse_unless(asked)


def signed_by(who: str, signature: str, seconds_ago: float = 0.0) -> dict[str, str]:
    """Headers of a request as Flower signs them."""
    at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    coded = {"flwr_public_key": who, "flwr_signature": signature}
    return {**{k: b64encode(v.encode()).decode() for k, v in coded.items()}, "flwr_timestamp": at}


def asked(guard: Guard, path: str, length: int, who: str = "", **headers: str) -> tuple[int, int]:
    """Status of a request through the guard, and how many parts of its body were read."""
    given = {**headers, **(signed_by(who, "right") if who else {}), "content_length": str(length)}
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()]
    found, reads = [], [0]

    async def receive() -> dict[str, Any]:
        reads[0] += 1
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Any) -> None:
        found.append(event.get("status"))

    asyncio.run(guard({"type": "http", "path": path, "headers": pairs}, receive, send))
    return found[0], reads[0]


def test_no_byte_of_a_strangers_body_is_read_and_a_nodes_requests_are_bounded() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append(guard.budget.bodies)
        await send({"type": "http.response.start", "status": 200})

    guard = Guard(app, "k" * 32, {b"alice", b"bob"}, lambda key, text, signature: signature == b"right")
    push, key = "/v1/fleet/push-object", {HEADER.replace("-", "_"): "k" * 32}
    assert asked(guard, push, 1000) == (401, 0) and asked(guard, push, 1000, "eve") == (401, 0)
    assert asked(guard, push, 1000, "alice") == (200, 1)
    assert seen == [1000] and guard.budget.bodies == 0 and not guard.budget.requests
    guard.budget.requests[b"alice"] = limits.REQUESTS
    assert asked(guard, push, 1000, "alice") == (503, 0) and asked(guard, push, 1000, "bob") == (200, 1)
    guard.budget.requests.clear()
    guard.budget.bodies = limits.BODIES
    assert asked(guard, push, 1000, "alice") == (503, 0)
    guard.budget.bodies = 0

    # a hello of 1 GB: the cloud has said how large an answer may be, and every push counts
    tells = {"x_coterie_largest_answer": "65536", **key}
    assert asked(guard, "/v1/runtime/push-messages", 10, **tells) == (200, 1)
    pushed = 0
    while asked(guard, push, 5_000_000, "alice") == (200, 1):
        pushed += 5_000_000
    assert pushed < 2 * 65536 + LARGEST_REQUEST and asked(guard, push, 5_000_000, "bob") == (200, 1)
    assert asked(guard, push, 5_000_000, "alice") == (413, 0)
    assert asked(guard, "/v1/runtime/pull-messages", 10, **tells) == (200, 1)
    assert asked(guard, push, 5_000_000, "alice") == (413, 0)  # only a question allows an answer
    assert asked(guard, "/v1/runtime/push-messages", 10, **tells) == (200, 1)
    assert asked(guard, push, 5_000_000, "alice") == (200, 1)


def test_a_body_that_arrives_too_slowly_ends() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def read() -> list[str]:
        part = limits.in_time(receive, 0)
        found = [(await part())["type"]]
        limits_over = limits.time.monotonic() + 1000
        with pytest.MonkeyPatch.context() as m:
            m.setattr(limits.time, "monotonic", lambda: limits_over)
            found.append((await part())["type"])
        return found

    assert asyncio.run(read()) == ["http.request", "http.disconnect"]


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        cycle = None

        def connection_made(self, transport: Any) -> None: ...

        def connection_lost(self, exc: Exception | None) -> None: ...

    class Pipe:
        aborted = False

        def __init__(self, address: str):
            self.address = address

        def get_extra_info(self, name: str) -> Any:
            return self.address, 1

        def abort(self) -> None:
            self.aborted = True

    monkeypatch.setattr(limits, "PER_ADDRESS", 2)
    monkeypatch.setattr(limits, "CONNECTIONS", 3)
    monkeypatch.setattr(limits, "FIRST_REQUEST", 0.02)

    async def connect() -> None:
        kind = limits.bounded(Plain)
        pipes = [Pipe(a) for a in ("a", "a", "a", "b", "c")]
        made = [kind() for _ in pipes]
        for one, pipe in zip(made, pipes, strict=True):
            one.connection_made(pipe)
            if pipe.aborted:
                one.connection_lost(None)
        assert [p.aborted for p in pipes] == [False, False, True, False, True]
        made[0].cycle = object()  # it has sent a request
        await asyncio.sleep(0.05)
        assert [p.aborted for p in pipes] == [False, True, True, True, True]

    asyncio.run(connect())


def test_only_the_fleet_is_open_without_the_control_key() -> None:
    guard = Guard(None, "k" * 32, {b"alice"}, lambda key, text, signature: signature == b"right")

    def status(path: str, **headers: str) -> int | None:
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return guard.refuse({"type": "http", "path": path, "headers": pairs})

    key = {HEADER.replace("-", "_"): "k" * 32}
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/"):
        assert status(path) == 403
        assert status(path, **{**key, HEADER.replace("-", "_"): "wrong"}) == 403
        assert status(path, **key) is None
    assert status("/v1/fleet/pull-messages") == 401
    for who, signature, seconds in (("eve", "right", 0), ("alice", "wrong", 0), ("alice", "right", 310)):
        assert status("/v1/fleet/pull-messages", **signed_by(who, signature, seconds)) == 401
    alice = signed_by("alice", "right")
    assert status("/v1/fleet/pull-messages", **alice) is None
    assert status("/v1/fleet/push-object", content_length=str(LARGEST_REQUEST + 1), **alice) == 413
    assert status("/health") is None and status("/health", content_length="1") == 413
    assert status("/v1/runtime/push-messages", content_length=str(LARGEST_OF_OURS), **key) is None
    assert status("/v1/runtime/push-messages", content_length=str(LARGEST_OF_OURS + 1), **key) == 413
    assert status("/v1/fleet/push-object", transfer_encoding="chunked") == 411
    assert guard.refuse({"type": "websocket", "path": "/v1/fleet/x"}) == 403


class ObjectStore:
    """An object store in memory, as push and pull see a SuperLink."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.trees: list[Any] = []
        self.asked: list[str] = []

    def announce(self, protos: list[Any], trees: list[Any]) -> tuple[list[str], str]:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.trees = trees
        return [t.object_id for tree in trees for t in iterate_object_tree(tree)], "session"

    def put(self, session: str, key: str, raw: bytes) -> bool:
        self.objects[key] = raw
        return True

    def get(self, key: str) -> bytes | None:
        self.asked.append(key)
        return self.objects.get(key)

    def send(self, *bodies: dict[str, Any]) -> None:
        head = wire.Head("train", 1, "t")
        wire.push([wire.question(head, b, 1, 60.0, run=1, task=1) for b in bodies], self.announce, self.put)


def test_what_clients_share_is_stored_once() -> None:
    store, data = ObjectStore(), os.urandom(16_000_000)  # four chunks
    shared = wire.part(data)
    store.send({"shared": shared, "own": wire.part(b"1")}, {"shared": shared, "own": wire.part(b"22")})
    assert sum(map(len, store.objects.values())) < 17_000_000
    for tree, own in zip(store.trees, (b"1", b"22"), strict=True):
        head, parts = wire.opened(wire.pull(tree, store.get, 2**30).content)
        assert head == wire.Head("train", 1, "t")
        assert parts == {"own": own, "shared": data}


@pytest.mark.parametrize("size", [1, wire.SMALL, wire.SMALL + 1])
def test_a_payload_arrives_in_memory_that_tensors_may_look_into(size: int) -> None:
    import numpy as np

    store = ObjectStore()
    store.send({"own": wire.part(bytearray(size))})
    own = wire.opened(wire.pull(store.trees[0], store.get, 2**30).content)[1]["own"]
    assert len(own) == size and not own.readonly
    assert np.frombuffer(own, np.uint8).ctypes.data % 64 == 0


def test_sending_a_large_payload_copies_nothing() -> None:
    data = bytearray(wire.SMALL + 1)
    made = wire.part(data)
    data[-1] = 7
    assert made.data[-1] == 7


def test_a_payload_that_is_too_large_is_refused_before_it_is_fetched() -> None:
    store = ObjectStore()
    store.send({"own": wire.part(bytes(16_000_000))})
    with pytest.raises(CoterieError, match="larger than the 1600000 allowed"):
        wire.pull(store.trees[0], store.get, 1_600_000)
    assert max(len(store.objects[k]) for k in store.asked) < 10_000


def test_small_payloads_count_against_the_limit_too() -> None:
    store = ObjectStore()
    store.send({"own": wire.part(bytes(wire.SMALL))})
    with pytest.raises(CoterieError, match="larger than the 100000 bytes allowed"):
        wire.pull(store.trees[0], store.get, 100_000)


def test_a_payload_longer_than_it_says_is_refused() -> None:
    store = ObjectStore()
    liar = wire.part(bytes(16_000_000))
    liar.shape = (10_000_000,)
    store.send({"own": liar})
    with pytest.raises(CoterieError, match="longer than it says"):
        wire.pull(store.trees[0], store.get, 10_001_000)
    liar.shape = (1000,)
    store.send({"own": liar})
    with pytest.raises(CoterieError, match="too many parts"):
        wire.pull(store.trees[0], store.get, 10_001_000)


@pytest.mark.parametrize("body", [{}, {"shared": b"x"}, {"own": b"x", "more": b"y"}])
def test_a_message_with_other_parts_is_refused(body: dict[str, bytes]) -> None:
    with pytest.raises(CoterieError, match="no payload, or one that is not Coterie's"):
        wire.opened(wire.content(wire.Head("train", 1, "t"), body))


# ---- real processes ----------------------------------------------------------------------------------------------
PROGRAM = """
import json, logging, os, sys, time
from pathlib import Path
from coterie.runtimes.flower.processes import die_with_parent
from coterie.runtimes.flower.transport import Node
name, address, ca, key, pause = sys.argv[1:]
calls = 0
def handle(kind, round, shared, own):
    global calls
    calls += 1
    if kind == "fail":
        raise ValueError("no data today")
    if kind == "slow":
        time.sleep(float(pause))
    if kind == "echo":
        return shared if shared is not None else own
    got = [None if x is None else bytes(x).decode() for x in (shared, own)]
    return json.dumps({"name": name, "round": round, "pid": os.getpid(), "calls": calls, "got": got}).encode()
die_with_parent()
logging.basicConfig(level=logging.INFO)
Node(address, Path(ca), Path(key), handle).stop_on_signals().run()
"""


def said(replies: Any) -> dict[str, Any]:
    """The answers, none of which may be missing."""
    assert replies.errors == {}
    return {name: json.loads(bytes(answer)) for name, answer in replies.answers.items()}


class Federation:
    """A SuperLink and devices, in processes."""

    def __init__(self, root: Path):
        self.root = root
        self.certs = certs.init(root / "certs", [])
        self.port = processes.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.superlink = start(self.certs, root / "superlink", "127.0.0.1", self.port)
        self.devices: dict[str, Child] = {}

    def join(self, name: str, pause: float = 0.0, ca: Path | None = None) -> Child:
        if name not in self.certs.nodes():
            certs.add_node(self.certs.root, name)
        who = [name, self.address, str(ca or self.certs.ca), str(self.certs.key(name)), str(pause)]
        env = processes.bound(flower_env(self.root / "flwr"))
        self.devices[name] = Child(name, [sys.executable, "-c", PROGRAM, *who], self.root / f"{name}.log", env).start()
        return self.devices[name]

    def link(self, *names: str) -> FlowerLink:
        link = FlowerLink(self.address, self.certs)
        link.open()
        until = time.monotonic() + 60
        while not set(names) <= set(link.nodes()):
            assert time.monotonic() < until, {n: d.tail() for n, d in self.devices.items()}
            time.sleep(0.1)
        return link

    def refused(self, **changes: Any) -> str:
        """Why a node with other settings cannot join."""
        usual = {"address": self.address, "ca": self.certs.ca, "key": self.certs.key("alice"), "patience": 0.0}
        settings: dict[str, Any] = {**usual, **changes}
        with pytest.raises(CoterieError) as found:
            Node(handle=lambda kind, round, shared, own: own, **settings).run()
        return str(found.value)

    def stop(self) -> None:
        for child in [*self.devices.values(), self.superlink]:
            child.stop()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        made.join("alice")
        made.join("bob", pause=3.0)
        yield made
    finally:
        made.stop()


BOTH = {"alice": b"1", "bob": b"2"}


def test_nodes_answer_with_what_they_got(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        found = said(link.send(BOTH, "train", 3, 60, shared=b"all"))
        for name, own in (("alice", "1"), ("bob", "2")):
            assert (found[name]["name"], found[name]["round"], found[name]["got"]) == (name, 3, ["all", own])
        assert said(link.send({"alice": b""}, "train", 5, 30))["alice"]["got"] == [None, ""]
        replies = link.send({**BOTH, "carol": b""}, "fail", 4, 30)
        assert replies.answers == {} and reasons(replies)["alice"] == "alice: ValueError: no data today"
        assert reasons(replies)["carol"] == "carol is not connected"


def test_large_payloads_go_both_ways_and_are_counted(federation: Federation) -> None:
    data = os.urandom(8_000_000)
    with federation.link("alice", "bob") as link:
        replies = link.send(BOTH, "echo", 1, 60, shared=data)
        assert replies.errors == {} and list(replies.answers) == ["alice", "bob"]
        for name in BOTH:
            assert replies.answers[name] == data
            about = replies.traffic[name]
            assert 8_000_000 < about.payload_down < about.total_down < 8_100_000
            assert 8_000_000 == about.payload_up < about.total_up < 8_100_000


def test_a_reply_that_is_too_large_is_refused_and_the_others_count(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        replies = link.send({"alice": bytes(2_000_000), "bob": b""}, "echo", 1, 30, largest=100_000)
        assert list(replies.answers) == ["bob"]
        assert "larger than the 100000 allowed" in reasons(replies)["alice"]


def test_a_stranger_is_refused(federation: Federation, tmp_path: Path) -> None:
    import httpx

    federation.link("alice").close()
    eve = certs.new_key(tmp_path / "eve.key")
    assert "refused" in federation.refused(key=eve)
    assert "cannot be read" in federation.refused(key=tmp_path / "none.key")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{federation.address}/health")
    open_ = httpx.Client(verify=ssl.create_default_context(cafile=str(federation.certs.ca)))
    old = ssl.create_default_context(cafile=str(federation.certs.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://{federation.address}/health", verify=old)
    for path in ("/v1/control/list-nodes", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert open_.post(f"https://{federation.address}{path}").status_code == 403
    assert open_.post(f"https://{federation.address}/v1/fleet/pull-messages").status_code == 401


@pytest.mark.long
def test_a_node_that_does_not_trust_the_server_keeps_trying(
    federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = certs.init(tmp_path / "other", [])
    certs.add_node(federation.certs.root, "gina")
    with federation.link() as link:
        node = Node(federation.address, other.ca, federation.certs.key("gina"), lambda kind, round, shared, own: own)
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        assert not node.connected.wait(6) and thread.is_alive()
        told = [r.getMessage() for r in caplog.records if "not trusted" in r.getMessage()]
        assert len(told) == 1 and "self-signed certificate" not in told[0].partition("not trusted")[0]
        shutil.copy(federation.certs.ca, other.ca)
        assert node.connected.wait(30)
        assert link.send({"gina": b"x"}, "train", 1, 30).answers == {"gina": b"x"}
        node.stopping.set()
        thread.join(30)
    certs.remove_node(federation.certs.root, "gina")


@pytest.mark.long
def test_server_and_authority_are_renewed_while_messages_go_on(tmp_path: Path) -> None:
    """One device keeps the old ca.crt, one gets the new; at the end of the overlap the old one is let in no more."""
    made = Federation(tmp_path)
    for name in ("alice", "bob"):
        (tmp_path / name).mkdir()
        shutil.copy(made.certs.ca, tmp_path / name / "ca.crt")

    def cas(name: str) -> Path:
        return tmp_path / name / "ca.crt"

    def restarted(name: str) -> None:
        if name in made.devices:
            made.devices[name].stop()
        made.join(name, ca=cas(name))

    def until_answered(link: FlowerLink, *names: str) -> None:
        end = time.monotonic() + 240
        while set(link.send(dict.fromkeys(names, b""), "train", 1, 30).answers) != set(names):
            assert time.monotonic() < end, {n: d.tail() for n, d in made.devices.items()}

    try:
        restarted("alice")
        restarted("bob")
        with made.link("alice", "bob") as link:
            until_answered(link, "alice", "bob")
            certs.renew(made.certs.root)
            time.sleep(2.5)  # the SuperLink looks every second
            restarted("alice")  # a new connection
            until_answered(link, "alice", "bob")
            certs.renew_ca(made.certs.root, overlap=30)
            shutil.copy(made.certs.ca, cas("alice"))  # distributed to alice, not yet to bob
            time.sleep(2.5)
            restarted("alice")
            restarted("bob")
            until_answered(link, "alice", "bob")
            certs.switch_now(made.certs.root)
            time.sleep(2.5)
            restarted("alice")
            restarted("bob")
            until_answered(link, "alice")
            assert "bob" not in link.nodes() and made.devices["bob"].alive
            assert "not trusted" in made.devices["bob"].tail()
            shutil.copy(made.certs.ca, cas("bob"))  # late, and without a restart
            until_answered(link, "alice", "bob")
    finally:
        made.stop()


def test_a_dead_node_is_missed_at_the_deadline(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        federation.devices["bob"].kill()
        began = time.monotonic()
        replies = link.send(BOTH, "train", 1, 6)
        assert list(replies.answers) == ["alice"] and reasons(replies) == {"bob": "bob did not answer within 6 s"}
        assert time.monotonic() - began < 12
    times = federation.devices["bob"].tail().count("connected to")
    federation.join("bob", pause=3.0)
    until = time.monotonic() + 60
    while federation.devices["bob"].tail().count("connected to") <= times:  # one log for all processes of a name
        assert time.monotonic() < until, federation.devices["bob"].tail()
        time.sleep(0.1)


def test_a_node_that_died_at_work_and_comes_back_within_the_round_is_asked_again(
    federation: Federation, tmp_path: Path
) -> None:
    certs.add_node(federation.certs.root, "fred")
    key = federation.certs.key("fred")
    with federation.link() as link:
        at_work, over = threading.Event(), threading.Event()

        def stuck(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
            at_work.set()
            over.wait(60)
            return b""

        first = FlowerNode(federation.address, federation.certs.ca, key, stuck)
        threading.Thread(target=first.run, daemon=True).start()
        assert first.connected.wait(30)
        elsewhere = tmp_path / key.name  # as after a crash: the dead process left its node id and no lock
        for suffix in (".key", ".node"):
            shutil.copy(key.with_suffix(suffix), elsewhere.with_suffix(suffix))
        second = FlowerNode(
            federation.address, federation.certs.ca, elsewhere, lambda k, r, s, own: b"again " + bytes(own)
        )
        with pytest.raises(CoterieError, match="another process is already connected"):
            FlowerNode(federation.address, federation.certs.ca, key, stuck).run()

        def come_back() -> None:
            at_work.wait(30)
            call(first._client.DeactivateNode, fl.fleet.DeactivateNodeRequest(node_id=first._node or 0))
            time.sleep(2.5)  # long enough for the cloud to see that it is gone
            second.run()  # the first never answers; a new process of the same node connects

        again = threading.Thread(target=come_back, daemon=True)
        again.start()
        replies = link.send({"fred": b"7"}, "train", 1, 60)
        assert replies.answers == {"fred": b"again 7"} and replies.errors == {}
        for node in (first, second):
            node.stopping.set()
        over.set()
        again.join(30)
    certs.remove_node(federation.certs.root, "fred")


def test_a_killed_server_program_is_followed_by_another(federation: Federation) -> None:
    dead = federation.link("alice", "bob")
    pids = {n: r["pid"] for n, r in said(dead.send(BOTH, "train", 1, 30)).items()}
    dead._drop()  # as SIGKILL would: the run is not ended
    with federation.link("alice", "bob") as link:
        assert {n: r["pid"] for n, r in said(link.send(BOTH, "train", 2, 30)).items()} == pids


@pytest.mark.long
def test_a_killed_superlink_is_followed_by_another_within_the_round(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        before = said(link.send(BOTH, "train", 1, 30))

        def crash() -> None:
            federation.superlink.kill()
            federation.superlink = federation.superlink.start()

        threading.Timer(1.0, crash).start()
        after = said(link.send(BOTH, "slow", 2, 90))  # bob is at work while it happens
        assert list(after) == ["alice", "bob"]
        for name in after:  # the same processes, and nobody worked twice
            assert after[name]["pid"] == before[name]["pid"]
            assert after[name]["calls"] == before[name]["calls"] + 1


@pytest.mark.long
def test_unfinished_bodies_of_strangers_take_no_memory(federation: Federation) -> None:
    federation.link("alice").close()
    before = peak(federation.superlink.pid)
    context = ssl.create_default_context(cafile=str(federation.certs.ca))
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: {federation.address}\r\nContent-Length: 60000000\r\n\r\n"
    for _ in range(20):
        plain = socket.create_connection(("127.0.0.1", federation.port), timeout=60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as tls, contextlib.suppress(OSError):
            tls.sendall(head.encode())
            assert tls.recv(200).startswith(b"HTTP/1.1 401")
            for _ in range(60):
                tls.sendall(bytes(1_000_000))
    assert peak(federation.superlink.pid) - before < 50_000_000


@pytest.mark.long
def test_a_superlink_that_lost_its_memory_gets_its_nodes_back(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        before = said(link.send(BOTH, "train", 1, 30))
        federation.superlink.kill()
        for path in (federation.root / "superlink").glob("superlink.db*"):
            path.unlink()
        federation.superlink = federation.superlink.start()
        after = said(link.send(BOTH, "train", 2, 90))
        assert [r["pid"] for r in after.values()] == [r["pid"] for r in before.values()]


def test_a_newcomer_joins_a_running_federation_and_a_removed_node_leaves(federation: Federation) -> None:
    with federation.link("alice") as link:
        federation.join("dora")
        until = time.monotonic() + 60
        while "dora" not in link.nodes():
            assert time.monotonic() < until, federation.devices["dora"].tail()
            time.sleep(0.1)
        assert said(link.send({"dora": b""}, "train", 30, 30))["dora"]["name"] == "dora"
        shutil.copy(federation.certs.public("dora"), federation.root / "dora.pub")
        certs.remove_node(federation.certs.root, "dora")
        assert "dora" not in link.nodes()
        certs.add_node(federation.certs.root, "dora", federation.root / "dora.pub")
        until = time.monotonic() + 60
        while "dora" not in link.nodes():  # the same process, with the same key
            assert time.monotonic() < until, federation.devices["dora"].tail()
            time.sleep(0.1)
        assert said(link.send({"dora": b""}, "train", 31, 30))["dora"]["calls"] == 2
        federation.devices["dora"].stop()


def peak(pid: int) -> int:
    """Largest resident size of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


@pytest.mark.long
def test_a_model_of_500_mb_goes_both_ways_within_four_times_its_size(federation: Federation) -> None:
    size = 500_000_000
    processes_ = {
        "superlink": federation.superlink.pid,
        "device": federation.devices["alice"].pid,
        "cloud": os.getpid(),
    }
    with federation.link("alice") as link:
        for pid in processes_.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget earlier peaks
        before = {name: peak(pid) for name, pid in processes_.items()}
        data = bytes(100) * (size // 100)
        replies = link.send({"alice": b""}, "echo", 1, 600, shared=data)
        assert replies.errors == {} and replies.answers["alice"] == data
        grown = {name: (peak(pid) - before[name]) / size for name, pid in processes_.items()}
        assert max(grown.values()) < 4, grown
        assert replies.traffic["alice"].total_up < 1.001 * size


def test_a_port_in_use_is_a_sentence(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=f"port {federation.port} on 127.0.0.1 cannot be used"):
        start(federation.certs, tmp_path, "127.0.0.1", federation.port)


def test_stopping_stops_what_a_process_started(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = Child("x", ["python3", "-c", script], tmp_path / "log", dict(os.environ)).start()
    until = time.monotonic() + 10
    while not child.tail().strip() and time.monotonic() < until:
        time.sleep(0.02)
    grandchild = int(child.tail())
    child.stop()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has collected it
            os.kill(grandchild, 0)
            if Path(f"/proc/{grandchild}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.02)
    assert not child.alive and child not in processes._running


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    import subprocess

    script = (
        "import os, subprocess, sys, time; from coterie.runtimes.flower.processes import bound; "
        "code = 'import time; from coterie.runtimes.flower.processes import die_with_parent; die_with_parent(0.05); "
        'print("ready", flush=True); time.sleep(60)\'; '
        "p = subprocess.Popen([sys.executable, '-c', code], env=bound(os.environ), stdout=subprocess.PIPE); "
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
