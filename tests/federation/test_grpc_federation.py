"""Federations over gRPC in real processes: newcomers, seats, suspended edges, certificates, upgrades, absurd counts."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from safetensors.torch import load_file

from coterie.federation.identity import admin as nodes
from coterie.federation.identity import authority as certs
from coterie.federation.localhost import processes
from coterie.federation.protocol.version import PROTOCOL
from coterie.federation.replay import replay_differences
from support.paced import ROUNDS, Paced
from support.replayed import same_as_replay

pytestmark = pytest.mark.long


def test_a_late_device_takes_its_place_a_newcomer_gets_a_model_and_a_leaver_is_not_waited_for(tmp_path: Path) -> None:
    f = Paced(tmp_path, devices=5, min_clients=2, late=(3, 4), given={"newcomers": 1})  # device-4 is the newcomer
    with f:
        f.until_failed(3)
        f.launch("device-3")
        f.launch("device-4")
        f.until_failed()
        f.until(lambda: f.model(4).exists(), "the newcomer has no model")
        f.children["device-1"].stop()
        f.until_failed(1)
        f.finish()
        times = (f.out / "timing.jsonl").read_text().splitlines()
        last = f.events()[-1]
        assert last["participants"] == [0, 1, 2, 3] and last["failed"] == [1] and len(times) == ROUNDS
        found = last["eval"]
        assert found["personal/test"]["clients"] == 3 and found["newcomers/personal/test"]["clients"] == 1
        same_as_replay(f, tmp_path / "replay")


def test_a_freed_seat_gets_another_device_which_starts_without_the_state_of_the_first(tmp_path: Path) -> None:
    with Paced(tmp_path, min_clients=2) as f:
        root, files = f.certs("cloud").root, f.certs("cloud")
        f.until_failed()
        certs.remove_node(root, "device-1")
        f.until_failed(1)
        nodes.free_seat(f.out, "device-1", "successor")
        certs.add_node(root, "successor")
        old = f.children.pop("device-1")
        old.kill()
        f.keys["device-1"] = files.key("successor")
        first, f.state = f.state, lambda i: tmp_path / "successor" if i == 1 else first(i)  # type: ignore[method-assign]
        f.launch("device-1")
        f.until_failed()
        assert nodes.seat_orders(f.out) == [] and "seat 1 of device-1 is free for successor" in f.log("cloud")
        f.finish()
        assert {n.name: (n.client, n.state) for n in nodes.list_nodes(root, f.out)}["successor"] == (1, "active")
        assert "device-1" not in {n.name for n in nodes.list_nodes(root, f.out)}
        assert replay_differences(f.out, tmp_path / "replay", {i: f.state(i) for i in range(3)}) == []
        last = f"{ROUNDS:06d}.state"
        assert (f.state(1) / f.run / "1" / last).exists() and not (first(1) / f.run / "1" / last).exists()


def test_a_suspended_edge_and_a_device_that_its_edge_suspends_are_not_asked(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, edges=2, min_clients=1) as f:
        f.until_failed()
        nodes.suspend(f.certs("cloud").root, "edge-1")
        f.until_failed(2, 3)
        assert f.reason(2) == "edge-1/device-2: suspended by the operator"
        assert f.status()["nodes"]["edge-1"]["connected"] and f.status()["nodes"]["edge-1"]["out"]
        nodes.end_suspension(f.certs("cloud").root, "edge-1")
        f.until_failed()
        nodes.suspend(f.certs("edge-0").root, "device-1")
        f.until_failed(1)
        assert f.reason(1) == "edge-0/device-1: suspended by the operator"
        nodes.end_suspension(f.certs("edge-0").root, "device-1")
        f.until_failed()
        assert all(about["refusals"] == 0 for about in f.status()["nodes"].values())
        f.finish()
        same_as_replay(f, tmp_path / "replay")


def test_an_expired_certificate_is_a_sentence_and_a_renewed_one_lets_devices_back(tmp_path: Path) -> None:
    made = certs.init(tmp_path / "old", [])
    certs.add_node(made.root, "north", role="edge", devices=["*"])
    certs.renew(made.root, days=0)
    port = str(processes.free_port())
    shape = ["--shape", "1,4,4", "--classes", "3", "--clients", "2", "--out", str(tmp_path / "run")]
    serve = ["serve", "fedavg", "--certs", str(made.root), "--port", port, *shape]
    edge = [
        "edge",
        "--up",
        "127.0.0.1:1",
        "--ca",
        str(made.ca),
        "--key",
        str(made.key("north")),
        "--listen",
        f":{port}",
    ]
    edge += ["--certs", str(made.root), "--state", str(tmp_path / "edge")]
    for command in (serve, edge):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "coterie", *command], capture_output=True, text=True, timeout=200)
        said = done.stderr.strip().splitlines()
        assert done.returncode == 2 and time.monotonic() - began < 60
        assert "server.crt expired on" in said[-1] and said[-1].endswith(f"coterie certs renew {made.root}")
        assert "Traceback" not in done.stderr

    with Paced(tmp_path, min_clients=2) as f:
        f.until_failed()
        certs.renew(f.certs("cloud").root, days=0)  # it expires while the cloud runs
        f.launch("device-1")
        f.until_failed(1)
        f.until(lambda: "expired" in f.log("device-1"), "the device does not say what is wrong")
        assert f.children["device-1"].alive and f.log("device-1").count("expired") == 1
        certs.renew(f.certs("cloud").root)
        f.until_failed()
        f.finish()
        same_as_replay(f, tmp_path / "replay")


def test_hosts_are_upgraded_one_after_the_other_and_another_protocol_is_refused(tmp_path: Path) -> None:
    with Paced(tmp_path, min_clients=2) as f:
        f.until_failed()
        f.children["device-1"].stop()
        f.upgraded["device-1"] = 0
        f.launch("device-1")
        f.until_failed()
        before = f.run
        f.children["cloud"].signal(15)
        assert f.children["cloud"].wait(60) == 130
        f.upgraded["cloud"] = 0
        f.launch("cloud")
        f.until_failed()
        assert f.run == before
        f.children["device-2"].stop()
        f.upgraded["device-2"] = 1
        f.launch("device-2")
        sentence = (
            f"the cloud speaks protocol {PROTOCOL} (Coterie 9.9.9), this host protocol {PROTOCOL + 1} (Coterie 9.9.9); "
            "both must have the same protocol"
        )
        f.until(lambda: f"device-2: {sentence}" in f.log("cloud"), "the cloud says nothing")
        assert sentence in f.log("device-2") and "Traceback" not in f.log("device-2")
        f.until_failed(2)
        assert f.reason(2) == f"device-2: {sentence}"
        del f.upgraded["device-2"]
        f.launch("device-2")
        f.until_failed()
        f.finish()
        same_as_replay(f, tmp_path / "replay")


@pytest.mark.parametrize("edges", [0, 2])
def test_fedpc_takes_no_absurd_numbers_of_labels(tmp_path: Path, edges: int) -> None:
    more = {"partition": "rotate(2)", "rounds": 12, "weighting": "samples"}
    f = Paced(tmp_path, "fedpc", 6, edges, min_clients=5, given=more, late=(1,))
    f.modes["device-1"] = "labels"
    with f:
        f.until(lambda: len(f.events()) > 1, "a round of the five honest clients")
        f.launch("device-1")
        f.until(lambda: "device-1 is client 1" in f.log("cloud"), "the liar's hello")
        f.finish()
        reasons = [e["reasons"]["1"] for e in f.events() if 1 in e["failed"]]
        found = [r for r in reasons if "is not connected" not in r]  # it may come late
        assert re.search(r"counts \d{10,} samples in x:counts, its sender has \d+$", found[0]), found
        assert "the upload has x:prototypes of shape" in found[1]
        assert re.search(r"payload of \d+ bytes is larger than the \d+ allowed", found[2]), found
        assert len(found) > 3 and all("it is in quarantine" in r for r in found[3:])  # after three refusals
        assert not any(set(e["failed"]) - {1} for e in f.events()[-5:])
        same_as_replay(f, tmp_path / "replay")
        assert all(v.abs().max() < 1e6 for v in load_file(f.model(0)).values())
