"""What there is: `coterie list`, `coterie show`, `coterie data show`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console

if TYPE_CHECKING:  # the command line starts without torch
    from coterie.parts.readings import ReadingSettings

catalogue = typer.Typer()
data_app = typer.Typer(no_args_is_help=True, help="Look at data and partitions.")
catalogue.add_typer(data_app, name="data")


class Kind(StrEnum):
    methods = "methods"
    data = "data"
    models = "models"


@catalogue.command("list")
def list_(
    kind: Annotated[Kind, Argument(help="methods, data or models")],
    model: o.Model = None,
    data: o.Data = None,
    data_dir: o.DataDir = None,
) -> None:
    """List methods (with bytes for the chosen model), data sets or models."""
    {Kind.methods: _methods, Kind.data: _data, Kind.models: _models}[kind](model, data, data_dir)


def _methods(model: str | None, data: str | None, data_dir: Path | None) -> None:
    from coterie.cli.traffic import traffic
    from coterie.errors import CoterieError
    from coterie.methods import find, known

    sizes = traffic(model, data or "digits", data_dir)
    table = Table(title=f"KB per participant and round for {sizes.model} on {sizes.data}", title_justify="left")
    for name in ("name", "method", "family", "year", "personal", "KB up", "KB down", "needs"):
        table.add_column(name, no_wrap=name in ("name", "year"))
    for name in known():
        try:
            m = find(name)
        except CoterieError as e:  # somebody's broken package must not hide the others
            table.add_row(name, str(e))
            continue
        up, down = sizes.of(name)
        card, mark = m.card, " [C]" if m.card.certainty == "C" else ""
        year, needs = str(card.year or ""), " ".join(m.needs)
        table.add_row(name, card.title + mark, card.family, year, card.personal, up, down, needs)
    console.print(table)
    console.print("[C]: reconstructed from the published description only", markup=False, highlight=False)


def _data(model: str | None, data: str | None, data_dir: Path | None) -> None:
    from coterie.data.sources import known

    table = Table()
    for name in ("name", "classes", "shape", "here", "description"):
        table.add_column(name)
    for d in known(data_dir):
        here = "yes" if d.available else "no"
        table.add_row(d.name, str(d.classes), "x".join(map(str, d.shape)), here, d.description)
    console.print(table)


def _models(model: str | None, data: str | None, data_dir: Path | None) -> None:
    from coterie.models.registry import known

    table = Table()
    for name in ("name", "description", "options"):
        table.add_column(name)
    for m in known():
        table.add_row(m.name, m.description, ", ".join(f"{k}={v}" for k, v in m.options.items()))
    console.print(table)


@catalogue.command()
def show(method: Annotated[str, Argument(help="a method's name")]) -> None:
    """A method's idea, paper and settings."""
    import inspect

    from coterie.methods import find
    from coterie.parts.readings import ReadingSettings

    m = find(method)
    console.print(f"[bold]{m.card.title}[/bold] ({m.card.paper})", highlight=False)
    text = inspect.getdoc(inspect.getmodule(m)) or ""
    console.print("\n" + text.partition("\n\n")[2].strip() + "\n", markup=False, highlight=False)
    needs = ", ".join(m.needs) or "nothing special"
    card = m.card
    facts = f"personal: {card.personal}; family {card.family}; weighting by default: {m.weighting}; needs: {needs}"
    console.print(facts + f"; certainty {card.certainty}", markup=False, highlight=False)
    fields = m.Settings.model_fields
    if not fields:
        console.print("no settings of its own")
        return
    table = Table(title="settings (--set name=value)", title_justify="left")
    for name in ("name", "default", "type", "bounds", "meaning"):
        table.add_column(name)
    resolved = m.Settings().model_dump() if issubclass(m.Settings, ReadingSettings) else {}
    for name, f in fields.items():
        bounds = ", ".join(str(b) for b in f.metadata)
        table.add_row(name, _text(resolved.get(name, f.default)), _type(f.annotation), bounds, f.description or "")
    console.print(table)
    if issubclass(m.Settings, ReadingSettings):
        console.print(_readings(m.Settings))


def _readings(settings: "type[ReadingSettings]") -> Table:
    """What each reading sets; a variant's own defaults stand in all of them."""
    table = Table(title="readings (--set reading=name); what is set by name wins", title_justify="left")
    found = {name: settings(**{"reading": name}) for name in settings.readings}
    for column in ("setting", *found):
        table.add_column(column)
    for name in dict.fromkeys(name for reading in found for name in settings.preset(reading)):
        table.add_row(name, *(_text(getattr(hp, name)) for hp in found.values()))
    return table


@data_app.command("show")
def data_show(
    data: o.Data = None,
    data_dir: o.DataDir = None,
    partition: o.Partition = None,
    clients: o.Clients = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    config: o.Config = None,
    out: Annotated[Path, Option(help="where the picture goes (.png or .svg)")] = Path("partition.png"),
) -> None:
    """Who has what: a table, and a picture of labels by client."""
    from coterie.config import settings
    from coterie.data.federation import federate
    from coterie.data.show import draw, table
    from coterie.data.sources import load

    given = o.gather(config, set_, data=data, partition=partition, clients=clients, seed=seed)
    s = settings(**{"method": "fedavg", **given})
    federation = federate(load(s.data, data_dir, s.subset), s.federation, s.seed)
    console.print(table(federation))
    console.print(f"picture: {draw(federation, out)}", soft_wrap=True, highlight=False)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _type(annotation: Any) -> str:
    text = getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("Literal", "").strip("[]").replace("'", "")
