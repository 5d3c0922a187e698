"""`coterie export`, `predict` and `welcome`: personal models as files, for new items and for newcomers."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli import options as o
from coterie.cli.screen import console, frame_table, say

if TYPE_CHECKING:
    from coterie.export.personal_model import Predictions, Predictor

export_app = typer.Typer()
_Client = Annotated[str | None, Option(help="whose model: a number, or the name the data give the client")]
_AllowModule = Annotated[
    list[str] | None, Option("--allow-module", help="code that the file may name, package.module:name; repeatable")
]


def _run(folder: Path, data_dir: Path | None) -> Any:
    from coterie.config import engine
    from coterie.engine.personal_models import refuse_devices
    from coterie.engine.session import rebuild
    from coterie.results.run import Run

    refuse_devices(folder)  # before its data are loaded, which are on the devices too
    return Run(folder, rebuild(folder, engine(workers=1, data_dir=data_dir)))


@export_app.command()
def export(
    folder: Annotated[Path, Argument(metavar="RUN", help="the folder of a run")],
    client: Annotated[str, Option(help="whose model: a number, or the name the data give the client")],
    out: Annotated[Path | None, Option(help="file to write (default: RUN/client-NAME.safetensors)")] = None,
    format: Annotated[str, Option(help="safetensors (for Coterie), onnx or torchscript (for other programs)")] = (
        "safetensors"
    ),
    data_dir: o.DataDir = None,
) -> None:
    """Write a client's personal model as a file with its preprocessing, and say how to load it."""
    from coterie.errors import unknown
    from coterie.export.deployment import ENDINGS, deploy

    if format not in (*ENDINGS, "safetensors"):
        raise unknown("format", format, [*ENDINGS, "safetensors"])
    run = _run(folder, data_dir)
    name = re.sub(r"[^\w.-]", "_", client)
    if format == "safetensors":
        target = out or folder / f"client-{name}.safetensors"
        how = run.export(client, target)
        say(f"wrote {target}; load it with\n")
        say(how)
        return
    model = run.predictor(client)
    kind = next(k for k in ENDINGS if k == format)
    target = out or folder / f"client-{name}{ENDINGS[kind]}"
    deploy(model, target, kind)
    items = model.about.items
    what = {"uint8": "bytes 0 to 255", "float32": "floats as in the training data", "int64": "token ids"}[items.type]
    plain = ", before any softmax" if model.task.classes else ""
    say(
        f"wrote {target}; its input x is {items.type} [n, {', '.join(map(str, items.shape))}] ({what}), its output is "
        f"[n, {model.about.outputs}]{plain}; the preprocessing is inside"
    )


