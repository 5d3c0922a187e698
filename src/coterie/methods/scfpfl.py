"""SC-FPFL. Jin, Chen, Journal of Electronics & Information Technology 45(6), 2023, 1981-1989 (DOI 10.11999/JEIT220529).

Clients are clustered by their predictions on a public set; every cluster has an edge that averages its clients. The
cloud gives the edge models common low-frequency amplitudes and leaves each its phases and high frequencies. At home the
edge's model becomes an agent that relearns from the client's own model; if it is good enough, it replaces that model.
The models of the first average travel with the predictions, so V rounds are V agents. Batch norm is averaged like a
bias. The number of clusters is found in the eigenvalues unless it is given.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, ClientData, Extras, Payload, Phase, Settings, State, Upload, cross_entropy
from coterie.methods.scfpfl_settings import SCFPFLSettings
from coterie.parts.agent import OWN, accuracy, agents, owns, predictions
from coterie.parts.distill import accepts, kl
from coterie.parts.edge_tier import ASK, EdgesByCluster
from coterie.rng import key
from coterie.tree import Tree

PREDICTIONS = "x:predictions"


class SCFPFL(EdgesByCluster):
    Settings: ClassVar[type[Settings]] = SCFPFLSettings
    hp: SCFPFLSettings
    title = "SC-FPFL"
    paper = "Jin, Chen, J. of Electronics & Information Technology 2023, DOI 10.11999/JEIT220529"
    year = 2023
    family = "C,R"
    personal_part = "the whole model, taken over from an agent"
    needs: ClassVar[tuple[str, ...]] = ("public", "val")
    certainty = "P"

    def payload_of(self, server: State, client: int, labels: int, round: int) -> Payload:
        (up, down), asked = self.payload(labels, round), self.asks(server, round)
        return Payload(up + asked * 4 * self.ctx.public * self.ctx.classes, down + asked)

    # ---- cloud; an edge's mean, eq. (9), is the default merge ------------------------------------------------------
    def clusters(self, uploads: Sequence[Upload]) -> dict[int, int]:
        """Similarity of predictions, spectral embedding, ISODATA: eq. (1)-(8)."""
        labels = self.hp.cluster(torch.stack([u.tree[PREDICTIONS] for u in uploads]), key(self.ctx.seed, "clusters"))
        return {u.sender: k for u, k in zip(uploads, labels.tolist(), strict=True)}

    def mix(self, theta: dict[int, Tree], samples: dict[int, int], round: int) -> dict[int, Tree]:
        """Common low-frequency amplitudes, own phases: eq. (12)-(17)."""
        new = self.hp.mix(self.ctx, list(theta.values()), [samples[k] for k in theta], round)
        return dict(zip(theta, new, strict=True))

    # ---- client ----------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        own = state.get("f", self.ctx.w0)
        agent = {**own, **T.keep(download, self.ctx.w0.__contains__)}
        return {**agent, **T.prefix(OWN, own)}, {"edge": agent, "own": own, "ask": ASK in download}

    def phases(self, round: int) -> list[Phase]:
        if round == 0:
            return [Phase(self.loss, trains=agents, epochs=self.hp.warmup_epochs)]
        agent = Phase(self.relearn, trains=agents, epochs=self.hp.agent_epochs)
        own = Phase(lambda params, batch, extras: self.ctx.ce(T.strip(OWN, params), batch), trains=owns, stream=1)
        if self.hp.local_train_each_round:
            return [own, agent]
        return [agent, own] if self.hp.agent_fail == "train" else [agent]

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Cross-entropy and KL(own || agent): eq. (10)-(11)."""
        logits = self.ctx.forward(params, batch.x)
        loss = cross_entropy(logits, batch)
        if self.hp.kl_weight == 0:
            return loss
        with torch.no_grad():
            teacher = self.ctx.forward(T.strip(OWN, params), batch.x)
        return loss + self.hp.kl_weight * kl(teacher, logits, batch.weight)

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        """The agent takes over if it is good enough on validation data; `own` has trained if the settings say so."""
        rival = own if self.hp.local_train_each_round else extras["own"]
        trees = (("edge", extras["edge"]), ("own", rival), ("agent", agent))
        val = {who: accuracy(self.ctx, tree, data.val) for who, tree in trees}
        good = accepts(val["agent"], val["own"], self.hp.lambda1)
        return agent if good else own, {"rejected": float(not good), **{f"val_{k}": v for k, v in val.items()}}

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        agent, own = T.drop(params, owns), T.strip(OWN, params)
        f, note = self.accept(agent, own, extras, data) if round > 0 else (agent, {})
        tree = T.drop(f, self.stays)
        if extras["ask"] and data.public is not None:
            tree[PREDICTIONS] = predictions(self.ctx, f, data.public, self.hp.predict)
        return {"f": f}, Upload(tree, note)

    def trained(self, state: State, params: Tree, extras: Extras) -> tuple[Tree, Extras]:
        return state["f"], {}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return state.get("f") or {**self.ctx.w0, **T.keep(download, self.ctx.w0.__contains__)}, {}
