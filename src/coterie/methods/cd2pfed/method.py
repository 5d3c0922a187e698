"""CD2-pFed, channel decoupling with cyclic distillation. Shen, Zhou, Yu, CVPR 2022 (arXiv 2204.03880).

A growing share of every layer's channels turns private and stays private; the others are averaged. Shared and private
channels each make a sub-network, and the two teach each other (symmetric KL) while the whole network learns.
RECONSTRUCTED (certainty C): no public code; ramps, distillation weight and averaging over epochs are not stated
openly. The share grows from 0 in round 1 to p_max over `ramp` of the rounds; averaging is off (average = 1), so that
p_max = 0 is FedAvg and p_max = 1 without a ramp is Local-Only. There is no distillation while some layer has no private
or no shared channel, because a sub-network would be disconnected. Entries without channels (the head's bias,
embeddings) are shared until the whole model is private. A newcomer's private channels are the initial ones (the paper
averages the outputs of all clients).
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras, State
from coterie.core.method import Card, Download, Method, Model, Moment, Phase, Settings, Start, Trained, Upload
from coterie.core.schema import Entry, Link, Schema, like
from coterie.core.tree import Tree
from coterie.methods.cd2pfed import channels
from coterie.parts.distill import mutual_kl


class CD2pFedSettings(Settings):
    p_max: float = Field(0.5, ge=0, le=1, description="fraction of private channels in the end")
    ramp: float = Field(
        1.0, ge=0, le=1, description="over which fraction of the rounds it grows; 0: there from the start"
    )
    distil: float = Field(1.0, ge=0, description="weight of the distillation between the sub-networks")
    average: float = Field(1.0, gt=0, le=1, description="fraction of the new model in the mean with the last epoch's")
    average_ramp: int = Field(1, ge=1, description="rounds over which that share grows to its value")


class CD2pFed(Method):
    Settings = CD2pFedSettings
    hp: CD2pFedSettings
    card = Card(
        "CD2-pFed",
        "Shen et al., CVPR 2022, arXiv 2204.03880",
        2022,
        "S",
        personal="a share of the channels",
        certainty="C",
    )
    needs = ("head", "classes")
    plans_ahead = True

    def share(self, round: int) -> float:
        """Return p_t, the private share in a round."""
        length = self.hp.ramp * self.ctx.planned_rounds
        return self.hp.p_max * (min(1.0, max(0, round - 1) / length) if length else 1.0)

    def _masks(self, round: int) -> Tree:
        return channels.masks(self.ctx.net, T.drop(self.ctx.w0, self.stays), self.share(round))

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The shared positions of each tensor travel as a vector, which gets shorter from round to round."""
        if now is not None:
            return Schema(like(channels.shared_positions(self.ctx.w0, self._masks(now.round))))
        sizes = {k: v.numel() for k, v in T.drop(self.ctx.w0, self.stays).items()}
        entries = {k: Entry((f"shared of {k}",), self.ctx.w0[k].dtype, optional=True, summable=True) for k in sizes}
        return Schema(entries, {f"shared of {k}": (1, n) for k, n in sizes.items()}, may_be_empty=True)

    def down(self, server: State, ids: Sequence[int], round: int) -> Download:
        return Download(shared=channels.shared_positions(server["w"], self._masks(round)))

    def global_model(self, server: State) -> None:
        return None

    def init_client(self, data: ClientData) -> State:
        return {"w": T.clone(self.ctx.w0)}

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        private = channels.masks_of(self.ctx.net, download, T.drop(self.ctx.w0, self.stays))
        return Model(channels.with_shared(download, state["w"], private), {"private": private})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        params, extras = self.personal(state, download, data)
        distil = self.hp.distil > 0 and channels.divides_every_layer(self.ctx.net, extras["private"])
        blend = self.hp.average * min(1.0, round / self.hp.average_ramp)
        return Start(params, {**extras, "distil": distil, "blend": blend, "previous": params})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, every_epoch=self.average)]

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        ce = self.ctx.ce(params, batch)
        if not extras["distil"]:
            return ce
        sides = (extras["private"], {k: ~m for k, m in extras["private"].items()})
        one, other = (self.ctx.forward(channels.sub_net(self.ctx.net, params, side), batch.x) for side in sides)
        return ce + self.hp.distil * mutual_kl(one, other, batch.weight)

    def average(self, params: Tree, extras: Extras, data: ClientData) -> tuple[Tree, Extras]:
        """Return b w_new + (1 - b) w_previous after each epoch; batch-norm statistics stay as they are."""
        if extras["blend"] >= 1:
            return params, extras
        old, moved = extras["previous"], self.ctx.net.trainable
        new = {k: old[k].lerp(v, extras["blend"]) if k in moved else v for k, v in params.items()}
        return new, {**extras, "previous": new}

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        return {"w": trained.params}, Upload(channels.shared_positions(trained.params, trained.extras["private"]))

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Average the shared positions; positions that have become private keep their last value on the server."""
        mean = T.mean([u.tree for u in uploads], self.weights(uploads)) if uploads[0].tree else {}
        private = channels.masks_of(self.ctx.net, mean, server["w"])
        return {"w": channels.with_shared(mean, server["w"], private)}
