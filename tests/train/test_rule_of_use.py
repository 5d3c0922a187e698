"""The rule of use: which model a client uses, the same for every method."""

from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core import tree as T
from coterie.core.method import Model, Split
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.testing import Bench
from coterie.train.clients import USED, client_state
from coterie.train.rule_of_use import after_training, clearly_better, model_used, quality

MENDED = ("fedcpmd-mended", "fedpc-mended", "ecs-fl-mended", "fedgmh-mended")
RUN = {"rounds": 4, "join": 1.0, "val_share": 0.3}
SMALL = {"clients": 4, "rounds": 4, "epochs": 1, "batch": 64, "subset": 400, "val_share": 0.3, "workers": 1}


def made() -> tuple[Any, Any, list[Model]]:
    """A method, a client's data, and three models by rising validation score."""
    session = Bench(find("fedavg"), {}).session(val_share=0.3)
    method, data = session.method, session.federation.data(0)
    rng = torch.Generator().manual_seed(1)
    moved, w0 = method.ctx.net.trainable, method.ctx.w0
    models = [
        Model({k: v + 0.5 * torch.randn(v.shape, generator=rng) if k in moved else v for k, v in w0.items()})
        for _ in range(40)
    ]
    models.sort(key=lambda m: quality(method, m, data.val))
    found = [models[0], models[20], models[-1]]
    a, b, c = (quality(method, m, data.val) for m in found)
    assert a < b < c
    return method, data, found


def test_the_better_model_is_kept_and_of_equals_the_newer() -> None:
    method, data, (bad, fair, good) = made()
    memory = after_training(method, "best", {}, fair, data)
    assert memory["params"] is fair.params and memory["score"] == quality(method, fair, data.val)
    assert after_training(method, "best", memory, bad, data) == memory
    assert after_training(method, "best", memory, good, data)["params"] is good.params
    again = Model(T.clone(fair.params))
    assert after_training(method, "best", memory, again, data)["params"] is again.params
    assert after_training(method, "trained", memory, bad, data)["params"] is bad.params


def test_the_received_model_is_used_only_if_it_is_better() -> None:
    method, data, (bad, fair, good) = made()
    memory = after_training(method, "best", {}, fair, data)
    assert model_used(method, "best", memory, bad, data).params is fair.params
    assert model_used(method, "best", memory, good, data).params is good.params
    assert model_used(method, "best", {}, bad, data) is bad  # the client has not trained yet
    assert model_used(method, "received", memory, bad, data) is bad
    assert model_used(method, "trained", memory, good, data).params is fair.params
    lost = Model({k: v * torch.nan for k, v in fair.params.items()})
    assert model_used(method, "best", memory, lost, data).params is fair.params
    assert (
        after_training(method, "best", memory, lost, data) == memory
        and after_training(method, "best", {}, lost, data) == {}
    )


def test_without_validation_data_nothing_is_kept() -> None:
    method, data, (bad, _, good) = made()
    none = Bench(find("fedavg"), {}).session(val_share=0).federation.data(0)
    assert not len(none.val) and after_training(method, "best", {}, good, none) == {}
    assert model_used(method, "best", after_training(method, "best", {}, good, data), bad, none) is bad


def test_a_right_answer_counts_more_than_any_loss() -> None:
    method, data, models = made()
    x, y = data.val
    for w, _ in models:
        right = float((method.ctx.forward(w, x).argmax(1) == y).float().mean())
        last = method.ctx.net.head_names[0]
        huge = {**w, last: 1e4 * w[last]}  # nearly the same answers, an enormous loss
        assert right - 0.5 / len(y) <= quality(method, Model(w), data.val) <= right
        hits = float((method.ctx.forward(huge, x).argmax(1) == y).float().mean())
        assert hits - 0.5 / len(y) <= quality(method, Model(huge), Split(x, y)) <= hits


