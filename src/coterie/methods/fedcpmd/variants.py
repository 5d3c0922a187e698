"""Ablations and controls of FedCPMD, of its published code and of its mended version."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.context import ClientData, ClientId, EdgeId, Extras
from coterie.core.method import Download
from coterie.core.tree import Tree
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.mended import FedCPMDMended
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.methods.fedcpmd.text import FedCPMD, FedCPMDServer
from coterie.methods.fedcpmd.voting import LayerVotes, Server, VoteServer
from coterie.parts.variants import variant, with_defaults

AUTO = "{} with the distance whose votes agree most with the others'."
CLASSIFIER = "{} with the classifier as the only candidate: one cluster and no switch."


class _Random(LayerVotes):
    """Control: as many clients per layer, assigned at random among the clients that voted."""

    card = replace(LayerVotes.card, title="FedCPMD (random)")

    def switch(self, server: Server) -> Server:
        server = super().switch(server)
        # by size, so that the draw does not depend on how clients are numbered
        order, layer = sorted(server.samples, key=lambda i: (server.samples[i], i)), server.layer or {}
        layers = sorted(layer[i] for i in order)
        drawn = [layers[int(p)] for p in torch.randperm(len(layers), generator=self.ctx.rng("deal"))]
        return replace(server, layer={**layer, **dict(zip(order, drawn, strict=True))})


class _Oracle(LayerVotes):
    """Each client takes the layer that helps it most on its validation part.

    After local training it puts one trained layer at a time into the model it started from, and keeps the layer with
    the smallest mean error over its participations. Without training (when only asked) all are alike: the deepest.
    """

    needs = ("head", "val", "classes")
    card = replace(LayerVotes.card, title="FedCPMD (oracle)")

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        errors = 1 - self.accuracies(params, extras["start"], data)
        return errors.expand(1, len(votes.distances(self.hp)), -1)

    def leading(self, ballot: votes.Ballot) -> Tensor:
        return super().leading({**ballot, "votes": torch.ones_like(ballot["votes"])})  # only the errors decide


FedCPMDAuto = variant(FedCPMD, "FedCPMDAuto", "FedCPMD (auto)", AUTO.format("The text"), distance="auto")
FedCPMDClassifier = variant(
    FedCPMD, "FedCPMDClassifier", "FedCPMD (classifier)", CLASSIFIER.format("The text"), candidates="classifier"
)


class FedCPMDRandom(_Random, FedCPMD):
    """The text with layers assigned at random."""


class FedCPMDOracle(_Oracle, FedCPMD):
    """The text with the layers that help most on validation data."""


OURS = "The mended version"
FedCPMDMendedAuto = variant(
    FedCPMDMended, "FedCPMDMendedAuto", "FedCPMD (mended, auto)", AUTO.format(OURS), distance="auto"
)
FedCPMDMendedClassifier = variant(
    FedCPMDMended,
    "FedCPMDMendedClassifier",
    "FedCPMD (mended, classifier)",
    CLASSIFIER.format(OURS),
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

    def edges(self, server: FedCPMDServer) -> dict[EdgeId, list[ClientId]] | None:
        return None

    def pools(self, server: VoteServer) -> list[list[ClientId]]:
        return [sorted(server.layer or {})]

    def begun(self, server: FedCPMDServer, layer: int) -> bool:
        return False  # what is sent is what the cloud has

    def down(self, server: FedCPMDServer, ids: Sequence[ClientId], round: int) -> Download:
        sent, layer = super().down(server, ids, round), server.layer
        if layer is None:
            return sent
        bodies = {m: self._first_body(server, m) for m in set(layer.values())}
        return Download(each={i: {**(bodies[layer[i]] if i in layer else {}), **sent.each.get(i, {})} for i in ids})
