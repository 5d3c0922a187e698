"""Personal models on raw items: the same preprocessing from a run, its file, and a file for other programs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie
from coterie.cli import app
from coterie.data import load_dataset
from coterie.data.arrays import items_like
from coterie.data.target_types import targets_like
from coterie.errors import CoterieError
from coterie.export.deployment import deploy

FEW = {"clients": 4, "rounds": 2, "epochs": 2, "partition": "dirichlet(1)", "workers": 1, "eval_every": 2, "lr": 0.1}


NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


def bytes_of_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return digits as bytes 0 to 255 [n, 8, 8] and their names."""
    data = load_dataset("digits")
    x = (data.x[:600, 0].numpy() * 255).round().astype(np.uint8)
    return x, NAMES[data.y[:600].numpy()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    x, y = bytes_of_digits()
    out = tmp_path_factory.mktemp("run") / "r"
    return coterie.run("fedrod", coterie.from_arrays(x, y, name="bytes"), "mlp", out=out, **FEW)


def test_the_file_of_a_model_depends_on_neither_workers_nor_folder(tmp_path: Path) -> None:
    files = []
    for workers in (1, 2):
        out = tmp_path / f"with-{workers}"
        run = coterie.run("apfl", "digits", "mlp", out=out, **{**FEW, "epochs": 1, "workers": workers})
        run.export(1, out / "m.safetensors")
        files.append((out / "m.safetensors").read_bytes())
    assert files[0] == files[1]


def its_test(run, client: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    x, y = bytes_of_digits()
    rows = run.session().federation.indices(client, "test").numpy()
    return x[rows], y[rows]


def test_raw_items_score_as_in_the_run_from_run_and_file(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    x, y = its_test(run, 2)
    found = run.predict(2, x, y)
    assert found.scores["accuracy"] == pytest.approx(run.clients().loc[2, "personal/test"])
    assert np.mean(np.array(found.labels) == y) == pytest.approx(found.scores["accuracy"])
    run.export(2, tmp_path / "m.safetensors")
    again = coterie.load_model(tmp_path / "m.safetensors")
    about = again.about
    assert about.items.type == "uint8" and about.items.shape == (1, 8, 8) and len(about.items.mean or ()) == 1
    assert about.classes[0] == "eight" and about.client == "2" and about.round == 2
    for form in (x, x[:, None], x[..., None], x.astype(np.int64)):  # whatever the layout
        assert np.array_equal(again.predict(form).outputs, found.outputs)
    assert found.proba is not None and np.allclose(found.proba.sum(1), 1)


def test_the_command_writes_predictions_and_scores(run, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    x, y = its_test(run, 1)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    run.export(1, tmp_path / "m.safetensors")

    def call(*words: object) -> str:
        app.app([str(w) for w in ("predict", *words, "--data", tmp_path / "new.npz")], standalone_mode=False)
        return str(capsys.readouterr().out)

    told = json.loads(call(tmp_path / "m.safetensors", "--out", tmp_path / "p.csv", "--proba", "--json"))
    want = run.predict(1, x, y)
    assert told["predictions"] == list(want.labels) and told["scores"] == pytest.approx(want.scores)
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0].startswith("item,label,class,p(eight),") and len(lines) == len(x) + 1
    assert f"{100 * want.scores['accuracy']:.1f}" in call(tmp_path / "m.safetensors", "--out", tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as z:
        assert z["labels"].tolist() == list(want.labels) and "proba" not in z.files
    with pytest.raises(CoterieError, match="holds the model of one client; omit --client"):
        call(tmp_path / "m.safetensors", "--client", "1")
    with pytest.raises(CoterieError, match="choose a client"):
        call(run.path)
    for client in (4, "4", "\u00b2", "eve"):
        with pytest.raises(CoterieError, match=f"unknown client .?{client}"):
            run.predict(client, x)


BYTES, FLOATS, TOKENS = torch.uint8, torch.float32, torch.int64


@pytest.mark.parametrize(
    "x, dtype, shape, sentence",
    [
        (np.zeros((2, 8, 8)), BYTES, (1, 8, 8), "are floats, and the model was trained on bytes; give bytes"),
        (np.full((2, 8, 8), 256), BYTES, (1, 8, 8), "run from 256 to 256, and the model was trained on bytes from 0"),
        (np.zeros((2, 8, 8), np.uint8), FLOATS, (1, 8, 8), "are bytes, and the model was trained on floats"),
        (np.zeros((2, 9, 8), np.uint8), BYTES, (1, 8, 8), r"shape \(9, 8\), and the model takes bytes of shape"),
        (np.zeros((1, 8, 8), np.uint8), BYTES, (1, 8, 8), None),
        (np.zeros((3, 4), np.float32), FLOATS, (4,), None),
        (np.zeros(4, np.float32), FLOATS, (4,), r"give a single item as an array of shape \(1, 4\)"),
        (np.full((3, 4), np.nan), FLOATS, (4,), "not finite"),
        (np.full((3, 4), 9), TOKENS, (4,), "run from 9 to 9"),
        (np.array(["a b"]), FLOATS, (4,), "are texts, and the model takes floats"),
        (np.array(["a b"]), TOKENS, (4,), "are texts, and the model takes token ids"),
        (np.zeros((0, 4)), FLOATS, (4,), "has no items"),
    ],
)
def test_items_of_a_different_form_are_refused(x, dtype, shape, sentence) -> None:  # type: ignore[no-untyped-def]
    if sentence is None:
        assert items_like("new", x, dtype, shape, 9).shape == (len(x), *shape)
    else:
        with pytest.raises(CoterieError, match=sentence):
            items_like("new", x, dtype, shape, 9)


def test_items_are_converted_as_in_a_data_set() -> None:
    rng = np.random.default_rng(0)
    for x in (
        rng.integers(0, 255, (6, 5, 7, 3)), rng.random((6, 20, 3)), rng.integers(0, 200, (6, 4), dtype=np.uint8),
        rng.integers(-5, 5, (6, 20, 3)), rng.integers(0, 50, (6, 9)), np.array([f"text {i}" for i in range(6)]),
    ):  # fmt: skip
        data = coterie.from_arrays(x, np.arange(6) % 2)
        assert torch.equal(items_like("new", x[2:4], data.x.dtype, data.shape, data.vocab), data.x[2:4])


def test_labels_are_names_or_numbers_of_the_classes() -> None:
    assert targets_like("new", np.array(["b", "a"]), "classification", ("a", "b"), 2).tolist() == [1, 0]
    assert targets_like("new", np.array([1, 0]), "classification", ("a", "b"), 2).tolist() == [1, 0]
    assert targets_like("new", np.array([6.0, 3.0]), "classification", ("3", "6"), 2).tolist() == [1, 0]
    for wrong, classes in ((np.array(["c"]), ("a", "b")), (np.array([2]), ("a", "b")), (np.array([1]), ("3", "6"))):
        with pytest.raises(CoterieError, match="is not among the 2 classes of the model"):
            targets_like("new", wrong, "classification", classes, 2)
    with pytest.raises(CoterieError, match="are 1 numbers each, and the model gives 2"):
        targets_like("new", np.zeros(3), "regression", (), 2)


def test_a_damaged_description_and_an_old_file_are_refused(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path, tensors = tmp_path / "m.safetensors", {"a": torch.zeros(1)}
    run.export(0, path)
    whole = json.loads(run.predictor(0).about.model_dump_json())
    for change, sentence in (
        ({"format": 1}, "written by a different version"), ({"items": {}}, "its description: items.type is missing"),
        ({"extra": 1}, "is damaged"), ({"method": "no-such"}, 'method "no-such", which is not installed'),
        ({"method": "os:system"}, 'names the code "os:system" as its method'),
        ({"model": "os:system"}, 'names the code "os:system" as its model'),
    ):  # fmt: skip
        save_file(load_file(path), tmp_path / "x", {"coterie": json.dumps({**whole, **change})})
        with pytest.raises(CoterieError, match=sentence):
            coterie.load_model(tmp_path / "x")
    save_file(tensors, tmp_path / "x", {"coterie": "{"})
    with pytest.raises(CoterieError, match="cannot be read"):
        coterie.load_model(tmp_path / "x")


def test_torchscript_contains_the_preprocessing(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    x, _ = its_test(run, 3)
    deploy(run.predictor(3), tmp_path / "m.pt", "torchscript")
    found = torch.jit.load(tmp_path / "m.pt")(torch.from_numpy(x[:, None]))
    assert np.allclose(found.numpy(), run.predict(3, x).outputs, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("method, model", [("fedavg", "lenet5"), ("apfl", "mlp"), ("fedcp", "mlp-bn")])
def test_onnx_contains_the_preprocessing(method: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx")
    import onnx.reference

    x, y = bytes_of_digits()
    x = x.repeat(2, 1).repeat(2, 2)
    run = coterie.run(method, coterie.from_arrays(x, y), model, out=tmp_path / "r", **{**FEW, "rounds": 1})
    deploy(run.predictor(0), tmp_path / "m.onnx", "onnx")
    deploy(run.predictor(0), tmp_path / "m.pt", "torchscript")
    (found,) = onnx.reference.ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"x": x[:7, None]})
    assert np.allclose(found, run.predict(0, x[:7]).outputs, atol=1e-5)
    runtime = pytest.importorskip("onnxruntime")  # the usual program for such files
    (found,) = runtime.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"x": x[:7, None]})
    assert np.allclose(found, run.predict(0, x[:7]).outputs, atol=1e-5)


def test_missing_packages_for_onnx_are_reported(run, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("onnx", "onnxscript"):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, name, None)
            with pytest.raises(CoterieError, match=r"needs two more packages: pip install 'coterie\[onnx\]'"):
                deploy(run.predictor(0), tmp_path / "m.onnx", "onnx")


def test_a_model_that_cannot_be_exported_is_refused(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :10] * (1 if len(x) == 2 else 2)

    model = run.predictor(0)
    model.network = Odd()
    with pytest.raises(CoterieError, match="cannot be written as torchscript: the outputs of the file differ"):
        deploy(model, tmp_path / "m.pt", "torchscript")
    assert not (tmp_path / "m.pt").exists()


def test_models_of_a_federation_are_on_its_devices(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from coterie.storage.atomic import write_json
    from coterie.storage.run_folder import read_settings

    found = read_settings(run.path)
    found.pop("checksum", None)
    write_json(tmp_path / "cloud" / "settings.json", {**found, "engine": {**found["engine"], "runtime": "flower"}})
    for words in (["export", str(tmp_path / "cloud"), "--client", "0"],):
        with pytest.raises(CoterieError, match="are on the devices of the federation"):
            app.app(words, standalone_mode=False)
