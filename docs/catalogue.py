"""Pages that come from the code: the family tree and table of all methods, and for each its facts and settings."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from coterie.config import Engine, settings
from coterie.data.arrays import from_arrays
from coterie.errors import CoterieError
from coterie.method import Context, Method
from coterie.methods import find, known
from coterie.session import prepare

FAMILIES = {
    "-": "Alone",
    "G": "One global model",
    "F": "Fine-tuning and meta-learning",
    "S": "Split models (layers, channels, entries)",
    "R": "Pulled towards an anchor",
    "M": "Mixed per client",
    "C": "Clusters",
    "P": "Prototypes and heads instead of weights",
}
MODEL = "lenet5"


def methods() -> dict[str, type[Method]]:
    """Coterie's own, by name; other packages' methods have their own documentation."""
    found = {name: find(name) for name in known()}
    return {name: m for name, m in found.items() if m.__module__.startswith("coterie.")}


def overview() -> str:
    """methods.md"""
    found, context = methods(), _context()
    size = sum(context.w0[k].numel() for k in context.net.trainable)
    lines = ["# Methods", "", f"{len(found)} methods and variants are registered. Each name links to its page.", ""]
    lines += ["## Family tree", "", *_tree(found), ""]
    lines += ["## All methods", ""]
    lines += [f"Bytes are what one participant declares for one ordinary round of `{MODEL}` on 28x28 grey pictures"]
    lines += [f"with 10 classes ({size:,} parameters). A dash: the default settings do not fit that model."]
    lines += [
        "Certainty: A, checked against the authors' code; B, against other people's code; P, written from the paper"
    ]
    lines += ["itself; C, reconstructed from descriptions with open points, so its numbers are marked in tables.", ""]
    lines += ["| name | method | family | year | personal | bytes up | bytes down | needs | certainty |"]
    lines += ["|---|---|---|---|---|---:|---:|---|---|"]
    for name, m in found.items():
        up, down = _bytes(m, context)
        year, needs = str(m.year or ""), ", ".join(m.needs)
        row = (_link(name), m.title, m.family, year, m.personal_part, up, down, needs, m.certainty)
        lines.append("| " + " | ".join(_cell(c) for c in row) + " |")
    return "\n".join([*lines, ""])


def _tree(found: dict[str, type[Method]]) -> list[str]:
    """A method stands under the first of its families, by year; a variant, called NAME-..., under NAME."""
    parents = {n: max((p for p in found if n.startswith(f"{p}-")), key=len, default=None) for n in found}
    lines = []
    for letter, words in FAMILIES.items():
        here = [n for n, m in found.items() if parents[n] is None and (m.family or "-").split(",")[0] == letter]
        if not here:
            continue
        lines.append(f"- **{words}** ({letter})" if letter != "-" else f"- **{words}**")
        for name in sorted(here, key=lambda n: (found[n].year, n)):
            lines.append(f"    - {found[name].title}, {found[name].year or 'no year'}: {_link(name)}")
            lines += [f"        - {found[v].title}: {_link(v)}" for v, parent in parents.items() if parent == name]
    return lines


def facts(name: str) -> str:
    """What the code says about one method, under headings of its own."""
    m = methods()[name]
    text = (inspect.getdoc(inspect.getmodule(m)) or "").partition("\n\n")[2].strip()
    needs = ", ".join(m.needs) or "nothing special"
    lines = ["## From the code", "", f"{m.title} ({m.paper}).", "", _escape(text), ""]
    lines += [f"- name: `{name}`, family {m.family or '-'}, certainty {m.certainty}"]
    lines += [f"- personal: {m.personal_part}", f"- needs: {needs}", f"- weighting by default: {m.weighting}", ""]
    return "\n".join([*lines, "### Settings", "", settings_table(name), ""])


def settings_table(name: str) -> str:
    fields = methods()[name].Settings.model_fields
    if not fields:
        return "No settings of its own."
    lines = ["| setting | default | type | bounds | meaning |", "|---|---|---|---|---|"]
    for field, f in fields.items():
        bounds = ", ".join(_bound(b) for b in f.metadata)
        default = "" if f.default is None else f"`{f.default}`"
        row = (f"`{field}`", default, f"`{_type(f.annotation)}`", bounds, f.description or "")
        lines.append("| " + " | ".join(_cell(c) for c in row) + " |")
    return "\n".join(lines)


def _bound(b: Any) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if hasattr(b, attribute):
            return f"{sign} {getattr(b, attribute)}"
    return ""


def _type(annotation: Any) -> str:
    """float, "a" or "b", number or "eigengap": as a person would write it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is Annotated:
        return _type(inner[0])
    if origin in (Union, UnionType):
        return " or ".join("empty" if i is NoneType else _type(i) for i in inner)
    return annotation.__name__ if isinstance(annotation, type) and not inner else str(annotation)


def _context() -> Context:
    x = np.zeros((400, 28, 28), dtype=np.uint8)
    x[::2] = 255
    data = from_arrays(x, np.arange(400) % 10, name="grey pictures")
    chosen = settings(method="fedavg", model=MODEL, clients=20, partition="iid", public=100, val_share=0.2, join=1.0)
    return prepare(chosen, Engine(workers=1), dataset=data).method.ctx


def _bytes(m: type[Method], context: Context) -> tuple[str, str]:
    method = m()
    method.ctx = context
    try:
        method.check()
        up, down = method.payload(context.classes, 1)
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


def generated(written: Path) -> dict[str, Callable[[], str]]:
    """Pages by path, each made when asked for; a method's written page comes before what the code says of it."""

    def page(name: str) -> Callable[[], str]:
        def make() -> str:
            file = written / "methods" / f"{name}.md"
            intro = file.read_text() if file.exists() else f"# {methods()[name].title}\n"
            return f"{intro.rstrip()}\n\n{facts(name)}"

        return make

    return {"methods.md": overview, **{f"methods/{name}.md": page(name) for name in methods()}}
