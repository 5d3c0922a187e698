"""Checks for plans and models by which a cloud could read single items out of uploads.

The gradient of a linear layer on one item contains the item. So an upload is the item if the device trains one step on
one item, or if its first model sorts items into neurons. The defaults refuse what makes this easy: small batches, few
items behind an upload, rates that leave one step of many, a first model that is not the one drawn from the plan's seed,
and layers whose neurons are copies of each other. They prove nothing: only secure aggregation and differential privacy
bound what an upload of many items reveals.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from coterie.config import RunSettings
from coterie.core import tree as T
from coterie.core.method import Method, Phase
from coterie.core.tree import Tree
from coterie.engine.edge_steps import downloads
from coterie.engine.messages import TrainRequest
from coterie.errors import CoterieError
from coterie.train.trainer import steps_planned

_ALIKE = 0.999  # cosine from which two rows of a layer count as copies
_ROWS = 8  # fewest rows and columns of a layer in which copies are looked for


@dataclass(frozen=True)
class Reveal:
    """The bounds of a host; the defaults are those of a host without a policy file."""

    batch: float = 8  # smallest batch size
    items: float = 16  # fewest training items behind an upload; a host with fewer must use all, at least `batch`
    lr: float = 1.0  # largest learning rate
    weight_decay: float = 0.1  # largest weight decay; a larger one leaves only the last step of many in an upload
    first_model: str = "agreed"  # agreed: the first download must be what the plan's seed gives; any

    @staticmethod
    def of(table: Any) -> "Reveal":
        """Return the bounds of the key `reveal` of a policy file: a table, or "anything"."""
        if table == "anything":
            return ANYTHING
        known = {f.name: f.default for f in fields(Reveal)}
        if not isinstance(table, dict):
            raise CoterieError(f'reveal = {table!r} is invalid: it must be a table, [reveal], or "anything"')
        for name, value in table.items():
            if name not in known:
                raise CoterieError(f'unknown key of [reveal] "{name}"; there are {", ".join(known)}')
            if name == "first_model" and value not in ("agreed", "any"):
                raise CoterieError(f'first_model = {value!r} is invalid: it must be "agreed" or "any"')
            is_number = type(value) in (int, float) and 0 <= value < math.inf
            if name != "first_model" and not is_number:
                raise CoterieError(f"{name} = {value!r} is invalid: it must be a number, at least 0")
        return Reveal(**table)

    def check_plan(self, settings: RunSettings, ruled: Iterable[str]) -> None:
        """Raise CoterieError if a setting makes reading single items easy; the operator has rules for those `ruled`."""
        for name, why, is_bad in (
            ("batch", f"at least {self.batch:g}", settings.batch < self.batch),
            ("lr", f"at most {self.lr:g}", settings.lr > self.lr),
            ("weight_decay", f"at most {self.weight_decay:g}", settings.weight_decay > self.weight_decay),
        ):
            if is_bad and name not in set(ruled):
                value = getattr(settings, name)
                raise CoterieError(
                    f"the plan sets {name} = {value:g}, with which an upload can reveal single items; this host allows "
                    f"{why} ([reveal] of the policy)"
                )

    def check_items(self, method: Method, phases: Iterable[Phase], samples: int | None, share: float = 1.0) -> None:
        """Raise CoterieError if an upload would be made from too few of a device's `samples` training items."""
        if not samples or not self.items:
            return
        ctx, up = method.ctx, method.schema("up").entries
        fewest = min(self.items, max(self.batch, samples))
        for phase in phases:
            if not any(phase.trains(T.plain(name)) for name in up if T.plain(name) in ctx.net.trainable):
                continue  # trains what stays here
            steps = steps_planned(ctx, phase, samples, share)
            items = min(samples, steps * phase.batches_per_step * ctx.batch)
            if 0 < items < fewest:
                raise CoterieError(
                    f"an upload would be made from {items} training items and can reveal them; this host allows at "
                    f"least {fewest:g} ([reveal] of the policy)"
                )

    def check_download(self, method: Method, request: TrainRequest) -> None:
        """Raise CoterieError for a first model that is not the agreed one, or that is made to read single items."""
        if self.first_model == "any":
            return
        first, received = (0 if method.opening() else 1), request.download
        if request.round == first:
            agreed = _agreed(method, request.client, first)
            for name, v in agreed.items():
                if name in received and received[name].shape == v.shape and not torch.allclose(
                    received[name].float(), v.float(), rtol=1e-4, atol=1e-5
                ):  # fmt: skip
                    raise CoterieError(
                        f"the first model is not the one that the plan's seed gives (in {name}); this host allows no "
                        'other ([reveal] first_model = "any" of the policy)'
                    )
        if name := copied_rows(method, received):
            raise CoterieError(
                f"most neurons of {name} are copies of each other, as in a model made to read single items out of "
                'uploads; this host does not train it ([reveal] first_model = "any" of the policy)'
            )


ANYTHING = Reveal(batch=0, items=0, lr=math.inf, weight_decay=math.inf, first_model="any")


def _agreed(method: Method, client: int, round: int) -> Tree:
    """Return the model entries that a client downloads first, computed from the plan alone."""
    try:
        server = method.setup()
        sent = method.down(server, [client], round)
        shared, own = downloads(method, server, {}, sent, [client], round)[client]
    except Exception as e:
        raise CoterieError(
            f"the agreed first model cannot be computed here ({type(e).__name__}: {e}); [reveal] first_model = "
            '"any" of the policy trusts the cloud'
        ) from e
    return {k: v for k, v in {**shared, **own}.items() if T.plain(k) in method.ctx.w0 and v.is_floating_point()}


def copied_rows(method: Method, received: Mapping[str, torch.Tensor]) -> str:
    """Return the name of a layer whose rows are mostly multiples of each other; "" if no layer is like this.

    Rows of zeros and small layers are left out, and so are layers that are initialised in this way, and heads, which
    see features (FedGMH has a head for each label).
    """
    trainable, head = set(method.ctx.net.trainable), set(method.ctx.group("head"))
    for name, v in received.items():
        plain = T.plain(name)
        if plain not in (trainable - head or trainable) or not _rows_alike(v):
            continue
        if not _rows_alike(method.ctx.w0[plain]):
            return name
    return ""


def _rows_alike(v: torch.Tensor) -> bool:
    if v.ndim < 2 or not v.is_floating_point():
        return False
    rows = v.flatten(1).double()
    norms = rows.norm(dim=1)
    rows = rows[norms > 0] / norms[norms > 0, None]
    if min(rows.shape) < _ROWS:
        return False
    cosines = (rows @ rows.T).abs() > _ALIKE
    return bool((cosines.sum(1) > len(rows) / 2).any())
