"""FedPC. Liu, Wang, Liu, Ma, Journal on Communications 2025 (DOI 10.11959/j.issn.1000-436x.2025235).

Clients are grouped once, before training, by the class prototypes of the initial model on their data. They train a
shared extractor and a private classifier, with a pull of features towards received prototypes. Extractors and
prototypes are averaged inside a group (an edge), then mixed across groups by the similarity of prototypes.

- The pull (3) as printed, a sum of distances of class means, makes all features equal and cannot be trained. The
  smallest departure that can is FedProto's: the mean squared error of the samples, and no prototypes in the first
  round. `reading = text` is the loss as printed.
- The cosine (5) of two groups is that of their flattened prototypes of common classes, and a negative one counts as 0
  in (6). The mixture (7) of a class is over the groups that hold it.
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
    replace,
)
from coterie.core.rng import key
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.states import state
from coterie.errors import CoterieError
from coterie.methods.fedpc import prototypes as P
from coterie.methods.fedpc.clustering import group_centres, nearest_group, prototype_groups, random_groups
from coterie.methods.fedpc.mixing import group_means, group_weights, masked_mix
from coterie.methods.fedpc.settings import FedPCSettings
from coterie.parts.prototypes import Prototypes, prototype_loss
from coterie.parts.similarity import mix

_WHY = "because the printed loss (3) makes all features equal (reading = text has it)"

# for a client without a group: bodies of all groups, their prototypes and the centres of the clustering
BODIES, SETS, HELD, CENTRES, PRESENT, LARGEST = "all", "x:sets", "x:held", "x:centres", "x:present", "x:largest"


@state
class FedPCServer:
    """State of the server; one group without clients until round 0 is answered."""

    groups: dict[ClientId, EdgeId]  # group of each client that has one
    body: Tree  # [groups, ...]
    value: Tensor  # [groups, classes, d], prototypes
    mask: Tensor  # [groups, classes], classes with a prototype
    rho: Tensor  # [groups, groups], weights of the last mixture
    largest: int = 0  # largest group of round 0
    centres: Tensor | None = None  # [groups, classes, d], mean prototypes of round 0; None in files of version 0.1
    present: Tensor | None = None  # [groups, classes], classes of `centres`

    @property
    def sets(self) -> Prototypes:
        return Prototypes(self.value, self.mask)

    @property
    def first_sets(self) -> Prototypes:
        """The prototypes that clients without a group are compared with."""
        return self.sets if self.centres is None or self.present is None else Prototypes(self.centres, self.present)


class FedPC(EdgeMethod):
    """Algorithm 1: groups by prototypes, aggregated inside and across groups."""

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
        if not self._body():
            raise CoterieError("FedPC needs a model with layers before its head, which clients can share")
        if self.hp.feature == "pre_relu":
            P.pre_relu_layer(self.ctx)

    def departures(self) -> list[str]:
        hp = self.hp
        other = hp.gamma and hp.reading == "paper" and (hp.proto_loss, hp.proto_reduce) == ("mse", "mean")
        later = ", and begins in the second round" if hp.init_protos == "none" else ""
        return [f"the pull is a squared error{later}, {_WHY}"] if other else []

    def private(self, name: str) -> bool:
        return name in self.ctx.group("head")

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> FedPCServer:
        """Return one group with the initial body and no prototypes: Algorithm 1, line 1."""
        body = T.stack([T.drop(self.ctx.w0, self.stays)])
        value = torch.zeros(1, self.ctx.classes, self.ctx.net.width)
        return FedPCServer({}, body, value, torch.zeros(value.shape[:2], dtype=torch.bool), torch.eye(1).double())

    def edges(self, server: FedPCServer) -> dict[EdgeId, list[ClientId]] | None:
        """Return the groups, each with an edge of its own: Algorithm 1, line 8."""
        groups = server.groups
        return {j: sorted(i for i in groups if groups[i] == j) for j in sorted(set(groups.values()))} or None

    def asks(self, server: FedPCServer, client: ClientId, round: int) -> bool:
        """True if a client is only asked for its prototypes: in round 0, and later if it has no group yet."""
        return round == 0 or (bool(server.groups) and client not in server.groups)

    def down(self, server: FedPCServer, ids: Sequence[ClientId], round: int) -> Download:
        """Send the whole initial model to clients that are asked (Algorithm 1, line 3), else each group's results."""
        if round == 0:
            return Download(self.ctx.w0)
        sets = map(Prototypes, *server.sets)
        to = {j: {k: v[j] for k, v in server.body.items()} | P.to_payload(own) for j, own in enumerate(sets)}
        alone = [i for i in ids if i not in server.groups]
        return Download(edge=to, each={i: self.ctx.w0 if self.asks(server, i, round) else to[0] for i in alone})

    def deliver(self, server: FedPCServer, ids: Sequence[ClientId], round: int) -> Download:
        """Send a client without a group the results of all groups, of which it uses the nearest."""
        sent = self.down(server, ids, round)
        if not server.groups:
            return sent
        every = dict(zip((SETS, HELD, CENTRES, PRESENT), (*server.sets, *server.first_sets), strict=True))
        every |= {LARGEST: torch.tensor([server.largest], dtype=torch.int32), **T.tag(BODIES, server.body)}
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
        """Return alpha * L_cc + gamma * L_p: equation (4), Algorithm 1, line 10."""
        hp = self.hp
        logits, z = P.logits_and_features(self.ctx, params, batch.x, hp.feature)
        loss = hp.alpha * self.ctx.loss_of(logits, batch)
        if not hp.gamma:
            return loss
        kind, reduce, repulsion = hp.proto_loss, hp.proto_reduce, hp.proto_repulsion
        return loss + hp.gamma * prototype_loss(z, batch.y, extras["received"], kind, reduce, repulsion, batch.weight)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the client's prototypes, Algorithm 1, line 4; after training also its extractor."""
        own, counts = P.own_prototypes(self.ctx, trained.params, data, self.hp.feature)
        if trained.extras["asked"]:
            return state, Upload(P.to_payload(own))  # a warm-up serves the clustering alone
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, **P.to_payload(own, counts if self._counted() else None)})

    def _counted(self) -> bool:
        """True if clients weigh by their samples, so that their prototypes weigh by the samples of the class."""
        return (self.ctx.weighting or self.weighting) == "samples"

    # ---- edge: inside a group ----------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        return edge.state, Upload(self._mean(uploads))

    def _mean(self, uploads: Sequence[Upload]) -> Tree:
        """Return the mean body and the mean prototypes of a group: Algorithm 1, lines 13 to 14."""
        trees = [u.tree for u in uploads]
        prototypes = P.group_mean(trees, self.ctx.classes, self.ctx.net.width)
        return {**T.mean([T.untagged(t) for t in trees], self.weights(uploads)), **P.to_payload(prototypes)}

    # ---- cloud, up: across groups ------------------------------------------------------------------------------------
    def aggregate(self, server: FedPCServer, uploads: Sequence[Upload], round: int) -> FedPCServer:
        if round == 0:
            return self.grouped(server, uploads)
        if not server.groups:
            uploads = [Upload(self._mean(uploads), sender=0)]
        trained = [u for u in uploads if T.untagged(u.tree)]  # only a client that is asked sends no body
        server = self.joined(server, [u for u in uploads if not T.untagged(u.tree)])
        if not trained:
            return server

        at = torch.tensor([u.sender for u in trained])  # the other groups keep what they have
        sent = T.stack([T.untagged(u.tree) for u in trained])
        body = {k: v.index_copy(0, at, sent[k]) for k, v in server.body.items()}
        sets = (old.index_copy(0, at, new) for old, new in zip(server.sets, self._sets(trained), strict=True))
        return self.mixed(server, body, Prototypes(*sets))

    def _sets(self, uploads: Sequence[Upload]) -> Prototypes:
        return P.unpack_all([u.tree for u in uploads], self.ctx.classes, self.ctx.net.width)

    def grouped(self, server: FedPCServer, uploads: Sequence[Upload]) -> FedPCServer:
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
        body = T.stack([T.row(server.body, 0)] * count)
        new = self.mixed(server, body, group_means(sets, labels, count))
        new = replace(new, groups=groups, largest=largest, centres=centres, present=present)
        return new if hp.init_protos == "clustering" else replace(new, mask=torch.zeros_like(new.mask))

    def joined(self, server: FedPCServer, uploads: Sequence[Upload]) -> FedPCServer:
        """Put clients that send their prototypes after round 0 into the nearest groups."""
        if not uploads:
            return server
        own = map(Prototypes, *self._sets(uploads))
        near = [nearest_group(p, server.first_sets, self.hp.missing) for p in own]
        new = dict(zip([u.sender for u in uploads], near, strict=True))
        return replace(server, groups={**server.groups, **new})

    def mixed(self, server: FedPCServer, body: Tree, sets: Prototypes) -> FedPCServer:
        """Mix prototypes and bodies [j, ...] by rho, Algorithm 1, lines 17 to 18."""
        rho = self.group_weights(sets)
        value, mask = masked_mix(rho, sets)
        return replace(server, rho=rho, body=mix(rho, body), value=value, mask=mask)  # body: equation (8)

    def group_weights(self, sets: Prototypes) -> Tensor:
        """Return rho [j, j]: by the similarity of groups, or 1/J everywhere, or the identity."""
        J = len(sets.mask)
        if self.hp.inter == "adaptive":
            return group_weights(sets, self.hp.sim_map)
        if self.hp.inter == "mean":
            return torch.full((J, J), 1 / J, dtype=torch.float64)
        return torch.eye(J).double()

    def facts(self, server: FedPCServer) -> dict[str, Any]:
        sizes = [len(members) for members in (self.edges(server) or {}).values()]
        return {"J": len(server.rho), "sizes": sizes, "rho": server.rho}

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self._up(link, now) if link in ("up", "edge_up") else self._down(link, now)

    def _up(self, link: Link, now: Moment | None) -> Schema:
        """Declare prototypes. A client that trains also sends its body, and the counts that a weighted mean needs."""
        lengths = {"labels": (1, self.ctx.classes)}
        first = Schema(P.entries("labels", self.ctx), lengths)
        counts = {P.COUNTS: P.count_entry("labels")} if link == "up" and self._counted() else {}
        more = Schema({**self._body(), **counts}, lengths)
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
        j = now.client if link == "edge_down" else now.server.groups.get(now.client, 0)
        return Schema({**self._body(), **P.entries(int(now.server.mask[j].sum()), self.ctx)})

    def _body(self) -> dict[str, Entry]:
        return like(T.drop(self.ctx.w0, self.stays), part="body")

    def _all_groups(self) -> Schema:
        """Declare the results of all groups, which a client without a group receives."""
        shape = ("groups", self.ctx.classes)
        sets = dict.fromkeys((SETS, CENTRES), Entry((*shape, self.ctx.net.width), kind="prototype", part="prototypes"))
        masks = dict.fromkeys((HELD, PRESENT), Entry(shape, torch.bool, "label information", "prototypes"))
        models = like(T.tag(BODIES, T.drop(self.ctx.w0, self.stays)), part="body")
        bodies = {k: replace(e, shape=("groups", *e.shape)) for k, e in models.items()}
        largest = Entry((1,), torch.int32, "control", "prototypes", 0, len(self.ctx.clients))
        return Schema({**bodies, **sets, **masks, LARGEST: largest}, {"groups": (1, len(self.ctx.clients))})


def _where(now: Moment) -> tuple[FedPCServer, ClientId, int]:
    return now.server, now.client, now.round
