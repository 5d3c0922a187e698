"""`coterie paper`: rerun a table or figure of one of the five papers and compare it with the printed values."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import Stop, console, frame_table

if TYPE_CHECKING:
    from coterie.papers.presets import Item
    from coterie.results.grid import Cell, SweepStatus

_BUSY = " This machine is busy, so the times are too long; new ones are not stored."

paper_app = typer.Typer()


@paper_app.command("paper")
def paper(
    name: Annotated[str, Argument(help="fedcpmd, fedpc, fedgmh, ecs-fl, sc-fpfl; or `list`")],
    item: Annotated[str | None, Argument(help="a table or figure; `coterie paper list PAPER` names them")] = None,
    data: Annotated[str | None, Option(help="comma-separated list of data sets")] = None,
    methods: Annotated[str, Option(help="comma-separated list of methods, or all")] = "all",
    seeds: Annotated[int | None, Option(min=1, help="runs of each cell (default: as many as the paper, or 1)")] = None,
    rounds: Annotated[int | None, Option(min=1, help="fewer rounds than the paper")] = None,
    subset: Annotated[int | None, Option(min=1, help="use only N samples of each data set")] = None,
    instead: Annotated[str | None, Option(help="data sets to replace, such as emnist=mnist")] = None,
    set_: o.SetOption = None,
    data_dir: o.DataDir = None,
    workers: o.WorkersOption = None,
    out: o.Out = None,
    calibrate: Annotated[bool, Option("--calibrate", help="with `list`: repeat the timing of this machine")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="show the runs, their settings and their estimated time, and run nothing")
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Rerun a paper's table or figure and compare printed and measured values."""
    from coterie.config import engine, parse_assignment
    from coterie.data.catalogue import dataset_size
    from coterie.errors import CoterieError
    from coterie.papers import output, presets, protocol
    from coterie.progress import bar
    from coterie.results.grid import sweep
    from coterie.results.run import Run

    if name == "list":
        _list(item, data_dir, workers, calibrate)
        return
    if item is None:
        names = ", ".join(i.name for i in sorted(presets.items(name), key=_order))
        raise CoterieError(f"name a table or figure of {name}: {names}")
    for option, text in (("--data", data), ("--methods", methods)):
        if text is not None and not o.commas(text):
            raise CoterieError(f"{option} names nothing; leave it out for all")
    chosen = presets.narrow(presets.item(name, item), o.commas(data), [] if methods == "all" else o.commas(methods))
    changes, stand_in = dict(parse_assignment(a) for a in set_ or []), _pairs(instead)
    used = [(stand_in or {}).get(d, d) for d in presets.needs(chosen).data]
    shrink = presets.Shrink(rounds, subset, changes, stand_in, {d: sum(dataset_size(d, data_dir)) for d in used})
    folder = out or Path("runs") / name
    seeds = seeds or chosen.seeds or 1
    stop, failed, how = Stop(), dict[Path, str](), engine(workers=workers, data_dir=data_dir)

    def run(title: str, cells: Iterable["Cell"]) -> None:
        distinct = list({c.out: c for c in cells}.values())
        if distinct and not chosen.reads_only and not stop.asked:
            with stop.listening(), bar(title, sum(c.settings.rounds for c in distinct), quiet) as update:
                failed.update(sweep(distinct, how, lambda s: update(s.done(), _time_left(s)), stop).failed)

    if dry_run:
        plan = presets.planned_cells(chosen, seeds, shrink, folder)
        _show_plan(chosen, plan, protocol.note(chosen, shrink, seeds), data_dir, workers)
        return
    run(f"{name} {item}, one layer for all", presets.first_cells(chosen, seeds, shrink, folder))
    cells = presets.cells(chosen, seeds, shrink, folder)
    run(f"{name} {item}", cells.values())
    done = {k: Run(c.out) for k, c in cells.items() if c.out not in failed and c.finished()}
    if done:
        finished = min(sum((r, c, s) in done for s in range(seeds)) for r, c, _ in done)
        note = protocol.note(chosen, shrink, finished)
        measured = (
            "" if chosen.reads_only else protocol.count_cells(chosen, Counter((r, c) for r, c, _ in done), shrink)
        )
        text, verdicts, missing = output.write_item(chosen, done, folder / item, note, measured)
        if not quiet:
            console.print(frame_table(text, f"{name} {item}: {chosen.what}; {note}"))
            for v in [*verdicts, *missing]:
                console.print(v, highlight=False)
            console.print(f"side.csv, side.md, report.html and figures are in {folder / item}", soft_wrap=True,
                          highlight=False)  # fmt: skip
    elif chosen.reads_only:
        raise CoterieError(f"{folder} has no finished run to compare; run {name} table7, 8 or 9 there first")
    for reason in dict.fromkeys(failed.values()):
        runs = [path.name for path, why in failed.items() if why == reason]
        more = f" and {len(runs) - 3} more" if len(runs) > 4 else ""
        typer.echo(f"coterie: {', '.join(runs[:3] if more else runs)}{more} failed: {reason}", err=True)
    if stop.asked:
        typer.echo("stopped; to resume, repeat the command", err=True)
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1 if done else 2)


