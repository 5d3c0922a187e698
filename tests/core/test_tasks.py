"""Tasks: losses and metrics against other people's formulas, what is refused, and runs in both engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_poisson_deviance,
    r2_score,
    roc_auc_score,
)
from torch import Tensor

import coterie
from coterie.cli.app import app
from coterie.config import Engine, settings
from coterie.core.metrics import Metric
from coterie.core.tasks import TASKS, Binary, Classification, EventCount, MultiLabel, Regression, Survival, Task, make
from coterie.data import Dataset, PartitionSettings, federate, from_arrays, load_dataset, save_dataset
from coterie.data.target_types import with_task
from coterie.engine.evaluation import statistics
from coterie.engine.messages import Score, check_score
from coterie.engine.session import Callbacks, Objects, Session, execute, prepare
from coterie.errors import CoterieError
from coterie.federation.device_data import example_dataset, only_client
from coterie.results.comparison import Comparison
from coterie.results.report import content
from coterie.results.report.figures import bars
from coterie.results.report.page import render
from coterie.results.run import Run
from coterie.results.statistics import rounds_to, summarise
from coterie.testing import close_loop, events, open_loop

RNG = np.random.default_rng(3)


def drawn(task: Task, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs, with ties among them, and targets."""
    rng = torch.Generator().manual_seed(seed)
    out = (torch.randn(n, task.outputs, generator=rng) * 4).round() / 4
    if task.classes:
        return out, torch.randint(task.classes, (n,), generator=rng)
    if task.name == "multilabel":
        return out, (torch.rand(n, task.outputs, generator=rng) < 0.4).float()
    if task.name == "survival":
        time = (torch.rand(n, generator=rng) * 20).ceil()
        return out, torch.stack([time, (torch.rand(n, generator=rng) < 0.6).float()], 1)
    y = torch.randn(n, task.outputs, generator=rng) * 2
    return out, y.abs().round() if task.name == "count" else y


def counted(task: Task, *seeds: int, n: int = 60) -> dict[str, np.ndarray]:
    rows = [task.count(*drawn(task, n, s)) for s in seeds]
    return {k: np.stack([r[k].numpy() for r in rows]) for k in rows[0]}


ALL = [Classification(4), Binary(2), Regression(1), Regression(3), EventCount(1), MultiLabel(3), Survival(1)]


# ---- metrics ---------------------------------------------------------------------------------------------------------
def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    out, y = drawn(Regression(1), 60)
    found = {k: v[0] for k, v in Regression(1).measured(counted(Regression(1), 0)).items()}
    assert found["RMSE"] == pytest.approx(float((out - y).square().mean().sqrt()), rel=1e-6)
    assert found["MAE"] == pytest.approx(mean_absolute_error(y, out), rel=1e-6)
    assert found["R2"] == pytest.approx(r2_score(y, out), rel=1e-6)


def test_auc_is_that_of_scikit_learn_with_ties() -> None:
    out, y = drawn(Binary(2), 60)
    found = Binary(2).measured(counted(Binary(2), 0))
    assert found["AUC"][0] == pytest.approx(roc_auc_score(y, out[:, 1] - out[:, 0]), rel=1e-9)
    assert found["accuracy"][0] == pytest.approx(float((out.argmax(1) == y).float().mean()))


def test_f1_and_average_precision_are_those_of_scikit_learn_with_ties() -> None:
    out, y = drawn(MultiLabel(3), 60)
    found = MultiLabel(3).measured(counted(MultiLabel(3), 0))
    assert found["macro F1"][0] == pytest.approx(f1_score(y, out > 0, average="macro"), rel=1e-9)
    assert found["mAP"][0] == pytest.approx(average_precision_score(y, out, average="macro"), rel=1e-9)


def test_the_c_index_counts_ordered_pairs() -> None:
    out, y = drawn(Survival(1), 40)
    pairs = good = 0.0
    for i in range(40):
        for j in range(40):
            if y[i, 1] and y[i, 0] < y[j, 0]:
                pairs += 1
                good += 0.5 * (1 + float(torch.sign(out[i, 0] - out[j, 0])))
    assert Survival(1).measured(counted(Survival(1), 0, n=40))["C-index"][0] == pytest.approx(good / pairs)


