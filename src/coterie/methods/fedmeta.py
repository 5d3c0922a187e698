"""FedMeta. Chen, Luo, Dong, Li, He, arXiv 1802.07876, 2018.

The server shares a learner instead of a model: initial values w (MAML), and with `learner = meta-sgd` also a rate for
every parameter. A client splits its training part into a support and a query set, makes one gradient step on the
support set, and sends the gradient of the query loss after that step, differentiated through the step. The server
descends the mean gradient. The view `adapted` scores a copy after such a step on the client's own data.
A client sends w minus its outer step, whose mean is the server's step. Support samples are evenly spaced in the
client's data instead of random, and the outer step is plain SGD (the authors use Adam). Batch-norm statistics change in
the query pass only and are averaged. A client makes `meta_steps` outer steps per round, so that a round moves the model
about as far as one of FedAvg; the paper has one.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, Split, State
from coterie.core.method import Card, Client, Method, Model, Moment, Phase, Settings, Start
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.parts.gradient import still

RATES = "rate"


class FedMetaSettings(Settings):
    learner: Literal["maml", "meta-sgd"] = Field("maml", description="learn initial values, or also a rate for each")
    alpha: float = Field(0.01, ge=0, description="rate of the inner step; meta-sgd: initial rate of all parameters")
    beta: float | None = Field(None, gt=0, description="rate of the outer step; empty: the run's lr")
    support: float = Field(0.2, gt=0, lt=1, description="share of the training part in the support set")
    meta_steps: int = Field(5, ge=1, description="outer steps of a client per round; 1 in the paper")
    adapt_steps: int = Field(1, ge=0, description="inner steps, one batch each, before a copy is scored")


class FedMeta(Method):
    Settings = FedMetaSettings
    hp: FedMetaSettings
    card = Card(
        "FedMeta",
        "Chen et al., arXiv 1802.07876, 2018",
        2018,
        "F",
        personal="an adapted copy",
        certainty="B",
        compute="per outer step one pass over the training part with second derivatives, instead of FedAvg's epochs",
    )
    weighting = "uniform"
    needs = ("unweighted",)  # its support and query sets are not batches of the trainer

    def _rates(self) -> Tree:
        """Return the initial rates of the trained entries; none for MAML, whose rate is fixed."""
        if self.hp.learner == "maml":
            return {}
        names = self.ctx.net.trainable
        return T.tag(RATES, {k: torch.full_like(v, self.hp.alpha) for k, v in self.ctx.w0.items() if k in names})

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways, and so do the rates of meta-sgd."""
        return self.model_schema | Schema(like(self._rates(), part="rates"))

    def setup(self) -> State:
        return {"w": {**super().setup()["w"], **self._rates()}}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        support, query = support_and_query(data.train, self.hp.support)
        beta = self.ctx.lr_at(round) if self.hp.beta is None else self.hp.beta
        return start.adding(support=support, query=query, beta=beta)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(update=self.outer, steps=self.hp.meta_steps)]

    def outer(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        """Descend the loss on the query set after an inner step on the support set; the run's batch is not used."""
        names = [k for k in params if T.plain(k) in self.ctx.net.trainable]
        leaves = {k: params[k].detach().requires_grad_() for k in names}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            moved = self.step({**params, **leaves}, extras["support"], T.tagged(RATES, leaves), True)
            value = self.loss({**params, **moved}, extras["query"], extras)
        slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        steps = zip(names, slopes, strict=True)
        return {**params, **{k: params[k] if g is None else params[k] - extras["beta"] * g for k, g in steps}}

    def step(self, params: Tree, batch: Batch, rates: Mapping[str, Tensor], through: bool) -> Tree:
        """Return the trained entries after one step on a batch; `through` keeps the step differentiable."""
        leaves = {k: v for k, v in params.items() if v.requires_grad and k in self.ctx.net.trainable}
        value = self.loss(still(params, self.ctx.group("bn_stats")), batch, {})
        slopes = torch.autograd.grad(value, list(leaves.values()), create_graph=through, allow_unused=True)
        steps = zip(leaves.items(), slopes, strict=True)
        return {k: v if g is None else v - (rates[k] if rates else self.hp.alpha) * g for (k, v), g in steps}

    def inner(self, params: Tree, batch: Batch, extras: Extras, rng: torch.Generator) -> Tree:
        leaves = {k: v.detach().requires_grad_() for k, v in params.items() if k in self.ctx.net.trainable}
        with torch.enable_grad():
            moved = self.step({**params, **leaves}, batch, extras.get("rates", {}), False)
        return {**params, **T.clone(moved)}

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.loss(T.untagged(params), batch)

    def adapt(self) -> list[Phase]:
        return [Phase(update=self.inner, steps=self.hp.adapt_steps)]

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        rates: dict[str, Any] = {"rates": T.tagged(RATES, download)} if self.hp.learner == "meta-sgd" else {}
        return Model(super().personal(state, T.untagged(download), data).params, rates)

    def model(self, view: ModelView, client: Client) -> Model | None:
        if view == "trained" and client.trained is not None:
            return Model(T.untagged(client.trained.params))
        return self.personal(client.state, client.download, client.data) if view != "edge" else None

    def global_model(self, server: State) -> Tree | None:
        return super().global_model({"w": T.untagged(server["w"])})


def support_and_query(part: Split, share: float) -> tuple[Batch, Batch]:
    """Return the support and the query set: every (1/share)-th sample, and the others; one sample alone is in both."""
    at = torch.arange(len(part) + 1, dtype=torch.float64)
    chosen = (at * share + 0.5).floor().diff() > 0  # sample i is chosen if a multiple of 1/share lies in its place
    if not chosen.any() and len(part):
        chosen[0] = True
    chosen = chosen.to(part.y.device)
    others = ~chosen if len(part) > 1 else chosen
    return Batch(part.x[chosen], part.y[chosen]), Batch(part.x[others], part.y[others])
