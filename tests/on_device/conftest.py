"""Tests on the stand-in for a GPU run in a process of their own: `pytest tests/on_device`.

PyTorch decides at the first gradient which devices have threads, and processes forked later cannot train. Both would
break other tests in the same process.
"""

from pathlib import Path

import pytest

from support import standin

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests next to others; otherwise compile and register the device before the first gradient."""
    own = [item for item in items if HERE in item.path.parents]
    if len(own) < len(items):
        items[:] = [item for item in items if item not in own]
        config.hook.pytest_deselected(items=own)
    elif why := standin.missing():
        for item in own:
            item.add_marker(pytest.mark.skip(why))
    elif own:
        standin.load()