@pytest.mark.parametrize("task", [Classification(4), Regression(3), EventCount(1), MultiLabel(3)], ids=lambda t: t.name)
def test_pooled_counts_are_those_of_all_samples_together(task: Task) -> None:
    """All but what is ranked or compared within a client: AUC, mAP, C-index and R2."""
    (a, ya), (b, yb) = drawn(task, 60, 1), drawn(task, 60, 2)
    whole = task.count(torch.cat([a, b]), torch.cat([ya, yb]))
    together = task.measured({k: v[None].numpy() for k, v in whole.items()})
    pooled = task.measured({k: v.sum(0, keepdims=True) for k, v in counted(task, 1, 2).items()})
    for name in {"accuracy", "RMSE", "MAE", "macro F1"} & pooled.keys():
        assert pooled[name][0] == pytest.approx(together[name][0], rel=1e-12)


# ---- losses ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.name}-{t.outputs}")
def test_padding_adds_nothing_and_totals_are_sums(task: Task) -> None:
    out, y = drawn(task, 12)
    weight = (torch.arange(12) < 9).float()
    assert torch.allclose(task.loss(out, y, weight), task.loss(out[:9], y[:9]), atol=1e-6)
    assert float(task.total(out, y)) == pytest.approx(float(task.each(out, y).sum()), rel=1e-5)


def test_the_loss_of_survival_is_the_partial_likelihood() -> None:
    out, y = drawn(Survival(1), 15)
    total = 0.0
    for i in range(15):
        if y[i, 1]:
            total += float(torch.logsumexp(out[y[:, 0] >= y[i, 0], 0], 0) - out[i, 0])
    assert float(Survival(1).loss(out, y)) == pytest.approx(total / float(y[:, 1].sum()), rel=1e-5)
    silent = torch.cat([y[:, :1], torch.zeros(15, 1)], 1)
    assert float(Survival(1).loss(out, silent)) == 0.0, "a batch without an event has no loss"


def test_the_loss_of_counts_is_half_the_poisson_deviance() -> None:
    out, y = drawn(EventCount(1), 20)
    assert float(EventCount(1).loss(out, y)) == pytest.approx(mean_poisson_deviance(y, out.exp()) / 2, rel=1e-5)


# ---- scores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", ALL, ids=lambda t: f"{t.name}-{t.outputs}")
def test_counts_are_what_the_task_declares(task: Task) -> None:
    for n in (0, 1, 30):
        score = Score(task.count(*drawn(task, n)), 1.0)
        check_score(score, task)
        one = {k: v[None].numpy() for k, v in score.counts.items()}
        assert task.samples(one).tolist() == [n]
        assert set(task.measured(one)) == {m.name for m in task.metrics}
    name = next(k for k, v in score.counts.items() if v.is_floating_point() or k == "total")
    with pytest.raises(CoterieError, match="score"):
        check_score(Score({**score.counts, name: score.counts[name] - 10**12}, 1.0), task)
    with pytest.raises(CoterieError, match=f"a score of {task.name} must hold"):
        check_score(Score({}, 1.0), task)


def test_no_target_can_be_read_from_the_counts_of_one_sample() -> None:
    """Errors cross, targets do not: the same error of another target gives the same counts."""
    first = Regression(1).count(torch.tensor([[3.0]]), torch.tensor([[2.0]]))
    other = Regression(1).count(torch.tensor([[-7.0]]), torch.tensor([[-8.0]]))
    assert all(torch.equal(first[k], other[k]) for k in first)


def test_a_client_without_a_value_is_left_out_and_counted() -> None:
    one_class = Binary(2).count(torch.randn(5, 2), torch.zeros(5, dtype=torch.int64))
    both = Binary(2).count(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0]))
    counts = {k: np.stack([one_class[k].numpy(), both[k].numpy()]) for k in both}
    found = statistics(Binary(2), counts, np.ones(2))
    assert (found["mean"], found["undefined"], found["clients"]) == (1.0, 1, 2) and found["pooled"] == 1.0


def test_the_worst_tenth_has_the_largest_errors() -> None:
    counts = {k: np.zeros((20, 1)) for k in ("absolute", "spread")}
    counts |= {"samples": np.ones(20, np.int64), "squared": np.arange(20.0)[:, None] ** 2}
    assert statistics(Regression(1), counts, np.ones(20))["worst10"] == pytest.approx(18.5)
    assert Classification.metrics[0].worst(np.arange(20.0)).mean() == pytest.approx(0.5)


