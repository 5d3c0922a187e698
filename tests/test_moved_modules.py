"""Modules of version 0.1 that are imported by old code."""

import importlib

import pytest

import coterie


@pytest.mark.parametrize("name", sorted(coterie._MOVED))
def test_the_error_names_the_new_place_of_a_moved_module_which_exists(name: str) -> None:
    importlib.import_module(f"coterie.{coterie._MOVED[name]}")
    with pytest.raises(ImportError) as error:
        importlib.import_module(f"coterie.{name}")
    assert str(error.value) == f"coterie.{name} of version 0.1 is coterie.{coterie._MOVED[name]} now"
    with pytest.raises(ImportError, match="is coterie"):
        exec(f"from coterie import {name}", {})
