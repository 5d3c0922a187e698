"""The differences between the runs that a reader asks for and the paper's protocol, in words."""

from collections.abc import Iterator
from typing import Any

from coterie.config import RunSettings
from coterie.data.dataset import subset_size
from coterie.methods import build_method
from coterie.papers.presets import Item, Shrink, cell, is_ours, row_differs

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
    """Return every difference between the runs and the paper's protocol; rows of ours are not compared."""
    rows = [r for r in it.rows if not is_ours(it, r)]
    if not rows:
        return ["the paper has none of these rows"]
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
    return [*out, *(words for row, words in it.differs.items() if row in ("", *rows))]


def note(it: Item, shrink: Shrink, seeds: int) -> str:
    """Return "as in the paper", or all differences."""
    words = differences(it, shrink, seeds)
    return "differs from the paper: " + "; ".join(words) if words else "as in the paper"


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
    before, now = _flat(planned), _flat(actual)
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


def _flat(s: RunSettings) -> dict[str, Any]:
    """Return all settings of a run by name, with the method's defaults."""
    outer = s.model_dump(exclude={"federation", "settings"})
    return {**outer, **s.federation.model_dump(), **build_method(s.method, s.settings).hp.model_dump()}
