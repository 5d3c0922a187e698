"""The catalogue commands: `coterie list`, `coterie show`, `coterie data show`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console
from coterie.cli.words import FAMILIES

catalogue = typer.Typer()
data_app = typer.Typer(no_args_is_help=True, help="Fetch data, and look at data and partitions.")
catalogue.add_typer(data_app, name="data")


class Listing(StrEnum):
    methods = "methods"
    data = "data"
    models = "models"


@catalogue.command("list")
def list_(
    kind: Annotated[Listing, Argument(help="methods, data or models")],
    search: Annotated[str, Option(help="only what has this text in its name or description")] = "",
    family: Annotated[str, Option(help="methods of one family: global, fine-tuning, split, clusters, ...")] = "",
    variants: Annotated[bool, Option("--variants", help="list ablations and variants too")] = False,
    traffic: Annotated[bool, Option("--bytes", help="what a participant sends and receives in a round")] = False,
    model: o.ModelName = None,
    data: o.DataName = None,
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """List methods, data sets or models. --model or --data imply --bytes, for that model."""
    from coterie.errors import CoterieError

    if kind is not Listing.methods and (family or variants or traffic or model or data):
        raise CoterieError(
            f"--family, --variants, --bytes, --model and --data are for methods; leave them out for {kind}"
        )
    if kind is Listing.methods:
        rows = _methods(family, variants, (model, data, data_dir) if traffic or model or data else None)
    else:
        rows = _data(data_dir) if kind is Listing.data else _models()
    words = search.lower()
    rows = [r for r in rows if words in " ".join(map(str, r.values())).lower()]
    natural = _federations() if kind is Listing.data else []
    natural = [r for r in natural if words in " ".join(map(str, r.values())).lower()]
    if as_json:
        typer.echo(json.dumps([*rows, *natural]))
        return
    if not rows and not natural:
        console.print(f"no {kind} found")
        return
    if rows:
        console.print(_listing(rows))
    if natural:
        console.print(_natural_table(natural))
    if kind is Listing.methods:
        _legend(rows, variants)


def _listing(rows: list[dict[str, Any]]) -> Table:
    """The columns that fit the screen, most important first; the rest of a row is in `show` and --json."""
    columns = [c for c in rows[0] if c not in ("path", "variants", "certainty", "title")]
    wanted, room = [], console.width - 1
    for c in sorted(columns, key=lambda c: _FIRST.index(c) if c in _FIRST else len(_FIRST)):
        width = max(len(c), max(min(_MOST.get(c, 20), len(_cell(r, c))) for r in rows)) + 3
        if width <= room:
            wanted.append(c)
            room -= width
    table = Table()
    for c in [c for c in columns if c in wanted]:
        table.add_column(c, no_wrap=c in ("name", "year", "here"), justify="right" if c.startswith("KB") else "left")
    for r in rows:
        table.add_row(*(escape(_cell(r, c)) for c in columns if c in wanted))
    return table


_FIRST = (
    "name",
    "KB up",
    "KB down",
    "year",
    "here",
    "clients",
    "classes",
    "shape",
    "family",
    "description",
    "personal",
)
_MOST = {"description": 34, "personal": 26, "family": 22, "needs": 26, "options": 30}  # columns a text is wrapped at


def _cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "name" and row.get("variants"):
        return f"{value} (+{len(row['variants'])})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if column == "shape":
        return "x".join(map(str, value))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)


def _legend(rows: list[dict[str, Any]], variants: bool) -> None:
    folded = sum(len(r["variants"]) for r in rows)
    n = len(rows)
    words = [f"{n} method{'s' * (n != 1)}" + (f", and {folded} variants of them (--variants)" if folded else "")]
    if "KB up" in rows[0]:
        words.append(f"KB for {rows[0]['model']}")
    words.append("`coterie show NAME` tells more")
    console.print("; ".join(words), markup=False, highlight=False, soft_wrap=True)


def _methods(
    family: str, variants: bool, sizes: tuple[str | None, str | None, Path | None] | None
) -> list[dict[str, Any]]:
    from coterie.cli.method_facts import all_facts
    from coterie.errors import unknown

    wanted = [words for words in FAMILIES.values() if family.lower() in words]
    if family and not wanted:
        raise unknown("family", family, FAMILIES.values())
    rows = list[dict[str, Any]]()
    for facts in all_facts().values():
        if (facts["parent"] and not variants) or (family and not set(facts["family"]) & set(wanted)):
            continue
        row = {key: facts[key] for key in ("name", "title", "year", "family", "personal")}
        row |= {
            "needs": facts["needs"],
            "certainty": facts["source"],
            "variants": [] if variants else facts["variants"],
        }
        rows.append(row)
    if sizes is None:
        return rows

    from coterie.cli.traffic import Traffic

    measured = Traffic(sizes[0], sizes[1] or "digits", sizes[2])
    for row in rows:
        up, down = measured.of(row["name"])
        row |= {"KB up": up, "KB down": down, "model": f"{measured.model} on {measured.data}"}
    return rows


def _data(data_dir: Path | None) -> list[dict[str, Any]]:
    from coterie.data.sources import list_datasets

    return [
        {
            "name": d.name,
            "classes": d.classes,
            "shape": list(d.shape),
            "here": d.available,
            "description": d.description,
        }
        for d in list_datasets(data_dir)
        if not d.clients
    ]


def _federations() -> list[dict[str, Any]]:
    from coterie.data.sources import list_datasets

    return [
        {
            "name": d.name,
            "clients": d.clients,
            "task": d.task,
            "description": d.description,
            "licence": d.licence,
            "here": d.available,
            "install": d.install,
        }
        for d in list_datasets()
        if d.clients
    ]


def _natural_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="natural federations, partition natural by default", title_justify="left")
    for name in ("name", "clients", "task", "description", "licence", "here, or how to get it"):
        table.add_column(name)
    for r in rows:
        words = [r[k] for k in ("name", "clients", "task", "description", "licence")]
        table.add_row(*words, "yes" if r["here"] else r["install"])
    return table


def _models() -> list[dict[str, Any]]:
    from coterie.models.registry import list_models

    return [{"name": m.name, "description": m.description, "options": dict(m.options)} for m in list_models()]


@catalogue.command()
def show(
    method: Annotated[str, Argument(help="a method's name")],
    allow: Annotated[bool, Option("--allow", help="print a file for `coterie join --allow` that approves it")] = False,
    equations: Annotated[
        bool, Option("--equations", help="which function computes which equation of the paper (the five papers)")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """A method's idea, paper, payloads and settings."""
    if allow:
        from coterie.federation.policy.allow_example import example_policy

        typer.echo(example_policy(method), nl=False)
        return
    if equations:
        _equations(method, as_json)
        return

    from coterie.cli.method_facts import show_facts

    facts = show_facts(method)
    about = {
        "family": ", ".join(facts["family"]),
        "personal": facts["personal"],
        "needs": ", ".join(facts["needs"]) or "nothing special",
        "weights": facts["weights"],
        "source": facts["source"],
    } | ({"variants": ", ".join(facts["variants"])} if facts["variants"] else {})
    if as_json:
        head = {key: facts[key] for key in ("name", "title", "paper", "idea")}
        typer.echo(json.dumps({**head, **about, "settings": facts["settings"], "payloads": facts["payloads"]}))
        return
    console.print(f"[bold]{escape(facts['title'])}[/bold] ({escape(facts['paper'])})", highlight=False)
    console.print(f"\n{facts['idea']}\n", markup=False, highlight=False)
    for name, words in about.items():
        console.print(f"{name + ':':10} {words}", markup=False, highlight=False)
    if facts["payloads"]:
        console.print("\nwhat crosses a link, with the default model on digits; what is not listed cannot cross")
        table = Table()
        for name in facts["payloads"][0]:
            table.add_column(name, justify="right" if name == "bytes" else "left")
        for row in facts["payloads"]:
            table.add_row(*(escape(f"{v:,}" if isinstance(v, int) else v.replace("`", "")) for v in row.values()))
        console.print(table)
    if not facts["settings"]:
        console.print("\nno settings of its own; `coterie run --help` shows those of every run")
        return
    first = facts["settings"][0]
    console.print(f"\nsettings, as in `coterie run {method} --set {first['name']}={first['default']}`")
    table = Table()
    for name in ("name", "default", "values", "meaning"):
        table.add_column(name, no_wrap=name == "name")
    for f in facts["settings"]:
        values = ", ".join(filter(None, (f["values"], f["bounds"])))
        table.add_row(*map(escape, (f["name"], _text(f["default"]), values, f["meaning"])))
    console.print(table)
    if facts["readings"]:
        table = Table(title="readings (--set reading=NAME)", title_justify="left")
        for column in ("setting", *facts["readings"]):
            table.add_column(column)
        for name in next(iter(facts["readings"].values())):
            table.add_row(name, *(_text(reading[name]) for reading in facts["readings"].values()))
        console.print(table)


