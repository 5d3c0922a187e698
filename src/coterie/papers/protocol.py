"""The differences between the runs that a reader asks for and the paper's protocol, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.config import RunSettings
from coterie.data.catalogue import dataset_size
from coterie.data.dataset import subset_size
from coterie.errors import CoterieError
from coterie.methods import build_method, find, registered_name
from coterie.papers.equations import paper_of
from coterie.papers.presets import (
    PAPERS,
    Item,
    Shrink,
    cell,
    is_ours,
    item,
    items,
    layer_cells,
    method_of,
    narrow,
    printed,
    row_differs,
)

_WORDS = {
    "method": "the method {} instead of {}",
    "rounds": "{} rounds instead of {}",
    "clients": "{} clients instead of {}",
    "min_size": "clients with at least {} samples instead of {}",
    "join": "{} of the clients in a round instead of {}",
    "eval_every": "scored every {} rounds instead of every {}",
    "sampler": "sampling of clients = {} instead of {}",
}
_NOT_COMPARED = ("data", "subset", "seed", "checkpoint_every")  # compared in words of their own, or no protocol


def differences(it: Item, shrink: Shrink, seeds: int) -> list[str]:
    """Return every difference between the runs and the paper's protocol; rows of ours count only alone."""
    rows = [r for r in it.rows if not is_ours(it, r)] or list(it.rows)
    cells_by_words: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for column in it.columns:
            for words in _of_cell(it, row, column, shrink):
                cells_by_words.setdefault(words, []).append((row, column))
    out = [f"{seeds} seed{'s' * (seeds != 1)} instead of {it.seeds}"] if it.seeds not in (None, seeds) else []
    for words, cells in cells_by_words.items():
        mine, columns = dict.fromkeys(r for r, _ in cells), dict.fromkeys(c for _, c in cells)
        names = [*(mine if len(mine) < len(rows) else ()), *(columns if len(columns) < len(it.columns) else ())]
        out.append(f"{words} ({', '.join(names)})" if names else words)
    out += ["the paper has none of these rows"] if all(is_ours(it, r) for r in rows) else []
    return [*out, *(words for row, words in it.differs.items() if row in ("", *rows))]


def note(it: Item, shrink: Shrink, seeds: int) -> str:
    """Return "as in the paper", or all differences."""
    words = differences(it, shrink, seeds)
    return "differs from the paper: " + "; ".join(words) if words else "as in the paper"


def count_cells(it: Item, seeds: Mapping[tuple[str, str], int], shrink: Shrink) -> str:
    """Return how many printed cells of the whole table are measured at full size, at reduced size and not at all.

    `seeds` has the number of finished runs by row and column. At full size, a cell has the paper's data, samples,
    clients and rounds, and as many seeds. The text states it if no cell is printed.
    """
    whole = item(it.paper, it.name)
    wanted = {(r, c) for p, i, r, c in printed() if (p, i) == (it.paper, it.printed_as)}
    cells = [(r, c) for r in whole.rows for c in whole.columns if (r, c) in wanted]
    if not cells:
        return "the paper prints no numbers for this item"
    measured = [key for key in cells if seeds.get(key, 0)]
    full = sum(seeds[r, c] >= (it.seeds or 1) and _is_full_size(it, r, c, shrink) for r, c in measured)
    return (
        f"of {len(cells)} printed cells, {full} are measured at full size, {len(measured) - full} at reduced size, "
        f"{len(cells) - len(measured)} not at all"
    )


def _is_full_size(it: Item, row: str, column: str, shrink: Shrink) -> bool:
    planned, actual = cell(it, row, column, 0, Shrink()), cell(it, row, column, 0, shrink)
    used, _ = _images(it, planned, actual, shrink)
    original = Shrink().samples(planned.data)[1]
    full = min(original, subset_size(planned.subset)) if planned.subset else original
    sizes = [(s.data, s.federation.clients, s.rounds) for s in (planned, actual)]
    return sizes[0] == sizes[1] and used >= full


@dataclass(frozen=True)
class PaperRun:
    """One run with the protocol of a paper: its settings, and the table or figure narrowed to its row and columns."""

    item: Item
    settings: RunSettings
    note: str  # table, row and column that it repeats, and every difference in words


