"""FedGMH, global multi-head. Sun, Ni, Telecommunications Science 2026 (DOI 10.11959/j.issn.1000-0801.2026005).

The server keeps one complete head per label and trains head s only on mean features of label s, so that labels do not
interfere. A client downloads the heads of its own labels, mixes them by its label shares and writes the mix into those
entries of its own head that its last training found critical. Extractors stay private and are never averaged.
That is the text (reading = paper). By default (reading = mended) the server keeps one common head and trains it on each
mean feature among the labels of its sender only, so that labels that a client lacks get no gradient from it; clients
are sent the rows of their labels and average them with their own.
The paper does not say how the server learns a client's labels: here round 0 sends them (4 bytes each, counted). Who
misses round 0 is sent no heads until its first upload names its labels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.method import (
    Batch,
    Card,
    ClientData,
    Download,
    Extras,
    Method,
    Model,
    Moment,
    Start,
    State,
    Trained,
    Tree,
    Upload,
    replace,
)
from coterie.core.schema import Entry, Link, Schema, class_ids, counts, like
from coterie.methods.fedgmh.heads import (
    average_in,
    critical_mask,
    head_of,
    label_shares,
    mix_heads,
    rows_in,
    server_step,
    square_mask,
)
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.initial_models import start
from coterie.parts.keep_best import best, kept
from coterie.parts.masks import write_in
from coterie.parts.prototypes import collect

HEAD = "h"  # marks the heads, stacked over labels [labels, ...]
MEANS, LABELS, COUNTS = "x:means", "x:labels", "x:counts"  # mean features [labels, d] of the labels a client holds
LARGEST_FEATURE = 1e6  # the server's heads learn from means, so these are bounded more closely than models


class FedGMH(Method):
    """Server state: heads, stacked [labels, ...]; labels, the label ids of each client that has named them."""

    Settings = FedGMHSettings
    hp: FedGMHSettings
    needs = ("head", "classes")
    agree = "head"
    controls = ("fedgmh-o", "fedgmh-a", "fedgmh-oa")
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

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self._features(now) if link == "up" else self._heads(now)

    def _features(self, now: Moment | None) -> Schema:
        """Labels in round 0; then a mean feature for each of them, with its count if counts weigh."""
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

    def _heads(self, now: Moment | None) -> Schema:
        """All heads, or those (or the rows) of the client's own labels once the server knows these."""
        head = like(head_of(self.ctx, self.ctx.w0), part="heads")

        def stacked(rows: int | str) -> dict[str, Entry]:
            skip = 1 if self.hp.heads == "common" else 0  # rows of one head, or whole heads
            return {f"{HEAD}:{k}": replace(e, shape=(rows, *e.shape[skip:])) for k, e in head.items()}

        if not self.opening():
            return Schema(stacked(1 if self.hp.heads == "one" else self.ctx.classes))
        if now is None:
            return Schema(stacked("labels"), {"labels": (1, self.ctx.classes)}, may_be_empty=True)
        known = now.server["labels"].get(now.client)
        return Schema({} if known is None else stacked(len(known)))

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        """Only if a client is sent what its labels need must these be known."""
        return self.hp.heads == "common" or (self.hp.heads == "per_label" and self.hp.download == "own")

    def setup(self) -> State:
        h0 = head_of(self.ctx, self.ctx.w0)
        count = self.ctx.classes if self.hp.heads == "per_label" else 1
        return {"heads": T.stack([h0] * count), "labels": {}}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        heads, labels = T.tag(HEAD, server["heads"]), server["labels"]
        if not self.opening():
            return Download(heads)
        if self.hp.heads == "common":
            heads = {k: v[0] for k, v in heads.items()}  # of which a client is sent the rows of its labels
        return Download(each={i: {k: v[labels[i].long()] for k, v in heads.items()} for i in ids if i in labels})

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        own = start(self.ctx, 0 if self.hp.init == "shared" else data.client + 1)
        return {"own": own, "joined": 0, "labels": _labels(data)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        head = self.written(state, download, data)
        extras: Extras = {"before": head}
        if self.hp.decay_on == "participation":
            extras["pace"] = torch.tensor(self.ctx.lr_decay ** (state["joined"] - (round - 1)))
        return Start({**state["own"], **head}, extras)

    def written(self, state: State, download: Tree, data: ClientData) -> Tree:
        """The client's head with what it received written in."""
        hp, head = self.hp, head_of(self.ctx, state["own"])
        g = self.received(state, download, data)
        if g is None:
            return head
        if hp.write == "whole":
            return g
        if hp.write == "average":
            return average_in(head, g, hp.received_share)
        if "mask" in state:  # equation (9)
            return write_in(head, g, state["mask"]) if hp.written == "critical" else write_in(g, head, state["mask"])
        return g if hp.first_psi == "ones" else head

    def received(self, state: State, download: Tree, data: ClientData) -> Tree | None:
        """One head from what was sent: mixed by label shares, or the own head with the rows of its labels replaced."""
        sent = T.tagged(HEAD, download)
        if not sent:
            return None
        if self.hp.heads == "common":
            return rows_in(head_of(self.ctx, state["own"]), sent, state["labels"])
        q = self._shares(state, data)
        return None if q is None else mix_heads(sent, q)

    def _shares(self, state: State, data: ClientData) -> Tensor | None:
        """Q over the received heads; None if the client has lost all of the labels it is sent heads for."""
        if self.hp.heads == "one":
            return torch.ones(1)
        n = data.label_counts[state["labels"].long()] if self.opening() else data.label_counts
        return label_shares(n) if n.any() else None

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        ce = self.ctx.ce(params, batch)
        if self.hp.decay_on == "round":
            return ce
        pace: Tensor = extras["pace"]  # scales the gradient alone: for SGD the same as a rate scaled by it
        return pace * ce + (1 - pace) * ce.detach()

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            labels = _labels(data)
            return {**state, "labels": labels}, Upload({LABELS: labels})

        (value, mask), count = collect(lambda x: self.ctx.features(trained.params, x), *data.train, data.classes)
        sent = {MEANS: value[mask], LABELS: _labels(data)}
        if self.hp.feature_weight == "samples":
            sent[COUNTS] = count[mask].int()

        new = {
            "own": trained.params,
            "mask": self.critical(trained.extras["before"], head_of(self.ctx, trained.params)),
            "labels": sent[LABELS],
            "joined": state["joined"] + 1,
        }
        if self.hp.score == "best":
            new |= kept(self.ctx, state, trained.params, data)
        return new, Upload(sent)

    def critical(self, before: Tree, after: Tree) -> Tree:
        """Which entries of the head training found critical."""
        if self.hp.criticality == "square":
            return square_mask(before, after, self.hp.beta)
        return critical_mask(before, after, self.hp.beta, self.hp.mask_scope)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        if self.hp.score == "own":
            return Model(state["own"])
        if self.hp.score == "best":
            return Model(best(self.ctx, state, state["own"], data))
        return Model({**state["own"], **self.written(state, download, data)})

    # ---- server, up --------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        labels = {**server["labels"], **{u.sender: u.tree[LABELS] for u in uploads}}
        if round == 0:
            return {**server, "labels": labels}

        def column(name: str) -> list[Tensor]:
            return [u.tree[name] for u in uploads]

        n = column(COUNTS) if self.hp.feature_weight == "samples" else None
        return {
            "heads": server_step(self.ctx, server["heads"], column(MEANS), column(LABELS), n, self.hp),
            "labels": labels,
        }


def _labels(data: ClientData) -> Tensor:
    """Ids [labels] of the classes with training samples."""
    return data.label_counts.nonzero()[:, 0].int()
