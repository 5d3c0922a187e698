"""Mean features of labels, which FedGMH's clients send instead of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, Context, State
from coterie.core.method import Card, Download, Method, Moment, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, class_ids, counts, like
from coterie.core.tree import Tree
from coterie.methods.fedgmh.settings import FeatureSettings
from coterie.parts.initial_models import initial_model
from coterie.parts.prototypes import collect

HEAD = "h"  # tag of the heads in a download
# mean features [labels, d] of the labels that a client holds
MEANS, LABELS, LABEL_COUNTS = "x:means", "x:labels", "x:counts"
LARGEST_FEATURE = 1e6  # the server's heads learn from means, so these are bounded more closely than models


class FeatureSender(Method):
    """Clients keep their whole model and send mean features; the server trains heads on these.

    The server's state holds `heads`, stacked by label [labels, ...], and `labels`, the label ids of each client that
    named them. Round 0 sends the labels; a client is then sent what the server holds for its labels.
    """

    hp: FeatureSettings
    needs: ClassVar[tuple[str, ...]] = ("head", "classes")
    weighting = "uniform"
    agree = "head"
    card = Card(
        title="FedGMH",
        paper="Sun, Ni, Telecommunications Science 2026, 10.11959/j.issn.1000-0801.2026005",
        year=2026,
        family="P,S",
        personal="the whole model",
        compute="one pass over the training data for mean features",
        certainty="P",
    )

    def private(self, name: str) -> bool:
        return True

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self._features(now) if link == "up" else self._heads(now)

    def _features(self, now: Moment | None) -> Schema:
        """Labels in round 0; later a mean feature for each label, with its count if counts are weights."""
        classes, width = self.ctx.classes, self.ctx.net.width
        entries = {LABELS: class_ids("labels", classes, "prototypes")}
        if now is None or now.round > 0:
            later = now is None and self.opening()
            bound = LARGEST_FEATURE
            entries[MEANS] = Entry(
                ("labels", width), kind="prototype", part="prototypes", low=-bound, high=bound, optional=later
            )
            if self.counted():
                entries[LABEL_COUNTS] = replace(counts("labels", "prototypes"), low=1, optional=later)
        return Schema(entries, {"labels": (1, classes)})

    def counted(self) -> bool:
        """True if clients send the number of samples behind each mean feature, which is then its weight."""
        return (self.ctx.weighting or self.weighting) == "samples"

    def _heads(self, now: Moment | None) -> Schema:
        """The heads of the client's labels, once the server knows these; otherwise all heads."""
        one = like(self.of_label(head_of(self.ctx, self.ctx.w0)), part="heads")

        def stacked(count: int | str) -> dict[str, Entry]:
            return {f"{HEAD}{T.MARK}{k}": replace(e, shape=(count, *e.shape)) for k, e in one.items()}

        if not self.opening():
            return Schema(stacked(self.heads))
        if now is None:
            return Schema(stacked("labels"), {"labels": (1, self.ctx.classes)}, may_be_empty=True)
        known = now.server["labels"].get(now.client)
        return Schema({} if known is None else stacked(len(known)))

    @property
    def heads(self) -> int:
        """Number of heads, or of rows, that the server holds: one for each label."""
        return self.ctx.classes

    def of_label(self, head: Tree) -> Tree:
        """Return what the server holds for one label, given a head like it."""
        raise NotImplementedError

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        """True if clients are sent what belongs to their labels, which the server must then know.

        If the clients' data change during the run, all of it is sent, so that a new label has its head at once.
        """
        return not self.ctx.changing

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        """Send what belongs to each client's labels, or all heads; Algorithm 2, line 13."""
        heads, labels = T.tag(HEAD, server["heads"]), server["labels"]
        if not self.opening():
            return Download(heads)
        return Download(each={i: {k: v[labels[i].long()] for k, v in heads.items()} for i in ids if i in labels})

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        """Every client starts from the same random model, or from one of its own; Algorithm 2, line 1."""
        own = initial_model(self.ctx, 0 if self.hp.init == "shared" else data.client + 1)
        return {"own": own, "labels": labels_of(data)}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the labels in round 0, later their mean features too; Algorithm 2, line 9."""
        if round == 0:
            return {**state, "labels": (labels := labels_of(data))}, Upload({LABELS: labels})
        sent = self.mean_features(trained.params, data)
        new = {"own": trained.params, "labels": sent[LABELS], **self.learned(state, trained, data)}
        return new, Upload(sent)

    def mean_features(self, params: Tree, data: ClientData) -> Tree:
        """Return the mean of the features, equation (4), of each label, equation (5); Algorithm 2, line 8."""
        (value, mask), count = collect(lambda x: self.ctx.features(params, x), *data.train, data.classes)
        sent = {MEANS: value[mask], LABELS: labels_of(data)}
        if self.counted():
            sent[LABEL_COUNTS] = count[mask].int()
        return sent

    def learned(self, state: State, trained: Trained, data: ClientData) -> State:
        """Return further entries of the client's next state."""
        return {}

    # ---- server, up --------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Train the heads on the received features; Algorithm 2, lines 11 and 12."""
        labels = {**server["labels"], **{u.sender: u.tree[LABELS] for u in uploads}}
        if round == 0:
            return {**server, "labels": labels}
        z, y = (torch.cat([u.tree[name] for u in uploads]) for name in (MEANS, LABELS))
        z = F.normalize(z, dim=-1) if self.hp.feature_norm == "l2" else z
        weight = torch.cat([u.tree[LABEL_COUNTS] for u in uploads]) if self.counted() else torch.ones(len(z))
        return {"heads": self.step(server["heads"], z, y.long(), weight.to(z), uploads), "labels": labels}

    def step(self, heads: Tree, z: Tensor, y: Tensor, weight: Tensor, uploads: Sequence[Upload]) -> Tree:
        """Return the heads trained on features z [v, d] of labels y [v] with weights [v], sorted as the uploads."""
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
