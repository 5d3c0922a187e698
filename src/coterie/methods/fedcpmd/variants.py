"""Ablations and controls of FedCPMD, of its published code and of its mended version."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.context import ClientData, ClientId, Context, EdgeId, Extras, Split, State
from coterie.core.method import Download, Method, Settings
from coterie.core.tree import Tree
from coterie.errors import CoterieError, unknown
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.mended import FedCPMDMended
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.methods.fedcpmd.text import FedCPMD
from coterie.methods.fedcpmd.voting import LayerVotes
from coterie.parts.variants import variant, with_defaults


class _Random(LayerVotes):
    """Control: as many clients per layer, assigned at random among the clients that voted."""

    card = replace(LayerVotes.card, title="FedCPMD (random)")

    def switch(self, server: State) -> State:
        server = super().switch(server)
        # by size, so that the draw does not depend on how clients are numbered
        order = sorted(server["samples"], key=lambda i: (server["samples"][i], i))
        layers = sorted(server["layer"][i] for i in order)
        drawn = [layers[int(p)] for p in torch.randperm(len(layers), generator=self.ctx.rng("deal"))]
        return {**server, "layer": {**server["layer"], **dict(zip(order, drawn, strict=True))}}


class _Oracle(LayerVotes):
    """Each client takes the layer that helps it most on its validation part.

    After local training it puts one trained layer at a time into the model it started from, and keeps the layer with
    the smallest mean error over its participations. Without training (when only asked) all are alike: the deepest.
    """

    needs = ("head", "val", "classes")
    card = replace(LayerVotes.card, title="FedCPMD (oracle)")

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        errors = []
        for m in range(len(self.layers)):
            tried = {**extras["start"], **{k: params[k] for k in self.own(m)}}
            errors.append(1 - _accuracy(self.ctx, tried, data.val))
        return torch.tensor(errors, dtype=torch.float64).expand(1, len(votes.distances(self.hp)), -1)

    def leading(self, ballot: votes.Ballot) -> Tensor:
        return super().leading({**ballot, "votes": torch.ones_like(ballot["votes"])})  # only the errors decide


@torch.no_grad()
def _accuracy(ctx: Context, params: Tree, split: Split) -> float:
    parts = zip(torch.split(split.x, votes.CHUNK), torch.split(split.y, votes.CHUNK), strict=True)
    hits = [(ctx.forward(params, x).argmax(1) == y).sum() for x, y in parts]
    return float(torch.stack(hits).sum()) / len(split)


FedCPMDAuto = variant(
    FedCPMD,
    "FedCPMDAuto",
    "FedCPMD (auto)",
    "The text with the distance whose votes agree most with the others'.",
    distance="auto",
)


FedCPMDClassifier = variant(
    FedCPMD,
    "FedCPMDClassifier",
    "FedCPMD (classifier)",
    "The text with the classifier as the only candidate: one cluster and no switch.",
    candidates="classifier",
)


class FedCPMDRandom(_Random, FedCPMD):
    """The text with layers assigned at random."""


class FedCPMDOracle(_Oracle, FedCPMD):
    """The text with the layers that help most on validation data."""


FedCPMDMendedAuto = variant(
    FedCPMDMended,
    "FedCPMDMendedAuto",
    "FedCPMD (mended, auto)",
    "The mended version with the distance whose votes agree most with the others'.",
    distance="auto",
)


FedCPMDMendedClassifier = variant(
    FedCPMDMended,
    "FedCPMDMendedClassifier",
    "FedCPMD (mended, classifier)",
    "The mended version with the classifier as the only candidate: one cluster and no switch.",
    candidates="classifier",
)


class FedCPMDMendedRandom(_Random, FedCPMDMended):
    """The mended version with layers assigned at random."""

    card = replace(FedCPMDMended.card, title="FedCPMD (mended, random)")


class FedCPMDMendedOracle(_Oracle, FedCPMDMended):
    """The mended version with the layers that help most on validation data."""

    card = replace(FedCPMDMended.card, title="FedCPMD (mended, oracle)")


class FedCPMDOnlyCluster(FedCPMD):
    """Ablation: the same votes and clusters, nothing private; whole models are averaged inside each cluster."""

    Settings = with_defaults(FedCPMDSettings, phase1_personal="none", similarity_payload="none")
    card = replace(FedCPMD.card, title="FedCPMD Only_cluster", personal="the cluster's model")

    def own(self, layer: int) -> list[str]:
        return []

    def rows(
        self, phi: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        return {}, {}  # all members get the mean of equation (5)


class FedCPMDOnlyDecoupling(FedCPMD):
    """Ablation: the same votes and personal layers, no clusters; each layer is averaged over all that share it."""

    Settings = with_defaults(FedCPMDSettings, similarity_payload="none")
    card = replace(FedCPMD.card, title="FedCPMD Only_decoupling")

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        return None

    def pools(self, server: State) -> list[list[ClientId]]:
        return [sorted(server["layer"])]

    def begun(self, server: State, layer: int) -> bool:
        return False  # what is sent is what the cloud has

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        sent, layer = super().down(server, ids, round), server["layer"]
        if layer is None:
            return sent
        bodies = {m: self._first_body(server, m) for m in set(layer.values())}
        return Download(each={i: {**(bodies[layer[i]] if i in layer else {}), **sent.each.get(i, {})} for i in ids})


class FedCPMDFullSettings(Settings):
    layer: str = Field("", description="the layer everybody keeps from round 1; empty: the last linear one")


class FedCPMDFull(Method):
    """X-full of the paper's motivation: all clients keep the same layer, the other layers are averaged; no phases."""

    Settings = FedCPMDFullSettings
    hp: FedCPMDFullSettings
    card = replace(FedCPMD.card, title="FedCPMD X-full", family="S", personal="one layer, the same for all")

    def check(self) -> None:
        layers = self.ctx.net.layout.layers
        if self.hp.layer not in ("", *layers):
            raise unknown("layer", self.hp.layer, layers)
        if not self.hp.layer and not self.ctx.net.layout.of_kind("fc"):
            raise CoterieError("the model has no linear layer, so FedCPMD X-full needs a layer to be named")

    def private(self, name: str) -> bool:
        layer = self.hp.layer or self.ctx.net.layout.of_kind("fc")[-1]
        return name in self.ctx.group(f"layer:{layer}")