def _show_plan(
    item: "Item",
    plan: "Mapping[tuple[str, str, int], Sequence[Cell]]",
    note: str,
    data_dir: Path | None,
    workers: int | None,
) -> None:
    """Show every cell with its settings, the state of its runs and their estimated time."""
    from coterie.data.catalogue import dataset_size
    from coterie.papers import estimate, presets, protocol

    clock, n = estimate.Calibration(), workers or os.cpu_count() or 1
    sizes = {c.settings.data: dataset_size(c.settings.data, data_dir) for runs in plan.values() for c in runs}
    flat = {key: protocol.flat_settings(runs[-1].settings) | {"seed": None} for key, runs in plan.items()}
    names = sorted({name for f in flat.values() for name in f})
    common = {k: flat[next(iter(flat))].get(k) for k in names if len({str(f.get(k)) for f in flat.values()}) == 1}
    table = Table(title=f"{item.paper} {item.name}: {item.what}; {note}", title_justify="left")
    for column in ("row", "column", "settings of its own", "runs", "finished", "time"):
        table.add_column(column)
    seen: dict[Path, float] = {}
    for row in item.rows:
        for column in item.columns:
            mine = {c.out: c for key, runs in plan.items() if key[:2] == (row, column) for c in runs}
            own = {k: v for k, v in flat[row, column, 0].items() if k not in common and v not in (None, [], {})}
            new = {path: c for path, c in mine.items() if path not in seen}
            seen |= {
                path: 0.0 if c.finished() else estimate.run_seconds(c.settings, clock, sizes, n)
                for path, c in new.items()
            }
            time = estimate.duration_text(sum(seen[path] for path in new)) if new else "shared"
            finished = sum(c.finished() for c in mine.values())
            table.add_row(row, column, presets.settings_text(own), str(len(mine)), str(finished), time)
    console.print(table)
    console.print(f"in all runs: {presets.settings_text({k: v for k, v in common.items() if v})}", highlight=False)
    total = estimate.duration_text(sum(seen.values()))
    console.print(
        f"{len(seen)} runs, about {total} with {n} workers for those that are not finished; nothing was run."
        f"{_BUSY if clock.busy else ''}",
        highlight=False,
    )


def _pairs(instead: str | None) -> dict[str, str] | None:
    from coterie.errors import CoterieError

    replaced = {}
    for pair in instead.split(",") if instead else ():
        old, equals, new = pair.partition("=")
        if not (equals and old.strip() and new.strip()):
            raise CoterieError(f'--instead takes pairs such as emnist=mnist, not "{pair}"')
        replaced[old.strip()] = new.strip()
    return replaced or None


def _time_left(status: "SweepStatus") -> str:
    seconds = status.seconds_left()
    return "" if seconds is None else f"about {seconds / 60:.0f} min left"


def _list(only: str | None, data_dir: Path | None, workers: int | None, calibrate: bool) -> None:
    """List every item with the data it needs and its estimated time on this machine."""
    from coterie.data.catalogue import dataset_size
    from coterie.data.sources import list_datasets
    from coterie.papers import estimate, presets

    if only is not None and only not in presets.PAPERS:
        presets.items(only)  # raises with the known names
    available = {k.name for k in list_datasets(data_dir) if k.available}
    clock = estimate.Calibration(fresh=calibrate)
    n, sizes = workers or os.cpu_count() or 1, dict[str, tuple[int, int]]()
    for name in [only] if only else presets.PAPERS:
        table = Table(title=f"{name} ({presets.title(name)})", title_justify="left")
        for column in ("item", "content", "rows x columns", "needs", "time"):
            table.add_column(column)
        for i in sorted(presets.items(name), key=_order):
            needs = presets.needs(i)
            sizes |= {d: dataset_size(d, data_dir) for d in needs.data if d not in sizes}
            present, absent = ([d for d in needs.data if (d in available) == there] for there in (True, False))
            words = [", ".join(present)] if present else []
            words += [f"not here: {', '.join(absent)}"] if absent else []
            time = estimate.estimate(i, clock, sizes, available, n)
            shape = f"{len(i.rows)} x {len(i.columns)}"
            table.add_row(i.name, i.what, shape, "; ".join([*words, *needs.more]), _about(time))
        console.print(table)
        if note := presets.not_experiments(name):
            console.print(note, highlight=False)
    console.print(
        f"Times are estimates for one seed and {n} workers, from steps timed on this machine ({clock.path}; "
        f"--calibrate repeats the timing): for the data on this machine, and in brackets for all. Items share runs."
        f"{_BUSY if clock.busy else ''}",
        highlight=False,
    )


def _order(item: Any) -> tuple[bool, bool, int]:
    """Return a key that sorts tables first, then figures, then the rest, each by number."""
    number = re.search(r"\d+", item.name)
    return not number, item.name.startswith("fig"), int(number.group()) if number else 0


def _about(time: Any) -> str:
    from coterie.papers.estimate import duration_text

    if not time.all:
        return "seconds"
    if not time.available:
        return f"no data here ({duration_text(time.all)})"
    text = duration_text(time.available)
    return text if math.isclose(time.available, time.all) else f"{text} ({duration_text(time.all)})"
