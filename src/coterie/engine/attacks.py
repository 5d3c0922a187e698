"""Attacks of a simulation: some clients lie, in their uploads or by training on poisoned data.

Liars are drawn by the seed, and so is their noise. They are excluded from scores, so that tables show honest clients.

Attacks on the upload start in round 1. A change is relative to the download; an entry that is not in the download
counts as a change from zero.
- sign-flip(share, scale): the change times -scale; scaled(share, factor): the change times the factor.
- gaussian(share, sigma): the download plus normal noise. free-rider(share, sigma): the same, by default without noise.
- little-is-enough(share, z): mean - z std of the honest uploads of the round, which the liars know (Baruch et al.,
  NeurIPS 2019, arXiv 1902.06156).
Whole numbers and statistics of batch norm stay those of local training, and values stay within the range of the schema.
With `claims`, a liar reports that many times its number of samples.

Attacks on the training data:
- label-flip(share): class y becomes the last class - y.
- backdoor(share, target, scale): half of the items get a trigger in a corner and the class `target`, and the change is
  scaled (Bagdasaryan et al., AISTATS 2020, arXiv 1807.00459).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.calls import WrittenCall, bind_call, parse_named_call
from coterie.core.context import ClientData, ClientId, Split
from coterie.core.method import Method
from coterie.core.rng import torch_rng
from coterie.core.tree import Tree
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.errors import CoterieError

ATTACKED = "personal/attack"  # key of the scores of personal models on items as an attack wants them classified
POISONED = 0.5  # share of a liar's training items that carry the trigger of a backdoor


# ---- lies: (values of one entry) -> uploaded value, with the parameters that the setting gives -----------------------
@dataclass(frozen=True)
class Told:
    """One floating-point entry of a liar's upload, and what the liar knows about it."""

    own: Tensor  # made by local training
    sent: Tensor  # received before; zeros if the entry was not sent
    honest: Tensor  # the honest clients' values in this round [clients, ...]
    rng: torch.Generator


def _sign_flip(share: float, scale: float = 1.0, claims: float = 1.0, *, told: Told) -> Tensor:
    return told.sent - scale * (told.own - told.sent)


def _scaled(share: float, factor: float = 10.0, claims: float = 1.0, *, told: Told) -> Tensor:
    return told.sent + factor * (told.own - told.sent)


def _gaussian(share: float, sigma: float = 1.0, *, told: Told) -> Tensor:
    return told.sent + sigma * torch.randn(told.sent.shape, generator=told.rng)


def _free_rider(share: float, sigma: float = 0.0, *, told: Told) -> Tensor:
    return _gaussian(share, sigma, told=told)


def _little(share: float, z: float = 1.5, *, told: Told) -> Tensor:
    if not len(told.honest):
        return told.own
    return told.honest.mean(0) - z * told.honest.std(0, correction=0)


def _label_flip(share: float, *, told: Told) -> Tensor:
    return told.own


def _backdoor(share: float, target: int = 0, scale: float = 1.0, *, told: Told) -> Tensor:
    return _scaled(share, scale, told=told)


LIES: dict[str, Callable[..., Tensor]] = {
    "sign-flip": _sign_flip,
    "label-flip": _label_flip,
    "scaled": _scaled,
    "gaussian": _gaussian,
    "little-is-enough": _little,
    "backdoor": _backdoor,
    "free-rider": _free_rider,
}
ON_DATA = ("label-flip", "backdoor")  # attacks that poison training data, and want certain classes


def check_attack(text: str) -> str:
    """Return the setting `attack` in its usual spelling; raise CoterieError if it is invalid."""
    call = parse_named_call("attack", text)
    for name, value in bind_call("attack", call, LIES).arguments.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "share" and not (is_number and 0 < value < 1):
            raise CoterieError(f"attack = {text} is invalid: share = {value} must be above 0 and below 1")
        if name == "target" and not (isinstance(value, int) and is_number and value >= 0):
            raise CoterieError(f"attack = {text} is invalid: target = {value} must be the number of a class")
        if not is_number or value < 0:
            raise CoterieError(f"attack = {text} is invalid: {name} = {value} must be a number, at least 0")
    return str(call)


