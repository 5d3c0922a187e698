"""Newcomers: the model that each method gives them, and their columns in tables."""

import pytest
import torch

import coterie
from coterie import testing
from coterie.core import tree as T
from coterie.core.method import Batch, Client, Method
from coterie.data.dataset import Dataset
from coterie.engine.edge_steps import preview
from coterie.methods import find
from coterie.methods.ditto import Ditto
from coterie.methods.ifca import IFCA
from coterie.results.comparison import Comparison
from coterie.testing import Bench


def newcomer(name, tmp_path, own=None, **changes):
    """Return the method after three rounds, the server, and the model of its newcomer."""
    few = {"rounds": 3, "watch": False, "eval_every": 3, "final_trained": False, "newcomers": 1}
    loop = Bench(find(name), own or {}).play(tmp_path, **{**few, **changes})
    method, new = loop.method, len(loop.method.ctx.clients)
    data = loop.runtime.clients.federation.data(new)
    shared, each = preview(method, loop.server, loop.edges, [new], 4)[new]
    client = Client(method.init_client(data), {**shared, **each}, data, 4)
    return method, loop.server, data, method.model("newcomer", client)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_ditto_gives_the_global_model(tmp_path):
    _, server, _, (params, _) = newcomer("ditto", tmp_path)
    assert same(params, server["w"])


def test_apfl_mixes_the_global_model_with_itself(tmp_path):
    method, server, data, (params, extras) = newcomer("apfl", tmp_path)
    want = method.ctx.forward(server["w"], data.val.x)
    assert torch.allclose(method.predict(params, data.val.x, extras), want, atol=1e-5)


def test_fedrod_uses_the_generic_head_only(tmp_path):
    method, server, data, (params, extras) = newcomer("fedrod", tmp_path)
    want = method.ctx.forward(server["w"], data.val.x)
    assert torch.allclose(method.predict(params, data.val.x, extras), want, atol=1e-6)


def test_fedcp_uses_the_received_head_as_its_own(tmp_path):
    method, server, _, (params, _) = newcomer("fedcp", tmp_path)
    weight, _ = method.ctx.net.head_names
    assert torch.equal(params[f"p:{weight}"], server["w"][weight])


@pytest.mark.parametrize("name", ["fedamp", "prr-fl"])
def test_methods_with_a_model_per_client_give_their_mean(name, tmp_path):
    method, server, _, (params, _) = newcomer(name, tmp_path)
    shared = T.drop(method.ctx.w0, method.stays)
    assert same(T.keep(params, shared.__contains__), T.unflatten(server["bank"]["flat"].mean(0), shared))


def test_fedfomo_mixes_what_others_trained_by_its_own_validation_data(tmp_path):
    method, _, data, (params, _) = newcomer("fedfomo", tmp_path)
    losses = [float(method.ctx.ce(tree, Batch(*data.val))) for tree in (params, method.ctx.w0)]
    assert losses[0] < losses[1]


def test_ifca_offers_newcomers_trained_models_only():
    bench = Bench(IFCA, {"groups": 3}).session(newcomers=1).method
    server = bench.setup()
    trained = {k: v + 1 for k, v in server["models"][2].items()}
    server = {**server, "models": [*server["models"][:2], trained], "trained": [2]}
    new = len(bench.ctx.clients)
    sent = bench.deliver(server, [0, new], 2)
    assert sent.to(0) == bench.down(server, [0], 2).to(0)
    assert all(same(T.tagged(str(g), sent.to(new)), trained) for g in range(3))


class Forgetful(Ditto):
    """Gives newcomers its own model, which never trained."""

    model = Method.model


def test_the_battery_finds_a_method_that_leaves_newcomers_untrained():
    with pytest.raises(AssertionError, match=r"a newcomer has the initial classifier\.weight"):
        testing.check(Forgetful, "a_newcomer_gets_a_model")


def small() -> Dataset:
    return testing.small_data()


@pytest.mark.parametrize("method", ["ditto", "fedbabu"])
def test_tables_show_newcomers_before_and_after_adaptation(method, tmp_path):
    few = {"clients": 6, "rounds": 4, "epochs": 2, "join": 1.0, "partition": "dirichlet(1)", "lr": 0.1, "workers": 1}
    run = coterie.run(method, small(), "mlp", newcomers=2, out=tmp_path / "r", **few)
    table = Comparison([run]).table()
    assert table["newcomer adapted"].iloc[0] > 0.2 and 0 < table["newcomer"].iloc[0] <= 1
    assert {"newcomer", "newcomer adapted"} <= set(Comparison([run]).readable(brief=True).columns)
    assert ("adapted" in table) == (method == "fedbabu")
    module = run.personal(5)  # a newcomer's model, exported
    got = float(
        (module(run.session().federation.test(5).x).argmax(1) == run.session().federation.test(5).y).float().mean()
    )
    view = "adapted/test" if method == "fedbabu" else "personal/test"
    assert got == pytest.approx(run.clients().loc[5, view])


def test_tables_without_newcomers_have_no_such_columns(tmp_path):
    few = {"clients": 4, "rounds": 1, "epochs": 1, "partition": "iid", "workers": 1}
    table = Comparison([coterie.run("fedavg", small(), "mlp", out=tmp_path / "r", **few)]).table()
    assert not [c for c in table.columns if "newcomer" in c]
