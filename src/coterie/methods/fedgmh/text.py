"""FedGMH, global multi-head. Sun, Ni, Telecommunications Science 2026 (DOI 10.11959/j.issn.1000-0801.2026005).

The server keeps one complete head per label and trains head s only on mean features of label s, so that labels do not
interfere. A client downloads the heads of its labels, mixes them by its label shares and writes the mix into those
entries of its own head that its last training found critical. Extractors stay private and are never averaged.

- The paper does not say how the server learns a client's labels: here round 0 sends them (4 bytes each, counted). A
  client that misses round 0 is sent no heads until its first upload names its labels.
- `reading = code` is the published code, in which critical entries stay local, the others take the received value, and
  models are scored right after this overwrite.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Download, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.methods.fedgmh.features import HEAD, LABELS, FeatureSender, average_in, head_of, labels_of
from coterie.methods.fedgmh.heads import critical_mask, label_shares, mix_heads, square_mask, train_label_heads
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.masks import write_in


class FedGMH(FeatureSender):
    """Heads per label, mixed by label shares, written into critical entries."""

    Settings: ClassVar[type[Settings]] = FedGMHSettings
    hp: FedGMHSettings
    controls = ("fedgmh-o", "fedgmh-a", "fedgmh-oa")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self.features_schema(now) if link == "up" else self._heads(now)

    def _heads(self, now: Moment | None) -> Schema:
        """All heads, or those of the client's labels once the server knows these."""
        head = like(head_of(self.ctx, self.ctx.w0), part="heads")

        def stacked(count: int | str) -> dict[str, Entry]:
            return {f"{HEAD}{T.MARK}{k}": replace(e, shape=(count, *e.shape)) for k, e in head.items()}

        if not self.opening():
            return Schema(stacked(1 if self.hp.heads == "one" else self.ctx.classes))
        if now is None:
            return Schema(stacked("labels"), {"labels": (1, self.ctx.classes)}, may_be_empty=True)
        known = now.server["labels"].get(now.client)
        return Schema({} if known is None else stacked(len(known)))

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        """True if clients are sent the heads of their labels, which the server must then know."""
        return self.hp.heads == "per_label" and self.hp.download == "own"

    def setup(self) -> State:
        h0 = head_of(self.ctx, self.ctx.w0)
        count = self.ctx.classes if self.hp.heads == "per_label" else 1
        return {"heads": T.stack([h0] * count), "labels": {}}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        heads, labels = T.tag(HEAD, server["heads"]), server["labels"]
        if not self.opening():
            return Download(heads)
        return Download(each={i: {k: v[labels[i].long()] for k, v in heads.items()} for i in ids if i in labels})

    # ---- client ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        head = self.written(state, download, data)
        extras: Extras = {"before": head}
        if self.hp.decay_on == "participation":
            extras["pace"] = torch.tensor(self.ctx.lr_decay ** (state["joined"] - (round - 1)))
        return Start({**state["own"], **head}, extras)

    def written(self, state: State, download: Tree, data: ClientData) -> Tree:
        """Return the client's head with the received one written in, equation (9)."""
        hp, head = self.hp, head_of(self.ctx, state["own"])
        g = self.received(state, download, data)
        if g is None:
            return head
        if hp.write == "whole":
            return g
        if hp.write == "average":  # equations (10) and (11)
            return average_in(head, g, hp.received_share)
        if "mask" in state:
            return write_in(head, g, state["mask"]) if hp.written == "critical" else write_in(g, head, state["mask"])
        return g if hp.first_psi == "ones" else head

    def received(self, state: State, download: Tree, data: ClientData) -> Tree | None:
        """Return g, the received heads mixed by label shares, the sum in equation (9); None without heads or labels."""
        heads = T.tagged(HEAD, download)
        if not heads:
            return None
        if self.hp.heads == "one":
            return mix_heads(heads, torch.ones(1))
        held = data.label_counts[state["labels"].long()] if self.opening() else data.label_counts
        return mix_heads(heads, label_shares(held)) if held.any() else None

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        ce = self.ctx.ce(params, batch)
        if self.hp.decay_on == "round":
            return ce
        pace: Tensor = extras["pace"]  # scales the gradient alone, which for SGD is a scaled learning rate
        return pace * ce + (1 - pace) * ce.detach()

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            return {**state, "labels": (labels := labels_of(data))}, Upload({LABELS: labels})
        sent = self.mean_features(trained.params, data)
        new = {
            "own": trained.params,
            "mask": self.critical(trained.extras["before"], head_of(self.ctx, trained.params)),
            "labels": sent[LABELS],
            "joined": state["joined"] + 1,
        }
        return new, Upload(sent)

    def critical(self, before: Tree, after: Tree) -> Tree:
        """Return the mask psi of the head's entries that training found critical, equations (7) and (8)."""
        if self.hp.criticality == "square":
            return square_mask(before, after, self.hp.beta)
        return critical_mask(before, after, self.hp.beta, self.hp.mask_scope)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        if self.hp.score == "own":
            return Model(state["own"])
        return Model({**state["own"], **self.written(state, download, data)})

    # ---- server, up --------------------------------------------------------------------------------------------------
    def step(
        self, heads: Tree, features: Sequence[Tensor], labels: Sequence[Tensor], counts: Sequence[Tensor] | None
    ) -> Tree:
        return train_label_heads(self.ctx, heads, features, labels, counts, self.hp)  # equation (6)
