"""Pages that come from the code: the family tree and table of all methods, and for each its facts and settings."""

import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import astuple
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from coterie.cli.payload_table import payload_rows
from coterie.cli.traffic import declared
from coterie.cli.words import FAMILIES, bounds_words, parents, type_words
from coterie.config import Engine, RunSettings, settings
from coterie.core.method import Context, Method
from coterie.data.arrays import from_arrays
from coterie.data.catalogue import DATASETS
from coterie.data.settings import PartitionSettings
from coterie.engine.session import Objects, prepare
from coterie.errors import CoterieError
from coterie.methods import find, method_names
from coterie.models.registry import list_models
from coterie.papers.equations import equation_map
from coterie.papers.presets import PAPERS

HERE = Path(__file__).parent
SETTINGS_TABLES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "Run",
        "They decide the numbers of a run. `--set NAME=VALUE` takes each of them; some have an option of their own.",
        RunSettings,
    ),
    (
        "Federation",
        "They decide which client has which samples. `--set NAME=VALUE`, or the table `[federation]` of a TOML file.",
        PartitionSettings,
    ),
    (
        "Engine",
        "They decide how a run is computed and change no result (`stack` and `auto`: equal up to rounding). They are\n"
        "options of the command line (`--workers`, `--data-dir`, ...) and arguments of `coterie.run`.",
        Engine,
    ),
)
COUNT = re.compile(r"(<!-- count ([\w ]+) -->)\d*<!-- end -->")
NAMES = re.compile(r"(<!-- names -->).*?<!-- end -->", flags=re.S)
MODEL = "lenet5"


def methods() -> dict[str, type[Method]]:
    """Coterie's own, by name; other packages' methods have their own documentation."""
    found = {name: find(name) for name in method_names()}
    return {name: m for name, m in found.items() if m.__module__.startswith("coterie.")}


def overview() -> str:
    """methods.md"""
    found, context = methods(), _context()
    size = sum(context.w0[k].numel() for k in context.net.trainable)
    lines = ["# Methods", "", f"{len(found)} methods and variants are registered. Each name links to its page.", ""]
    lines += ["## Family tree", "", *_tree(found), ""]
    lines += ["## All methods", ""]
    lines += [f"Bytes are what one participant declares for one late round of `{MODEL}` on 28x28 grey pictures"]
    lines += [f"with 10 classes ({size:,} parameters). A dash: the default settings do not fit that model."]
    lines += [
        "Certainty: A, checked against the authors' code; B, against other people's code; P, written from the paper"
    ]
    lines += ["itself; C, reconstructed from descriptions with open points, so its numbers are marked in tables.", ""]
    lines += ["| name | method | family | year | personal | bytes up | bytes down | needs | certainty |"]
    lines += ["|---|---|---|---|---|---:|---:|---|---|"]
    for name, m in found.items():
        up, down = _bytes(m, context)
        card, year, needs = m.card, str(m.card.year or ""), ", ".join(m.needs)
        row = (_link(name), card.title, card.family, year, card.personal, up, down, needs, card.certainty)
        lines.append("| " + " | ".join(_cell(c) for c in row) + " |")
    return "\n".join([*lines, ""])


def _tree(found: dict[str, type[Method]]) -> list[str]:
    """A method stands under the first of its families, by year; a variant, called NAME-..., under NAME."""
    above = parents(found)
    lines = []
    for letter, words in FAMILIES.items():
        here = [n for n, m in found.items() if above[n] is None and (m.card.family or "-").split(",")[0] == letter]
        if not here:
            continue
        lines.append(f"- **{words.capitalize()}**" + (f" ({letter})" if letter != "-" else ""))
        for name in sorted(here, key=lambda n: (found[n].card.year, n)):
            lines.append(f"    - {found[name].card.title}{_year(found[name])}: {_link(name)}")
            lines += [f"        - {found[v].card.title}: {_link(v)}" for v, p in above.items() if p == name]
    return lines


