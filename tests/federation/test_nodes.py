"""The life of a node: suspended, released, removed, added again, with another key, and its seat given to another."""

import json
import shutil
import subprocess
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
def made(tmp_path: Path) -> Certs:
    found = certs.init(tmp_path / "certs", [])
    certs.add_node(found.root, "alice")
    certs.add_node(found.root, "north", role="edge", devices=["ward-*"])
    return found


def cli(*args: object) -> str:
    found = CliRunner().invoke(federation_app, ["nodes", *map(str, args)])
    if isinstance(found.exception, CoterieError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


# ---- files -------------------------------------------------------------------------------------------------------
def test_suspension_is_written_and_taken_back(made: Certs) -> None:
    cli("suspend", made.root, "alice")
    cli("suspend", made.root, "north/ward-1")
    assert made.roles()["alice"].suspended and made.roles()["north"].without == ("ward-1",)
    assert not made.roles()["north"].suspended and made.roles()["north"].speaks_for("ward-1")
    with pytest.raises(CoterieError, match="suspended already"):
        nodes.suspend(made.root, "alice")
    cli("release", made.root, "alice")
    cli("release", made.root, "north/ward-1")
    assert made.roles() == {"alice": NodeRole(), "north": NodeRole.of("edge", ["ward-*"])}
    for name, reason in (
        ("alice", "not suspended"), ("bob", 'no node "bob"'), ("north/bob", 'no edge with a device "bob"'),
        ("alice/x", 'no edge with a device "x"'),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=reason):
            nodes.end_suspension(made.root, name)


def test_both_keys_hold_until_the_new_one_is_seen(made: Certs, tmp_path: Path) -> None:
    certs.new_key(tmp_path / "new.key")
    old = made.nodes()["alice"]
    cli("rotate", made.root, "alice", "--public", tmp_path / "new.pub")
    new = next(pem for pem, name in made.accepted().items() if name == "alice" and pem != old)
    assert made.accepted()[old] == "alice"
    with pytest.raises(CoterieError, match='already that of node "alice"'):
        certs.add_node(made.root, "eve", tmp_path / "new.pub")
    with pytest.raises(CoterieError, match="is changing its key already"):
        nodes.rotate_key(made.root, "alice")
    assert not made.seen("alice", old) and made.accepted()[old] == "alice"
    assert made.seen("alice", new) and not made.seen("alice", new)
    assert old not in made.accepted() and made.nodes()["alice"] == new
    assert made.roles()["alice"] == NodeRole() and not made.key("alice").exists()


def test_the_old_key_ends_with_the_overlap(made: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    old = made.nodes()["alice"]
    path = nodes.rotate_key(made.root, "alice", overlap=3600)
    assert path == made.next_key("alice") and len(made.accepted()) == 3
    later = time.time() + 3601
    monkeypatch.setattr(certs.time, "time", lambda: later)
    (new,) = (pem for pem, name in made.accepted().items() if name == "alice")
    assert new != old
    secret = path.read_bytes()
    assert made.seen("alice", new) and made.key("alice").read_bytes() == secret


def test_a_node_that_is_removed_while_its_key_changes_is_gone_with_both(made: Certs) -> None:
    nodes.rotate_key(made.root, "alice")
    certs.remove_node(made.root, "alice")
    assert set(made.accepted().values()) == {"north"}
    assert list((made.root / "nodes").rglob("alice*")) == []


def test_the_list_says_who_is_what(made: Certs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "cloud.json").write_text(json.dumps({"certs": str(made.root)}))
    (run / "roster.json").write_text(json.dumps({"alice": 1, "north/ward-1": 0, "bob": 2}))
    (run / "status.json").write_text(json.dumps({"nodes": {"alice": {"connected": True, "last_seen": 1e9}}}))
    nodes.suspend(made.root, "north/ward-1")
    found = {n["name"]: n for n in json.loads(cli("list", made.root, "--run", run, "--json"))}
    assert (found["alice"]["client"], found["alice"]["connected"], found["alice"]["last_seen"]) == (1, True, 1e9)
    assert {n: about["state"].split(";")[0] for n, about in found.items()} == {
        "alice": "active", "north": "active", "north/ward-1": "suspended", "bob": "removed",
    }  # fmt: skip
    listed = subprocess.run(["sh", "-c", f"ssh-keygen -lf {made.public('alice')}"], capture_output=True, text=True)
    if listed.returncode == 0:
        assert found["alice"]["key"] in listed.stdout.split()
    assert found["alice"]["key"].startswith("SHA256:") and "alice" in cli("list", made.root)
    with pytest.raises(CoterieError, match="holds no federation"):
        nodes.list_nodes(made.root, tmp_path)


def test_a_seat_is_freed_only_of_who_cannot_take_part(made: Certs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "cloud.json").write_text(json.dumps({"certs": str(made.root)}))
    (run / "roster.json").write_text(json.dumps({"alice": 1, "north/ward-1": 0}))
    for name, to, reason in (
        ("alice", None, "may still take part"), ("north/ward-1", None, "may still take part"),
        ("bob", None, "has no seat"), ("alice", "north/ward-1", "is client 0 of this run already"),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=reason):
            nodes.free_seat(run, name, to)
    assert nodes.seat_orders(run) == []
    certs.remove_node(made.root, "alice")
    nodes.suspend(made.root, "north/ward-1")
    assert "client 1 is free" in cli("free-seat", run, "alice", "--to", "bob")
    cli("free-seat", run, "north/ward-1")
    assert [order for _, order in nodes.seat_orders(run)] == [
        nodes.SeatOrder("alice", "bob"), nodes.SeatOrder("north/ward-1", None),
    ]  # fmt: skip


def test_a_freed_seat_goes_to_the_next_or_to_who_was_named(tmp_path: Path) -> None:
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
def test_who_is_suspended_is_not_asked_until_released(tmp_path: Path, edges: int) -> None:
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
        found = events(tmp_path / "run")
        assert [e["failed"] for e in found] == [[], [1], []]
        assert "suspended by the operator" in found[1]["reasons"]["1"]
        assert not any(seen.refusals for seen in f.runtime.liveness.nodes.values())


def test_an_edge_suspends_its_own_devices(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", 2, **QUICK) as f:
        handler: Any = f.link.handlers["edge-1"]
        handler.__self__.roles = lambda: {"device-3": NodeRole(suspended=f.runtime.versions.closed == 1)}
        assert f.loop.run()
        found = events(tmp_path / "run")
        assert [e["failed"] for e in found] == [[], [3], []]
        assert "suspended by the operator" in found[1]["reasons"]["3"]


def test_a_new_holder_of_a_seat_starts_without_the_state_of_the_old(tmp_path: Path) -> None:
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

        other.answer = asked  # type: ignore[method-assign]  # to see what the cloud counts on
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
def test_who_never_says_hello_is_asked_once_and_nobody_waits(
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
        f.runtime.membership.begun = True  # not the moment before the first round, in which new nodes are expected
        slept: list[float] = []
        monkeypatch.setattr(waiting.time, "sleep", slept.append)
        assert f.loop.run()
        assert slept == []
        assert [e["failed"] for e in events(tmp_path / "run")] == [[], [], []] and asked == []
        assert f.runtime.membership.greeting.waiting() == {"mute"} and len(f.runtime.membership.greeting._open) == 1


def test_an_edge_that_was_silent_is_asked_at_once_when_it_comes_back(tmp_path: Path) -> None:
    """A killed edge lets the time for its hello pass; its successor must not pay for that."""
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


def test_who_never_said_hello_is_not_told_the_end(tmp_path: Path) -> None:
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
        f.runtime.membership.begun = True  # not the moment before the first round, in which new nodes are expected
        assert f.loop.run()
        assert sorted(told) == ["device-0", "device-1", "device-2", "device-3", "edge-0", "edge-1"]


def test_a_node_that_lets_deadlines_pass_is_not_waited_for_until_it_says_hello_again(tmp_path: Path) -> None:
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
                f.runtime.membership.greeting._open.clear()  # as if the answer to the hello had come
            return {}

        f.link.send, f.runtime.membership.roles = count, roles  # type: ignore[method-assign]  # the fake is ours
        assert f.loop.run()
        assert asked == [1, 2, 5, 6]  # after two deadlines, of training and of scoring, no more
        assert [e["failed"] for e in events(tmp_path / "run")] == [[], [1], [1], [1], [], []]


# ---- real processes ----------------------------------------------------------------------------------------------
def until(true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.long
def test_nodes_live_while_the_run_goes_on(tmp_path: Path) -> None:
    """Suspended, released, removed, added again with its key, then with another: one cloud, and the replay agrees."""
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
        until(lambda: failed() == [], "not everybody is here")
        first = f.events()[-1]["round"]
        nodes.suspend(root, "device-1")
        until(lambda: failed() == [1], "device-1 is still asked")
        assert f.status()["nodes"]["device-1"]["connected"]
        nodes.end_suspension(root, "device-1")
        until(lambda: failed() == [], "device-1 is not asked again")

        kept = tmp_path / "device-1.pub"
        kept.write_bytes(f.certs("cloud").public("device-1").read_bytes())
        certs.remove_node(root, "device-1")
        until(lambda: failed() == [1], "device-1 is still asked")
        certs.add_node(root, "device-1", kept)
        until(lambda: failed() == [], "device-1 does not come back with its key")

        new = certs.new_key(tmp_path / "new.key")
        nodes.rotate_key(root, "device-1", new.with_suffix(".pub"))
        f.wait(PATIENCE, round=f.events()[-1]["round"] + 2)
        assert failed() == []  # the old key still holds
        f.children["device-1"].stop()
        f.keys["device-1"] = new
        f.launch("device-1")
        until(lambda: not f.certs("cloud").next_public("device-1").exists(), "the new key was not seen")
        until(lambda: failed() == [], "device-1 does not come back with its new key")
        assert f.children["cloud"].alive, "the run was over too early to show anything"
        f.wait(PATIENCE)
        assert f.children["cloud"].pid == pid
        assert [c["name"] for c in f.status()["clients"].values()] == ["device-0", "device-1", "device-2"]
        assert not [e for e in f.events() if e["round"] >= first and set(e["failed"]) - {1}]
        same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_a_cloud_is_restored_from_a_back_up_that_is_older_than_its_devices(tmp_path: Path) -> None:
    """As docs/operations.md has it: run folder and certificates are copied during the run, then both are lost."""
    given = {"data": "digits", "rounds": 40, "model": "mlp", "join": 1.0, "epochs": 1, "eval_every": 40, "watch": False}
    with LocalFederation(tmp_path / "f", "fedrep", 3, given=given, min_clients=3, deadline=60) as f:
        f.wait(PATIENCE, round=5)
        kept = {path: tmp_path / f"kept-{path.name}" for path in (f.out, f.certs("cloud").root)}
        for path, copy in kept.items():
            shutil.copytree(path, copy)
        f.wait(PATIENCE, round=f.events()[-1]["round"] + 3)
        f.children["cloud"].kill()
        lost = f.events()[-1]["round"]
        for path, copy in kept.items():
            shutil.rmtree(path)
            copy.rename(path)
        assert f.events()[-1]["round"] < lost < 40
        f.launch("cloud")  # the same command continues
        f.wait(PATIENCE)
        assert not [e for e in f.events() if e["failed"]]
        same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_cd2_pfed_federates_in_real_processes_beside_a_mute_node(tmp_path: Path) -> None:
    """A registered node connects, takes its hello and never answers: rounds go on, and nobody is refused."""
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
        f.launch("device-2")  # only now, so that the run is not over before
        f.wait(PATIENCE)
        over.set()
        node.stopping.set()
        assert [e["failed"] for e in f.events()] == [[]] * len(f.events())
        times = [json.loads(line) for line in (f.out / "timing.jsonl").read_text().splitlines()]
        assert max(sum(v for v in t.values() if isinstance(v, float)) for t in times) < 100  # not 120 s each
        same_as_replay(f, tmp_path / "replay")
