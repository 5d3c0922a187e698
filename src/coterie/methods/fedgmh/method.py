"""FedGMH, global multi-head. Sun, Ni, Telecommunications Science 2026 (DOI 10.11959/j.issn.1000-0801.2026005).

The server keeps one complete head per label and trains head s only on mean features of label s, so that labels do not
interfere. A client downloads the heads of its own labels, mixes them by its label shares and writes the mix into those
entries of its own head that its last training found critical. Extractors stay private and are never averaged.
The paper does not say how the server learns a client's labels: here round 0 sends them (4 bytes each, counted). Who
misses round 0 is sent no heads until its first upload names its labels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, Card, ClientData, Download, Extras, Method, Moment, State, Tree, Upload, replace
from coterie.methods.fedgmh.heads import average_in, critical_mask, head_of, label_shares, mix_heads, server_step
from coterie.methods.fedgmh.settings import FedGMHSettings
from coterie.parts.masks import write_in
from coterie.parts.prototypes import collect
from coterie.parts.starts import start
from coterie.schema import Entry, Link, Schema, class_ids, counts, like

HEAD = "h:"  # marks the heads, stacked over labels [labels, ...]
MEANS, LABELS, COUNTS = "x:means", "x:labels", "x:counts"  # mean features [labels, d] of the labels a client holds
LARGEST_FEATURE = 1e6  # the server's heads learn from means, so these are bounded more closely than models


class FedGMH(Method):
    """Server state: heads, stacked [labels, ...]; labels, the label ids of each client that has named them."""

    Settings = FedGMHSettings
    hp: FedGMHSettings
    needs = ("head",)
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
        """All heads, or those of the client's own labels once the server knows these."""
        head = like(head_of(self.ctx, self.ctx.w0), part="heads")

        def stacked(rows: int | str) -> dict[str, Entry]:
            return {HEAD + k: replace(e, shape=(rows, *e.shape)) for k, e in head.items()}

        if not self.opening():
            return Schema(stacked(1 if self.hp.heads == "one" else self.ctx.classes))
        if now is None:
            return Schema(stacked("labels"), {"labels": (1, self.ctx.classes)}, may_be_empty=True)
        known = now.server["labels"].get(now.client)
        return Schema({} if known is None else stacked(len(known)))

    # ---- server, down ------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return self.hp.heads == "per_label" and self.hp.download == "own"  # only then must labels be known

    def setup(self) -> State:
        h0 = head_of(self.ctx, self.ctx.w0)
        count = 1 if self.hp.heads == "one" else self.ctx.classes
        return {"heads": T.stack([h0] * count), "labels": {}}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        heads, labels = T.prefix(HEAD, server["heads"]), server["labels"]
        if not self.opening():
            return Download(heads)
        return Download(each={i: {k: v[labels[i].long()] for k, v in heads.items()} for i in ids if i in labels})

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        own = start(self.ctx, 0 if self.hp.init == "shared" else data.client + 1)
        return {"own": own, "joined": 0, "labels": _labels(data)}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        head = head_of(self.ctx, state["own"])
        received = T.strip(HEAD, download)
        q = self._shares(state, data)

        if received and q is not None:
            g = mix_heads(received, q)
            if self.hp.write == "average":
                head = average_in(head, g)
            elif "mask" in state:
                head = write_in(head, g, state["mask"])  # equation (9)
            elif self.hp.first_psi == "ones":
                head = g

        extras: Extras = {"before": head}
        if self.hp.decay_on == "participation":
            extras["pace"] = torch.tensor(self.ctx.lr_decay ** (state["joined"] - (round - 1)))
        return {**state["own"], **head}, extras

    def _shares(self, state: State, data: ClientData) -> Tensor | None:
        """q over the received heads; None if the client has lost all of the labels it is sent heads for."""
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

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            labels = _labels(data)
            return {**state, "labels": labels}, Upload({LABELS: labels})

        (value, mask), count = collect(lambda x: self.ctx.features(params, x), *data.train, data.classes)
        sent = {MEANS: value[mask], LABELS: _labels(data)}
        if self.hp.feature_weight == "samples":
            sent[COUNTS] = count[mask].int()

        critical = critical_mask(extras["before"], head_of(self.ctx, params), self.hp.beta, self.hp.mask_scope)
        new = {"own": params, "mask": critical, "labels": sent[LABELS], "joined": state["joined"] + 1}
        return new, Upload(sent)

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state["own"], {}

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