@export_app.command()
def predict(
    source: Annotated[Path, Argument(metavar="MODEL|RUN", help="a model file, or the folder of a run")],
    data: Annotated[Path, Option(help="new items: .npz with x (and y, if labels are known), or .npy")],
    client: _Client = None,
    out: Annotated[Path | None, Option(help="file to write: .npz or .csv")] = None,
    proba: Annotated[bool, Option("--proba", help="also write probabilities of the classes")] = False,
    allow_module: _AllowModule = None,
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """Say what a personal model says about new items: of a model file, or of a run's client.

    Raw items are prepared as in training. With labels in the file, scores are printed too.
    """
    from coterie.data.files import new_items
    from coterie.errors import CoterieError
    from coterie.export.personal_model import load_model

    if out is not None and out.suffix not in (".npz", ".csv"):
        raise CoterieError(f"--out {out} must end in .npz or .csv")
    if source.is_dir():
        if client is None:
            raise CoterieError(f"{source} is a run: say whose model, for example --client 0")
        model = _run(source, data_dir).predictor(client)
    elif client is not None:
        raise CoterieError(f"{source} holds one client's model; leave out --client")
    else:
        model = load_model(source, allow_module=allow_module or ())
    x, y = new_items(data)
    found = model.predict(x, y, str(data))
    if proba and found.proba is None:
        raise CoterieError(f"--proba needs classes or labels, and the task of the model is {model.about.task}")
    if out is not None:
        _write(out, model, found, proba)
    if as_json:
        shown = {"client": model.about.client, "items": len(found.values), "scores": found.scores}
        shown["predictions"] = list(found.labels) or found.values.tolist()
        if proba and found.proba is not None:
            shown["proba"] = found.proba.tolist()
        typer.echo(json.dumps(shown))
        return
    _show(model, found, out)


@export_app.command()
def welcome(
    folder: Annotated[Path, Argument(metavar="RUN", help="the folder of a run, or of a federation's cloud")],
    data: Annotated[Path, Option(help="own samples: .npz with x, y if labels are known, x_test and y_test if any")],
    out: Annotated[Path | None, Option(help="model file to write (default: named after the data)")] = None,
    name: Annotated[str, Option(help="name of the newcomer")] = "newcomer",
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """Give somebody who was not there a personal model by the run's method, and compare it."""
    from coterie.config import engine
    from coterie.data.files import own_items
    from coterie.engine.session import rebuild
    from coterie.errors import CoterieError
    from coterie.results.run import Run
    from coterie.storage.atomic import finite

    target = out or Path(f"{data.stem}.safetensors")
    if target.resolve().parent == folder.resolve():
        raise CoterieError(f"{folder} is the run's folder, which stays as it is; choose another place for the model")
    run = Run(folder)
    if not (folder / "cloud.json").exists():
        run = Run(folder, rebuild(folder, engine(workers=1, data_dir=data_dir)))
    found = run.welcome(*own_items(data), name)
    found.save(target)
    if as_json:
        shown = {"model": str(target), "kept": found.kept, "samples": found.samples, "scores": found.scores}
        typer.echo(json.dumps(finite({**shown, "said": list(found.said)})))
        return
    parts = ", ".join(f"{n} {k}" for k, n in found.samples.items())
    if found.scores:
        metrics = {m.name: m for m in run.task.metrics}
        frame = found.table().rename(index=_MODELS)
        shown_frame = frame.apply(lambda c: c.map(metrics[str(c.name)].text)).rename(columns=lambda c: metrics[c].label)
        console.print(frame_table(shown_frame, f"{run.title}: {name} on its own test part ({parts})"))
    for sentence in found.said:
        say(sentence)
    say(f"the model is in {target}; use it with: coterie predict {target} --data FILE")


_MODELS = {
    "personal": "personal model", "received": "as received", "adapted": "after adaptation", "global": "global model",
    "local": "local training alone",
}  # fmt: skip


def _columns(model: "Predictor", found: "Predictions", proba: bool) -> dict[str, Any]:
    """The predictions as columns of a table."""
    names = model.about.classes or tuple(map(str, range(model.about.outputs)))
    columns: dict[str, Any] = {}
    if found.labels:
        columns |= {"label": list(found.labels), "class": found.values}
    elif model.about.task == "multilabel":
        columns |= {name: found.values[:, k] for k, name in enumerate(names)}
    else:
        columns |= {f"value {k}" if found.values.shape[1] > 1 else "value": v for k, v in enumerate(found.values.T)}
    if proba and found.proba is not None:
        columns |= {f"p({name})": found.proba[:, k] for k, name in enumerate(names)}
    return columns


def _write(out: Path, model: "Predictor", found: "Predictions", proba: bool) -> None:
    import io

    import numpy as np
    import pandas as pd

    from coterie.storage.atomic import write_atomic

    if out.suffix == ".csv":
        frame = pd.DataFrame(_columns(model, found, proba)).rename_axis("item")
        write_atomic(out, frame.to_csv().encode())
        return
    arrays: dict[str, Any] = {"values": found.values, "outputs": found.outputs}
    if found.labels:
        arrays["labels"] = np.array(found.labels)
    if model.about.classes:
        arrays["classes"] = np.array(model.about.classes)
    if proba:
        arrays["proba"] = found.proba
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(out, buffer.getvalue())


def _show(model: "Predictor", found: "Predictions", out: Path | None) -> None:
    import pandas as pd

    about = model.about
    title = f"{about.title}, client {about.client}, round {about.round}: {len(found.values)} items"
    if found.labels:
        counts = pd.Series(found.labels).value_counts()
        frame = pd.DataFrame({"items": counts, "share": (counts / counts.sum()).map("{:.1%}".format)})
        frame.index.name = "predicted"
    else:
        frame = pd.DataFrame(_columns(model, found, False)).describe().loc[["mean", "min", "max"]].map("{:.4g}".format)
    console.print(frame_table(frame, title))
    metrics = {m.name: m for m in model.task.metrics}
    for name, value in found.scores.items():
        say(f"{metrics[name].label}: {metrics[name].text(value)}")
    where = f"predictions are in {out}" if out is not None else "--out FILE writes them, item by item"
    say(where)
