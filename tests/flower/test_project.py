"""The Flower project that `coterie flower new` writes, and the configuration in it; Flower is not needed."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.config import settings
from coterie.errors import CoterieError
from coterie.flower.project import write_project
from coterie.flower.run_config import read_config, run_folder


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the configuration as Flower hands it to an app: without tables, with dots in the keys."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def config_of(project: Path) -> dict[str, Any]:
    table = tomllib.loads((project / "pyproject.toml").read_text())
    return flat(table["tool"]["flwr"]["app"]["config"])


def test_a_project_has_the_settings_of_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "wards"
    options = ["--rounds", "7", "--set", "head_epochs=3", "--set", "model_options={hidden = 8}", "--model", "mlp"]
    done = CliRunner().invoke(app, ["flower", "new", str(folder), "fedrep", *options, "--min-clients", "3"])
    assert done.exit_code == 0, done.output
    config = config_of(folder)
    chosen, cloud = read_config(config)
    assert chosen == settings(method="fedrep", rounds=7, head_epochs=3, model="mlp", model_options={"hidden": 8})
    assert (cloud.min_clients, cloud.deadline, cloud.shape) == (3, 600.0, ())
    assert run_folder(config) == Path("runs/wards")
    assert all(isinstance(value, str | int | float | bool) for value in config.values())  # Flower allows no others


def test_a_project_for_the_nodes_own_data_names_their_form(tmp_path: Path) -> None:
    folder, form = tmp_path / "own", ["--shape", "1,8,8", "--classes", "ill,well"]
    done = CliRunner().invoke(app, ["flower", "new", str(folder), "ditto", "--clients", "5", *form])
    assert done.exit_code == 0, done.output
    chosen, cloud = read_config(config_of(folder))
    assert (cloud.shape, cloud.classes, cloud.class_names) == ((1, 8, 8), 2, ("ill", "well"))
    assert chosen.federation.clients == 5 and "data" not in config_of(folder)


@pytest.mark.parametrize(
    ("name", "given", "cloud", "sentence"),
    [
        ("9wards", {}, {}, "must start with a letter"),
        ("wards", {"rouns": 3}, {}, 'unknown setting "rouns"; did you mean "rounds"'),
        ("wards", {"rounds": -1}, {}, "rounds = -1 is invalid"),
        ("wards", {}, {"min_client": 3}, 'unknown setting of the table cloud "min-client"; did you mean "min-clients"'),
        ("wards", {}, {"certs": "x"}, 'unknown setting of the table cloud "certs"'),
        ("wards", {}, {"deadline": "soon"}, "cloud: deadline = 'soon' is invalid: it must be a valid number"),
        ("wards", {"model_options": "{hidden"}, {}, "model_options = '{hidden' is not JSON"),
    ],
)
def test_a_mistake_gets_one_sentence_and_no_project(
    tmp_path: Path, name: str, given: dict[str, Any], cloud: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CoterieError, match=sentence):
        write_project(tmp_path / name, {"method": "fedavg", **given}, cloud)
    assert not (tmp_path / name).exists()


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    write_project(tmp_path / "wards", {"method": "fedavg"}, {})
    with pytest.raises(CoterieError, match="exists and is not empty"):
        write_project(tmp_path / "wards", {"method": "fedavg"}, {})