def test_the_local_model_replaces_the_best_only_beyond_noise() -> None:
    method, data, (bad, _, good) = made()
    assert not clearly_better(method, good, good, data.val) and not clearly_better(method, bad, good, data.val)
    assert clearly_better(method, good, bad, data.val)
    lost = Model({k: v * torch.nan for k, v in good.params.items()})
    assert clearly_better(method, bad, lost, data.val) and not clearly_better(method, lost, bad, data.val)
    memory = {**after_training(method, "guarded", {}, bad, data), "local": good.params}
    assert model_used(method, "guarded", memory, bad, data).params is good.params
    assert model_used(method, "best", memory, bad, data).params is bad.params


@pytest.mark.parametrize("name", MENDED)
def test_clients_of_the_mended_methods_use_their_best_model(name: str, tmp_path: Path) -> None:
    """And what is sent does not depend on it."""
    bench = Bench(find(name), {})
    with_best, without = bench.play(tmp_path / "a", **RUN), bench.play(tmp_path / "b", **RUN, use="received")
    assert with_best.bytes == without.bytes
    states = [loop.runtime.states.get(0) for loop in (with_best, without)]  # type: ignore[attr-defined]
    assert USED in states[0] and USED not in states[1]
    assert {k: v for k, v in states[0].items() if k != USED}.keys() == states[1].keys()


def test_the_guard_is_the_local_only_model_and_its_training_is_counted(tmp_path: Path) -> None:
    guarded = coterie.run("fedavg", use="guarded", out=tmp_path / "guarded", **SMALL)
    local = coterie.run("local", out=tmp_path / "local", **SMALL)
    assert guarded.work()["samples"] == 2 * local.work()["samples"]
    for client in guarded.saved().method.ctx.clients:
        stored = [run.saved().states.get(client) for run in (guarded, local)]
        if stored[1] is not None:
            mine, own = stored[0][USED]["local"], stored[1]["own"]
            assert mine.keys() == own.keys() and all(torch.equal(v, own[k]) for k, v in mine.items())


def test_a_resumed_run_remembers_and_exports_the_model_in_use(tmp_path: Path) -> None:
    whole = coterie.run("fedavg", use="best", out=tmp_path / "whole", **SMALL)
    coterie.run("fedavg", use="best", out=tmp_path / "cut", on_round=lambda p: p.round == 2, **SMALL)
    again = coterie.resume(tmp_path / "cut", workers=2)
    assert again.events == whole.events
    saved, client = whole.saved(), whole.clients()["personal/test"].idxmax()
    used = client_state(saved.method, saved.states.get(client), saved.session.federation.data(client)).used
    assert "params" in used
    x, y = saved.session.federation.test(client)
    hits = float((whole.personal(client)(x).argmax(1) == y).float().mean())
    assert hits == pytest.approx(whole.clients()["personal/test"][client])


def test_impossible_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="use = best needs validation parts to choose by"):
        coterie.run("fedavg", use="best", out=tmp_path / "a", **{**SMALL, "val_share": 0})
    with pytest.raises(CoterieError, match="use = guarded is not possible: a model of FedRoD is more than its network"):
        coterie.run("fedrod", use="guarded", out=tmp_path / "b", **SMALL)
    with pytest.raises(CoterieError, match="use = 'last' is invalid"):
        coterie.run("fedavg", use="last", out=tmp_path / "c", **SMALL)


def test_a_comparison_has_one_rule_for_all_methods(tmp_path: Path) -> None:
    from coterie.api import comparison_cells

    def rules(**more: Any) -> set[str | None]:
        cells = comparison_cells(["fedper", "ecs-fl-mended"], "digits", None, 1, tmp_path, **more)
        return {c.settings.use for c in cells}

    assert rules() == {"received"} and rules(use="best") == {"best"} and rules(use="own") == {None}
    assert rules(**{"fedper.use": "trained"}) == {"received", "trained"}
