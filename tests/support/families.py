"""Small models of every family of networks, each with data of its kind."""

from functools import cache

import numpy as np
import torch
from torch import nn

from coterie.config import Engine, settings
from coterie.data.arrays import from_arrays
from coterie.data.dataset import Dataset
from coterie.engine.session import Objects, Session, prepare
from coterie.models.registry import build_model
from coterie.testing import small_data

CLASSES = 4
# name of a family: kind of the data, model, options
FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "ResNet, batch norm": ("pictures", "resnet8", {"width": 4}),
    "ResNet, group norm": ("pictures", "resnet8", {"width": 4, "norm": "group"}),
    "ResNet, no norm": ("pictures", "resnet8", {"width": 4, "norm": "none"}),
    "MobileNetV2": ("pictures", "mobilenetv2", {"width": 0.1, "norm": "group"}),
    "ConvNet": ("pictures", "convnet", {"width": 8, "depth": 2}),
    "ViT": ("pictures", "vit", {"width": 8, "depth": 1, "heads": 2, "patch": 4}),
    "text transformer": ("tokens", "transformer", {"width": 8, "depth": 1, "heads": 2}),
    "1-D ResNet": ("signals", "resnet1d", {"width": 4, "stages": 2}),
    "TCN": ("signals", "tcn", {"width": 8, "depth": 2}),
    "tabular MLP": ("rows", "tabular-mlp", {"embedding": 2, "hidden": (8,)}),
    "tabular ResNet": ("rows", "tabular-resnet", {"embedding": 2, "width": 8, "depth": 1}),
}


@cache
def data(kind: str, n: int = 120) -> Dataset:
    """Return n items of four classes: pictures [1, 8, 8], tokens [6], signals [2, 16] or rows [5]."""
    whole = small_data()
    few = (whole.y < CLASSES).nonzero().flatten()[:n]
    if kind == "pictures":
        return from_arrays(whole.x[few].numpy(), whole.y[few].numpy(), name=kind)
    rng, y = np.random.default_rng(1), whole.y[few].numpy()
    if kind == "tokens":
        ids = np.where(rng.random((n, 6)) < 0.5, 1 + y[:, None], rng.integers(5, 12, (n, 6)))
        ids[:, 4:] *= rng.random((n, 2)) < 0.7
        return from_arrays(ids, y, name=kind, items="tokens")
    shape, kinds = ((n, 16, 2), "signals") if kind == "signals" else ((n, 5), "numbers")
    return from_arrays((rng.normal(size=shape).T + y).T.astype(np.float32), y, name=kind, items=kinds)


def model(family: str) -> nn.Module:
    """Return the model of a family with initial values of seed 0."""
    kind, name, options = FAMILIES[family]
    d = data(kind)
    return build_model(
        name, d.shape, CLASSES, seed=0, dtype=d.ready(torch.arange(2)).dtype, vocab=d.vocab, options=options
    )


def session(method: str, family: str, engine: str = "loop", **changes: object) -> Session:
    """Prepare a run of two clients and a newcomer."""
    kind, name, options = FAMILIES[family]
    base = {"rounds": 3, "join": 1.0, "epochs": 1, "batch": 8, "lr": 0.05, "eval_every": 3, "seed": 3, "newcomers": 1}
    here = {"clients": 3, "partition": "dirichlet(5)", "val_share": 0.2, "public": 12}
    chosen = {"model": name, "model_options": options, **base, **here, **changes}
    return prepare(settings(method=method, **chosen), Engine(workers=1, engine=engine), Objects(None, data(kind)))
