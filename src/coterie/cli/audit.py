"""`coterie audit-log`: what came to a host of a federation, what left it, and what was refused."""

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
    refused: Annotated[bool, Option("--refused", help="only what was refused")] = False,
    round_: Annotated[int | None, Option("--round", min=0, help="only this round; 0 is the plan")] = None,
    as_json: o.Json = False,
) -> None:
    """Show what came to a device, edge or cloud, what left it, for whom, and what was refused."""
    from coterie.federation.policy.audit import locate_audit_log, read_audit_log

    file = locate_audit_log(path)
    found = read_audit_log(file)
    lines = [
        line
        for line in found.lines
        if (not refused or "refused" in line) and (round_ is None or line.get("round") == round_)
    ]
    if as_json:
        about = {"damage": found.damage, "torn": found.torn, "chain": found.chain}
        typer.echo(json.dumps({"file": str(file), "lines": lines, **about}))
    else:
        console.print(_table(lines))
        cut = f", {found.torn} cut short by a crash" if found.torn else ""
        typer.echo(f"{len(lines)} of {len(found.lines)} lines{cut}; last hash {found.chain or 'none'}")
    for sentence in found.damage:
        typer.echo(sentence, err=True)
    if found.damage:
        raise typer.Exit(1)


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("time", "run", "round", "message", "way", "who", "what"):
        table.add_column(name, justify="right" if name == "round" else "left", no_wrap=name not in ("who", "what"))
    for line in lines:
        run, time = str(line.get("run", ""))[:8], str(line.get("time", ""))[:19].replace("T", " ")
        words = [time, run, line.get("round", ""), line.get("message", ""), line.get("way", ""), line.get("peer", "")]
        table.add_row(*(_plain(str(w)) for w in words), _plain(_what(line)))
    return table


def _what(line: dict[str, Any]) -> str:
    for word in ("refused", "missing"):
        if word in line:
            return f"{word}: {line[word]}"
    sizes = ", ".join(f"{kind} {n:,} B" for kind, n in line.get("sizes", {}).items())
    return sizes or ", ".join(f"{k} {v}" for k, v in line.get("about", {}).items())


def _plain(text: str) -> Text:
    """Words of other hosts; what looks like markup is text too."""
    return Text(printable(text))
