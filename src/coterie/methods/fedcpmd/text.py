"""FedCPMD. Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025 (DOI 10.11897/SP.J.1016.2025.00407).

In a first phase (classifier private, body averaged) every participant votes for the layer that carries least of the
shift between its inputs and its labels. Clients with the same winning layer then form a cluster with a server of its
own (an edge); they keep that layer and receive all others mixed by how alike the members' personal layers are.

- At the switch both parts of the averaged model are assigned to all members (`switch_init = global`, Algorithm 3).
- The personal layer is uploaded for the similarity (13), which the text needs and does not mention.
- A client that never voted is asked for its layer when phase 2 begins, without training.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, EdgeId, Extras, State
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.layers import Names
from coterie.core.method import Download, Moment, Settings, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.methods.fedcpmd import mixing
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.methods.fedcpmd.voting import LAYER, PHI, VOTE, LayerVotes, byte, shuffled
from coterie.parts.similarity import sketch

MEMBERS = "x:ids"  # participants of a cluster server


class FedCPMD(LayerVotes, EdgeMethod):
    """Clusters of clients with the same personal layer, each with its own server (Algorithm 3).

    The server's state also holds `phi`, the clusters' mean and deviation of Phi for the log.
    """

    Settings: ClassVar[type[Settings]] = FedCPMDSettings
    hp: FedCPMDSettings
    controls = ("fedcpmd-random", "fedcpmd-classifier")

    def compared(self, layer: int) -> list[str]:
        """Return the entries of the layer that members are compared by, weight first."""
        return [k for k in self.ctx.w0 if k in self.ctx.group(f"layer:{self.layers[layer]}")]

    @property
    def sends_classifier(self) -> bool:
        """True if the last round of phase 1 also sends the private classifier, which then becomes part of the body."""
        return self.hp.switch_init in ("mean", "global") and self.hp.personal_part == "layer"

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self._any_up() if now is None else self._up(now)
        if link == "edge_up":
            members = list(self.ctx.clients) if now is None else self.clusters(now.server)[now.client]
            ids = Entry(("ids",), torch.int32, "control", "log", min(members), max(members), distinct=True)
            return Schema({MEMBERS: ids}, {"ids": (1, len(members))})
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
        phi = (
            {PHI: self.phi_entry(self.hp.similarity_payload, ("rows", "columns"))}
            if self.hp.similarity_payload != "none"
            else {}
        )
        return Schema({**model, **self._vote_entries(), **phi}, lengths).optional()

    def _up(self, now: Moment) -> Schema:
        """With a vote: the part of the model it was sent, or nothing if it was only asked; then body and layer."""
        layer = (now.server["layer"] or {}).get(now.client)
        if layer is not None:
            phi = (
                {PHI: self.phi_entry(self.hp.similarity_payload, self._phi_shape(layer))}
                if self.hp.similarity_payload != "none"
                else {}
            )
            return Schema({**like(self.body(layer), part="body"), **phi})
        sent = self._sent_without_layer(now.server, now.client) if now.round <= self.prep else {}
        if self.sends_classifier and now.round == self.prep:
            sent = {**sent, **T.keep(self.ctx.w0, self.ctx.group("head").__contains__)}
        return Schema({**like(sent, part="body"), **self._vote_entries()})

    def _down(self, now: Moment) -> Schema:
        """Before a client has a layer the shared body; then its own body, at first without entries not averaged yet."""
        server, client = now.server, now.client
        layer = (server["layer"] or {}).get(client)
        if layer is None:
            return Schema(like(self._sent_without_layer(server, client), part="body"))
        kept = self.hp.unsampled_body == "keep"
        mixed = client in server["trained"] if kept else self.begun(server, layer)
        body = self.body(layer) if mixed else T.keep(self.body(layer), server["w"].__contains__)
        if client in server["trained"]:
            return Schema(like(body, part="body"))
        return Schema({**like({**body, **self._first_own(server, layer)}, part="body"), LAYER: self._layer_entry()})

    def _phi(self, shape: tuple[int | str, ...]) -> dict[str, Entry]:
        payload = self.hp.similarity_payload
        return {} if payload == "none" else {PHI: self.phi_entry(payload, shape)}

    def _phi_shape(self, layer: int) -> tuple[int, ...]:
        if self.hp.similarity_payload != "full":
            return (1, self.hp.sketch_dims)
        return tuple(mixing.flat_layer(self.ctx.w0, self.compared(layer)).shape)

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        """Return the initial body; every client has the whole initial model: Algorithm 2, line 1."""
        first = self.ctx.group("head") if self.hp.phase1_personal == "classifier" else Names()
        w = T.clone(T.drop(self.ctx.w0, lambda k: self.stays(k) or k in first))
        return {**self.first_state(w), "phi": {}}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        """Return the clusters, each with a server of its own: Algorithm 3, line 2."""
        return None if server["layer"] is None else self.clusters(server)

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        """Return the participants, in phase 2 gamma |M_m| of each cluster: Algorithm 3, line 5."""
        if server["layer"] is None:
            return self.voters(server, rng, self.participants(len(self.ctx.clients), 1))
        least = self.hp.min_participants
        picked = [i for c in self.pools(server) for i in shuffled(c, rng)[: self.participants(len(c), least)]]
        # clients without a layer are asked for it
        return [i for i in self.ctx.clients if i not in server["layer"]] + picked

    def participants(self, clients: int, least: int) -> int:
        """Return the number of participants among these clients in a round."""
        return self.share(clients, least)

    def pools(self, server: State) -> list[list[ClientId]]:
        """Return the groups that are sampled from separately in phase 2."""
        return list(self.clusters(server).values())

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        layer = server["layer"]
        if layer is None and self.hp.phase1_personal != "voted":
            return Download(shared=server["w"])

        each = {i: self._sent_without_layer(server, i) for i in ids if layer is None or i not in layer}
        if layer is None:
            return Download(each=each)
        new = [i for i in ids if i in layer and i not in server["trained"]]
        told = {i: {LAYER: byte(layer[i]), **self._first_own(server, layer[i])} for i in new}
        edge = {m: self._first_body(server, m) for m in self.clusters(server) if not self.begun(server, m)}
        return Download(each={**each, **told}, edge=edge)

    def begun(self, server: State, layer: int) -> bool:
        """True after the first aggregation of a cluster; before it no body holds the classifier."""
        return any(server["layer"].get(i) == layer for i in server["trained"])

    def _first_body(self, server: State, layer: int) -> Tree:
        """Return the body that a cluster starts from; later its server has bodies of its own."""
        return {} if self.begun(server, layer) else T.drop(server["w"], self.own(layer).__contains__)

    def _first_own(self, server: State, layer: int) -> Tree:
        """Return the start of a client's personal part, if it is not its own."""
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
        """Send each member its body: Algorithm 3, line 4."""
        got = edge.download
        bodies = mixing.bodies_of(edge.state, got.edge.get(edge.id, {}), ids)
        return Download(each={i: {**bodies[i], **got.each.get(i, {})} for i in ids})

    # ---- client ------------------------------------------------------------------------------------------------------
    def composed(self, state: State, download: Tree) -> tuple[Tree, Extras]:
        params, extras = super().composed(state, download)
        if LAYER in download and self.hp.switch_init == "reset":
            head = [k for k in self.ctx.group("head") if k not in self.own(extras["layer"])]
            params = {**params, **{k: self.ctx.w0[k] for k in head if k not in download}}
        return params, extras

    def also_sent(self, round: int) -> Sequence[str]:
        return list(self.ctx.group("head")) if self.sends_classifier and round == self.prep else ()

    def similarity(self, params: Tree, layer: int) -> Tree:
        """Return what the cluster server compares members by."""
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
        """Mix the bodies of the participants: Algorithm 3, line 11."""
        participants = [u.sender for u in uploads]
        bodies = [T.untagged(u.tree) for u in uploads]
        mean = torch.tensor(T.normalised(self.weights(uploads), len(uploads)))  # equation (5)

        phi = {**edge.state.get("phi", {}), **{u.sender: u.tree[PHI] for u in uploads if PHI in u.tree}}
        rows, note = self.rows(phi, list(edge.clients), participants, mean)
        if self.hp.unsampled_body != "similarity":
            rows = {i: rows.get(i, mean).clone() for i in participants}

        start = edge.download.edge.get(edge.id, {})
        state = mixing.renewed({**edge.state, "phi": phi}, start, bodies, mean, rows, self.hp.unsampled_body)
        return state, Upload({MEMBERS: torch.tensor(participants, dtype=torch.int32)}, note)

    def rows(
        self, phi: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        """Weights of equation (12) for every member whose personal layer is known; mean and deviation of Phi."""
        hp = self.hp
        return mixing.mixing_rows(
            phi, members, participants, mean, hp.phi_of == "rows", hp.phi_map, hp.phi_weight == "log"
        )

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        layer = server["layer"]
        late = {} if layer is None else self.late(server, uploads)
        server = self.counted(server, uploads)
        if layer is None:
            return self.switch(server) if round >= self.prep else server

        trained = {*server["trained"]}
        for u in uploads:
            if MEMBERS in u.tree:
                trained |= {i for i in u.tree[MEMBERS].tolist() if layer.get(i) == u.sender}
            elif VOTE not in u.tree:
                trained.add(u.sender)
        phi = {u.sender: dict(u.note) for u in uploads if MEMBERS in u.tree and u.note}
        return {**server, "layer": {**layer, **late}, "trained": sorted(trained), "phi": {**server["phi"], **phi}}
