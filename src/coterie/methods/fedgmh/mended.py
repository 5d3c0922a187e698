"""FedGMH mended: one common head without interference of labels. Coterie's own, 2026.

After FedGMH (Sun, Ni, Telecommunications Science 2026). The server keeps one head for all clients. It trains that head
on each received mean feature with a softmax over the labels of the sending client only: labels that a client lacks get
no gradient from it, and labels that occur together are each other's negatives. A client is sent the rows of its labels,
averages them with its own head, and uses the best model that it has trained so far, by its validation data.

- Instead of one head per label there is a single one, so that a client receives |S| rows, not |S| heads.
- Instead of a critical mask all received rows are averaged in.
- As in FedGMH, round 0 sends the labels, and a client that misses it is sent nothing until its first upload.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Model, Settings, Start, Upload
from coterie.core.tree import Tree
from coterie.methods.fedgmh.features import HEAD, LABELS, FeatureSender, average_in, head_of, labels_of
from coterie.methods.fedgmh.settings import FedGMHMendedSettings
from coterie.parts.initial_models import initial_model
from coterie.parts.linear_heads import heads_of, heads_tree, train_heads


class FedGMHMended(FeatureSender):
    """One common head, of which a client is sent the rows of its labels."""

    Settings: ClassVar[type[Settings]] = FedGMHMendedSettings
    hp: FedGMHMendedSettings
    controls = ("fedgmh-o", "fedgmh-a", "fedgmh-oa")
    card = replace(FeatureSender.card, title="FedGMH (mended)", certainty="O")
    use = "best"

    def of_label(self, head: Tree) -> Tree:
        return T.row(head, 0)

    # ---- server, down ------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        return {
            "heads": head_of(self.ctx, initial_model(self.ctx, 0 if self.hp.init == "shared" else -1)),
            "labels": {},
        }

    # ---- client ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        own, rows = head_of(self.ctx, state["own"]), T.tagged(HEAD, download)
        if not rows:
            return Start(state["own"])
        labels = (state["labels"] if self.opening() else labels_of(data)).long()
        rows = rows if self.opening() else {k: v[labels] for k, v in rows.items()}
        received = {k: v.index_copy(0, labels, rows[k]) for k, v in own.items()}
        return Start({**state["own"], **average_in(own, received, self.hp.received_share)})

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(state["own"])

    # ---- server, up --------------------------------------------------------------------------------------------------
    def step(self, heads: Tree, z: Tensor, y: Tensor, weight: Tensor, uploads: Sequence[Upload]) -> Tree:
        """Train the head on every feature among the labels of its sender: other labels get no gradient from it."""
        hp, names = self.hp, self.ctx.net.head_names
        held = held_labels([u.tree[LABELS] for u in uploads], self.ctx.classes)
        one = heads_of(names, {k: v[None] for k, v in heads.items()})
        vectors = (z[None], y[None], weight[None])
        new = train_heads(
            one, *vectors, hp.eta_h, hp.server_steps, hp.server_batch, hp.head_weight_decay, held.to(z.device)[None]
        )
        return T.row(heads_tree(names, new), 0)


def held_labels(labels: Sequence[Tensor], classes: int) -> Tensor:
    """Return the labels that the sender of each vector holds [v, classes]; a client sends a vector per label."""
    rows = [torch.zeros(classes, dtype=torch.bool).index_fill(0, own.long(), True) for own in labels]
    return torch.cat([row.expand(len(own), -1) for row, own in zip(rows, labels, strict=True)])
