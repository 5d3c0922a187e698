"""Models of tables: predictions for new rows of a data frame, model files, and ONNX files."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie.errors import CoterieError
from coterie.export.deployment import columns_file, deploy
from coterie.results.run import Run


def flats(n: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    size, floor = rng.uniform(20, 120, n), rng.choice(["ground", "first", "top"], n)
    rent = 300 + 10 * size + 100 * (floor == "top")
    frame = pd.DataFrame({"size": size, "floor": floor, "rent": rent, "town": rng.choice(["x", "y", "z"], n)})
    frame.loc[::9, "floor"] = None
    return frame


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("flats")
    flats().to_csv(folder / "flats.csv", index=False)
    return coterie.run(
        "fedavg", folder / "flats.csv", target="rent", client="town", rounds=10, lr=0.1, join=1.0, eval_every=10,
        out=folder / "run", workers=1,
    )  # fmt: skip


def test_a_file_of_a_model_predicts_new_rows_in_the_units_of_the_table(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run.export("x", tmp_path / "x.safetensors")
    model = coterie.load_model(tmp_path / "x.safetensors")
    new = flats().drop(columns="town").iloc[:50]
    predictions = model.predict(new)
    assert predictions.scores["RMSE"] < 100 < new["rent"].std()
    np.testing.assert_allclose(predictions.values[:, 0], new["rent"], atol=400)
    np.testing.assert_array_equal(run.predictor("x").predict(new[["floor", "size"]]).values, predictions.values)
    with pytest.raises(CoterieError, match='no column "floor"'):
        model.predict(new[["size"]])


def test_the_onnx_file_holds_the_encoding_and_names_its_columns(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    onnxruntime = pytest.importorskip("onnxruntime")
    model, path = run.predictor("y"), tmp_path / "y.onnx"
    deploy(model, path, "onnx")
    columns = json.loads(columns_file(path).read_text())["columns"]
    new = flats().iloc[:20].assign(floor=["cellar", *flats()["floor"].iloc[1:20]])
    x = np.full((20, len(columns)), np.nan)
    for i, column in enumerate(columns):  # as a program without Coterie reads it
        for row, value in enumerate(new[column["name"]]):
            if column["kind"] == "category" and not pd.isna(value):
                x[row, i] = column["categories"].index(value) if value in column["categories"] else -1
            elif column["kind"] == "number":
                x[row, i] = value
    outputs = onnxruntime.InferenceSession(path.read_bytes()).run(None, {"x": x})[0]
    np.testing.assert_allclose(outputs, model.predict(new).values, rtol=1e-4)


def test_a_newcomer_brings_a_table(run) -> None:  # type: ignore[no-untyped-def]
    welcomed = run.welcome(flats().iloc[:30])
    assert welcomed.samples == {"train": 20, "val": 2, "test": 8}
    assert welcomed.predict(flats().iloc[:5]).scores["RMSE"] < 200
