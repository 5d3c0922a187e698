"""FL+HC, hierarchical clustering of local updates. Briggs, Fan, Andras, IJCNN 2020 (arXiv 2004.11791).

After n rounds of FedAvg there is one round in which all clients train from w; the updates are clustered
agglomeratively, and in later rounds each cluster is a FedAvg of its own.
Metric, linkage and threshold of the paper are unconfirmed: l2 and ward, cut at a quantile of the merge heights, are our
choice. The clustering round's training counts: a cluster starts at the mean of its members.
A client that missed that round receives w from before it and, when it answers, joins the cluster whose mean update is
nearest (l2).
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from coterie.core.context import ClientId, State
from coterie.core.method import Card, Download, Method, Settings, Upload
from coterie.core.tree import Tree
from coterie.errors import CoterieError
from coterie.parts.cluster_models import Clustered, vectors
from coterie.parts.clustering import Linkage, MetricName, agglomerate, assign


class FLHCSettings(Settings):
    warmup: int = Field(10, ge=0, description="rounds of FedAvg before the clustering round (n)")
    metric: MetricName = Field("l2", description="distance between updates")
    linkage: Linkage = Field("ward", description="linkage; ward needs l2")
    quantile: float = Field(0.9, ge=0, le=1, description="cut at this quantile of the merge heights")
    threshold: float | None = Field(None, ge=0, description="cut at this height instead")
    groups: int | None = Field(None, ge=1, description="cut into this many clusters instead")


class FLHC(Clustered):
    Settings = FLHCSettings
    hp: FLHCSettings
    card = Card(
        "FL+HC", "Briggs et al., IJCNN 2020, arXiv 2004.11791", 2020, "C", personal="the cluster's model", certainty="B"
    )

    def check(self) -> None:
        if self.hp.linkage == "ward" and self.hp.metric != "l2":
            raise CoterieError(f"FL+HC: linkage = ward needs metric = l2, not {self.hp.metric}")
        if self.hp.threshold is not None and self.hp.groups is not None:
            raise CoterieError("FL+HC: set threshold or groups, not both")

    def setup(self) -> State:
        return {**super().setup(), "models": [], "cluster": {}, "centres": torch.zeros(0), "height": 0.0}

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        """Sample all clients in the clustering round; afterwards at least one client of each cluster."""
        if not server["models"]:
            return super().sample(server, round, rng) if round <= self.hp.warmup else list(self.ctx.clients)
        clusters: dict[int, list[ClientId]] = {}  # -1: missed the clustering round
        for i in self.ctx.clients:
            clusters.setdefault(server["cluster"].get(i, -1), []).append(i)
        picked: list[ClientId] = []
        for _, members in sorted(clusters.items()):
            order = torch.randperm(len(members), generator=rng)[: self.ctx.participants(len(members))]
            picked += [members[int(p)] for p in order]
        return sorted(picked)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        if not server["models"]:
            return super().down(server, ids, round)
        of, models = server["cluster"], server["models"]
        return Download(each={i: models[of[i]] if i in of else server["w"] for i in ids})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if not server["models"] and round <= self.hp.warmup:
            return super().aggregate(server, uploads, round)
        server = server if server["models"] else self._cluster(server, uploads)
        new = [u for u in uploads if u.sender not in server["cluster"]]
        models = self.averaged(server["models"], uploads, server["cluster"])
        nearest = assign(self._updates(server, new), server["centres"]).tolist() if new else []
        cluster = {**server["cluster"], **{u.sender: c for u, c in zip(new, nearest, strict=True)}}
        return {**server, "models": models, "cluster": cluster}

    def _updates(self, server: State, uploads: Sequence[Upload]) -> torch.Tensor:
        return vectors(self.ctx, [u.tree for u in uploads]) - vectors(self.ctx, [server["w"]])

    def _cluster(self, server: State, uploads: Sequence[Upload]) -> State:
        D, hp = self._updates(server, uploads), self.hp
        quantile = hp.quantile if hp.threshold is None and hp.groups is None else None
        tree = agglomerate(D, hp.metric, hp.linkage, hp.threshold, quantile, hp.groups)
        centres = torch.stack([D[tree.labels == c].mean(0) for c in range(int(tree.labels.max()) + 1)])
        cluster = dict(zip([u.sender for u in uploads], tree.labels.tolist(), strict=True))
        models = [server["w"]] * len(centres)
        return {**server, "models": models, "cluster": cluster, "centres": centres, "height": tree.threshold}

    def global_model(self, server: State) -> Tree | None:
        return None if server["models"] else Method.global_model(self, server)

    def facts(self, server: State) -> dict[str, Any]:
        if not server["models"]:
            return {}
        height = {"height": server["height"]} if server["height"] < float("inf") else {}
        return {**super().facts(server), **height}
