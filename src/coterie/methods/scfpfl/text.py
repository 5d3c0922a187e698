"""SC-FPFL. Jin, Chen, Journal of Electronics & Information Technology 45(6), 2023, 1981-1989 (DOI 10.11999/JEIT220529).

Clients are clustered by their predictions on a public set; every cluster has an edge that averages its clients. The
cloud gives the edge models common low-frequency amplitudes and leaves each its phases and high frequencies. On the
client the edge's model becomes an agent that relearns from the client's own model; if the agent is good enough, it
replaces that model.

- The number of clusters is found in the eigenvalues unless it is given; the paper does not say how.
- Linear layers are transformed only if the model has no convolution; what is not transformed stays the edge's own.
- The models of the first average travel with the predictions, so V rounds are V agents. The printed loop ends after
  V - 1 and resets its count.
- Sums over samples in the losses are means over batches.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras
from coterie.core.method import Phase, Settings
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.methods.scfpfl.edges import OWN, ClusterEdges, accuracy, is_own, predictions
from coterie.methods.scfpfl.settings import SCFPFLSettings
from coterie.methods.scfpfl.spectral import prediction_clusters
from coterie.parts.distill import kl


class SCFPFL(ClusterEdges):
    """Algorithm 1: clusters by predictions, Fourier mixing, and an agent that relearns on the client."""

    Settings: ClassVar[type[Settings]] = SCFPFLSettings
    hp: SCFPFLSettings
    controls = ("sc-fpfl-cluster-only", "sc-fpfl-no-agent")

    @property
    def form(self) -> Literal["softmax", "logits"]:  # type: ignore[override]  # a setting here
        return self.hp.predict

    @property
    def trains_own(self) -> bool:  # type: ignore[override]  # a setting here
        """True if the client's own model trains after round 0 too: before the agent, or in case that it fails."""
        return self.hp.local_train_each_round or self.hp.agent_fail == "train"

    # ---- client ------------------------------------------------------------------------------------------------------
    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        teaches = self.hp.kl_weight > 0 and not self.trains_own
        return {}, predictions(self.ctx, own, data.train.x) if teaches else None

    def phases(self, round: int) -> list[Phase]:
        agent = super().phases(round)
        if round == 0 or not self.trains_own:
            return agent
        own = [Phase(self.own_loss, trains=is_own, stream=1)]
        return [*own, *agent] if self.hp.local_train_each_round else [*agent, *own]

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return L_d = L_CE + L_KL(own || agent), equations (10) to (12).

        A teacher that trains too is asked in every step; any other one was asked before (batch.per_sample).
        """
        logits = self.ctx.forward(params, batch.x)
        loss, teacher, share = self.ctx.loss_of(logits, batch), batch.per_sample, self.hp.kl_weight
        if self.trains_own and share:
            with torch.no_grad():
                teacher = self.ctx.forward(T.tagged(OWN, params), batch.x)
        return loss if teacher is None else loss + share * kl(teacher, logits, batch.weight)

    def own_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the cross-entropy of the client's own model."""
        return self.ctx.ce(T.tagged(OWN, params), batch)

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        """Return the agent if its validation accuracy is at least lambda1 times that of the own model, else `own`.

        Algorithm 1, line 12: this is how the agent's knowledge reaches the own model.
        """
        rival = own if self.hp.local_train_each_round else extras["own"]
        trees = {"agent": agent, "edge": extras["edge"], "own": rival}
        val = {name: accuracy(self.ctx, tree, data.val) for name, tree in trees.items()}
        good = val["agent"] >= self.hp.lambda1 * val["own"]
        return agent if good else own, {"rejected": float(not good), **{f"val_{k}": v for k, v in val.items()}}

    def sent(self, agent: Tree, f: Tree) -> Tree:
        """Return the own model; Algorithm 1, line 9."""
        return f

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def labels(self, outputs: Tensor) -> Tensor:
        return prediction_clusters(outputs, self.hp, key(self.ctx.seed, "clusters"))
