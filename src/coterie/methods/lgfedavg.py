"""LG-FedAvg. Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, arXiv 2001.01523, 2020.

The mirror of FedPer: representations (all but the last layers) stay on the client, the last layers are averaged.
The authors start from a model trained by FedAvg: `warm_rounds` does that inside the run (default none, so results are
not comparable with theirs); a client's first round after it brings the body of the warm model down once.
"""

from collections.abc import Sequence

from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, State
from coterie.core.method import Card, Download, Method, Model, Moment, Settings, Start, Trained, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Tree
from coterie.parts.layer_groups import last_layers


class LGFedAvgSettings(Settings):
    layers: int = Field(1, ge=0, description="how many of the last layers are global (a norm goes with its layer)")
    warm_rounds: int = Field(0, ge=0, description="rounds of FedAvg before the split")


class LGFedAvg(Method):
    Settings = LGFedAvgSettings
    hp: LGFedAvgSettings
    card = Card("LG-FedAvg", "Liang et al., arXiv 2001.01523, 2020", 2020, "S", personal="the body")
    weighting = "uniform"

    def private(self, name: str) -> bool:
        return name not in last_layers(self.ctx.net.layout, self.hp.layers)

    def _local(self, name: str) -> bool:
        """True if an entry stays on the client even in warm rounds, in which the whole model is shared."""
        return self.ctx.bn_stats == "local" and name in self.ctx.group("bn_stats")

    def _warm(self, round: int) -> bool:
        return round <= self.hp.warm_rounds

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The last layers; also the body in warm rounds, and once after them in the download."""
        if self.hp.warm_rounds == 0:
            return self.model_schema
        whole = T.drop(self.ctx.w0, self._local)
        if now is None:
            return self.model_schema | Schema(like(T.keep(whole, self.stays), optional=True))
        body_too = self._warm(now.round) or (link == "down" and now.client not in now.server["answered"])
        return Schema(like(whole)) if body_too else self.model_schema

    def setup(self) -> State:
        shared = self._local if self.hp.warm_rounds else self.stays
        return {"w": T.clone(T.drop(self.ctx.w0, shared)), "answered": []}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if self._warm(round):
            return Download(shared=server["w"])
        body = T.keep(server["w"], self.stays)  # empty without warm rounds
        return Download(T.drop(server["w"], self.stays), {i: body for i in ids if i not in server["answered"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        return Start({**state.get("own", {}), **download})  # a body in the download replaces the client's own

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload(T.drop(trained.params, self._local)) if self._warm(round) else upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        mean = T.mean([u.tree for u in uploads], self.weights(uploads))
        answered = server["answered"]  # clients that have answered since the warm rounds
        if not self._warm(round):
            answered = sorted({*answered, *(u.sender for u in uploads)})
        return {"w": {**server["w"], **mean}, "answered": answered}

    def global_model(self, server: State) -> Tree | None:
        return None if self.hp.warm_rounds and server["answered"] else super().global_model(server)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model({**state.get("own", {}), **download})
