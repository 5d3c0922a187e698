"""Progress of the Python interface: on a terminal and in a notebook, and nowhere else."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import coterie
from coterie import progress
from coterie.engine.session import Callbacks

SMALL: dict[str, Any] = {"clients": 3, "rounds": 2, "subset": 300, "epochs": 1, "workers": 1}


class Shell:
    """A notebook that keeps all that is displayed."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, html: Any, display_id: bool) -> "Shell":
        assert display_id
        self.update(html)
        return self

    def update(self, html: Any) -> None:
        self.shown.append(html)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Make Python believe that it runs in a notebook."""
    shell, kernel = Shell(), type("ZMQInteractiveShell", (), {})()
    parts = SimpleNamespace(HTML=str, display=shell.display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel, version_info=(9, 0)))
    monkeypatch.setitem(sys.modules, "IPython.display", parts)
    return shell


def test_nothing_is_shown_where_nobody_looks(tmp_path, capfd) -> None:
    coterie.run("fedavg", out=tmp_path / "a", **SMALL)
    coterie.compare(["fedavg"], out=tmp_path / "b", **SMALL)
    assert capfd.readouterr().err == ""


def test_a_terminal_gets_a_bar_unless_the_caller_has_callbacks(monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert progress.wanted(None, None) and progress.wanted(True, Callbacks())
    assert not progress.wanted(False, None) and not progress.wanted(None, Callbacks())


def test_a_notebook_shows_rounds_while_a_run_lasts(notebook, tmp_path) -> None:
    run = coterie.run("fedavg", out=tmp_path / "a", **SMALL)
    texts = notebook.shown
    assert texts[0] == texts[-1] == "" and 'value="2" max="2"' in texts[-2] and "accuracy" in texts[-2]
    assert [t.split("value=")[1][:3] for t in texts[1:-1]] == ['"0"', '"1"', '"2"']
    notebook.shown.clear()
    coterie.resume(run.path, rounds=3, progress=False)
    assert not notebook.shown
    coterie.compare(["fedavg"], out=tmp_path / "c", seeds=1, **SMALL)
    assert any("compare" in t for t in notebook.shown) and notebook.shown[-1] == ""
    notebook.shown.clear()
    coterie.tune("fedavg", space={"lr": [0.01, 0.1]}, rounds=2, out=tmp_path / "t", clients=3, subset=300, workers=1)
    assert any("tune" in t for t in notebook.shown) and notebook.shown[-1] == ""


def test_progress_true_prints_lines_into_a_file(tmp_path, capfd) -> None:
    coterie.run("fedavg", out=tmp_path / "a", progress=True, **SMALL)
    assert [line.split()[1] for line in capfd.readouterr().err.splitlines()] == ["1/2", "2/2"]
