"""SC-FPFL. Jin, Chen, Journal of Electronics & Information Technology 45(6), 2023, 1981-1989 (DOI 10.11999/JEIT220529).

Clients are clustered by their predictions on a public set; every cluster has an edge that averages its clients. The
cloud gives the edge models common low-frequency amplitudes and leaves each its phases and high frequencies. At home the
edge's model becomes an agent that relearns from the client's own model; if it is good enough, it replaces that model.
That is the text (reading = paper). By default (reading = mended) the agent restores only what was lost: it learns from
the own model only where that is better than the edge's on validation data, the client keeps the best of the three, and
the edge averages agents.

Until there are clusters, everybody is one cluster at the cloud. In the round that ends with clusters everybody takes
part and is asked for its predictions (one bit); who does not answer joins the largest cluster. An edge that nobody
answered keeps its model. The models of the first average travel with the predictions, so V rounds are V agents. Batch
norm is averaged like a bias. The number of clusters is found in the eigenvalues unless it is given.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.edges import EdgeMethod
from coterie.core.method import (
    Batch,
    Card,
    Client,
    ClientData,
    ClientId,
    Context,
    Download,
    EdgeId,
    Extras,
    Model,
    Moment,
    Phase,
    Settings,
    Split,
    Start,
    State,
    Trained,
    Tree,
    Upload,
    cross_entropy,
)
from coterie.core.rng import key
from coterie.core.schema import LARGEST, Entry, Link, Schema
from coterie.core.views import ModelView
from coterie.errors import CoterieError
from coterie.methods.scfpfl import movement
from coterie.methods.scfpfl.settings import SCFPFLSettings
from coterie.methods.scfpfl.spectral import prediction_clusters
from coterie.parts.cluster_models import largest, of_cluster
from coterie.parts.distill import kl
from coterie.parts.fourier import Treatment, fourier_aggregate, prrfl_window

ASK, PREDICTIONS = "x:ask", "x:predictions"
OWN = "own"  # marks the client's own model in training; the agent has the plain names


class SCFPFL(EdgeMethod):
    """Server state: theta, the edges' own models; samples, the samples behind each; hat, what the cloud made of them;
    cluster, client to edge; ask, whether the next round ends with clusters; moves, how far clients moved (stationary).
    """

    Settings: ClassVar[type[Settings]] = SCFPFLSettings
    hp: SCFPFLSettings
    needs: ClassVar[tuple[str, ...]] = ("public", "val", "classes")
    by_predictions: ClassVar[bool] = True  # do clients send predictions that clusters are made from?
    controls = ("sc-fpfl-cluster-only", "sc-fpfl-no-agent")
    card = Card(
        title="SC-FPFL",
        paper="Jin, Chen, J. of Electronics & Information Technology 2023, DOI 10.11999/JEIT220529",
        year=2023,
        family="C,R",
        personal="the whole model, taken over from an agent",
        certainty="P",
    )
    plans_ahead = True

    def check(self) -> None:
        clients, rounds = len(self.ctx.clients), self.ctx.planned_rounds
        for name in ("k0", "embed_dim", "n_min"):
            if isinstance(value := getattr(self.hp, name), int) and value > clients:
                raise CoterieError(f"{self.card.title}: {name} = {value} is more than the {clients} clients")
        when = self.hp.cluster_when
        if when.startswith("round:") and int(when[6:]) > rounds:
            raise CoterieError(f"{self.card.title}: cluster_when = {when} is after the last of {rounds} rounds")

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The model; in the round that ends with clusters also a question down and predictions up."""
        model = self.model_schema
        if link not in ("up", "down") or not self.by_predictions:
            return model
        if now is not None and not self.asks(now.server, now.round):
            return model
        if link == "down":
            more = Schema({ASK: Entry((1,), torch.bool, "control", "ask")})
        else:
            low, high = (0.0, 1.0) if self.hp.predict == "softmax" else (-LARGEST, LARGEST)
            shape = (self.ctx.public, self.ctx.classes)
            more = Schema({PREDICTIONS: Entry(shape, kind="prediction", part="predictions", low=low, high=high)})
        return (more.optional() if now is None else more) | model

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> State:
        w = T.clone(T.drop(self.ctx.w0, self.stays))
        moves = movement.start(w, self.ctx.clients, self._counts) if self.when() == "stationary" else {}
        return {"theta": {0: w}, "samples": {0: 0}, "hat": {0: T.clone(w)}, "cluster": {}, "ask": False, "moves": moves}

    def when(self) -> str:
        """When clusters are made: start, round:<n> or stationary."""
        return self.hp.cluster_when

    def asks(self, server: State, round: int) -> bool:
        """Is this the round that ends with clusters?"""
        when = self.when()
        due = when == "start" or (when.startswith("round:") and round >= int(when[6:]))
        return not server["cluster"] and bool(server["ask"] or due)

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        return list(self.ctx.clients) if self.asks(server, round) else super().sample(server, round, rng)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        of, hat = server["cluster"], server["hat"]
        if of:
            return Download(each={i: hat[largest(of)] for i in ids if i not in of}, edge=hat)
        if self.by_predictions and self.asks(server, round):
            return Download({**hat[0], ASK: torch.ones(1, dtype=torch.bool)})
        return Download(hat[0])

    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        members: dict[EdgeId, list[ClientId]] = {k: [] for k in server["hat"]}
        for i, k in server["cluster"].items():
            members[k].append(i)
        return members if server["cluster"] else None

    # ---- client ------------------------------------------------------------------------------------------------------
    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        own = state.get("f", self.ctx.w0)
        agent = {**own, **T.keep(download, self.ctx.w0.__contains__)}
        extras: Extras = {"edge": agent, "own": own, "ask": ASK in download}
        per_sample = None
        if round > 0:
            judged, per_sample = self.judged(agent, own, data)
            extras |= judged
        return Start({**agent, **T.tag(OWN, own)} if self.trains_own else agent, extras, per_sample=per_sample)

    @property
    def trains_own(self) -> bool:
        """Does the client's own model train beside the agent?"""
        return self.hp.local_train_each_round or self.hp.agent_fail == "train"

    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        """lost: does the own model know what the edge's does not, by validation data? Only then is it a teacher. What a
        teacher that does not train says about the training samples is asked here, once.
        """
        lost, val = True, {}
        if self.hp.kl_when == "own_better":
            val = {"edge": accuracy(self.ctx, edge, data.val), "own": accuracy(self.ctx, own, data.val)}
            lost = val["own"] > val["edge"]
        teaches = lost and self.hp.kl_weight > 0 and not self.trains_own
        taught = predictions(self.ctx, own, data.train.x) if teaches else None
        return {"lost": torch.tensor(float(lost)), "val": val}, taught

    def phases(self, round: int) -> list[Phase]:
        if round == 0:
            return [Phase(self.loss, trains=is_agent, epochs=self.hp.warmup_epochs)]
        agent = Phase(self.relearn, trains=is_agent, epochs=self.hp.agent_epochs)
        own = Phase(self.own_loss, trains=is_own, stream=1)
        if not self.trains_own:
            return [agent]
        return [own, agent] if self.hp.local_train_each_round else [agent, own]

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Of the agent: cross-entropy and KL(own || agent), equations (10) and (11).

        A teacher that trains too is asked in every step, as it is then; any other one was asked before.
        """
        logits = self.ctx.forward(params, batch.x)
        loss, teacher, share = cross_entropy(logits, batch), batch.per_sample, self.hp.kl_weight
        if self.trains_own and share:
            with torch.no_grad():
                teacher, share = self.ctx.forward(T.tagged(OWN, params), batch.x), share * extras["lost"]
        return loss if teacher is None else loss + share * kl(teacher, logits, batch.weight)

    def _own(self, params: Tree, extras: Extras) -> Tree:
        own: Tree = T.tagged(OWN, params) if self.trains_own else extras["own"]
        return own

    def own_loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.ce(T.tagged(OWN, params), batch)

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        """Who takes over, by validation data; `own` has trained if the settings say so.

        The agent if it is good enough, or whoever is best (in doubt the agent, then the edge).
        """
        rival = own if self.hp.local_train_each_round else extras["own"]
        trees = {"agent": agent, "edge": extras["edge"], "own": rival}
        known: dict[str, float] = {} if rival is own and self.trains_own else extras.get("val", {})
        val = {who: known[who] if who in known else accuracy(self.ctx, tree, data.val) for who, tree in trees.items()}
        note = {f"val_{k}": v for k, v in val.items()}
        if self.hp.accept == "best":
            best = max(val, key=val.__getitem__)  # of equals the first
            return trees[best], {"rejected": float(best != "agent"), **note}
        good = val["agent"] >= self.hp.lambda1 * val["own"]
        return agent if good else own, {"rejected": float(not good), **note}

    def sent(self, agent: Tree, kept: Tree) -> Tree:
        """What a client uploads."""
        return kept if self.hp.sends == "kept" else agent

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        agent, own = T.drop(trained.params, is_own), self._own(trained.params, trained.extras)
        f, note = self.accept(agent, own, trained.extras, data) if round > 0 else (agent, {})
        tree = T.drop(self.sent(agent, f), self.stays)
        if trained.extras["ask"] and data.public is not None:
            tree[PREDICTIONS] = predictions(self.ctx, f, data.public, self.hp.predict)
        return {"f": f}, Upload(tree, note)

    def model(self, view: ModelView, client: Client) -> Model | None:
        sent = T.keep(client.download, self.ctx.w0.__contains__)
        if view == "received":  # the edge's model, which becomes the agent
            return Model({**client.state.get("f", self.ctx.w0), **sent})
        if view == "edge":
            return Model(sent) if not any(map(self.stays, self.ctx.w0)) else None
        return Model(client.state["f"]) if view == "trained" else super().model(view, client)

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        own = state.get("f")
        if own is not None and self.hp.score == "own":
            return Model(own)
        return Model({**(own or self.ctx.w0), **T.keep(download, self.ctx.w0.__contains__)})

    # ---- cloud, up; an edge's mean, equation (9), is the default merge -----------------------------------------------
    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        if not server["cluster"]:
            return self._without_edges(server, uploads, round)
        theta = {**server["theta"], **{u.sender: u.tree for u in uploads}}
        samples = {**server["samples"], **{u.sender: u.samples for u in uploads}}
        return {**server, "theta": theta, "samples": samples, "hat": self.mix(theta, samples, round)}

    def _without_edges(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Straight from the clients: what edges would do, the cloud does for the one cluster or for the new ones."""
        asked = self.asks(server, round)
        of = self.clusters(uploads) if asked else {u.sender: 0 for u in uploads}

        theta: dict[EdgeId, Tree] = {}
        samples: dict[EdgeId, int] = {}
        for k in range(max(of.values()) + 1):
            members = of_cluster(uploads, of, k)
            models = [T.keep(u.tree, self.ctx.w0.__contains__) for u in members]
            still = round == 0 and not self.hp.warmup_epochs  # nobody has moved: a mean would only round
            theta[k] = T.clone(server["theta"][0]) if still else T.mean(models, self.weights(members))
            samples[k] = sum(u.samples for u in members)

        new = {**server, "theta": theta, "samples": samples, "hat": self.mix(theta, samples, round)}
        if asked:
            return {**new, "cluster": {i: of.get(i, largest(of)) for i in self.ctx.clients}, "moves": {}}
        if not server["moves"]:
            return new
        moves = movement.follow(server["moves"], uploads, self._counts)
        still = round > self.hp.min_round and movement.stationary(moves, self.hp.eps1, self.hp.eps2)
        return {**new, "moves": moves, "ask": still}

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        """Similarity of predictions, spectral embedding, ISODATA: equations (1) to (8)."""
        hp = self.hp
        labels = prediction_clusters(
            torch.stack([u.tree[PREDICTIONS] for u in uploads]),
            hp.k0,
            key(self.ctx.seed, "clusters"),
            embed_dim=hp.embed_dim,
            predict=hp.predict,
            compare=hp.compare,
            self_similarity=hp.self_similarity,
            gap_power=hp.gap_power,
            n_min=hp.n_min,
            delta_max=hp.delta_max,
            m_min=hp.m_min,
            max_iter=hp.max_iter,
            split=hp.split,
            mode=hp.isodata,
        )
        return {u.sender: k for u, k in zip(uploads, labels.tolist(), strict=True)}

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        """Common low-frequency amplitudes, own phases: equations (12) to (17); one model alone stays as it is."""
        hp, ctx = self.hp, self.ctx
        g = hp.g if hp.g_schedule == "const" else prrfl_window(round, ctx.planned_rounds, hp.g, hp.g_last)
        weights = torch.tensor([float(samples[k]) for k in theta]) if hp.fourier_weight == "samples" else None

        def treatment(name: str) -> Treatment:
            if ctx.w0[name].ndim > 1:
                return "fourier" if name in ctx.group("conv") else hp.fourier_linear
            statistic = name in ctx.group("bn_stats")  # a running variance must stay positive
            return "mean" if statistic and hp.fourier_bias == "fourier" else hp.fourier_bias

        stacked = T.stack(list(theta.values()))
        new = fourier_aggregate(stacked, treatment, g, hp.fourier_mask, hp.fourier_layout, weights)
        return {k: T.row(new, at) for at, k in enumerate(theta)}

    def _counts(self, name: str) -> bool:
        """Movement is that of parameters, not of batch-norm statistics."""
        return name in self.ctx.net.trainable

    def facts(self, server: State) -> dict[str, Any]:
        return {"clusters": server["cluster"], **{k: v for k, v in server["moves"].items() if k != "last"}}


is_own = T.has_tag(OWN)


def is_agent(name: str) -> bool:
    return not is_own(name)


@torch.no_grad()
def predictions(ctx: Context, params: Tree, x: Tensor, kind: Literal["softmax", "logits"] = "logits") -> Tensor:
    """What the model says about the items [n, classes]."""
    logits = ctx.outputs(params, x)
    return logits.softmax(-1) if kind == "softmax" else logits


def accuracy(ctx: Context, params: Tree, split: Split) -> float:
    """Share of right answers; 0 on an empty split."""
    return float((predictions(ctx, params, split.x).argmax(1) == split.y).float().mean()) if len(split) else 0.0
