"""FedCP. Zhang, Hua, Wang, Song, Xue, Ma, Guan, KDD 2023 (arXiv 2307.01217).

A small policy network splits every feature vector into a personal and a global share; the client's own head reads the
first, the frozen received head the second, and their logits are added. The body is held near the received one by the
MMD between their features. Body, policy and the mean of both heads are uploaded.
The policy sees the client through its own head at the start of the round; that head starts as the common random one,
which stands in for the authors' random vector of the first round. Scoring uses the Gumbel softmax without noise.
The received body is in training mode, as in the authors' code: then both bodies normalise by the same batch, and the
MMD is 0 before the first step. With `reference = evaluation` it uses its running statistics. The authors' clients keep
batch-norm statistics of their own (`bn_stats = local` of the run); policy and global head reach sampled clients only.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts import small_layers
from coterie.parts.distill import mmd


class FedCPSettings(Settings):
    lam: float = Field(5.0, ge=0, description="strength of the MMD between own and received features")
    tau: float = Field(1.0, gt=0, description="temperature of the Gumbel softmax")
    reference: Literal["training", "evaluation"] = Field(
        "training", description="mode of the received body's batch norm when features are compared"
    )


class FedCP(Method):
    Settings = FedCPSettings
    hp: FedCPSettings
    card = Card("FedCP", "Zhang et al., KDD 2023, arXiv 2307.01217", 2023, "S", personal="a second head")
    needs = ("head",)

    def private(self, name: str) -> bool:
        return T.is_tagged("p", name)

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model and the policy travel both ways."""
        return self.model_schema | Schema(like(self._policy(), part="policy"))

    def _head(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def _policy(self) -> Tree:
        d = self.ctx.net.width
        return {**small_layers.linear("q:1", d, 2 * d, self.ctx.rng("policy")), **small_layers.layer_norm("q:2", 2 * d)}

    def setup(self) -> State:
        return {"w": {**super().setup()["w"], **self._policy()}}

    def global_model(self, server: State) -> None:
        return None

    def init_client(self, data: ClientData) -> State:
        own = super().init_client(data).get("own", {})
        return {"own": {**own, **T.clone(T.tag("p", T.keep(self.ctx.w0, self._head)))}}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        params = {**download, **state["own"]}
        return Model(params, {"context": F.normalize(params["p:" + self.ctx.net.head_names[0]].sum(0), dim=0)})

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "newcomer":  # its own head is the received one
            own = {**client.state["own"], **T.tag("p", T.keep(client.download, self._head))}
            client = client._replace(state={"own": own})
        return super().model(view, client)

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, extras = self.personal(state, download, data)
        return Start(params, {**extras, "received": params})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, lambda k: not self._head(k))]  # the received head is frozen

    def shares(self, params: Tree, z: Tensor, extras: Extras, noise: bool) -> Tensor:
        """Return the personal and the global share of every feature [2, batch, d]; they sum to 1."""
        q = small_layers.run_linear(params, "q:1", z * extras["context"])
        q = small_layers.run_layer_norm(params, "q:2", q).relu()
        pair = q.reshape(-1, 2, q.shape[-1] // 2)
        soft = F.gumbel_softmax(pair, self.hp.tau, dim=1) if noise else (pair / self.hp.tau).softmax(1)
        return soft.transpose(0, 1)

    def _logits(self, params: Tree, z: Tensor, extras: Extras, noise: bool) -> Tensor:
        r, s = self.shares(params, z, extras, noise)
        return self.ctx.logits(T.tagged("p", params), r * z) + self.ctx.logits(params, s * z)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        z = self.ctx.features(params, batch.x)
        loss = self.ctx.loss_of(self._logits(params, z, extras, noise=True), batch)
        if self.hp.lam == 0:
            return loss
        with torch.no_grad():
            frozen = self.ctx.features(self._reference(extras["received"]), batch.x)
        return loss + self.hp.lam * mmd(z, frozen, weight=batch.weight)

    def _reference(self, received: Tree) -> Tree:
        """Return the received model; its batch-norm layers count as trained if it is used in training mode."""
        if self.hp.reference == "evaluation" or not self.ctx.net.has_batch_norm:
            return received
        norms = {k: received[k] for k in self.ctx.group("bn") if k in received}
        fixed = self.ctx.net.fixed
        return {**received, **{k: v.clone() if k in fixed else v.detach().requires_grad_() for k, v in norms.items()}}

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return self._logits(params, self.ctx.features(params, x), extras, noise=False)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        own = T.tagged("p", trained.params)
        return state, Upload({k: (v + own[k]) / 2 if self._head(k) else v for k, v in upload.tree.items()})
