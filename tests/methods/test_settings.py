"""Settings of all registered methods."""

import pytest

from coterie.config import Engine, RunSettings
from coterie.data.settings import PartitionSettings
from coterie.methods import find, known


@pytest.mark.parametrize("name", known())
def test_no_setting_of_a_method_has_the_name_of_another_setting(name: str) -> None:
    """Names are sorted out between run, federation and method, so each may belong to one of them only."""
    taken = {*RunSettings.model_fields, *PartitionSettings.model_fields, *Engine.model_fields}
    assert not taken & find(name).Settings.model_fields.keys()
