"""Nodes that are suspended, released, removed, added again or get a new key, and seats that are freed."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from typer.testing import CliRunner

from coterie.cli.federation import federation_app
from coterie.errors import CoterieError
from coterie.federation.cloud import waiting
from coterie.federation.device import DeviceHandler
from coterie.federation.identity import admin as nodes
from coterie.federation.identity import authority as certs
from coterie.federation.identity.authority import Certs
from coterie.federation.identity.roles import NodeRole
from coterie.federation.identity.seats import Roster
from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.protocol.messages import Hello
from coterie.federation.transport.node import Node
from coterie.testing import events
from support.in_process_link import ALLOW, federation
from support.replayed import same_as_replay

PATIENCE = 240.0


@pytest.fixture
def files(tmp_path: Path) -> Certs:
    created = certs.init(tmp_path / "certs", [])
    certs.add_node(created.root, "alice")
    certs.add_node(created.root, "north", role="edge", devices=["ward-*"])
    return created


def cli(*args: object) -> str:
    result = CliRunner().invoke(federation_app, ["nodes", *map(str, args)])
    if isinstance(result.exception, CoterieError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


# ---- files -------------------------------------------------------------------------------------------------------
def test_nodes_are_suspended_and_released(files: Certs) -> None:
    cli("suspend", files.root, "alice")
    cli("suspend", files.root, "north/ward-1")
    assert files.roles()["alice"].suspended and files.roles()["north"].without == ("ward-1",)
    assert not files.roles()["north"].suspended and files.roles()["north"].speaks_for("ward-1")
    with pytest.raises(CoterieError, match="suspended already"):
        nodes.suspend(files.root, "alice")
    cli("release", files.root, "alice")
    cli("release", files.root, "north/ward-1")
    assert files.roles() == {"alice": NodeRole(), "north": NodeRole.of("edge", ["ward-*"])}
    for name, reason in (
        ("alice", "not suspended"), ("bob", 'no node "bob"'), ("north/bob", 'not an edge with a device "bob"'),
        ("alice/x", 'not an edge with a device "x"'),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=reason):
            nodes.end_suspension(files.root, name)


def test_both_keys_are_accepted_until_the_new_one_is_seen(files: Certs, tmp_path: Path) -> None:
    (old,) = files.valid("alice")
    cli("rotate", files.root, "alice", "--request", certs.make_request(tmp_path / "new.key", "alice"))
    (new,) = set(files.valid("alice")) - {old}
    assert old in files.valid("alice")
    with pytest.raises(CoterieError, match="is changing its key already"):
        nodes.rotate_key(files.root, "alice")
    assert not files.seen("alice", old) and old in files.valid("alice")
    assert files.seen("alice", new) and not files.seen("alice", new)
    assert files.valid("alice") == [new]
    assert files.roles()["alice"] == NodeRole() and not files.key("alice").exists()


def test_the_old_key_is_refused_after_the_overlap(files: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = files.valid("alice")
    path = nodes.rotate_key(files.root, "alice", overlap=3600)
    assert path == files.next_key("alice") and len(files.valid("alice")) == 2
    later = time.time() + 3601
    monkeypatch.setattr(certs.time, "time", lambda: later)
    (new,) = files.valid("alice")
    assert new != old
    secret = path.read_bytes()
    assert files.seen("alice", new) and files.key("alice").read_bytes() == secret


def test_removing_a_node_during_a_key_change_removes_both_keys(files: Certs) -> None:
    nodes.rotate_key(files.root, "alice")
    certs.remove_node(files.root, "alice")
    assert files.valid("alice") == [] and files.valid("north")
    assert list((files.root / "nodes").rglob("alice*")) == []


def test_the_list_shows_client_state_and_key_of_each_node(files: Certs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "cloud.json").write_text(json.dumps({"certs": str(files.root)}))
    (run / "roster.json").write_text(json.dumps({"alice": 1, "north/ward-1": 0, "bob": 2}))
    (run / "status.json").write_text(json.dumps({"nodes": {"alice": {"connected": True, "last_seen": 1e9}}}))
    nodes.suspend(files.root, "north/ward-1")
    listed_nodes = {n["name"]: n for n in json.loads(cli("list", files.root, "--run", run, "--json"))}
    assert (
        listed_nodes["alice"]["client"],
        listed_nodes["alice"]["connected"],
        listed_nodes["alice"]["last_seen"],
    ) == (1, True, 1e9)
    assert {n: about["state"].split(";")[0] for n, about in listed_nodes.items()} == {
        "alice": "active", "north": "active", "north/ward-1": "suspended", "bob": "removed",
    }  # fmt: skip
    assert listed_nodes["alice"]["key"].startswith("SHA256:") and "alice" in cli("list", files.root)
    with pytest.raises(CoterieError, match="holds no federation"):
        nodes.list_nodes(files.root, tmp_path)


def test_only_the_seat_of_a_removed_or_suspended_node_can_be_freed(files: Certs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "cloud.json").write_text(json.dumps({"certs": str(files.root)}))
    (run / "roster.json").write_text(json.dumps({"alice": 1, "north/ward-1": 0}))
    for name, to, reason in (
        ("alice", None, "may still take part"), ("north/ward-1", None, "may still take part"),
        ("bob", None, "has no seat"), ("alice", "north/ward-1", "is client 0 of this run already"),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=reason):
            nodes.free_seat(run, name, to)
    assert nodes.seat_orders(run) == []
    certs.remove_node(files.root, "alice")
    nodes.suspend(files.root, "north/ward-1")
    assert "the seat of client 1 will be free for bob" in cli("free-seat", run, "alice", "--to", "bob")
    cli("free-seat", run, "north/ward-1")
    assert [order for _, order in nodes.seat_orders(run)] == [
        nodes.SeatOrder("alice", "bob"), nodes.SeatOrder("north/ward-1", None),
    ]  # fmt: skip


def test_a_freed_seat_goes_to_the_named_or_the_next_device(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 2)
    for name in ("a", "b"):
        roster.admit(name, Hello(None, 1))
    assert roster.free("a", None, 7) == 0 and 0 not in roster.entries
    assert roster.admit("c", Hello(None, 1)).client == 0
    assert roster.free("b", "d", 9) == 1
    again = Roster(tmp_path / "roster.json", 2)
    assert again.numbers == {"c": 0, "d": 1} and again.emptied == {0: 7, 1: 9}
    with pytest.raises(CoterieError, match="no seat"):
        again.free("b", None, 9)


# ---- in a run, in one process ------------------------------------------------------------------------------------
QUICK: dict[str, Any] = {"join": 1.0, "rounds": 3, "watch": False, "final_trained": False}


@pytest.mark.parametrize("edges", [0, 2])
def test_a_suspended_device_is_not_asked_until_it_is_released(tmp_path: Path, edges: int) -> None:
    with federation(tmp_path, "fedrep", edges, **QUICK) as f:
        known = dict(f.runtime.membership.roles())

        def roles() -> Mapping[str, NodeRole]:
            if f.runtime.versions.closed != 1:
                return known
            if not edges:
                return {**known, "device-1": NodeRole(suspended=True)}
            return {**known, "edge-0": replace(known["edge-0"], without=("device-1",))}

        f.runtime.membership.roles = roles
        assert f.loop.run()
        rounds = events(tmp_path / "run")
        assert [e["failed"] for e in rounds] == [[], [1], []]
        assert "suspended by the operator" in rounds[1]["reasons"]["1"]
        assert not any(seen.refusals for seen in f.runtime.liveness.nodes.values())


def test_an_edge_suspends_its_own_devices(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", 2, **QUICK) as f:
        handler: Any = f.link.handlers["edge-1"]
        handler.__self__.roles = lambda: {"device-3": NodeRole(suspended=f.runtime.versions.closed == 1)}
        assert f.loop.run()
        rounds = events(tmp_path / "run")
        assert [e["failed"] for e in rounds] == [[], [3], []]
        assert "suspended by the operator" in rounds[1]["reasons"]["3"]


def test_the_new_holder_of_a_seat_does_not_get_the_old_state(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", **{**QUICK, "rounds": 5}) as f:
        other = DeviceHandler("digits", tmp_path / "devices" / "other", 1, None, ALLOW)
        bases = []

        def roles() -> Mapping[str, NodeRole]:
            if f.runtime.versions.closed == 2 and "other" not in f.link.handlers:
                del f.link.handlers["device-1"]
                f.link.handlers["other"] = other.handle
                (tmp_path / "run" / "orders").mkdir()
                (tmp_path / "run" / "orders" / "0.json").write_text('{"free": "device-1", "to": null}')
                (tmp_path / "run" / "orders" / "1.json").write_text("nonsense")
            return {}

        answer = other.answer

        def asked(kind: str, round: int, job: Any) -> Any:
            bases.append((round, job.base))
            return answer(kind, round, job)

        other.answer = asked  # type: ignore[method-assign]  # records the versions that the cloud names
        f.runtime.membership.roles = roles
        try:
            assert f.loop.run()
        finally:
            other.close()
        assert [e["failed"] for e in events(tmp_path / "run")] == [[], [], [1], [], []]
        assert (
            f.runtime.membership.roster.numbers["other"] == 1 and "device-1" not in f.runtime.membership.roster.numbers
        )
        assert (4, -1) in bases and (5, 4) in bases and f.runtime.membership.roster.emptied == {1: 2}
        assert sorted(p.stem for p in (tmp_path / "devices" / "other").rglob("*.state")) == ["000004", "000005"]
        assert (
            any("1.json is not an order" in e for e in f.runtime.liveness.errors)
            and nodes.seat_orders(tmp_path / "run") == []
        )


# ---- silent nodes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("edges", [0, 2])
def test_rounds_do_not_wait_for_a_node_that_never_answers_its_hello(
    tmp_path: Path, edges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path, "fedrep", edges, **QUICK) as f:
        known = dict(f.runtime.membership.roles())
        asked: list[str] = []

        def mute(kind: str, *more: Any) -> memoryview:
            asked.append(kind)
            raise AssertionError("a mute node does not get that far")

        for link in (f.link, *f.links.values()):
            link.handlers["mute"] = mute
            link.mute = {"mute"}
        f.runtime.membership.roles = lambda: {**known, "mute": NodeRole()}
        f.runtime.membership.begun = True  # before the first round, the cloud would wait for new nodes
        slept: list[float] = []
        monkeypatch.setattr(waiting.time, "sleep", slept.append)
        assert f.loop.run()
        assert slept == []
        assert [e["failed"] for e in events(tmp_path / "run")] == [[], [], []] and asked == []
        assert f.runtime.membership.greeting.waiting() == {"mute"} and len(f.runtime.membership.greeting._open) == 1


def test_a_late_edge_is_asked_at_once_when_it_reconnects(tmp_path: Path) -> None:
    """A killed edge did not answer its hello in time; the cloud must not delay its successor."""
    with federation(tmp_path, "fedrep", 2, **QUICK) as f:
        f.loop.start()
        f.link.mute = {"edge-0"}
        f.runtime.membership.update()
        assert f.runtime.membership.connected == {2, 3}
        edge = f.link.handlers.pop("edge-0")
        f.link.mute = set()
        f.runtime.membership.update()
        f.link.handlers["edge-0"] = edge
        f.runtime.membership.update()
        assert f.runtime.membership.connected == {0, 1, 2, 3}


def test_nodes_without_a_hello_are_not_told_the_end(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", 2, **QUICK) as f:
        told: list[str] = []

        def listening(send: Callable[..., Any]) -> Callable[..., Any]:
            def sent(payloads: Any, kind: str, *more: Any) -> Any:
                told.extend(payloads if kind == "over" else ())
                return send(payloads, kind, *more)

            return sent

        for link in (f.link, *f.links.values()):
            link.handlers["mute"], link.mute = f.link.handlers["edge-0"], {"mute"}
            link.send = listening(link.send)  # type: ignore[method-assign]
        f.runtime.membership.begun = True  # before the first round, the cloud would wait for new nodes
        assert f.loop.run()
        assert sorted(told) == ["device-0", "device-1", "device-2", "device-3", "edge-0", "edge-1"]


def test_a_node_that_misses_deadlines_is_not_asked_until_it_answers_a_hello(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", **{**QUICK, "rounds": 6}) as f:
        asked = []
        send = f.link.send

        def count(payloads: Any, kind: str, round: int, *more: Any) -> Any:
            if "device-1" in payloads and kind == "train":
                asked.append(round)
            return send(payloads, kind, round, *more)

        def roles() -> Mapping[str, NodeRole]:
            f.link.mute = {"device-1"} if 1 <= f.runtime.versions.closed <= 3 else set()
            if not f.link.mute:
                f.runtime.membership.greeting._open.clear()  # the open hello is forgotten
            return {}

        f.link.send, f.runtime.membership.roles = count, roles  # type: ignore[method-assign]  # a test double
        assert f.loop.run()
        assert asked == [1, 2, 5, 6]  # not after two missed deadlines
        assert [e["failed"] for e in events(tmp_path / "run")] == [[], [1], [1], [1], [], []]


# ---- real processes ----------------------------------------------------------------------------------------------
def until(true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.long
def test_nodes_can_be_managed_during_a_run(tmp_path: Path) -> None:
    """A device is suspended, released, removed, and added again with its old key and then with a new one."""
    given = {
        "data": "digits",
        "rounds": 1200,
        "model": "mlp",
        "join": 1.0,
        "epochs": 1,
        "eval_every": 1200,
        "watch": False,
    }
    with LocalFederation(tmp_path / "f", "fedrep", 3, given=given, min_clients=2, deadline=60) as f:
        root, pid = f.certs("cloud").root, f.children["cloud"].pid

        def failed() -> list[int]:
            return list(f.events()[-1]["failed"]) if f.events() else [-1]

        f.wait(PATIENCE, round=2)
        until(lambda: failed() == [], "not all devices take part")
        first = f.events()[-1]["round"]
        nodes.suspend(root, "device-1")
        until(lambda: failed() == [1], "device-1 is still asked")
        assert f.status()["nodes"]["device-1"]["connected"]
        nodes.end_suspension(root, "device-1")
        until(lambda: failed() == [], "device-1 is not asked again")

        kept = {p: p.read_bytes() for p in (f.certs("cloud").key("device-1"), f.certs("cloud").certificate("device-1"))}
        certs.remove_node(root, "device-1")
        until(lambda: failed() == [1], "device-1 is still asked")
        for path, content in kept.items():
            path.write_bytes(content)
        until(lambda: failed() == [], "device-1 does not come back with its certificate")

        new = tmp_path / "new.key"
        signed = nodes.rotate_key(root, "device-1", certs.make_request(new, "device-1"))
        new.with_suffix(".crt").write_bytes(signed.read_bytes())
        f.wait(PATIENCE, round=f.events()[-1]["round"] + 2)
        assert failed() == []  # the old key is still accepted
        f.children["device-1"].stop()
        f.keys["device-1"] = new
        f.launch("device-1")
        until(lambda: not f.certs("cloud").next_certificate("device-1").exists(), "the new key was not seen")
        until(lambda: failed() == [], "device-1 does not come back with its new key")
        assert f.children["cloud"].alive, "the run was over too early to show anything"
        f.wait(PATIENCE)
        assert f.children["cloud"].pid == pid
        assert [c["name"] for c in f.status()["clients"].values()] == ["device-0", "device-1", "device-2"]
        assert not [e for e in f.events() if e["round"] >= first and set(e["failed"]) - {1}]
        same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_a_cloud_can_be_restored_from_a_backup_older_than_its_devices(tmp_path: Path) -> None:
    """Follow docs/operations.md: run folder and certificates are copied during the run, and both are lost later."""
    given = {"data": "digits", "rounds": 40, "model": "mlp", "join": 1.0, "epochs": 1, "eval_every": 40, "watch": False}
    with LocalFederation(tmp_path / "f", "fedrep", 3, given=given, min_clients=3, deadline=60) as f:
        f.wait(PATIENCE, round=5)
        copies = {path: tmp_path / f"copy-{path.name}" for path in (f.out, f.certs("cloud").root)}
        for path, copy in copies.items():
            shutil.copytree(path, copy)
        f.wait(PATIENCE, round=f.events()[-1]["round"] + 3)
        f.children["cloud"].kill()
        lost = f.events()[-1]["round"]
        for path, copy in copies.items():
            shutil.rmtree(path)
            copy.rename(path)
        assert f.events()[-1]["round"] < lost < 40
        f.launch("cloud")  # its usual command resumes the run
        f.wait(PATIENCE)
        assert not [e for e in f.events() if e["failed"]]
        same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_cd2_pfed_runs_in_real_processes_next_to_a_mute_node(tmp_path: Path) -> None:
    """A registered node connects, gets its hello and never answers. Rounds continue, and all devices take part."""
    given = {"data": "digits", "rounds": 8, "model": "mlp", "join": 1.0, "epochs": 1, "eval_every": 8, "watch": False}
    with LocalFederation(tmp_path / "f", "cd2-pfed", 3, given=given, min_clients=3, deadline=60, late=(2,)) as f:
        certs.add_node(f.certs("cloud").root, "mute")
        address, files = f"127.0.0.1:{f.ports['cloud']}", f.certs("cloud")
        over, asked = threading.Event(), threading.Event()

        def never(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
            asked.set()
            over.wait(600)
            return b""

        node = Node(address, files.ca, files.key("mute"), never)
        threading.Thread(target=node.run, daemon=True).start()
        assert asked.wait(PATIENCE)
        f.launch("device-2")  # not earlier, so that the run does not end too soon
        f.wait(PATIENCE)
        over.set()
        node.stopping.set()
        assert [e["failed"] for e in f.events()] == [[]] * len(f.events())
        times = [json.loads(line) for line in (f.out / "timing.jsonl").read_text().splitlines()]
        assert max(sum(v for v in t.values() if isinstance(v, float)) for t in times) < 100  # not 120 s each
        same_as_replay(f, tmp_path / "replay")
