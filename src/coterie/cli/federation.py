"""The commands of a federation: certs, serve, status, release, join, edge and up; `coterie nodes` is in nodes.py."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.nodes import CertificateDays, DevicesOption, EdgeFlag, nodes_add, nodes_app, nodes_remove
from coterie.cli.screen import Stop, console

federation_app = typer.Typer()
certs_app = typer.Typer(no_args_is_help=True, help="Keys and certificates of a federation.")
federation_app.add_typer(certs_app, name="certs")
federation_app.add_typer(nodes_app, name="nodes")

CertsDir = Annotated[Path, Option("--certs", help="the directory of `coterie certs init`")]
Ca = Annotated[Path, Option(help="certificate of the authority (ca.crt) of the server to connect to")]
Key = Annotated[Path, Option(help="this node's private key")]
Cert = Annotated[
    Path | None, Option("--cert", help="this node's certificate (default: the file next to the key, as .crt)")
]
Deadline = Annotated[float, Option(min=0.1, help="seconds for which a round waits for answers")]
Patience = Annotated[
    str | None,
    Option(help="seconds for which a run waits for its quorum before it ends with code 3, or forever (default 3600)"),
]
AllowFile = Annotated[
    Path | None,
    Option("--allow", help="TOML file with the policy of this host; `coterie show METHOD --allow` prints an example"),
]
Stay = Annotated[
    bool, Option("--stay", help="wait for the next run when a run has ended, instead of ending with code 0")
]
MethodName = Annotated[str | None, Argument(help="a method; `coterie list methods` shows all")]


@certs_app.command("init")
def certs_init(
    root: Annotated[Path, Argument(metavar="DIR", help="a new directory")],
    host: Annotated[
        list[str] | None, Option(help="name or address by which nodes reach this host; may be repeated")
    ] = None,
    days: Annotated[int, Option(min=1, help="days for which the certificates are valid")] = 825,
) -> None:
    """Create a certificate authority and a server certificate."""
    from coterie.federation.identity import authority as certs

    made = certs.init(root, host or [], days)
    console.print(
        f"made {made.root}; give each device {made.ca}, its own key and its own certificate", soft_wrap=True,
        highlight=False,
    )  # fmt: skip


@certs_app.command("renew")
def certs_renew(
    root: Annotated[Path, Argument(metavar="DIR", help="the directory of `coterie certs init`")],
    host: Annotated[
        list[str] | None,
        Option(
            help="name or address by which nodes reach this host; may be repeated (default: those of the present one)"
        ),
    ] = None,
    days: Annotated[int, Option(min=1, help="days for which the certificate is valid")] = 825,
    ca: Annotated[bool, Option("--ca", help="also make a new certificate authority")] = False,
    overlap: Annotated[
        float, Option(min=0, help="with --ca: days during which nodes can connect with the old or the new files")
    ] = 30.0,
) -> None:
    """Issue a new server certificate, and with --ca a new authority. A running server uses it without a restart.

    With --ca, all nodes need the new ca.crt and their new certificates (nodes/next/) before the end of the overlap.
    """
    from coterie.federation.identity import authority as certs

    if not ca:
        certs.renew(root, host or [], days)
        return
    made = certs.renew_ca(root, host or [], days, overlap)
    console.print(
        f"give each node {made.ca} and its certificate in {made.root / 'nodes' / 'next'}; it needs them in "
        f"{overlap:g} days", soft_wrap=True, highlight=False,
    )  # fmt: skip


@certs_app.command("switch")
def certs_switch(root: Annotated[Path, Argument(metavar="DIR", help="the directory of `coterie certs init`")]) -> None:
    """End the overlap of `renew --ca` now; nodes then need the new ca.crt and their new certificates."""
    from coterie.federation.identity import authority as certs

    certs.switch_now(root)


@certs_app.command("show")
def certs_show(root: Annotated[Path, Argument(metavar="DIR", help="the directory of `coterie certs init`")]) -> None:
    """Show how long the certificates are valid."""
    from datetime import UTC, datetime

    from coterie.federation.identity.authority import Certs

    certs = Certs(root)
    certs.check()
    for name, _, ends, _ in certs.dates():
        console.print(f"{name} is valid until {ends:%Y-%m-%d %H:%M} UTC", soft_wrap=True, highlight=False)
    if (at := certs.switches_at()) is not None:
        text = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
        console.print(f"a new authority takes over on {text}; nodes need {certs.ca}", soft_wrap=True, highlight=False)
    for warning in certs.expiring_nodes():
        console.print(warning, soft_wrap=True, highlight=False)


@certs_app.command("request")
def certs_request(
    path: Annotated[Path, Argument(metavar="FILE", help="the private key to make, for example alice.key")],
    name: Annotated[str | None, Option(help="name of the node (default: the name of FILE)")] = None,
) -> None:
    """Make a node's key on its own host, and a request (.csr) that the server's operator signs."""
    from coterie.federation.identity import authority as certs

    request = certs.make_request(path, name)
    console.print(
        f"made {path} and {request}; have the request signed with `coterie certs sign DIR {request.name}` and put the "
        f"certificate at {path.with_suffix('.crt')}", soft_wrap=True, highlight=False,
    )  # fmt: skip


certs_app.command("new-key", hidden=True)(certs_request)  # the name in version 0.1


@certs_app.command("sign")
def certs_sign(
    root: Annotated[Path, Argument(metavar="DIR", help="the directory of `coterie certs init`")],
    request: Annotated[Path, Argument(metavar="REQUEST", help="the .csr file of `coterie certs request`")],
    edge: EdgeFlag = False,
    devices: DevicesOption = None,
    days: CertificateDays = 825,
) -> None:
    """Register the node of a request and issue its certificate. Its key stays on its host.

    A node that is registered already gets a new certificate with `coterie nodes rotate --request`.
    """
    from coterie.federation.identity import authority as certs

    nodes_add(root, [certs.requested_name(request)], request, edge, devices, days)


certs_app.command("add-node", hidden=True)(nodes_add)  # the name in version 0.1
certs_app.command("remove-node", hidden=True)(nodes_remove)


_ClientsOption = Annotated[
    int | None, Option(help="number of clients that take part in training; later devices are newcomers")
]


@federation_app.command()
@o.takes_settings(
    "task",
    "data",
    *o.COLUMN_OPTIONS,
    "model",
    "partition",
    "join",
    "rounds",
    "epochs",
    "batch",
    "lr",
    "class_weights",
    "seed",
    "robust",
    clients=_ClientsOption,
)
def serve(
    given: dict[str, Any],
    method: MethodName = None,
    certs: CertsDir = Path("certs"),
    host: Annotated[str, Option(help="address to listen on")] = "0.0.0.0",
    port: Annotated[int, Option(min=1, max=65535, help="port for all devices and edges")] = 9092,
    min_clients: Annotated[
        int | None, Option(min=1, help="quorum: clients that each round needs; with fewer the run pauses (default 2)")
    ] = None,
    patience: Patience = None,
    norm_bound: Annotated[
        float | None,
        Option(
            min=0,
            help="refuse an upload whose size is more than this multiple of the usual size (default 50, 0: never)",
        ),
    ] = None,
    quarantine_after: Annotated[
        int | None,
        Option(min=0, help="refused answers after which a sender is put into quarantine (default 3, 0: never)"),
    ] = None,
    deadline: Deadline = 600.0,
    shape: Annotated[str | None, Option(help="shape of one item of the devices' own data, for example 1,28,28")] = None,
    classes: Annotated[
        str, Option(help="classes of the devices' own data: their number or their names (a,b,c); or numbers per target")
    ] = "0",
    data_dir: o.DataDir = None,
    out: o.Out = None,
    resume: Annotated[Path | None, Option(help="continue the federation in this folder")] = None,
    from_round: o.FromRound = None,
    keep: o.Keep = None,
    transport: o.Transport = None,
) -> None:
    """Run the cloud: wait for devices, run the rounds, and write a checkpoint after each."""
    from coterie.config import settings
    from coterie.errors import CoterieError
    from coterie.federation.cloud import program as s
    from coterie.federation.cloud.waiting import QuorumError
    from coterie.federation.line_log import log_lines, log_progress
    from coterie.federation.localhost.processes import die_with_parent, owner_only
    from coterie.storage.run_folder import fresh_folder

    o.check_transport(transport)
    die_with_parent()
    log_lines()
    given |= {} if method is None else {"method": method}
    rules: dict[str, Any] = {
        "min_clients": min_clients, "norm_bound": norm_bound, "quarantine_after": quarantine_after, "keep": keep,
    }  # fmt: skip
    rules = {k: v for k, v in rules.items() if v is not None}
    if patience is not None:
        rules["patience"] = _patience(patience)
    if resume is not None:
        if given:
            raise CoterieError(f"--resume continues a run with its own settings; remove {', '.join(sorted(given))}")
        chosen, cloud = s.reopen(resume)
        cloud = replace(cloud, **rules)
        folder, again = resume, True
    else:
        if "method" not in given:
            raise CoterieError("name a method, for example `coterie serve fedrep`; `coterie list methods` shows all")
        chosen = settings(**given)
        own = own_data(chosen.task, shape, classes)
        where: dict[str, Any] = {
            "certs": str(certs),
            "host": host,
            "port": port,
            "data_dir": str(data_dir) if data_dir else None,
        }
        tables = chosen.target is not None and "data" not in given  # that only the devices have
        if tables and (shape is not None or classes != "0"):
            raise CoterieError("the devices' tables say their shape and classes; leave out --shape and --classes")
        cloud = s.CloudSettings(**where, deadline=deadline, **own, **rules)
        folder = out or fresh_folder(f"{chosen.method}-federation")
        if tables and (folder / "cloud.json").exists():
            raise CoterieError(f"{folder} contains a federation; continue it with --resume {folder}")
        cloud, again = s.earlier_run(folder, chosen, cloud)
    owner_only(folder)
    stop = Stop()
    if resume is None and tables:
        from coterie.federation.cloud.table_agreement import agree_on_table
        from coterie.runtimes.base import Interrupted

        with stop.listening():
            try:
                chosen, cloud = agree_on_table(chosen, cloud, folder, stop)
            except Interrupted:
                raise typer.Exit(130) from None
    session = s.open_session(chosen, cloud)
    try:
        with stop.listening():
            ended = s.run_cloud(
                session, cloud, folder, resume=again, tell=log_progress, stopped=stop, from_round=from_round
            )
    except QuorumError as e:
        typer.echo(f"coterie: {e}; continue with: coterie serve --resume {folder}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"the run is in {folder}")
    if not ended:
        typer.echo(f"stopped; continue with: coterie serve --resume {folder}", err=True)
        raise typer.Exit(130)


def _patience(text: str) -> float | None:
    """Return the seconds of --patience; None for "forever"."""
    from coterie.errors import CoterieError

    if text == "forever":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise CoterieError(f'patience "{text}" must be a number of seconds, at least 0, or forever')
    return seconds


@federation_app.command()
def release(
    folder: Annotated[Path, Argument(metavar="RUN", help="the folder of the cloud's run")],
    name: Annotated[str, Argument(help="a sender in quarantine; `coterie status RUN` lists them")],
) -> None:
    """Release a sender from quarantine; a running cloud sends it requests again in the next round."""
    from coterie.federation.policy import quarantine

    quarantine.release_sender(folder, name)
    console.print(f"{name} is released", soft_wrap=True, highlight=False)


@federation_app.command()
def status(
    folder: Annotated[Path, Argument(metavar="RUN", help="the folder of the cloud's run, or of `coterie up`")],
    as_json: o.Json = False,
) -> None:
    """Show the state of a federation (running, waiting, paused, failed, ended or died) and its connected nodes."""
    import json

    from coterie.federation.cloud import status as st

    content = st.read_status(folder)
    if as_json:
        typer.echo(json.dumps({**content, "shown": st.state_of(content)}))
    else:
        for line in st.status_lines(content):
            typer.echo(line)


def own_data(task: str | None, shape: str | None, classes: str) -> dict[str, Any]:
    """Return the settings of the cloud about the form of the devices' own data."""
    names = () if classes.isdecimal() else _class_names(classes)
    n = len(names) or int(classes)
    items = _shape(shape, 2 if task not in (None, "classification", "binary") else n)
    return {"shape": items, "classes": n, "class_names": names}