# ---- what a target is ------------------------------------------------------------------------------------------------
X = RNG.normal(size=(6, 3)).astype(np.float32)
SURVIVAL = np.array([[1.0, 1], [2, 0], [3, 1], [4, 0], [5, 1], [6, 0]])


@pytest.mark.parametrize(
    ("y", "task", "shape"),
    [
        ([0, 1, 2, 0, 1, 2], "classification", (6,)),
        (["a", "b", "a", "b", "a", "b"], "classification", (6,)),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], "classification", (6,)),
        ([0.5, 1, 2, 3, 4, 5], "regression", (6, 1)),
        (RNG.normal(size=(6, 2)), "regression", (6, 2)),
        ([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 1]], "multilabel", (6, 2)),
    ],
)
def test_the_data_show_their_task(y: Any, task: str, shape: tuple[int, ...]) -> None:
    d = from_arrays(X, y)
    assert d.kind == d.task.name == task and tuple(d.y.shape) == shape


@pytest.mark.parametrize(
    ("y", "task", "says"),
    [
        ([0.5, np.nan, 1, 2, 3, 4], None, "not finite"),
        ([0.5, np.inf, 1, 2, 3, 4], "regression", "not finite"),
        (list("abcdef"), "regression", "must be numbers for the task regression"),
        (np.eye(6), None, "exactly one 1 in every row"),
        ([[0, 2]] * 6, None, "several columns must be 0 and 1"),
        ([[0, 2]] * 6, "multilabel", "must be 0 or 1 in every column"),
        ([0, 1, 2, 0, 1, 2], "binary", "needs two classes, and arrays has 3"),
        ([0.5, 1, 2, 3, 4, 5], "count", "whole numbers that are not negative"),
        ([-1, 1, 2, 3, 4, 5], "count", "whole numbers that are not negative"),
        ([1.0, 2, 3, 4, 5, 6], "survival", "two numbers each, time and event"),
        (SURVIVAL * [1, 0], "survival", "has no event"),
        (SURVIVAL * [-1, 1], "survival", "must not be negative"),
        (SURVIVAL * [1, 2], "survival", "must be 0 .not observed. or 1"),
        ([0, 1, 2, 0, 1, 2], "ranking", 'unknown task "ranking"'),
        ([0.5, 1, 2, 3, 4], None, "6 items but 5 labels"),
    ],
)
def test_targets_that_cannot_be_get_one_sentence(y: Any, task: str | None, says: str) -> None:
    with pytest.raises(CoterieError, match=says) as e:
        from_arrays(X, y, task=task)
    assert "\n" not in str(e.value)


def test_classes_that_are_numbers_can_be_targets_and_others_not() -> None:
    d = with_task(from_arrays(X, [3, 7, 3, 9, 7, 3]), "regression")
    assert d.y[:, 0].tolist() == [3, 7, 3, 9, 7, 3] and d.task == Regression(1) and d.classes == ()
    with pytest.raises(CoterieError, match=r"the classes of arrays have names \(a, ...\)"):
        with_task(from_arrays(X, list("abcabc")), "regression")
    assert with_task(d, "classification").classes == ("3", "7", "9")  # whole numbers can be classes again
    with pytest.raises(CoterieError, match="one class per item, and arrays is for regression"):
        with_task(from_arrays(X, RNG.normal(size=6)), "classification")
    with pytest.raises(CoterieError, match="needs two classes, and arrays has 3"):
        with_task(from_arrays(X, list("abcabc")), "binary")


@pytest.mark.parametrize(("y", "task"), [(SURVIVAL, "survival"), (RNG.normal(size=6), "regression")])
def test_a_file_keeps_the_task(y: Any, task: str, tmp_path: Path) -> None:
    d = from_arrays(X, y, name="kept", task=task)
    save_dataset(d, tmp_path / "kept.npz")
    again = load_dataset(str(tmp_path / "kept.npz"))
    assert again.kind == task and torch.equal(again.y, d.y) and again.digest == d.digest


# ---- partitions ------------------------------------------------------------------------------------------------------
def numbers(n: int = 400, clients: int = 4) -> Dataset:
    x = RNG.normal(size=(n, 5)).astype(np.float32)
    return from_arrays(x, x[:, 0] + 0.1 * x[:, 1], name="numbers", client=np.arange(n) % clients, task="regression")


