"""The protocols and printed tables of the five papers, read from this package's files."""

import csv
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coterie.config import RunSettings, settings
from coterie.data.catalogue import DATASETS
from coterie.data.dataset import smaller_subset, subset_size
from coterie.data.partition_spec import parse_scheme
from coterie.data.settings import PartitionSettings
from coterie.engine.session import recorded, resolved
from coterie.errors import CoterieError, unknown
from coterie.methods import build_method, fields
from coterie.results.grid import Cell
from coterie.results.paper_metrics import best_layers
from coterie.results.run import Run
from coterie.storage.run_folder import read_settings

_PHASES = {"preparation": 1, "min_round": 0, "first_round": 0}  # rounds that keep their share of a shorter run; least
_LEAST = 2  # least samples of a client in a reduced protocol: one to train and one to test
PAPERS = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")


@dataclass(frozen=True)
class Printed:
    """A value of a paper's table, in percent."""

    value: float
    std: float | None


@dataclass(frozen=True)
class Item:
    """A table or figure: methods by columns, each cell a run or a statistic of one."""

    paper: str
    name: str
    what: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    settings: Mapping[str, Any]
    statistic: str
    misprints: Mapping[str, str]
    printed_as: str = ""  # item with the printed values, if a figure shows the runs of a table
    axis: str = ""  # setting that varies over columns or rows
    axis_label: str = ""
    figures: tuple[str, ...] = ()
    reads_only: bool = False  # compares finished runs and starts none
    seeds: int | None = None  # runs of a cell in the paper; None if it does not say
    differs: Mapping[str, str] = field(default_factory=dict)  # row or "" for all -> difference that no setting removes
    images: Mapping[str, int] = field(default_factory=dict)  # samples of a data set in the paper, if not the original's
    unstated: Mapping[str, Any] = field(default_factory=dict)  # settings that we chose because the paper is silent
    spread: str = ""  # name of the table's row or column of standard deviations over the other rows
    gain: Mapping[str, Any] = field(default_factory=dict)  # `of` a row, mean `over` some columns, and the `claim`
    rivals: tuple[str, ...] = ()  # rows that the statistics `ahead_from` and `lead` compare the other rows with
    gain_ranges: tuple[Mapping[str, Any], ...] = ()  # claims: gains of a `row` `over` others, as `printed` in words
    one_run: str = ""  # column of a single run with the paper's protocol; empty: the first