def menu(listed: Collection[str] = ()) -> list[dict[str, list[dict[str, str]]]]:
    """Return the pages of all methods by family for the navigation, without those that are `listed` already."""
    found = methods()
    above = parents(found)
    out: list[dict[str, list[dict[str, str]]]] = []
    for letter, words in FAMILIES.items():
        first = [n for n, m in found.items() if above[n] is None and (m.card.family or "-").split(",")[0] == letter]
        pages: list[dict[str, str]] = []
        for name in sorted(first, key=lambda n: found[n].card.title.lower()):
            own = [name, *sorted((v for v, p in above.items() if p == name), key=lambda v: found[v].card.title.lower())]
            pages += [{found[n].card.title: f"methods/{n}.md"} for n in own if f"methods/{n}.md" not in listed]
        out += [{words.capitalize(): pages}] if pages else []
    return out


def _year(m: type[Method]) -> str:
    return f", {m.card.year}" if m.card.year else ""


def facts(name: str) -> str:
    """What the code says about one method, under headings of its own."""
    m = methods()[name]
    text = (inspect.getdoc(inspect.getmodule(m)) or "").partition("\n\n")[2].strip()
    needs = ", ".join(m.needs) or "nothing special"
    lines = ["## From the code", "", f"{m.card.title} ({m.card.paper}).", "", _escape(text), ""]
    lines += [f"- name: `{name}`, family {m.card.family or '-'}, certainty {m.card.certainty}"]
    lines += [f"- personal: {m.card.personal}", f"- needs: {needs}", f"- weighting by default: {m.weighting}"]
    lines += [f"- cost of a round: {_cost(m)}", ""]
    lines += ["### What leaves a device", "", payload_table(m), ""]
    lines += ["### Settings", "", settings_table(name), ""]
    if name in PAPERS:
        lines += ["### Equations and algorithm lines", "", equations_table(name), ""]
    return "\n".join(lines)


def equations_table(paper: str) -> str:
    """Return the functions of every numbered equation and algorithm line of a paper, as the code marks them."""
    lines = [f"Functions are in `coterie/methods/{paper.replace('-', '')}` unless a path is given.", ""]
    lines += ["| number | meaning | function |", "|---|---|---|"]
    for e in equation_map(paper):
        where = ", ".join(f"`{f}`" for f in e.functions) or f"none: {e.reason}"
        lines.append("| " + " | ".join(_cell(c) for c in (e.name, e.words, where)) + " |")
    return "\n".join(lines)


def _cost(m: type[Method]) -> str:
    """Bytes of one participant beside FedAvg's, and the extra work in words."""
    sizes = [int(n.replace(",", "")) for n in _bytes(m, _context()) if n != "-"]
    whole = [int(n.replace(",", "")) for n in _bytes(Method, _context())]
    share = [f"{a / b:.3g}" for a, b in zip(sizes, whole, strict=False)]
    traffic = f"{share[0]} of FedAvg's bytes up, {share[1]} down (`{MODEL}`, late round)" if share else ""
    return "; ".join(p for p in (traffic, m.card.compute) if p) or f"the default settings do not fit `{MODEL}`"


