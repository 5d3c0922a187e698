"""Who is sent what, and what it weighs, when every client keeps one layer of its own choice (FedCPMD).

Until the switch there is one body at the cloud; after it each layer that somebody keeps has a cluster server (an edge).
Whatever a client is not sent is its own. In the first download after the switch one byte names its layer.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from coterie import tree as T
from coterie.method import ClientData, ClientId, Download, Edge, EdgeId, Extras, Method, Payload, State, Tree, Upload
from coterie.models.layers import Names
from coterie.parts import cluster_mix as mix
from coterie.parts import layer_choice as choice
from coterie.parts.similarity import sketch

VOTE, COUNT, LAYER, PHI, IDS = "x:vote", "x:samples", "x:layer", "x:phi", "x:ids"
PARTS = {VOTE: "vote", COUNT: "vote", LAYER: "switch", PHI: "similarity", IDS: "log"}


class LayerTier(Method):
    """The hooks around the algorithm; `hp` has the settings of FedCPMD."""

    @property
    def layers(self) -> tuple[str, ...]:
        return choice.candidates(self.ctx.net.layout, self.hp.candidates)

    @property
    def ruler(self) -> choice.Ruler:
        named = choice.PAPER if self.hp.distance == "auto" else (self.hp.distance,)
        return choice.Ruler(named, **{f.name: getattr(self.hp, f.name) for f in fields(choice.Ruler)[1:]})

    @property
    def prep(self) -> int:
        """Rounds of phase 1."""
        p = self.hp.preparation
        return int(p) if p >= 1 else max(1, int(p * self.ctx.rounds + 0.5))

    def own(self, layer: int) -> list[str]:
        """Entries of a personal layer, weight first."""
        return [k for k in self.ctx.w0 if k in self.ctx.group(f"layer:{self.layers[layer]}")]

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        first = self.ctx.group("head") if self.hp.phase1_personal == "classifier" else Names()
        w = T.clone(T.drop(self.ctx.w0, lambda k: self.stays(k) or k in first))
        return {"w": w, "votes": {}, "samples": {}, "layer": None, "distance": 0, "met": [], "phi": {}}

    def clusters(self, server: State) -> dict[EdgeId, list[ClientId]]:
        """Clients by personal layer."""
        return {m: c for m in range(len(self.layers)) if (c := [i for i, own in server["layer"].items() if own == m])}

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        return None if server["layer"] is None else self.clusters(server)

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        clients, join = list(self.ctx.clients), self.ctx.join
        if server["layer"] is None:
            queue = _shuffled(clients, self.ctx.rng("coverage")) if self.hp.sampler == "coverage" else []
            order = [i for i in queue if i not in server["votes"]] + _shuffled(clients, rng)
            return list(dict.fromkeys(order))[: max(1, int(join * len(clients) + 0.5))]
        pools = self.pools(server)
        picked = [i for c in pools for i in _shuffled(c, rng)[: max(1, int(join * len(c) + 0.5))]]
        return [i for i in clients if i not in server["layer"]] + picked  # who has no layer yet is asked for it

    def pools(self, server: State) -> list[list[ClientId]]:
        """Groups that are sampled from separately in phase 2."""
        return list(self.clusters(server).values())

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        w, layer = server["w"], server["layer"]
        if layer is None and self.hp.phase1_personal != "voted":
            return Download(shared=w)
        each = {i: T.drop(w, self._first(server, i)) for i in ids if layer is None or i not in layer}
        each |= {i: {LAYER: _byte(layer[i])} for i in ids if i not in each and i not in server["met"]}
        new = [] if layer is None else [m for m in self.clusters(server) if not self.begun(server, m)]
        return Download(each=each, edge={m: T.drop(w, self.own(m).__contains__) for m in new})

    def begun(self, server: State, layer: int) -> bool:
        """Has this cluster had its first aggregation? Before it the classifier is in nobody's body."""
        return any(server["layer"].get(i) == layer for i in server["met"])

    def _first(self, server: State, client: ClientId) -> T.Names:
        """What a client keeps while it has no layer of its own."""
        how, votes = self.hp.phase1_personal, server["votes"].get(client)
        if how == "none":
            return T.nothing
        return (self.own(votes[0]) if how == "voted" and votes else self.ctx.group("head")).__contains__

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        got = edge.download
        B = mix.bodies_of(edge.state, got.edge.get(edge.id, {}), ids)
        return Download(each={i: {**B[i], **got.each.get(i, {})} for i in ids})

    # ---- client: what it is not sent is its own ----------------------------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0), "layer": None, "ballot": None}

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        layer = int(download[LAYER]) if LAYER in download else state["layer"]
        reset = LAYER in download and self.hp.switch_init == "reset"
        back = {k: self.ctx.w0[k] for k in self.ctx.group("head") if reset and k not in self.own(layer)}
        return {**state["w"], **back, **T.drop(download, marked)}, {"layer": layer}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        params, extras = self.personal(state, download, data)
        probed = round > self.prep and extras["layer"] is None  # never voted: only asked which layer it would keep
        return params, {**extras, "idle": probed, "start": params, "sent": [] if probed else list(download)}

    def global_model(self, server: State) -> Tree | None:
        return super().global_model(server) if server["layer"] is None else None

    def similarity(self, params: Tree, layer: int) -> Tree:
        """What the cluster server compares members by (A7, A9)."""
        if self.hp.similarity_payload == "none":
            return {}
        phi = mix.flat_layer(params, self.own(layer))
        phi = phi - mix.flat_layer(self.ctx.w0, self.own(layer)) if self.hp.phi_input == "delta" else phi
        if self.hp.similarity_payload == "sketch":
            phi = sketch(phi.flatten()[None], self.hp.sketch_dims, self.ctx.rng("sketch", layer))
        return {PHI: phi}

    # ---- the log -----------------------------------------------------------------------------------------------------
    def part(self, name: str) -> str:
        return PARTS.get(name, "body")

    def facts(self, server: State) -> dict[str, Any]:
        if server["layer"] is None:
            return {"voted": len(server["votes"])}
        return {
            "distance": self.ruler.distances[server["distance"]],
            "clusters": {self.layers[m]: len(c) for m, c in self.clusters(server).items()},
            "layer": {str(i): self.layers[m] for i, m in sorted(server["layer"].items())},
            "phi": {self.layers[m]: v for m, v in sorted(server["phi"].items())},
        }

    def payload(self, labels: int, round: int = 1) -> Payload:
        """In phase 2 for a client that keeps the last candidate and has been told so."""
        server, any_ = self.setup(), self.ctx.clients[0]
        if round > self.prep:
            server |= {"layer": {any_: len(self.layers) - 1}, "met": [any_]}
        return self.payload_of(server, any_, labels, round)

    def payload_of(self, server: State, client: ClientId, labels: int, round: int) -> Payload:
        w, layer, head = server["w"], server["layer"], self.ctx.group("head")
        if layer is None or client not in layer:
            down = T.drop(w, self._first(server, client)) if layer or self.hp.phase1_personal == "voted" else w
            up = down if round <= self.prep else {}
            if self.hp.switch_init == "mean" and round == self.prep:
                up = {**up, **{k: self.ctx.w0[k] for k in head}}
            return Payload(T.nbytes(up) + 4 + len(self.ruler.distances), T.nbytes(down))
        body = T.drop(self.ctx.w0, lambda k: self.stays(k) or k in self.own(layer[client]))
        whole = client in server["met"] if self.hp.unsampled_body == "keep" else self.begun(server, layer[client])
        sent = body if whole else T.keep(body, w.__contains__)
        up = {**body, **self.similarity(self.ctx.w0, layer[client])}
        return Payload(T.nbytes(up), T.nbytes(sent) + (client not in server["met"]))


def _shuffled(items: Sequence[ClientId], rng: torch.Generator) -> list[ClientId]:
    return [items[int(i)] for i in torch.randperm(len(items), generator=rng)]


def _byte(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def marked(name: str) -> bool:
    return ":" in name


def heard(uploads: Sequence[Upload]) -> list[ClientId]:
    """Who trained in phase 2: those an edge names, and those that wrote to the cloud themselves."""
    trained = [u for u in uploads if VOTE not in u.tree]
    return [i for u in trained for i in (u.tree[IDS].tolist() if IDS in u.tree else [u.sender])]
