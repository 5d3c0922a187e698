"""Settings and fixtures of all tests; helpers to import are in tests/support."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each process

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support import toy
from support.browser import browser
from support.command_line import coterie_command

# Other tests may run on the same cores: the time that one example takes says nothing.
hypothesis.settings.register_profile("coterie", deadline=None)
hypothesis.settings.load_profile("coterie")


@pytest.fixture(autouse=True)
def _closed_folders() -> Iterator[None]:
    """Close the run folders that a test opened with `support.toy`."""
    yield
    toy.close_folders()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run the command line inside an empty folder; see `coterie_command`."""
    monkeypatch.chdir(tmp_path)
    return coterie_command


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a headless browser, or skip the test where none is installed."""
    with browser(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium
