"""`coterie nodes`: the nodes of a federation; a running cloud or edge applies changes without a restart."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from coterie.cli.screen import console

nodes_app = typer.Typer(no_args_is_help=True, help="Nodes of a federation and their certificates.")

Dir = Annotated[Path, Argument(metavar="DIR", help="the directory of `coterie certs init`")]
EdgeFlag = Annotated[bool, Option("--edge", help="register the node as an edge for the devices in --devices")]
DevicesOption = Annotated[
    str | None, Option("--devices", help="comma-separated names of the edge's devices; * and ? are wildcards")
]
CertificateDays = Annotated[int, Option("--days", min=1, help="days for which a certificate is valid")]
Name = Annotated[str, Argument(metavar="NAME", help="a node; EDGE/DEVICE for a device behind an edge")]


@nodes_app.command("list")
def nodes_list(
    root: Dir,
    run: Annotated[
        Path | None, Option(help="folder of a run; also show seats and the times at which nodes were last seen")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> None:
    """Show names, roles, key fingerprints and states."""
    from coterie.federation.identity import admin as nodes

    infos = nodes.list_nodes(root, run)
    if as_json:
        typer.echo(json.dumps([asdict(n) for n in infos], indent=1))
        return
    table = Table("name", "role", "state", "key", *(("client", "connected", "last seen") if run else ()))
    for n in infos:
        role = f"{n.role} for {', '.join(n.devices)}" if n.devices else n.role
        seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(n.last_seen)) if n.last_seen else "never"
        seat = ["" if n.client is None else str(n.client), "yes" if n.connected else "no", seen] if run else []
        table.add_row(n.name, role, n.state, n.key, *seat)
    console.print(table)


@nodes_app.command("add")
def nodes_add(
    root: Dir,
    names: Annotated[list[str], Argument(metavar="NAME...", help="names of nodes")],
    request: Annotated[Path | None, Option(help="a request (.csr) that was made on the node's host")] = None,
    edge: EdgeFlag = False,
    devices: DevicesOption = None,
    days: CertificateDays = 825,
) -> None:
    """Register nodes as devices, or one as an edge. Keys and certificates are made here, with --request no key.

    A removed node may be added again; it gets its seat back.
    """
    from coterie.errors import CoterieError
    from coterie.federation.identity import authority as certs

    if request is not None and len(names) != 1:
        raise CoterieError("--request is the request of one node; name one node")
    attached = [name.strip() for name in (devices or "").split(",") if name.strip()]
    for name in names:
        made = certs.add_node(root, name, request, "edge" if edge else "device", attached, days)
        console.print(str(made), soft_wrap=True, highlight=False)


@nodes_app.command("remove")
def nodes_remove(root: Dir, name: Annotated[str, Argument(help="the node")]) -> None:
    """Remove a node and revoke its certificate at once. It keeps its seat until `coterie nodes free-seat`."""
    from coterie.federation.identity import authority as certs

    certs.remove_node(root, name)


@nodes_app.command("suspend")
def nodes_suspend(root: Dir, name: Name) -> None:
    """Send a node no requests from the next round on; it stays connected and keeps its certificate and seat."""
    from coterie.federation.identity import admin as nodes

    nodes.suspend(root, name)


@nodes_app.command("release")
def nodes_release(root: Dir, name: Name) -> None:
    """End a node's suspension; it continues with the state it had."""
    from coterie.federation.identity import admin as nodes

    nodes.end_suspension(root, name)


@nodes_app.command("rotate")
def nodes_rotate(
    root: Dir,
    name: Annotated[str, Argument(help="the node")],
    request: Annotated[Path | None, Option(help="a request (.csr) for a new key, made on the node's host")] = None,
    overlap: Annotated[
        float, Option(min=0, help="days for which the old certificate is valid if the new one is not used")
    ] = 7.0,
) -> None:
    """Give a node a new key and certificate; it keeps its seat and private state.

    The old certificate is valid until the node first connects with the new one, or until the end of the overlap.
    """
    from coterie.federation.identity import admin as nodes

    made = nodes.rotate_key(root, name, request, overlap * 86_400)
    console.print(f"{made}; give it to the node, which uses it without a restart", soft_wrap=True, highlight=False)


@nodes_app.command("reserve-seat")
def nodes_reserve(
    root: Dir, name: Name, client: Annotated[int, Argument(min=0, help="the client number, counted from 0")]
) -> None:
    """Bind a client number to a device: no other device gets this seat, even if it asks first."""
    from coterie.federation.identity import admin as nodes

    nodes.reserve_seat(root, name, client)


@nodes_app.command("free-seat")
def nodes_free(
    run: Annotated[Path, Argument(metavar="RUN", help="folder of the cloud's run")],
    name: Name,
    to: Annotated[str | None, Option(help="the node that gets the seat (default: the next new node)")] = None,
) -> None:
    """Free the seat of a removed or suspended node; the next node with this seat starts without private state."""
    from coterie.federation.identity import admin as nodes

    number = nodes.free_seat(run, name, to)
    console.print(
        f"the seat of client {number} will be free{f' for {to}' if to else ''} before the next round", highlight=False
    )
