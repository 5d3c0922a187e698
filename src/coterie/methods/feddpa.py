"""FedDPA (FedDPA-T). Yang, Long, Shen, Jiang, Blumenstein, NeurIPS 2024 (arXiv 2403.19211).

A client has a global adapter, which is averaged, and a local one, which stays. From the second round on it first trains
its local adapter in a mixture with the received one, which is fixed, and then the global adapter by itself. For
prediction the two are mixed for each item: the share of the local one is `most` times the mean cosine similarity of the
item's features with those of a few training samples, all under the local adapter.
Adapters are the low-rank adapters of the model (lora_rank) and its head. The shares weigh the outputs of the adapters
in each layer, and the outputs of the heads. Departs from the paper and the authors' code:
- The paper's models have no head of their own; here both adapters have one, which is trained with them.
- The samples are drawn once for each client instead of once for each item.
- A client without a local adapter, which did not take part after the first round, uses the global one.
- Without low-rank adapters, or with adapters in nn.MultiheadAttention, both models are complete and their outputs are
  mixed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.lora import lora_layers
from coterie.core.method import Card, Client, Method, Model, Phase, Settings, Start, Trained, Upload
from coterie.core.tree import Tree
from coterie.core.views import ModelView


class FedDPASettings(Settings):
    share: float = Field(0.5, ge=0, le=1, description="share of the local adapter in the mixture that it is trained in")
    most: float = Field(0.5, ge=0, le=1, description="share of the local adapter for an item like the training samples")
    compared: int = Field(5, ge=1, description="training samples that an item is compared with")


class FedDPA(Method):
    Settings = FedDPASettings
    hp: FedDPASettings
    card = Card(
        "FedDPA", "Yang et al., NeurIPS 2024, arXiv 2403.19211", 2024, "M", personal="a second adapter and a head",
        compute="a second training, of the mixture",
    )  # fmt: skip
    needs = ("head",)

    # ---- client --------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        received = super().begin(state, download, data, round).params
        local = state.get("local", self.ctx.w0)
        return Start({**T.tag("g", received), **T.tag("p", local)}, {"received": received})

    def phases(self, round: int) -> list[Phase]:
        alone = Phase(self.loss, T.has_tag("g"))
        return [Phase(self.mixed_loss, T.has_tag("p")), alone] if round > 1 else [alone]

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(T.tagged("g", params), batch)

    def mixed_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        share = torch.full((1,), self.hp.share, device=self.ctx.device)
        return self.ctx.loss_of(self._mixed(extras["received"], T.tagged("p", params), batch.x, share), batch)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        shared = Trained(T.tagged("g", trained.params), {}, trained.aux, trained.steps)
        state, upload = super().end(state, shared, data, round)
        return ({**state, "local": T.tagged("p", trained.params)} if round > 1 else state), upload

    # ---- use -----------------------------------------------------------------------------------------------------
    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        received = super().personal(state, download, data).params
        if "local" not in state or not len(data.train):
            return Model(T.tag("g", received))
        local = state["local"]
        rng = self.ctx.rng("feddpa", data.client)
        drawn = torch.randperm(len(data.train), generator=rng)[: self.hp.compared].to(data.train.x.device)
        with torch.no_grad():
            known = self.ctx.features(local, data.train.x[drawn])
        return Model({**T.tag("g", received), **T.tag("p", local)}, {"known": known})

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "received":
            return Model(T.tag("g", super().personal(client.state, client.download, client.data).params))
        if view == "trained":
            return self.personal(client.state, client.download, client.data)
        return super().model(view, client)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        if "known" not in extras:
            return self.ctx.forward(T.tagged("g", params), x)
        local = T.tagged("p", params)
        features = F.normalize(self.ctx.features(local, x), dim=-1)
        share = self.hp.most * (features @ F.normalize(extras["known"], dim=-1).T).mean(-1)
        return self._mixed(T.tagged("g", params), local, x, share)

    # ---- mixtures ------------------------------------------------------------------------------------------------
    @cached_property
    def _inside(self) -> bool:
        """True if adapters can be mixed in their layers: they and the head are all that is not a constant."""
        net, layers = self.ctx.net, lora_layers(self.ctx.net.module)
        group = self.ctx.group
        whole = len(group("lora:A")) == len(group("lora:B")) == len(layers) > 0
        return whole and all(layer.gated for layer in layers) and set(net.names) == group("lora") | group("head")

    def _mixed(self, received: Tree, local: Tree, x: Tensor, share: Tensor) -> Tensor:
        """Return outputs of the mixture, with these shares [batch] or [1] of the local adapter."""
        two = share.unsqueeze(-1)
        if not self._inside:
            return (1 - two) * self.ctx.forward(received, x) + two * self.ctx.forward(local, x)
        both = dict(received)
        for half, axis in (("lora:A", 0), ("lora:B", 1)):
            for k in self.ctx.group(half):
                both[k] = torch.cat([received[k], local[k]], axis)
        with self._gates(two):
            outputs, z = self.ctx.net.both(both, x)
        return (1 - two) * outputs + two * self.ctx.logits(local, z)

    @contextmanager
    def _gates(self, share: Tensor) -> Iterator[None]:
        """Weigh the first half of the ranks of each adapter by 1 - share, the second half by share."""
        layers = lora_layers(self.ctx.net.module)
        for layer in layers:
            rank = layer.initial_rank
            layer.gate = torch.cat([(1 - share).expand(-1, rank), share.expand(-1, rank)], -1)
        try:
            yield
        finally:
            for layer in layers:
                layer.gate = None
