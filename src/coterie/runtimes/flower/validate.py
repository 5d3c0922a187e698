"""What arrives is checked before it is used, on both sides; every refusal is one sentence."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie import tree as T
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.method import Context
from coterie.tree import Tree

LONGEST = 256  # characters of a name
SLACK = 2**16  # bytes that a payload may have beside what is declared
DOWNLOADS = 64  # models that a download may hold: FedFomo and its like send several


def need(ok: bool, sentence: str) -> None:
    if not ok:
        raise CoterieError(sentence)


def whole(value: Any, what: str, least: int = 0, most: int = 2**53) -> int:
    need(type(value) is int and least <= value <= most, f"{what} must be a whole number from {least} on, not {value!r}")
    return int(value)


def tree(value: Any, ctx: Context, what: str, largest: int) -> Tree:
    """A tree whose entries named after the model's have the model's shapes and types; finite, and not too large."""
    need(isinstance(value, dict), f"{what} is not a tree")
    size = 0
    for name, v in value.items():
        need(isinstance(name, str) and 0 < len(name) <= LONGEST, f"{what} has an impossible name")
        need(isinstance(v, Tensor), f"{what} has an entry {name} that is no tensor")
        size += v.numel() * v.element_size()
        need(size <= largest, f"{what} is larger than the {largest} bytes that it may have")
        like = known(name, ctx)
        if like is not None:
            need(v.shape == like.shape, f"{what} has {name} of shape {list(v.shape)}, not {list(like.shape)}")
            need(v.dtype == like.dtype, f"{what} has {name} of type {v.dtype}, not {like.dtype}")
        need(not v.is_floating_point() or bool(torch.isfinite(v).all()), f"{what} has NaN or infinity in {name}")
    return dict(value)


def known(name: str, ctx: Context) -> Tensor | None:
    """The model's entry of this name; marked names, which methods may pack otherwise, are not looked up."""
    return ctx.w0.get(name)


def note(value: Any) -> dict[str, float]:
    need(isinstance(value, dict) and len(value) <= 10_000, "the note is not a dictionary of numbers")
    for k, v in value.items():
        need(isinstance(k, str) and len(k) <= LONGEST and type(v) in (int, float), "the note must hold numbers by name")
    return dict(value)


def score(value: Any, ctx: Context) -> Value:
    """Hits and totals per class, and a loss."""
    need(
        isinstance(value, dict) and value.keys() == {"hits", "total", "loss"}, "a score must have hits, total and loss"
    )
    hits, total, loss = value["hits"], value["total"], value["loss"]
    for v in (hits, total):
        need(isinstance(v, Tensor) and v.dtype == torch.int64 and v.shape == (ctx.classes,), "a score counts per class")
    need(bool(((hits >= 0) & (hits <= total)).all()), "a score cannot have more hits than samples")
    need(type(loss) is float and not math.isnan(loss), "the loss of a score is no number")
    return value


TRAINED = {"client", "samples", "tree", "note", "steps", "loss"}


def trained(answer: Any, client: int, ctx: Context, largest: int) -> Value:
    """A device's answer to a training job: exactly what a round needs, nothing more."""
    need(isinstance(answer, dict), "the answer is not a dictionary")
    odd = sorted(map(str, (answer.keys() | TRAINED) - (answer.keys() & TRAINED) - {"before", "after"}))
    need(not odd, f"the answer has missing or unknown fields: {', '.join(odd)}")
    need(answer["client"] == client, f"the answer is that of client {answer['client']}, asked was {client}")
    whole(answer["samples"], "samples", 1)
    whole(answer["steps"], "steps")
    need(type(answer["loss"]) in (int, float), "the loss is no number")
    for when in {"before", "after"} & answer.keys():
        score(answer[when], ctx)
    return {**answer, "tree": tree(answer["tree"], ctx, "the upload", largest), "note": note(answer["note"])}


def scored(answer: Any, client: int, ctx: Context) -> Value:
    need(isinstance(answer, dict) and "personal/test" in answer, "the answer is not a score")
    need(answer.get("client") == client, f"the answer is that of client {answer.get('client')}, asked was {client}")
    views = {f"{v}/{p}" for v in ("personal", "global", "adapted", "trained") for p in ("test", "val")}
    odd = sorted(map(str, answer.keys() - views - {"client"}))
    need(not odd, f"the answer has unknown fields: {', '.join(odd)}")
    return {"client": client} | {k: score(answer[k], ctx) for k in answer if k != "client"}


def odd_ones(trees: Mapping[int, Tree], declared: Mapping[int, int]) -> dict[int, str]:
    """Uploads that are neither like most others nor of the declared size; they would spoil a mean or break it."""
    sound = [t for i, t in trees.items() if T.nbytes(t) == declared.get(i, -1)] or list(trees.values())
    names = _common([tuple(sorted(t)) for t in sound]) if len(trees) > 1 else None
    every = {k for t in trees.values() for k in t}
    like = {k: [t[k] for t in sound if k in t] or [t[k] for t in trees.values() if k in t] for k in every}
    shapes = {k: _common([tuple(x.shape) for x in found]) for k, found in like.items()}
    kinds = {k: _common([(x.dtype, x.dim()) for x in found]) for k, found in like.items()}
    out = {}
    for i, t in trees.items():
        size = T.nbytes(t)
        undeclared = size != declared.get(i, size)
        if undeclared and tuple(sorted(t)) != names:
            out[i] = f"the upload has other entries than declared ({size} bytes instead of {declared[i]})"
        for k, x in t.items():
            if (x.dtype, x.dim()) != kinds[k] or (undeclared and tuple(x.shape) != shapes[k]):
                out[i] = f"the upload has {k} of shape {list(x.shape)} and type {x.dtype}, unlike the others"
    return out


def _common(values: list[Any]) -> Any:
    """What most have; of equally many, the first."""
    return Counter(values).most_common(1)[0][0]
