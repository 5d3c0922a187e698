"""FedALA. Zhang, Hua, Wang, Song, Xue, Ma, Guan, AAAI 2023 (arXiv 2212.01197).

Before training a client merges the received model w into its last own one o: lower layers become w, the top p layers
o + A (w - o) with elementwise weights A in [0, 1] that are learned on a part of its data with the model held fixed.
The first time A is learned until the losses settle, later for one epoch. Batch norm stands still while A is learned.
Scored is the model after local training; who has never trained is scored with the received one.
"""

import torch
from pydantic import Field

from coterie import tree as T
from coterie.method import Batch, Card, ClientData, Extras, Method, Settings, State, Tree, Upload
from coterie.parts.groups import last_layers


class FedALASettings(Settings):
    layers: int = Field(1, ge=0, description="p: how many of the last layers are merged by weights")
    share: float = Field(0.8, gt=0, le=1, description="share of the training part on which the weights are learned")
    eta: float = Field(1.0, ge=0, description="rate at which the weights are learned")
    start: float = Field(1.0, ge=0, le=1, description="first value of the weights; 1: the received model")
    threshold: float = Field(0.1, ge=0, description="settled when the last losses deviate by less")
    window: int = Field(10, ge=1, description="how many last losses are looked at")
    max_epochs: int = Field(100, ge=1, description="most epochs of learning the weights the first time")


class FedALA(Method):
    Settings = FedALASettings
    hp: FedALASettings
    card = Card(
        "FedALA",
        "Zhang et al., AAAI 2023, arXiv 2212.01197",
        2023,
        "M",
        personal="the whole model, merged on the client",
    )

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        old = state.get("o")
        received = {**(state.get("own", {}) if old is None else old), **download}
        if old is None:  # a flag, not a comparison of floats, says that there is nothing to merge yet
            return received, {}
        A = self.learned(state["A"], old, received, data, round, self.hp.max_epochs if not state["settled"] else 1)
        return merged(old, received, A), {"A": A}

    def learned(self, A: Tree, old: Tree, new: Tree, data: ClientData, round: int, epochs: int) -> Tree:
        """Weights after up to `epochs` passes; they stop when the losses of the last batches have settled."""
        names = [k for k in A if k in self.ctx.net.trainable]
        n = len(data.train)
        order = torch.randperm(n, generator=self.ctx.rng("ala", round, data.client))
        drawn = order[: max(1, int(self.hp.share * n))]
        losses: list[float] = []
        for _ in range(epochs if names and n else 0):
            for part in torch.split(drawn, self.ctx.batch):
                theta = merged(old, new, A)
                leaves = [theta[k].requires_grad_() for k in names]
                loss = self.ctx.ce(theta, Batch(data.train.x[part], data.train.y[part]))
                gradients = torch.autograd.grad(loss, leaves)
                step = {k: g * (new[k] - old[k]) for k, g in zip(names, gradients, strict=True)}
                A = {**A, **{k: (A[k] - self.hp.eta * s).clamp(0, 1) for k, s in step.items()}}
            losses.append(float(loss.detach()))
            last = torch.tensor(losses[-self.hp.window :])
            if len(last) == self.hp.window and float(last.std(correction=0)) < self.hp.threshold:
                break
        return A

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        upload = Upload(T.drop(params, self.stays), {"weight": _mean(extras["A"])} if extras.get("A") else {})
        A = extras["A"] if "A" in extras else self._first_weights()
        return {"o": params, "A": A, "settled": "A" in extras}, upload

    def _first_weights(self) -> Tree:
        top = last_layers(self.ctx.net.layout, self.hp.layers)
        return {k: torch.full_like(v, self.hp.start) for k, v in self.ctx.w0.items() if k in top and not self.stays(k)}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return (state["o"], {}) if "o" in state else super().personal(state, download, data)


def merged(old: Tree, new: Tree, A: Tree) -> Tree:
    """New, and old + A (new - old) where there are weights; lerp gives both ends exactly."""
    return {**new, **{k: torch.lerp(old[k], new[k], a) for k, a in A.items()}}


def _mean(A: Tree) -> float:
    return float(T.flatten(A).mean())
