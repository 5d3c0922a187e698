"""Hooks of mkdocs: adds the pages generated from the code, and the notebooks as pages."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from catalogue import fill, generated, menu
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

HERE = Path(__file__).parent


def on_config(config: MkDocsConfig) -> None:
    """Put every method into the menu, by family; leave out navigation entries whose page does not exist."""
    made = generated()
    (about,) = [section["Methods"] for section in config.nav if "Methods" in section]
    about += menu([next(iter(page.values())) for page in about if isinstance(page, dict)])
    config.nav = _existing(config.nav, lambda name: (HERE / name).exists() or name in made)


def _existing(entries: list[Any], exists: Any) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(target, list):
            if inner := _existing(target, exists):
                kept.append({title: inner})
        elif exists(target):
            page = re.sub(r"\.ipynb$", ".md", target)
            kept.append({title: page} if title else page)
    return kept


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages. A method's written page stays; on_page_markdown appends what the code says."""
    for name, make in generated().items():
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=make()))
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        text, pictures = MarkdownExporter().from_filename(str(HERE / file.src_uri))
        page = PurePosixPath(file.src_uri)
        for name, content in pictures["outputs"].items():
            text = text.replace(f"]({name})", f"]({page.stem}-{name})")
            files.append(File.generated(config, str(page.with_name(f"{page.stem}-{name}")), content=content))
        note = f"[Download this notebook]({page.name})\n\n"
        head, _, rest = text.lstrip().partition("\n")
        files.append(File.generated(config, str(page.with_suffix(".md")), content=f"{head}\n\n{note}{rest}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated tables; take links to files outside the documentation out."""
    name = page.file.src_uri
    if name.startswith("methods/") and (HERE / name).exists():
        markdown = generated()[name]()
    markdown = fill(markdown)
    markdown = markdown.replace("```python norun\n", "```python\n")
    markdown = re.sub(r"\]\((tutorials/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!methods/|tutorials/|images/)[^)]*\)", _outside(name), markdown)


def _outside(name: str) -> Any:
    def text(found: re.Match[str]) -> str:
        target = re.search(r"\(([^)#]*)", found[0])
        inside = target and (HERE / name).parent.joinpath(target[1]).resolve().is_relative_to(HERE)
        return found[0] if inside else found[1]

    return text
