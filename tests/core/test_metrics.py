"""Metrics of the setting `metrics`: equal to those of scikit-learn on all predictions together, or refused."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, log_loss, roc_auc_score

import coterie
from coterie import config
from coterie.core.metrics import CALIBRATION_BINS, added_metrics, check_metrics, macro_auc
from coterie.core.tasks import make, with_metrics
from coterie.engine.evaluation import Evaluation, statistics
from coterie.engine.messages import Score, ScoreAnswer, check_score
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.federation.cloud.program import check_possible
from coterie.federation.policy.allow import Allow
from coterie.results.comparison import Comparison
from coterie.results.report.page import render
from coterie.train.scoring import _kept

COUNTED = "macro_f1,balanced_accuracy,calibration_error,confusion"
SMALL = {
    "clients": 4, "rounds": 2, "epochs": 1, "join": 1.0, "eval_every": 2, "partition": "dirichlet(0.3)", "min_size": 20,
    "subset": 400,
}  # fmt: skip


def gap(predictions, targets):
    """Return the log loss, which scikit-learn computes with its arguments in the opposite order."""
    return log_loss(targets, predictions, labels=range(predictions.shape[1]))


def fails_for_few(predictions, targets):
    if len(targets) < 50:
        raise ValueError("too few")
    return 1.0


def returns_rows(predictions, targets):
    return predictions


def own(task, path="mine:gap", function=gap):
    return with_metrics(task, f"{COUNTED},macro_auc,{path}", {path: function})


def drawn(sizes, classes=5, only=None):
    """Return outputs and targets of several clients."""
    rng = torch.Generator().manual_seed(1)
    parts = []
    for n in sizes:
        y = torch.randint(classes if only is None else only, (n,), generator=rng)
        parts.append((torch.randn(n, classes, generator=rng) + 1.5 * torch.nn.functional.one_hot(y, classes), y))
    return parts


def evaluated(task, parts, newcomers=()):
    answers = [
        ScoreAnswer(i, {"personal/test": Score(task.count(o, y), float(task.total(o, y)), _kept(task, o, y))}, 1)
        for i, (o, y) in enumerate(parts)
    ]
    return Evaluation.of(task, answers, set(newcomers))


def expected_calibration_error(p, y):
    """Return the formula of Guo et al., range by range."""
    confidence, right, error = p.max(1), p.argmax(1) == y, 0.0
    for k in range(CALIBRATION_BINS):
        inside = (confidence > k / CALIBRATION_BINS) & (confidence <= (k + 1) / CALIBRATION_BINS)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def in_sklearn(p, y):
    guess = p.argmax(1)
    return {
        "macro F1": f1_score(y, guess, average="macro"), "balanced accuracy": balanced_accuracy_score(y, guess),
        "macro AUC": roc_auc_score(y, p, multi_class="ovr", average="macro"),
        "calibration error": expected_calibration_error(p, y), "gap": gap(p, y),
    }  # fmt: skip


def test_pooled_metrics_are_those_of_scikit_learn_on_all_predictions() -> None:
    parts = drawn((40, 3, 0, 17, 90))
    task = own(make("classification", 5))
    found = evaluated(task, parts).summary()["personal/test"]
    p, y = torch.cat([o for o, _ in parts]).double().softmax(1).numpy(), torch.cat([y for _, y in parts]).numpy()
    for name, value in in_sklearn(p, y).items():
        assert found[f"pooled {name}"] == pytest.approx(value, abs=1e-12), name
    # the mean over clients is that of scikit-learn for each of them
    large = evaluated(task, [parts[0], parts[4]])
    each = [in_sklearn(o.double().softmax(1).numpy(), y.numpy()) for o, y in (parts[0], parts[4])]
    for name in each[0]:
        assert large.summary()["personal/test"][name] == pytest.approx((each[0][name] + each[1][name]) / 2, abs=1e-12)
    matrix = large.arrays()["personal/test/confusion"].sum(0)
    both = [torch.cat(v).numpy() for v in zip(*((o.argmax(1), y) for o, y in (parts[0], parts[4])), strict=True)]
    np.testing.assert_array_equal(matrix, confusion_matrix(both[1], both[0], labels=range(5)))


def test_newcomers_are_pooled_apart() -> None:
    parts = drawn((30, 40, 50))
    summary = evaluated(own(make("classification", 5)), parts, newcomers={2}).summary()
    for mark, chosen in (("", parts[:2]), ("newcomers/", parts[2:])):
        p, y = (torch.cat(v) for v in zip(*chosen, strict=True))
        value = macro_auc(p.double().softmax(1).numpy(), y.numpy())
        assert summary[f"{mark}personal/test"]["pooled macro AUC"] == pytest.approx(value, abs=1e-12)


def test_binary_tasks_have_an_area_over_all_clients() -> None:
    parts = drawn((30, 40), classes=2)
    found = evaluated(with_metrics(make("binary", 2), "macro_auc,macro_f1"), parts).summary()["personal/test"]
    o, y = (torch.cat(v) for v in zip(*parts, strict=True))
    assert found["pooled macro AUC"] == pytest.approx(roc_auc_score(y, (o[:, 1] - o[:, 0]).double()), abs=1e-12)
    assert found["pooled"] != found["pooled macro AUC"]  # AUC compares pairs within clients


def test_undefined_values_are_counted_and_left_out() -> None:
    task = own(make("classification", 5), "mine:fails_for_few", fails_for_few)
    parts = [*drawn((60, 70)), *drawn((20,), only=1)]  # the last client has one class only
    found = evaluated(task, parts).summary()["personal/test"]
    assert found["undefined macro AUC"] == found["undefined fails_for_few"] == 1
    assert found["fails_for_few"] == 1.0 and np.isfinite(found["macro AUC"])


def test_diverged_models_give_no_value() -> None:
    o, y = drawn((30,))[0]
    task = own(make("classification", 5))
    found = evaluated(task, [(o * torch.nan, y)]).summary()["personal/test"]
    assert np.isnan(found["pooled macro AUC"]) and np.isnan(found["pooled calibration error"])
    check_score(Score(task.count(o * torch.nan, y), 0.0), task)  # a diverged device may say so


@pytest.mark.parametrize(
    ("name", "change"),
    [("guessed", [1, 0, 0, 0, 0]), ("bin_samples", 1), ("bin_hits", 1), ("bin_confidence", 50.0), ("confusion", 1)],
)
def test_impossible_counts_of_a_device_are_refused(name, change) -> None:
    task = with_metrics(make("classification", 5), COUNTED)
    counts = task.count(*drawn((30,))[0])
    check_score(Score(counts, 1.0), task)
    with pytest.raises(CoterieError):
        check_score(Score({**counts, name: counts[name] + torch.tensor(change).to(counts[name].dtype)}, 1.0), task)
    with pytest.raises(CoterieError, match="single samples"):
        check_score(Score(counts, 1.0, (torch.zeros(2, 5), torch.zeros(2))), task)


def test_the_setting_is_checked_before_anything_else() -> None:
    assert check_metrics(" macro_f1 , my.module:gap ") == check_metrics(["macro_f1", "my.module:gap"])
    assert [m.name for m in added_metrics("macro_f1,my.module:Class.gap")] == ["macro F1", "gap"]
    for given, words in [
        ("macro_f", "macro_f1"), ("macro_f1,macro_f1", "twice"), ("a:gap,b:gap", "twice"), ("", "names"), (3, "names"),
        ([], "names"), (["macro_f1", 3], "names"),
    ]:  # fmt: skip
        with pytest.raises(CoterieError, match=words):
            config.settings("fedavg", metrics=given)
    with pytest.raises(CoterieError, match="classification, and the task is regression"):
        with_metrics(make("regression", 1), "macro_f1")
    with pytest.raises(CoterieError, match="nowhere"):
        prepare(config.settings("fedavg", metrics="nowhere:gap", **SMALL))
    with pytest.raises(CoterieError, match="returns_rows cannot be computed: TypeError"):
        coterie.run("fedavg", metrics=returns_rows, **SMALL)
    with pytest.raises(CoterieError, match="metrics = 3 is invalid"):
        coterie.run("fedavg", metrics=["macro_f1", 3], **SMALL)


@pytest.mark.parametrize("name", ["macro_auc", "my.module:gap"])
def test_a_federation_refuses_metrics_that_need_predictions(name) -> None:
    check_possible(config.settings("fedavg", metrics=COUNTED))
    Allow().check_plan(config.settings("fedavg", metrics=COUNTED))
    bad = config.settings("fedavg", metrics=f"macro_f1,{name}")
    for refuse in (check_possible, Allow().check_plan):
        with pytest.raises(CoterieError, match=f"metrics = {name} needs the predictions .* only counts"):
            refuse(bad)


def test_a_policy_may_name_the_metrics() -> None:
    from coterie.federation.policy.allow import SettingRule

    allow = Allow(settings={"metrics": SettingRule(("macro_f1",))})
    allow.check_plan(config.settings("fedavg", metrics="macro_f1"))
    with pytest.raises(CoterieError, match="metrics"):
        allow.check_plan(config.settings("fedavg", metrics="confusion"))


def test_metrics_do_not_change_a_run_and_appear_everywhere(tmp_path) -> None:
    names = [*COUNTED.split(","), "macro_auc", gap]
    plain = coterie.run("fedavg", out=tmp_path / "plain", **SMALL)
    one, two = (coterie.run("fedavg", out=tmp_path / str(w), metrics=names, workers=w, **SMALL) for w in (1, 2))
    assert one.events == two.events and one.settings["metrics"] == f"{COUNTED},macro_auc,{gap.__module__}:gap"
    assert (
        one.curve().equals(plain.curve())
        and "metrics " + one.settings["metrics"].split(",")[-1] in (one.description["digests"])
    )
    stats, frame = one.summary()["personal"], one.clients()
    # the clients' models on their own test parts, once more
    session, parts = one.session(), []
    for i in frame.index:
        split = session.federation.test(i, 2)
        with torch.no_grad():
            parts.append((one.personal(i)(split.x), split.y))
    o, y = (torch.cat(v) for v in zip(*parts, strict=True))
    p = o.double().softmax(1).numpy()
    for name, value in in_sklearn(p, y.numpy()).items():
        assert stats[f"pooled {name}"] == pytest.approx(value, abs=1e-6)
        assert stats[name] == pytest.approx(np.nanmean(frame[f"personal/test/{name}"]), abs=1e-12)
        assert one.events[-1]["eval"]["personal/test"][f"pooled {name}"] == stats[f"pooled {name}"]
    np.testing.assert_array_equal(one.confusion(), confusion_matrix(y, p.argmax(1), labels=range(10)))
    table = Comparison([one, plain]).readable()
    assert {"macro F1", "pooled macro F1", "macro AUC", "gap", "pooled gap"} <= set(table)
    assert "macro F1" in Comparison([one]).readable(brief=True)
    comparison = Comparison([one, plain])
    for name, best in (("macro F1", "b"), ("pooled calibration error", "a"), ("gap", ""), ("pooled gap", "")):
        frame = pd.DataFrame({name: {"a": 0.1, "b": 0.4}})
        assert comparison._best(frame, name) == [*best]  # a function of the user has no known direction
    html = render([one])
    assert "Confusion matrices" in html and "pooled calibration error" in html and ">macro AUC<" in html
    json.dumps(one.events)
    with pytest.raises(CoterieError, match="metrics=confusion"):
        plain.confusion()


def test_a_resumed_run_keeps_its_metrics_and_refuses_other_code(tmp_path, monkeypatch) -> None:
    whole = coterie.run("fedavg", out=tmp_path / "whole", metrics=["macro_f1", gap], **SMALL)
    some = coterie.run("fedavg", out=tmp_path / "some", metrics=["macro_f1", gap], on_round=lambda p: True, **SMALL)
    assert some.last_round == 1
    with pytest.raises(CoterieError, match="metrics"):
        coterie.resume(tmp_path / "some", functions={"metrics": lambda p, y: 0.0})
    assert coterie.resume(tmp_path / "some", functions={"metrics": gap}).events == whole.events
    assert coterie.open_run(tmp_path / "some").summary()["personal"]["pooled gap"] > 0
    recorded = json.loads((tmp_path / "some" / "settings.json").read_text())
    assert any(name.startswith("metrics ") for name in recorded["objects"])


def test_statistics_without_predictions_have_the_counted_metrics_only() -> None:
    task = own(make("classification", 5))
    counts = {k: v[None].numpy() for k, v in task.count(*drawn((30,))[0]).items()}
    found = statistics(task, counts, np.zeros(1))
    assert "macro F1" in found and "macro AUC" not in found
