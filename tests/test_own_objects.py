"""Runs made with a user's own method, data and model: found again, refused when changed; extended and warm-started."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.engine import provenance as origins
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.storage import atomic as disk
from support.own_objects import OwnMethod, OwnNet, no_data, own_data

FEW = {"clients": 4, "rounds": 2, "epochs": 1, "join": 1.0, "partition": "iid", "workers": 1, "eval_every": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a run with an own method, own data and an own model."""
    out = tmp_path_factory.mktemp("own") / "run"
    return coterie.run(OwnMethod, own_data, OwnNet, out=out, **FEW)


def test_own_objects_are_found_by_their_names(made):
    assert made.description["objects"] == {
        "method": "support.own_objects:OwnMethod",
        "data": "support.own_objects:own_data",
        "model": "support.own_objects:OwnNet",
    }
    again = coterie.open_run(made.path)
    same = zip(again.personal(1).state_dict().items(), made.personal(1).state_dict().items(), strict=True)
    assert all(k == j and torch.equal(a, b) for (k, a), (j, b) in same)


def test_objects_that_are_passed_are_used(made):
    found = coterie.open_run(made.path, method=OwnMethod, data=own_data(), model=OwnNet)
    assert isinstance(found.personal(0), OwnNet)


def changed(cls):
    """Return a class of the same name with different code."""
    exec_globals = {"nn": nn, "F": torch.nn.functional, "torch": torch, "Base": cls}
    exec("class Other(Base):\n def forward(self, x):\n  return super().forward(x) * 2\n", exec_globals)
    other = exec_globals["Other"]
    other.__module__, other.__qualname__, other.__name__ = cls.__module__, cls.__qualname__, cls.__name__
    return other


def test_changed_code_is_refused(made):
    with pytest.raises(CoterieError, match=r"the code of the model support\.own_objects:OwnNet has changed"):
        coterie.open_run(made.path, model=changed(OwnNet)).personal(0)


def test_different_data_are_refused(made):
    data = own_data()
    with pytest.raises(CoterieError, match=r"the data of .* have changed"):
        coterie.open_run(made.path, data=replace(data, x=data.x + 1)).personal(0)


def test_a_class_of_a_different_name_is_refused(made):
    with pytest.raises(CoterieError, match="made with a model of your own"):
        coterie.open_run(made.path, model=nn.Linear).personal(0)


def test_an_object_that_cannot_be_imported_must_be_passed(tmp_path):
    class Inside(OwnNet):
        pass

    run = coterie.run("fedavg", own_data(), Inside, out=tmp_path / "r", **FEW)
    with pytest.raises(CoterieError, match=r"made with a (data|model) of your own \(.*\); pass the same (data|model)"):
        coterie.open_run(run.path).personal(0)
    assert isinstance(coterie.open_run(run.path, data=own_data(), model=Inside).personal(0), Inside)


def test_a_model_with_different_initial_values_is_refused(tmp_path):
    torch.manual_seed(1)
    mine = OwnNet(3)
    run = coterie.run("fedavg", own_data, mine, out=tmp_path / "r", **FEW)
    assert run.description["built"] == ["model"]
    coterie.open_run(run.path, model=mine).personal(0)
    with pytest.raises(CoterieError, match="initial values differ"):
        coterie.open_run(run.path, model=OwnNet(3)).personal(0)


@pytest.mark.parametrize(
    ("data", "says"), [(no_data, "returned int; it must return a Dataset"), (lambda: 1 / 0, "ZeroDivision")]
)
def test_a_data_function_that_returns_no_data_is_refused(data, says):
    with pytest.raises(CoterieError, match=says):
        coterie.run("fedavg", data, **FEW)


