"""Write personal models for programs without Coterie: ONNX or TorchScript files that contain the preprocessing."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.core.rng import torch_rng
from coterie.data.table import TableEncoding
from coterie.errors import CoterieError
from coterie.export.personal_model import Predictor
from coterie.storage.atomic import write_atomic
from coterie.train import native

Format = Literal["onnx", "torchscript"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torchscript": ".pt"}
_TOLERANCE = 1e-4  # difference of outputs between file and model, relative to the largest


class _Whole(nn.Module):
    """Preprocessing and network as one module: from raw items to the outputs of the network."""

    def __init__(self, model: Predictor):
        super().__init__()
        self.network, self.items = model.network, model.about.items

    def forward(self, x: Tensor) -> Tensor:
        return self.items.in_units(self.network(self.items.ready(x)))


def deploy(model: Predictor, path: Path, format: Format) -> None:
    """Write the file after comparing its outputs with those of the model."""
    if format not in ENDINGS:
        raise CoterieError(f'unknown format "{format}"; choose safetensors, {" or ".join(ENDINGS)}')
    whole = _Whole(model).eval()
    make = {"onnx": _onnx, "torchscript": _torchscript}[format]
    two, five = _raw_items(model, 2), _raw_items(model, 5)
    with native.switched_off(), _constant(whole), torch.no_grad():
        want = [whole(x) for x in (two, five)]
        with _quiet():
            try:
                blob, run = make(whole, two)
            except CoterieError:
                raise
            except Exception as e:  # the exporters raise many types of exceptions
                reason = " ".join(str(e).split())[:150] or type(e).__name__
                raise CoterieError(_cannot(model, format, reason)) from e
            same = all(_agrees(run, x, w) for x, w in zip((two, five), want, strict=True))
    if not same:
        raise CoterieError(_cannot(model, format, "the outputs of the file differ from those of the model"))
    write_atomic(path, blob)
    if (table := model.about.items.table) is not None:
        write_atomic(columns_file(path), json.dumps(_columns_of(table), indent=2).encode())


def columns_file(path: Path) -> Path:
    """Return the file next to a model of a table that says what the columns of its input are."""
    return path.with_name(f"{path.name}.columns.json")


def _columns_of(table: TableEncoding) -> dict[str, Any]:
    rule = {
        "number": "the number", "boolean": "1 or 0", "date": "days since 2000-01-01, UTC", "empty": "NaN (not used)",
        "category": "position in the list of categories, from 0; -1 if it is not there",
    }  # fmt: skip
    columns = [
        {"name": c.name, "kind": c.kind, "value": rule[c.kind]}
        | ({"categories": list(c.categories)} if c.kind == "category" else {})
        for c in table.columns
    ]
    return {"input": "float64 [n, columns]; NaN where a value is missing", "columns": columns, "target": table.target}


def _agrees(run: Callable[[Tensor], Tensor], x: Tensor, want: Tensor) -> bool:
    try:
        outputs = run(x)
    except Exception:  # for example, a number of items that was exported as a constant
        return False
    scale = max(1.0, float(want.abs().max()))
    return outputs.shape == want.shape and bool(((outputs - want).abs() <= _TOLERANCE * scale).all())


def _cannot(model: Predictor, format: Format, why: str) -> str:
    return f"this model of {model.about.title} cannot be written as {format}: {why}; safetensors works"


def _raw_items(model: Predictor, n: int) -> Tensor:
    items, rng = model.about.items, torch_rng(0, "deployed", n)
    if items.table is not None:  # numbers of any scale, positions of categories, and missing values
        x = torch.randint(-1, 4, (n, *items.shape), generator=rng).double()
        return torch.where(torch.rand(x.shape, generator=rng) < 0.2, torch.nan, x)
    if items.type == "float32":
        return torch.rand((n, *items.shape), generator=rng)
    most = 256 if items.type == "uint8" else max(1, items.vocab or 1)
    return torch.randint(0, most, (n, *items.shape), generator=rng, dtype=items.dtype)


Made = tuple[bytes, Callable[[Tensor], Tensor]]


def _torchscript(whole: _Whole, example: Tensor) -> Made:
    made = torch.jit.trace(whole, (example,), check_trace=False)  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    torch.jit.save(made, buffer)
    again = torch.jit.load(io.BytesIO(buffer.getvalue()))  # type: ignore[no-untyped-call]
    return buffer.getvalue(), lambda x: torch.as_tensor(again(x))


def _onnx(whole: _Whole, example: Tensor) -> Made:
    try:
        import onnx.reference
        import onnxscript  # noqa: F401  # the exporter needs it
    except ImportError:
        raise CoterieError("writing ONNX needs two more packages: pip install 'coterie[onnx]'") from None
    made = torch.onnx.export(
        whole, (example,), dynamo=True, input_names=["x"], output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("items")},), verbose=False,
    )  # fmt: skip
    assert made is not None
    blob = made.model_proto.SerializeToString()
    check: Any = onnx.reference.ReferenceEvaluator(onnx.load_from_string(blob))
    return blob, lambda x: torch.from_numpy(check.run(None, {"x": x.numpy()})[0].copy())


@contextlib.contextmanager
def _constant(module: nn.Module) -> Iterator[None]:
    """Make all parameters constants, so that the file has no trainable ones."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' messages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
