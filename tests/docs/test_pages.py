"""The documentation agrees with the code: its Python runs, its commands parse, its links exist."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from coterie.cli.app import app
from coterie.cli.options import commas
from coterie.config import Engine, RunSettings
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.data.settings import PartitionSettings
from coterie.methods import method_names
from coterie.papers import presets
from coterie.results.report.figures import KINDS
from support import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return fenced blocks of exactly this language; "python norun" marks those that need further files."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands() -> list[Any]:
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("coterie "):
                    found.append(pytest.param(line, id=f"{page.name}: {line[:60]}"))
    make = (ROOT / "Makefile").read_text()
    demo = re.search(r"^DEMO := (.*)$", make, flags=re.M)[1]
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", make, flags=re.M)[1]
    for line in re.findall(r"\bcoterie [^\n]*", re.sub(r"\$\((subst [^)]*\$\()?DEMO\)+", demo, recipe)):
        found.append(pytest.param(line.removesuffix('"'), id=f"make demo: {line[:60]}"))
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
    """Check that names, options and methods exist, without running the command."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"unknown command {name}"
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
        presets.narrow(item, commas(parsed.params["data"]), [] if rows == "all" else commas(rows))
        return
    given = parsed.params.get("methods") or [parsed.params.get("method")]
    given = commas(given) if isinstance(given, str) else given
    for method in given:
        assert method in (None, "all", "fedclip") or method in method_names()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_toml_of_a_page_is_toml(page) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


def written_links(page: Path) -> list[str]:
    """Return the targets of links and pictures of a page, except in code."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.fixture(scope="module")
def catalogue():
    sys.path.insert(0, str(DOCS))
    import catalogue

    yield catalogue
    sys.path.remove(str(DOCS))
    sys.modules.pop("catalogue", None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of_a_page_exist(page, catalogue) -> None:
    for link in written_links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        made = file.relative_to(DOCS).as_posix() if file.is_relative_to(DOCS) else ""
        assert file.exists() or made in catalogue.generated(), f"{page.name} links to {link}, which does not exist"
        if anchor and file.suffix == ".md":
            text = catalogue.generated()[made]() if made in catalogue.generated() else file.read_text()
            assert anchor in anchors(catalogue.fill(text)), f"{page.name} links to {link}: the heading does not exist"


def test_links_of_the_readme_are_absolute_and_lead_to_files() -> None:
    """The package index shows the README without the repository around it."""
    text = (ROOT / "README.md").read_text()
    links = dict(re.findall(r"^\[([a-z0-9-]+)\]: ([^\s#]+)", text, flags=re.M))
    used = set(re.findall(r"\]\[([a-z0-9-]+)\]", text))
    assert used == links.keys() and len(links) > 10
    assert not re.search(r"\]\((?!https://)", text) and all(link.startswith("https://") for link in links.values())
    for link in links.values():
        if path := re.search(r"/(?:blob|raw)/main/(.+)", link):
            assert (ROOT / path[1]).exists(), link


def test_every_written_page_is_in_the_navigation(catalogue) -> None:
    named = set(re.findall(r"(\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    there = {p.relative_to(DOCS).as_posix() for kind in ("*.md", "*.ipynb") for p in DOCS.rglob(kind)}
    assert there <= named


def test_every_method_is_in_the_menu_by_family(catalogue) -> None:
    listed = ["methods/fedpc.md"]
    menu = {family: pages for section in catalogue.menu(listed) for family, pages in section.items()}
    shown = [page for pages in menu.values() for entry in pages for page in entry.values()]
    own = [name for name, m in catalogue.methods().items() if f"methods/{name}.md" not in listed]
    assert sorted(shown) == sorted(f"methods/{name}.md" for name in own)
    assert {"FedRep": "methods/fedrep.md"} in menu["Split model"]


def test_every_method_has_a_page_with_its_settings(catalogue) -> None:
    pages = catalogue.generated()
    overview = pages["methods.md"]()
    for name in method_names():
        if name != "fedclip":
            assert f"methods/{name}.md" in pages
            assert overview.count(f"(methods/{name}.md)") == 2, "in the tree and in the table"
    assert "| `warmup_epochs` |" in pages["methods/sc-fpfl.md"]()


def test_the_page_of_settings_has_them_all_with_a_meaning(catalogue) -> None:
    text = catalogue.fill((DOCS / "settings.md").read_text())
    for model in (RunSettings, PartitionSettings, Engine):
        for name in model.model_fields:
            if name not in ("settings", "federation"):
                row = re.search(rf"^\| `{name}` \|.*\| (.*) \|$", text, flags=re.M)
                assert row and row[1], name


def test_counts_and_names_in_the_pages_are_those_of_the_registry(catalogue) -> None:
    for page in PAGES:
        text = page.read_text()
        assert catalogue.counted(text) == text, f"{page.name} is out of date: run python docs/catalogue.py"
        assert not re.search(r"^[-*]? ?<!-- count", text, flags=re.M), f"{page.name}: a comment here ends the paragraph"
        loose = re.search(r"\b\d+ (registered )?methods and (\d+ )?(variants|ablations)", text)
        assert not loose, f"{page.name} has a typed count: {loose and loose[0]}"
    assert "<!-- count methods -->" in (ROOT / "README.md").read_text()


def test_the_page_of_environment_variables_has_all_of_ours() -> None:
    source = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\bCOTERIE_[A-Z_]+", source)) == set(
        re.findall(r"\bCOTERIE_[A-Z_]+", (DOCS / "environment.md").read_text())
    )


def test_the_page_about_the_code_names_modules_and_functions_that_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    source = ROOT / "src" / "coterie"
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| `(\w+)` \| ([^|]*)\|$", text, flags=re.M)
    assert len(rows) > 8
    for module, function, hooks in rows:
        assert re.search(rf"^\s*(def|class) {function}\b", (source / module).read_text(), flags=re.M), (
            module,
            function,
        )
        for hook in re.findall(r"`(\w+)`", hooks):
            assert hasattr(Method, hook) or hasattr(EdgeMethod, hook), hook
    packages = set(re.findall(r"`(\w+)/`", text))
    assert {p.name for p in source.iterdir() if (p / "__init__.py").exists()} <= packages
    assert all(
        (source / name).exists() for name in re.findall(r"`([\w/]+\.py)`", text) if name != "tests/test_imports.py"
    )


@pytest.mark.long
def test_the_site_builds_strictly_and_needs_no_network(tmp_path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in method_names():
        assert name == "fedclip" or (site / "methods" / f"{name}.html").exists()
    for page in site.rglob("*.html"):
        assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://', page.read_text()), (
            f"{page} needs a network"
        )
    assert "warmup_epochs" in (site / "search" / "search_index.json").read_text()
    for name in ("run", "Method", "core.schema.Schema", "testing.check"):
        assert f'id="coterie.{name}"' in (site / "api.html").read_text(), name
