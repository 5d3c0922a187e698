"""CGPFL, contextualised generalisation. Tang, Guo, Guo, IJCAI 2022 (arXiv 2106.13044).

pFedMe with G server models, the contexts: a client trains its personal theta against a copy of its context, uploads the
copy, and the server regroups the copies by k-means and moves each context towards the mean of its members.
[C]: no public code was found; order of updates, step sizes and server rule are reconstructed from the objective.
All contexts start equal and are cut apart by k-means once G clients have answered. Stored copies of absent clients
take part in the regrouping, but only clients that answered move a context. CGPFL-Heur, which tunes G, is not included.
"""

from collections.abc import Sequence

from pydantic import Field

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.method import Card, Download, Upload
from coterie.core.tree import Tree
from coterie.methods.pfedme import PFedMe, PFedMeSettings
from coterie.parts import model_bank as bank
from coterie.parts.cluster_models import Clustered, first_groups, interpolated, of_cluster, sizes, vectors
from coterie.parts.clustering import warm_kmeans


class CGPFLSettings(PFedMeSettings):
    groups: int = Field(4, ge=1, le=1000, description="number of contexts G")
    inner_steps: int = Field(5, ge=1, description="steps on theta per batch (S)")
    beta: float = Field(1.0, ge=0, le=2, description="step of a context towards its members' mean (the paper's alpha)")


class CGPFL(Clustered, PFedMe):
    Settings = CGPFLSettings
    hp: CGPFLSettings
    card = Card(
        "CGPFL", "Tang et al., IJCAI 2022, arXiv 2106.13044", 2022, "C,R", personal=PFedMe.card.personal, certainty="C"
    )
    weighting = "uniform"
    models = "contexts"

    def setup(self) -> State:
        w = T.drop(self.ctx.w0, self.stays)
        contexts = [T.clone(w) for _ in range(self.hp.groups)]
        empty = {"ids": [], "flat": vectors(self.ctx, [w])[:0]}
        return {"contexts": contexts, "cluster": {}, "bank": empty, "grouped": False}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Clients that never answered get the largest cluster's context."""
        count = sizes(server["cluster"], self.hp.groups)
        largest = count.index(max(count))
        return Download(each={i: server["contexts"][server["cluster"].get(i, largest)] for i in ids})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        new_bank = bank.put(
            server["bank"], {u.sender: T.keep(u.tree, self.ctx.net.trainable.__contains__) for u in uploads}
        )
        contexts = list(server["contexts"])
        if server["grouped"]:
            labels = warm_kmeans(new_bank["flat"], vectors(self.ctx, contexts))[0].tolist()
        elif len(new_bank["ids"]) >= self.hp.groups:
            labels = first_groups(self.ctx, new_bank["flat"], self.hp.groups).tolist()
            contexts = [contexts[0]] * self.hp.groups  # until now all clients were in the first context
        else:
            labels = [0] * len(new_bank["ids"])
        cluster = dict(zip(new_bank["ids"], labels, strict=True))
        moved: list[Tree] = []
        for g, context in enumerate(contexts):
            members = of_cluster(uploads, cluster, g)
            mean = T.mean([u.tree for u in members], self.weights(members)) if members else context
            moved.append(interpolated(context, mean, self.hp.beta if members else 0.0))
        return {"contexts": moved, "cluster": cluster, "bank": new_bank, "grouped": len(labels) >= self.hp.groups}
