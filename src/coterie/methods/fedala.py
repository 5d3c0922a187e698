"""FedALA. Zhang, Hua, Wang, Song, Xue, Ma, Guan, AAAI 2023 (arXiv 2212.01197).

Before training a client merges the received model w into its last own one o: lower layers become w, the top p layers
o + A (w - o) with elementwise weights A in [0, 1] that are learned on a part of its data with the model held fixed.
The first time A is learned until the losses settle, later for one epoch. Batch norm is not updated while A is learned.
The model after local training is scored; a client that has never trained is scored with the received model.
Two departures from the authors' code have settings that undo them. The part of the data is a random subset, as the
paper says, not a random window of the data in their order (`draw = window`). Only participants receive the model and
merge it, so that traffic and work are those of FedAvg; the authors' server sends it to all clients in every round, and
all merge it and are scored with the result (`merge = everybody`). Learning A stops after `max_epochs`; the authors'
code has no such limit.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.parts.layer_groups import last_layers

REST = "x:rest"  # entry that tells a client to merge without training


class FedALASettings(Settings):
    layers: int = Field(1, ge=0, description="p: how many of the last layers are merged by weights")
    share: float = Field(0.8, gt=0, le=1, description="fraction of the training part on which the weights are learned")
    eta: float = Field(1.0, ge=0, description="rate at which the weights are learned")
    start: float = Field(1.0, ge=0, le=1, description="first value of the weights; 1: the received model")
    threshold: float = Field(
        0.1, ge=0, description="settled when the standard deviation of the last losses is below this"
    )
    window: int = Field(10, ge=1, description="number of last losses that are compared, once there are more")
    max_epochs: int = Field(100, ge=1, description="maximum epochs of learning the weights the first time")
    draw: Literal["subset", "window"] = Field(
        "subset", description="the fraction of data: any samples, or a run of them"
    )
    merge: Literal["participants", "everybody"] = Field(
        "participants", description="clients that receive the model and merge it in a round"
    )


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

    # ---- with merge = everybody ----------------------------------------------------------------------------------
    def _trains(self, server: State, round: int) -> list[ClientId]:
        """Return the participants that train."""
        return super().sample(server, round, self.ctx.rng("sample", round))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model travels both ways; a client that only merges gets a flag and sends nothing."""
        if self.hp.merge == "participants":
            return self.model_schema
        rest = Schema({REST: Entry((), torch.uint8, "control", low=1, high=1, optional=now is None)})
        if now is None:
            return self.model_schema | rest if link == "down" else self.model_schema.optional()
        if now.client in self._trains(now.server, now.round):
            return self.model_schema
        return self.model_schema | rest if link == "down" else Schema({})

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        return list(self.ctx.clients) if self.hp.merge == "everybody" else super().sample(server, round, rng)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if self.hp.merge == "participants":
            return super().down(server, ids, round)
        trains, rest = self._trains(server, round), {REST: torch.ones((), dtype=torch.uint8)}
        return Download(server["w"], {i: rest for i in ids if i not in trains})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        trained = [u for u in uploads if u.tree]
        return super().aggregate(server, trained, round) if trained else server

    # ---- client --------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        old, train = state.get("o"), REST not in download
        received = {**(state.get("own", {}) if old is None else old), **T.drop(download, lambda k: k == REST)}
        if old is None:  # the client has no model yet, so there is nothing to merge
            return Start(received, {"sends": train}, train)
        A = self.learned(state["A"], old, received, data, round, self.hp.max_epochs if not state["settled"] else 1)
        return Start(merged(old, received, A), {"A": A, "sends": train}, train)

    def learned(self, A: Tree, old: Tree, new: Tree, data: ClientData, round: int, epochs: int) -> Tree:
        """Return the weights after at most `epochs` passes; stop when the losses of the last batches have settled."""
        names = [k for k in A if k in self.ctx.net.trainable]
        n = len(data.train)
        rng, size = self.ctx.rng("ala", round, data.client), max(1, int(self.hp.share * n))
        if self.hp.draw == "window" and n:
            first = int(torch.randint(n - size + 1, (), generator=rng))
            drawn = torch.arange(first, first + size)
        else:
            drawn = torch.randperm(n, generator=rng)[:size]
        parts, losses = torch.split(drawn.to(self.ctx.device), self.ctx.batch), list[float]()
        head_only = self.ctx.net.layout.head is not None and A.keys() <= set(self.ctx.net.layout.groups["head"])
        gap = {k: new[k] - old[k] for k in names}
        entering: dict[int, Tensor] = {}  # inputs of the head by part of the data; they do not depend on A
        for _ in range(epochs if names and n else 0):
            for i, part in enumerate(parts):
                theta = merged(old, new, A)
                leaves = [theta[k].requires_grad_() for k in names]
                x, y = data.train.x, data.train.y[part]
                if head_only:
                    if i not in entering:
                        with torch.no_grad():
                            entering[i] = self.ctx.features(new, x[part])
                    loss = self.ctx.loss_of(self.ctx.logits(theta, entering[i]), Batch(entering[i], y))
                else:
                    loss = self.ctx.loss(theta, Batch(x[part], y))
                gradients = torch.autograd.grad(loss, leaves)
                A = dict(A)
                for k, g in zip(names, gradients, strict=True):
                    A[k] = (A[k] - self.hp.eta * (g * gap[k])).clamp_(0, 1)
            losses.append(float(loss.detach()))
            last = torch.tensor(losses[-self.hp.window :])
            if len(losses) > self.hp.window and float(last.std(correction=0)) < self.hp.threshold:
                break
        return A

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        params, extras = trained.params, trained.extras
        sent = T.drop(params, self.stays) if extras["sends"] else {}
        A = extras["A"] if "A" in extras else self._first_weights()
        new = {"o": params, "A": A, "settled": "A" in extras, "round": round}
        return new, Upload(sent, {"weight": _mean(extras["A"])} if extras.get("A") else {})

    def _first_weights(self) -> Tree:
        top = last_layers(self.ctx.net.layout, self.hp.layers)
        return {k: torch.full_like(v, self.hp.start) for k, v in self.ctx.w0.items() if k in top and not self.stays(k)}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        if self.hp.merge == "everybody" and "o" in state:
            return Model(self.begin(state, download, data, state["round"] + 1).params)
        received = T.drop(download, lambda k: k == REST)
        return Model(state["o"]) if "o" in state else super().personal(state, received, data)


def merged(old: Tree, new: Tree, A: Tree) -> Tree:
    """Return `new`, with old + A (new - old) where there are weights; lerp gives both ends exactly."""
    return {**new, **{k: torch.lerp(old[k], new[k], a) for k, a in A.items()}}


def _mean(A: Tree) -> float:
    return float(T.flatten(A).mean())
