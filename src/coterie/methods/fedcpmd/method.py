"""FedCPMD. Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025 (DOI 10.11897/SP.J.1016.2025.00407).

In a first phase (classifier private, body averaged) every participant votes for the layer that carries least of the
shift between its inputs and its labels. Clients with the same winning layer then form a cluster with a server of its
own (an edge); they keep that layer and receive all others mixed by how alike the members' personal layers are.

That is the text (reading = paper), and it dips at the switch, where private classifiers become shared. By default
(reading = mended) nothing private ever becomes shared: phase 1 shares the whole model, at the switch the layer voted
for becomes private with the value it has, and every other layer is mixed over all participants that share it, by how
alike their classifiers changed.

The published code (reading = code) averages nothing: a participant starts from the model of whoever trained last. A
round here then has one participant, so that one of its rounds of ten is ten of ours.

Counters stay with the client, which sends the layer in the lead: only it knows the scores that break ties. A client
that never voted is asked for its layer when phase 2 begins, without training. Whatever a client is not sent is its own;
in the first download after the switch one byte names its layer. See docs/methods/fedcpmd.md.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.layers import Names
from coterie.core.method import (
    Card,
    ClientData,
    ClientId,
    Download,
    EdgeId,
    Extras,
    Model,
    Moment,
    Start,
    State,
    Trained,
    Tree,
    Upload,
)
from coterie.core.schema import Entry, Kind, Link, Schema, counts, like
from coterie.errors import CoterieError
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.parts.keep_best import best, kept
from coterie.parts.similarity import sketch

VOTE = "x:vote"  # of a client: the layer in the lead, for each distance
COUNT = "x:samples"  # of a client, with its vote
PHI = "x:phi"  # of a client: its personal layer, for the similarity
LAYER = "x:layer"  # to a client: which layer is its own
IDS = "x:ids"  # of a cluster server: who took part


class FedCPMD(EdgeMethod):
    """FedCPMD in all its readings.

    Server state: w, the body; votes and samples of the clients that voted; layer, client to personal layer, None in
    phase 1; distance, the one whose votes decided; trained, the clients that trained in phase 2; phi, the mean
    and deviation of Phi by cluster for the log.
    """

    Settings = FedCPMDSettings
    hp: FedCPMDSettings
    needs: ClassVar[tuple[str, ...]] = ("head", "classes")
    controls = ("fedcpmd-random", "fedcpmd-classifier")
    card = Card(
        title="FedCPMD",
        paper="Du et al., Chinese Journal of Computers 2025, 10.11897/SP.J.1016.2025.00407",
        year=2025,
        family="S,C",
        personal="one layer of each client's own choice",
        certainty="P",
    )
    plans_ahead = True

    def check(self) -> None:
        votes.check_candidates(self.ctx.net.layout, self.hp.candidates)
        if self.hp.preparation >= 1 and self.prep >= self.ctx.planned_rounds:
            raise CoterieError(
                f"preparation = {self.prep} leaves none of the {self.ctx.planned_rounds} rounds for phase 2"
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """The candidates; a layer is a number among these."""
        return votes.candidates(self.ctx.net.layout, self.hp.candidates)

    @property
    def prep(self) -> int:
        """Rounds of phase 1."""
        p = self.hp.preparation
        return int(p) if p >= 1 else max(1, int(p * self.ctx.planned_rounds + 0.5))

    def own(self, layer: int) -> list[str]:
        """Entries of the personal part of who has this layer."""
        names = self.ctx.group(f"layer:{self.layers[layer]}")
        if self.hp.personal_part == "layer_and_classifier":
            names = Names(names | self.ctx.group("head"))
        return [k for k in self.ctx.w0 if k in names]

    def compared(self, layer: int) -> list[str]:
        """Entries of the layer that similarity is about, weight first: one that all who share a body keep."""
        if self.hp.shared_by == "all":
            return [k for k in self.ctx.w0 if k in self.ctx.group("head")]
        return [k for k in self.ctx.w0 if k in self.ctx.group(f"layer:{self.layers[layer]}")]

    @property
    def sends_classifier(self) -> bool:
        """True if the last round of phase 1 also sends the private classifier, which then becomes part of the body."""
        return self.hp.switch_init in ("mean", "global") and self.hp.personal_part == "layer"

    def body(self, layer: int) -> Tree:
        """The initial model without a personal layer."""
        return T.drop(self.ctx.w0, lambda k: self.stays(k) or k in self.own(layer))

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self._any_up() if now is None else self._up(now)
        if link == "edge_up":
            members = list(self.ctx.clients) if now is None else self.clusters(now.server)[now.client]
            ids = Entry(("ids",), torch.int32, "control", "log", min(members), max(members), distinct=True)
            return Schema({IDS: ids}, {"ids": (1, len(members))})
        if now is None:
            model = like(T.drop(self.ctx.w0, self.stays), part="body")
            return Schema({**model, LAYER: self._layer_entry()}).optional()
        return (
            self._down(now) if link == "down" else Schema(like(self._first_body(now.server, now.client), part="body"))
        )

    def _any_up(self) -> Schema:
        shapes = [self._phi_shape(m) for m in range(len(self.layers))]
        lengths = {
            word: (min(s[at] for s in shapes), max(s[at] for s in shapes))
            for at, word in enumerate(("rows", "columns"))
        }
        model = like(T.drop(self.ctx.w0, self.stays), part="body")
        phi = {PHI: self._phi_entry(("rows", "columns"))} if self.hp.similarity_payload != "none" else {}
        return Schema({**model, **self._vote_entries(), **phi}, lengths).optional()

    def _up(self, now: Moment) -> Schema:
        """With a vote: the part of the model it was sent, or nothing if it was only asked; then body and layer."""
        layer = (now.server["layer"] or {}).get(now.client)
        if layer is not None:
            phi = {PHI: self._phi_entry(self._phi_shape(layer))} if self.hp.similarity_payload != "none" else {}
            return Schema({**like(self.body(layer), part="body"), **phi})
        sent = self._sent_without_layer(now.server, now.client) if now.round <= self.prep else {}
        if self.sends_classifier and now.round == self.prep:
            sent = {**sent, **T.keep(self.ctx.w0, self.ctx.group("head").__contains__)}
        return Schema({**like(sent, part="body"), **self._vote_entries()})

    def _down(self, now: Moment) -> Schema:
        """Before a client has a layer the shared body; then its own body, at first without what nobody has averaged."""
        server, client = now.server, now.client
        layer = (server["layer"] or {}).get(client)
        if layer is None:
            return Schema(like(self._sent_without_layer(server, client), part="body"))
        kept = self.hp.unsampled_body == "keep"
        mixed = client in server["trained"] if kept else self.begun(server, layer)
        everything = mixed and self.hp.shared_by == "cluster"
        body = self.body(layer) if everything else T.keep(self.body(layer), server["w"].__contains__)
        if client in server["trained"]:
            return Schema(like(body, part="body"))
        return Schema({**like({**body, **self._first_own(server, layer)}, part="body"), LAYER: self._layer_entry()})

    def _vote_entries(self) -> dict[str, Entry]:
        shape, last = (len(votes.distances(self.hp)),), len(self.layers) - 1
        return {VOTE: Entry(shape, torch.uint8, "statistic", "vote", 0, last), COUNT: counts(1, "vote")}

    def _layer_entry(self) -> Entry:
        return Entry((1,), torch.uint8, "control", "switch", 0, len(self.layers) - 1)

    def _phi_entry(self, shape: tuple[int | str, ...]) -> Entry:
        kind: Kind = "statistic" if self.hp.similarity_payload == "sketch" else "model"
        return Entry(shape, kind=kind, part="similarity")

    def _phi_shape(self, layer: int) -> tuple[int, ...]:
        if self.hp.similarity_payload != "full":
            return (1, self.hp.sketch_dims)
        return tuple(mixing.flat_layer(self.ctx.w0, self.compared(layer)).shape)

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        first = self.ctx.group("head") if self.hp.phase1_personal == "classifier" else Names()
        w = T.clone(T.drop(self.ctx.w0, lambda k: self.stays(k) or k in first))
        return {
            "w": w,
            "votes": {},
            "samples": {},
            "layer": None,
            "distance": 0,
            "trained": [],
            "phi": {},
            "sent": {},
            "rows": {},
            "compared": {},
        }

    def clusters(self, server: State) -> dict[EdgeId, list[ClientId]]:
        """Clients by personal layer."""
        found: dict[EdgeId, list[ClientId]] = {}
        for m in range(len(self.layers)):
            members = [i for i, layer in server["layer"].items() if layer == m]
            if members:
                found[m] = members
        return found

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        return None if server["layer"] is None or self.hp.shared_by == "all" else self.clusters(server)

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        clients = list(self.ctx.clients)
        if server["layer"] is None:
            queue = _shuffled(clients, self.ctx.rng("coverage")) if self.hp.sampler == "coverage" else []
            order = [i for i in queue if i not in server["votes"]] + _shuffled(clients, rng)
            return list(dict.fromkeys(order))[: self._many(len(clients), 1)]

        least = self.hp.min_participants
        picked = [i for c in self.pools(server) for i in _shuffled(c, rng)[: self._many(len(c), least)]]
        return [i for i in clients if i not in server["layer"]] + picked  # who has no layer yet is asked for it

    def _many(self, clients: int, least: int) -> int:
        """Participants of a round among so many clients."""
        return 1 if self.hp.relay else max(least, int(self.ctx.join * clients + 0.5))

    def pools(self, server: State) -> list[list[ClientId]]:
        """Groups that are sampled from separately in phase 2."""
        return [sorted(server["layer"])] if self.hp.shared_by == "all" else list(self.clusters(server).values())

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        layer = server["layer"]
        if layer is None and self.hp.phase1_personal != "voted":
            return Download(shared=server["w"])

        each = {i: self._sent_without_layer(server, i) for i in ids if layer is None or i not in layer}
        if layer is None:
            return Download(each=each)
        new = [i for i in ids if i in layer and i not in server["trained"]]
        told = {i: {LAYER: _byte(layer[i]), **self._first_own(server, layer[i])} for i in new}
        if self.hp.shared_by == "all":
            bodies = mixing.shared_bodies(server["w"], server["sent"], server["rows"], [i for i in ids if i in layer])
            mine = {i: T.drop(b, self.own(layer[i]).__contains__) | told.get(i, {}) for i, b in bodies.items()}
            return Download(each={**each, **mine})
        edge = {m: self._first_body(server, m) for m in self.clusters(server) if not self.begun(server, m)}
        return Download(each={**each, **told}, edge=edge)

    def begun(self, server: State, layer: int) -> bool:
        """Has this cluster had its first aggregation? Before it the classifier is in nobody's body."""
        return any(server["layer"].get(i) == layer for i in server["trained"])

    def _first_body(self, server: State, layer: int) -> Tree:
        """What a cluster starts from; later its server has bodies of its own."""
        return {} if self.begun(server, layer) else T.drop(server["w"], self.own(layer).__contains__)

    def _first_own(self, server: State, layer: int) -> Tree:
        """What a client's personal part starts from, if not from its own."""
        return T.keep(server["w"], self.own(layer).__contains__) if self.hp.switch_init == "global" else {}

    def _sent_without_layer(self, server: State, client: ClientId) -> Tree:
        """The shared body, without what the client keeps while it has no layer of its own."""
        w, how, voted = server["w"], self.hp.phase1_personal, server["votes"].get(client)
        unknown = client not in self.ctx.clients  # a newcomer keeps nothing yet
        if how == "none" or unknown or (how == "classifier" and server["layer"] is None):
            return dict(w)
        kept = self.own(voted[0]) if how == "voted" and voted else self.ctx.group("head")
        return T.drop(w, kept.__contains__)

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        got = edge.download
        bodies = mixing.bodies_of(edge.state, got.edge.get(edge.id, {}), ids)
        return Download(each={i: {**bodies[i], **got.each.get(i, {})} for i in ids})

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "layer": None, "ballot": None}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        params, extras = self.composed(state, download)
        return Model(best(self.ctx, state, params, data) if self.hp.use == "best" else params, extras)

    def composed(self, state: State, download: Tree) -> tuple[Tree, Extras]:
        """What the client receives, and its own part."""
        layer = int(download[LAYER]) if LAYER in download else state["layer"]
        reset: Tree = {}
        if LAYER in download and self.hp.switch_init == "reset":
            reset = {k: self.ctx.w0[k] for k in self.ctx.group("head") if k not in self.own(layer)}
        return {**state["w"], **reset, **_model(download)}, {"layer": layer}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, extras = self.composed(state, download)
        asked = round > self.prep and extras["layer"] is None  # never voted: only asked which layer it would keep
        extras |= {"idle": asked, "start": params, "sent": [] if asked else list(download)}
        return Start(params, extras, train=not asked)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        layer = trained.extras["layer"]
        if self.hp.use == "best" and not trained.extras["idle"]:
            state = {**state, **kept(self.ctx, state, trained.params, data)}
        state = {**state, "w": trained.params, "layer": layer}
        if layer is not None:
            body = T.drop(trained.params, lambda k: self.stays(k) or k in self.own(layer))
            return state, Upload({**body, **self.similarity(trained.params, layer)})

        state["ballot"] = votes.cast(state["ballot"], self.scores(trained.params, trained.extras, data))
        names = set(trained.extras["sent"])
        if self.sends_classifier and round == self.prep:
            names |= self.ctx.group("head")
        vote = {VOTE: self.leading(state["ballot"]), COUNT: torch.tensor([len(data.train)], dtype=torch.int32)}
        return state, Upload({**T.keep(trained.params, names.__contains__), **vote})

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        """s_l [votes, distances, layers] on the training part."""
        size = self.ctx.batch if self.hp.vote == "batch" else len(data.train)
        outputs = votes.layer_outputs(self.ctx.net, params, data.train.x, self.layers)
        parts = zip(*(torch.split(t, size) for t in (data.train.x, data.train.y, *outputs)), strict=True)
        return torch.stack([votes.scores(self.hp, o, x, y, data.classes) for x, y, *o in parts])

    def leading(self, ballot: votes.Ballot) -> Tensor:
        return votes.leading(ballot, self.hp.tie)

    def similarity(self, params: Tree, layer: int) -> Tree:
        """What the cluster server compares members by."""
        if self.hp.similarity_payload == "none":
            return {}
        phi = mixing.flat_layer(params, self.compared(layer))
        if self.hp.phi_input == "delta":
            phi = phi - mixing.flat_layer(self.ctx.w0, self.compared(layer))
        if self.hp.similarity_payload == "sketch":
            phi = sketch(phi.flatten()[None], self.hp.sketch_dims, self.ctx.rng("sketch", layer))
        return {PHI: phi}

    # ---- cluster server ----------------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        participants = [u.sender for u in uploads]
        bodies = [_model(u.tree) for u in uploads]
        mean = torch.tensor(T.normalised(self.weights(uploads), len(uploads)))  # equation (5)

        phi = {**edge.state.get("phi", {}), **{u.sender: u.tree[PHI] for u in uploads if PHI in u.tree}}
        rows, note = self.rows(phi, list(edge.clients), participants, mean)
        if self.hp.unsampled_body != "similarity":
            rows = {i: rows.get(i, mean).clone() for i in participants}

        start = edge.download.edge.get(edge.id, {})
        state = mixing.renewed({**edge.state, "phi": phi}, start, bodies, mean, rows, self.hp.unsampled_body)
        return state, Upload({IDS: torch.tensor(participants, dtype=torch.int32)}, note)

    def rows(
        self, phi: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        """Weights of equation (12) for every member whose personal layer is known; mean and deviation of Phi."""
        hp = self.hp
        return mixing.rows(phi, members, participants, mean, hp.phi_of == "rows", hp.phi_map, hp.phi_weight == "log")

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        voted = [u for u in uploads if VOTE in u.tree]
        server = {
            **server,
            "w": mixing.layerwise(server["w"], uploads, self.weights),
            "votes": {**server["votes"], **{u.sender: u.tree[VOTE].tolist() for u in voted}},
            "samples": {**server["samples"], **{u.sender: int(u.tree[COUNT]) for u in voted}},
        }
        layer = server["layer"]
        if layer is None:
            return self.switch(server) if round >= self.prep else server

        late = {u.sender: int(u.tree[VOTE][server["distance"]]) for u in voted}
        trained = {*server["trained"]}
        for u in uploads:
            if IDS in u.tree:
                trained |= {i for i in u.tree[IDS].tolist() if layer.get(i) == u.sender}
            elif VOTE not in u.tree:
                trained.add(u.sender)
        phi = {u.sender: dict(u.note) for u in uploads if IDS in u.tree and u.note}
        server = {**server, "layer": {**layer, **late}, "trained": sorted(trained), "phi": {**server["phi"], **phi}}
        return self.mixed(server, uploads) if self.hp.shared_by == "all" else server

    def mixed(self, server: State, uploads: Sequence[Upload]) -> State:
        """Without clusters: what the participants sent, and by which weights each client's body is mixed from it."""
        sent = [u for u in uploads if VOTE not in u.tree]
        if not sent:
            return server
        participants = [u.sender for u in sent]
        known = {**server["compared"], **{u.sender: u.tree[PHI] for u in sent if PHI in u.tree}}
        mean = torch.tensor(T.normalised(self.weights(sent), len(sent)))
        rows, _ = self.rows(known, list(server["layer"]), participants, mean)
        return {**server, "sent": {u.sender: _model(u.tree) for u in sent}, "compared": known, "rows": rows}

    def switch(self, server: State) -> State:
        """Layers become personal: the votes of one distance decide, and `unseen` for who never voted."""
        cast = server["votes"]
        d = votes.most_agreed(torch.tensor(list(cast.values()))) if self.hp.distance == "auto" else 0
        layer = {i: cast[i][d] for i in sorted(cast)}
        layer |= votes.unseen(self.hp.unseen, self.ctx.clients, layer, len(self.layers), self.ctx.rng("unseen"))
        return {**server, "distance": d, "layer": layer}

    def global_model(self, server: State) -> Tree | None:
        return super().global_model(server) if server["layer"] is None else None

    def cluster_of(self, server: State) -> dict[ClientId, int] | None:
        """Clients that keep the same layer, also where that layer's clients are no edge's."""
        return None if server["layer"] is None else dict(server["layer"])

    def facts(self, server: State) -> dict[str, Any]:
        if server["layer"] is None:
            return {"voted": len(server["votes"])}
        return {
            "distance": votes.distances(self.hp)[server["distance"]],
            "clusters": {self.layers[m]: len(c) for m, c in self.clusters(server).items()},
            "layer": {str(i): self.layers[m] for i, m in sorted(server["layer"].items())},
            "phi": {self.layers[m]: v for m, v in sorted(server["phi"].items())},
        }


def _shuffled(items: Sequence[ClientId], rng: torch.Generator) -> list[ClientId]:
    return [items[int(i)] for i in torch.randperm(len(items), generator=rng)]


def _byte(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def _model(tree: Tree) -> Tree:
    """The entries of the model in a payload."""
    return T.untagged(tree)
