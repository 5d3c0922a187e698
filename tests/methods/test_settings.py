"""Settings of all registered methods."""

import pytest

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