def payload_table(m: type[Method]) -> str:
    """All entries that may cross a link, by the method's general schema."""
    method = m()
    method.ctx = _context()
    try:
        method.check()
        rows = payload_rows(method)
    except (CoterieError, KeyError) as e:
        return f"The default settings do not fit `{MODEL}`: {_escape(str(e))}."
    lines = [f"For `{MODEL}` on 28x28 grey pictures with 10 classes. What is not listed cannot cross.", ""]
    lines += ["| link | entry | shape | type | kind | heading | may be summed | when | bytes at most |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cell(str(c)) for c in astuple(row)) + " |" for row in rows]
    return "\n".join(lines)


def settings_table(name: str) -> str:
    model = methods()[name].Settings
    return _fields_table(model) if model.model_fields else "No settings of its own."


def _fields_table(model: type[BaseModel], skip: tuple[str, ...] = ()) -> str:
    lines = ["| setting | default | type | bounds | meaning |", "|---|---|---|---|---|"]
    for field, f in model.model_fields.items():
        if field in skip:
            continue
        bounds = bounds_words(f.metadata)
        default = "" if f.default is None or f.is_required() else f"`{f.default}`"
        row = (f"`{field}`", default, f"`{type_words(f.annotation)}`", bounds, f.description or "")
        lines.append("| " + " | ".join(_cell(c) for c in row) + " |")
    return "\n".join(lines)


@cache
def _context() -> Context:
    x = np.zeros((400, 28, 28), dtype=np.uint8)
    x[::2] = 255
    data = from_arrays(x, np.arange(400) % 10, name="grey pictures")
    chosen = settings(method="fedavg", model=MODEL, clients=20, partition="iid", public=100, val_share=0.2, join=1.0)
    return prepare(chosen, Engine(workers=1), Objects(dataset=data)).method.ctx


def _bytes(m: type[Method], context: Context) -> tuple[str, str]:
    method = m()
    method.ctx = context
    try:
        method.check()
        up, down = declared(method)
    except (CoterieError, KeyError):
        return "-", "-"
    return f"{up:,}", f"{down:,}"


def _link(name: str) -> str:
    return f"[`{name}`](methods/{name}.md)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    """Docstrings are not Markdown."""
    for mark in "\\`*_[]<>#|":
        text = text.replace(mark, "\\" + mark)
    return text


def run_settings() -> str:
    """Tables of every setting of a run, of the federation and of the engine."""
    lines = []
    for title, intro, model in SETTINGS_TABLES:
        lines += [f"## {title}", "", intro, "", _fields_table(model, skip=("settings", "federation")), ""]
    return "\n".join(lines).rstrip()


def counts() -> dict[str, int]:
    """Numbers that pages quote: methods, their variants, both together, data sets known by name, models."""
    found = methods()
    variants = [n for n, above in parents(found).items() if above]
    return {
        "methods": len(found) - len(variants),
        "variants": len(variants),
        "registered": len(found),
        "data sets": len(DATASETS) + 1,  # and the digits of scikit-learn
        "models": len(list_models()),
    }


def fill(text: str) -> str:
    """Put generated parts into a page: `<!-- settings NAME -->`, `<!-- run settings -->`, and counts."""
    text = re.sub(r"<!-- settings ([\w-]+) -->", lambda m: settings_table(m[1]), text)
    text = re.sub(COUNT, lambda m: str(counts()[m[2]]), text)  # without the marks, which can end a paragraph
    text = re.sub(NAMES, lambda m: names(), text)
    return text.replace("<!-- run settings -->", run_settings()) if "<!-- run settings -->" in text else text


def counted(text: str) -> str:
    """Renew what stands between `<!-- count WHAT -->` (or `<!-- names -->`) and `<!-- end -->`."""
    text = re.sub(COUNT, lambda m: f"{m[1]}{counts()[m[2]]}<!-- end -->", text)
    return re.sub(NAMES, lambda m: f"{m[1]}\n{names()}\n<!-- end -->", text)


def names() -> str:
    """The titles of all methods without their variants, for a paragraph."""
    found, above = methods(), parents(methods())
    titles = [m.card.title for name, m in sorted(found.items(), key=lambda i: i[1].card.year) if not above[name]]
    return textwrap.fill(", ".join(titles) + ".", 118)


def generated(written: Path = HERE) -> dict[str, Callable[[], str]]:
    """Pages by path, each made when asked for; a method's written page comes before what the code says of it."""

    def page(name: str) -> Callable[[], str]:
        def make() -> str:
            file = written / "methods" / f"{name}.md"
            intro = file.read_text() if file.exists() else f"# {methods()[name].card.title}\n"
            return f"{intro.rstrip()}\n\n{facts(name)}"

        return make

    return {"methods.md": overview, **{f"methods/{name}.md": page(name) for name in methods()}}


if __name__ == "__main__":  # python docs/catalogue.py: renew the counts in README.md and docs/
    for path in (HERE.parent / "README.md", *HERE.rglob("*.md")):
        path.write_text(counted(path.read_text()))
