"""FedGroup. Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, IEEE ISPA 2021 (arXiv 2010.06870).

Cold start (round 0): clients pre-train from w_0; the cosines of their updates with the leading singular directions are
grouped by k-means. Later rounds are FedAvg inside each group; membership is fixed.
All clients pre-train in round 0; min(20 G, N) of them define the groups, the others join by the cosine of their update
with the groups' directions. A client that joins later trains from w_0 in its first round (E epochs, not the 50 steps of
the cold start), joins in the same way without voting, and has the mean of the groups until then. FedGrouProx is not
included.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientData, ClientId, Context, State
from coterie.core.method import Card, Download, Method, Phase, Settings, Start, Trained, Upload
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.parts.cluster_models import Clustered, vectors
from coterie.parts.clustering import kmeans, svd_features
from coterie.parts.similarity import cosine


class FedGroupSettings(Settings):
    groups: int = Field(3, ge=1, le=1000, description="number of groups G")
    pretrain_steps: int = Field(50, ge=1, description="mini-batch steps of the cold start")
    founders: int = Field(20, ge=1, description="clients per group that found the groups, drawn at random")
    eta_g: float = Field(0.0, ge=0, description="inter-group step: weight eta_g / norm of every other group's model")


class FedGroup(Clustered):
    Settings = FedGroupSettings
    hp: FedGroupSettings
    card = Card("FedGroup", "Duan et al., IEEE ISPA 2021, arXiv 2010.06870", 2021, "C", personal="the group's model")

    def setup(self) -> State:
        w = T.clone(T.drop(self.ctx.w0, self.stays))
        return {"models": [w], "cluster": {}, "directions": torch.zeros(0)}

    def opening(self) -> bool:
        return True

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        of, models = server["cluster"], server["models"]
        common = T.mean(models)
        return Download(each={i: models[of[i]] if i in of else common for i in ids})

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = download if state.get("trained") else T.drop(self.ctx.w0, self.stays)
        return Start({**start, **state.get("own", {})})

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss, steps=self.hp.pretrain_steps if round == 0 else None)]

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return {**state, "trained": True}, upload

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if not server["cluster"]:
            return self._join(self._found(uploads), uploads)
        models = self.averaged(server["models"], uploads, server["cluster"])  # new members started from w_0
        return self._join({**server, "models": across(self.ctx, models, self.hp.eta_g)}, uploads)

    def _join(self, server: State, uploads: Sequence[Upload]) -> State:
        """Assign clients without a group to the group with the nearest direction."""
        new = [u for u in uploads if u.sender not in server["cluster"]]
        if not new:
            return server
        nearest = cosine(self._updates(new), server["directions"]).argmax(1).tolist()
        joined = {u.sender: g for u, g in zip(new, nearest, strict=True)}
        return {**server, "cluster": {**server["cluster"], **joined}}

    def _updates(self, uploads: Sequence[Upload]) -> Tensor:
        """Return the pre-training updates [n, P], which are always relative to w_0."""
        return vectors(self.ctx, [u.tree for u in uploads]) - vectors(self.ctx, [T.drop(self.ctx.w0, self.stays)])

    def _found(self, uploads: Sequence[Upload]) -> State:
        order = torch.randperm(len(uploads), generator=self.ctx.rng("founders"))
        picked = [uploads[i] for i in sorted(order[: self.hp.founders * self.hp.groups].tolist())]
        D, count = self._updates(picked), min(self.hp.groups, len(picked))
        labels = kmeans(svd_features(D, count), count, key(self.ctx.seed, "cold-start"), iterations=20)
        groups = [(labels == g).nonzero().flatten().tolist() for g in range(int(labels.max()) + 1)]
        return {
            "models": [T.mean([picked[r].tree for r in rows]) for rows in groups],
            "cluster": {picked[r].sender: g for g, rows in enumerate(groups) for r in rows},
            "directions": torch.stack([D[rows].mean(0) for rows in groups]),
        }

    def global_model(self, server: State) -> Tree | None:
        """Return the auxiliary model: the mean of the groups."""
        return Method.global_model(self, {"w": T.mean(server["models"])})


def across(ctx: Context, models: Sequence[Tree], eta: float) -> list[Tree]:
    """Mix each model with every other one at weight eta / norm of the other one, all from the same snapshot."""
    if eta == 0:
        return list(models)
    pull = [eta / float(v.norm()) for v in vectors(ctx, models)]
    return [T.mean(models, [1.0 if h == g else p for h, p in enumerate(pull)]) for g in range(len(models))]
