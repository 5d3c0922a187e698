"""Builds docs/ into site/: plain HTML that opens offline. A broken internal link fails the build.

python docs/build.py [OUT]
"""

import re
import shutil
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from catalogue import generated, settings_table
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup

HERE = Path(__file__).parent
NAVIGATION = ("index", "first-run", "data", "models", "own-method", "methods", "measured")  # others follow by name


def main(out: Path = HERE.parent / "site", source: Path = HERE) -> list[str]:
    """Write the site; returns one sentence per broken link."""
    texts = pages(source)
    if out.exists():
        shutil.rmtree(out)
    template = Environment(loader=FileSystemLoader(HERE / "theme"), autoescape=True, trim_blocks=True).get_template(
        "page.html"
    )
    titles = {name: _title(name, text) for name, text in texts.items()}
    top = [n for n in texts if "/" not in n]
    order = sorted(top, key=lambda n: (NAVIGATION.index(n[:-3]) if n[:-3] in NAVIGATION else len(NAVIGATION), n))
    navigation = [{"file": _html(n), "title": "Coterie" if n == "index.md" else titles[n]} for n in order]
    for name, text in texts.items():
        target = out / _html(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        page = template.render(
            title=titles[name],
            body=Markup(render(text, name, source, out)),  # our own Markdown, with raw HTML switched off
            navigation=navigation,
            root="../" * name.count("/"),
            here=_html(name),
            version=version("coterie"),
        )
        target.write_text(page)
    for file in source.rglob("*"):
        if file.suffix in (".png", ".svg", ".css") and "theme" not in file.parts:
            target = out / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return broken(out)


def pages(source: Path) -> dict[str, str]:
    """Markdown by path: what is written, with generated pages and tables put in."""
    written = {p.relative_to(source).as_posix(): p.read_text() for p in sorted(source.rglob("*.md"))}
    if source == HERE:
        written |= {name: make() for name, make in generated(source).items()}
    fill = re.compile(r"<!-- settings ([\w-]+) -->")
    return {name: fill.sub(lambda m: settings_table(m[1]), text) for name, text in written.items()}


def render(text: str, name: str, source: Path, out: Path) -> str:
    """One page's HTML: headings get anchors, links to .md go to .html, wide tables scroll."""
    md = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = md.parse(re.sub(r"<!--.*?-->", "", text, flags=re.S))
    seen: dict[str, int] = {}
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[at + 1].content, seen))
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", _target(str(child.attrGet("href")), name, source, out))
    html: str = md.renderer.render(tokens, md.options, {})
    return html.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")


def _target(href: str, name: str, source: Path, out: Path) -> str:
    """Where a link of the page `name` leads on the site; files of the repository outside docs stay where they are."""
    parts = urlsplit(href)
    if parts.scheme or not parts.path:
        return href
    file = (source / name).parent / unquote(parts.path)
    if not file.resolve().is_relative_to(source.resolve()) and file.exists():
        here = (out / name).parent.resolve()
        return Path(_relative(file.resolve(), here)).as_posix()
    path = re.sub(r"\.md$", ".html", parts.path)
    return path + (f"#{parts.fragment}" if parts.fragment else "")


def _relative(file: Path, folder: Path) -> str:
    up = 0
    while not file.is_relative_to(folder):
        folder, up = folder.parent, up + 1
    return "../" * up + file.relative_to(folder).as_posix()


def _anchor(heading: str, seen: dict[str, int]) -> str:
    """The same anchors as GitHub's."""
    plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    seen[plain] = seen.get(plain, -1) + 1
    return plain + (f"-{seen[plain]}" if seen[plain] else "")


def _title(name: str, text: str) -> str:
    found = re.search(r"^# (.+)$", text, flags=re.M)
    return found[1].replace("`", "") if found else name.removesuffix(".md")


def _html(name: str) -> str:
    return name.removesuffix(".md") + ".html"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found: Mapping[str, str | None] = dict(attrs)
        self.links += [v for k in ("href", "src") if (v := found.get(k))]
        if anchor := found.get("id"):
            self.anchors.add(anchor)


def broken(site: Path) -> list[str]:
    """Internal links that lead nowhere, a missing anchor included."""
    read: dict[Path, _Links] = {}
    for page in sorted(site.rglob("*.html")):
        read[page.resolve()] = links = _Links()
        links.feed(page.read_text())
    out = []
    for page, links in read.items():
        for href in links.links:
            parts = urlsplit(href)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            missing = not target.exists() or (
                parts.fragment and target in read and parts.fragment not in read[target].anchors
            )
            if missing:
                out.append(f"{page.relative_to(site.resolve())} links to {href}, which does not exist")
    return out


if __name__ == "__main__":
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "site"
    complaints = main(site)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages in {site}")
    sys.exit(1 if complaints else 0)