@dataclass(frozen=True)
class Shrink:
    """The differences of a reader's run from the paper."""

    rounds: int | None = None
    subset: int | None = None
    changes: Mapping[str, Any] | None = None  # further settings
    stand_in: Mapping[str, str] | None = None  # data set of the paper -> data set used instead
    held: Mapping[str, int] | None = None  # data set -> its samples on this machine; default: all

    def samples(self, data: str) -> tuple[int, int]:
        """Return the number of samples of a data set that are used, and of the original."""
        original = sum(DATASETS[data].samples) if data in DATASETS else 0
        held = min((self.held or {}).get(data, original), original)
        return min(held, self.subset or held), original

    def least(self, planned_data: str, data: str, planned: int, subset: int | str | None) -> int:
        """Return the least samples of a client: reduced in proportion to the paper's samples, not below _LEAST.

        `subset` is the part of its data set that the paper uses.
        """
        original = self.samples(planned_data)[1]
        wanted = min(original, subset_size(subset)) if subset else original
        used = self.samples(data)[0] or self.subset or original
        return max(min(_LEAST, planned), planned * used // wanted) if used < wanted else planned


@cache
def _preset(paper: str) -> dict[str, Any]:
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    return tomllib.loads((files("coterie.papers") / "presets" / f"{paper}.toml").read_text())


@cache
def printed() -> dict[tuple[str, str, str, str], Printed]:
    """Return (paper, item, row, column) -> value."""
    with (files("coterie.papers") / "printed.csv").open() as f:
        return {
            (r["paper"], r["item"], r["row"], r["column"]): Printed(float(r["value"]), float(r["std"] or "nan"))
            for r in csv.DictReader(f)
        }


def title(paper: str) -> str:
    return f"{_preset(paper)['title']}: {_preset(paper)['citation']}"


def items(paper: str) -> list[Item]:
    preset = _preset(paper)
    return [_item(paper, name, body) for name, body in preset["items"].items()]


def item(paper: str, name: str) -> Item:
    by_name = {i.name: i for i in items(paper)}
    if name not in by_name:
        raise unknown(f"item of {paper}", name, by_name)
    return by_name[name]


def _item(paper: str, name: str, body: dict[str, Any]) -> Item:
    preset = _preset(paper)
    columns = tuple(body.get("columns") or preset["columns"])
    return Item(
        paper, name, body["what"], tuple(body["rows"]), columns, body.get("settings", {}), body.get("statistic", ""),
        body.get("misprints", {}), body.get("printed", name), body.get("axis", ""), body.get("axis_label", ""),
        tuple(body.get("figures", ())), body.get("reads_only", False), preset.get("seeds"),
        body.get("differs", {}), preset.get("images", {}),
        {**{k: preset["protocol"][k] for k in preset["unstated"]}, **preset.get("unstated_of_method", {}),
         **body.get("unstated", {})},
        body.get("spread", ""), body.get("gain", {}), tuple(body.get("rivals", ())), tuple(body.get("gain_ranges", ())),
        body.get("one_run", ""),
    )  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """The data sets and further requirements of an item's runs."""

    data: tuple[str, ...]
    more: tuple[str, ...]


def needs(it: Item) -> Needs:
    every = [cell(it, r, c, 0, Shrink()) for r in it.rows for c in it.columns]
    more = []
    if public := max(s.federation.public for s in every):
        more.append(f"public set of {public:,}")
    if len(with_val := {s.federation.val_share > 0 for s in every}) > 1:
        more.append("validation part for some methods")
    elif with_val == {True}:
        more.append("validation part")
    if any(s.official or s.federation.test_from == "official" for s in every):
        more.append("official test part")
    return Needs(tuple(dict.fromkeys(s.data for s in every)), tuple(more))


def not_experiments(paper: str) -> str:
    """Return a note on tables and figures of the paper without measured results."""
    return str(_preset(paper).get("not_experiments", ""))


def method_of(paper: str, row: str) -> str:
    """Return the name of the method in a row."""
    return str(_preset(paper)["methods"][row]["method"])


def is_ours(it: Item, row: str) -> bool:
    """True if the paper does not have the row."""
    return bool(_preset(it.paper)["methods"][row].get("ours", False))


def row_remark(it: Item, row: str) -> str:
    """Return the remark on a row that the paper does not have; "" for the paper's rows."""
    ours = _preset(it.paper)["methods"][row].get("ours", False)
    return ours if isinstance(ours, str) else "ours, not in the paper" if ours else ""


def settings_text(given: Mapping[str, Any]) -> str:
    """Return settings as text: 'epochs = 5, cap = true'."""
    return ", ".join(f"{k} = {str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items())


def row_differs(it: Item, row: str) -> str:
    """Return the difference between a row and the paper's that no setting of the reader removes; "" if none."""
    return str(_preset(it.paper)["methods"][row].get("differs", ""))


def statistic(it: Item, column: str, row: str = "") -> str:
    """Return the name of the statistic in a cell: the row's, else the column's, else the item's."""
    preset = _preset(it.paper)
    of_column = preset["columns"][column].get("statistic", it.statistic)
    return str(preset["methods"].get(row, {}).get("statistic", of_column))


def narrow(it: Item, data: Sequence[str], methods: Sequence[str]) -> Item:
    """Return the item with these data sets and methods only; raise CoterieError for unknown names."""
    preset = _preset(it.paper)
    known = {c: str(preset["columns"][c].get("data", "")) for c in it.columns}
    for d in data:
        if d not in known.values() and d not in known:
            raise unknown(f"data set of {it.paper} {it.name}", d, {*known.values()})
    columns = tuple(c for c in it.columns if not data or known[c] in data or c in data)
    by_name = {r: str(preset["methods"][r]["method"]) for r in it.rows}
    methods = _joined(methods, {*by_name, *by_name.values()})
    for m in methods:
        if m not in by_name and m not in by_name.values():
            raise unknown(f"method of {it.paper} {it.name}", m, {*by_name, *by_name.values()})
    rows = tuple(r for r in it.rows if not methods or r in methods or by_name[r] in methods)
    return replace(it, rows=rows, columns=columns)


def _joined(parts: Sequence[str], known: set[str]) -> list[str]:
    """Join parts that were split at the commas of a known name; the longest name wins."""
    out, at = list[str](), 0
    while at < len(parts):
        ends = [e for e in range(len(parts), at, -1) if ", ".join(parts[at:e]) in known]
        end = ends[0] if ends else at + 1
        out.append(", ".join(parts[at:end]))
        at = end
    return out


def layer_cells(it: Item, row: str, column: str, seed: int, shrink: Shrink) -> dict[str, RunSettings]:
    """Return layer -> the run of X-full that a row of given layers needs first; empty for other rows."""
    layers = _preset(it.paper)["methods"][row].get("best_of", ())
    layers = it.settings.get("best_of", layers) if layers else ()
    full = {
        "method": "fedcpmd-full",
        "val_share": 0.2,
    }
    return {layer: cell(it, row, column, seed, shrink, {**full, "layer": layer}) for layer in layers}


def cell(
    it: Item, row: str, column: str, seed: int, shrink: Shrink, more: Mapping[str, Any] | None = None
) -> RunSettings:
    """Return the settings of one run: protocol, item, column, method and `more`, then the reader's changes."""
    preset = _preset(it.paper)
    given = {**preset["protocol"], **it.settings, **preset["columns"][column], **preset["methods"][row], **(more or {})}
    has = fields(given["method"], given)
    told = {k: v for k, v in given.pop("own", {}).items() if k in has}  # settings for methods that have them
    given = {**told, **given}
    for name in ("statistic", "ours", "differs", "best_of"):
        given.pop(name, None)
    planned_data = given["data"]
    given["data"] = (shrink.stand_in or {}).get(planned_data, planned_data)
    given["seed"] = int(given.get("seed", 0)) + seed
    planned = int(given["rounds"])
    if shrink.rounds:
        given["rounds"] = shrink.rounds
        for name, least in _PHASES.items():
            if isinstance(given.get(name), int):
                given[name] = max(least, round(given[name] * shrink.rounds / planned))
        given["eval_every"] = max(1, min(int(given.get("eval_every", 10)), shrink.rounds // 2))
    planned_subset = given.get("subset")
    if shrink.subset:
        given["subset"] = smaller_subset(given.get("subset"), shrink.subset)
    size = given.get("min_size", PartitionSettings().min_size)
    if (least := shrink.least(planned_data, given["data"], size, planned_subset)) < size:
        given["min_size"] = least
        if least == _LEAST and parse_scheme(given["partition"]).name in ("dirichlet", "rotate"):
            given.setdefault("short", "fill")  # so few samples that hardly any draw gives every client two
    changes = shrink.changes or {}
    if "cluster_when" in changes:
        given.pop("min_round", None)  # belongs to the paper's value
    try:
        return settings(**{**given, **changes})
    except CoterieError as e:
        raise CoterieError(f"{it.paper} {it.name}, {row}: {e}") from e


def cells(it: Item, seeds: int, shrink: Shrink, out: Path) -> dict[tuple[str, str, int], Cell]:
    """Return (row, column, seed) -> cell; columns with different statistics of one run share it.

    A row of given layers has a cell when its runs of X-full have finished.
    """
    made = {}
    for row, column, seed in product(it.rows, it.columns, range(seeds)):
        first = {k: _placed(s, out) for k, s in layer_cells(it, row, column, seed, shrink).items()}
        if all(c.finished() for c in first.values()):
            chosen = {"assignment": best_layers({k: Run(c.out) for k, c in first.items()})} if first else {}
            made[row, column, seed] = _placed(cell(it, row, column, seed, shrink, chosen), out)
    return made


def first_cells(it: Item, seeds: int, shrink: Shrink, out: Path) -> list[Cell]:
    """Return the runs that must have finished before `cells` knows all rows."""
    every = product(it.rows, it.columns, range(seeds))
    return [_placed(s, out) for r, c, seed in every for s in layer_cells(it, r, c, seed, shrink).values()]


def planned_cells(it: Item, seeds: int, shrink: Shrink, out: Path) -> dict[tuple[str, str, int], list[Cell]]:
    """Return (row, column, seed) -> its runs, those of X-full first; a row of given layers may not know them yet."""
    known = cells(it, seeds, shrink, out)
    return {
        key: [
            *(_placed(s, out) for s in layer_cells(it, *key, shrink).values()),
            known.get(key) or _placed(cell(it, *key, shrink), out),
        ]
        for key in product(it.rows, it.columns, range(seeds))
    }


def _placed(s: RunSettings, out: Path) -> Cell:
    """Return the cell of a run: in the folder of an earlier run with the same settings, if there is one."""
    text = json.dumps(_written_out(s).model_dump(mode="json"), sort_keys=True)
    name = f"{s.method}-{Path(s.data).stem}-s{s.seed}"
    return _earlier(s, out, name) or Cell(s, out / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _written_out(s: RunSettings) -> RunSettings:
    """Return the settings with the method's defaults, so that a default given explicitly is the same run."""
    return s.model_copy(update={"settings": build_method(s.method, s.settings).hp.model_dump(mode="json")})


def _earlier(wanted: RunSettings, out: Path, name: str) -> Cell | None:
    """Return an existing run with the same settings, also one of an older version with fewer settings."""
    for path in sorted(out.glob(f"{name}-????????/settings.json")):
        try:
            description = read_settings(path.parent)
            given, then = RunSettings(**description["settings"]), recorded(description)
            if _written_out(then) == _written_out(wanted):
                return Cell(given if resolved(given) == then else then, path.parent)
        except (CoterieError, ValidationError, KeyError, TypeError):
            continue  # damaged or of a different version: not the same run
    return None
