"""Three tables as they come, with texts and gaps: simulated, as a federation of processes, and used on new rows."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import coterie
from coterie.export.deployment import columns_file
from coterie.federation.identity import admin
from coterie.federation.localhost.trial import LocalFederation

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("three_tables")]
RUN: dict[str, Any] = {
    "rounds": 6, "epochs": 2, "join": 1.0, "public": 0, "val_share": 0, "batch": 16, "lr": 0.1, "eval_every": 6,
    "split_column": "part",
}  # fmt: skip


def with_gaps(frame: pd.DataFrame, column: str, every: int) -> pd.DataFrame:
    frame.loc[frame.index[::every], column] = np.nan
    return frame


def wine() -> tuple[pd.DataFrame, str]:
    frame = datasets.load_wine(as_frame=True).frame
    frame["colour"] = np.where(frame.pop("color_intensity") > 5, "dark, red", "light")
    frame["target"] = frame["target"].map({0: "barolo", 1: "grignolino", 2: "barbera"})
    return with_gaps(with_gaps(frame, "malic_acid", 9), "colour", 11), "target"


def diabetes() -> tuple[pd.DataFrame, str]:
    frame = datasets.load_diabetes(as_frame=True, scaled=False).frame
    frame["sex"] = frame["sex"].map({1.0: "f", 2.0: "m"})
    return with_gaps(with_gaps(frame, "bmi", 7), "sex", 13), "target"


def cancer() -> tuple[pd.DataFrame, str]:
    frame = datasets.load_breast_cancer(as_frame=True).frame.iloc[:, [0, 1, 4, 6, 30]]
    frame["seen"] = (pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(len(frame)) % 300, unit="D")).strftime(
        "%Y-%m-%d"
    )
    frame["smoker"] = np.where(np.arange(len(frame)) % 3 == 0, "true", "false")
    return with_gaps(frame, "mean texture", 8), "target"


class Hospitals(LocalFederation):
    """A federation whose devices have a CSV file each, and the number of the hospital in the simulation."""

    def certify(self) -> None:
        super().certify()
        for i in range(self.devices):
            above = self.above(i)
            name = f"device-{i}" if above == "cloud" else f"{above}/device-{i}"
            admin.reserve_seat(self.certs("cloud").root, name, i)

    def _device(self, i: int) -> list[str]:
        argv = super()._device(i)
        argv[argv.index("--data") + 1] = str(self.folder.parent / f"h{i}.csv")
        at = argv.index("--client")  # devices with data of their own have no number
        return argv[:at] + argv[at + 2 :]


def as_numbers(frame: pd.DataFrame, columns: list[dict[str, Any]]) -> np.ndarray:
    """Return rows as the file of columns beside an ONNX file says, without Coterie."""
    out = np.full((len(frame), len(columns)), np.nan)
    for j, column in enumerate(columns):
        for i, value in enumerate(frame[column["name"]]):
            if pd.isna(value):
                continue
            if column["kind"] == "category":
                out[i, j] = column["categories"].index(value) if value in column["categories"] else -1
            elif column["kind"] == "date":
                out[i, j] = (pd.Timestamp(value) - pd.Timestamp("2000-01-01")) / pd.Timedelta(days=1)
            elif column["kind"] == "boolean":
                out[i, j] = str(value).lower() == "true"
            else:
                out[i, j] = value
    return out


@pytest.mark.parametrize("table", [wine, diabetes, cancer])
def test_a_table_from_file_to_predictions(table: Callable[[], tuple[pd.DataFrame, str]], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    frame, target = table()
    frame = frame.sample(frac=1, random_state=0).reset_index(drop=True)
    new, frame = frame.iloc[:20].drop(columns=target), frame.iloc[20:].reset_index(drop=True)
    frame["part"] = np.where(np.arange(len(frame)) % 4 == 3, "test", "train")
    frame["hospital"] = [f"h{i}" for i in np.arange(len(frame)) % 3]
    frame.to_csv(tmp_path / "all.csv", index=False)
    for name, rows in frame.groupby("hospital"):
        rows.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    new.to_csv(tmp_path / "new.csv", index=False)
    given = {**RUN, "target": target}
    run = coterie.run("fedrep", tmp_path / "all.csv", out=tmp_path / "simulated", workers=1, client="hospital", **given)
    want = run.events[-1]["eval"]["personal/test"]
    edges = int(table is cancer)  # one of the federations has an edge
    with Hospitals(
        tmp_path / "f", "fedrep", devices=3, edges=edges, given={**given, "client": "hospital"}
    ) as hospitals:
        hospitals.wait(300)
        got, models = hospitals.events()[-1]["eval"]["personal/test"], [hospitals.model(i) for i in range(3)]
    assert got == want
    if table is diabetes:
        assert want["mean"] < 0.95  # RMSE in standard deviations of the target: a constant has 1
    else:
        assert want["mean"] > 0.85
    for i, path in enumerate(models):
        model = coterie.load_model(path)
        np.testing.assert_array_equal(model.predict(new).values, run.predictor(f"h{i}").predict(new).values)
    told = subprocess.run(
        [sys.executable, "-m", "coterie", "predict", models[0], "--data", "new.csv", "--out", "p.csv"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert told.returncode == 0 and "Traceback" not in told.stderr, told.stderr
    assert len(pd.read_csv(tmp_path / "p.csv")) == 20
    made = subprocess.run(
        [sys.executable, "-m", "coterie", "export", models[0], "--format", "onnx", "--out", "m.onnx"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    columns = json.loads(columns_file(tmp_path / "m.onnx").read_text())["columns"]
    session = onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes())
    outputs = session.run(None, {"x": as_numbers(new, columns)})[0]
    predicted = coterie.load_model(models[0]).predict(new)
    if table is diabetes:  # in the units of the table
        np.testing.assert_allclose(outputs, predicted.values, rtol=1e-4)
    else:
        np.testing.assert_array_equal(outputs.argmax(1), predicted.values)
        np.testing.assert_allclose(outputs, predicted.outputs, rtol=1e-3, atol=1e-4)
