"""FedPC. Liu, Wang, Liu, Ma, Journal on Communications 2025 (DOI 10.11959/j.issn.1000-436x.2025235).

Clients are grouped once, before training, by the class prototypes of the initial model on their data. They train a
shared extractor and a private classifier, with a pull of class means towards received prototypes; extractors and
prototypes are averaged inside a group (an edge), then mixed across groups by similarity of prototypes.
A group without participants keeps what it has; who missed round 0 and newcomers follow the largest group.
"""

from collections.abc import Sequence

from torch import Tensor

from coterie import tree as T
from coterie.method import Batch, ClientData, Download, Edge, Extras, Method, Payload, Phase, State, Tree, Upload
from coterie.methods.fedpc_settings import TRIAL, FedPCSettings
from coterie.parts import prototype_groups as G
from coterie.parts import prototype_messages as M
from coterie.parts.prototypes import Prototypes, prototype_loss


class FedPC(Method):
    Settings = FedPCSettings
    hp: FedPCSettings
    title, year, family, weighting = "FedPC", 2025, "C,P,S", "uniform"
    certainty = "P"
    paper = "Liu et al., Journal on Communications 2025, 10.11959/j.issn.1000-436x.2025235"
    personal_part, needs = "the head; the body of its group", ("head",)
    trial = TRIAL

    def check(self) -> None:
        self.hp.check(self.ctx)

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    def part(self, name: str) -> str:
        return "prototypes" if name.startswith("x:") else "head" if self.private(name) else "body"

    def payload(self, labels: int, round: int = 1) -> Payload:
        body, each = T.nbytes(T.drop(self.ctx.w0, self.stays)), 4 * self.ctx.net.width + 4
        return Payload(body + labels * (each + 4), body + self.ctx.classes * each)

    def payload_of(self, server: State, client: int, labels: int, round: int) -> Payload:
        absent, (up, down) = self.ctx.classes - G.classes_sent(server, client), self.payload(labels)
        return Payload(up, down - absent * (4 * self.ctx.net.width + 4))

    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        return self.mixed(*G.alone(T.drop(self.ctx.w0, self.stays), self.ctx.classes, self.ctx.net.width))

    def edges(self, server: State) -> dict[int, list[int]] | None:
        return G.by_group(server["groups"]) or None

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download(self.ctx.w0) if round == 0 else G.download(server, ids)

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        return {**M.bare(download), **state["own"]}, {}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        got = M.unpack(download, data.classes, self.ctx.net.width)
        return self.personal(state, download, data)[0], {"received": got}

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        ce, z = M.ce_and_features(self.ctx, params, batch, self.hp.feature)
        pull = prototype_loss(z, batch.y, extras["received"], *self.hp.pull, batch.weight) if self.hp.gamma else 0.0
        return self.hp.alpha * ce + self.hp.gamma * pull

    def phases(self, round: int) -> list[Phase]:
        warm = [Phase(super().loss, epochs=self.hp.warmup_epochs)] if self.hp.warmup_epochs else []
        return [Phase(self.loss)] if round > 0 else warm

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        own, counts = M.own_prototypes(self.ctx, params, data, self.hp.feature)
        if round == 0:
            return state, Upload(M.pack(own))  # a warm-up serves the clustering alone
        state, upload = super().end(state, params, extras, data, round)
        return state, Upload({**upload.tree, **M.pack(own, counts)})

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        trees, weights = [u.tree for u in uploads], self.weights(uploads)
        protos = M.group_mean(trees, self.ctx.classes, self.ctx.net.width, weights is not None)
        return edge.state, Upload({**T.mean([M.bare(t) for t in trees], weights), **protos})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        sets, _ = M.unpack_all([u.tree for u in uploads], self.ctx.classes, self.ctx.net.width)
        if round > 0:
            return self.mixed(*G.written(server, uploads, sets))
        labels = G.first_groups(sets, self.hp, self.ctx.seed)
        new = self.mixed(*G.seated(server, labels, [u.sender for u in uploads], self.ctx.clients, sets))
        return new if self.hp.init_protos == "clustering" else {**new, "mask": new["mask"] & False}

    def mixed(self, server: State, body: Tree, protos: Prototypes) -> State:
        return G.mixed(server, body, protos, G.inter_weights(protos, self.hp))

    def facts(self, server: State) -> State:
        sizes = [len(members) for members in (self.edges(server) or {}).values()]
        return {"J": len(server["rho"]), "sizes": sizes, "rho": server["rho"]}
