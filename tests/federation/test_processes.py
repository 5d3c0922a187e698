"""Federations in real processes have the events of the simulation, and their states stay on the devices."""

import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch
from safetensors.torch import load_file

import coterie
from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.federation.localhost import processes
from coterie.federation.localhost.processes import Child
from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.protocol.version import PROTOCOL
from coterie.methods import find
from coterie.results.run import Run
from coterie.storage import checkpoint
from coterie.storage.atomic import read_json, write_json
from support import TESTS
from support.federations import SMALL, simulated
from support.hostile_device import HONEST, WRONGS
from support.replayed import same_as_replay


def same_bits(local: LocalFederation, run: Run) -> None:
    """Assert that events, states of server and edges, and personal models are those of a simulation."""
    name = find(local.method).__name__
    assert (local.out / "events.jsonl").read_text() == (run.path / "events.jsonl").read_text()
    federation, simulation = checkpoint.newest(local.out, name), checkpoint.newest(run.path, name)
    assert codec.equal(
        [federation.server, federation.edges, federation.bytes], [simulation.server, simulation.edges, simulation.bytes]
    )
    for i, params in run.saved().personal_trees().items():
        model = load_file(local.model(i))
        assert model.keys() == params.keys()
        assert all(torch.equal(model[k], v) for k, v in params.items()), f"client {i}"


def run_federation(
    tmp_path: Path, method: str, devices: int, edges: int, rounds: int, seconds: float, **more: Any
) -> LocalFederation:
    given = {**SMALL, "rounds": rounds, "eval_every": rounds, **more}
    folder = tmp_path / "federation"
    with LocalFederation(folder, method, devices, edges, given, deadline=seconds) as local:
        local.wait(seconds)
    assert not any(child.alive for child in local.children.values())
    same_bits(local, simulated(tmp_path / "simulation", method, devices, given))
    return local


def test_fedrep_on_two_devices_has_the_events_of_the_simulation(tmp_path: Path) -> None:
    local = run_federation(tmp_path, "fedrep", 2, 0, 2, 120)
    assert local.status()["state"] == "ended" and local.status()["round"] == 2
    for i in range(2):  # the states are on the devices, and not in the cloud
        assert len(list(local.state(i).rglob("*.state"))) == 2
    assert not (local.out / "clients").exists()
    wire, ledger = local.status()["wire"]["device-cloud"], local.status()["ledger"]["device-cloud"]
    for way in ("up", "down"):
        assert wire[way]["payload"] >= ledger[way] and wire[way]["framing"] > 0


