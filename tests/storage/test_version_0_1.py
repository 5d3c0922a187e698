"""Run folders, checkpoints and exported models that version 0.1 wrote."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import coterie
from coterie.engine.session.resume import recorded
from coterie.storage.run_folder import read_settings

V0_1 = Path(__file__).parents[1] / "fixtures" / "v0_1"
# mean of the personal accuracies after the last round, and the predictions of client 1 for the first eight digits
KNOWN = {
    "fedrep": (0.7264175940646529, [6, 2, 6, 3, 6, 3, 6, 9]),
    "fedcpmd": (0.6908129636989931, [6, 6, 6, 3, 4, 3, 6, 7]),
    "ditto-disk": (0.6472683161102278, [6, 6, 6, 3, 6, 3, 6, 6]),
}


@pytest.fixture(params=[*KNOWN, "fedcpmd-paper"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(V0_1 / request.param, tmp_path / request.param))


def test_a_run_opens_with_its_results_and_models(folder: Path) -> None:
    run = coterie.open_run(folder)
    assert run.finished and run.personal(1) is not None
    items = run.session().federation.dataset.x[:8].numpy()
    if folder.name in KNOWN:
        score, values = KNOWN[folder.name]
        assert run.summary()["personal"]["last"] == score
        assert run.predict(1, items).values.tolist() == values


def test_a_run_is_resumed_with_more_rounds(folder: Path) -> None:
    before = coterie.open_run(folder).last_round
    run = coterie.resume(folder, rounds=before + 1, workers=1)
    assert run.finished and run.last_round == before + 1
    assert len(run.events) == before + 1 + (run.events[0]["round"] == 0)


def test_an_exported_model_predicts_as_the_run_does() -> None:
    run = coterie.open_run(V0_1 / "fedrep")
    items = run.session().federation.dataset.x[:8].numpy()
    model = coterie.load_model(V0_1 / "fedrep-client1.safetensors")
    assert np.array_equal(model.predict(items).values, run.predict(1, items).values)
    assert torch.equal(torch.as_tensor(model.predict(items).outputs), torch.as_tensor(run.predict(1, items).outputs))


def test_the_model_ecsfl_cnn_keeps_the_three_fully_connected_layers_it_had(tmp_path: Path) -> None:
    flat = {"model_options": {"fc_in": "flatten"}}
    run = coterie.run("fedavg", "digits", "ecsfl-cnn", clients=2, rounds=1, epochs=0.1, out=tmp_path / "run", **flat)
    stored = read_settings(run.path)
    stored["settings"]["model_options"] = {}
    assert recorded(stored).model_options == {}
    stored["versions"]["coterie"] = "0.1.0"
    assert recorded(stored).model_options == {"fc_in": "flatten"}

    now, old = tmp_path / "now.safetensors", tmp_path / "old.safetensors"
    run.export(0, now)
    with safe_open(now, "pt") as file:
        about = json.loads(file.metadata()["coterie"])
    save_file(load_file(now), old, {"coterie": json.dumps({**about, "options": {}})})
    items = run.session().federation.dataset.x[:8].numpy()
    assert coterie.load_model(old).predict(items).values.tolist() == run.predict(0, items).values.tolist()
