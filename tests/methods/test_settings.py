"""Settings of all registered methods."""

from importlib.metadata import EntryPoint

import pytest

from coterie import methods
from coterie.config import Engine, RunSettings
from coterie.data.settings import PartitionSettings
from coterie.errors import CoterieError
from coterie.methods import build_method, find, method_names


@pytest.mark.parametrize("name", method_names())
def test_no_setting_of_a_method_has_the_name_of_a_setting_of_run_or_federation(name: str) -> None:
    """Settings are assigned to run, federation or method by name, so a name may belong to one of them only."""
    taken = {*RunSettings.model_fields, *PartitionSettings.model_fields, *Engine.model_fields}
    assert not taken & find(name).Settings.model_fields.keys()


BAD: list[tuple[str, dict[str, float]]] = [("q-ffl", {"q": -1}), ("moon", {"tau": 0}), ("scaffold", {"server_lr": 0})]


@pytest.mark.parametrize(("method", "bad"), BAD)
def test_impossible_settings_are_refused(method: str, bad: dict[str, float]) -> None:
    with pytest.raises(CoterieError, match=next(iter(bad))):
        build_method(method, bad)


def test_an_entry_point_with_the_name_of_a_built_in_method_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [EntryPoint("fedrep", "theirs:FedRep", methods.METHOD_GROUP), EntryPoint("mine", "my:Own", "m")]
    monkeypatch.setattr(methods, "entry_points", lambda group: points)
    found = methods._points.__wrapped__()
    assert found["fedrep"].value == "coterie.methods.fedrep:FedRep" and found["mine"].value == "my:Own"
    assert [r.getMessage() for r in caplog.records] == [
        'the method "fedrep" of theirs:FedRep is ignored, because Coterie has one of this name'
    ]
