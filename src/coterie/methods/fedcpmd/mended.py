"""FedCPMD mended: no layer that was private becomes shared. Coterie's own, 2026.

After FedCPMD (Du, Chen, Kou, Zhao, Xu, Chinese Journal of Computers 2025), with its votes and without cluster servers.
Phase 1 shares the whole model. At the switch the layer voted for becomes private with the value it has, and every other
layer is mixed over all participants that share it, by how alike their classifiers changed.

- The text dips at the switch, where private classifiers become shared; here nothing private ever does.
- Similarity is that of the classifiers' changes by rows, with the weight -log(1 - s), as in pFedSim.
- A client uses the best model it has trained, by its validation data, unless the received model is better.
- A newcomer receives the whole shared model: every layer is averaged over the clients that share it.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId
from coterie.core.method import Download, Moment, Settings, Upload
from coterie.core.schema import Link, Schema, like
from coterie.core.states import state
from coterie.core.tree import Tree
from coterie.methods.fedcpmd import mixing
from coterie.methods.fedcpmd.settings import FedCPMDMendedSettings
from coterie.methods.fedcpmd.voting import LAYER, LayerVotes, VoteServer, byte


@state
class FedCPMDMendedServer(VoteServer):
    sent: dict[ClientId, Tree] = field(default_factory=dict)  # last participants' models without personal parts
    compared: dict[ClientId, Tensor] = field(default_factory=dict)  # last known classifier of each client
    rows: dict[ClientId, Tensor] = field(default_factory=dict)  # weights over the participants, for each client's body


class FedCPMDMended(LayerVotes):
    """Every layer is mixed over all participants that share it."""

    Settings: ClassVar[type[Settings]] = FedCPMDMendedSettings
    hp: FedCPMDMendedSettings
    card = replace(LayerVotes.card, title="FedCPMD (mended)", certainty="O")
    use = "best"
    controls = ("fedcpmd-mended-random", "fedcpmd-mended-classifier")

    def compared(self, layer: int) -> list[str]:
        return [k for k in self.ctx.w0 if k in self.ctx.group("head")]

    # ---- what may cross a link ---------------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        if link == "up":
            return self.up(now) if now else self.any_up()
        return self._down(now) if now else Schema({**self.whole(), LAYER: self.layer_entry()}).optional()

    def _down(self, now: Moment) -> Schema:
        """The whole model before a client has a layer; then its body, first with the layer's value and number."""
        w, layer = now.server.w, (now.server.layer or {}).get(now.client)
        if layer is None:
            return Schema(like(w, part="body"))
        body = T.keep(self.body(layer), w.__contains__)
        if now.client in now.server.trained:
            return Schema(like(body, part="body"))
        first = {**body, **T.keep(w, self.own(layer).__contains__)}
        return Schema({**like(first, part="body"), LAYER: self.layer_entry()})

    # ---- server, down ------------------------------------------------------------------------------------------------
    def setup(self) -> FedCPMDMendedServer:
        return FedCPMDMendedServer(T.clone(T.drop(self.ctx.w0, self.stays)))

    def pools(self, server: VoteServer) -> list[list[ClientId]]:
        return [sorted(server.layer or {})]

    def down(self, server: FedCPMDMendedServer, ids: Sequence[ClientId], round: int) -> Download:
        layer, w = server.layer, server.w
        if layer is None:
            return Download(shared=w)
        each = {i: dict(w) for i in ids if i not in layer}
        new = [i for i in ids if i in layer and i not in server.trained]
        first = {i: {LAYER: byte(layer[i]), **T.keep(w, self.own(layer[i]).__contains__)} for i in new}
        bodies = mixing.shared_bodies(w, server.sent, server.rows, [i for i in ids if i in layer])
        mine = {i: T.drop(b, self.own(layer[i]).__contains__) | first.get(i, {}) for i, b in bodies.items()}
        return Download(each={**each, **mine})

    # ---- client ------------------------------------------------------------------------------------------------------

    # ---- server, up --------------------------------------------------------------------------------------------------
    def after_training(self, server: FedCPMDMendedServer, sent: Sequence[Upload]) -> FedCPMDMendedServer:
        """Return the state with the participants' models and the weights by which each client's body is mixed."""
        if not sent:
            return server
        known = mixing.known_layers(server.compared, sent)
        mean = torch.tensor(T.normalised(self.weights(sent), len(sent)))
        rows, _ = self.rows(known, list(server.layer or {}), [u.sender for u in sent], mean)
        return replace(server, sent={u.sender: T.untagged(u.tree) for u in sent}, compared=known, rows=rows)

    def rows(
        self, known: mixing.Layers, members: list[ClientId], participants: list[ClientId], mean: Tensor
    ) -> mixing.Rows:
        """Return the weights over the participants of every client whose classifier is known."""
        return mixing.mixing_rows(known, members, participants, mean, True, self.hp.phi_map, log=True)
