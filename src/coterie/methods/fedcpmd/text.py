"""FedCPMD. Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025 (DOI 10.11897/SP.J.1016.2025.00407).

In a first phase (classifier private, body averaged) every participant votes for the layer that carries least of the
shift between its inputs and its labels. Clients with the same winning layer then form a cluster with a server of its
own (an edge); they keep that layer and receive all others mixed by how alike the members' personal layers are.

- At the switch both parts of the averaged model are assigned to all members (`switch_init = global`, Algorithm 3).
- The personal layer is uploaded for the similarity (13), which the text needs and does not mention.
- A client that never voted is asked for its layer when phase 2 begins, without training.
- A newcomer votes without training and receives the body of that cluster. For this, a cluster server sends the mean of
  its members' bodies to the cloud.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, Extras, State
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.layers import Names
from coterie.core.method import Download, Moment, Settings, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.states import state
from coterie.core.tree import Tree
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.methods.fedcpmd.voting import LAYER, LayerVotes, VoteServer, byte
from coterie.parts.cluster_models import numbered

MEMBERS = "x:ids"  # participants of a cluster server
MEAN_BODY = "mean"  # tag of the mean body that a cluster server reports
VOTED_DISTANCE = "x:distance"  # the distance whose votes decided, for a client without a layer


@state
class FedCPMDServer(VoteServer):
    phi: dict[EdgeId, dict[str, float]] = field(default_factory=dict)  # mean and deviation of Phi, for the log
    bodies: dict[EdgeId, Tree] = field(default_factory=dict)  # last mean body of each cluster, for newcomers


class FedCPMD(LayerVotes, EdgeMethod):
    """Clusters of clients with the same personal layer, each with its own server (Algorithm 3)."""

    Settings: ClassVar[type[Settings]] = FedCPMDSettings
    hp: FedCPMDSettings
    controls = ("fedcpmd-random", "fedcpmd-classifier")

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self.any_up() if now is None else self.up(now)
        if link == "edge_up":
            return self._edge_up(now)
        if now is None:
            bodies = numbered(dict.fromkeys(range(len(self.layers)), self.whole()))
            distance = Entry((1,), torch.uint8, "control", "switch", 0, len(votes.PAPER) - 1)
            return Schema({**self.whole(), LAYER: self.layer_entry(), VOTED_DISTANCE: distance, **bodies}).optional()
        return (
            self._down(now) if link == "down" else Schema(like(self._first_body(now.server, now.client), part="body"))
        )

    def _edge_up(self, now: Moment | None) -> Schema:
        """Declare the participants of a cluster and the mean of their bodies."""
        members = list(self.ctx.clients) if now is None else self.clusters(now.server)[now.client]
        ids = Entry(("ids",), torch.int32, "control", "log", min(members), max(members), distinct=True)
        body = T.drop(self.ctx.w0, self.stays) if now is None else self.body(now.client)
        mean = Schema(like(T.tag(MEAN_BODY, body), part="newcomers"))
        return Schema({MEMBERS: ids}, {"ids": (1, len(members))}) | (mean.optional() if now is None else mean)

    def _down(self, now: Moment) -> Schema:
        """Before a client has a layer the shared body; then its own body, at first without entries not averaged yet."""
        server, client = now.server, now.client
        layer = (server.layer or {}).get(client)
        if layer is None:
            return Schema(like(self.sent_without_layer(server, client), part="body"))
        kept = self.hp.unsampled_body == "keep"
        mixed = client in server.trained if kept else self.begun(server, layer)
        body = self.body(layer) if mixed else T.keep(self.body(layer), server.w.__contains__)
        if client in server.trained:
            return Schema(like(body, part="body"))
        return Schema({**like({**body, **self._first_own(server, layer)}, part="body"), LAYER: self.layer_entry()})

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> FedCPMDServer:
        """Return the initial body; every client has the whole initial model: Algorithm 2, line 1."""
        first = self.ctx.group("head") if self.hp.phase1_personal == "classifier" else Names()
        return FedCPMDServer(T.clone(T.drop(self.ctx.w0, lambda k: self.stays(k) or k in first)))

    def edges(self, server: FedCPMDServer) -> dict[EdgeId, list[ClientId]] | None:
        """Return the clusters, each with a server of its own: Algorithm 3, line 2."""
        return None if server.layer is None else self.clusters(server)

    def participants(self, members: int) -> int:
        return max(self.hp.min_participants, super().participants(members))

    def down(self, server: FedCPMDServer, ids: Sequence[ClientId], round: int) -> Download:
        """Send the shared body; in phase 2 each cluster its first body, and new members their layer and its value."""
        layer = server.layer
        if layer is None and self.hp.phase1_personal != "voted":
            return Download(shared=server.w)
        each = {i: self.sent_without_layer(server, i) for i in ids if layer is None or i not in layer}
        if layer is None:
            return Download(each=each)
        new = [i for i in ids if i in layer and i not in server.trained]
        each |= {i: {LAYER: byte(layer[i]), **self._first_own(server, layer[i])} for i in new}
        edge = {m: self._first_body(server, m) for m in self.clusters(server) if not self.begun(server, m)}
        return Download(each=each, edge=edge)

    def deliver(self, server: FedCPMDServer, ids: Sequence[ClientId], round: int) -> Download:
        """Send a newcomer the bodies of all clusters, of which it uses the one that it votes for."""
        sent = self.down(server, ids, round)
        new = [i for i in ids if i not in self.ctx.clients]
        if server.layer is None or not new:
            return sent
        every = {**server.w, VOTED_DISTANCE: byte(server.distance), **numbered(server.bodies)}
        return replace(sent, each={**sent.each, **dict.fromkeys(new, every)})

    def begun(self, server: FedCPMDServer, layer: int) -> bool:
        """True after the first aggregation of a cluster; before it no body holds the classifier."""
        return server.layer is not None and any(server.layer.get(i) == layer for i in server.trained)

    def _first_body(self, server: FedCPMDServer, layer: int) -> Tree:
        """Return the body that a cluster starts from; later its server has bodies of its own."""
        return {} if self.begun(server, layer) else T.drop(server.w, self.own(layer).__contains__)

    def _first_own(self, server: FedCPMDServer, layer: int) -> Tree:
        """Return the start of a client's personal part, if it is not its own."""
        return T.keep(server.w, self.own(layer).__contains__) if self.hp.switch_init == "global" else {}

    def sent_without_layer(self, server: VoteServer, client: ClientId) -> Tree:
        how, voted = self.hp.phase1_personal, server.votes.get(client)
        newcomer = client not in self.ctx.clients  # keeps nothing yet
        if how == "none" or newcomer or (how == "classifier" and server.layer is None):
            return dict(server.w)
        kept = self.own(voted[0]) if how == "voted" and voted else self.ctx.group("head")
        return T.drop(server.w, kept.__contains__)

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        """Send each member its body: Algorithm 3, line 4."""
        got = edge.download
        bodies = mixing.bodies_of(edge.state, got.edge.get(edge.id, {}), ids)
        return Download(each={i: {**bodies[i], **got.each.get(i, {})} for i in ids})

    # ---- client ------------------------------------------------------------------------------------------------------
    def composed(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        params, extras = super().composed(state, download, data)
        if VOTED_DISTANCE in download and len(data.train):
            lead = self.leading(votes.cast(None, self.scores(params, {"start": params}, data)))
            layer = int(lead[int(download[VOTED_DISTANCE])])
            return {**params, **T.tagged(str(layer), download)}, {"layer": layer}
        if LAYER in download and self.hp.switch_init == "reset":
            head = [k for k in self.ctx.group("head") if k not in self.own(extras["layer"])]
            params = {**params, **{k: self.ctx.w0[k] for k in head if k not in download}}
        return params, extras

    def also_sent(self, round: int) -> Sequence[str]:
        """Return the private classifier in the last round of phase 1 if its mean becomes part of the body."""
        mean = self.hp.switch_init in ("mean", "global") and self.hp.personal_part == "layer"
        return list(self.ctx.group("head")) if mean and round == self.prep else ()

    def compared(self, layer: int) -> list[str]:
        return [k for k in self.ctx.w0 if k in self.ctx.group(f"layer:{self.layers[layer]}")]

    @property
    def compares_changes(self) -> bool:
        return self.hp.phi_input == "delta"

    # ---- cluster server ----------------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        """Mix the bodies of the participants: Algorithm 3, line 11. Their mean, equation (5), is for newcomers."""
        participants = [u.sender for u in uploads]
        bodies = [T.untagged(u.tree) for u in uploads]
        mean = torch.tensor(T.normalised(self.weights(uploads), len(uploads)))  # equation (5)

        phi = mixing.known_layers(edge.state.get("phi", {}), uploads)
        rows, note = self.rows(phi, list(edge.clients), participants, mean)
        if self.hp.unsampled_body != "similarity":
            rows = {i: rows.get(i, mean).clone() for i in participants}

        start = edge.download.edge.get(edge.id, {})
        state = mixing.renewed({**edge.state, "phi": phi}, start, bodies, mean, rows, self.hp.unsampled_body)
        report = T.tag(MEAN_BODY, T.mean(bodies, self.weights(uploads)))
        return state, Upload({MEMBERS: torch.tensor(participants, dtype=torch.int32), **report}, note)

    def rows(
        self, phi: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        """Weights of equation (12) for every member whose personal layer is known; mean and deviation of Phi."""
        hp = self.hp
        return mixing.mixing_rows(
            phi, members, participants, mean, hp.phi_of == "rows", hp.phi_map, hp.phi_weight == "log"
        )

    # ---- cloud, up ---------------------------------------------------------------------------------------------------
    def trained_by(self, server: VoteServer, upload: Upload) -> set[ClientId]:
        if MEMBERS not in upload.tree:
            return super().trained_by(server, upload)
        return {i for i in upload.tree[MEMBERS].tolist() if (server.layer or {}).get(i) == upload.sender}

    def after_training(self, server: FedCPMDServer, sent: Sequence[Upload]) -> FedCPMDServer:
        reports = [u for u in sent if MEMBERS in u.tree]
        phi = {u.sender: dict(u.note) for u in reports if u.note}
        bodies = {u.sender: T.tagged(MEAN_BODY, u.tree) for u in reports}
        return replace(server, phi={**server.phi, **phi}, bodies={**server.bodies, **bodies})

    def facts(self, server: State) -> dict[str, Any]:
        phi = {self.layers[m]: v for m, v in sorted(server.phi.items())}
        return super().facts(server) | ({} if server.layer is None else {"phi": phi})
