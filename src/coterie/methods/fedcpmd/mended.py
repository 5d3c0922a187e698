"""FedCPMD mended: no layer that was private becomes shared. Coterie's own, 2026.

After FedCPMD (Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025), with its votes and without cluster servers.
Phase 1 shares the whole model. At the switch the layer voted for becomes private with the value it has, and every other
layer is mixed over all participants that share it, by how alike their classifiers changed.

- The text dips at the switch, where private classifiers become shared; here nothing private ever does.
- Similarity is that of the classifiers' changes by rows, with the weight -log(1 - s), as in pFedSim.
- A client uses the best model it has trained, by its validation data, unless the received model is better.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.method import Download, Moment, Settings, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.methods.fedcpmd import mixing
from coterie.methods.fedcpmd.settings import FedCPMDMendedSettings
from coterie.methods.fedcpmd.voting import LAYER, PHI, VOTE, LayerVotes, byte, shuffled
from coterie.parts.similarity import sketch


class FedCPMDMended(LayerVotes):
    """Every layer is mixed over all participants that share it.

    The server's state also holds `sent`, the last participants' models without personal parts; `compared`, the last
    known classifier of each client; `rows`, the weights over the participants by which each client's body is mixed.
    """

    Settings: ClassVar[type[Settings]] = FedCPMDMendedSettings
    hp: FedCPMDMendedSettings
    card = replace(LayerVotes.card, title="FedCPMD (mended)", certainty="O")
    use = "best"
    controls = ("fedcpmd-mended-random", "fedcpmd-mended-classifier")

    @property
    def classifier(self) -> list[str]:
        """Entries of the classifier, weight first."""
        return [k for k in self.ctx.w0 if k in self.ctx.group("head")]

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        model = like(T.drop(self.ctx.w0, self.stays), part="body")
        if link == "up":
            return self._up(now) if now else Schema({**model, **self._vote_entries(), **self._phi()}).optional()
        return self._down(now) if now else Schema({**model, LAYER: self._layer_entry()}).optional()

    def _up(self, now: Moment) -> Schema:
        """With a vote the received model, or nothing if the client was only asked; later its body and classifier."""
        layer = (now.server["layer"] or {}).get(now.client)
        if layer is not None:
            return Schema({**like(self.body(layer), part="body"), **self._phi()})
        sent = now.server["w"] if now.round <= self.prep else {}
        return Schema({**like(sent, part="body"), **self._vote_entries()})

    def _down(self, now: Moment) -> Schema:
        """The whole model before a client has a layer; then its body, first with the layer's value and number."""
        server, client = now.server, now.client
        layer = (server["layer"] or {}).get(client)
        if layer is None:
            return Schema(like(server["w"], part="body"))
        body = T.keep(self.body(layer), server["w"].__contains__)
        if client in server["trained"]:
            return Schema(like(body, part="body"))
        first = {**body, **T.keep(server["w"], self.own(layer).__contains__)}
        return Schema({**like(first, part="body"), LAYER: self._layer_entry()})

    def _phi(self) -> dict[str, Entry]:
        payload = self.hp.similarity_payload
        whole = tuple(mixing.flat_layer(self.ctx.w0, self.classifier).shape)
        shape = whole if payload == "full" else (1, self.hp.sketch_dims)
        return {} if payload == "none" else {PHI: self.phi_entry(payload, shape)}

    # ---- server, down ------------------------------------------------------------------------------------------------
    def setup(self) -> State:
        w = T.clone(T.drop(self.ctx.w0, self.stays))
        return {**self.first_state(w), "sent": {}, "rows": {}, "compared": {}}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        clients = list(self.ctx.clients)
        if server["layer"] is None:
            return self.voters(server, rng, self.share(len(clients)))
        known = sorted(server["layer"])
        picked = shuffled(known, rng)[: self.share(len(known))]
        return [i for i in clients if i not in server["layer"]] + picked  # clients without a layer are asked for it

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        layer, w = server["layer"], server["w"]
        if layer is None:
            return Download(shared=w)
        each = {i: dict(w) for i in ids if i not in layer}
        new = [i for i in ids if i in layer and i not in server["trained"]]
        first = {i: {LAYER: byte(layer[i]), **T.keep(w, self.own(layer[i]).__contains__)} for i in new}
        bodies = mixing.shared_bodies(w, server["sent"], server["rows"], [i for i in ids if i in layer])
        mine = {i: T.drop(b, self.own(layer[i]).__contains__) | first.get(i, {}) for i, b in bodies.items()}
        return Download(each={**each, **mine})

    # ---- client ------------------------------------------------------------------------------------------------------
    def similarity(self, params: Tree, layer: int) -> Tree:
        """Return the change of the classifier since the initial model."""
        if self.hp.similarity_payload == "none":
            return {}
        phi = mixing.flat_layer(params, self.classifier) - mixing.flat_layer(self.ctx.w0, self.classifier)
        if self.hp.similarity_payload == "sketch":
            phi = sketch(phi.flatten()[None], self.hp.sketch_dims, self.ctx.rng("sketch", layer))
        return {PHI: phi}

    # ---- server, up --------------------------------------------------------------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        layer = server["layer"]
        late = {} if layer is None else self.late(server, uploads)
        server = self.counted(server, uploads)
        if layer is None:
            return self.switch(server) if round >= self.prep else server
        sent = [u for u in uploads if VOTE not in u.tree]
        trained = sorted({*server["trained"], *(u.sender for u in sent)})
        server = {**server, "layer": {**layer, **late}, "trained": trained}
        return self.mixed(server, sent) if sent else server

    def mixed(self, server: State, sent: Sequence[Upload]) -> State:
        """Return the state with the participants' models and the weights by which each client's body is mixed."""
        known = {**server["compared"], **{u.sender: u.tree[PHI] for u in sent if PHI in u.tree}}
        mean = torch.tensor(T.normalised(self.weights(sent), len(sent)))
        rows, _ = self.rows(known, list(server["layer"]), [u.sender for u in sent], mean)
        return {**server, "sent": {u.sender: T.untagged(u.tree) for u in sent}, "compared": known, "rows": rows}

    def rows(
        self, known: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        """Return the weights over the participants of every client whose classifier is known."""
        return mixing.mixing_rows(known, members, participants, mean, True, self.hp.phi_map, log=True)
