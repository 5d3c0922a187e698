"""FedAP, variant f-FedAP. Lu, Wang, Chen, Qin, Xu, Dimitriadis, Qin, IEEE Trans. Big Data 2022 (arXiv 2112.00734).

Clients whose batch-norm layers see inputs with similar means and deviations share more: client i receives a mixture of
the last models of all clients (absent or not) in which j weighs 1/distance and i itself mu, and keeps its own batch
norm. The common model on which the inputs are measured comes from `warm` rounds of FedBN (f-FedAP), not from public
data. After them comes an exchange round: all clients receive the common model and send their statistics once, without
training.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Moment, Phase, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.core.tree import Tree
from coterie.methods.fedbn import FedBN, FedBNSettings
from coterie.parts import model_bank as bank
from coterie.parts.batch_norm import input_moments
from coterie.parts.similarity import inverse_distances, with_self


class FedAPSettings(FedBNSettings):
    mu: float = Field(0.5, ge=0, le=1, description="weight of the client's own model in its mixture")
    warm: float = Field(0.5, ge=0, lt=1, description="fraction of the rounds that are FedBN, before the exchange")
    layers: Literal["all", "last"] = Field("all", description="batch-norm layers that are compared (last: d-FedAP)")


class FedAP(FedBN):
    Settings = FedAPSettings
    hp: FedAPSettings
    card = Card(
        "FedAP",
        "Lu et al., IEEE Trans. Big Data 2022, arXiv 2112.00734",
        2022,
        "M,S",
        personal="batch norm and a mixture of the others",
    )
    plans_ahead = True

    def _exchange(self) -> int:
        """Return the number of the exchange round; without warm rounds it is 0, the opening round."""
        warm = int(self.hp.warm * self.ctx.planned_rounds)
        return warm + 1 if warm else 0

    def _compared(self) -> dict[str, int]:
        """Batch-norm layers and their channels."""
        names = self.ctx.net.layout.of_kind("bn")[-1 if self.hp.layers == "last" else 0 :]
        return {name: self.ctx.w0[min(self.ctx.group(f"layer:{name}"))].numel() for name in names}

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model; uploads of the exchange hold means and deviations of the batch-norm layers' inputs instead."""
        channels = sum(self._compared().values())
        statistics = Schema({"x:stats": Entry((2, channels), kind="statistic")})
        if link == "down":
            return self.model_schema
        if now is None:
            return (self.model_schema | statistics).optional()
        return statistics if now.round == self._exchange() else self.model_schema

    def opening(self) -> bool:
        return self._exchange() == 0

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        return list(self.ctx.clients) if round == self._exchange() else super().sample(server, round, rng)

    def mixing(self, server: State) -> Tensor:
        """Return weights [clients, clients]; clients that sent no statistics are not mixed with others."""
        ids, stats = server["bank"]["ids"], server["stats"]
        empty = torch.zeros(2, sum(self._compared().values()), dtype=torch.float64)
        S = torch.stack([stats[i].double() if i in stats else empty for i in ids])  # [clients, 2, channels]
        parts = torch.split(S, list(self._compared().values()), 2)
        # the direct form gives exactly 0 for equal statistics, which the matrix form does not
        mode = "donot_use_mm_for_euclid_dist"
        d = torch.stack([torch.cdist(p.flatten(1), p.flatten(1), compute_mode=mode) for p in parts]).sum(0)
        have = torch.tensor([i in stats for i in ids]).double()
        return with_self(inverse_distances(d, 1e-14) * have[:, None] * have[None], self.hp.mu)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if "bank" not in server:
            return Download(shared=server["w"])
        known, V = bank.known(server["bank"], ids), server["bank"]["flat"]
        rows = self.mixing(server)[bank.rows(server["bank"], known)]
        models = bank.trees(rows.to(V) @ V, T.drop(self.ctx.w0, self.stays))
        new = T.unflatten(V.mean(0), T.drop(self.ctx.w0, self.stays)) if len(known) < len(ids) else {}
        return Download(each={**dict.fromkeys(ids, new), **dict(zip(known, models, strict=True))})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        if round != self._exchange():
            return start
        moments = input_moments(self.ctx.net, start.params, data.train.x, list(self._compared()))
        return start.adding(stats=torch.cat([torch.stack([m.mean, m.var.sqrt()]) for m in moments], 1).float())

    def phases(self, round: int) -> list[Phase]:
        return [] if round == self._exchange() else super().phases(round)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        if round == self._exchange():
            return state, Upload({"x:stats": trained.extras["stats"]})
        return super().end(state, trained, data, round)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == self._exchange():
            stats = {u.sender: u.tree["x:stats"] for u in uploads}
            return {"bank": bank.fill(server["w"], self.ctx.clients), "stats": stats}
        if "bank" not in server:
            return super().aggregate(server, uploads, round)
        return {**server, "bank": bank.put(server["bank"], {u.sender: u.tree for u in uploads})}
