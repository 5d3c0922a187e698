"""A plan may name installed methods and models; other code only if the operator of the host allowed it."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coterie import parts
from coterie.config import RunSettings
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.runtimes.flower import permits
from coterie.runtimes.flower.plan import source
from coterie.runtimes.flower.protocol import PROTOCOL

RUN = "0123456789abcdef" * 2


def chosen(**more: Any) -> RunSettings:
    return RunSettings(**{"method": "fedrep", "model": "mlp", **more})


@pytest.mark.parametrize("model", [None, "mlp", "lenet5", "my-model"])
def test_names_are_allowed(model: str | None) -> None:
    permits.check(chosen(model=model, model_options={"width": 8, "widths": [8, 8.5, None, True], "act": "relu"}))


@pytest.mark.parametrize("model", ["subprocess:check_output", "torch.hub:load", "os:system", "mine.models:Net"])
def test_code_is_refused_unless_it_was_allowed(model: str) -> None:
    module = model.partition(":")[0]
    for allow in ((), ("mine:Net",), (f"{module}:other",), (f"{module}.more:*",), (f"x{model}",)):
        with pytest.raises(CoterieError, match=f'the code "{model}" as its model, which this host does not allow'):
            permits.check(chosen(model=model), allow)
    permits.check(chosen(model=model), (model,))
    permits.check(chosen(model=model), (f"{module}:*",))


@pytest.mark.parametrize("model", ["", "a b", "../x", ":load", "torch.hub:", "a:b:c", "x" * 300, "torch.hub:*"])
def test_other_models_are_refused_even_if_somebody_allowed_much(model: str) -> None:
    with pytest.raises(CoterieError, match="neither a name nor"):
        permits.check(chosen(model=model), ("torch.hub:*",))


@pytest.mark.parametrize("method", ["subprocess:check_output", "coterie.methods.fedrep:FedRep", "a.b", "", "x" * 300])
def test_a_method_is_a_name(method: str) -> None:
    with pytest.raises(CoterieError, match="is not the name of an installed method"):
        permits.check(chosen(method=method), ("subprocess:*",))


@pytest.mark.parametrize("options", [{"a": {}}, {"a": [[1]]}, {"a": "x" * 999}, {"a": [1] * 999}, {"a b": 1}, {"": 1}])
def test_options_of_a_model_are_plain(options: dict[str, Any]) -> None:
    with pytest.raises(CoterieError, match="is no plain value"):
        permits.check(chosen(model_options=options))


@pytest.mark.parametrize("path", ["torch", "torch:", ":x", "*:*", "a.*:b", "a:b*", "a b:c", ""])
def test_what_cannot_be_allowed_is_a_sentence(path: str) -> None:
    with pytest.raises(CoterieError, match="allow-module"):
        permits.allowed([path])
    assert permits.allowed(["a.b:c", "a:*"]) == ("a.b:c", "a:*")


# ---- a real plan, on a device and on an edge -----------------------------------------------------------------------
def hostile(tmp_path: Path, model: str) -> str:
    """What a hostile cloud sends: a valid plan whose model would leave a file behind."""
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "hubconf.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\ndef m(**more): pass\n")
    options: dict[str, Any] = {"args": ["touch", str(tmp_path / "marker")]}
    if model == "torch.hub:load":
        options = {"repo_or_dir": str(hub), "model": "m", "source": "local", "trust_repo": True}
    settings = chosen(model=model, model_options=options).model_dump(mode="json")
    about = {
        "protocol": PROTOCOL,
        "run": RUN,
        "coterie": "0",
        "source": "x",
        "settings": settings,
        "places": 2,
        "w0": "x",
    }
    data = {"partition": None, "shape": [1, 4, 4], "task": "classes", "targets": 1, "classes": ["0", "1", "2"],
            "kind": "float32"}  # fmt: skip
    return json.dumps({**about, **data, "vocab": None, "mean": None, "std": None})


@pytest.mark.parametrize("model", ["subprocess:check_output", "torch.hub:load"])
def test_a_cloud_cannot_run_code_on_a_device_or_an_edge(tmp_path: Path, model: str) -> None:
    pytest.importorskip("flwr", reason="a federation needs the extra flower")
    import numpy as np

    from coterie.runtimes.flower.device import DeviceHandler
    from coterie.runtimes.flower.edge import EdgeHandler

    plan = hostile(tmp_path, model)
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((9, 4, 4), np.uint8), y_train=np.arange(9) % 3)
    device = DeviceHandler(str(tmp_path / "mine.npz"), tmp_path / "state")
    for hello in (device.hello, EdgeHandler(None).hello):  # type: ignore[arg-type]  # it is not asked for its nodes
        with pytest.raises(CoterieError, match=f'the code "{model}" as its model, which this host does not allow'):
            hello(plan)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "state" / RUN).exists()  # nor is the plan kept


def test_the_digest_of_a_method_covers_its_folder_and_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "digested"
    package.mkdir()
    code = "from coterie import Method\nfrom digested.votes import N\nclass M(Method):\n    n = N\n"
    (package / "__init__.py").write_text(code)
    (package / "votes.py").write_text("N = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    method = importlib.import_module("digested").M
    before = source(method)
    assert source(method) == before != source(find("fedavg"))
    (package / "votes.py").write_text("N = 2\n")
    assert source(method) != before


def test_the_digest_of_a_method_has_the_parts_that_it_imports_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "coterie" / "parts"
    shutil.copytree(Path(parts.__file__).parent, folder)
    monkeypatch.setattr(parts, "__file__", str(folder / "__init__.py"))
    before = {name: source(find(name)) for name in ("fedavg", "fedproto", "fedcpmd")}
    with (folder / "prototypes.py").open("a") as f:
        f.write("# another version\n")
    changed = {name for name, was in before.items() if source(find(name)) != was}
    assert changed == {"fedproto"}
