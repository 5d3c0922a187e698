"""The documentation is true: its Python runs, its commands parse, its links lead somewhere."""

import contextlib
import io
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from coterie.cli.app import app
from coterie.cli.paper import _commas
from coterie.methods import known
from coterie.papers import presets
from coterie.report.figures import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of exactly this language; "python norun" is for those that need files nobody has."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("coterie "):
                    found.append(pytest.param(line, id=f"{page.name}: {line[:60]}"))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        if "fedclip" in block:
            monkeypatch.syspath_prepend(str(ROOT / "examples" / "fedclip" / "src"))
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, str(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_docs_parses(line) -> None:
    """Names, options and methods exist; nothing is run."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command, context = found, click.Context(found, parent=context)
    parsed = command.make_context(command.name, list(words))
    if command.name == "figure":
        assert parsed.params["kind"] in KINDS
        return
    if command.name == "paper" and parsed.params["name"] == "list":
        assert parsed.params["item"] in (None, *presets.PAPERS)
        return
    if command.name == "paper":  # the item knows its rows and columns
        item = presets.item(parsed.params["name"], parsed.params["item"])
        rows = parsed.params["methods"]
        presets.choose(item, _commas(parsed.params["data"]), [] if rows == "all" else _commas(rows))
        return
    given = parsed.params.get("methods") or [parsed.params.get("method")]
    for method in given:
        assert method in (None, "all", "fedclip") or method in known()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_toml_of_a_page_is_toml(page) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    for name in ("build", "catalogue"):
        sys.modules.pop(name, None)
    import build

    yield build
    for name in ("build", "catalogue"):
        sys.modules.pop(name, None)


def test_the_site_builds_with_sound_links_and_a_page_for_every_method(build, tmp_path) -> None:
    assert build.main(tmp_path / "site") == []
    site = tmp_path / "site"
    for name in known():
        if name != "fedclip":
            assert (site / "methods" / f"{name}.html").exists()
            assert f"methods/{name}.html" in (site / "methods.html").read_text()
    for page in site.rglob("*.html"):
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', page.read_text()), "needs the network"
    assert "warmup_epochs" in (site / "methods" / "sc-fpfl.html").read_text()


def test_a_broken_link_is_named(build, tmp_path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "index.md").write_text("# A\n\n[b](b.md) [c](b.md#there) [d](b.md#not-there) [e](gone.md) [f](#a)\n")
    (source / "b.md").write_text("# B\n\n## There\n\n[out](https://example.org/x)\n")
    assert build.main(tmp_path / "site", source) == [
        "index.html links to b.html#not-there, which does not exist",
        "index.html links to gone.html, which does not exist",
    ]


def test_links_of_the_readme_lead_to_files() -> None:
    for href in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert href.startswith("http") or (ROOT / href).exists(), href
