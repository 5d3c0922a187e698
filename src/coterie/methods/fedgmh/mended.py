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

from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Download, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.methods.fedgmh.common import rows_in, train_common_head
from coterie.methods.fedgmh.features import HEAD, LABELS, FeatureSender, average_in, head_of, labels_of
from coterie.methods.fedgmh.settings import FedGMHMendedSettings
from coterie.parts.keep_best import best, kept


class FedGMHMended(FeatureSender):
    """One common head, of which a client is sent the rows of its labels."""

    Settings: ClassVar[type[Settings]] = FedGMHMendedSettings
    hp: FedGMHMendedSettings
    card = replace(FeatureSender.card, title="FedGMH (mended)", certainty="O")
    controls = ("fedgmh-o", "fedgmh-a", "fedgmh-oa")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self.features_schema(now) if link == "up" else self._rows(now)

    def _rows(self, now: Moment | None) -> Schema:
        """The head's rows of the client's labels, once the server knows these."""
        head = like(head_of(self.ctx, self.ctx.w0), part="heads")

        def rows(count: int | str) -> dict[str, Entry]:
            return {f"{HEAD}{T.MARK}{k}": replace(e, shape=(count, *e.shape[1:])) for k, e in head.items()}

        if now is None:
            return Schema(rows("labels"), {"labels": (1, self.ctx.classes)}, may_be_empty=True)
        known = now.server["labels"].get(now.client)
        return Schema({} if known is None else rows(len(known)))

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        return {"heads": T.stack([head_of(self.ctx, self.ctx.w0)]), "labels": {}}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        head, labels = T.tag(HEAD, server["heads"]), server["labels"]
        return Download(each={i: {k: v[0][labels[i].long()] for k, v in head.items()} for i in ids if i in labels})

    # ---- client ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        own = head_of(self.ctx, state["own"])
        rows = T.tagged(HEAD, download)
        if not rows:
            return Start({**state["own"], **own})
        received = rows_in(own, rows, state["labels"])
        return Start({**state["own"], **average_in(own, received, self.hp.received_share)})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            return {**state, "labels": (labels := labels_of(data))}, Upload({LABELS: labels})
        sent = self.mean_features(trained.params, data)
        new = {"own": trained.params, "labels": sent[LABELS], "joined": state["joined"] + 1}
        if self.hp.score == "best":
            new |= kept(self.ctx, state, trained.params, data)
        return new, Upload(sent)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(best(self.ctx, state, state["own"], data) if self.hp.score == "best" else state["own"])

    # ---- server, up --------------------------------------------------------------------------------------------------
    def step(
        self, heads: Tree, features: Sequence[Tensor], labels: Sequence[Tensor], counts: Sequence[Tensor] | None
    ) -> Tree:
        return train_common_head(self.ctx, heads, features, labels, counts, self.hp)
