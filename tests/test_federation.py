"""A federation in real processes: the same numbers as the simulation, and state that stays on the devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie import codec
from coterie.deploy.local import Local
from coterie.runs.models import personal_tree
from coterie.runs.run import Run

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
    ("method", "edges", "more"),
    [
        ("fedavg", 0, {"join": 0.5}),
        ("fedrep", 0, {}),
        ("fedgmh", 0, {}),
        ("fedpc", 2, {"partition": "rotate(2)"}),
        ("sc-fpfl", 2, {"partition": "rotate(2)", "public": 40}),
        ("ecs-fl", 2, {}),
    ],
)
def test_a_federation_has_the_numbers_of_the_simulation(
    tmp_path: Path, method: str, edges: int, more: dict[str, Any]
) -> None:
    local = played(tmp_path, method, 4, edges, 3, 300, **more)
    if edges:  # clusters that sit behind one edge are merged there, others pass through to the cloud
        wire = {link: ways["up"]["payload"] for link, ways in local.status()["wire"].items()}
        assert set(wire) == {"device-edge", "edge-cloud"} and wire["edge-cloud"] < wire["device-edge"]
