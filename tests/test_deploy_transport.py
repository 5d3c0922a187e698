"""The wire between cloud and devices: its format, and real processes on 127.0.0.1."""

import json
import os
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import codec
from coterie.errors import CoterieError
from coterie.runtimes.flower import certs, processes
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.superlink import HEADER, LARGEST_REQUEST, Guard

VALUES = [
    None,
    {"w": torch.arange(6.0).reshape(2, 3), "n": [1, 2.5, "x", True], 7: {"b": torch.tensor([True, False, True])}},
    {"half": torch.ones(3, dtype=torch.bfloat16), "odd": torch.arange(5, dtype=torch.int8), "long": torch.tensor(3)},
    {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.0), "strided": torch.arange(12.0).reshape(3, 4).T},
]


# ---- format ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", VALUES)
def test_what_is_packed_is_unpacked(value: Any) -> None:
    assert codec.equal(wire.unpack(wire.pack(value)), value)


@pytest.mark.parametrize("value", VALUES)
def test_a_packed_value_is_a_safetensors_file(value: Any) -> None:
    assert codec.equal(codec.loads(bytes(wire.pack(value))), value)


def test_unpacking_copies_nothing() -> None:
    packed = wire.pack({"w": torch.zeros(1000)})
    found = wire.unpack(packed)["w"]
    packed[-4:] = torch.ones(1).numpy().tobytes()
    assert found[-1] == 1.0


