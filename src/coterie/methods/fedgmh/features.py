"""Mean features of labels, which FedGMH's clients send instead of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, Context, State
from coterie.core.method import Card, Method, Moment, Upload
from coterie.core.schema import Entry, Schema, class_ids, counts
from coterie.core.tree import Tree
from coterie.methods.fedgmh.settings import FeatureSettings
from coterie.parts.initial_models import start
from coterie.parts.prototypes import collect

HEAD = "h"  # tag of the heads in a download
MEANS, LABELS, COUNTS = "x:means", "x:labels", "x:counts"  # mean features [labels, d] of the labels a client holds
LARGEST_FEATURE = 1e6  # the server's heads learn from means, so these are bounded more closely than models


class FeatureSender(Method):
    """Clients keep their whole model and send mean features; the server trains heads on these.

    The server's state holds `heads`, stacked [heads, ...], and `labels`, the label ids of each client that named them.
    """

    hp: FeatureSettings
    needs: ClassVar[tuple[str, ...]] = ("head", "classes")
    agree = "head"
    card = Card(
        title="FedGMH",
        paper="Sun, Ni, Telecommunications Science 2026, 10.11959/j.issn.1000-0801.2026005",
        year=2026,
        family="P,S",
        personal="the whole model",
        certainty="P",
    )

    def private(self, name: str) -> bool:
        return True

    def features_schema(self, now: Moment | None) -> Schema:
        """Labels in round 0; later a mean feature for each label, with its count if counts are weights."""
        classes, width = self.ctx.classes, self.ctx.net.width
        entries = {LABELS: class_ids("labels", classes, "prototypes")}
        if now is None or now.round > 0:
            later = now is None and self.opening()
            bound = LARGEST_FEATURE
            entries[MEANS] = Entry(
                ("labels", width), kind="prototype", part="prototypes", low=-bound, high=bound, optional=later
            )
            if self.hp.feature_weight == "samples":
                entries[COUNTS] = replace(counts("labels", "prototypes"), low=1, optional=later)
        return Schema(entries, {"labels": (1, classes)})

    def init_client(self, data: ClientData) -> State:
        own = start(self.ctx, 0 if self.hp.init == "shared" else data.client + 1)
        return {"own": own, "joined": 0, "labels": labels_of(data)}

    def mean_features(self, params: Tree, data: ClientData) -> Tree:
        """Return the upload of a client with this model."""
        (value, mask), count = collect(lambda x: self.ctx.features(params, x), *data.train, data.classes)
        sent = {MEANS: value[mask], LABELS: labels_of(data)}
        if self.hp.feature_weight == "samples":
            sent[COUNTS] = count[mask].int()
        return sent

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        labels = {**server["labels"], **{u.sender: u.tree[LABELS] for u in uploads}}
        if round == 0:
            return {**server, "labels": labels}

        def column(name: str) -> list[Tensor]:
            return [u.tree[name] for u in uploads]

        weights = column(COUNTS) if self.hp.feature_weight == "samples" else None
        return {"heads": self.step(server["heads"], column(MEANS), column(LABELS), weights), "labels": labels}

    def step(
        self, heads: Tree, features: Sequence[Tensor], labels: Sequence[Tensor], counts: Sequence[Tensor] | None
    ) -> Tree:
        """Return heads [heads, ...] trained on what each client sent: features [labels, d], labels, counts [labels]."""
        raise NotImplementedError


def head_of(ctx: Context, tree: Tree) -> Tree:
    """Return the entries of the model's head."""
    return T.keep(tree, ctx.group("head").__contains__)


def labels_of(data: ClientData) -> Tensor:
    """Return the ids [labels] of the classes with training samples."""
    return data.label_counts.nonzero()[:, 0].int()


def average_in(own: Tree, other: Tree, share: float = 0.5) -> Tree:
    """Return the mean of two heads with weight `share` for the other one; half and half is equations (10) and (11)."""
    if share == 0.5:
        return {k: (v + other[k]) / 2 for k, v in own.items()}
    return {k: torch.lerp(v, other[k], share) for k, v in own.items()}
