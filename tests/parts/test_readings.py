"""Readings: presets; a variant's defaults override them, and the user's settings override both."""

import tomllib
from importlib.resources import files
from typing import Any, ClassVar, Literal, get_args

import pytest
from pydantic import Field

from coterie.config import settings
from coterie.core.method import Method
from coterie.engine.session import recorded
from coterie.errors import CoterieError
from coterie.methods import READINGS, build, fields, find, known, restored, unusual_reading, written_out
from coterie.parts.readings import ReadingSettings
from coterie.parts.variants import with_defaults

FIVE = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")
READ = [n for n in known() if issubclass(find(n).Settings, ReadingSettings)]


class TwoReadings(ReadingSettings):
    readings: ClassVar[dict[str, dict[str, Any]]] = {"mended": {"a": 10, "b": 20}}
    reading: Literal["paper", "mended"] = "mended"
    a: int = Field(1, ge=0)
    b: int = 2


class OfTwo(Method):
    Settings = TwoReadings


class Variant(OfTwo):
    Settings = with_defaults(TwoReadings, a=5)


def values(method: type[Method], **own: Any) -> tuple[int, int]:
    hp = build(method, own).hp
    return hp.a, hp.b


def test_a_reading_is_weaker_than_a_variant_and_a_variant_weaker_than_the_user() -> None:
    assert values(OfTwo) == (10, 20) and values(OfTwo, reading="paper") == (1, 2)
    assert values(OfTwo, a=7) == (7, 20) and values(OfTwo, reading="paper", a=7) == (7, 2)
    assert values(Variant) == (5, 20) and values(Variant, reading="paper") == (5, 2)
    assert values(Variant, a=7) == (7, 20)


def test_a_variant_may_fix_its_reading() -> None:
    class AsPrinted(OfTwo):
        Settings = with_defaults(TwoReadings, reading="paper")

    assert values(AsPrinted) == (1, 2) and values(AsPrinted, reading="mended") == (10, 20)


def test_wrong_readings_and_values_get_a_sentence() -> None:
    with pytest.raises(CoterieError, match="reading = 'text' is invalid: it must be 'paper' or 'mended'"):
        build(OfTwo, {"reading": "text"})
    with pytest.raises(CoterieError, match="a = -1 is invalid"):
        build(OfTwo, {"a": -1})


# ---- readings that are classes ---------------------------------------------------------------------------------------
# what version 0.1 stored with a run: all settings of a class that held several protocols
ECSFL = {
    "reading": "mended", "aggregation": "mean", "select": "herding", "select_fraction": 0.1, "select_least": 8,
    "train_fraction": 1.0, "epsilon": 0.001, "stop": "round", "d_min": 1e-12, "distance_norm": "none", "n_edges": 1,
    "two_stage": True, "projection": 256, "use": "best",
}  # fmt: skip


def test_the_five_have_readings() -> None:
    assert all({"paper", "mended"} <= set(get_args(fields(name)["reading"].annotation)) for name in FIVE)


@pytest.mark.parametrize("name", READINGS)
def test_a_name_runs_one_of_its_readings(name: str) -> None:
    usual = fields(name)["reading"].default
    assert find(name, usual) is find(name) and usual in READINGS[name]
    assert unusual_reading(build(name)) == ""


@pytest.mark.parametrize("name", {**READINGS, **dict.fromkeys(READ)})
def test_what_a_run_stores_gives_the_same_method_again(name: str) -> None:
    for reading in READINGS.get(name, getattr(find(name).Settings, "readings", {})):
        built = build(name, {"reading": reading})
        stored = written_out(name, built)
        again = build(name, stored)
        assert type(again) is type(built) and again.hp == built.hp and written_out(name, again) == stored
        assert restored(name, stored) == stored


def test_an_unknown_reading_gets_a_sentence() -> None:
    with pytest.raises(CoterieError, match='unknown reading of ecs-fl "code"'):
        build("ecs-fl", {"reading": "code"})


def test_a_reading_decides_which_settings_there_are() -> None:
    assert settings("fedgmh", reading="paper", beta=0.1).settings == {"reading": "paper", "beta": 0.1}
    with pytest.raises(CoterieError, match='unknown setting "beta"'):
        settings("fedgmh", beta=0.1)


def test_settings_of_version_0_1_find_the_class_that_does_the_same() -> None:
    new = restored("ecs-fl", ECSFL)
    assert new == {k: v for k, v in ECSFL.items() if k not in ("aggregation", "select", "distance_norm", "two_stage")}
    assert type(build("ecs-fl", new)) is find("ecs-fl", "mended")
    hybrid = {**ECSFL, "select": "nearest", "use": "received"}  # of the text's class, whatever the reading says
    assert restored("ecs-fl", hybrid)["reading"] == "paper" and restored("ecs-fl", hybrid)["two_stage"] is True
    with pytest.raises(CoterieError, match="no method of this version combines"):
        restored("ecs-fl", {**ECSFL, "select": "nearest"})


@pytest.mark.parametrize("name", READ)
def test_a_reading_sets_only_settings_that_the_method_has(name: str) -> None:
    Settings = find(name).Settings
    if not Settings.fixed and name in FIVE:
        assert all(field in Settings.model_fields for preset in Settings.readings.values() for field in preset)


@pytest.mark.parametrize("paper", FIVE)
def test_the_rows_of_a_papers_tables_name_their_reading(paper: str) -> None:
    rows = tomllib.loads(files("coterie.papers").joinpath(f"presets/{paper}.toml").read_text())["methods"]
    own = [row for row in rows.values() if "reading" in fields(row["method"]) and row["method"].startswith(paper)]
    found = [row.get("reading") for row in own]
    assert found and set(found) == {"paper"}


def test_a_run_keeps_the_values_of_its_reading_and_one_without_any_is_of_the_text() -> None:
    run = settings("fedpc", gamma=0.25).model_dump(mode="json")
    stored = written_out("fedpc", build("fedpc", {"gamma": 0.25}))
    new = recorded({"settings": run, "method": {"settings": {**stored, "tau": 0.7}}})
    assert new.settings["reading"] == "mended" and new.settings["tau"] == 0.7 and new.settings["gamma"] == 0.25
    text = {
        k: v for k, v in build("fedpc", {"reading": "paper"}).hp.model_dump().items() if k not in ("reading", "tau")
    }
    old = recorded({"settings": run, "method": {"settings": text}})
    assert build("fedpc", old.settings).hp == build("fedpc", {"reading": "paper"}).hp
    assert recorded({"settings": settings("fedavg").model_dump(), "method": {"settings": {}}}).settings == {}
