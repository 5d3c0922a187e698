"""What would otherwise be wrong without a word gets a sentence."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import coterie
from coterie.config import settings
from coterie.data import fetch
from coterie.data.federation import federate
from coterie.data.settings import PartitionSettings
from coterie.data.sources import load_dataset
from coterie.data.table import TableColumns
from coterie.engine.session import prepare
from coterie.errors import CoterieError

SMALL = {"clients": 3, "rounds": 2, "subset": 300, "epochs": 1, "workers": 1, "join": 1.0}


def patients() -> pd.DataFrame:
    age = np.random.default_rng(0).normal(50, 9, 120)
    ill = np.where(age > 50, "y", "n")
    return pd.DataFrame({"age": age, "sex": ["f", "m"] * 60, "ward": ["a", "b", "c"] * 40, "ill": ill})


def test_new_categories_are_said_when_a_model_predicts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = coterie.from_frame(patients(), target="ill", client="ward")
    model = coterie.run("fedavg", data, rounds=1, workers=1, out=tmp_path / "r").predictor("a")
    caplog.set_level(logging.WARNING, "coterie")
    model.predict(pd.DataFrame({"age": [50.0, 40.0], "sex": ["f", None]}))
    assert not caplog.messages
    model.predict(pd.DataFrame({"age": [50.0] * 3, "sex": ["q", "f", None]}))
    (said,) = caplog.messages
    assert '1 of 2 values in column "sex"' in said and 'such as "q"' in said and "none of f, m" in said


def test_clients_that_a_partition_does_not_use_are_said(tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "t.csv", index=False)
    data = load_dataset(str(tmp_path / "t.csv"), columns=TableColumns(target="ill", client="ward"))
    assert not federate(data, PartitionSettings(partition="natural"), 0).notes
    (said,) = federate(data, PartitionSettings(partition="iid", clients=3), 0).notes
    assert "the clients that t names are not used: partition = iid" in said


def test_a_timeline_after_the_last_round_is_a_warning() -> None:
    session = prepare(settings("fedavg", timeline="new_labels(10)", partition="labels(4)", clients=3, rounds=2))
    assert session.warnings() == ["the timeline has a change in round 10, after the last round (2)"]


def test_rounds_in_which_nobody_counts_are_said(tmp_path: Path) -> None:
    run = coterie.run("fedavg", dropout=0.99, out=tmp_path / "r", **SMALL)
    assert "no upload counted in 2 of 2 rounds" in run.warnings()[-1]
    assert not coterie.run("fedavg", out=tmp_path / "s", **SMALL).warnings()


def test_a_pipe_is_no_model_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(CoterieError, match="is not a file"):
        coterie.load_model(tmp_path / "m.safetensors")


def test_a_model_file_cannot_ask_for_any_amount_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    coterie.run("fedavg", model="mlp", out=tmp_path / "r", **SMALL).export(0, path)
    with safe_open(path, "pt") as f:
        meta = f.metadata()
    about = {**json.loads(meta["coterie"]), "options": {"hidden": [10**5, 10**5]}}
    save_file(load_file(path), path, {**meta, "coterie": json.dumps(about)})
    with pytest.raises(CoterieError, match="describes a model of 10,007,600,010 numbers"):
        coterie.load_model(path)


def test_a_download_without_an_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        status, headers = 200, dict[str, str]()

        def __enter__(self) -> "Endless":
            return self

        def __exit__(self, *about: object) -> None: ...

        def read(self, n: int) -> bytes:
            return b"x" * 1000

    monkeypatch.setattr(fetch, "_MOST_BYTES", 10_000)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda *a, **k: Endless())
    with pytest.raises(CoterieError, match="sends more than"):
        fetch.fetch_file(fetch.SourceFile("https://example.org/a", "0"), tmp_path)
    assert (tmp_path / "a.part").stat().st_size <= 10_000
