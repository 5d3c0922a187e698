"""A federation in real processes: the events of the simulation, and state that stays on the devices."""

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
from support import TESTS
from support.federations import SMALL, simulated
from support.hostile_device import HONEST, WRONGS
from support.replayed import same_as_replay


def same_bits(local: LocalFederation, run: Run) -> None:
    """Events, server and edges, and every personal model."""
    name = find(local.method).__name__
    assert (local.out / "events.jsonl").read_text() == (run.path / "events.jsonl").read_text()
    ours, theirs = checkpoint.newest(local.out, name), checkpoint.newest(run.path, name)
    assert codec.equal([ours.server, ours.edges, ours.bytes], [theirs.server, theirs.edges, theirs.bytes])
    for i, params in run.saved().personal_trees().items():
        model = load_file(local.model(i))
        assert model.keys() == params.keys()
        assert all(torch.equal(model[k], v) for k, v in params.items()), f"client {i}"


def played(
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
    local = played(tmp_path, "fedrep", 2, 0, 2, 120)
    assert local.status()["state"] == "ended" and local.status()["round"] == 2
    for i in range(2):  # each device has its own state, the cloud has none
        assert len(list(local.state(i).rglob("*.state"))) == 2
    assert not (local.out / "clients").exists()
    wire, ledger = local.status()["wire"]["device-cloud"], local.status()["ledger"]["device-cloud"]
    for way in ("up", "down"):
        assert wire[way]["payload"] >= ledger[way] and wire[way]["framing"] > 0


# ---- coterie run --runtime federation --------------------------------------------------------------------------------
@pytest.mark.long
def test_a_run_with_runtime_federation_goes_on_after_a_kill_to_the_events_of_a_local_one(tmp_path: Path) -> None:
    given = {**SMALL, "clients": 2, "rounds": 4, "eval_every": 2, "newcomers": 0}
    sets = [x for k, v in given.items() for x in ("--set", f"{k}={v}")]
    out = tmp_path / "flower"
    command = [sys.executable, "-m", "coterie", "run", "fedrep", "--runtime", "flower", "--out", str(out), *sets, "-q"]
    child = Child("run", command, tmp_path / "run.log", dict(os.environ)).start()
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/*.state")):
        assert child.alive and time.monotonic() < until, child.tail()
        time.sleep(0.05)
    child.kill()
    with pytest.raises(CoterieError, match="its client states are on its devices"):
        coterie.resume(out, runtime="local")
    resumed = [sys.executable, "-m", "coterie", "run", "--resume", str(out), "-q"]
    assert subprocess.run(resumed, timeout=180).returncode == 0
    simulated(tmp_path / "local", "fedrep", 2, {k: v for k, v in given.items() if k != "clients"})
    assert (out / "events.jsonl").read_text() == (tmp_path / "local/events.jsonl").read_text()
    assert not (out / "clients").exists() and (out / "federation/wire.jsonl").read_text().count("\n") == 4


def test_what_devices_cannot_name_is_refused(tmp_path: Path) -> None:
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
        ("sc-fpfl", 2, True, {"partition": "rotate(2)", "public": 40, "k0": 2, "isodata": "off", "seed": 1}),
        ("ecs-fl", 2, False, {"n_edges": 2}),  # its edges 0, 2 and 1, 3 are not where 0, 1 and 2, 3 are attached
    ],
)
def test_a_federation_has_the_events_of_the_simulation(
    tmp_path: Path, method: str, edges: int, merged: bool, more: dict[str, Any]
) -> None:
    local = played(tmp_path, method, 4, edges, 3, 300, **more)
    if edges:  # clusters that sit behind one edge are merged there, others pass through to the cloud
        wire = {link: ways["up"]["payload"] for link, ways in local.status()["wire"].items()}
        assert set(wire) == {"device-edge", "edge-cloud"}
        assert (wire["edge-cloud"] < 0.9 * wire["device-edge"]) is merged


@pytest.mark.long
def test_a_killed_cloud_goes_on_where_it_was_to_the_same_events(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": 5, "eval_every": 5}
    with LocalFederation(tmp_path / "federation", "fedrep", 2, 0, given, deadline=120) as local:
        local.wait(120, round=2)
        local.children["cloud"].kill()
        before = local.run
        local.launch("cloud")
        local.wait(240)
        assert local.run == before
    same_bits(local, simulated(tmp_path / "simulation", "fedrep", 2, given))


# ---- nodes and clouds that are not to be trusted -------------------------------------------------------------------
@pytest.mark.long
def test_wrong_answers_other_versions_and_claimed_roles_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": max(HONEST), "eval_every": max(HONEST), "final_trained": False}

    class Patient(LocalFederation):
        def arguments(self, name: str) -> list[str]:
            return [*super().arguments(name), *(["--quarantine-after", "0"] if name == "cloud" else [])]

    everybody = (0, 1, 2, 3, 4)
    f = Patient(tmp_path / "federation", "fedrep", 5, 0, given, deadline=60, min_clients=2, late=everybody)
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
    assert {3, 4} <= set(events[1]["failed"]) <= {0, 2, 3, 4}  # the last honest device may come after it;
    for t in WRONGS:  # from then on the quorum needs both
        assert set(events[t]["failed"]) == {1, 3, 4}, (t, events[t].get("reasons"))
    last = events[max(HONEST)]  # other samples than in its hello: it is greeted anew, and until then absent
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
    assert versions in f.children["device-3"].log.read_text()  # both sides say it; another package alone is no reason
    assert f.model(2).exists() and not f.model(3).exists()
    assert "device-4 is not in the run: it is registered as a device and answers like an edge" in log
    assert "device-2 is not in the run" not in log
    same_as_replay(f, tmp_path / "replay")


@pytest.mark.long
def test_a_device_runs_no_code_that_its_operator_did_not_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud names a module as model that writes down who imports it."""
    note = f"open({str(tmp_path / 'who')!r}, 'a').write(str(os.getpid()) + ' ')"
    (tmp_path / "strange_models.py").write_text(f"import os\nfrom coterie.testing import SmallNet\n{note}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    given = {**SMALL, "model": "strange_models:SmallNet", "rounds": 2}

    class Mixed(LocalFederation):
        def arguments(self, name: str) -> list[str]:
            made = super().arguments(name)
            return made[: made.index("--allow")] if name == "device-1" else made

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
def test_what_cloud_edge_and_devices_write_is_for_their_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        folder = tmp_path / "federation"
        made = [sys.executable, "-m", "coterie", "up", "fedrep", "--devices", "2", "--edges", "1", "--out", str(folder)]
        sets = [x for k, v in {**SMALL, "rounds": 1}.items() for x in ("--set", f"{k}={v}")]
        subprocess.run([*made, *sets, "--quiet"], check=True, timeout=120)
    finally:
        os.umask(old)
    found = {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o077 for p in folder.rglob("*")}
    assert {"run/events.jsonl", "run/timing.jsonl", "run/status.json", "run/wire.jsonl", "logs/device-0.log"} <= set(
        found
    )
    certificates = {name for name in found if name.endswith((".crt", ".pub"))}
    assert {name for name, others in found.items() if others} <= certificates
