"""FeSEM, multi-centre federated learning. Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, WWW J. 2023 (arXiv 2005.01026).

The server holds G centres. A client's trained model is assigned to the nearest centre (all trainable entries), and each
centre becomes the mean of its members' models, from which they train next.
All clients start from the initial model; the first round with at least G answers is grouped by k-means. Centres are
means of the members that answered in the round, as in FlexCFL, not of stale models; a client that has never answered
gets a random centre. The authors re-cluster every few rounds on a few layers and skip clusters of one; here clusters
are renewed in every round and on all layers.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.method import Card, Download, Settings, Upload
from coterie.errors import CoterieError
from coterie.parts.cluster_models import Clustered, first_groups, vectors
from coterie.parts.clustering import assign


class FeSEMSettings(Settings):
    groups: int = Field(2, ge=1, le=1000, description="number of centres G")


class FeSEM(Clustered):
    Settings = FeSEMSettings
    hp: FeSEMSettings
    card = Card(
        "FeSEM",
        "Xie et al., World Wide Web J. 2023, arXiv 2005.01026",
        2020,
        "C",
        personal="the cluster's model",
        certainty="B",
    )
    weighting = "uniform"
    models = "centres"

    def check(self) -> None:
        m = self.ctx.participants()
        if self.hp.groups > m:  # the first grouping needs as many models as groups in one round
            raise CoterieError(f"FeSEM: groups = {self.hp.groups} is more than the {m} participants of a round")

    def setup(self) -> State:
        w = T.drop(self.ctx.w0, self.stays)
        return {"centres": [T.clone(w) for _ in range(self.hp.groups)], "cluster": {}, "grouped": False}

    def _centre(self, server: State, client: ClientId) -> int:
        if client in server["cluster"] or not server["grouped"]:
            return int(server["cluster"].get(client, 0))
        return int(torch.randint(self.hp.groups, (), generator=self.ctx.rng("centre", client)))

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download(each={i: server["centres"][self._centre(server, i)] for i in ids})

    def expectation(self, server: State, uploads: Sequence[Upload]) -> Tensor:
        """Return the nearest centre [answers] of each trained model."""
        V = vectors(self.ctx, [u.tree for u in uploads])
        if server["grouped"]:
            return assign(V, vectors(self.ctx, server["centres"]))
        if len(uploads) >= self.hp.groups:
            return first_groups(self.ctx, V, self.hp.groups)
        return torch.zeros(len(uploads), dtype=torch.int64)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        labels = self.expectation(server, uploads).tolist()
        cluster = {**server["cluster"], **{u.sender: g for u, g in zip(uploads, labels, strict=True)}}
        grouped = server["grouped"] or len(uploads) >= self.hp.groups
        return {"centres": self.averaged(server["centres"], uploads, cluster), "cluster": cluster, "grouped": grouped}