@pytest.mark.parametrize("method", ["fedrep", OwnMethod])
def test_a_run_whose_method_has_changed_is_refused(method, tmp_path, monkeypatch):
    run = coterie.run(method, own_data, OwnNet, out=tmp_path / "r", **FEW)
    assert coterie.open_run(run.path).personal(0) is not None
    changed = (find(method) if isinstance(method, str) else method).__module__
    read = origins._read_module

    def edited(name):
        module = read(name)
        return (f"{module[0]}\nX = 1\n", module[1]) if name == changed else module

    monkeypatch.setattr(origins, "_read_module", edited)
    for use in (lambda: coterie.resume(run.path, rounds=4), lambda: coterie.open_run(run.path).personal(0)):
        with pytest.raises(CoterieError, match=r"the code of the method .* has changed since .* was made"):
            use()
    settings = run.path / "settings.json"
    content = disk.read_json(settings)
    disk.write_json(settings, {**content, "digests": {}})  # version 0.1 wrote no digests of built-in methods
    assert coterie.open_run(run.path).session().method


def test_digests_distinguish_code_and_ignore_pytorch():
    assert origins.code_digest(OwnNet) == origins.code_digest(OwnNet) != origins.code_digest(OwnMethod)
    assert origins.code_digest(nn.Linear(2, 3)) == origins.code_digest(nn.ReLU())
    assert origins.recalled("support.own_objects:OwnNet") is OwnNet
    assert origins.recalled("support.own_objects:Nothing") is None is origins.recalled("__main__:X")


# ---- more rounds -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_an_extended_run_is_the_longer_run_to_the_bit(method, tmp_path):
    few = {**FEW, "clients": 3, "join": 0.6, "final_trained": False}
    short = coterie.run(method, own_data, OwnNet, out=tmp_path / "short", **few)
    longer = coterie.resume(short.path, rounds=4)
    whole = coterie.run(method, own_data, OwnNet, out=tmp_path / "whole", **{**few, "rounds": 4})
    assert longer.finished and longer.last_round == 4 and longer.settings["rounds"] == 4
    for i in range(3):
        a, b = (r.personal(i).state_dict() for r in (longer, whole))
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert longer.curve().iloc[-1] == whole.curve().iloc[-1]
    assert coterie.open_run(short.path).settings["rounds"] == 4
    with pytest.raises(CoterieError, match="has 4 rounds; rounds = 3 must be more"):
        coterie.resume(short.path, rounds=3)


def test_a_method_that_plans_ahead_keeps_its_plan_and_warns(tmp_path, caplog):
    run = coterie.run("pfedsim", own_data, OwnNet, out=tmp_path / "r", **FEW)
    longer = coterie.resume(run.path, rounds=4)
    assert longer.last_round == 4 and longer.session().method.ctx.planned_rounds == 2
    assert "pFedSim plans by the number of rounds: it keeps its plan for 2 rounds" in caplog.text


# ---- warm start ------------------------------------------------------------------------------------------------------
def test_a_run_starts_from_another_runs_global_model(made, tmp_path):
    first = coterie.run("fedavg", own_data, OwnNet, out=tmp_path / "first", **FEW)
    warm = coterie.run("fedper", own_data, OwnNet, out=tmp_path / "warm", warm_start=str(first.path), **FEW)
    want = first.saved().checkpoint.server["w"]
    w0 = warm.session().method.ctx.w0
    assert all(torch.equal(w0[k], want[k]) for k in w0)
    shutil.rmtree(first.path)  # the new run has a copy of the models
    again = coterie.open_run(warm.path)
    assert all(torch.equal(again.session().method.ctx.w0[k], want[k]) for k in w0)
    assert coterie.resume(warm.path, rounds=3).last_round == 3


def test_without_a_global_model_a_warm_start_takes_the_mean_of_the_personal_models(made, tmp_path):
    trees = list(made.saved().personal_trees().values())
    mean = made.saved().mean_model()
    assert all(torch.allclose(mean[k], torch.stack([t[k] for t in trees]).mean(0), atol=1e-6) for k in mean)


def test_a_warm_start_refuses_models_that_do_not_fit(made, tmp_path):
    with pytest.raises(CoterieError, match=r"do not fit this run: .* there and .* here"):
        coterie.run("fedavg", own_data, "mlp", out=tmp_path / "r", warm_start=str(made.path), **FEW)
    with pytest.raises(CoterieError, match="holds no run"):
        coterie.run("fedavg", own_data, OwnNet, out=tmp_path / "r", warm_start=str(tmp_path / "nothing"), **FEW)
