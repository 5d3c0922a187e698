"""Clients with different models: the same run on any number of workers, export of each client's own, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie.config import Engine, settings
from coterie.engine import codec
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.federation.policy.allow import Allow
from coterie.models.per_client import PerClient, assign_models
from coterie.testing import close_loop, decided, open_loop
from coterie.train.engine_choice import choose_engine
from support.in_process_link import federation, simulated

MIXED = "0-1=mlp,2-4=mlp-bn"
SAME_WIDTH = {"mlp": (32,), "mlp-bn": (64, 32)}


def session(method: str, model: str = MIXED, **more: Any) -> Any:
    given = {"clients": 5, "rounds": 2, "epochs": 1, "public": 20, "eval_every": 2, "partition": "dirichlet(1)", **more}
    return prepare(
        settings(method=method, data="digits", model=model, model_options={"hidden": 32}, **given), Engine(workers=1)
    )


LONG = [pytest.param(m, marks=pytest.mark.long) for m in ("fedtgp", "fedgh", "local")]


@pytest.mark.parametrize("method", ["fedproto", "fedgmh", "fedmd", *LONG])
def test_clients_train_the_models_they_are_given(method: str, tmp_path: Path) -> None:
    s = session(method)
    loops = []
    for workers in (1, 2):
        loop = open_loop(session(method), tmp_path / str(workers), workers)
        loop.run()
        close_loop(loop)
        loops.append(decided(loop))
    assert codec.equal(*loops), "the result depends on the number of workers"
    states = loops[0]["clients"]  # type: ignore[index, call-overload]
    for i in (i for i in range(5) if states[i] is not None):
        assert set(states[i]["own"]) <= set(s.method_of(i).ctx.w0)
        assert ("bn1.weight" in states[i]["own"]) == (i > 1)


def test_a_real_federation_gives_the_events_of_the_simulation(tmp_path: Path) -> None:
    with federation(tmp_path, "fedproto", model="0=mlp,1=mlp-bn,2-3=mlp", model_options={"hidden": 16}) as f:
        assert f.loop.run() and f.session.others
        simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert (tmp_path / "run/events.jsonl").read_text() == (tmp_path / "simulation/events.jsonl").read_text()


def test_each_clients_own_model_is_exported_and_reloads_equal(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "clients": 4, "rounds": 2, "epochs": 1, "model_options": {"hidden": 32}, "workers": 1, "eval_every": 1,
    }  # fmt: skip
    run = coterie.run("fedmd", "digits", "0=mlp,1-3=mlp-bn", out=tmp_path / "run", public=10, **given)
    first, second = run.personal(0), run.personal(3)
    x = torch.rand(3, 1, 8, 8)
    assert first(x).shape == second(x).shape == (3, 10)
    assert any(isinstance(m, nn.BatchNorm1d) for m in second.modules())
    assert not any(isinstance(m, nn.BatchNorm1d) for m in first.modules())
    again = coterie.open_run(tmp_path / "run")
    assert again.finished and torch.equal(again.personal(0)(x), first(x))


def test_a_function_of_the_client_chooses_its_model(tmp_path: Path) -> None:
    small, large = (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 10)),
    )
    pick = PerClient(lambda client: small if client % 2 else large)
    run = coterie.run(
        "fedmd", "digits", pick, clients=4, rounds=1, epochs=1, out=tmp_path / "run", workers=1, public=10
    )
    assert len(list(run.personal(0).modules())) > len(list(run.personal(1).modules()))


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        ("fedavg", MIXED, "FedAvg needs the same model at every client"),
        ("fedrep", MIXED, "FedRep needs the same model at every client"),
        ("fedproto", "0-1=mlp,2-4=logistic", "32 and 64 features before the head"),
        ("fedproto", "0-1=mlp,2-3=mlp-bn", "no model for client 4"),
        ("fedproto", "0-3=mlp,2-4=mlp-bn", "two models for client 2"),
        ("fedproto", "0-9=mlp", "names client 9"),
        ("fedproto", "0-4:mlp,x=3", "is not clients=name"),
        ("fedproto", "3-1=mlp,0-4=mlp", "the range 3-1 is empty"),
        ("fedproto", "0-4=mpl", "mlp"),
    ],
)
def test_impossible_assignments_raise_a_clear_error(method: str, model: str, message: str) -> None:
    with pytest.raises(CoterieError, match=message) as e:
        session(method, model)
    assert "\n" not in str(e.value)


def test_stacking_and_update_logs_need_equal_models() -> None:
    clients = session("fedproto").clients()
    assert choose_engine(clients, "auto").engine == "loop"
    with pytest.raises(CoterieError, match="their models differ"):
        choose_engine(clients, "stack")
    with pytest.raises(CoterieError, match="log_updates = true needs the same model"):
        session("fedproto", log_updates=True)


def test_an_option_is_passed_to_the_models_that_have_it() -> None:
    s = session("local", "0-3=mlp,4=logistic")
    assert s.method_of(0).ctx.net.width == 32 and s.method_of(4).ctx.net.width == 64
    with pytest.raises(CoterieError, match='option "hidden"'):
        session("local", "0-4=logistic")


def test_one_model_for_all_clients_is_an_ordinary_run() -> None:
    assert assign_models("0-4=mlp", range(5)) == dict.fromkeys(range(5), "mlp")
    assert not session("fedproto", "0-4=mlp").others


def test_a_plan_cannot_import_code_through_an_assignment() -> None:
    chosen = settings(method="fedproto", model="0=mlp,1-19=evil.code:run")
    with pytest.raises(CoterieError, match="which this host does not allow"):
        Allow().check_plan(chosen)
    Allow(models=("mlp", "evil.code:run")).check_plan(chosen)
