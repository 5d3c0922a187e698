"""LG-FedAvg. Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, arXiv 2001.01523, 2020.

The mirror of FedPer: representations (all but the last layers) stay on the client, the last layers are averaged.
The authors start from a model trained by FedAvg: `warm_rounds` does that inside the run (default none, so results are
not comparable with theirs); a client's first round after it brings the body of the warm model down once.
"""

from collections.abc import Sequence

from pydantic import Field

from coterie import tree as T
from coterie.method import ClientData, ClientId, Download, Extras, Method, Payload, Settings, State, Tree, Upload
from coterie.parts.groups import last_layers


class LGFedAvgSettings(Settings):
    layers: int = Field(1, ge=0, description="how many of the last layers are global (a norm goes with its layer)")
    warm_rounds: int = Field(0, ge=0, description="rounds of FedAvg before the split")


class LGFedAvg(Method):
    Settings = LGFedAvgSettings
    hp: LGFedAvgSettings
    title = "LG-FedAvg"
    paper = "Liang et al., arXiv 2001.01523, 2020"
    year = 2020
    family = "S"
    personal_part = "the body"
    weighting = "uniform"

    def private(self, name: str) -> bool:
        return name not in last_layers(self.ctx.net.layout, self.hp.layers)

    def _local(self, name: str) -> bool:
        """Stays even while everything is shared."""
        return self.ctx.bn_stats == "local" and name in self.ctx.group("bn_stats")

    def _warm(self, round: int) -> bool:
        return round <= self.hp.warm_rounds

    def _bytes(self, round: int, handed_over: bool) -> Payload:
        whole, part = (T.nbytes(T.drop(self.ctx.w0, names)) for names in (self._local, self.stays))
        warm = self._warm(round)
        return Payload(whole if warm else part, part if handed_over and not warm else whole)

    def payload(self, labels: int, round: int = 1) -> Payload:
        return self._bytes(round, round != self.hp.warm_rounds + 1 or self.hp.warm_rounds == 0)

    def payload_of(self, server: State, client: ClientId, labels: int, round: int) -> Payload:
        return self._bytes(round, client in server["met"] or self.hp.warm_rounds == 0)

    def setup(self) -> State:
        shared = self._local if self.hp.warm_rounds else self.stays
        return {"w": T.clone(T.drop(self.ctx.w0, shared)), "met": []}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if self._warm(round):
            return Download(shared=server["w"])
        body = T.keep(server["w"], self.stays)  # empty without warm rounds
        return Download(T.drop(server["w"], self.stays), {i: body for i in ids if i not in server["met"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        return {**state.get("own", {}), **download}, {}  # a body that was sent replaces the client's

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, params, extras, data, round)
        return state, Upload(T.drop(params, self._local)) if self._warm(round) else upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        mean = T.mean([u.tree for u in uploads], self.weights(uploads))
        met = server["met"] if self._warm(round) else sorted({*server["met"], *(u.sender for u in uploads)})
        return {"w": {**server["w"], **mean}, "met": met}

    def global_model(self, server: State) -> Tree | None:
        return None if self.hp.warm_rounds and server["met"] else super().global_model(server)

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return {**state.get("own", {}), **download}, {}
