"""The options that `run`, `compare` and `data show` share, and how they become settings."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

Data = Annotated[str | None, Option(help="digits, cifar10, ..., a file, a folder, hub:owner/name or module:function")]
DataDir = Annotated[Path | None, Option(help="where data files lie (default: $COTERIE_DATA or ~/.cache/coterie/data)")]
Model = Annotated[str | None, Option(help="lenet5, mlp, ... or module:factory; default: what fits the data")]
Partition = Annotated[str | None, Option(help="iid, dirichlet(0.1), exdir(2,0.5), shards(2), rotate(4), natural")]
Clients = Annotated[int | None, Option(help="number of clients (default 20)")]
Join = Annotated[float | None, Option(help="share of the clients in a round (default 0.5)")]
Rounds = Annotated[int | None, Option(help="rounds (default 50)")]
Epochs = Annotated[float | None, Option(help="local epochs (default 5)")]
Batch = Annotated[int | None, Option(help="batch size (default 32)")]
Lr = Annotated[float | None, Option(help="local learning rate (default 0.05)")]
Seed = Annotated[int | None, Option(help="seed of everything random (default 0)")]
Workers = Annotated[int | None, Option(help="processes (default: the cores); changes no result (stacked: rounding)")]
Training = Annotated[str | None, Option("--engine", help="loop, stack (many clients at once) or auto: the faster")]
StateAt = Annotated[str | None, Option("--state", help="memory or disk: where client state is kept")]
RuntimeAt = Annotated[
    str | None, Option("--runtime", help="local, ray or flower (a device per client): who computes; changes no result")
]
Address = Annotated[str | None, Option(help="of a Ray cluster, with --runtime ray (default: one on this machine)")]
Set = Annotated[list[str] | None, Option("--set", help="key=value; any setting of method, run or federation")]
Config = Annotated[Path | None, Option(help="a TOML file with settings; the command line wins over it")]
Out = Annotated[Path | None, Option(help="the folder to write to (default: runs/...)")]
Also = Annotated[str | None, Option(help="further columns, by commas: clusters, received, edge")]
Score = Annotated[
    str, Option(help="personal, global, received, trained, edge or adapted (default: the runs' headline)")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="print nothing but errors")]
Json = Annotated[bool, Option("--json", help="print the result as JSON")]


def gather(config: Path | None, assignments: list[str] | None, **options: Any) -> dict[str, Any]:
    """File, then options, then --set: the later wins."""
    from coterie.config import from_toml, parse_assignment, table

    found: dict[str, Any] = from_toml(config) if config else {}
    for name in ("federation", "settings"):  # flat, so that an option can win over a table's entry
        found = {**table(name, found.pop(name, None)), **found}
    found |= {k: v for k, v in options.items() if v is not None}
    found |= dict(parse_assignment(a) for a in assignments or [])
    return found
