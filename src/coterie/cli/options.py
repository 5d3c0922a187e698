"""Options that several commands share, and how they become settings."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Option

DataName = Annotated[
    str | None, Option(help="digits, cifar10, ..., a file, a folder, hub:owner/name or module:function")
]
ModelName = Annotated[str | None, Option(help="lenet5, mlp, ... or module:factory (default: chosen from the data)")]
OPTIONS: dict[str, Any] = {  # settings that have an option of their own
    "data": DataName,
    "target": Annotated[str | None, Option(help="column of a table (CSV, Parquet) to predict")],
    "client": Annotated[str | None, Option(help="column of a table that says whose row it is")],
    "features": Annotated[
        str | None, Option(help="columns of a table that the model sees: a,b,c:category (default: all other columns)")
    ],
    "task": Annotated[
        str | None, Option(help="regression, multilabel, binary, count, survival, ... (default: chosen from the data)")
    ],
    "model": ModelName,
    "partition": Annotated[str | None, Option(help="iid, dirichlet(0.1), exdir(2,0.5), labels(2), natural, ...")],
    "clients": Annotated[int | None, Option(help="number of clients (default 20)")],
    "join": Annotated[float | None, Option(help="fraction of the clients in a round (default 0.5)")],
    "rounds": Annotated[int | None, Option(help="rounds (default 50)")],
    "epochs": Annotated[float | None, Option(help="local epochs (default 5)")],
    "batch": Annotated[int | None, Option(help="batch size (default 32)")],
    "lr": Annotated[float | None, Option(help="local learning rate (default 0.05)")],
    "class_weights": Annotated[
        str | None, Option(help="weights of classes in the loss: balanced, 1,5 or healthy=1,ill=5 (default: equal)")
    ],
    "seed": Annotated[int | None, Option(help="random seed (default 0)")],
    "precision": Annotated[str | None, Option(help="float32 (default) or bf16, where autocast chooses it")],
    "robust": Annotated[
        str | None,
        Option(help="median, trimmed(0.1), krum(f), multi-krum(f, m), geometric-median, norm-clip(c), centered-clip"),
    ],
    "attack": Annotated[
        str | None,
        Option(
            help="some clients lie: sign-flip(0.2), label-flip(0.2), scaled(0.2, 10), gaussian(0.2, 1), "
            "little-is-enough(0.2), backdoor(0.2), free-rider(0.2)"
        ),
    ],
    "dp": Annotated[
        str | None,
        Option(help='differential privacy, such as "client(epsilon=8, clip=0.5)", example(...) or local(...)'),
    ],
    "use": Annotated[str | None, Option(help="model that clients use: received, trained, best or guarded")],
    "weights": Annotated[str | None, Option(metavar="FILE", help="pretrained weights: .safetensors or a state dict")],
    "freeze": Annotated[
        str | None, Option(help="parts of the model that are constants: stem,layer1 or body, norm, ...")
    ],
    "lora_rank": Annotated[int | None, Option(help="rank of low-rank adapters; the rest but the head is constant")],
    "warm_start": Annotated[str | None, Option(metavar="PATH", help="start from the models of the run in this folder")],
    "stop_after": Annotated[
        int | None, Option(help="end after this many evaluations without a better value on validation data")
    ],
    "stop_at": Annotated[
        float | None, Option(help="end when the value on validation data reaches this target, 0.9 for 90 %")
    ],
}
COLUMN_OPTIONS = ("target", "client", "features")
UseOfAll = Annotated[
    str | None,
    Option("--use", help="model that clients use: received (default for all methods), trained, best, guarded, or own"),
]
SetOption = Annotated[list[str] | None, Option("--set", help="any setting of method, run or federation, as key=value")]
ConfigFile = Annotated[Path | None, Option(help="TOML file with settings; options override it")]
DataDir = Annotated[
    Path | None, Option(help="directory with the data files (default: $COTERIE_DATA or ~/.cache/coterie/data)")
]
WorkersOption = Annotated[int | None, Option(help="worker processes (default: CPU count); does not affect results")]
EngineOption = Annotated[str | None, Option("--engine", help="loop (clients one by one), stack (many at once) or auto")]
DeviceOption = Annotated[
    str | None, Option(help="where clients train: cpu (default), cuda, cuda:1, cuda:0,cuda:1, mps, xpu or auto")
]
StateAt = Annotated[str | None, Option("--state", help="where client state is kept: memory or disk")]
RuntimeAt = Annotated[
    str | None, Option("--runtime", help="execution backend: local, ray or federation (one device process per client)")
]
Keep = Annotated[
    int | None, Option(min=2, help="checkpoints to keep: --resume DIR --from-round N goes back to one of them")
]
FromRound = Annotated[int | None, Option(min=0, help="with --resume: go back to the checkpoint of this round")]
Transport = Annotated[str | None, Option(help="kept for scripts of version 0.1: grpc", hidden=True)]
Address = Annotated[str | None, Option(help="address of the Ray cluster (default: start one on this machine)")]
Out = Annotated[Path | None, Option(help="output folder (default: runs/...)")]
Track = Annotated[str | None, Option(help="also write curves for tensorboard, mlflow or wandb")]
Also = Annotated[str | None, Option(help="comma-separated further columns: clusters, received, edge")]
ScoredView = Annotated[
    str, Option(help="personal, global, received, trained, edge or adapted (default: the runs' headline)")
]
TableFormat = Annotated[
    str | None, Option("--format", help="print the tables as csv, markdown or latex (package booktabs)")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="print errors only")]
Json = Annotated[bool, Option("--json", help="print the result as JSON")]


def takes_settings(*names: str, **own: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `given` of a command by options for these settings, --set and --config.

    The command gets the settings that were given as a dictionary. `own` holds options that differ from SETTINGS.
    """
    added = {**{name: OPTIONS[name] for name in names}, "set_": SetOption, "config": ConfigFile, **own}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**values: Any) -> None:
            config, assignments = values.pop("config"), values.pop("set_")
            chosen = {name: values.pop(name) for name in added if name in values}
            command(given=gather(config, assignments, **chosen), **values)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "given":
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters += [inspect.Parameter(n, keyword, default=None, annotation=a) for n, a in added.items()]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def gather(config: Path | None, assignments: list[str] | None, **options: Any) -> dict[str, Any]:
    """Merge file, options and --set; later ones override earlier ones."""
    from coterie.config import from_toml, parse_assignment, table

    chosen: dict[str, Any] = from_toml(config) if config else {}
    for name in ("federation", "settings"):  # flat, so that an option can override an entry of a table
        chosen = {**table(name, chosen.pop(name, None)), **chosen}
    chosen |= {k: v for k, v in options.items() if v is not None}
    chosen |= dict(parse_assignment(a) for a in assignments or [])
    return chosen


def commas(text: str | None) -> list[str]:
    """Parts between commas, except those in parentheses: `mnist,MNIST_ExDir(2,5)` are two."""
    return [t.strip() for t in re.split(r",(?![^(]*\))", text) if t.strip()] if text else []


def check_format(given: str | None) -> str | None:
    """Return the format of a table; raise CoterieError if the name is unknown."""
    from coterie.errors import unknown
    from coterie.results.tables import FORMATS

    if given is not None and given not in FORMATS:
        raise unknown("format", given, FORMATS)
    return given


def check_transport(given: str | None) -> None:
    """Raise CoterieError for the transport over Flower's SuperLink, which version 0.2 no longer has."""
    from coterie.errors import CoterieError

    if given not in (None, "grpc"):
        raise CoterieError(f'transport "{given}" is not available: a federation uses gRPC')
