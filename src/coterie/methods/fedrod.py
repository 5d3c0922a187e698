"""FedRoD. Chen, Chao, ICLR 2022 (arXiv 2107.00778).

Two heads on one body: the generic head and the body are trained with a balanced softmax and averaged; a personal head
learns the client's own empirical risk on top of the generic logits, and nothing flows back from it.
With `hyper` the personal head is made from the client's label shares by a small network that is averaged too, so that
a newcomer has one at once; its hidden width is our choice.
The personal head starts as a copy of the generic one. Absent classes count as 1e-12 samples.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Client, Method, Model, Moment, Settings, Start
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts import small_layers
from coterie.parts.distill import balanced_logits


class FedRoDSettings(Settings):
    gamma: float = Field(1.0, ge=0, description="strength of the correction by label counts")
    hyper: bool = Field(False, description="make personal heads from label shares by a shared network")
    hyper_width: int = Field(16, ge=1, description="hidden units of that network")


class FedRoD(Method):
    Settings = FedRoDSettings
    hp: FedRoDSettings
    card = Card(
        "FedRoD", "Chen and Chao, ICLR 2022, arXiv 2107.00778", 2022, "S", personal="a second head", certainty="B"
    )
    needs = ("head", "classes")

    def private(self, name: str) -> bool:
        return T.is_tagged("p", name)

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model with its generic head and, with `hyper`, the network that makes personal heads travel both ways.

        The balanced softmax leaves the head's rows of absent classes as they were, so an upload shows the labels.
        """
        model = self.model_schema
        head = {
            k: replace(e, shows_labels=link == "up") for k, e in model.entries.items() if k in self.ctx.group("head")
        }
        return model | Schema(head) | Schema(like(self._hyper_net(), part="hyper-network"))

    def _second_head(self) -> Tree:
        return T.tag("p", T.keep(self.ctx.w0, lambda k: k in self.ctx.group("head")))

    def _hyper_net(self) -> Tree:
        """Return the initial network from label shares [classes] to a flat head [H]; its last bias is that head."""
        if not self.hp.hyper:
            return {}
        head, rng = T.flatten(self._second_head()), self.ctx.rng("hyper")
        net = small_layers.linear("h:1", self.ctx.classes, self.hp.hyper_width, rng)
        return {**net, **small_layers.linear("h:2", self.hp.hyper_width, len(head), rng), "h:2.bias": head}

    def setup(self) -> State:
        return {"w": {**super().setup()["w"], **self._hyper_net()}}

    def init_client(self, data: ClientData) -> State:
        own = {} if self.hp.hyper else T.clone(self._second_head())
        return {"own": {**super().init_client(data).get("own", {}), **own}}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start({**download, **state["own"]}, {"counts": data.label_counts.float()})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        g, z = self.ctx.net.both(params, batch.x)
        generic = self.ctx.loss_of(balanced_logits(g, extras["counts"], self.hp.gamma), batch)
        return generic + self.ctx.loss_of(g.detach() + self._second(params, z.detach(), extras), batch)

    def _second(self, params: Tree, z: Tensor, extras: Extras) -> Tensor:
        """Return the logits of the personal head."""
        if not self.hp.hyper:
            return self.ctx.logits(T.tagged("p", params), z)
        shares = extras["counts"] / extras["counts"].sum().clamp(min=1)
        flat = small_layers.run_linear(params, "h:2", small_layers.run_linear(params, "h:1", shares).relu())
        return self.ctx.logits(T.tagged("p", T.unflatten(flat, self._second_head())), z)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return self.begin(state, download, data, 0).model

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view != "newcomer":
            return super().model(view, client)
        # the hyper-network makes a head for the newcomer; otherwise the generic head predicts alone
        params, extras = self.personal(client.state, client.download, client.data)
        return Model({k: torch.zeros_like(v) if self.private(k) else v for k, v in params.items()}, extras)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        g, z = self.ctx.net.both(params, x)
        return g + self._second(params, z, extras)
