"""What a run leaves behind, and what it says when it goes wrong."""

import os
import sys

import pandas as pd
import pytest
import torch
from pydantic import ValidationError

import coterie
from coterie.board.runs import WatchedRun
from coterie.cli.export import _cell
from coterie.cli.screen import frame_table
from coterie.cli.words import parents, source
from coterie.config import settings
from coterie.data.sources import load_dataset
from coterie.errors import CoterieError
from coterie.export.personal_model import Items
from coterie.methods import find, method_names

SMALL = {"clients": 4, "rounds": 1, "epochs": 1, "model": "mlp", "workers": 1, "subset": 200}


def test_a_run_leaves_threads_and_random_state_as_they_were(tmp_path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        coterie.run("fedavg", out=tmp_path / "a", **SMALL)
        assert torch.get_num_threads() == before + 1 and torch.equal(torch.rand(3), expected)
    finally:
        torch.set_num_threads(before)


def test_momentum_without_effect_is_refused() -> None:
    with pytest.raises(CoterieError, match=r"momentum = 0\.9 has no effect with optimizer = adam"):
        settings("fedavg", optimizer="adam", momentum=0.9)
    assert settings("fedavg", momentum=0.9).momentum == 0.9


def test_a_diverged_run_is_said_and_has_an_exit_code_of_its_own(cli) -> None:
    options = ["--clients", "4", "--rounds", "2", "--epochs", "1", "--model", "mlp", "--set", "subset=200"]
    code, _, err = cli("run", "fedavg", *options, "--lr", "1e6", "--out", "wild")
    assert code == 4 and "training diverged" in err
    assert any("uploads held NaN or infinity" in w for w in coterie.open_run("wild").warnings())
    assert cli("run", "fedavg", *options, "--out", "calm")[0] == 0


@pytest.mark.parametrize(("lambda1", "words"), [(1e9, ["every agent was rejected in rounds 1 to 3"]), (0.0, [])])
def test_a_run_that_stands_still_says_so(tmp_path, lambda1, words) -> None:
    given = {**SMALL, "rounds": 3, "join": 1.0, "public": 20, "warmup_epochs": 20, "lr": 0.3, "k0": 1, "val_share": 0.4}
    run = coterie.run("sc-fpfl", out=tmp_path / "a", lambda1=lambda1, **given)
    assert [w.split(": ")[1] for w in run.warnings()] == words


def test_a_method_of_another_package_is_not_called_checked() -> None:
    class Mine(coterie.Method):
        pass

    assert source(Mine) == f"the module {__name__}" and source(find("apfl")) == "checked against the authors' code"
    assert source(find("fedpc-mended")) == source(find("autopilot")) == "Coterie's own method"


def test_mended_methods_are_listed_and_have_variants_of_their_own() -> None:
    above = parents({name: find(name) for name in method_names()})
    assert above["fedpc-mended"] is None and above["fedpc-mended-mean"] == "fedpc-mended"
    assert above["fedpc-mean"] == "fedpc" and above["fedcpmd-code"] == "fedcpmd"


# ---- wrong arguments get one sentence --------------------------------------------------------------------------------
class SamplesAStranger(coterie.Method):
    def sample(self, server, round, rng):
        return [99]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    return coterie.run("fedavg", out=tmp_path_factory.mktemp("small") / "a", **SMALL)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: run.personal(None), "client = None is invalid"),
        (lambda run: run.personal(1.5), r"client = 1\.5 is invalid"),
        (lambda run: coterie.load_model(3), "loaded from a file, not from 3"),
        (lambda run: coterie.run(on_round=3, **SMALL), "on_round = 3 is invalid"),
        (lambda run: coterie.run(track=3, **SMALL), 'unknown tracker "3"'),
        (lambda run: coterie.resume(run.path, rounds="x"), "rounds = 'x' is invalid"),
        (lambda run: coterie.run(SamplesAStranger, out=run.path.parent / "b", **SMALL), "sample returned 99"),
        (lambda run: coterie.run(callbacks=3, **SMALL), "callbacks = 3 is invalid"),
        (lambda run: run.export(0, None), "path = None is invalid"),
        (lambda run: coterie.tune("fedavg", space=None, rounds=1), "space = None is invalid"),
        (lambda run: coterie.run(data=[1, 2]), "data of type list is invalid: .*from_arrays"),
        (lambda run: coterie.run("ifca", groups=10**6, **SMALL), "groups = 1000000 is invalid"),
    ],
)
def test_wrong_arguments_of_the_python_interface_get_one_sentence(small_run, call, words) -> None:
    with pytest.raises(CoterieError, match=words):
        call(small_run)


def test_usual_names_of_settings_get_a_hint_and_optimisers_have_any_case() -> None:
    for name, hint in (
        ("batch_size", "batch"), ("learning_rate", "lr"), ("num_clients", "clients"), ("local_epochs", "epochs"),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=f'unknown setting "{name}"; did you mean "{hint}"'):
            settings("fedavg", **{name: 8})
    assert settings("fedavg", optimizer="AdamW").optimizer == "adamw"


def test_a_data_function_is_found_in_the_current_folder_and_a_table_gets_a_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "here_only.py").write_text(
        "from coterie.data.sources import digits\n\n\ndef make():\n    return digits()\n"
    )
    assert load_dataset("here_only:make").name == "digits"
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CoterieError, match=r"mine\.csv is a table"):
        load_dataset("mine.csv")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CoterieError, match="neither a file nor a folder"):
        load_dataset("pipe.npz")


def test_the_board_names_the_data_of_devices_and_shows_warnings(tmp_path) -> None:
    run = WatchedRun(tmp_path, "cloud")
    run.settings = {
        "settings": {"data": "digits", "federation": {"partition": "dirichlet(0.1)"}, "rounds": 3, "method": "fedavg"},
        "partition": {"partition": "own"},
        "warnings": ["the model ends in a softmax"],
    }
    row = run.snapshot()
    assert (row["data"], row["partition"]) == ("own data", "by device") and row["warnings"] == run.settings["warnings"]


# ---- model files -----------------------------------------------------------------------------------------------------
def test_a_model_file_is_exported_for_other_programs(small_run, tmp_path, cli) -> None:
    small_run.export(0, tmp_path / "m.safetensors")
    code, out, _ = cli("export", str(tmp_path / "m.safetensors"), "--format", "torchscript")
    written = next(p for p in tmp_path.iterdir() if p.suffix != ".safetensors")
    assert code == 0 and written.name in out.replace("\n", "")
    assert cli("export", str(tmp_path / "m.safetensors"))[0] == 2


@pytest.mark.parametrize("wrong", [{"mean": [float("nan")]}, {"std": [0.0]}, {"std": [-1.0]}, {"turn": float("inf")}])
def test_impossible_numbers_in_a_model_file_are_refused(wrong) -> None:
    Items(type="float32", shape=(1, 8, 8), mean=(0.5,), std=(1.0,))
    with pytest.raises(ValidationError):
        Items(**{"type": "float32", "shape": (1, 8, 8), **wrong})


def test_names_of_classes_are_shown_without_control_characters_and_formulas() -> None:
    table = frame_table(pd.DataFrame({"items": [1]}, index=["\x1b[31mred\nforged"]))
    assert list(table.columns[0].cells) == ["?[31mred?forged"]
    assert [_cell(t) for t in ("=1+1", "@x", "+1", "-1", "-a", "cat\n")] == ["'=1+1", "'@x", "'+1", "-1", "'-a", "cat?"]
