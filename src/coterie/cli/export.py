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
_Client = Annotated[str | None, Option(help="client of the model: a number, or its name in the data")]
_AllowModule = Annotated[
    list[str] | None,
    Option("--allow-module", help="code that may be imported for the file, package.module:name; repeatable"),
]


def _run(folder: Path, data_dir: Path | None) -> Any:
    from coterie.config import engine
    from coterie.engine.personal_models import refuse_devices
    from coterie.engine.session import rebuild
    from coterie.results.run import Run

    refuse_devices(folder)  # before its data are loaded, which are on the devices too
    return Run(folder, rebuild(folder, engine(workers=1, data_dir=data_dir)))


def _predictor(source: Path, client: str | None, data_dir: Path | None, allow_module: list[str] | None) -> "Predictor":
    """Return the personal model of a file, or of a client of a run."""
    from coterie.errors import CoterieError
    from coterie.export.personal_model import load_model

    if source.is_dir():
        if client is None:
            raise CoterieError(f"{source} is a run: choose a client, for example --client 0")
        model: Predictor = _run(source, data_dir).predictor(client)
        return model
    if not source.exists():
        raise CoterieError(f"{source} does not exist: there is no run and no model file")
    if client is not None:
        raise CoterieError(f"{source} holds the model of one client; omit --client")
    return load_model(source, allow_module=allow_module or ())


@export_app.command()
def export(
    source: Annotated[Path, Argument(metavar="RUN|MODEL", help="the folder of a run, or a model file (of a device)")],
    client: _Client = None,
    out: Annotated[
        Path | None, Option(help="file to write (default: RUN/client-NAME or MODEL, with its ending)")
    ] = None,
    format: Annotated[str, Option(help="safetensors (for Coterie), onnx or torchscript (for other programs)")] = (
        "safetensors"
    ),
    allow_module: _AllowModule = None,
    data_dir: o.DataDir = None,
) -> None:
    """Write a client's personal model as a file with its preprocessing, and print how to load it."""
    from coterie.errors import CoterieError, unknown
    from coterie.export.deployment import ENDINGS, columns_file, deploy
    from coterie.export.run_models import export_model

    if format not in (*ENDINGS, "safetensors"):
        raise unknown("format", format, [*ENDINGS, "safetensors"])
    model = _predictor(source, client, data_dir, allow_module)
    name = re.sub(r"[^\w.-]", "_", str(client))
    stem = source / f"client-{name}" if source.is_dir() else source.with_suffix("")
    if format == "safetensors":
        if not source.is_dir():
            raise CoterieError(f"{source} is a model file already; choose --format onnx or torchscript")
        target = out or stem.with_name(f"{stem.name}.safetensors")
        how = export_model(model, target)
        say(f"wrote {target}; load it with\n")
        say(how)
        return
    kind = next(k for k in ENDINGS if k == format)
    target = out or stem.with_name(f"{stem.name}{ENDINGS[kind]}")
    deploy(model, target, kind)
    items = model.about.items
    meaning = {
        "uint8": "bytes 0 to 255", "float32": "floats as in the training data", "int64": "token ids",
        "float64": f"rows of the table, as {columns_file(target).name} says",
    }[items.type]  # fmt: skip
    plain = ", before any softmax" if model.task.classes else ""
    say(
        f"wrote {target}; its input x is {items.type} [n, {', '.join(map(str, items.shape))}] ({meaning}), output is "
        f"[n, {model.about.outputs}]{plain}; the preprocessing is inside"
    )


@export_app.command()
def predict(
    source: Annotated[Path, Argument(metavar="MODEL|RUN", help="a model file, or the folder of a run")],
    data: Annotated[
        Path, Option(help="new items: .npz with x (and y, if labels are known), .npy, or a table (.csv, .parquet)")
    ],
    client: _Client = None,
    out: Annotated[Path | None, Option(help="file to write: .npz or .csv")] = None,
    proba: Annotated[bool, Option("--proba", help="write probabilities of the classes too")] = False,
    allow_module: _AllowModule = None,
    data_dir: o.DataDir = None,
    device: Annotated[str, Option(help="where the model computes: cpu, cuda, cuda:1, mps, xpu or auto")] = "cpu",
    as_json: o.Json = False,
) -> None:
    """Predict new items with a personal model: a model file, or a client of a run.

    Raw items are prepared as in training. If the file has labels, scores are printed too.
    """
    from coterie.data.files import new_items
    from coterie.data.frames import TABLE_SUFFIXES, read_table
    from coterie.errors import CoterieError
    from coterie.train.devices import one_device

    if out is not None and out.suffix not in (".npz", ".csv"):
        raise CoterieError(f"--out {out} must end in .npz or .csv")
    place, model = one_device(device), _predictor(source, client, data_dir, allow_module)
    model.to(place)
    x, y = (read_table(data), None) if data.suffix.lower() in TABLE_SUFFIXES else new_items(data)
    predictions = model.predict(x, y, str(data))
    if proba and predictions.proba is None:
        raise CoterieError(f"--proba needs classes or labels, and the task of the model is {model.about.task}")
    if out is not None:
        _write(out, model, predictions, proba)
    if as_json:
        shown = {"client": model.about.client, "items": len(predictions.values), "scores": predictions.scores}
        shown["predictions"] = list(predictions.labels) or predictions.values.tolist()
        if proba and predictions.proba is not None:
            shown["proba"] = predictions.proba.tolist()
        typer.echo(json.dumps(shown))
        return
    _show(model, predictions, out)


