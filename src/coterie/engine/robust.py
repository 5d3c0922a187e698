"""Robust estimates: stages of the combiner that make one upload of all uploads, although some of these may be lies.

Changes are relative to the download. Every client counts alike, whatever number of samples it claims; norm-clip alone
keeps the method's weights. Distances and norms are those of the trained parameters. All other entries, such as
statistics of batch norm, are combined by the median of each value (trimmed: by the trimmed mean), because a sender
could hide a lie of one kind behind the norm of the other. Whole numbers are combined by the lower median.

- median, trimmed: Yin et al., ICML 2018, arXiv 1803.01498.
- krum, multi-krum: Blanchard et al., NeurIPS 2017, arXiv 1703.02757.
- geometric-median: Pillutla et al. (RFA), IEEE TSP 2022, arXiv 1912.13445, by Weiszfeld's iterations.
- norm-clip: Sun et al., 2019, arXiv 1911.07963; the bound is a multiple of the round's median norm.
- centered-clip: Karimireddy et al., ICML 2021, arXiv 2012.10333, from the change of the round before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.calls import WrittenCall, bind_call, parse_named_call
from coterie.core.method import Method, Upload
from coterie.core.tree import Tree
from coterie.engine.combining import Memory, moved_names
from coterie.errors import CoterieError


class Changes(NamedTuple):
    """The changes of the trained parameters in a round."""

    rows: Tensor  # [clients, P], float64
    weights: Tensor  # the method's weights [clients], which sum to one
    center: Tensor | None  # the combined change of the round before [P]


class Combined(NamedTuple):
    """The combined change of the trained parameters, and the clients that the rule chose or clipped."""

    change: Tensor  # [P]
    chosen: tuple[int, ...] | None = None  # rows that were chosen; the others do not count
    clipped: tuple[int, ...] | None = None  # rows that were shortened


RobustRule = Callable[..., Combined]  # takes the parameters of the setting, and the changes


# ---- rules -----------------------------------------------------------------------------------------------------------
def trimmed_mean(rows: Tensor, cut: int) -> Tensor:
    """Return the mean of every column [clients, ...] without its `cut` smallest and `cut` largest values."""
    if rows.is_floating_point():
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)
    return rows.sort(0).values[(len(rows) - 1) // 2]


def middle(n: int) -> int:
    """Return the values to cut on each side so that the median of n values is left: one value, or the middle two."""
    return (n - 1) // 2


def cut_of(share: float, n: int) -> int:
    """Return how many values of n a trimmed mean cuts on each side."""
    return min(math.floor(share * n + 1e-9), middle(n))


def _median(*, changes: Changes) -> Combined:
    return Combined(trimmed_mean(changes.rows, middle(len(changes.rows))))


def _trimmed(share: float = 0.1, *, changes: Changes) -> Combined:
    return Combined(trimmed_mean(changes.rows, cut_of(share, len(changes.rows))))


def _krum(f: int = 1, *, changes: Changes) -> Combined:
    return _multi_krum(f, 1, changes=changes)


def _multi_krum(f: int = 1, m: int | None = None, *, changes: Changes) -> Combined:
    rows, n = changes.rows, len(changes.rows)
    f = min(f, max(0, (n - 3) // 2))  # fewer clients than planned
    if n < 3:
        return _median(changes=changes)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(1).values[:, 1 : n - f - 1]  # to the n - f - 2 nearest others
    best = nearest.sum(1).sort(stable=True).indices[: min(n, n - f if m is None else m)]
    chosen = tuple(sorted(best.tolist()))
    return Combined(rows[list(chosen)].mean(0), chosen=chosen)


def _geometric_median(iterations: int = 100, *, changes: Changes) -> Combined:
    rows, tolerance = changes.rows, 1e-10
    at = trimmed_mean(rows, middle(len(rows)))
    for _ in range(iterations):
        shares = 1 / (rows - at).norm(dim=1).clamp_min(1e-12)
        new = (shares / shares.sum()) @ rows
        moved, at = float((new - at).norm()), new
        if moved <= tolerance * float(at.norm()):
            break
    return Combined(at)


def _norm_clip(c: float = 1.0, *, changes: Changes) -> Combined:
    norms = changes.rows.norm(dim=1)
    factors = _factors(norms, c * float(trimmed_mean(norms, middle(len(norms)))))
    return Combined((changes.weights * factors) @ changes.rows, clipped=_below_one(factors))


def _centered_clip(tau: float | None = None, iterations: int = 5, *, changes: Changes) -> Combined:
    rows = changes.rows
    at = torch.zeros_like(rows[0]) if changes.center is None else changes.center
    factors = torch.ones(len(rows), dtype=rows.dtype)
    for _ in range(iterations):
        gaps = rows - at
        norms = gaps.norm(dim=1)
        factors = _factors(norms, float(trimmed_mean(norms, middle(len(norms)))) if tau is None else tau)
        at = at + (factors / len(rows)) @ gaps
    return Combined(at, clipped=_below_one(factors))


def _factors(norms: Tensor, bound: float) -> Tensor:
    """Return the factors that shorten vectors of these norms to the bound."""
    return torch.where(norms > bound, bound / norms.clamp_min(1e-300), 1.0)


def _below_one(factors: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(factors < 1).flatten().tolist())


ROBUST_RULES: dict[str, RobustRule] = {
    "median": _median,
    "trimmed": _trimmed,
    "krum": _krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "norm-clip": _norm_clip,
    "centered-clip": _centered_clip,
}


# ---- the setting -----------------------------------------------------------------------------------------------------
_RANGES: dict[str, tuple[type, float, float, str]] = {  # type, and bounds, both excluded
    "share": (float, 0, 0.5, "a number above 0 and below 0.5"),
    "f": (int, 0, 10**6, "a whole number, at least 1"),
    "m": (int, 0, 10**6, "a whole number, at least 1"),
    "iterations": (int, 0, 10**5, "a whole number, at least 1"),
    "c": (float, 0, 1e9, "a number above 0"),
    "tau": (float, 0, 1e9, "a number above 0"),
}


@cache
def _call(text: str) -> WrittenCall:
    return parse_named_call("robust", text)


def check_robust(text: str) -> str:
    """Return the setting `robust` in its usual spelling; raise CoterieError if it is invalid."""
    call = parse_named_call("robust", text)
    for name, value in bind_call("robust", call, ROBUST_RULES).arguments.items():
        kind, low, high, words = _RANGES[name]
        if value is None and name in ("m", "tau"):
            continue
        is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not is_number or not low < value < high:
            raise CoterieError(f"robust = {text} is invalid: {name} = {value} must be {words}")
    return str(call)


@dataclass(frozen=True)
class RobustEstimate:
    """A robust estimate of the mean upload; its memory holds facts of the last round, and its change if needed."""

    setting: ClassVar[str] = "robust"
    text: str  # the setting, such as trimmed(0.1)

    def estimate(
        self, method: Method, sent: Tree, uploads: Sequence[Upload], round: int, memory: Memory
    ) -> tuple[Upload, Memory]:
        """Return one upload that stands for all, and the memory of the next round."""
        call, trees = _call(self.text), [u.tree for u in uploads]
        parameters = {k for k in moved_names(method, trees[0]) if trees[0][k].is_floating_point()}
        cut = middle(len(trees))
        if call.name == "trimmed":
            cut = cut_of(float(bind_call("robust", call, ROBUST_RULES).arguments["share"]), len(trees))
        tree = {k: trimmed_mean(torch.stack([t[k] for t in trees]), cut) for k in trees[0] if k not in parameters}
        new, facts = Memory(), dict[str, Any](clients=len(uploads))
        if parameters:
            start = {k: _sent(sent, k, v) for k, v in trees[0].items() if k in parameters}
            rows = torch.stack([T.flatten({k: t[k].double() - start[k] for k in start}, start) for t in trees])
            weights = torch.tensor(T.normalised(method.weights(uploads), len(uploads)), dtype=rows.dtype)
            changes = Changes(rows, weights, memory.get("center"))
            out = ROBUST_RULES[call.name](*call.values, **dict(call.options), changes=changes)
            tree |= {k: (start[k] + v).to(trees[0][k].dtype) for k, v in _parts(out.change, start).items()}
            if call.name == "centered-clip":
                new["center"] = out.change
            for what, those in (("chosen", out.chosen), ("clipped", out.clipped)):
                if those is not None:
                    facts[what] = [uploads[i].sender for i in those]
        new["facts"] = facts
        return Upload({k: tree[k] for k in trees[0]}, samples=sum(u.samples for u in uploads)), new

    def check(self, method: Method) -> None:
        """Raise CoterieError if too few clients take part for the rule."""
        call, n = _call(self.text), method.ctx.participants()
        given = bind_call("robust", call, ROBUST_RULES).arguments
        if n < 3:
            raise CoterieError(f"robust = {self.text} needs at least 3 participants in a round, and there are {n}")
        if call.name == "trimmed" and cut_of(given["share"], n) == 0:
            raise CoterieError(
                f"robust = {self.text} trims none of {n} participants in a round; share must be at least {1 / n:.3g}"
            )
        if "f" in given and n < 2 * given["f"] + 3:
            raise CoterieError(
                f"robust = {self.text} needs at least 2 f + 3 = {2 * given['f'] + 3} participants in a round, "
                f"and there are {n}"
            )
        if (m := given.get("m")) is not None and m > n - given["f"]:
            raise CoterieError(f"robust = {self.text} is invalid: m must be at most {n - given['f']}, participants - f")

    def facts(self, memory: Memory) -> dict[str, Any]:
        """Return the number of clients, and those that a rule chose or whose changes it shortened."""
        return {"robust": memory["facts"]} if "facts" in memory else {}


def _sent(sent: Tree, name: str, like: Tensor) -> Tensor:
    """Return the sent entry of this name in float64; zeros if it was not sent."""
    fits = name in sent and sent[name].shape == like.shape
    return sent[name].double() if fits else torch.zeros_like(like, dtype=torch.float64)


def _parts(vector: Tensor, like: Tree) -> Tree:
    """Return the entries in a vector, which has them in the order of `like`."""
    sizes = [v.numel() for v in like.values()]
    return {k: part.reshape(like[k].shape) for k, part in zip(like, torch.split(vector, sizes), strict=True)}
