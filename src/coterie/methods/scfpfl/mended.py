"""SC-FPFL mended: an agent that restores only what was lost. Coterie's own, 2026.

After SC-FPFL (Jin, Chen, Journal of Electronics & Information Technology 2023), with its edges and its Fourier mixing.
The agent learns from the client's own model only if that model is better than the edge's on validation data. The client
then keeps the best of agent, edge and own model, and the edge averages agents.

- Clusters are the division of largest modularity (Newman 2006), or none, instead of ISODATA with a known number.
- Clients are compared by their logits without each client's mean, which is its label shares.
- The client's own model is scored, and it does not train apart from the agent.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core.context import Batch, ClientData, Extras
from coterie.core.method import Settings
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.methods.scfpfl.edges import ClusterEdges, accuracy, predictions
from coterie.methods.scfpfl.modularity import logit_clusters
from coterie.methods.scfpfl.settings import SCFPFLMendedSettings
from coterie.parts.distill import kl


class SCFPFLMended(ClusterEdges):
    """Clusters by modularity, and the best of agent, edge and own model."""

    Settings: ClassVar[type[Settings]] = SCFPFLMendedSettings
    hp: SCFPFLMendedSettings
    card = replace(ClusterEdges.card, title="SC-FPFL (mended)", certainty="O")
    controls = ("sc-fpfl-mended-cluster-only", "sc-fpfl-mended-no-agent")

    # ---- client ------------------------------------------------------------------------------------------------------
    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        """Make the own model a teacher if it is better than the edge's on validation data: if something was lost."""
        val = {"edge": accuracy(self.ctx, edge, data.val), "own": accuracy(self.ctx, own, data.val)}
        lost = val["own"] > val["edge"]
        teaches = lost and self.hp.kl_weight > 0
        teacher = predictions(self.ctx, own, data.train.x) if teaches else None
        return {"lost": torch.tensor(float(lost)), "val": val}, teacher

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the cross-entropy, plus KL(own || agent) if the own model teaches."""
        logits = self.ctx.forward(params, batch.x)
        loss = self.ctx.loss_of(logits, batch)
        if batch.per_sample is None:
            return loss
        return loss + self.hp.kl_weight * kl(batch.per_sample, logits, batch.weight)

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        """Return the best of agent, edge and own model on validation data; of equals the first of these."""
        trees = {"agent": agent, "edge": extras["edge"], "own": own}
        val = {"agent": accuracy(self.ctx, agent, data.val), **extras["val"]}
        best = max(val, key=val.__getitem__)
        return trees[best], {"rejected": float(best != "agent"), **{f"val_{k}": v for k, v in val.items()}}

    def sent(self, agent: Tree, f: Tree) -> Tree:
        return agent

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def labels(self, outputs: Tensor) -> Tensor:
        return logit_clusters(outputs, self.hp.k0, key(self.ctx.seed, "clusters"))