def _equations(method: str, as_json: bool) -> None:
    from coterie.papers.equations import equation_map, paper_of

    lines = equation_map(paper_of(method))
    if as_json:
        typer.echo(json.dumps([
            {"name": e.name, "words": e.words, "functions": e.functions, "reason": e.reason} for e in lines
        ]))  # fmt: skip
        return
    table = Table(title="equations and algorithm lines of the paper", title_justify="left")
    for column in ("number", "meaning", "function"):
        table.add_column(column)
    for e in lines:
        table.add_row(*map(escape, (e.name, e.words, "\n".join(e.functions) or f"none: {e.reason}")))
    console.print(table)


@data_app.command("get")
def data_get(
    names: Annotated[list[str], Argument(metavar="NAME...", help="fmnist, mnist, cifar10, ...")],
    data_dir: o.DataDir = None,
    quiet: o.Quiet = False,
) -> None:
    """Fetch data sets from their official sources; checked, and continued after an interruption."""
    from coterie.cli.screen import download_bar
    from coterie.data.fetch import fetch_dataset

    for name in names:
        with download_bar(quiet) as tell:
            files = fetch_dataset(name, data_dir, tell)
        if not quiet:
            console.print(f"{name}: {files[0].parent}", soft_wrap=True, highlight=False)


