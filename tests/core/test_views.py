"""Which model is scored: received, trained, edge; the headline, and the mean over clusters."""

import numpy as np
import pytest
import torch

import coterie
from coterie.core.tasks import Classification
from coterie.engine.evaluation import Evaluation, statistics
from coterie.engine.messages import Score, ScoreAnswer
from coterie.errors import CoterieError
from coterie.methods import build_method
from coterie.methods.fedcpmd.text import FedCPMDServer
from coterie.methods.fedpc.text import FedPCServer
from coterie.methods.scfpfl.edges import SCFPFLServer
from coterie.results.comparison import Comparison
from coterie.results.report.figures import bars, curves
from coterie.results.run import Run
from coterie.train import native

CLASSES = Classification(2)
SMALL = {"clients": 5, "rounds": 2, "epochs": 1, "model": "mlp", "partition": "dirichlet(0.5)", "eval_every": 1,
         "val_share": 0.2, "public": 20, "headline": "edge", "workers": 1}  # fmt: skip
# the agent is always taken over and learns from the data alone: what is left of SC-FPFL is its edge
PLAIN = {"k0": 1, "kl_weight": 0.0, "lambda1": 0.0, "warmup_epochs": 0, "score": "own"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    out = tmp_path_factory.mktemp("views")
    with native.switched_off():  # the two are equal to the bit in one arithmetic only
        return [
            coterie.run("fedavg", out=out / "fedavg", **SMALL),
            coterie.run("sc-fpfl", out=out / "sc-fpfl", **PLAIN, **SMALL),
        ]


def test_one_edge_of_sc_fpfl_is_fedavg_to_the_bit(runs) -> None:
    fedavg, one_edge = runs
    for t in (1, 2):
        ours, theirs = one_edge.evaluation(t), fedavg.evaluation(t)
        for part in ("test", "val"):
            np.testing.assert_array_equal(ours[f"edge/{part}/hits"], theirs[f"global/{part}/hits"])
            np.testing.assert_array_equal(ours[f"edge/{part}/loss"], theirs[f"global/{part}/loss"])
    assert (ours["personal/test/loss"] != ours["edge/test/loss"]).any()  # the client's own model is another


def test_what_is_received_and_the_edge_of_a_method_without_one(runs) -> None:
    z = runs[0].evaluation()
    for part in ("hits", "loss"):  # FedAvg's clients receive the global model
        np.testing.assert_array_equal(z[f"received/test/{part}"], z[f"personal/test/{part}"])
        np.testing.assert_array_equal(z[f"edge/test/{part}"], z[f"global/test/{part}"])
    assert (z["trained/test/loss"] != z["received/test/loss"]).any()
    z = runs[1].evaluation()
    np.testing.assert_array_equal(z["received/test/loss"], z["edge/test/loss"])
    assert set(z["cluster"]) == {0}


def test_a_headline_is_scored_in_every_evaluation_and_others_after_the_last(runs) -> None:
    assert list(runs[0].curve("edge").index) == [1, 2] == list(runs[0].curve("personal").index)
    assert list(runs[0].curve("received").index) == [2] == list(runs[0].curve("trained").index)
    assert runs[0].summary()["edge"]["selected_round"] in (1, 2)


def test_tables_and_figures_lead_with_the_headline_and_keep_the_plain_number_beside_it(runs) -> None:
    table = Comparison(runs)
    assert table.view == "edge"
    shown = list(table.readable().columns)
    assert shown[0] == "edge" and "personal" in shown and "received" not in shown and "clusters" not in shown
    frame = table.table()
    edge, personal = (runs[1].summary()[v] for v in ("edge", "personal"))
    assert frame.loc["SC-FPFL", "edge"] == edge["last"]
    assert frame.loc["SC-FPFL", "selected"] == edge["selected"]
    assert frame.loc["SC-FPFL", "personal"] == personal["last"]
    assert {"clusters", "received"} <= set(Comparison(runs, also=["clusters", "received"]).readable().columns)
    assert next(iter(Comparison(runs, view="personal").readable().columns)) == "personal"
    with pytest.raises(CoterieError, match='did you mean "clusters"'):
        Comparison(runs, also=["cluster"])
    assert bars.headline_score(runs[1]) == edge["last"] and curves.best_view(runs) == "edge/test/mean"
    (pair,) = table.arena(against=["fedavg"]).pairs  # the same models: every client a tie
    assert (pair.row.label, pair.against.label) == ("SC-FPFL, edge", "FedAvg, edge")
    assert (pair.difference.gain, pair.difference.lose, pair.difference.tie) == (0, 0, 5)


def test_clusters_count_alike_whatever_their_size() -> None:
    hits, total = np.array([[9], [7], [5], [1], [0]]), np.array([[10], [10], [10], [10], [0]])
    cluster = np.array([0, 0, 0, 2, 1])  # the only client of cluster 1 has no test sample
    found = statistics(CLASSES, {"hits": hits, "total": total}, np.zeros(5), cluster)
    assert found["clusters"] == pytest.approx((0.7 + 0.1) / 2) and found["cluster_count"] == 2
    assert found["mean"] == pytest.approx(22 / 40)
    for nobody in (None, np.full(5, -1)):
        assert "clusters" not in statistics(CLASSES, {"hits": hits, "total": total}, np.zeros(5), nobody)


def test_a_client_in_no_cluster_and_newcomers_are_left_out_of_the_mean_over_clusters() -> None:
    def answer(client: int, hits: int) -> ScoreAnswer:
        return ScoreAnswer(
            client, {"personal/test": Score({"hits": torch.tensor([hits]), "total": torch.tensor([10])}, 1.0)}, 5
        )

    answers = [answer(i, h) for i, h in enumerate((2, 4, 9, 10))]
    found = Evaluation.of(CLASSES, answers, {3}, {0: 0, 1: 1, 3: 1}).summary()["personal/test"]
    assert found["clusters"] == pytest.approx(0.3) and found["mean"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["ifca", "cfl", "fl-hc", "fesem", "fedgroup", "cgpfl", "fedcpmd", "fedpc", "sc-fpfl"])
def test_methods_with_clusters_say_who_is_where(name: str) -> None:
    method = build_method(name)
    server = {"cluster": {1: 0, 2: 1}, "layer": {1: 0, 2: 1}, "hat": {0: {}, 1: {}}}
    if name == "fedcpmd":
        server = FedCPMDServer(w={}, layer=server["layer"])
    if name == "fedpc":
        nothing = torch.zeros(0)
        server = FedPCServer({1: 0, 2: 1}, {}, nothing, nothing, nothing)
    if name == "sc-fpfl":
        server = SCFPFLServer(theta={}, samples={}, hat=server["hat"], cluster=server["cluster"], ask=False, moves={})
    assert method.cluster_of(server) == {1: 0, 2: 1}
    assert build_method("fedavg").cluster_of({}) is None


def test_an_old_run_that_logged_its_clusters_has_their_mean_too(tmp_path) -> None:
    run = coterie.run("fedavg", out=tmp_path / "r", **{**SMALL, "rounds": 1, "headline": "personal"})
    again = Run(run.path)
    again.events[-1]["facts"] = {"layer": {str(i): "fc1" if i < 2 else "fc2" for i in range(5)}}
    mine = again.clients()["personal/test"]
    expected = (mine[:2].mean() + mine[2:].mean()) / 2
    assert again.summary()["personal"]["clusters"] == pytest.approx(expected)
    assert "clusters" not in run.summary()["personal"]