@dataclass(frozen=True)
class Attack:
    """The liars of a run, and their attack."""

    text: str  # the setting, such as sign-flip(0.2)
    liars: frozenset[ClientId]
    seed: int
    classes: int  # 0 if the task is not a classification
    trigger: float = 0.0  # value of the trigger of a backdoor

    @staticmethod
    def of(text: str, method: Method, examples: Tensor) -> "Attack":
        """Return the attack on a run; raise CoterieError if it is not possible. `examples` are items of the data."""
        ctx, call = method.ctx, parse_named_call("attack", text)
        given = bind_call("attack", call, LIES).arguments
        count = max(1, int(given["share"] * len(ctx.clients) + 0.5))
        if count >= len(ctx.clients):
            raise CoterieError(f"attack = {text} leaves no honest client among {len(ctx.clients)}")
        if call.name in ON_DATA and not (ctx.classes and ctx.task.metric.name == "accuracy"):
            raise CoterieError(f"attack = {text} needs a task whose metric is accuracy; this one is {ctx.task.name}")
        if given.get("target", 0) >= max(1, ctx.classes):
            raise CoterieError(f"attack = {text}: the data have {ctx.classes} classes, numbered from 0")
        order = torch.randperm(len(ctx.clients), generator=torch_rng(ctx.seed, "liars"))
        liars = frozenset(ctx.clients[int(i)] for i in order[:count])
        return Attack(text, liars, ctx.seed, ctx.classes, float(examples.max()) if len(examples) else 0.0)

    @cached_property
    def _call(self) -> WrittenCall:
        return parse_named_call("attack", self.text)

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        return bind_call("attack", self._call, LIES).arguments

    # ---- training data -----------------------------------------------------------------------------------------------
    def poisoned(self, data: ClientData) -> ClientData:
        """Return the data that a client trains on: a liar's may be poisoned."""
        if data.client not in self.liars or self._call.name not in ON_DATA:
            return data
        x, y = data.train
        if self._call.name == "label-flip":
            return replace(data, train=Split(x, self.classes - 1 - y))
        rng = torch_rng(self.seed, "backdoor", data.client)
        rows = torch.randperm(len(y), generator=rng)[: int(POISONED * len(y) + 0.5)]
        x, y = x.clone(), y.clone()
        x[rows], y[rows] = self._marked(x[rows]), self._given["target"]
        return replace(data, train=Split(x, y))

    def wanted(self, test: Split) -> Split | None:
        """Return test items as the attack wants them classified; None if it wants no certain classes."""
        if self._call.name not in ON_DATA:
            return None
        if self._call.name == "label-flip":
            flipped = self.classes - 1 - test.y
            rows = flipped != test.y
            return Split(test.x[rows], flipped[rows])
        rows = test.y != self._given["target"]
        return Split(self._marked(test.x[rows].clone()), torch.full_like(test.y[rows], self._given["target"]))

    def _marked(self, x: Tensor) -> Tensor:
        """Write the trigger into items: the lower right corner of a picture, the last numbers of other items."""
        if x.ndim >= 3:
            size = max(2, min(x.shape[-2:]) // 8)
            x[..., -size:, -size:] = self.trigger
        elif x.ndim == 2:
            x[:, -max(1, x.shape[1] // 16) :] = self.trigger
        return x

    # ---- uploads -----------------------------------------------------------------------------------------------------
    def falsified(
        self, method: Method, requests: Mapping[ClientId, TrainRequest], answers: Mapping[ClientId, TrainAnswer]
    ) -> dict[ClientId, TrainAnswer]:
        """Return the answers of a round with the lies of its liars."""
        honest = [a.upload for i, a in sorted(answers.items()) if i not in self.liars]
        return {
            i: self._lie(method, requests[i], a, honest) if i in self.liars and requests[i].round > 0 else a
            for i, a in answers.items()
        }

    def _lie(self, method: Method, request: TrainRequest, answer: TrainAnswer, honest: list[Tree]) -> TrainAnswer:
        if self._call.name == "label-flip":
            return answer
        entries, received = method.schema("up").entries, request.download
        statistics = set(method.ctx.group("bn_stats"))
        upload = dict(answer.upload)
        for name, own in answer.upload.items():
            if not own.is_floating_point() or T.plain(name) in statistics:
                continue
            sent = received.get(name)
            fits = sent is not None and sent.shape == own.shape
            others = [t[name] for t in honest if name in t and t[name].shape == own.shape]
            told = Told(
                own,
                sent if sent is not None and fits else torch.zeros_like(own),
                torch.stack(others) if others else own.new_zeros((0, *own.shape)),
                torch_rng(self.seed, "lie", request.round, request.client, name),
            )
            value = LIES[self._call.name](*self._call.values, **dict(self._call.options), told=told)
            upload[name] = value.to(own.dtype).clamp(entries[name].low, entries[name].high)
        samples = int(answer.samples * self._given.get("claims", 1.0) + 0.5)
        return replace(answer, upload=upload, samples=samples)