def damage(change: Callable[[dict[str, Any]], Any]) -> memoryview:
    """A packed tree with a changed header."""
    packed = wire.pack({"a": torch.zeros(4), "b": torch.zeros(2)})
    start = 8 + int.from_bytes(packed[:8], "little")
    header = json.loads(bytes(packed[8:start]))
    change(header)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return memoryview(bytearray(len(head).to_bytes(8, "little") + head + bytes(packed[start:])))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["0"].update(data_offsets=[0, 1 << 40]),
        lambda h: h["0"].update(data_offsets=[8, 24]),  # overlaps with the other
        lambda h: h["0"].update(shape=[2**62, 4]),
        lambda h: h["0"].update(shape=[-4]),
        lambda h: h["0"].update(shape=[2]),
        lambda h: h["0"].update(dtype="O"),
        lambda h: h.pop("0"),
        lambda h: h.pop("__metadata__"),
        lambda h: h["__metadata__"].update(skeleton='{"t": 9}'),
        lambda h: h["__metadata__"].update(skeleton="[" * 5000 + "]" * 5000),
    ],
)
def test_a_damaged_payload_is_refused_with_a_sentence(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(CoterieError, match="damaged or foreign payload"):
        wire.unpack(damage(change))


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_cut_payload_is_refused(cut: int) -> None:
    with pytest.raises(CoterieError, match="damaged or foreign payload"):
        wire.unpack(wire.pack({"a": torch.zeros(4)})[:cut])


def test_a_reply_of_another_round_or_ticket_is_refused() -> None:
    asked = wire.Head("train", 5, "secret")
    wire.Head("train", 5, "secret", wire=10).refuse_unless(asked)
    with pytest.raises(CoterieError, match="round 4, asked was round 5"):
        wire.Head("train", 4, "secret").refuse_unless(asked)
    with pytest.raises(CoterieError, match="replay"):
        wire.Head("train", 5, "another").refuse_unless(asked)


def test_only_the_fleet_is_open_without_the_control_key() -> None:
    guard = Guard(None, "k" * 32)

    def status(path: str, **headers: str) -> int | None:
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return guard.refuse({"type": "http", "path": path, "headers": pairs})

    key = {HEADER.replace("-", "_"): "k" * 32}
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/"):
        assert status(path) == 403
        assert status(path, **{**key, HEADER.replace("-", "_"): "wrong"}) == 403
        assert status(path, **key) is None
    assert status("/v1/fleet/pull-messages") is None
    assert status("/v1/fleet/push-object", content_length=str(LARGEST_REQUEST + 1)) == 413
    assert status("/v1/fleet/push-object", transfer_encoding="chunked") == 411
    assert guard.refuse({"type": "websocket", "path": "/v1/fleet/x"}) == 403


class Shelf:
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
    pytest.importorskip("flwr")
    shelf = Shelf()
    shared = wire.part({"w": torch.randn(4_000_000)})  # 16 MB: four chunks
    shelf.send({"shared": shared, "each": wire.part({"x": 1})}, {"shared": shared, "each": wire.part({"x": 2})})
    assert sum(map(len, shelf.objects.values())) < 17_000_000
    for tree, x in zip(shelf.trees, (1, 2), strict=True):
        _, value, _ = wire.opened(wire.pull(tree, shelf.get, 2**30).content)
        assert value["x"] == x and len(value["w"]) == 4_000_000


def test_a_payload_that_is_too_large_is_refused_before_it_is_fetched() -> None:
    pytest.importorskip("flwr")
    shelf = Shelf()
    shelf.send({"value": wire.part({"w": torch.zeros(4_000_000)})})
    with pytest.raises(CoterieError, match="larger than the 1600000 allowed"):
        wire.pull(shelf.trees[0], shelf.get, 1_600_000)
    assert max(len(shelf.objects[k]) for k in shelf.asked) < 10_000


def test_a_payload_longer_than_it_says_is_refused() -> None:
    pytest.importorskip("flwr")
    shelf = Shelf()
    liar = wire.part({"w": torch.zeros(4_000_000)})
    liar.shape = (1000,)
    shelf.send({"value": liar})
    with pytest.raises(CoterieError, match="longer than it says"):
        wire.pull(shelf.trees[0], shelf.get, 1_600_000)


# ---- real processes ----------------------------------------------------------------------------------------------
HANDLER = """
import os, time
def make(name, pause=0.0):
    calls = []
    def handle(kind, round, payload):
        calls.append(round)
        if kind == "fail":
            raise ValueError("no data today")
        if kind == "slow":
            time.sleep(pause)
        return {"name": name, "kind": kind, "round": round, "pid": os.getpid(), "calls": len(calls), "got": payload}
    return handle
"""


class Federation:
    """A SuperLink and devices, in processes."""

    def __init__(self, root: Path):
        self.root = root
        self.certs = certs.init(root / "certs", [])
        self.port = processes.free_port()
        self.address = f"127.0.0.1:{self.port}"
        (root / "answering.py").write_text(HANDLER)
        self.superlink = processes.superlink(self.certs, root / "superlink", self.port)
        self.devices: dict[str, processes.Child] = {}

    def join(self, name: str, **options: Any) -> processes.Child:
        if name not in self.certs.nodes():
            certs.add_node(self.certs.root, name)
        self.devices[name] = processes.device(
            self.address, self.certs.ca, self.certs.key(name), "answering:make",
            json.dumps({"name": name, **options}), self.root / f"{name}.log",
        )  # fmt: skip
        return self.devices[name]

    def link(self, *names: str, **options: Any) -> Any:
        from coterie.runtimes.flower.transport.link import FlowerLink

        link = FlowerLink(self.address, self.certs, **options)
        link.open()
        until = time.monotonic() + 60
        while not set(names) <= set(link.nodes()):
            assert time.monotonic() < until, {n: d.tail() for n, d in self.devices.items()}
            time.sleep(0.1)
        return link

    def refused(self, **changes: Any) -> str:
        """Why a device with other settings cannot join."""
        from coterie.runtimes.flower.transport.node import Device

        settings = {"address": self.address, "ca": self.certs.ca, "key": self.certs.key("alice"), "patience": 0.0}
        with pytest.raises(CoterieError) as found:
            Device(handle=lambda kind, round, payload: payload, **{**settings, **changes}).run()
        return str(found.value)

    def stop(self) -> None:
        for child in [*self.devices.values(), self.superlink]:
            child.stop()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    pytest.importorskip("flwr", reason="a federation needs the extra flower")
    before = os.environ.get("PYTHONPATH", "")
    root = tmp_path_factory.mktemp("federation")
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{before}"
    made = Federation(root)
    try:
        made.join("alice")
        made.join("bob", pause=3.0)
        yield made
    finally:
        made.stop()
        os.environ["PYTHONPATH"] = before


def test_nodes_answer_with_what_they_got(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        shared = {"w": torch.randn(2_000_000)}
        replies, errors = link.send({"alice": {"x": 1}, "bob": {"x": 2}}, "train", 3, 60, shared=shared)
        assert errors == {} and list(replies) == ["alice", "bob"]
        for name, x in (("alice", 1), ("bob", 2)):
            assert codec.equal(replies[name]["got"], {**shared, "x": x})
            assert (replies[name]["name"], replies[name]["round"]) == (name, 3)
            about = link.wires[name]
            assert 8_000_000 < about.payload_down < about.total_down < 8_100_000
            assert 8_000_000 < about.payload_up < about.total_up < 8_100_000
        replies, errors = link.send({"alice": {}, "bob": {}, "carol": {}}, "fail", 4, 30)
        assert replies == {} and errors["alice"] == "alice: ValueError: no data today"
        assert errors["carol"] == "carol is not connected"
        replies, errors = link.send({"alice": [1, None]}, "train", 5, 30)
        assert replies["alice"]["got"] == [1, None] and errors == {}


def test_a_reply_that_is_too_large_is_refused_and_the_others_count(federation: Federation) -> None:
    with federation.link("alice", "bob", largest=100_000) as link:
        replies, errors = link.send({"alice": {"w": torch.zeros(500_000)}, "bob": {}}, "train", 1, 30)
        assert list(replies) == ["bob"]
        assert "larger than the 100000 allowed" in errors["alice"]


def test_a_stranger_is_refused(federation: Federation, tmp_path: Path) -> None:
    import httpx

    federation.link("alice").close()
    other = certs.init(tmp_path / "other", [])
    eve = certs.new_key(tmp_path / "eve.key")
    assert "refused" in federation.refused(key=eve)
    assert "not to be trusted" in federation.refused(ca=other.ca, key=eve)
    assert "cannot be read" in federation.refused(key=tmp_path / "none.key")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{federation.address}/health")
    open_ = httpx.Client(verify=ssl.create_default_context(cafile=str(federation.certs.ca)))
    for path in ("/v1/control/list-nodes", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert open_.post(f"https://{federation.address}{path}").status_code == 403
    assert open_.post(f"https://{federation.address}/v1/fleet/pull-messages").status_code in (400, 401, 415, 422)


def test_a_dead_node_is_missed_at_the_deadline(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        federation.devices["bob"].kill()
        began = time.monotonic()
        replies, errors = link.send({"alice": {}, "bob": {}}, "train", 1, 6)
        assert list(replies) == ["alice"] and errors == {"bob": "bob did not answer within 6 s"}
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
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest

    from coterie.runtimes.flower.transport.http import call
    from coterie.runtimes.flower.transport.node import Device

    certs.add_node(federation.certs.root, "fred")
    key = federation.certs.key("fred")
    with federation.link() as link:
        at_work, over = threading.Event(), threading.Event()
        first = Device(federation.address, federation.certs.ca, key, lambda k, r, p: at_work.set() or over.wait(60))
        threading.Thread(target=first.run, daemon=True).start()
        assert first.connected.wait(30)
        elsewhere = tmp_path / key.name  # as after a crash: the dead process left its node id and no lock
        for suffix in (".key", ".node"):
            shutil.copy(key.with_suffix(suffix), elsewhere.with_suffix(suffix))
        second = Device(federation.address, federation.certs.ca, elsewhere, lambda k, r, p: {"again": p["x"]})
        with pytest.raises(CoterieError, match="another process is already connected"):
            Device(federation.address, federation.certs.ca, key, lambda k, r, p: p).run()

        def come_back() -> None:
            at_work.wait(30)
            call(first._client.DeactivateNode, DeactivateNodeRequest(node_id=first._node))
            time.sleep(2.5)  # long enough for the cloud to see that it is gone
            second.run()  # the first never answers; a new process of the same node connects

        again = threading.Thread(target=come_back, daemon=True)
        again.start()
        replies, errors = link.send({"fred": {"x": 7}}, "train", 1, 60)
        assert replies == {"fred": {"again": 7}} and errors == {}
        for device in (first, second):
            device.stopping.set()
        over.set()
        again.join(30)
    certs.remove_node(federation.certs.root, "fred")


def test_a_killed_server_program_is_followed_by_another(federation: Federation) -> None:
    dead = federation.link("alice", "bob")
    replies, errors = dead.send({"alice": {}, "bob": {}}, "train", 1, 30)
    assert errors == {}
    pids = {n: r["pid"] for n, r in replies.items()}
    dead._drop()  # as SIGKILL would: the run is not ended
    with federation.link("alice", "bob") as link:
        replies, errors = link.send({"alice": {}, "bob": {}}, "train", 2, 30)
        assert errors == {} and {n: r["pid"] for n, r in replies.items()} == pids


def test_a_killed_superlink_is_followed_by_another_within_the_round(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        before, _ = link.send({"alice": {}, "bob": {}}, "train", 1, 30)

        def crash() -> None:
            federation.superlink.kill()
            federation.superlink = federation.superlink.start()

        threading.Timer(1.0, crash).start()
        replies, errors = link.send({"alice": {}, "bob": {}}, "slow", 2, 90)  # bob is at work while it happens
        assert errors == {} and list(replies) == ["alice", "bob"]
        for name in replies:  # the same processes, and nobody worked twice
            assert replies[name]["pid"] == before[name]["pid"]
            assert replies[name]["calls"] == before[name]["calls"] + 1


@pytest.mark.long
def test_a_superlink_that_lost_its_memory_gets_its_nodes_back(federation: Federation) -> None:
    with federation.link("alice", "bob") as link:
        before, _ = link.send({"alice": {}, "bob": {}}, "train", 1, 30)
        federation.superlink.kill()
        for path in (federation.root / "superlink").glob("superlink.db*"):
            path.unlink()
        federation.superlink = federation.superlink.start()
        replies, errors = link.send({"alice": {}, "bob": {}}, "train", 2, 90)
        assert errors == {} and [r["pid"] for r in replies.values()] == [r["pid"] for r in before.values()]


def test_a_newcomer_joins_a_running_federation_and_a_removed_node_leaves(federation: Federation) -> None:
    with federation.link("alice") as link:
        federation.join("dora")
        until = time.monotonic() + 60
        while "dora" not in link.nodes():
            assert time.monotonic() < until, federation.devices["dora"].tail()
            time.sleep(0.1)
        assert link.send({"dora": {}}, "train", 30, 30)[0]["dora"]["name"] == "dora"
        certs.remove_node(federation.certs.root, "dora")
        assert "dora" not in link.nodes()
        federation.devices["dora"].stop()


@pytest.mark.long
def test_a_stock_supernode_answers_too(federation: Federation) -> None:
    certs.add_node(federation.certs.root, "stock")
    command = Path(sys.executable).parent / "flower-supernode"
    argv = [
        str(command), "--superlink", federation.address, "--root-certificates", str(federation.certs.ca),
        "--auth-supernode-private-key", str(federation.certs.key("stock")), "--port", str(processes.free_port()),
        "--host", "127.0.0.1", "--node-config", """handler="answering:make" options='{"name":"stock"}'""",
    ]  # fmt: skip
    env = processes.flower_env(federation.root / "flwr")
    with federation.link() as link:  # registers it
        federation.devices["stock"] = processes.Child("stock", argv, federation.root / "stock.log", env).start()
        until = time.monotonic() + 60
        while "stock" not in link.nodes():
            assert time.monotonic() < until, federation.devices["stock"].tail()
            time.sleep(0.2)
        value = {"w": torch.randn(300_000), "x": 1}
        replies, errors = link.send({"stock": value}, "train", 1, 120)
        assert errors == {} and codec.equal(replies["stock"]["got"], value)
    federation.devices.pop("stock").stop()


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
        tree = {str(i): torch.full((size // 40,), float(i)) for i in range(10)}
        replies, errors = link.send({"alice": {}}, "train", 1, 600, shared=tree)
        assert errors == {} and codec.equal(replies["alice"]["got"], tree)
        grown = {name: (peak(pid) - before[name]) / size for name, pid in processes_.items()}
        assert max(grown.values()) < 4, grown
        assert link.wires["alice"].total_up < 1.001 * size


def test_a_port_in_use_is_a_sentence(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=f"port {federation.port} on 127.0.0.1 cannot be used"):
        processes.superlink(federation.certs, tmp_path, federation.port)


def test_stopping_stops_what_a_process_started(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = processes.Child("x", ["python3", "-c", script], tmp_path / "log", dict(os.environ)).start()
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
