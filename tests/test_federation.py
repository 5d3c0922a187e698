"""A federation in real processes: the same numbers as the simulation, and state that stays on the devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie import codec
from coterie.runs.models import personal_tree
from coterie.runs.run import Run
from coterie.runtimes.flower.local import Local

SMALL = {"data": "digits", "subset": 600, "model": "mlp", "partition": "dirichlet(0.5)", "epochs": 1, "join": 1.0}


def simulated(folder: Path, method: str, clients: int, given: dict[str, Any]) -> Run:
    more = dict(given)
    return coterie.run(method, more.pop("data"), more.pop("model"), out=folder, workers=1, clients=clients, **more)


def same_numbers(local: Local, run: Run, devices: int) -> None:
    """Server state, every personal model and every score."""
    ours = codec.load(sorted((local.out / "checkpoints").glob("*.safetensors"))[-1])
    theirs = codec.load(sorted((run.path / "checkpoints").glob("*.safetensors"))[-1])
    (shape_a, a), (shape_b, b) = codec.split(ours["server"]), codec.split(theirs["server"])
    assert shape_a == shape_b
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
    for i in range(devices):
        _, params, _ = personal_tree(run, i)
        model = load_file(local.model(i))
        assert model.keys() == params.keys()
        for k, v in params.items():
            torch.testing.assert_close(model[k], v, atol=1e-6, rtol=0, msg=f"client {i}, {k}")
    there = run.evaluation()
    with np.load(sorted((local.out / "eval").glob("*.npz"))[-1]) as here:
        assert set(here.files) == set(there)
        for k in there:
            np.testing.assert_allclose(here[k], there[k], atol=1e-4, rtol=1e-6)
    for e, f in zip(local.events(), run.events, strict=True):
        assert (e["participants"], e["failed"], e["bytes"]) == (f["participants"], f["failed"], f["bytes"])


def played(tmp_path: Path, method: str, devices: int, edges: int, rounds: int, seconds: float, **more: Any) -> Local:
    pytest.importorskip("flwr", reason="a federation needs the extra flower")
    given = {**SMALL, "rounds": rounds, "eval_every": rounds, **more}
    with Local(tmp_path / "federation", method, devices, edges, given, deadline=seconds) as local:
        local.wait(seconds)
    assert not any(child.alive for child in local.children.values())
    same_numbers(local, simulated(tmp_path / "simulation", method, devices, given), devices)
    return local


def test_fedrep_on_two_devices_has_the_numbers_of_the_simulation(tmp_path: Path) -> None:
    local = played(tmp_path, "fedrep", 2, 0, 2, 120)
    assert local.status()["state"] == "ended"
    for i in range(2):  # each device has its own state, the cloud has none
        assert len(list(local.state(i).rglob("state-*.safetensors"))) == 2
    assert not (local.out / "clients").exists()
    wire, ledger = local.status()["wire"]["device-cloud"], local.status()["ledger"]["device-cloud"]
    for way in ("up", "down"):
        assert wire[way]["payload"] >= ledger[way] and wire[way]["framing"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "edges", "merged", "more"),
    [
        ("fedavg", 0, False, {"join": 0.5}),
        ("fedrep", 0, False, {}),
        ("fedgmh", 0, False, {}),
        ("fedpc", 2, True, {"partition": "rotate(2)"}),
        ("sc-fpfl", 2, True, {"partition": "rotate(2)", "public": 40, "k0": 2, "isodata": "off", "seed": 1}),
        ("ecs-fl", 2, False, {"n_edges": 2}),  # its edges 0, 2 and 1, 3 are not where 0, 1 and 2, 3 are attached
    ],
)
def test_a_federation_has_the_numbers_of_the_simulation(
    tmp_path: Path, method: str, edges: int, merged: bool, more: dict[str, Any]
) -> None:
    local = played(tmp_path, method, 4, edges, 3, 300, **more)
    if edges:  # clusters that sit behind one edge are merged there, others pass through to the cloud
        wire = {link: ways["up"]["payload"] for link, ways in local.status()["wire"].items()}
        assert set(wire) == {"device-edge", "edge-cloud"}
        assert (wire["edge-cloud"] < 0.9 * wire["device-edge"]) is merged


@pytest.mark.long
def test_a_killed_cloud_goes_on_where_it_was_to_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="a federation needs the extra flower")
    given = {**SMALL, "rounds": 5, "eval_every": 5}
    with Local(tmp_path / "federation", "fedrep", 2, 0, given, deadline=120) as local:
        local.wait(120, round=2)
        local.children["cloud"].kill()
        before = local.run
        local.launch("cloud")
        local.wait(240)
        assert local.run == before
    same_numbers(local, simulated(tmp_path / "simulation", "fedrep", 2, given), 2)


@pytest.mark.long
def test_a_device_that_comes_later_takes_its_place_and_a_newcomer_gets_a_model(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="a federation needs the extra flower")
    given = {**SMALL, "rounds": 8, "eval_every": 1, "newcomers": 1}
    with Local(
        tmp_path, "fedrep", 4, 0, given, deadline=120, min_clients=2, late=(2, 3)
    ) as local:  # device-3 is the newcomer
        local.wait(120, round=2)
        assert local.events()[-1]["failed"] == [2] and not local.model(3).exists()
        local.launch("device-2")
        local.launch("device-3")
        local.wait(240)
    last = local.events()[-1]
    assert last["participants"] == [0, 1, 2] and last["failed"] == []
    assert last["eval"]["personal/test"]["clients"] == 3 and last["eval"]["newcomers/personal/test"]["clients"] == 1
    assert local.model(3).exists()
