"""A personal model for a newcomer from few samples, many or none; the run does not change."""

from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie import testing
from coterie.cli import app
from coterie.errors import CoterieError
from coterie.results.run import Run
from support.methods import METHODS

FEW = {"clients": 5, "rounds": 3, "epochs": 1, "join": 1.0, "partition": "dirichlet(1)", "lr": 0.1, "workers": 1,
       "eval_every": 3, "val_share": 0.2, "public": 30, "watch": False, "final_trained": False}  # fmt: skip
DATA = testing.small_data(500)
NEW = testing.small_data(600)
X, Y = NEW.x[500:].numpy(), NEW.y[500:].numpy()


def played(method: str, out: Path, rounds: int = 3) -> Run:
    return coterie.run(method, DATA, "mlp-bn", out=out, **{**FEW, "rounds": rounds})


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return played("fedavg", tmp_path_factory.mktemp("w") / "r")


def welcomed(method: str, run: Run, tmp_path: Path) -> None:
    before = content(run.path)
    found = run.welcome(X, Y, name="eve")
    assert found.samples == {"train": 60, "val": 15, "test": 25}
    assert {"personal", "received", "adapted", "local"} <= found.scores.keys()
    assert found.scores["personal"] == found.scores[found.kept]
    found.save(tmp_path / "eve.safetensors")
    again = coterie.load_model(tmp_path / "eve.safetensors")
    assert again.about.client == "eve" and again.about.round == 3
    assert np.allclose(again.predict(X[:9]).outputs, found.predict(X[:9]).outputs, atol=1e-5)
    one = run.welcome(X[:10], Y[:10], X[10:], Y[10:])  # about one sample of a class
    assert one.samples["train"] < 10 and one.samples["test"] == 90 and np.isfinite(one.scores["personal"]["accuracy"])
    none = run.welcome(X)
    assert none.kept == "received" and not none.scores and "there are no labels" in none.said[0]
    assert np.isfinite(none.predict(X[:3]).outputs).all()
    assert content(run.path) == before


def test_fedavg_welcomes_a_newcomer(run: Run, tmp_path: Path) -> None:
    welcomed("fedavg", run, tmp_path)
    same = run.welcome(X, Y)
    assert same.scores["received"] == same.scores["global"]  # FedAvg gives newcomers the global model
    assert same.scores == run.welcome(X, Y).scores


@pytest.mark.long
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("fedavg", "fedclip")])  # fedclip: an example
def test_every_method_welcomes_a_newcomer(method: str, tmp_path: Path) -> None:
    welcomed(method, played(method, tmp_path / "r"), tmp_path)


def test_unsuitable_samples_are_refused(run: Run, tmp_path: Path) -> None:
    for x, y, test, sentence in (
        (X, np.full(len(X), 12), (None, None), 'label "12" of the data is not among the 10 classes'),
        (X[:, :, :5], Y, (None, None), r"shape \(1, 5, 8\), and the model takes floats of shape \(1, 8, 8\)"),
        ((X * 255).astype(np.uint8), Y, (None, None), "are bytes, and the model was trained on floats"),
        (X[:1], Y[:1], (None, None), "one sample cannot be used for both training and testing"),
        (X, Y[:-1], (None, None), "there are 100 samples and 99 labels"),
        (X, np.array(3), (None, None), "labels of the data must have one value for each sample"),
        (X, None, (X, Y), "the test part has labels and the other samples do not"),
        (X, Y, (X, None), "give both x_test and y_test, or neither"),
        (X, Y, (X, np.full(len(X), 11)), 'label "11" of the test part is not among the 10 classes'),
    ):
        with pytest.raises(CoterieError, match=sentence):
            run.welcome(x, y, *test)
    few = run.welcome(X[:1], Y[:1], X, Y)
    assert few.kept == "adapted" and "too few samples for a validation part" in few.said[0]
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    with pytest.raises(CoterieError, match="is the run's folder, which is only read"):
        words = ["welcome", run.path, "--data", tmp_path / "mine.npz", "--out", run.path / "m.safetensors"]
        app.app([str(w) for w in words], standalone_mode=False)


def test_a_method_that_needs_validation_data_refuses_too_few_samples(tmp_path: Path) -> None:
    run = played("fedfomo", tmp_path / "r", rounds=1)
    with pytest.raises(CoterieError, match="FedFomo chooses by validation data, and 1 samples are too few"):
        run.welcome(X[:1], Y[:1], X, Y)


def test_batch_norm_is_measured_on_items_without_labels(tmp_path: Path) -> None:
    model = played("fedbn", tmp_path / "r", rounds=1).welcome(X).model
    (norm, *_) = (m for m in model.network.modules() if isinstance(m, torch.nn.BatchNorm1d))
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.predict(X)
    assert norm.running_mean is not None and norm.running_var is not None
    assert torch.allclose(norm.running_mean, seen[0].mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, seen[0].var(0, correction=0), atol=1e-5)


def test_the_command_writes_the_model_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    coterie.run("fedper", "digits", out="r", **{**FEW, "rounds": 1, "eval_every": 1})
    x = coterie.data.load_dataset("digits").x[:40].numpy()
    np.savez("mine.npz", x_train=x, y_train=coterie.data.load_dataset("digits").y[:40].numpy())
    app.app(["welcome", "r", "--data", "mine.npz", "--name", "eve"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "local training" in out and "FedPer has no global model" in out
    assert coterie.load_model("mine.safetensors").about.client == "eve"
    app.app(["export", "r", "--client", "1", "--format", "torchscript", "--out", "m.pt"], standalone_mode=False)
    assert "its input x is float32 [n, 1, 8, 8] (floats" in capsys.readouterr().out
