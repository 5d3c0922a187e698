"""Readings: presets; a variant's defaults override them, and the user's settings override both."""

from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from coterie.config import settings
from coterie.core.method import Method
from coterie.engine.session import recorded
from coterie.errors import CoterieError
from coterie.methods import BUILT_IN, READINGS, build_method, fields, find, method_names, resolve, unusual_reading
from coterie.methods.restore import restored
from coterie.methods.stored import RENAMED, run_settings_of_0_1
from coterie.parts.readings import ReadingSettings
from coterie.parts.variants import with_defaults

FIVE = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")
READ = [n for n in method_names() if issubclass(find(n).Settings, ReadingSettings)]


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
    hp = build_method(method, own).hp
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
        build_method(OfTwo, {"reading": "text"})
    with pytest.raises(CoterieError, match="a = -1 is invalid"):
        build_method(OfTwo, {"a": -1})


# ---- readings that are classes ---------------------------------------------------------------------------------------
# what version 0.1 stored with a run: all settings of a class that held several protocols
ECSFL = {
    "reading": "mended", "aggregation": "mean", "select": "herding", "select_fraction": 0.1, "select_least": 8,
    "train_fraction": 1.0, "epsilon": 0.001, "stop": "round", "d_min": 1e-12, "distance_norm": "none", "n_edges": 1,
    "two_stage": True, "projection": 256, "use": "best",
}  # fmt: skip


def test_a_papers_name_runs_the_text_and_the_mended_method_has_a_name_of_its_own() -> None:
    for name in FIVE:
        assert not find(name).__name__.endswith("Mended") and find(name).card.certainty == "P"
        ours = find(f"{name}-mended").card
        assert ours.certainty == "O" and ours.title == f"{find(name).card.title} (mended)"


def test_titles_are_unique() -> None:
    titles = [find(name).card.title or name for name in BUILT_IN]
    assert sorted(titles) == sorted(set(titles))


@pytest.mark.parametrize(("name", "reading"), [(n, r) for n, readings in READINGS.items() for r in readings])
def test_a_reading_with_a_protocol_of_its_own_is_a_method(name: str, reading: str) -> None:
    assert resolve(name, {"reading": reading}) == (READINGS[name][reading], {})
    assert settings(name, reading=reading).method == READINGS[name][reading]
    assert type(build_method(name, {"reading": reading})) is find(READINGS[name][reading])


@pytest.mark.parametrize("name", READ)
def test_what_a_run_stores_gives_the_same_method_again(name: str) -> None:
    for reading in find(name).Settings.readings:  # type: ignore[attr-defined]
        built = build_method(name, {"reading": reading})
        stored = built.hp.model_dump(mode="json")
        assert restored(name, stored) == (name, stored) and build_method(name, stored).hp == built.hp
        assert unusual_reading(built) == ("" if reading == fields(name)["reading"].default else reading)


def test_unknown_and_former_readings_and_names_get_a_sentence() -> None:
    with pytest.raises(CoterieError, match='unknown reading of fedcpmd "text"'):
        build_method("fedcpmd", {"reading": "text"})
    with pytest.raises(CoterieError, match=r"a method of its own .*: sc-fpfl-mended"):
        settings("sc-fpfl", reading="mended")
    for former in RENAMED:
        with pytest.raises(CoterieError, match=f'"{former}" is called .* since version 0.2'):
            settings(former)


def test_a_method_has_only_settings_that_its_class_uses() -> None:
    assert settings("fedgmh", beta=0.1).settings == {"beta": 0.1}
    with pytest.raises(CoterieError, match='unknown setting "beta"'):
        settings("fedgmh-mended", beta=0.1)


def test_settings_of_version_0_1_find_the_class_that_does_the_same() -> None:
    gone = ("reading", "aggregation", "select", "distance_norm", "two_stage", "use")
    of_run = run_settings_of_0_1
    assert of_run(ECSFL) == {"use": "best"} and of_run({**ECSFL, "reading": "paper"}) == {}
    assert restored("ecs-fl", ECSFL) == ("ecs-fl-mended", {k: v for k, v in ECSFL.items() if k not in gone})
    hybrid = {**ECSFL, "select": "nearest", "use": "received"}  # of the text's class, whatever the reading says
    name, kept = restored("ecs-fl", hybrid)
    assert name == "ecs-fl" and kept["two_stage"] is True
    with pytest.raises(CoterieError, match="no method of this version combines"):
        restored("ecs-fl", {**ECSFL, "select": "nearest"})
    weighed = {"reading": "paper", "feature_weight": "samples"}
    assert restored("fedgmh", weighed) == ("fedgmh", {"reading": "paper"})
    assert of_run(weighed) == {"weighting": "samples"}
    assert of_run({**weighed, "feature_weight": "uniform"}) == {"weighting": None}


@pytest.mark.parametrize("name", READ)
def test_a_reading_sets_only_settings_that_the_method_has(name: str) -> None:
    Settings = find(name).Settings
    if not Settings.fixed and name in FIVE:
        assert all(field in Settings.model_fields for preset in Settings.readings.values() for field in preset)


def test_a_run_keeps_the_values_of_its_reading() -> None:
    run = settings("fedgmh", beta=0.25).model_dump(mode="json")
    stored = build_method("fedgmh", {"beta": 0.25}).hp.model_dump(mode="json")
    new = recorded({"settings": run, "method": {"settings": {**stored, "eta_h": 0.7}}})
    assert (new.method, new.settings["eta_h"], new.settings["beta"]) == ("fedgmh", 0.7, 0.25)
    assert recorded({"settings": settings("fedavg").model_dump(), "method": {"settings": {}}}).settings == {}


def test_variants_of_fedcpmd_and_fedpc_keep_their_names_and_differ_in_their_defaults_alone() -> None:
    for name, default in (
        ("fedcpmd-auto", {"distance": "auto"}),
        ("fedpc-mended-no-proto", {"gamma": 0, "rehearsal": 0}),
    ):
        made, base = find(name), find(name).__mro__[1]
        assert BUILT_IN[name].endswith(f":{made.__name__}") and made.card.title != base.card.title and made.__doc__
        own, before = made.Settings().model_dump(), base.Settings().model_dump()  # type: ignore[attr-defined]
        assert {k: v for k, v in own.items() if v != before[k]} == default
