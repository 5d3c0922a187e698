"""Every method on every odd model, with both engines: whether it runs, or the sentence with which it refuses.

`python tests/support/odd_grid.py` writes docs/odd-models.md; a long test holds the page against what is found."""

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
from coterie.methods import find, known
from support import ROOT
from support.odd_models import ODD

PAGE = ROOT / "docs" / "odd-models.md"
ENGINES = ("loop", "stack")
RUNS = "runs"


@cache
def data() -> Dataset:
    """Digits 0 to 3."""
    whole = testing.small_data()
    few = (whole.y < 4).nonzero().flatten()[:120]
    return Dataset("few-digits", whole.x[few], whole.y[few], tuple("0123"), torch.zeros(len(few), dtype=torch.bool))


def session(method: str, model: str, engine: str = "loop", **changes: object) -> Session:
    """Two clients and a newcomer with 40 pictures each."""
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
    """`runs`, or the sentence of a refusal; whatever else is raised, warnings included, is a defect."""
    try:
        made = session(method, model, engine)
    except CoterieError as e:
        return str(e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(made)
    return RUNS


def own_methods() -> list[str]:
    """Coterie's own; those of installed packages have their own documentation."""
    return [name for name in known() if find(name).__module__.startswith("coterie.")]


def page(names: list[str]) -> str:
    """The table and the sentences behind its numbers."""
    said: dict[str, int] = {}
    lines = []
    for name in names:
        cells = []
        for model in ODD:
            title = find(name).card.title
            both = [outcome(name, model, engine).replace(title, "The method") for engine in ENGINES]
            marks = ["yes" if o == RUNS else f"({said.setdefault(o, len(said) + 1)})" for o in both]
            cells.append(marks[0] if marks[0] == marks[1] else " / ".join(marks))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| method | {' | '.join(ODD)} |\n|---|{'---|' * len(ODD)}"
    notes = "\n".join(f"{i}. {sentence}" for sentence, i in said.items())
    return f"{INTRO}\n{head}\n" + "\n".join(lines) + f"\n\n## What the refusals say\n\n{notes}\n"


INTRO = """# Odd models

Ten models that are not a plain chain of layers, each with every method, trained client by client (`loop`) and stacked
(`stack`), with a newcomer. *yes*: it runs with both engines. A number: it is refused before any work, with the sentence
below the table. Nothing ends in a traceback or a warning. The table is made by
`python tests/support/odd_grid.py`, and a long
test holds it against what is found.

| model | what is odd |
|---|---|
| unused layers | a linear layer and a batch norm that never run, and a linear layer whose output is thrown away |
| free parameters | a vision transformer: class token and positions belong to no layer |
| attention | `nn.MultiheadAttention`, whose inner projection is never called as a module |
| LSTM | a recurrent layer and a linear head |
| ResNet | a shortcut with a convolution and a batch norm of its own |
| squeeze-excite | channels weighed by two 1x1 convolutions |
| tied weights | one matrix in two layers |
| frozen stem | a first stage with `requires_grad=False`, batch norm included |
| 1x1-conv head | no linear layer |
| group norm | a norm that is not batch norm |

How layers are found, counted and grouped is told in [models](models.md).
"""


if __name__ == "__main__":
    PAGE.write_text(page(own_methods()))
