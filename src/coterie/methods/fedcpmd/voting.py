"""Phase 1 of FedCPMD (Algorithm 2) and the switch, which its classes share: clients vote for a layer to keep.

Counters stay with the client, which sends the layer in the lead: only it knows the scores that break ties. A client
that never voted is asked for its layer when phase 2 begins, without training. Whatever a client is not sent is its own;
in the first download after the switch one byte names its layer.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, EdgeId, Extras, State
from coterie.core.layers import Names
from coterie.core.method import Card, Method, Model, Start, Trained, Upload
from coterie.core.schema import Entry, Kind, counts
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.methods.fedcpmd import mixing, votes
from coterie.methods.fedcpmd.settings import VoteSettings

VOTE = "x:vote"  # layer in the lead of a client's votes, for each distance
COUNT = "x:samples"  # training samples of a client, with its vote
PHI = "x:phi"  # layer of a client, for the similarity
LAYER = "x:layer"  # the layer that becomes a client's own


class LayerVotes(Method):
    """Clients vote in phase 1 and keep the layer voted for in phase 2.

    The server's state holds `w`, the body; `votes` and `samples` of the clients that voted; `layer`, client to personal
    layer, None in phase 1; `distance`, the one whose votes decided; `trained`, clients that have trained in phase 2.
    """

    hp: VoteSettings
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

    def _vote_entries(self) -> dict[str, Entry]:
        shape, last = (len(votes.distances(self.hp)),), len(self.layers) - 1
        return {VOTE: Entry(shape, torch.uint8, "statistic", "vote", 0, last), COUNT: counts(1, "vote")}

    def _layer_entry(self) -> Entry:
        return Entry((1,), torch.uint8, "control", "switch", 0, len(self.layers) - 1)

    def phi_entry(self, payload: str, shape: tuple[int | str, ...]) -> Entry:
        """Return the entry of a layer, or of a sketch of it, for the similarity."""
        kind: Kind = "statistic" if payload == "sketch" else "model"
        return Entry(shape, kind=kind, part="similarity")

    # ---- server ------------------------------------------------------------------------------------------------------
    def first_state(self, w: Tree) -> State:
        """Return the state before any vote, with this body."""
        return {"w": w, "votes": {}, "samples": {}, "layer": None, "distance": 0, "trained": []}

    def clusters(self, server: State) -> dict[EdgeId, list[ClientId]]:
        """Return the clients by personal layer: Algorithm 3, line 1."""
        members_of: dict[EdgeId, list[ClientId]] = {}
        for m in range(len(self.layers)):
            members = [i for i, layer in server["layer"].items() if layer == m]
            if members:
                members_of[m] = members
        return members_of

    def voters(self, server: State, rng: torch.Generator, count: int) -> list[ClientId]:
        """Return the participants of a round of phase 1, Algorithm 2, line 4; with coverage every client once first."""
        clients = list(self.ctx.clients)
        queue = shuffled(clients, self.ctx.rng("coverage")) if self.hp.sampler == "coverage" else []
        order = [i for i in queue if i not in server["votes"]] + shuffled(clients, rng)
        return list(dict.fromkeys(order))[:count]

    def share(self, clients: int, least: int = 1) -> int:
        """Return gamma times a number of clients, the participants among them in a round."""
        return max(least, int(self.ctx.join * clients + 0.5))

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "layer": None, "ballot": None}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        return Model(*self.composed(state, download))

    def composed(self, state: State, download: Tree) -> tuple[Tree, Extras]:
        """Return the received body with the client's own part, and its layer: Algorithm 1, lines 1 and 2."""
        layer = int(download[LAYER]) if LAYER in download else state["layer"]
        return {**state["w"], **T.untagged(download)}, {"layer": layer}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, extras = self.composed(state, download)
        asked = round > self.prep and extras["layer"] is None  # never voted: only asked which layer it would keep
        extras |= {"idle": asked, "start": params, "sent": [] if asked else list(download)}
        return Start(params, extras, train=not asked)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Send the body: Algorithm 1, line 6; with a vote Algorithm 2, line 11, and then Algorithm 3, line 8."""
        layer = trained.extras["layer"]
        state = {**state, "w": trained.params, "layer": layer}
        if layer is not None:
            body = T.drop(trained.params, lambda k: self.stays(k) or k in self.own(layer))
            return state, Upload({**body, **self.similarity(trained.params, layer)})

        state["ballot"] = votes.cast(state["ballot"], self.scores(trained.params, trained.extras, data))
        names = {*trained.extras["sent"], *self.also_sent(round)}
        vote = {VOTE: self.leading(state["ballot"]), COUNT: torch.tensor([len(data.train)], dtype=torch.int32)}
        return state, Upload({**T.keep(trained.params, names.__contains__), **vote})

    def also_sent(self, round: int) -> Sequence[str]:
        """Return entries that a round of phase 1 sends in addition to what it received."""
        return ()

    def similarity(self, params: Tree, layer: int) -> Tree:
        """Return what clients are compared by."""
        raise NotImplementedError

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        """Return s_l [votes, distances, layers] on the training part, equation (7)."""
        size = self.ctx.batch if self.hp.vote == "batch" else len(data.train)
        outputs = votes.layer_outputs(self.ctx.net, params, data.train.x, self.layers)
        parts = zip(*(torch.split(t, size) for t in (data.train.x, data.train.y, *outputs)), strict=True)
        return torch.stack([votes.scores(self.hp, o, x, y, data.classes) for x, y, *o in parts])

    def leading(self, ballot: votes.Ballot) -> Tensor:
        return votes.leading(ballot, self.hp.tie)

    # ---- server, up --------------------------------------------------------------------------------------------------
    def counted(self, server: State, uploads: Sequence[Upload]) -> State:
        """Return the state with the uploads' votes, and each entry averaged over its senders: Algorithm 2, line 13."""
        voted = [u for u in uploads if VOTE in u.tree]
        return {
            **server,
            "w": mixing.layerwise(server["w"], uploads, self.weights),
            "votes": {**server["votes"], **{u.sender: u.tree[VOTE].tolist() for u in voted}},
            "samples": {**server["samples"], **{u.sender: int(u.tree[COUNT]) for u in voted}},
        }

    def late(self, server: State, uploads: Sequence[Upload]) -> dict[ClientId, int]:
        """Return the layers of clients that voted in phase 2."""
        return {u.sender: int(u.tree[VOTE][server["distance"]]) for u in uploads if VOTE in u.tree}

    def switch(self, server: State) -> State:
        """Make layers personal by the votes of one distance, and by `unseen` for clients that never voted.

        Algorithm 2, line 13.
        """
        cast = server["votes"]
        d = votes.most_agreed(torch.tensor(list(cast.values()))) if self.hp.distance == "auto" else 0
        layer = {i: cast[i][d] for i in sorted(cast)}
        layer |= votes.unseen(self.hp.unseen, self.ctx.clients, layer, len(self.layers), self.ctx.rng("unseen"))
        return {**server, "distance": d, "layer": layer}

    def global_model(self, server: State) -> Tree | None:
        return super().global_model(server) if server["layer"] is None else None

    def cluster_of(self, server: State) -> dict[ClientId, int] | None:
        """Return the personal layer of each client, also where its clients have no edge."""
        return None if server["layer"] is None else dict(server["layer"])

    def facts(self, server: State) -> dict[str, Any]:
        if server["layer"] is None:
            return {"voted": len(server["votes"])}
        return {
            "distance": votes.distances(self.hp)[server["distance"]],
            "clusters": {self.layers[m]: len(c) for m, c in self.clusters(server).items()},
            "layer": {str(i): self.layers[m] for i, m in sorted(server["layer"].items())},
            "phi": {self.layers[m]: v for m, v in sorted(server.get("phi", {}).items())},
        }


def shuffled(items: Sequence[ClientId], rng: torch.Generator) -> list[ClientId]:
    """Return the items in a random order."""
    return [items[int(i)] for i in torch.randperm(len(items), generator=rng)]


def byte(value: int) -> Tensor:
    """Return a number as one byte."""
    return torch.tensor([value], dtype=torch.uint8)
