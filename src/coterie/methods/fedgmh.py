"""FedGMH, global multi-head. Sun, Ni, Telecommunications Science 2026 (DOI 10.11959/j.issn.1000-0801.2026005).

The server keeps one complete head per label and trains head s only on mean features of label s, so that labels do not
interfere. A client downloads the heads of its own labels, mixes them by its label shares and writes the mix into those
entries of its own head that its last training found critical. Extractors stay private and are never averaged.
The paper does not say how the server learns a client's labels: here round 0 sends them (4 bytes each, counted).
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, ones

from coterie import tree as T
from coterie.method import Batch, ClientData, Download, Extras, Method, Payload, State, Tree, Upload
from coterie.parts.heads import average_in, critical_mask, label_shares, mix_heads
from coterie.parts.label_heads import ServerHeads, head_of, mean_features, paced, server_step
from coterie.parts.masks import write_in
from coterie.parts.starts import start


class FedGMHSettings(ServerHeads):
    beta: float = Field(0.5, ge=0, le=1, description="share of the head's entries that are critical")
    first_psi: Literal["none", "ones"] = Field("none", description="mask of a client that has not trained yet")
    init: Literal["shared", "independent"] = Field("shared", description="do clients start from the same model")
    download: Literal["own", "all"] = Field("own", description="heads a client is sent: of its own labels, or all")
    mask_scope: Literal["head", "tensor"] = Field("head", description="rank weight and bias together or apart")
    decay_on: Literal["round", "participation"] = Field("round", description="what lr_decay counts (exact for SGD)")
    heads: Literal["per_label", "one"] = Field("per_label", description="one: a single head for all labels (GMH-o)")
    write: Literal["mask", "average"] = Field("mask", description="average: half own, half received head (GMH-a)")


class FedGMH(Method):
    Settings = FedGMHSettings
    hp: FedGMHSettings
    title, year, family = "FedGMH", 2026, "P,S"
    certainty = "P"
    paper = "Sun, Ni, Telecommunications Science 2026, 10.11959/j.issn.1000-0801.2026005"
    personal_part, needs = "the whole model", ("head",)

    def private(self, name: str) -> bool:
        return True

    def part(self, name: str) -> str:
        return "heads" if name.startswith("h:") else "prototypes"

    def payload(self, labels: int, round: int = 1) -> Payload:
        rows = 1 if self.hp.heads == "one" else labels if self.hp.download == "own" else self.ctx.classes
        up = 4 * self.ctx.net.width + 4 + 4 * (self.hp.feature_weight == "samples")
        return Payload(labels * up, rows * T.nbytes(head_of(self.ctx, self.ctx.w0)))

    def opening(self) -> bool:
        return self.hp.heads == "per_label" and self.hp.download == "own"  # only then must labels be known

    def setup(self) -> State:
        h0, count = head_of(self.ctx, self.ctx.w0), 1 if self.hp.heads == "one" else self.ctx.classes
        return {"heads": T.stack([h0] * count), "labels": {}}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        heads, labels = T.prefix("h:", server["heads"]), server["labels"]
        if not self.opening():
            return Download(heads)
        return Download(each={i: {k: v[labels[i].long()] for k, v in heads.items()} for i in ids if i in labels})

    def init_client(self, data: ClientData) -> State:
        return {"own": start(self.ctx, 0 if self.hp.init == "shared" else data.client + 1), "joined": 0}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        head, received = head_of(self.ctx, state["own"]), T.strip("h:", download)
        told = state["labels"].long() if self.opening() and received else slice(None)  # whose heads these are
        if received and (counts := data.label_counts[told]).any():
            g = mix_heads(received, label_shares(counts) if self.hp.heads == "per_label" else ones(1))
            if self.hp.write == "average":
                head = average_in(head, g)  # equations (10) and (11)
            elif "mask" in state:
                head = write_in(head, g, state["mask"])  # equation (9)
            elif self.hp.first_psi == "ones":
                head = g
        ahead = 0 if self.hp.decay_on == "round" else state["joined"] - (round - 1)
        return {**state["own"], **head}, {"before": head, "pace": self.ctx.lr_decay**ahead}

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return paced(self.ctx.ce(params, batch), extras["pace"])

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            labels = data.label_counts.nonzero()[:, 0].int()
            return {**state, "labels": labels}, Upload({"x:labels": labels})
        mask = critical_mask(extras["before"], head_of(self.ctx, params), self.hp.beta, self.hp.mask_scope)
        sent = mean_features(self.ctx, params, data, self.hp)
        return {"own": params, "mask": mask, "labels": sent["x:labels"], "joined": state["joined"] + 1}, Upload(sent)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        labels = {**server["labels"], **{u.sender: u.tree["x:labels"] for u in uploads}}
        sent = [u.tree for u in uploads] if round > 0 else []
        return {"heads": server_step(self.ctx, server["heads"], sent, self.hp), "labels": labels}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state["own"], {}
