"""FedCPMD. Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025 (DOI 10.11897/SP.J.1016.2025.00407).

In a first phase (classifier private, body averaged) every participant votes for the layer that carries least of the
shift between its inputs and its labels. Clients with the same winning layer then form a cluster with a server of its
own; they keep that layer and receive all others mixed by how alike the members' personal layers are.
Counters stay with the client, which sends the layer in the lead: only it knows the scores that break ties. A client
that never voted is asked for its layer when phase 2 begins, without training. See docs/methods/fedcpmd.md.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie import tree as T
from coterie.errors import CoterieError
from coterie.method import ClientData, ClientId, Edge, Extras, State, Tree, Upload
from coterie.methods.fedcpmd_settings import FedCPMDSettings
from coterie.parts import cluster_mix as mix
from coterie.parts import layer_choice as choice
from coterie.parts.layer_tier import COUNT, IDS, PHI, VOTE, LayerTier, heard, marked


class FedCPMD(LayerTier):
    Settings = FedCPMDSettings
    hp: FedCPMDSettings
    title = "FedCPMD"
    paper = "Du et al., Chinese Journal of Computers 2025, 10.11897/SP.J.1016.2025.00407"
    year = 2025
    certainty = "P"
    family = "S,C"
    personal_part = "one layer of each client's own choice"
    needs: ClassVar[tuple[str, ...]] = ("head",)

    def check(self) -> None:
        choice.enough(self.layers, named=self.hp.candidates == "classifier" or not isinstance(self.hp.candidates, str))
        if self.hp.preparation >= 1 and self.prep >= self.ctx.rounds:
            raise CoterieError(f"preparation = {self.prep} leaves none of the {self.ctx.rounds} rounds for phase 2")

    def scores(self, params: Tree, extras: Extras, data: ClientData) -> Tensor:
        """s_l [votes, distances, layers] on the training part."""
        size = self.ctx.batch if self.hp.vote == "batch" else len(data.train)
        outputs = choice.layer_outputs(self.ctx.net, params, data.train.x, self.layers)
        parts = zip(*(torch.split(t, size) for t in (data.train.x, data.train.y, *outputs)), strict=True)
        return torch.stack([self.ruler.scores(o, x, y, data.classes) for x, y, *o in parts])

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        layer, sent = extras["layer"], [*extras["sent"]]
        state = {**state, "w": params, "layer": layer}
        if layer is not None:
            body = T.drop(params, lambda k: self.stays(k) or k in self.own(layer))
            return state, Upload({**body, **self.similarity(params, layer)})
        state["ballot"] = choice.cast(state["ballot"], self.scores(params, extras, data))
        if self.hp.switch_init == "mean" and round == self.prep:
            sent += self.ctx.group("head")
        count = torch.tensor([len(data.train)], dtype=torch.int32)
        return state, Upload({**T.keep(params, sent.__contains__), VOTE: self.leads(state["ballot"]), COUNT: count})

    def leads(self, ballot: choice.Ballot) -> Tensor:
        return choice.standing(ballot, self.hp.tie)

    # ---- cluster server ----------------------------------------------------------------------------------------------
    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        fresh = {u.sender: u.tree for u in uploads}
        mean = torch.tensor(T.normalised(self.weights(uploads), len(uploads)))  # equation (5)
        phi = {**edge.state.get("phi", {}), **{i: t[PHI] for i, t in fresh.items() if PHI in t}}
        rows, note = self.rows(phi, list(edge.clients), list(fresh), mean)
        if self.hp.unsampled_body != "similarity":
            rows = {i: rows.get(i, mean).clone() for i in fresh}
        bodies = [T.drop(t, marked) for t in fresh.values()]
        start = edge.download.edge.get(edge.id, {})
        state = mix.renewed({**edge.state, "phi": phi}, start, bodies, mean, rows, self.hp.unsampled_body)
        return state, Upload({IDS: torch.tensor(list(fresh), dtype=torch.int32)}, note)

    def rows(self, phi: mix.Layers, members: list[ClientId], fresh: list[ClientId], mean: Tensor) -> mix.Rows:
        """Weights of equation (12) for every member whose personal layer is known; mean and spread of Phi."""
        return mix.rows(phi, members, fresh, mean, self.hp.phi_of == "rows", self.hp.phi_map)

    # ---- cloud -------------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        voted = [u for u in uploads if VOTE in u.tree]
        votes = {**server["votes"], **{u.sender: u.tree[VOTE].tolist() for u in voted}}
        samples = {**server["samples"], **{u.sender: int(u.tree[COUNT]) for u in voted}}
        w = mix.layerwise(server["w"], uploads, self.weights)
        server = {**server, "w": w, "votes": votes, "samples": samples}
        if server["layer"] is None:
            return self.switch(server) if round >= self.prep else server
        late = {u.sender: int(u.tree[VOTE][server["distance"]]) for u in voted}
        phi = {u.sender: dict(u.note) for u in uploads if IDS in u.tree and u.note}
        met = sorted({*server["met"], *heard(uploads)})
        return {**server, "layer": {**server["layer"], **late}, "met": met, "phi": {**server["phi"], **phi}}

    def switch(self, server: State) -> State:
        """Layers become personal: the votes of one distance decide, and `unseen` for who never voted."""
        d = choice.most_agreed(torch.tensor(list(server["votes"].values()))) if self.hp.distance == "auto" else 0
        layer = {i: server["votes"][i][d] for i in sorted(server["votes"])}
        layer |= choice.unseen(self.hp.unseen, self.ctx.clients, layer, len(self.layers), self.ctx.rng("unseen"))
        return {**server, "distance": d, "layer": layer}