def test_numbers_are_dealt_by_tenths_of_their_range() -> None:
    data = numbers()
    counts = np.bincount(data.strata[0])
    assert counts.tolist() == [40] * 10
    skewed, even = (
        federate(data, PartitionSettings(partition=p, clients=5), 0).label_counts("all")
        for p in ("dirichlet(0.1)", "iid")
    )
    assert (skewed > 0).sum() < 35 and (even > 0).sum() == 50


def test_equal_numbers_share_a_range() -> None:
    strata, names = from_arrays(X, [1, 1, 1, 1, 1, 2], task="regression").strata
    assert strata.tolist() == [0, 0, 0, 0, 0, 1] and names == ("up to 1", "above 1")
    assert from_arrays(X, [2] * 6, task="regression").strata[1] == ("all",)


def test_labels_cannot_be_dealt_by_class() -> None:
    data = from_arrays(X, (RNG.random((6, 3)) < 0.5).astype(int), task="multilabel")
    with pytest.raises(
        CoterieError, match=r"dirichlet\(0.5\) deals by classes .* is for multilabel; take iid or natural"
    ):
        federate(data, PartitionSettings(partition="dirichlet(0.5)", clients=2, min_size=1), 0)


# ---- runs ------------------------------------------------------------------------------------------------------------
def made(task: str, n: int = 240) -> Dataset:
    """Three clients with data that can be learned."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    z = 2 * x[:, 0] - x[:, 1]
    y: Any = {
        "binary": z > 0, "regression": z, "count": rng.poisson(np.exp(0.5 * z)),
        "multilabel": np.stack([z > 0, x[:, 2] > 0, x[:, 3] > 1], 1).astype(int),
        "survival": np.stack([rng.exponential(np.exp(-z)), rng.random(n) < 0.7], 1),
    }[task]  # fmt: skip
    return from_arrays(x, y, name=f"made-{task}", client=np.arange(n) % 3, task=task)


RUN: dict[str, Any] = {"partition": "natural", "rounds": 3, "join": 1.0, "epochs": 2, "lr": 0.05, "eval_every": 1}


@pytest.mark.parametrize("task", [t for t in TASKS if t != "classification"])
def test_every_task_is_learned_and_engines_agree(task: str, tmp_path: Path) -> None:
    curves = []
    for engine in ("loop", "stack"):
        loop = open_loop(session("fedper", made(task), engine, rounds=2, lr=0.03), tmp_path / engine)
        loop.run()
        close_loop(loop)
        curves.append([e["eval"]["personal/test"] for e in events(tmp_path / engine)])
    for one, other in zip(*curves, strict=True):
        assert all(one[k] == pytest.approx(other[k], rel=1e-3, abs=1e-3) for k in one)
    first, last = curves[0][0], curves[0][-1]
    assert last["loss"] < first["loss"]
    assert make(task, 2).metric.better(last["mean"], first["mean"]) or last["mean"] > 0.8


def session(method: str, data: Dataset, engine: str = "loop", **more: Any) -> Session:
    how = Engine.model_validate({"workers": 1, "engine": engine})
    return prepare(settings(method, data=data.name, **{**RUN, **more}), how, Objects(dataset=data))


def test_a_regression_run_is_the_same_with_workers_and_after_a_stop(tmp_path: Path) -> None:
    data = made("regression")
    whole = coterie.run("ditto", data, out=tmp_path / "a", workers=2, **RUN)
    assert not execute(session("ditto", data), tmp_path / "b", Callbacks(should_stop=lambda: True))
    again = coterie.resume(tmp_path / "b", data=data, workers=1)
    assert (whole.path / "events.jsonl").read_bytes() == (again.path / "events.jsonl").read_bytes()
    summary = whole.summary()
    assert summary["metric"] == "RMSE"
    assert whole.clients()["personal/test"].mean() == pytest.approx(summary["personal"]["last"])


@pytest.mark.parametrize("method", ["fedproto", "fedcpmd", "sc-fpfl"])
def test_methods_of_classes_refuse_numbers_before_any_work(method: str, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"needs class labels .* and the task is regression"):
        coterie.run(method, made("regression"), "mlp-bn", out=tmp_path / "r", **RUN)
    assert not (tmp_path / "r").exists()


def test_a_model_with_another_number_of_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="gives 4 scores per item, but the task regression needs 1"):
        coterie.run("fedavg", made("regression"), torch.nn.Linear(5, 4), out=tmp_path / "r", **RUN)


# ---- tables, reports, figures ----------------------------------------------------------------------------------------
def test_best_and_selected_are_the_lowest_where_lower_is_better() -> None:
    rounds = pd.DataFrame(
        {"personal/test/mean": [3.0, 1.0, 2.0], "personal/val/mean": [1.0, 3.0, 2.0]}, index=[1, 2, 3]
    )
    for k in ("std", "worst10", "pooled", "loss", "MAE", "R2"):
        rounds[f"personal/test/{k}"] = 0.5
    rounds = rounds.assign(**{"personal/test/clients": 2, "nonfinite": 0, "failed": 0})
    low = summarise(rounds, 3, Regression.metrics)["personal"]
    assert (low["best"], low["best_round"], low["selected"], low["selected_round"]) == (1.0, 2, 3.0, 1)
    high = summarise(rounds, 3)["personal"]
    assert (high["best"], high["selected"]) == (3.0, 1.0)
    assert rounds_to(rounds["personal/test/mean"], 2.0, lower=True) == 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    at = tmp_path_factory.mktemp("pair")
    return [coterie.run(m, made("regression"), out=at / m, workers=1, **RUN) for m in ("local", "fedavg")]


def test_tables_and_reports_name_the_metric_and_mark_the_lowest(pair: list[Run]) -> None:
    table = Comparison(pair)
    assert table.metric == Metric("RMSE", lower=True)
    values = table.table()["personal"].astype(float)
    assert {"MAE", "R2"} <= set(table.table()) and "%" not in "".join(table.readable()["personal"])
    page = render(pair)
    assert "RMSE, lower is better" in page and "ccuracy in percent" not in page
    assert content.winners(table)["personal"] == [values.idxmin()]
    gains = content.client_gains(table)["FedAvg"]
    alone, together = (r.clients()["personal/test"] for r in pair)
    assert [v for *_, v in gains] == pytest.approx((alone - together).tolist(), abs=1e-4)
    shown = content.client_data(table)["0"]
    assert shown["values"]["FedAvg"] == pytest.approx(together.tolist(), abs=1e-4) and shown["labels"] == [[]] * 3


def test_a_gain_is_a_smaller_error(pair: list[Run]) -> None:
    figure = bars.draw_clients(pair)
    left, right = figure.axes[:2]
    assert left.get_ylabel() == "RMSE" and right.get_ylabel() == "gain over Local-Only (RMSE)"
    frame = bars.client_scores(pair)
    gained = frame["Local-Only"] - frame["FedAvg"]
    assert sorted(right.get_lines()[0].get_ydata()) == pytest.approx(sorted(gained))


def test_the_command_line_takes_a_task_and_names_the_metric(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    words = [
        "run",
        "fedavg",
        "--data",
        "digits",
        "--task",
        "regression",
        "--partition",
        "dirichlet(1)",
        "--clients",
        "3",
    ]
    more = ["--rounds", "1", "--epochs", "1", "--lr", "0.001", "--out", str(tmp_path / "r"), "--json", "--workers", "1"]
    found = json.loads(CliRunner().invoke(app, [*words, *more]).stdout)
    assert found["metric"] == "RMSE" and found["lower_is_better"] and 0 < found["personal"]["MAE"] < 9


# ---- devices ---------------------------------------------------------------------------------------------------------
def test_a_device_brings_targets_of_the_federations_task() -> None:
    like = example_dataset((5,), (), "float32", None, None, None, "regression", 1)
    mine = numbers(40)
    fed = only_client(mine, like, PartitionSettings(), 0)
    assert fed.task == Regression(1) and fed.data(0).train.y.shape[1] == 1
    with pytest.raises(
        CoterieError, match=r"targets for multilabel .2 each., the federation's are for regression .1 each."
    ):
        only_client(from_arrays(mine.x, np.ones((40, 2), int), task="multilabel"), like, PartitionSettings(), 0)


@pytest.mark.long
def test_a_federation_of_devices_gives_the_same_numbers(tmp_path: Path) -> None:
    save_dataset(made("regression", 90), tmp_path / "numbers.npz")
    runs = [
        coterie.run("fedper", str(tmp_path / "numbers.npz"), out=tmp_path / w, runtime=w, workers=1, **RUN)
        for w in ("local", "federation")
    ]
    assert runs[0].curve().tolist() == runs[1].curve().tolist()