def _class_names(text: str) -> tuple[str, ...]:
    from coterie.errors import CoterieError

    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise CoterieError(f'classes "{text}" must be a number, or different names such as healthy,ill')
    return names


def _shape(text: str | None, classes: int) -> tuple[int, ...]:
    from coterie.errors import CoterieError

    if text is None:
        return ()
    try:
        shape = tuple(int(n) for n in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise CoterieError(f'shape "{text}" must be whole numbers such as 1,28,28')
    if classes < 2:
        raise CoterieError("--shape needs --classes too: their number, at least 2, or their names")
    return shape


@federation_app.command()
def join(
    cloud: Annotated[str, Option(help="HOST:PORT of the cloud, or of this device's edge")],
    ca: Ca,
    key: Key,
    data: Annotated[str, Option(help="this device's data: a file, a folder, module:function, or a name with --client")],
    state: Annotated[Path, Option(help="the directory for this device's private state and model")],
    client: Annotated[int | None, Option(min=0, help="use this client's part of a named data set (for tests)")] = None,
    data_dir: o.DataDir = None,
    allow: AllowFile = None,
    keep: Annotated[
        int, Option(min=2, help="versions of the private state to keep, in case the cloud returns to an earlier round")
    ] = 10,
    stay: Stay = False,
    timeline: Annotated[
        str | None, Option(help="changes of this device's own data during the run, as in the setting timeline")
    ] = None,
    device: Annotated[str, Option(help="where this device trains: cpu, cuda, cuda:1, mps, xpu or auto")] = "cpu",
    cert: Cert = None,
) -> None:
    """Run a device: train on this host's data at the cloud's requests, until the run has ended."""
    from coterie.data.timeline import parse_timeline, read_timeline
    from coterie.federation.device import DeviceHandler
    from coterie.federation.device import join as join_cloud
    from coterie.federation.line_log import log_lines
    from coterie.federation.localhost.processes import die_with_parent, owner_only
    from coterie.federation.policy.allow import Allow
    from coterie.train.devices import one_device

    place, allowed, changes = one_device(device), Allow.read(allow), parse_timeline(read_timeline(timeline))
    owner_only(state)
    die_with_parent()
    log_lines()
    handler = DeviceHandler(data, state, client, data_dir, allowed, keep, stay, timeline=changes, device=place)
    join_cloud(cloud, ca, key, handler, cert)


@federation_app.command()
def edge(
    up: Annotated[str, Option(help="HOST:PORT of the cloud")],
    ca: Ca,
    key: Key,
    listen: Annotated[str, Option(help="[HOST]:PORT for the devices of this edge")],
    certs: CertsDir = Path("certs"),
    state: Annotated[Path, Option(help="the directory for this edge's audit log")] = Path("edge"),
    allow: AllowFile = None,
    transport: o.Transport = None,
    stay: Stay = False,
    cert: Cert = None,
) -> None:
    """Run an edge: a node of the cloud, and a server for its own devices."""
    from coterie.errors import CoterieError
    from coterie.federation.edge import run_edge
    from coterie.federation.line_log import log_lines
    from coterie.federation.localhost.processes import die_with_parent, owner_only
    from coterie.federation.policy.allow import Allow

    host, _, port = listen.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise CoterieError(f'listen "{listen}" must be :PORT or HOST:PORT')
    o.check_transport(transport)
    allowed = Allow.read(allow)
    owner_only(state)
    die_with_parent()
    log_lines()
    run_edge(up, ca, key, host or "0.0.0.0", int(port), certs, state, allowed, stay, cert)


@federation_app.command()
@o.takes_settings(
    "data", *o.COLUMN_OPTIONS, "model", "partition", "join", "rounds", "epochs", "batch", "lr", "seed", "robust"
)  # fmt: skip
def up(
    given: dict[str, Any],
    method: Annotated[str, Argument(help="a method; `coterie list methods` shows all")],
    devices: Annotated[int, Option(min=1, help="number of device processes, one client each")] = 4,
    edges: Annotated[int, Option(min=0, help="number of edge processes; 0: devices connect to the cloud")] = 0,
    deadline: Deadline = 600.0,
    transport: o.Transport = None,
    data_dir: o.DataDir = None,
    out: o.Out = None,
    quiet: o.Quiet = False,
) -> None:
    """Run a whole federation on this machine, with a process for the cloud, each edge and each device."""
    from coterie.federation.cloud.screen import watch_federation
    from coterie.federation.localhost.processes import owner_only
    from coterie.federation.localhost.trial import LocalFederation
    from coterie.storage.run_folder import fresh_folder

    folder = out or fresh_folder(f"{method}-up")
    stop = Stop()
    o.check_transport(transport)
    local = LocalFederation(folder, method, devices, edges, given, deadline=deadline, data_dir=data_dir)
    owner_only(folder)
    with stop.listening(), local:
        ended = watch_federation(local, console, quiet, stop)
    if ended:
        typer.echo(f"the run is in {local.out}; each device's model is in {folder / 'devices'}")
    else:
        typer.echo(f"stopped; to resume, repeat the command with --out {folder}", err=True)
        raise typer.Exit(130)
