"""FedDyn. Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, ICLR 2021 (arXiv 2111.04263).

Each client keeps a dual vector h_i and minimises its loss + alpha <h_i, w> + alpha/2 ||w - w_t||^2, so that local
optima agree with the global one. The server sends the mean of the models plus the mean Hbar of all duals; the mean of
the models is scored, as in the authors' code. The quadratic term is in the loss (the authors put it into the weight
decay), so any optimiser sees the whole objective.
Two habits of the authors' code are settings, because the paper has neither: `scale_alpha` (they always divide alpha by
a client's relative sample count) costs an opening round and 4 bytes down per round; `clip_first` clips the gradient
before alpha w is added, as their weight decay makes it, and trains client by client.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts.gradient import clipped


class FedDynSettings(Settings):
    alpha: float = Field(0.01, gt=0, description="strength of the dual and of the pull towards the received model")
    clip: float | None = Field(10.0, gt=0, description="largest norm of a local gradient; empty: none")
    clip_first: bool = Field(False, description="clip before the gradient alpha w of the pull is added")
    scale_alpha: bool = Field(False, description="divide alpha by the client's sample count over the mean count")


class FedDyn(Method):
    Settings = FedDynSettings
    hp: FedDynSettings
    card = Card("FedDyn", "Acar et al., ICLR 2021, arXiv 2111.04263", 2021, "G,R", personal="a dual vector, no model")
    weighting = "uniform"

    def _zero(self) -> Tree:
        return {k: torch.zeros_like(v) for k, v in self.ctx.w0.items() if k in self.ctx.net.trainable}

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; clients that are scored also receive the mean of the models (avg:)."""
        if now is not None and now.round == 0:
            return Schema({})
        model = self.model_schema
        if link == "down":
            if self.hp.scale_alpha:
                model |= Schema({"x:mean_samples": Entry((1,), kind="statistic", low=0)})
            if now is None:
                model |= Schema(like(T.tag("avg", T.drop(self.ctx.w0, self.stays)), optional=True))
        return model.optional() if now is None and self.opening() else model

    def setup(self) -> State:
        w = super().setup()["w"]
        return {"w": w, "avg": T.clone(w), "hbar": self._zero(), "mean_samples": 0.0}

    def opening(self) -> bool:
        return self.hp.scale_alpha

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        if round == 0:
            return Download()
        scale = {"x:mean_samples": torch.tensor([server["mean_samples"]])} if self.hp.scale_alpha else {}
        return Download(shared={**server["w"], **scale})

    def deliver(self, server: State, ids: Sequence[int], round: int) -> Download:
        sent = self.down(server, ids, round)
        return Download(shared={**sent.shared, **T.tag("avg", server["avg"])})

    def init_client(self, data: ClientData) -> State:
        return {**super().init_client(data), "h": self._zero()}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = super().begin(state, T.untagged(download), data, round).params
        mean = float(download["x:mean_samples"]) if "x:mean_samples" in download else len(data.train)
        alpha = self.hp.alpha * mean / max(len(data.train), 1)
        return Start(params, {"anchor": params, "h": state["h"], "alpha": alpha})

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        alpha: float = extras["alpha"]
        pull = alpha / 2 * T.sqdist(params, extras["anchor"], self.ctx.net.trainable)
        return self.ctx.loss(params, batch) + alpha * T.dot(extras["h"], params) + pull

    def clipped_first(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Loss without alpha/2 |w|^2, whose gradient is clipped before alpha w is added."""
        alpha, names = extras["alpha"], [k for k in params if k in extras["h"]]
        slope = {k: h - extras["anchor"][k] for k, h in extras["h"].items()}
        loss: Tensor = self.ctx.loss(params, batch) + alpha * T.dot(slope, params)
        own = {k: params[k] for k in names}
        gradient: Sequence[Tensor] = torch.autograd.grad(loss, list(own.values()))
        gradient = gradient if self.hp.clip is None else clipped(gradient, self.hp.clip)
        squares = torch.autograd.grad(alpha / 2 * T.dot(own, own), list(own.values()))
        total = {k: g + s for k, g, s in zip(names, gradient, squares, strict=True)}
        step: Tensor = T.dot(total, params)  # its gradient is `total`
        return loss.detach() + (step - step.detach())

    def phases(self, round: int) -> list[Phase]:
        if self.hp.clip_first:
            return [replace(phase, loss=self.clipped_first) for phase in super().phases(round)]
        return [replace(phase, clip=self.hp.clip) for phase in super().phases(round)]

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == 0:
            return state, Upload({})
        state, upload = super().end(state, trained, data, round)
        h = {k: v + (trained.params[k] - trained.extras["anchor"][k]) for k, v in state["h"].items()}
        return {**state, "h": h}, upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return {**server, "mean_samples": sum(u.samples for u in uploads) / len(uploads)}
        moves = [T.sub(u.tree, server["w"]) for u in uploads]
        avg = T.add(server["w"], T.mean(moves, self.weights(uploads)))
        hbar = T.add(server["hbar"], T.mean(moves), len(uploads) / len(self.ctx.clients))
        w = {k: v + hbar[k] if k in hbar else v.clone() for k, v in avg.items()}
        return {**server, "w": w, "avg": avg, "hbar": hbar}

    def global_model(self, server: State) -> Tree | None:
        return server["avg"] if self.ctx.w0.keys() == server["avg"].keys() else None

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        model = T.tagged("avg", download) or T.untagged(download) or self.ctx.w0
        return Model({**model, **state.get("own", {})})
