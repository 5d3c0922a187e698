"""FedGH. Yi, Wang, Liu, Shi, Yu, ACM MM 2023 (arXiv 2303.13137).

Bodies stay on the clients and may differ; clients send the mean feature of each of their classes, and the server trains
one head on these pairs and sends it to all participants. A client replaces its head by that one and trains body and
head. The client's body with the received head is scored, before local training; the authors report `trained`.
The server trains its own head (in the authors' script the optimiser seems to hold a different network). Class means are
means over samples, not over batch means.
"""

from collections.abc import Sequence

import torch
from pydantic import Field

from coterie.core.context import ClientData, State
from coterie.core.method import Card, Method, Moment, Settings, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, class_ids
from coterie.parts.linear_heads import heads_of, heads_tree, train_heads
from coterie.parts.prototypes import collect


class FedGHSettings(Settings):
    server_lr: float = Field(0.01, ge=0, description="rate of the server's training of the head")
    server_epochs: int = Field(1, ge=0, description="passes of the server over the received pairs")
    server_batch: int | None = Field(None, ge=0, description="pairs per step; empty: the run's batch; 0: all")


class FedGH(Method):
    Settings = FedGHSettings
    hp: FedGHSettings
    card = Card("FedGH", "Yi et al., ACM MM 2023, arXiv 2303.13137", 2023, "P,S", personal="the body")
    needs = ("head", "classes")
    weighting = "uniform"  # every pair counts alike
    agree = "head"

    def private(self, name: str) -> bool:
        return name in self.ctx.group("body")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Uploads hold the means of the client's own classes, downloads the head."""
        if link == "down":
            return self.model_schema
        entries = {
            "x:means": Entry(("labels", self.ctx.net.width), kind="prototype", part="prototypes"),
            "x:labels": class_ids("labels", self.ctx.classes, "prototypes"),
        }
        return Schema(entries, {"labels": (0, self.ctx.classes)})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, _ = super().end(state, trained, data, round)
        (value, mask), _ = collect(
            lambda x: self.ctx.features(trained.params, x), data.train.x, data.train.y, data.classes
        )
        return state, Upload({"x:means": value[mask], "x:labels": mask.nonzero()[:, 0].int()})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Train the head by SGD on the received pairs, in an order drawn for the round."""
        names = self.ctx.net.head_names
        z = torch.cat([u.tree["x:means"] for u in uploads])
        y = torch.cat([u.tree["x:labels"] for u in uploads]).long()
        order = torch.randperm(len(y), generator=self.ctx.rng("server", round))
        z, y = z[None, order], y[None, order]
        head = heads_of(names, {k: v[None] for k, v in server["w"].items()})
        batch = self.ctx.batch if self.hp.server_batch is None else self.hp.server_batch
        new = train_heads(head, z, y, torch.ones_like(z[..., 0]), self.hp.server_lr, self.hp.server_epochs, batch)
        return {"w": {k: v[0] for k, v in heads_tree(names, new).items()}}
