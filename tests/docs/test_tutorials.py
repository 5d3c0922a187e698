"""The tutorials are executed notebooks: they have outputs without errors, and run again from top to bottom."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_is_a_tutorial_for_each_task() -> None:
    names = {"own-data", "own-model", "own-method", "two-hosts", "report"}
    assert {p.stem for p in TUTORIALS} == names


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_was_executed_from_top_to_bottom_and_is_small(path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum(bool(cell["outputs"]) for cell in code) >= 3
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < 200_000
    assert "/tmp/" not in path.read_text() and "/home/" not in path.read_text()
    for cell in code:
        compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_links_of_a_tutorial_lead_to_pages(path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    assert text.startswith("# ")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target


@pytest.mark.long
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs(path, tmp_path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