@data_app.command("list")
def data_list(
    search: Annotated[str, Option(help="only what has this text in its name or description")] = "",
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """List known data sets, and natural federations with their clients, task and licence."""
    list_(Listing.data, search=search, data_dir=data_dir, as_json=as_json)


@data_app.command("show")
@o.takes_settings("data", *o.COLUMN_OPTIONS, "task", "partition", "clients", "seed")
def data_show(
    given: dict[str, Any],
    data_dir: o.DataDir = None,
    out: Annotated[Path, Option(help="file for the picture (.png or .svg)")] = Path("partition.png"),
    as_json: o.Json = False,
) -> None:
    """Show a partition: a table, and a picture of labels by client."""
    from coterie.config import settings
    from coterie.data.federation import federate
    from coterie.data.overview import draw_partition, partition_rows, partition_table
    from coterie.data.sources import load_dataset
    from coterie.data.target_types import with_task
    from coterie.engine.session import Objects, follow_data

    s = settings(**{"method": "fedavg", **given})
    dataset = with_task(load_dataset(s.data, data_dir, s.subset, s.task, s.columns), s.task)
    federation = federate(dataset, follow_data(s, dataset, Objects()).federation, s.seed)
    for note in (*federation.choices, *federation.notes):
        typer.echo(note, err=True)
    drawn = draw_partition(federation, out)
    if as_json:
        typer.echo(json.dumps({"picture": str(drawn), "clients": partition_rows(federation)}))
        return
    console.print(partition_table(federation))
    console.print(f"picture: {drawn}", soft_wrap=True, highlight=False)


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
