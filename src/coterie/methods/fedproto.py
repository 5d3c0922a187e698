"""FedProto. Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022 (arXiv 2105.00243).

No weights travel: a client sends the mean feature of each of its classes and receives the mean over all clients. The
whole model stays on the client and is trained on its loss plus a pull of features towards the received prototypes. So
clients with different models can work together.
Class means come from one clean pass after training, not from features collected while the model moves.
The label of each row is sent and counted; the counts as well if rows are weighted by samples (paper; code: uniform).
The model's head decides by default; the nearest prototype among the client's own classes is the other convention.
A class that no client has is a row of NaN in the download, so that no mask need be sent.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, class_ids, counts
from coterie.core.tree import Tree
from coterie.parts.prototypes import Prototypes, collect, nearest_logits, prototype_loss


class FedProtoSettings(Settings):
    lam: float = Field(1.0, ge=0, description="strength of the pull of features towards the prototypes")
    decide: Literal["head", "nearest"] = Field("head", description="predict by the head or by the nearest prototype")


class FedProto(Method):
    Settings = FedProtoSettings
    hp: FedProtoSettings
    card = Card("FedProto", "Tan et al., AAAI 2022, arXiv 2105.00243", 2022, "P,R", personal="the whole model")
    needs = ("head", "classes")
    weighting = "uniform"
    agree = "head"

    def private(self, name: str) -> bool:
        return True

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads hold the means of the client's own classes, downloads one prototype for every class."""
        classes, width, part = self.ctx.classes, self.ctx.net.width, "prototypes"
        if link == "down":
            return Schema({"x:prototypes": Entry((classes, width), kind="prototype", part=part, nan=True)})
        entries = {
            "x:means": Entry(("labels", width), kind="prototype", part=part),
            "x:labels": class_ids("labels", classes, part),
        }
        if self._counted():
            entries["x:counts"] = counts("labels", part)
        return Schema(entries, {"labels": (0, classes)})

    def _counted(self) -> bool:
        return (self.ctx.weighting or self.weighting) == "samples"

    def setup(self) -> State:
        return {"prototypes": torch.full((self.ctx.classes, self.ctx.net.width), torch.nan)}

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download(shared={"x:prototypes": server["prototypes"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        C = download["x:prototypes"]
        mask = ~C.isnan().any(1)
        return Start(
            state["own"], {"prototypes": C.nan_to_num(), "mask": mask, "known": mask & (data.label_counts > 0)}
        )

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        logits, z = self.ctx.net.both(params, batch.x)
        ce = self.ctx.loss_of(logits, batch)
        if self.hp.lam == 0:
            return ce
        n = len(batch.y) if batch.weight is None else batch.weight.sum().clamp(min=1)
        pull = prototype_loss(z, batch.y, Prototypes(extras["prototypes"], extras["mask"]), "mse", weight=batch.weight)
        return ce + self.hp.lam * pull / n

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        means, samples = collect(
            lambda x: self.ctx.features(trained.params, x), data.train.x, data.train.y, data.classes
        )
        tree = {"x:means": means.value[means.mask], "x:labels": means.mask.nonzero()[:, 0].int()}
        if self._counted():
            tree["x:counts"] = samples[means.mask].int()
        return {**state, "own": trained.params}, Upload(tree)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Set C[k] to the mean over the clients that own k; a class without uploads keeps its prototype."""
        labels = torch.cat([u.tree["x:labels"] for u in uploads]).long()
        rows = torch.cat([u.tree["x:means"] for u in uploads]).double()
        weight = torch.cat([u.tree["x:counts"] for u in uploads]) if self._counted() else torch.ones(len(labels))
        share = weight.double()
        total = rows.new_zeros(self.ctx.classes).index_add(0, labels, share)
        sums = rows.new_zeros(self.ctx.classes, rows.shape[1]).index_add(0, labels, rows * share[:, None])
        fresh = (sums / total[:, None]).float()
        return {"prototypes": torch.where((total > 0)[:, None], fresh, server["prototypes"])}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return self.begin(state, download, data, 0).model

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        if self.hp.decide == "head" or not bool(extras["known"].any()):
            return self.ctx.forward(params, x)
        return nearest_logits(self.ctx.features(params, x), Prototypes(extras["prototypes"], extras["known"]))
