"""The statistics of the papers, and the evaluation on the official test part."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from coterie.config import Engine, settings
from coterie.data.dataset import Dataset
from coterie.engine.session import Objects, execute, prepare
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.results import paper_metrics as P
from coterie.results.report import figures
from coterie.results.run import Run
from coterie.testing import SmallNet, small_data

HITS = np.array([[8, 1, 0], [2, 10, 5]])
TOTAL = np.array([[10, 10, 20], [10, 10, 20]])


def test_weighted_accuracy_is_the_formula() -> None:
    assert P.weighted_accuracy(HITS[0], TOTAL[0], np.array([1, 1, 1])) == pytest.approx(9 / 40)
    assert P.weighted_accuracy(HITS[0], TOTAL[0], np.array([0.5, 0.0, 0.25])) == pytest.approx(4 / 10)
    assert np.isnan(P.weighted_accuracy(HITS[0], TOTAL[0], np.zeros(3)))


def test_pm_v_takes_the_classes_of_the_client_and_pm_l_their_shares() -> None:
    train = np.array([[3, 1, 0], [0, 0, 7]])
    assert P.pm_v(HITS, TOTAL, train) == pytest.approx((9 / 20 + 5 / 20) / 2)
    assert P.pm_l(HITS, TOTAL, train) == pytest.approx(((3 * 8 + 1) / 40 + 5 / 20) / 2)


def test_fedpc_13_pm_v_is_gm_for_the_global_model_and_all_classes_and_pm_l_is_pm_v_for_uniform_labels() -> None:
    same = np.stack([HITS[1], HITS[1]])
    full = np.array([[4, 9, 2], [1, 1, 1]])
    assert P.pm_v(same, TOTAL, full) == pytest.approx(P.gm(HITS[1], TOTAL[1]))
    uniform = np.array([[5, 5, 0], [2, 2, 2]])
    assert P.pm_l(HITS, TOTAL, uniform) == pytest.approx(P.pm_v(HITS, TOTAL, uniform))
    assert P.pm_l(HITS, TOTAL, full) != pytest.approx(P.pm_v(HITS, TOTAL, full))


# ---- the view on the official part -----------------------------------------------------------------------------------
def session(method, workers=1, **changes):
    data = small_data()
    is_test = torch.arange(len(data)) % 5 == 0
    data = Dataset("with-test", data.x, data.y, data.classes, is_test)
    run = {
        "rounds": 2, "join": 1.0, "epochs": 1, "batch": 16, "lr": 0.1, "eval_every": 2, "clients": 4, "pool": "train",
        "partition": "dirichlet(0.5)", "official": True, "final_trained": False, "newcomers": 1, **changes,
    }  # fmt: skip
    run = settings(method="fedavg", **run).model_copy(update={"method": method.__name__})
    torch.manual_seed(0)
    return prepare(run, Engine(workers=workers), Objects(method, data, SmallNet()))


def test_global_model_is_scored_on_the_official_part_once_and_equals_every_personal_one_of_fedavg(tmp_path: Path):
    made = session(FedAvg)
    execute(made, tmp_path / "r")
    run = Run(tmp_path / "r", made)
    z = run.evaluation()
    assert (z["global/official/total"] == np.bincount(made.federation.official().y, minlength=10)).all()
    assert (z["personal/official/hits"] == z["global/official/hits"]).all()
    assert z["global/official/hits"].sum() > 0
    metrics = P.official(run)
    rows = ~z["newcomer"]
    assert metrics["GM"] == pytest.approx(run.rounds["global/official/pooled"].iloc[-1])
    assert metrics["PM(V)"] == pytest.approx(
        P.pm_v(z["personal/official/hits"][rows], z["global/official/total"][rows], made.federation.label_counts()[:3])
    )


@pytest.mark.parametrize("head", ["mean", "init"])
def test_a_method_with_private_heads_gets_the_mean_of_its_personal_models_by_samples(tmp_path: Path, head) -> None:
    made = session(FedPer, gm_head=head)
    execute(made, tmp_path / "r")
    run = Run(tmp_path / "r", made)
    fed, z = made.federation, run.evaluation()
    models = [run.personal(i) for i in range(3)]
    n = fed.sizes("train")[:3]
    states = [m.state_dict() for m in models]
    mean = {
        k: sum(int(w) * s[k].double() for w, s in zip(n, states, strict=True)) / int(n.sum())
        for k in made.method.ctx.w0
    }
    if head == "init":
        mean |= {k: made.method.ctx.w0[k] for k in made.method.ctx.group("head")}
    split = fed.official()
    for i, model in enumerate(models):
        with torch.no_grad():
            hit = split.y[model(split.x).argmax(1) == split.y]
        assert (z["personal/official/hits"][i] == np.bincount(hit, minlength=10)).all()
    logits = made.method.ctx.forward({k: v.float() for k, v in mean.items()}, split.x)
    assert z["global/official/loss"][0] == pytest.approx(
        float(F.cross_entropy(logits, split.y, reduction="sum")), rel=1e-4
    )


def test_the_official_view_has_the_same_bits_for_any_number_of_workers_and_changes_nothing_else(tmp_path: Path) -> None:
    runs = [session(FedPer), session(FedPer, workers=2), session(FedPer, official=False)]
    for i, made in enumerate(runs):
        execute(made, tmp_path / str(i))
    a, b, plain = (Run(tmp_path / str(i)).evaluation() for i in range(3))
    assert all((a[k] == b[k]).all() for k in a) and a.keys() == b.keys()
    assert all((a[k] == v).all() for k, v in plain.items()) and "personal/official/hits" not in plain
    with pytest.raises(CoterieError, match="official = true"):
        P.official(Run(tmp_path / "2", runs[2]))


def test_curves_of_official_statistics_are_those_of_each_evaluation(tmp_path: Path) -> None:
    made = session(FedPer, rounds=2, eval_every=1, headline="trained")
    execute(made, tmp_path / "r")
    run = Run(tmp_path / "r", made)
    curves = P.official_curves(run)
    assert list(curves.index) == [1, 2] and set(curves) == {"GM", "PM(V)", "PM(L)"}
    for t in (1, 2):
        assert curves.loc[t].to_dict() == P.official(run, t, "trained") != P.official(run, t)
    drawn = figures.draw("official", [run]).axes
    assert [a.get_ylabel() for a in drawn] == ["GM (%)", "PM(V) (%)", "PM(L) (%)"]
    assert list(drawn[1].lines[0].get_ydata()) == pytest.approx(list(100 * curves["PM(V)"]))


def test_official_without_an_official_part_is_refused() -> None:
    with pytest.raises(CoterieError, match="official = true needs an official test part"):
        session(FedAvg, pool="merged")


class Clustered:
    """A run of five rounds whose clients are divided in round 3."""

    path = Path("x")
    events = tuple({"round": t, "facts": {"clusters": {"0": 0, "1": int(t >= 3)}}} for t in range(1, 6))
    rounds = pd.DataFrame({"note/aun": [4.0, 2, 1, 3, 1]}, index=range(1, 6))


def test_the_round_of_clustering_and_the_rise_of_aun_around_it() -> None:
    run = Clustered()
    assert P.clustering_round(run) == 3 and P.aun_rise(run) == 1.5  # type: ignore[arg-type]
    run.events = run.events[:2]
    assert np.isnan(P.clustering_round(run)) and np.isnan(P.aun_rise(run))  # type: ignore[arg-type]
    run.rounds = run.rounds.drop(columns="note/aun")
    with pytest.raises(CoterieError, match="log_updates=true"):
        P.aun_rise(run)  # type: ignore[arg-type]
