"""Phase 1 of FedCPMD (Algorithm 2) and the switch, which its classes share: clients vote for a layer to keep.

Counters stay with the client, which sends the layer in the lead: only it knows the scores that break ties. A client
that never voted is asked for its layer when phase 2 begins, without training. Whatever a client is not sent is its own;
in the first download after the switch one byte names its layer.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, Extras, State
from coterie.core.layers import Names
from coterie.core.method import Card, Method, Model, Moment, Start, Trained, Upload
from coterie.core.schema import Entry, Kind, Schema, counts, like
from coterie.core.states import state
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.settings import SimilaritySettings
from coterie.parts.similarity import sketch

VOTE = "x:vote"  # layer in the lead of a client's votes, for each distance
COUNT = "x:samples"  # training samples of a client, with its vote
ACCURACY = "x:accuracy"  # validation accuracy with the layer in the lead, for each distance (distance = best)
LAYER = "x:layer"  # the layer that becomes a client's own


@state
class VoteServer:
    w: Tree  # the shared body
    votes: dict[ClientId, list[int]] = field(default_factory=dict)  # layer in the lead for each distance
    samples: dict[ClientId, int] = field(default_factory=dict)  # training samples of the clients that voted
    accuracy: dict[ClientId, list[float]] = field(default_factory=dict)  # by distance, if distance = best
    layer: dict[ClientId, int] | None = None  # personal layers; None in phase 1
    distance: int = 0  # the distance whose votes decided
    trained: list[ClientId] = field(default_factory=list)  # clients that have trained in phase 2


Server = TypeVar("Server", bound=VoteServer)


class LayerVotes(Method):
    """Clients vote in phase 1 and keep the layer voted for in phase 2."""

    hp: SimilaritySettings
    needs: ClassVar[tuple[str, ...]] = ("head", "classes")
    card = Card(
        title="FedCPMD",
        paper="Du et al., Chinese Journal of Computers 2025, 10.11897/SP.J.1016.2025.00407",
        year=2025,
        family="S,C",
        personal="one layer of each client's own choice",
        certainty="P",
    )
    plans_ahead = True

    def required(self) -> tuple[str, ...]:
        return (*self.needs, "some_val") if self.hp.distance == "best" else self.needs

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
        """Rounds of phase 1: Algorithm 2, line 3."""
        p = self.hp.preparation
        return int(p) if p >= 1 else max(1, int(p * self.ctx.planned_rounds + 0.5))

    def own(self, layer: int) -> list[str]:
        """Return the entries of the personal part of clients with this layer."""
        names = self.ctx.group(f"layer:{self.layers[layer]}")
        if self.hp.personal_part == "layer_and_classifier":
            names = Names(names | self.ctx.group("head"))
        return [k for k in self.ctx.w0 if k in names]

    def body(self, layer: int) -> Tree:
        """Return the initial model without a personal layer."""
        return T.drop(self.ctx.w0, lambda k: self.stays(k) or k in self.own(layer))

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def any_up(self) -> Schema:
        """Declare all that a client may send: its model, a vote, and the layer that it is compared by."""
        shapes = [self._phi_shape(m) for m in range(len(self.layers))]
        rows, columns = zip(*shapes, strict=True)
        same = len(set(shapes)) == 1
        phi = self._phi(shapes[0] if same else ("rows", "columns"))
        lengths = {} if same else {"rows": (min(rows), max(rows)), "columns": (min(columns), max(columns))}
        return Schema({**self.whole(), **self._vote_entries(), **phi}, lengths).optional()

    def up(self, now: Moment) -> Schema:
        """Declare a vote with the body that was sent, or alone if the client was only asked; then body and layer."""
        layer = (now.server.layer or {}).get(now.client)
        if layer is not None:
            return Schema({**like(self.body(layer), part="body"), **self._phi(self._phi_shape(layer))})
        sent = self.sent_without_layer(now.server, now.client) if now.round <= self.prep else {}
        also = T.keep(self.ctx.w0, self.also_sent(now.round).__contains__)
        return Schema({**like({**sent, **also}, part="body"), **self._vote_entries()})

    def whole(self) -> dict[str, Entry]:
        """Declare the whole model, without what stays on every client."""
        return like(T.drop(self.ctx.w0, self.stays), part="body")

    def layer_entry(self) -> Entry:
        return Entry((1,), torch.uint8, "control", "switch", 0, len(self.layers) - 1)

    def _vote_entries(self) -> dict[str, Entry]:
        shape, last = (len(votes.distances(self.hp)),), len(self.layers) - 1
        vote = {VOTE: Entry(shape, torch.uint8, "statistic", "vote", 0, last), COUNT: counts(1, "vote")}
        return vote | ({ACCURACY: Entry(shape, torch.float32, "statistic", "vote", 0, 1)} if self.by_accuracy else {})

    def _phi(self, shape: tuple[int | str, ...]) -> dict[str, Entry]:
        payload = self.hp.similarity_payload
        kind: Kind = "statistic" if payload == "sketch" else "model"
        return {} if payload == "none" else {mixing.PHI: Entry(shape, kind=kind, part="similarity")}

    def _phi_shape(self, layer: int) -> tuple[int, int]:
        if self.hp.similarity_payload != "full":
            return 1, self.hp.sketch_dims
        rows, columns = mixing.flat_layer(self.ctx.w0, self.compared(layer)).shape
        return rows, columns

    # ---- server, down ------------------------------------------------------------------------------------------------
    def clusters(self, server: VoteServer) -> dict[EdgeId, list[ClientId]]:
        """Return the clients by personal layer: Algorithm 3, line 1."""
        layer = server.layer or {}
        return {m: [i for i in layer if layer[i] == m] for m in sorted(set(layer.values()))}

    def sample(self, server: VoteServer, round: int, rng: torch.Generator) -> list[ClientId]:
        """Return the participants, in phase 2 gamma |M_m| of each cluster: Algorithm 3, line 5."""
        if server.layer is None:
            return self._voters(server, rng)
        picked = [i for pool in self.pools(server) for i in shuffled(pool, rng)[: self.participants(len(pool))]]
        # clients without a layer are asked for it
        return [i for i in self.ctx.clients if i not in server.layer] + picked

    def _voters(self, server: VoteServer, rng: torch.Generator) -> list[ClientId]:
        """Return the participants of a round of phase 1, Algorithm 2, line 4; with coverage every client once first."""
        clients = list(self.ctx.clients)
        queue = shuffled(clients, self.ctx.rng("coverage")) if self.hp.sampler == "coverage" else []
        order = [i for i in queue if i not in server.votes] + shuffled(clients, rng)
        return list(dict.fromkeys(order))[: self.voter_count]

    @property
    def voter_count(self) -> int:
        """Participants of a round of phase 1."""
        return self.ctx.participants()

    def participants(self, members: int) -> int:
        """Return the number of participants among the members of a pool in a round of phase 2."""
        return self.ctx.participants(members)

    def pools(self, server: VoteServer) -> list[list[ClientId]]:
        """Return the groups that are sampled from separately in phase 2."""
        return list(self.clusters(server).values())

    def sent_without_layer(self, server: VoteServer, client: ClientId) -> Tree:
        """Return the shared body, without what the client keeps while it has no layer of its own."""
        return dict(server.w)

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "layer": None, "ballot": None}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(*self.composed(state, download, data))

    def composed(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        """Return the received body with the client's own part, and its layer: Algorithm 1, lines 1 and 2."""
        layer = int(download[LAYER]) if LAYER in download else state["layer"]
        return {**state["w"], **T.untagged(download)}, {"layer": layer}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, extras = self.composed(state, download, data)
        asked = round > self.prep and extras["layer"] is None  # never voted: only asked which layer it would keep
        extras |= {"idle": asked, "start": params, "sent": [] if asked else list(download)}
        return Start(params, extras, train=not asked)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the body: Algorithm 1, line 6; with a vote Algorithm 2, line 11, and then Algorithm 3, line 8."""
        params, layer = trained.params, trained.extras["layer"]
        state = {**state, "w": params, "layer": layer}
        if layer is not None:
            body = T.drop(params, lambda k: self.stays(k) or k in self.own(layer))
            return state, Upload({**body, **self.similarity(params, layer)})

        state["ballot"] = votes.cast(state["ballot"], self.scores(params, trained.extras, data))
        names = {*trained.extras["sent"], *self.also_sent(round)}
        lead = self.leading(state["ballot"])
        vote = {VOTE: lead, COUNT: torch.tensor([len(data.train)], dtype=torch.int32)}
        if self.by_accuracy:
            vote[ACCURACY] = self.accuracies(params, trained.extras["start"], data)[lead.long()].float()
        return state, Upload({**T.keep(params, names.__contains__), **vote})

    def also_sent(self, round: int) -> Sequence[str]:
        """Return entries that a round of phase 1 sends in addition to what it received."""
        return ()

    def compared(self, layer: int) -> list[str]:
        """Return the entries that clients with this layer are compared by, weight first."""
        raise NotImplementedError

    @property
    def compares_changes(self) -> bool:
        """True if clients are compared by the change of these entries since the initial model."""
        return True

    def similarity(self, params: Tree, layer: int) -> Tree:
        """Return what the server compares clients by."""
        if self.hp.similarity_payload == "none":
            return {}
        phi = mixing.flat_layer(params, self.compared(layer))
        if self.compares_changes:
            phi = phi - mixing.flat_layer(self.ctx.w0, self.compared(layer))
        if self.hp.similarity_payload == "sketch":
            phi = sketch(phi.flatten()[None], self.hp.sketch_dims, self.ctx.rng("sketch", layer))
        return {mixing.PHI: phi}

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        """Return s_l [votes, distances, layers] on the training part, equation (7)."""
        size = self.ctx.batch if self.hp.vote == "batch" else len(data.train)
        outputs = votes.layer_outputs(self.ctx.net, params, data.train.x, self.layers)
        parts = zip(*(torch.split(t, size) for t in (data.train.x, data.train.y, *outputs)), strict=True)
        return torch.stack([votes.scores(self.hp, o, x, y, data.classes) for x, y, *o in parts])

    def leading(self, ballot: votes.Ballot) -> Tensor:
        return votes.leading(ballot, self.hp.tie)

    @property
    def by_accuracy(self) -> bool:
        """True if validation data choose the distance."""
        return self.hp.distance == "best"

    def accuracies(self, params: Tree, start: Tree, data: ClientData) -> Tensor:
        """Return the validation accuracy [layers] of the model before training with one layer as trained; else 0."""
        tried = [{**start, **{k: params[k] for k in self.own(m)}} for m in range(len(self.layers))]
        y = data.val.y
        right = [(self.ctx.outputs(t, data.val.x).argmax(1) == y).double().mean() for t in tried if len(y)]
        return torch.stack(right) if right else torch.zeros(len(tried), dtype=torch.float64)

    # ---- server, up --------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        server = self._counted(server, uploads)
        if server.layer is None:
            return self.switch(server) if round >= self.prep else server
        late = {u.sender: int(u.tree[VOTE][server.distance]) for u in uploads if VOTE in u.tree}
        trained = sorted({*server.trained, *(i for u in uploads for i in self.trained_by(server, u))})
        server = replace(server, layer={**server.layer, **late}, trained=trained)
        return self.after_training(server, [u for u in uploads if VOTE not in u.tree])

    def _counted(self, server: Server, uploads: Sequence[Upload]) -> Server:
        """Return the state with the uploads' votes, and each entry averaged over its senders: Algorithm 2, line 13."""
        voted = [u for u in uploads if VOTE in u.tree]
        told = {u.sender: u.tree[ACCURACY].tolist() for u in voted if ACCURACY in u.tree}
        return replace(
            server,
            w=mixing.layerwise(server.w, uploads, self.weights),
            votes={**server.votes, **{u.sender: u.tree[VOTE].tolist() for u in voted}},
            samples={**server.samples, **{u.sender: int(u.tree[COUNT]) for u in voted}},
            accuracy={**server.accuracy, **told},
        )

    def switch(self, server: Server) -> Server:
        """Make layers personal by the votes of one distance, and by `unseen` for clients that never voted.

        Algorithm 2, line 13.
        """
        d = self._deciding(server)
        layer = {i: server.votes[i][d] for i in sorted(server.votes)}
        layer |= votes.unseen(self.hp.unseen, self.ctx.clients, layer, len(self.layers), self.ctx.rng("unseen"))
        return replace(server, distance=d, layer=layer)

    def _deciding(self, server: VoteServer) -> int:
        """Return the distance whose votes decide; a tie goes to the first."""
        if self.hp.distance == "auto":
            return votes.most_agreed(torch.tensor(list(server.votes.values())))
        if not self.by_accuracy or not server.accuracy:
            return 0
        weights = torch.tensor([float(server.samples[i]) for i in server.accuracy], dtype=torch.float64)
        return int((weights @ torch.tensor(list(server.accuracy.values()), dtype=torch.float64)).argmax())

    def trained_by(self, server: VoteServer, upload: Upload) -> set[ClientId]:
        """Return the clients whose training this upload reports in phase 2."""
        return set() if VOTE in upload.tree else {upload.sender}

    def after_training(self, server: State, sent: Sequence[Upload]) -> State:
        """Return the state after a round of phase 2 with these results of training."""
        raise NotImplementedError

    def global_model(self, server: VoteServer) -> Tree | None:
        return super().global_model(server) if server.layer is None else None

    def cluster_of(self, server: VoteServer) -> dict[ClientId, int] | None:
        """Return the personal layer of each client, also where its clients have no edge."""
        return None if server.layer is None else dict(server.layer)

    def facts(self, server: State) -> dict[str, Any]:
        if server.layer is None:
            return {"voted": len(server.votes)}
        return {
            "distance": votes.distances(self.hp)[server.distance],
            "clusters": {self.layers[m]: len(c) for m, c in self.clusters(server).items()},
            "layer": {str(i): self.layers[m] for i, m in sorted(server.layer.items())},
        }


def shuffled(items: Sequence[ClientId], rng: torch.Generator) -> list[ClientId]:
    """Return the items in a random order."""
    return [items[int(i)] for i in torch.randperm(len(items), generator=rng)]


def byte(value: int) -> Tensor:
    """Return a number as one byte."""
    return torch.tensor([value], dtype=torch.uint8)
