"""Run every method on every odd model with both training engines, and record the outcome.

`python tests/support/odd_grid.py [METHOD ...]` writes all rows, or those of some methods, of docs/odd-models.md.
"""

import re
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

from coterie import testing
from coterie.config import Engine, settings
from coterie.data.dataset import Dataset
from coterie.engine.session import Objects, Session, prepare
from coterie.errors import CoterieError
from coterie.methods import find
from support import ROOT
from support.methods import METHODS
from support.odd_models import ODD

PAGE = ROOT / "docs" / "odd-models.md"
ENGINES = ("loop", "stack")
RUNS = "runs"
YES, SLASH = "yes", " / "
Row = dict[str, tuple[str, ...]]  # by model: the outcome with each training engine


@cache
def data() -> Dataset:
    """Return 120 digits of the classes 0 to 3."""
    whole = testing.small_data()
    few = (whole.y < 4).nonzero().flatten()[:120]
    return Dataset("few-digits", whole.x[few], whole.y[few], tuple("0123"), torch.zeros(len(few), dtype=torch.bool))


def session(method: str, model: str, engine: str = "loop", **changes: object) -> Session:
    """Prepare a run of two clients and a newcomer with 40 pictures each."""
    base = {"rounds": 3, "join": 1.0, "epochs": 1, "batch": 8, "lr": 0.05, "eval_every": 3, "seed": 3, "newcomers": 1}
    here = {"clients": 3, "partition": "dirichlet(5)", "val_share": 0.2, "public": 12}
    torch.manual_seed(0)
    return prepare(
        settings(method=method, **{**base, **here, **changes}),
        Engine(workers=1, engine=engine),
        Objects(None, data(), ODD[model](4)),
    )


def play(made: Session) -> "testing.Loop":
    with tempfile.TemporaryDirectory() as folder:
        loop = testing.open_loop(made, Path(folder))
        try:
            loop.run()
        finally:
            testing.close_loop(loop)
    return loop


def outcome(method: str, model: str, engine: str) -> str:
    """Return `runs`, or the message of a CoterieError; any other exception or warning is a defect."""
    try:
        made = session(method, model, engine)
    except CoterieError as e:
        return str(e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(made)
    return RUNS


def row(method: str) -> Row:
    """Return the outcomes of a method on every odd model."""
    title = find(method).card.title
    return {
        model: tuple(outcome(method, model, engine).replace(title, "The method") for engine in ENGINES) for model in ODD
    }


def own_methods() -> list[str]:
    """Return the names of Coterie's own methods without their variants, which use a model as their method does."""
    return [name for name in METHODS if find(name).__module__.startswith("coterie.")]


def page(rows: dict[str, Row]) -> str:
    """Return the page: the table, and the messages that its numbers stand for."""
    errors: dict[str, int] = {}
    lines = []
    for name, outcomes in rows.items():
        cells = []
        for both in outcomes.values():
            marks = [YES if o == RUNS else f"({errors.setdefault(o, len(errors) + 1)})" for o in both]
            cells.append(marks[0] if marks[0] == marks[1] else SLASH.join(marks))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| method | {' | '.join(ODD)} |\n|---|{'---|' * len(ODD)}"
    notes = "\n".join(f"{i}. {sentence}" for sentence, i in errors.items())
    return f"{INTRO}\n{head}\n" + "\n".join(lines) + f"\n\n## Errors\n\n{notes}\n"


def read(text: str) -> dict[str, Row]:
    """Return the rows of a page."""
    table = text.partition("\n| method |")[2]
    meaning = {YES: RUNS} | {f"({i})": sentence for i, sentence in re.findall(r"^(\d+)\. (.*)$", table, re.M)}
    rows: dict[str, Row] = {}
    for line in table.splitlines()[2:]:
        if line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            marks = [cell.split(SLASH) for cell in cells]
            rows[name] = {m: (meaning[a[0]], meaning[a[-1]]) for m, a in zip(ODD, marks, strict=True)}
    return rows


INTRO = """# Odd models

This page shows ten models that are not a plain chain of layers, each with every method, trained client by client
(`loop`) and stacked (`stack`), with one newcomer. *yes* means that the method runs with both training engines. A number
stands for an error before training starts; the list below the table has its text. No combination ends in a traceback or
a warning. A method's variants use a model as the method does. `python tests/support/odd_grid.py` writes this page, and
tests check that it is up to date.

| model | peculiarity |
|---|---|
| unused layers | a linear layer and a batch norm that never run, and a linear layer whose output is not used |
| free parameters | a vision transformer; class token and positions are parameters outside of any layer |
| attention | `nn.MultiheadAttention`, whose inner projection is never called as a module |
| LSTM | a recurrent layer and a linear head |
| ResNet | a shortcut with its own convolution and batch norm |
| squeeze-excite | channels weighted by two 1x1 convolutions |
| tied weights | two layers share a matrix |
| frozen stem | a first stage with `requires_grad=False`, including its batch norm |
| 1x1-conv head | no linear layer |
| group norm | a norm that is not batch norm |

[Models](models.md) explains how layers are found, counted and grouped.
"""


if __name__ == "__main__":
    written = read(PAGE.read_text())
    chosen = sys.argv[1:] or own_methods()
    PAGE.write_text(page({m: row(m) if m in chosen else written[m] for m in own_methods()}))
