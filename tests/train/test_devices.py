"""Names of devices, refusals and precision, on the processor; tests/on_device has the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core.layers import leaves_of
from coterie.errors import CoterieError
from coterie.runtimes import workers
from coterie.train import devices
from coterie.train.devices import check_device, find_devices, forks_can_train, one_device
from support.families import FAMILIES, data
from support.families import model as family_model

SMALL: dict[str, Any] = {"rounds": 2, "clients": 4, "subset": 300, "epochs": 1, "workers": 1, "model": "mlp"}


def test_names_have_one_spelling() -> None:
    assert check_device(" cuda:0, cuda:1 ") == "cuda:0,cuda:1" and check_device("auto") == "auto"
    assert find_devices(None) == find_devices("cpu") == (torch.device("cpu"),)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta", "", "cpu,cuda", "cuda,,cuda"])
def test_a_name_that_pytorch_does_not_know_is_a_sentence(name: str) -> None:
    with pytest.raises(CoterieError, match="device") as e:
        coterie.run("fedavg", device=name)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "xpu", "mps"])
def test_a_device_that_is_not_there_is_a_sentence_before_any_work(name: str, tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CoterieError, match=f"this machine has no {name[:3]}") as e:
        coterie.run("fedavg", out=tmp_path / "run", device=name, **SMALL)
    assert "\n" not in str(e.value) and not (tmp_path / "run").exists()


def test_a_client_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_find", lambda name, text: torch.device(name))
    assert one_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(CoterieError, match="a client trains on one device"):
        one_device("cuda:0,cuda:1")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_tells_what_a_gradient_reaches(family: str) -> None:
    kind, _, _ = FAMILIES[family]
    module = family_model(family).eval()
    out = module(data(kind).ready(torch.arange(2)))
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(out.sum(), parameters, allow_unused=True)
    assert leaves_of(out) & {id(p) for p in parameters} == {
        id(p) for p, g in zip(parameters, gradients, strict=True) if g is not None
    }


def test_a_process_whose_forks_cannot_train_runs_alone_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert forks_can_train()
    monkeypatch.setattr(workers, "forks_can_train", lambda: False)
    alone = coterie.run("fedavg", out=tmp_path / "alone", **{**SMALL, "workers": 2})
    assert any("continues in one process" in m for m in caplog.messages)
    monkeypatch.undo()
    assert alone.events == coterie.run("fedavg", out=tmp_path / "two", **{**SMALL, "workers": 2}).events


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_bf16_changes_operations_and_not_what_is_sent(engine: str, tmp_path: Path) -> None:
    more = {**SMALL, "rounds": 6, "lr": 0.1, "engine": engine}
    full, half = (coterie.run("fedper", out=tmp_path / p, precision=p, **more) for p in ("float32", "bf16"))
    a, b = (run.events[-1] for run in (full, half))
    assert a["bytes"] == b["bytes"] and a["loss"] != b["loss"]
    assert b["loss"] == pytest.approx(a["loss"], rel=0.05)
    assert all(v.dtype == torch.float32 for v in half.personal(0).state_dict().values() if v.is_floating_point())
