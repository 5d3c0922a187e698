"""Personal models as ordinary modules, written to files and loaded by the code that export prints."""

import pytest
import torch

import coterie
from coterie import testing
from coterie.errors import CoterieError
from support.own_objects import OwnNet, own_data

FEW = {"clients": 4, "rounds": 2, "epochs": 1, "join": 1.0, "partition": "iid", "workers": 1, "eval_every": 2}


def accuracy(module, run, client):
    x, y = run.session().federation.test(client)
    return float((module(x).argmax(1) == y).float().mean())


PLAIN, ADAPTED = ["fedavg", "fedcpmd"], ["fedbabu", "per-fedavg"]
COMPOSED = ["apfl", "fedrod", "fedcp", "gpfl", "fedproto"]


@pytest.mark.parametrize("method", [*PLAIN, *ADAPTED, *COMPOSED])
def test_the_printed_code_loads_the_file_just_written(method, tmp_path):
    run = coterie.run(method, testing.small_data(200), "mlp-bn", out=tmp_path / "r", **FEW)
    path = tmp_path / "one.safetensors"
    names: dict[str, object] = {}
    exec(run.export(1, path), names)
    module, own = names["model"].network, run.personal(1)
    state = own.state_dict()
    assert state and all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert module.state_dict().keys() == state.keys() and list(own.parameters())
    x, _ = run.session().federation.test(1)
    assert torch.allclose(module(x), own(x), atol=1e-6)
    view = "adapted/test" if method in ADAPTED else "personal/test"
    assert accuracy(module, run, 1) == pytest.approx(run.clients().loc[1, view])


def test_a_plain_file_loads_into_a_new_module_of_the_user(tmp_path):
    from safetensors.torch import load_file

    run = coterie.run("fedper", own_data, OwnNet, out=tmp_path / "r", **FEW)
    path = tmp_path / "one.safetensors"
    code = run.export(2, path)
    assert "model=OwnNet" in code
    fresh = OwnNet(3)
    fresh.load_state_dict(load_file(path))  # strict: counters and frozen tensors are included
    x, _ = run.session().federation.test(2)
    assert torch.equal(fresh.eval()(x), run.personal(2)(x))
    allowed = coterie.load_model(path, allow_module=["support.own_objects:OwnNet"])
    assert torch.equal(allowed(x), fresh(x))  # imported by its name
    with pytest.raises(
        CoterieError,
        match=r'names the code "support\.own_objects:OwnNet" as its model, which is imported only with your permission',
    ):
        coterie.load_model(path, allow_module=["support.own_objects:DeviceFederation", "own:*"])
    assert torch.equal(coterie.load_model(path, model=OwnNet)(x), fresh(x))


def test_a_composed_model_can_be_trained_further(tmp_path):
    run = coterie.run("fedrod", own_data, OwnNet, out=tmp_path / "r", **FEW)
    module = run.personal(0)
    assert "frozen.stem.weight" in module.state_dict()
    x, y = run.session().federation.test(0)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_files_and_models_that_do_not_fit_are_refused(tmp_path):
    run = coterie.run("fedper", own_data, OwnNet, out=tmp_path / "r", **FEW)
    path = tmp_path / "one.safetensors"
    run.export(0, path)
    with pytest.raises(CoterieError, match="the model does not fit"):
        coterie.load_model(path, model=lambda classes: torch.nn.Linear(6, classes))
    (tmp_path / "bad").write_bytes(b"no such file")
    with pytest.raises(CoterieError, match="cannot be read as a personal model"):
        coterie.load_model(tmp_path / "bad")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(CoterieError, match="not written by"):
        coterie.load_model(tmp_path / "other")
