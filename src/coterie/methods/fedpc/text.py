"""FedPC. Liu, Wang, Liu, Ma, Journal on Communications 2025 (DOI 10.11959/j.issn.1000-436x.2025235).

Clients are grouped once, before training, by the class prototypes of the initial model on their data. They train a
shared extractor and a private classifier, with a pull of class means towards received prototypes. Extractors and
prototypes are averaged inside a group (an edge), then mixed across groups by the similarity of prototypes.

- The printed distance (3) is summed over the classes of a batch; `reading = code` has the mean squared error of the
  framework that the paper was evaluated in, and no prototypes in the first round.
- Equations (5) to (8) are taken over the classes that groups have in common, and negative cosines count as 0.
- A group without participants keeps what it has. Clients that missed round 0 and newcomers follow the largest group.
- If no client answers round 0, all clients are one group, and the cloud does what its edge would do.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, EdgeId, Extras, State, cross_entropy
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.method import Card, Download, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.rng import key
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.methods.fedpc import prototypes as P
from coterie.methods.fedpc.clustering import prototype_groups, random_groups
from coterie.methods.fedpc.mixing import group_means, group_weights, masked_mix
from coterie.methods.fedpc.settings import FedPCSettings
from coterie.parts.prototypes import Prototypes, prototype_loss
from coterie.parts.similarity import mix


class FedPC(EdgeMethod):
    """Algorithm 1: groups by prototypes, aggregated inside and across groups.

    The server's state holds `groups`, client to group, empty until round 0 is answered; `largest`, the largest group;
    for each group j its `body` [j, ...] and its prototypes, `value` [j, classes, d] and `mask` [j, classes]; `rho`
    [j, j], the weights by which they were mixed last.
    """

    Settings: ClassVar[type[Settings]] = FedPCSettings
    hp: FedPCSettings
    weighting = "uniform"
    needs = ("head", "classes")
    controls = ("fedpc-no-proto", "fedpc-random")
    card = Card(
        title="FedPC",
        paper="Liu et al., Journal on Communications 2025, 10.11959/j.issn.1000-436x.2025235",
        year=2025,
        family="C,P,S",
        personal="the head; the body of its group",
        certainty="P",
    )

    def check(self) -> None:
        groups, n = self.hp.J, len(self.ctx.clients)
        if groups is not None and groups > n:
            raise CoterieError(f"J = {groups} groups cannot be made of {n} clients; set J to at most {n}")
        if self.hp.feature == "pre_relu":
            P.pre_relu_layer(self.ctx)

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self._up(link, now) if link in ("up", "edge_up") else self._down(link, now)

    def _up(self, link: Link, now: Moment | None) -> Schema:
        """Prototypes; after round 0 with their counts and the body."""
        lengths = {"labels": (1, self.ctx.classes)}
        first = Schema(P.entries("labels", self.ctx), lengths)
        more = Schema({**self._body(), P.COUNTS: P.count_entry("labels")}, lengths)
        if now is None and link == "up":
            return more.optional() | first
        return first if now is not None and now.round == 0 else more | first

    def _down(self, link: Link, now: Moment | None) -> Schema:
        """In round 0 the whole model; then the body of the client's group and its prototypes."""
        whole = Schema(
            {
                **like(T.drop(self.ctx.w0, self.private), part="body"),
                **like(T.keep(self.ctx.w0, self.private), part="head"),
            }
        )
        if now is None:
            rows = Schema(P.entries("labels", self.ctx), {"labels": (0, self.ctx.classes)})
            return whole.optional() | rows.optional() | Schema(self._body())
        if now.round == 0:
            return whole
        server = now.server
        j = now.client if link == "edge_down" else server["groups"].get(now.client, server["largest"])
        return Schema({**self._body(), **P.entries(int(server["mask"][j].sum()), self.ctx)})

    def _body(self) -> dict[str, Entry]:
        return like(T.drop(self.ctx.w0, self.stays), part="body")

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        """One group with the initial body and no prototypes."""
        body = T.stack([T.drop(self.ctx.w0, self.stays)])
        classes, width = self.ctx.classes, self.ctx.net.width
        nothing = Prototypes(torch.zeros(1, classes, width), torch.zeros(1, classes, dtype=torch.bool))
        return self.mixed({"groups": {}, "largest": 0}, body, nothing)

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        groups = server["groups"]
        return {j: sorted(i for i in groups if groups[i] == j) for j in sorted(set(groups.values()))} or None

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if round == 0:
            return Download(self.ctx.w0)
        sets = map(Prototypes, server["value"], server["mask"])
        to = {j: {k: v[j] for k, v in server["body"].items()} | P.pack(own) for j, own in enumerate(sets)}
        return Download(edge=to, each={i: to[server["largest"]] for i in ids if i not in server["groups"]})

    # ---- client ------------------------------------------------------------------------------------------------------
    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model({**T.untagged(download), **state["own"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params = {**T.untagged(download), **state["own"]}
        return Start(params, {"received": P.unpack(download, data.classes, self.ctx.net.width)})

    def phases(self, round: int) -> list[Phase]:
        if round > 0:
            return [Phase(self.loss)]
        return [Phase(super().loss, epochs=self.hp.warmup_epochs)] if self.hp.warmup_epochs else []

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return alpha * L_cc + gamma * L_p, equations (4) and (3)."""
        hp = self.hp
        logits, z = P.logits_and_features(self.ctx, params, batch.x, hp.feature)
        loss = hp.alpha * cross_entropy(logits, batch)
        if not hp.gamma:
            return loss
        kind, reduce, repulsion = hp.proto_loss, hp.proto_reduce, hp.proto_repulsion
        return loss + hp.gamma * prototype_loss(z, batch.y, extras["received"], kind, reduce, repulsion, batch.weight)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        own, counts = P.own_prototypes(self.ctx, trained.params, data, self.hp.feature)
        if round == 0:
            return state, Upload(P.pack(own))  # a warm-up serves the clustering alone
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, **P.pack(own, counts)})

    # ---- edge: inside a group ----------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        return edge.state, Upload(self._mean(uploads))

    def _mean(self, uploads: Sequence[Upload]) -> Tree:
        """Return the mean body and the mean prototypes of a group: IntraAgg of Algorithm 1."""
        trees, weights = [u.tree for u in uploads], self.weights(uploads)
        prototypes = P.group_mean(trees, self.ctx.classes, self.ctx.net.width, by_counts=weights is not None)
        return {**T.mean([T.untagged(t) for t in trees], weights), **prototypes}

    # ---- cloud, up: across groups ------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return self.grouped(server, uploads)
        if not server["groups"]:
            uploads = [Upload(self._mean(uploads), sender=0)]

        at = torch.tensor([u.sender for u in uploads])  # the others keep what they have
        sent = T.stack([T.untagged(u.tree) for u in uploads])
        sets = P.unpack_all([u.tree for u in uploads], self.ctx.classes, self.ctx.net.width)
        body = {k: v.index_copy(0, at, sent[k]) for k, v in server["body"].items()}
        value, mask = (server[k].index_copy(0, at, new) for k, new in sets._asdict().items())
        return self.mixed(server, body, Prototypes(value, mask))

    def grouped(self, server: State, uploads: Sequence[Upload]) -> State:
        """Return the groups of round 0, all with the initial body; clients that did not answer are in the largest."""
        hp, seed = self.hp, self.ctx.seed
        sets = P.unpack_all([u.tree for u in uploads], self.ctx.classes, self.ctx.net.width)
        J = hp.J and min(hp.J, len(uploads))
        pca = None if hp.pca == "none" else hp.pca
        labels = prototype_groups(sets, J, key(seed, "groups"), hp.J_max, pca, hp.missing)
        if hp.grouping == "random":
            labels = random_groups(labels, sets.value, seed)

        count, largest = int(labels.max()) + 1, int(labels.bincount().argmax())
        answered = dict(zip([u.sender for u in uploads], labels.tolist(), strict=True))
        groups = {**dict.fromkeys(self.ctx.clients, largest), **answered}
        body = T.stack([T.row(server["body"], 0)] * count)
        new = self.mixed({"groups": groups, "largest": largest}, body, group_means(sets, labels, count))
        return new if hp.init_protos == "clustering" else {**new, "mask": torch.zeros_like(new["mask"])}

    def mixed(self, server: State, body: Tree, sets: Prototypes) -> State:
        """Mix bodies [j, ...] and prototypes [j, classes, d] by rho, all at once: equations (7) and (8)."""
        rho = self.group_weights(sets)
        new = masked_mix(rho, sets)
        return {**server, "rho": rho, "body": mix(rho, body), "value": new.value, "mask": new.mask}

    def group_weights(self, sets: Prototypes) -> Tensor:
        """Return rho [j, j]: by similarity, equations (5) and (6), or 1/J everywhere, or the identity."""
        J = len(sets.mask)
        if self.hp.inter == "adaptive":
            return group_weights(sets, self.hp.sim_map)
        if self.hp.inter == "mean":
            return torch.full((J, J), 1 / J, dtype=torch.float64)
        return torch.eye(J).double()

    def facts(self, server: State) -> dict[str, Any]:
        sizes = [len(members) for members in (self.edges(server) or {}).values()]
        return {"J": len(server["rho"]), "sizes": sizes, "rho": server["rho"]}