def paper_run(
    method: str,
    paper: str | None = None,
    data: str | None = None,
    changes: Mapping[str, Any] | None = None,
    data_dir: Path | None = None,
) -> PaperRun:
    """Return one run of a method with the whole protocol of a paper; raise CoterieError if the paper has none.

    Without `paper`, the method must be one of the five papers' methods. `data` is a data set or a column of the
    paper's first table (or else figure) with the method, or a data set to use instead. `changes` override settings.
    """
    paper = paper or paper_of(method)
    it, row = _first_item(paper, method)
    known = {c: cell(it, row, c, 0, Shrink()).data for c in it.columns}
    first = it.one_run or it.columns[0]
    column = next((c for c in (first, *it.columns) if data in (None, c, known[c])), first)
    used = data if data is not None and data not in (column, known[column]) else known[column]
    changed = dict(changes or {})
    rounds, subset = changed.pop("rounds", None), changed.get("subset")
    if isinstance(subset, int):
        del changed["subset"]
    shrink = Shrink(
        rounds, subset if isinstance(subset, int) else None, changed, {known[column]: used},
        {used: sum(dataset_size(used, data_dir))},
    )  # fmt: skip
    one = narrow(it, [column], [row])
    if "assignment" not in changed and layer_cells(one, row, column, 0, shrink):
        raise CoterieError(
            f"{method} takes each client's layer from runs with one layer for all: `coterie paper {paper} {it.name}` "
            "runs these first; or give an assignment"
        )
    more = f" (`coterie paper {paper} {it.name}` runs all seeds)" if it.seeds not in (None, 1) else ""
    text = f"{paper} {it.name}, {row}, {column}: {note(one, shrink, 1)}{more}"
    chosen = cell(one, row, column, 0, shrink)
    shared = [c for c in it.columns if cell(it, row, c, 0, shrink) == chosen]  # columns of other statistics too
    return PaperRun(narrow(it, shared, [row]), chosen, text)


def _first_item(paper: str, method: str) -> tuple[Item, str]:
    """Return the first table, or else figure, with a method, and its row; a row with the method's own name wins."""
    name = registered_name(method)
    ordered = sorted(items(paper), key=lambda i: not i.name.startswith("table"))
    found = [(i, r) for i in ordered if not i.reads_only for r in i.rows if method_of(paper, r) == name]
    if not found:
        where = [p for p in PAPERS if any(method_of(p, r) == name for i in items(p) for r in i.rows)]
        hint = f"it is in {', '.join(where)}" if where else "none of the five papers has it"
        raise CoterieError(f"{paper} has no row with the method {method}; {hint}")
    title = find(method).card.title
    return next(((i, r) for i, r in found if r == title), found[0])


def _of_cell(it: Item, row: str, column: str, shrink: Shrink) -> Iterator[str]:
    planned, actual = cell(it, row, column, 0, Shrink()), cell(it, row, column, 0, shrink)
    if words := row_differs(it, row):
        yield words
    if actual.data != planned.data:
        yield f"{actual.data} instead of {planned.data}"
    used, wanted = _images(it, planned, actual, shrink)
    if wanted and used != wanted:
        yield f"{used:,} samples of {actual.data} instead of {wanted:,}"
    elif not wanted and shrink.subset:
        yield f"{shrink.subset:,} samples of {actual.data}"
    before, now = flat_settings(planned), flat_settings(actual)
    for name in [*_WORDS, *sorted({*before, *now} - {*_WORDS, *_NOT_COMPARED})]:
        if before.get(name) == now.get(name) or (name == "eval_every" and name in it.unstated):
            continue  # how often an unstated evaluation happens follows the rounds
        yield _WORDS.get(name, name + " = {} instead of {}").format(*(_text(s.get(name)) for s in (now, before)))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _images(it: Item, planned: RunSettings, actual: RunSettings, shrink: Shrink) -> tuple[int, int]:
    """Return the samples that a run uses, and those of the paper; 0 if the size of the data set is unknown."""
    used, original = shrink.samples(actual.data)
    used = min(used, subset_size(actual.subset)) if actual.subset else used
    wanted = min(original, subset_size(planned.subset)) if planned.subset else original
    return used, wanted if actual.data != planned.data else it.images.get(planned.data, wanted)


def flat_settings(s: RunSettings) -> dict[str, Any]:
    """Return all settings of a run by name, with the method's defaults."""
    outer = s.model_dump(exclude={"federation", "settings"})
    return {**outer, **s.federation.model_dump(), **build_method(s.method, s.settings).hp.model_dump()}
