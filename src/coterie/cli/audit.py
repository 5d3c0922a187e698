"""`coterie audit-log`: the messages that came to a host of a federation, left it or were refused."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console
from coterie.errors import printable

audit_app = typer.Typer()


@audit_app.command("audit-log")
def audit_log(
    path: Annotated[Path, Argument(metavar="PATH", help="state folder, run folder or audit.jsonl")],
    refused: Annotated[bool, Option("--refused", help="show only refused messages")] = False,
    round_: Annotated[
        int | None, Option("--round", min=0, help="show only this round; the plan belongs to round 0")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Show the messages that came to a device, edge or cloud, left it or were refused."""
    from coterie.federation.policy.audit import locate_audit_log, read_audit_log

    file = locate_audit_log(path)
    records = read_audit_log(file)
    lines = [
        line
        for line in records.lines
        if (not refused or "refused" in line) and (round_ is None or line.get("round") == round_)
    ]
    if as_json:
        about = {"damage": records.damage, "torn": records.torn, "chain": records.chain}
        typer.echo(json.dumps({"file": str(file), "lines": lines, **about}))
    else:
        console.print(_table(lines))
        torn = f", {records.torn} incomplete because of a crash" if records.torn else ""
        typer.echo(f"{len(lines)} of {len(records.lines)} lines{torn}; last hash {records.chain or 'none'}")
    for message in records.damage:
        typer.echo(message, err=True)
    if records.damage:
        raise typer.Exit(1)


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("time", "run", "round", "message", "way", "peer", "content"):
        table.add_column(name, justify="right" if name == "round" else "left", no_wrap=name not in ("peer", "content"))
    for line in lines:
        run, time = str(line.get("run", ""))[:8], str(line.get("time", ""))[:19].replace("T", " ")
        words = [time, run, line.get("round", ""), line.get("message", ""), line.get("way", ""), line.get("peer", "")]
        table.add_row(*(_plain(str(w)) for w in words), _plain(_content(line)))
    return table


def _content(line: dict[str, Any]) -> str:
    for word in ("refused", "missing"):
        if word in line:
            return f"{word}: {line[word]}"
    sizes = ", ".join(f"{kind} {n:,} B" for kind, n in line.get("sizes", {}).items())
    return sizes or ", ".join(f"{k} {v}" for k, v in line.get("about", {}).items())


def _plain(text: str) -> Text:
    """Return text of other hosts without control characters, and with markup shown as it is."""
    return Text(printable(text))