@export_app.command()
def welcome(
    folder: Annotated[Path, Argument(metavar="RUN", help="the folder of a run, or of a federation's cloud")],
    data: Annotated[
        Path,
        Option(help="own samples: a table (.csv, .parquet), or .npz with x, y if labels are known, x_test and y_test"),
    ],
    out: Annotated[Path | None, Option(help="model file to write (default: named after the data)")] = None,
    name: Annotated[str, Option(help="name of the newcomer")] = "newcomer",
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """Make a personal model for a newcomer by the run's method, and compare it with others."""
    from coterie.config import engine
    from coterie.data.files import own_items
    from coterie.data.frames import TABLE_SUFFIXES, read_table
    from coterie.engine.session import rebuild
    from coterie.errors import CoterieError
    from coterie.results.run import Run
    from coterie.storage.atomic import json_values

    target = out or Path(f"{data.stem}.safetensors")
    if target.resolve().parent == folder.resolve():
        raise CoterieError(f"{folder} is the run's folder, which is only read; choose a different place for the model")
    run = Run(folder)
    if not (folder / "cloud.json").exists():
        run = Run(folder, rebuild(folder, engine(workers=1, data_dir=data_dir)))
    is_table = data.suffix.lower() in TABLE_SUFFIXES
    welcomed = run.welcome(read_table(data), name=name) if is_table else run.welcome(*own_items(data), name)
    welcomed.save(target)
    if as_json:
        shown = {"model": str(target), "kept": welcomed.kept, "samples": welcomed.samples, "scores": welcomed.scores}
        typer.echo(json.dumps(json_values({**shown, "said": list(welcomed.said)})))
        return
    parts = ", ".join(f"{n} {k}" for k, n in welcomed.samples.items())
    if welcomed.scores:
        metrics = {m.name: m for m in run.task.reported}
        frame = welcomed.table().rename(index=_MODELS)
        shown_frame = frame.apply(lambda c: c.map(metrics[str(c.name)].text)).rename(columns=lambda c: metrics[c].label)
        console.print(frame_table(shown_frame, f"{run.title}: {name} on its own test part ({parts})"))
    for sentence in welcomed.said:
        say(sentence)
    say(f"the model is in {target}; use it with: coterie predict {target} --data FILE")


_MODELS = {
    "personal": "personal model", "received": "as received", "adapted": "after adaptation", "global": "global model",
    "local": "local training",
}  # fmt: skip


def _columns(model: "Predictor", predictions: "Predictions", proba: bool) -> dict[str, Any]:
    """Return the predictions as columns of a table."""
    names = model.about.classes or tuple(map(str, range(model.about.outputs)))
    columns: dict[str, Any] = {}
    if predictions.labels:
        columns |= {"label": list(predictions.labels), "class": predictions.values}
    elif model.about.task == "multilabel":
        columns |= {name: predictions.values[:, k] for k, name in enumerate(names)}
    else:
        columns |= {
            f"value {k}" if predictions.values.shape[1] > 1 else "value": v for k, v in enumerate(predictions.values.T)
        }
    if proba and predictions.proba is not None:
        columns |= {f"p({name})": predictions.proba[:, k] for k, name in enumerate(names)}
    return columns


def _cell(text: str) -> str:
    """Return a name of a class as a cell of a CSV file; a spreadsheet must not take it for a formula."""
    from coterie.errors import printable

    text = printable(text)
    return f"'{text}" if text[:1] in ("=", "+", "@") or (text[:1] == "-" and not text[1:].isdecimal()) else text


def _write(out: Path, model: "Predictor", predictions: "Predictions", proba: bool) -> None:
    import io

    import numpy as np
    import pandas as pd

    from coterie.storage.atomic import write_atomic

    if out.suffix == ".csv":
        frame = pd.DataFrame(_columns(model, predictions, proba)).rename_axis("item").rename(columns=_cell)
        if "label" in frame:
            frame["label"] = frame["label"].map(_cell)
        write_atomic(out, frame.to_csv().encode())
        return
    arrays: dict[str, Any] = {"values": predictions.values, "outputs": predictions.outputs}
    if predictions.labels:
        arrays["labels"] = np.array(predictions.labels)
    if model.about.classes:
        arrays["classes"] = np.array(model.about.classes)
    if proba:
        arrays["proba"] = predictions.proba
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(out, buffer.getvalue())


def _show(model: "Predictor", predictions: "Predictions", out: Path | None) -> None:
    import pandas as pd

    about = model.about
    title = f"{about.title}, client {about.client}, round {about.round}: {len(predictions.values)} items"
    if predictions.labels:
        counts = pd.Series(predictions.labels).value_counts()
        frame = pd.DataFrame({"items": counts, "share": (counts / counts.sum()).map("{:.1%}".format)})
        frame.index.name = "predicted"
    else:
        frame = (
            pd.DataFrame(_columns(model, predictions, False))
            .describe()
            .loc[["mean", "min", "max"]]
            .map("{:.4g}".format)
        )
    console.print(frame_table(frame, title))
    metrics = {m.name: m for m in model.task.metrics}
    for name, value in predictions.scores.items():
        say(f"{metrics[name].label}: {metrics[name].text(value)}")
    where = f"predictions are in {out}" if out is not None else "--out FILE writes them, item by item"
    say(where)