# ---- coterie run --runtime federation --------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_a_killed_run_with_runtime_federation_resumes_to_the_events_of_a_local_run(
    tmp_path: Path, version: str
) -> None:
    """Version 0.1 called the runtime and its folder flower."""
    given = {**SMALL, "clients": 2, "rounds": 4, "eval_every": 2, "newcomers": 0}
    sets = [x for k, v in given.items() for x in ("--set", f"{k}={v}")]
    out, home = tmp_path / "run", "flower" if version == "0.1" else "federation"
    command = [sys.executable, "-m", "coterie", "run", "fedrep", "--runtime", home, "--out", str(out), *sets, "-q"]
    child = Child("run", command, tmp_path / "run.log", dict(os.environ)).start()
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/*.state")):
        assert child.alive and time.monotonic() < until, child.tail()
        time.sleep(0.05)
    child.kill()
    if version == "0.1":
        (out / "federation").rename(out / "flower")
        settings = read_json(out / "settings.json")
        write_json(out / "settings.json", {**settings, "engine": {**settings["engine"], "runtime": "flower"}})
    with pytest.raises(CoterieError, match="its client states are on its devices"):
        coterie.resume(out, runtime="local")
    resumed = [sys.executable, "-m", "coterie", "run", "--resume", str(out), "-q"]
    assert subprocess.run(resumed, timeout=180).returncode == 0
    simulated(tmp_path / "local", "fedrep", 2, {k: v for k, v in given.items() if k != "clients"})
    assert (out / "events.jsonl").read_text() == (tmp_path / "local/events.jsonl").read_text()
    assert not (out / "clients").exists() and (out / home / "wire.jsonl").read_text().count("\n") == 4


def test_objects_that_devices_cannot_import_are_refused(tmp_path: Path) -> None:
    from coterie.testing import SmallNet, small_data

    for what, data, model in (("data", small_data(), "mlp"), ("model", "digits", SmallNet)):
        with pytest.raises(CoterieError, match=f"device processes must find the {what} by name"):
            coterie.run("fedavg", data, model, runtime="federation", out=tmp_path / what, clients=2, rounds=1)
    with pytest.raises(CoterieError, match="needs many clients in one process"):
        coterie.run("fedavg", runtime="federation", engine="stack", out=tmp_path / "stack", clients=2, rounds=1)


# ---- between hosts -------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "edges", "merged", "more"),
    [
        ("fedavg", 0, False, {"join": 0.5}),
        ("cd2-pfed", 0, False, {}),
        ("fedpc", 2, True, {"partition": "rotate(2)"}),
        ("sc-fpfl", 2, True, {"partition": "rotate(2)", "public": 40, "k0": 2, "seed": 1}),
        (
            "ecs-fl",
            2,
            False,
            {"n_edges": 2},
        ),  # the method's edges have clients 0, 2 and 1, 3; the processes have 0, 1 and 2, 3
    ],
)
def test_a_federation_has_the_events_of_the_simulation(
    tmp_path: Path, method: str, edges: int, merged: bool, more: dict[str, Any]
) -> None:
    local = run_federation(tmp_path, method, 4, edges, 3, 300, **more)
    if edges:  # a cluster behind one edge is merged there, others are merged in the cloud
        wire = {link: ways["up"]["payload"] for link, ways in local.status()["wire"].items()}
        assert set(wire) == {"device-edge", "edge-cloud"}
        assert (wire["edge-cloud"] < 0.9 * wire["device-edge"]) is merged


@pytest.mark.long
def test_a_killed_cloud_resumes_to_the_same_events(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": 5, "eval_every": 5}
    with LocalFederation(tmp_path / "federation", "fedrep", 2, 0, given, deadline=120) as local:
        local.wait(120, round=2)
        local.children["cloud"].kill()
        before = local.run
        local.launch("cloud")
        local.wait(240)
        assert local.run == before
    same_bits(local, simulated(tmp_path / "simulation", "fedrep", 2, given))


# ---- hostile nodes and clouds --------------------------------------------------------------------------------------
@pytest.mark.long
def test_wrong_answers_protocols_and_roles_are_refused_while_other_devices_continue(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": max(HONEST), "eval_every": max(HONEST), "final_trained": False}

    class WithoutQuarantine(LocalFederation):
        def arguments(self, name: str) -> list[str]:
            return [*super().arguments(name), *(["--quarantine-after", "0"] if name == "cloud" else [])]

    f = WithoutQuarantine(
        tmp_path / "federation", "fedrep", 5, 0, given, deadline=60, min_clients=2, late=tuple(range(5))
    )
    with f:
        for i, mode in ((1, "wrong"), (2, "package"), (3, "protocol"), (4, "hijack")):
            argv = [
                sys.executable,
                str(TESTS / "support" / "hostile_device.py"),
                mode,
                *f.arguments(f"device-{i}")[1:],
            ]
            env = processes.bound({**os.environ, "OMP_NUM_THREADS": "1"})
            f.children[f"device-{i}"] = Child(f"device-{i}", argv, f.folder / "logs" / f"device-{i}.log", env).start()
            until = time.monotonic() + 120
            while mode == "wrong" and "device-1 is client 1" not in f.children["cloud"].tail(50):
                assert time.monotonic() < until, f.children["cloud"].tail()
                time.sleep(0.1)
        f.launch("device-0")
        f.wait(300)
        log = f.children["cloud"].log.read_text()
    events = {e["round"]: e for e in f.events()}
    assert sorted(events) == list(range(1, max(HONEST) + 1))
    assert {3, 4} <= set(events[1]["failed"]) <= {0, 2, 3, 4}  # the last honest device may come later
    for t in WRONGS:  # the quorum needs both honest devices
        assert set(events[t]["failed"]) == {1, 3, 4}, (t, events[t].get("reasons"))
    last = events[max(HONEST)]  # device-1 gets another hello after its wrong number of samples, and is absent before
    assert last["reasons"].pop("1", "device-1 is not connected") == "device-1 is not connected"
    assert set(last["failed"]) - {1} == {3, 4}, last["reasons"]
    for t, (what, words) in WRONGS.items():
        reason = events[t]["reasons"]["1"]
        assert re.search(words, reason), (what, reason)
        assert f"round {t}: device-1: {reason.removeprefix('device-1: ')}" in log
        assert any("device-1" in line and words in line for line in f.status()["errors"]), what
    versions = (
        f"the cloud speaks protocol {PROTOCOL} (Coterie {version('coterie')}), this host protocol 99 (Coterie 9.9.9)"
    )
    assert f"device-3 is not in the run: {versions}; both must have the same protocol" in log
    assert versions in f.children["device-3"].log.read_text()  # a different package version alone is accepted
    assert f.model(2).exists() and not f.model(3).exists()
    assert "device-4 is not in the run: it is registered as a device and answers like an edge" in log
    assert "device-2 is not in the run" not in log
    same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_a_device_does_not_run_code_that_its_operator_did_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud names a model in a module that records the processes which import it."""
    note = f"open({str(tmp_path / 'who')!r}, 'a').write(str(os.getpid()) + ' ')"
    (tmp_path / "strange_models.py").write_text(f"import os\nfrom coterie.testing import SmallNet\n{note}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    given = {**SMALL, "model": "strange_models:SmallNet", "rounds": 2}

    class Mixed(LocalFederation):
        def arguments(self, name: str) -> list[str]:
            arguments = super().arguments(name)
            return arguments[: arguments.index("--allow")] if name == "device-1" else arguments

    refusal = 'the code "strange_models:SmallNet" as its model, which this host does not allow'
    with Mixed(tmp_path / "federation", "fedavg", 2, 0, given, deadline=60, min_clients=1, late=(0,)) as f:
        device, until = f.children["device-1"], time.monotonic() + 120
        while refusal not in device.log.read_text():
            assert time.monotonic() < until, device.tail()
            time.sleep(0.1)
        f.launch("device-0")
        f.wait(120)
        pids = {name: child.pid for name, child in f.children.items()}
    ran = {int(pid) for pid in (tmp_path / "who").read_text().split()}
    assert {pids["cloud"], pids["device-0"]} <= ran and pids["device-1"] not in ran
    assert all(e["failed"] == [1] for e in f.events())


@pytest.mark.long
def test_files_of_cloud_edges_and_devices_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        folder = tmp_path / "federation"
        command = [
            sys.executable,
            "-m",
            "coterie",
            "up",
            "fedrep",
            "--devices",
            "2",
            "--edges",
            "1",
            "--out",
            str(folder),
        ]
        sets = [x for k, v in {**SMALL, "rounds": 1}.items() for x in ("--set", f"{k}={v}")]
        subprocess.run([*command, *sets, "--quiet"], check=True, timeout=120)
    finally:
        os.umask(old)
    permissions = {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o077 for p in folder.rglob("*")}
    assert {"run/events.jsonl", "run/timing.jsonl", "run/status.json", "run/wire.jsonl", "logs/device-0.log"} <= set(
        permissions
    )
    certificates = {name for name in permissions if name.endswith((".crt", ".pub"))}
    assert {name for name, others in permissions.items() if others} <= certificates
