"""FedPC. Liu, Wang, Liu, Ma, Journal on Communications 2025 (DOI 10.11959/j.issn.1000-436x.2025235).

Clients are grouped once, before training, by the class prototypes of the initial model on their data. They train a
shared extractor and a private classifier, with a pull of features towards received prototypes. Extractors and
prototypes are averaged inside a group (an edge), then mixed across groups by the similarity of prototypes.

- The pull (3) as printed, a sum of distances of class means, makes all features equal and cannot be trained. The
  smallest departure that can is FedProto's: the mean squared error of the samples, and no prototypes in the first
  round. `reading = text` is the loss as printed.
- Equations (5) to (8) are taken over the classes that groups have in common, and negative cosines count as 0.
- A group without participants keeps what it has. If no client answers round 0, all clients are one group, and the cloud
  does what its edge would do.
- A client that missed round 0 is asked for its prototypes when it is first sampled and joins the nearest group; a
  newcomer chooses the nearest group itself. The paper leaves clients that come and go to future work.
- The paper's end at a target accuracy is the run's setting `stop_at`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.method import (
    Batch,
    Card,
    ClientData,
    ClientId,
    Download,
    EdgeId,
    Extras,
    Model,
    Moment,
    Phase,
    Settings,
    Start,
    State,
    Trained,
    Tree,
    Upload,
    cross_entropy,
    replace,
)
from coterie.core.rng import key
from coterie.core.schema import Entry, Link, Schema, like
from coterie.errors import CoterieError
from coterie.methods.fedpc import prototypes as P
from coterie.methods.fedpc.clustering import group_centres, nearest_group, prototype_groups, random_groups
from coterie.methods.fedpc.mixing import group_means, group_weights, masked_mix
from coterie.methods.fedpc.settings import FedPCSettings
from coterie.parts.prototypes import Prototypes, prototype_loss
from coterie.parts.similarity import mix

# for a client without a group: bodies of all groups, their prototypes and the centres of the clustering
BODIES, SETS, HELD, CENTRES, PRESENT, LARGEST = "all", "x:sets", "x:held", "x:centres", "x:present", "x:largest"


class FedPC(EdgeMethod):
    """Algorithm 1: groups by prototypes, aggregated inside and across groups.

    The server's state holds `groups`, client to group, empty until round 0 is answered; `largest`, the largest group;
    for each group j its `body` [j, ...] and its prototypes, `value` [j, classes, d] and `mask` [j, classes]; `rho`
    [j, j], the weights by which they were mixed last; `centres` [j, classes, d] and `present` [j, classes], the mean
    prototypes of round 0.
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

    def departures(self) -> list[str]:
        hp = self.hp
        other = hp.gamma and hp.reading == "paper" and (hp.proto_loss, hp.proto_reduce) == ("mse", "mean")
        said = (
            "the pull is a squared error, because the printed loss (3) makes all features equal (reading = text has it)"
        )
        return [said] if other else []

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        """Return one group with the initial body and no prototypes: Algorithm 1, line 1."""
        body = T.stack([T.drop(self.ctx.w0, self.stays)])
        classes, width = self.ctx.classes, self.ctx.net.width
        nothing = Prototypes(torch.zeros(1, classes, width), torch.zeros(1, classes, dtype=torch.bool))
        return self.mixed({"groups": {}, "largest": 0}, body, nothing)

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        """Return the groups, each with an edge of its own: Algorithm 1, line 8."""
        groups = server["groups"]
        return {j: sorted(i for i in groups if groups[i] == j) for j in sorted(set(groups.values()))} or None

    def asks(self, server: State, client: ClientId, round: int) -> bool:
        """True if a client is only asked for its prototypes: in round 0, and later if it has no group yet."""
        return round == 0 or (bool(server["groups"]) and client not in server["groups"])

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Send the whole initial model to clients that are asked (Algorithm 1, line 3), else each group's results."""
        if round == 0:
            return Download(self.ctx.w0)
        sets = map(Prototypes, server["value"], server["mask"])
        to = {j: {k: v[j] for k, v in server["body"].items()} | P.to_payload(own) for j, own in enumerate(sets)}
        alone = [i for i in ids if i not in server["groups"]]
        return Download(edge=to, each={i: self.ctx.w0 if self.asks(server, i, round) else to[0] for i in alone})

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Send a client without a group the results of all groups, of which it uses the nearest."""
        sent = self.down(server, ids, round)
        if not server["groups"]:
            return sent
        largest = torch.tensor([server["largest"]], dtype=torch.int32)
        centres = server.get("centres", server["value"]), server.get("present", server["mask"])  # not in version 0.1
        every = dict(zip((SETS, HELD, CENTRES, PRESENT), (server["value"], server["mask"], *centres), strict=True))
        every |= {LARGEST: largest, **T.tag(BODIES, server["body"])}
        return replace(sent, each=dict.fromkeys(sent.each, every))

    # ---- client ------------------------------------------------------------------------------------------------------
    def received(self, download: Tree, data: ClientData) -> tuple[Tree, Prototypes]:
        """Return the body and the prototypes of the client's group; without a group those of the nearest one."""
        if CENTRES not in download:
            return T.untagged(download), P.from_payload(download, data.classes, self.ctx.net.width)
        j = int(download[LARGEST])
        if len(data.train):
            own, _ = P.own_prototypes(self.ctx, self.ctx.w0, data, self.hp.feature)
            j = nearest_group(own, Prototypes(download[CENTRES], download[PRESENT]), self.hp.missing)
        return T.row(T.tagged(BODIES, download), j), Prototypes(download[SETS][j], download[HELD][j])

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Return the body of the client's group with its own classifier: Algorithm 1, line 20."""
        return Model({**self.received(download, data)[0], **state["own"]})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        body, received = self.received(download, data)
        asked = any(map(self.private, download))  # only who is asked receives a classifier
        extras = {"received": received, "asked": asked}
        return Start({**body, **state["own"]}, extras, train=round == 0 or not asked)

    def phases(self, round: int) -> list[Phase]:
        if round > 0:
            return [Phase(self.loss)]
        return [Phase(super().loss, epochs=self.hp.warmup_epochs)] if self.hp.warmup_epochs else []

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return alpha * L_cc + gamma * L_p: equations (3) and (4), Algorithm 1, line 10."""
        hp = self.hp
        logits, z = P.logits_and_features(self.ctx, params, batch.x, hp.feature)
        loss = hp.alpha * cross_entropy(logits, batch)
        if not hp.gamma:
            return loss
        kind, reduce, repulsion = hp.proto_loss, hp.proto_reduce, hp.proto_repulsion
        return loss + hp.gamma * prototype_loss(z, batch.y, extras["received"], kind, reduce, repulsion, batch.weight)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the client's prototypes, equation (2) and Algorithm 1, line 4; after training also its extractor."""
        own, counts = P.own_prototypes(self.ctx, trained.params, data, self.hp.feature)
        if trained.extras["asked"]:
            return state, Upload(P.to_payload(own))  # a warm-up serves the clustering alone
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, **P.to_payload(own, counts)})

    # ---- edge: inside a group ----------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        return edge.state, Upload(self._mean(uploads))

    def _mean(self, uploads: Sequence[Upload]) -> Tree:
        """Return the mean body and the mean prototypes of a group: Algorithm 1, lines 13 to 14."""
        trees, weights = [u.tree for u in uploads], self.weights(uploads)
        prototypes = P.group_mean(trees, self.ctx.classes, self.ctx.net.width, by_counts=weights is not None)
        return {**T.mean([T.untagged(t) for t in trees], weights), **prototypes}

    # ---- cloud, up: across groups ------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if round == 0:
            return self.grouped(server, uploads)
        if not server["groups"]:
            uploads = [Upload(self._mean(uploads), sender=0)]
        server = self.joined(server, [u for u in uploads if P.COUNTS not in u.tree])
        if not (uploads := [u for u in uploads if P.COUNTS in u.tree]):
            return server

        at = torch.tensor([u.sender for u in uploads])  # the other groups keep what they have
        sent = T.stack([T.untagged(u.tree) for u in uploads])
        sets = self._sets(uploads)
        body = {k: v.index_copy(0, at, sent[k]) for k, v in server["body"].items()}
        value, mask = (server[k].index_copy(0, at, new) for k, new in sets._asdict().items())
        return self.mixed(server, body, Prototypes(value, mask))

    def _sets(self, uploads: Sequence[Upload]) -> Prototypes:
        return P.unpack_all([u.tree for u in uploads], self.ctx.classes, self.ctx.net.width)

    def grouped(self, server: State, uploads: Sequence[Upload]) -> State:
        """Return the groups of the clients that answered round 0, with the initial body: Algorithm 1, line 6."""
        hp, seed = self.hp, self.ctx.seed
        sets = self._sets(uploads)
        J = hp.J and min(hp.J, len(uploads))
        pca = None if hp.pca == "none" else hp.pca
        labels = prototype_groups(sets, J, key(seed, "groups"), hp.J_max, pca, hp.missing)
        if hp.grouping == "random":
            labels = random_groups(labels, sets.value, seed)

        count, largest = int(labels.max()) + 1, int(labels.bincount().argmax())
        groups = dict(zip([u.sender for u in uploads], labels.tolist(), strict=True))
        centres, present = group_centres(sets, labels, count, hp.missing)
        first = {"groups": groups, "largest": largest, "centres": centres, "present": present}
        body = T.stack([T.row(server["body"], 0)] * count)
        new = self.mixed(first, body, group_means(sets, labels, count))
        return new if hp.init_protos == "clustering" else {**new, "mask": torch.zeros_like(new["mask"])}

    def joined(self, server: State, uploads: Sequence[Upload]) -> State:
        """Put clients that send their prototypes after round 0 into the nearest groups."""
        if not uploads:
            return server
        centres = Prototypes(server["centres"], server["present"])
        own = map(Prototypes, *self._sets(uploads))
        new = {u.sender: nearest_group(p, centres, self.hp.missing) for u, p in zip(uploads, own, strict=True)}
        return {**server, "groups": {**server["groups"], **new}}

    def mixed(self, server: State, body: Tree, sets: Prototypes) -> State:
        """Mix bodies and prototypes [j, ...] by rho: equations (7) and (8), Algorithm 1, lines 17 to 18."""
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

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self._up(link, now) if link in ("up", "edge_up") else self._down(link, now)

    def _up(self, link: Link, now: Moment | None) -> Schema:
        """Declare prototypes; of clients that are not only asked also their counts and the body."""
        lengths = {"labels": (1, self.ctx.classes)}
        first = Schema(P.entries("labels", self.ctx), lengths)
        more = Schema({**self._body(), P.COUNTS: P.count_entry("labels")}, lengths)
        if now is None and link == "up":
            return more.optional() | first
        return first if now is not None and link == "up" and self.asks(*_where(now)) else more | first

    def _down(self, link: Link, now: Moment | None) -> Schema:
        """Declare the whole model for clients that are asked, else the body and prototypes of the client's group."""
        head = like(T.keep(self.ctx.w0, self.private), part="head")
        whole = Schema({**like(T.drop(self.ctx.w0, self.private), part="body"), **head})
        if now is None:
            rows = Schema(P.entries("labels", self.ctx), {"labels": (0, self.ctx.classes)})
            return whole.optional() | rows.optional() | self._all_groups().optional() | Schema(self._body()).optional()
        if link == "down" and self.asks(*_where(now)):
            return whole
        server = now.server
        j = now.client if link == "edge_down" else server["groups"].get(now.client, 0)
        return Schema({**self._body(), **P.entries(int(server["mask"][j].sum()), self.ctx)})

    def _body(self) -> dict[str, Entry]:
        return like(T.drop(self.ctx.w0, self.stays), part="body")

    def _all_groups(self) -> Schema:
        """Declare what a client without a group uses a model by."""
        shape = ("groups", self.ctx.classes)
        sets = dict.fromkeys((SETS, CENTRES), Entry((*shape, self.ctx.net.width), kind="prototype", part="prototypes"))
        masks = dict.fromkeys((HELD, PRESENT), Entry(shape, torch.bool, "label information", "prototypes"))
        models = like(T.tag(BODIES, T.drop(self.ctx.w0, self.stays)), part="body")
        bodies = {k: replace(e, shape=("groups", *e.shape)) for k, e in models.items()}
        largest = Entry((1,), torch.int32, "control", "prototypes", 0, len(self.ctx.clients))
        return Schema({**bodies, **sets, **masks, LARGEST: largest}, {"groups": (1, len(self.ctx.clients))})


def _where(now: Moment) -> tuple[State, ClientId, int]:
    return now.server, now.client, now.round
