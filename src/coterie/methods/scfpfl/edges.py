"""Clusters of clients as edges, and the cloud that mixes their models: what the text and the mended version share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, Context, EdgeId, Extras, Split
from coterie.core.edges import EdgeMethod
from coterie.core.method import Card, Client, Download, Model, Moment, Phase, Start, Trained, Upload
from coterie.core.schema import LARGEST_ENTRY, Entry, Link, Schema
from coterie.core.states import state
from coterie.core.tree import Tree
from coterie.core.views import ModelView
from coterie.errors import CoterieError
from coterie.methods.scfpfl import movement
from coterie.parts.cluster_models import largest, of_cluster
from coterie.parts.fourier import Treatment, fourier_aggregate, prrfl_window

ASK, PREDICTIONS = "x:ask", "x:predictions"
OWN = "own"  # tag of the client's own model in training; the agent has the plain names


@state
class SCFPFLServer:
    theta: dict[EdgeId, Tree]  # models of the edges
    samples: dict[EdgeId, int]  # numbers of samples behind them
    hat: dict[EdgeId, Tree]  # models that the cloud made of them
    cluster: dict[ClientId, EdgeId]  # empty until there are clusters
    ask: bool  # the next round ends with clusters
    moves: movement.Movement  # empty unless clusters are made when clients are stationary


@state
class SCFPFLClient:
    f: Tree | None = None  # own model; None until the client has trained


class ClusterEdges(EdgeMethod):
    """Clients in clusters, each with an edge that averages them, equation (9); the cloud mixes the edges' models.

    Until there are clusters, all clients are one cluster at the cloud. In the round that ends with clusters all clients
    take part and are asked for their predictions (one bit); a client that does not answer joins the largest cluster. An
    edge without answers keeps its model. The models of the first average travel with the predictions.
    """

    needs: ClassVar[tuple[str, ...]] = ("public", "val", "classes")
    by_predictions: ClassVar[bool] = True  # clusters are made of predictions that clients send
    form: ClassVar[Literal["softmax", "logits"]] = "logits"  # form of these predictions
    plans_ahead = True
    card = Card(
        title="SC-FPFL",
        paper="Jin, Chen, J. of Electronics & Information Technology 2023, DOI 10.11999/JEIT220529",
        year=2023,
        family="C,R",
        personal="the whole model, taken over from an agent",
        certainty="P",
    )

    def check(self) -> None:
        clients, rounds = len(self.ctx.clients), self.ctx.planned_rounds
        for name in ("k0", "embed_dim", "n_min"):
            if isinstance(value := getattr(self.hp, name, None), int) and value > clients:
                raise CoterieError(f"{self.card.title}: {name} = {value} is more than the {clients} clients")
        when = self.hp.cluster_when
        if when.startswith("round:") and int(when[6:]) > rounds:
            raise CoterieError(f"{self.card.title}: cluster_when = {when} is after the last of {rounds} rounds")
        if when == "stationary" and (first := self.hp.min_round + 2) > rounds:  # one round after the trigger
            few = f"min_round = {self.hp.min_round} lets clusters appear after round {first} at the earliest"
            raise CoterieError(f"{self.card.title}: {few}, and the run has {rounds} rounds")

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
            low, high = (0.0, 1.0) if self.form == "softmax" else (-LARGEST_ENTRY, LARGEST_ENTRY)
            shape = (self.ctx.public, self.ctx.classes)
            more = Schema({PREDICTIONS: Entry(shape, kind="prediction", part="predictions", low=low, high=high)})
        return (more.optional() if now is None else more) | model

    # ---- cloud, down -------------------------------------------------------------------------------------------------
    def opening(self) -> bool:
        return True

    def setup(self) -> SCFPFLServer:
        """Every client starts from the initial model f; Algorithm 1, line 2."""
        w = T.clone(T.drop(self.ctx.w0, self.stays))
        moves = movement.start(w, self.ctx.clients, self._counts) if self.when() == "stationary" else {}
        return SCFPFLServer(theta={0: w}, samples={0: 0}, hat={0: T.clone(w)}, cluster={}, ask=False, moves=moves)

    def when(self) -> str:
        """Return when clusters are made: start, round:<n> or stationary."""
        return str(self.hp.cluster_when)

    def asks(self, server: SCFPFLServer, round: int) -> bool:
        """True if this is the round that ends with clusters."""
        when = self.when()
        due = when == "start" or (when.startswith("round:") and round >= int(when[6:]))
        return not server.cluster and bool(server.ask or due)

    def sample(self, server: SCFPFLServer, round: int, rng: torch.Generator) -> list[ClientId]:
        return list(self.ctx.clients) if self.asks(server, round) else super().sample(server, round, rng)

    def down(self, server: SCFPFLServer, ids: Sequence[ClientId], round: int) -> Download:
        of, hat = server.cluster, server.hat
        if of:
            return Download(each={i: hat[largest(of)] for i in ids if i not in of}, edge=hat)
        if self.by_predictions and self.asks(server, round):
            return Download({**hat[0], ASK: torch.ones(1, dtype=torch.bool)})
        return Download(hat[0])

    def edges(self, server: SCFPFLServer) -> dict[EdgeId, list[ClientId]] | None:
        members: dict[EdgeId, list[ClientId]] = {k: [] for k in server.hat}
        for i, k in server.cluster.items():
            members[k].append(i)
        return members if server.cluster else None

    # ---- client ------------------------------------------------------------------------------------------------------
    trains_own = False  # True if the client's own model trains too

    def init_client(self, data: ClientData) -> SCFPFLClient:
        return SCFPFLClient()

    def begin(self, state: SCFPFLClient, download: Tree, data: ClientData, round: int) -> Start:
        """Make the edge's model the agent; Algorithm 1, line 12."""
        own = self.ctx.w0 if state.f is None else state.f
        agent = {**own, **T.keep(download, self.ctx.w0.__contains__)}
        extras: Extras = {"edge": agent, "own": own, "ask": ASK in download}
        params = {**agent, **T.tag(OWN, own)} if self.trains_own else agent
        if round == 0:
            return Start(params, extras)
        judged, teacher = self.judged(agent, own, data)
        return Start(params, {**extras, **judged}, per_sample=teacher)

    def judged(self, edge: Tree, own: Tree, data: ClientData) -> tuple[Extras, Tensor | None]:
        """Return extras, and the logits [n, classes] of a teacher that does not train on the training samples."""
        return {}, None

    def phases(self, round: int) -> list[Phase]:
        """Train the own model on its data in round 0 (Algorithm 1, line 3), later the agent (Algorithm 1, line 12)."""
        if round == 0:
            return [Phase(self.loss, trains=is_agent, epochs=self.hp.warmup_epochs)]
        return [Phase(self.relearn, trains=is_agent, epochs=self.hp.agent_epochs)]

    def relearn(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the loss of the agent."""
        raise NotImplementedError

    def end(self, state: SCFPFLClient, trained: Trained, data: ClientData, round: int) -> tuple[SCFPFLClient, Upload]:
        """Keep the next own model and send a model; if asked, also predictions (Algorithm 1, line 4)."""
        agent = T.drop(trained.params, is_own)
        own = T.tagged(OWN, trained.params) if self.trains_own else trained.extras["own"]
        f, note = self.accept(agent, own, trained.extras, data) if round > 0 else (agent, {})
        tree = T.drop(self.sent(agent, f), self.stays)
        if trained.extras["ask"] and data.public is not None:
            tree[PREDICTIONS] = predictions(self.ctx, f, data.public, self.form)
        return SCFPFLClient(f), Upload(tree, note)

    def accept(self, agent: Tree, own: Tree, extras: Extras, data: ClientData) -> tuple[Tree, dict[str, float]]:
        """Return the client's next own model, and notes for the log; `own` has trained if `trains_own`."""
        raise NotImplementedError

    def sent(self, agent: Tree, f: Tree) -> Tree:
        """Return what a client uploads: the agent, or its next own model f."""
        raise NotImplementedError

    def model(self, view: ModelView, client: Client) -> Model | None:
        """Return the model of a view; updates are those of own models, equation (19), whichever model is scored."""
        edge = T.keep(client.download, self.ctx.w0.__contains__)
        if view == "received":  # the edge's model, which becomes the agent
            return Model({**(client.state.f or self.ctx.w0), **edge})
        if view == "edge":
            return Model(edge) if not any(map(self.stays, self.ctx.w0)) else None
        if view == "trained" or (view == "watched" and client.state.f is not None):
            return Model(client.state.f)
        return super().model(view, client)

    def personal(self, state: SCFPFLClient, download: Tree, data: ClientData) -> Model:
        """Return the own model f_i (Algorithm 1, line 15), or the edge's if that is to be scored or there is no other.

        The mean of its test accuracies over clients is equation (18).
        """
        if state.f is not None and self.hp.score == "own":
            return Model(state.f)
        return Model({**(state.f or self.ctx.w0), **T.keep(download, self.ctx.w0.__contains__)})

    # ---- cloud, up; an edge's mean is the default merge --------------------------------------------------------------
    def aggregate(self, server: SCFPFLServer, uploads: Sequence[Upload], round: int) -> SCFPFLServer:
        """Take the edges' models and mix them; Algorithm 1, lines 10 to 11."""
        if not server.cluster:
            return self._without_edges(server, uploads, round)
        theta = {**server.theta, **{u.sender: u.tree for u in uploads}}
        samples = {**server.samples, **{u.sender: u.samples for u in uploads}}
        return replace(server, theta=theta, samples=samples, hat=self.mix(theta, samples, round))

    def _without_edges(self, server: SCFPFLServer, uploads: Sequence[Upload], round: int) -> SCFPFLServer:
        """Aggregate uploads of clients: the cloud does what edges would do, for the one cluster or for the new ones.

        Each cluster's model is the mean of its clients' models by samples, equation (9).
        """
        asked = self.asks(server, round)
        of = self.clusters(uploads) if asked else {u.sender: 0 for u in uploads}

        theta: dict[EdgeId, Tree] = {}
        samples: dict[EdgeId, int] = {}
        for k in range(max(of.values()) + 1):
            members = of_cluster(uploads, of, k)
            models = [T.keep(u.tree, self.ctx.w0.__contains__) for u in members]
            unmoved = round == 0 and not self.hp.warmup_epochs  # a mean of equal models would only round
            theta[k] = T.clone(server.theta[0]) if unmoved else T.mean(models, self.weights(members))
            samples[k] = sum(u.samples for u in members)

        new = replace(server, theta=theta, samples=samples, hat=self.mix(theta, samples, round))
        if asked:
            cluster = {i: of.get(i, largest(of)) for i in self.ctx.clients}
            return replace(new, cluster=cluster, moves={})
        if not server.moves:
            return new
        moves = movement.follow(server.moves, uploads, self._counts)
        still = round > self.hp.min_round and movement.stationary(moves, self.hp.eps1, self.hp.eps2)
        return replace(new, moves=moves, ask=still)

    def clusters(self, uploads: Sequence[Upload]) -> dict[ClientId, EdgeId]:
        """Return the cluster of each client that sent predictions."""
        outputs = torch.stack([u.tree[PREDICTIONS] for u in uploads])
        return {u.sender: k for u, k in zip(uploads, self.labels(outputs).tolist(), strict=True)}

    def labels(self, outputs: Tensor) -> Tensor:
        """Return the clusters [clients] of predictions [clients, items, classes]."""
        raise NotImplementedError

    def mix(self, theta: dict[EdgeId, Tree], samples: dict[EdgeId, int], round: int) -> dict[EdgeId, Tree]:
        """Give models common low-frequency amplitudes and leave each its phases, equations (13) to (17).

        A single model stays as it is. Weights of convolutions are transformed; settings decide about other entries.
        """
        hp, ctx = self.hp, self.ctx
        linear: Treatment = hp.fourier_linear
        if hp.fourier_linear == "auto":
            linear = "keep" if ctx.group("conv") else "fourier"
        g = hp.g if hp.g_schedule == "const" else prrfl_window(round, ctx.planned_rounds, hp.g, hp.g_last)
        weights = torch.tensor([float(samples[k]) for k in theta]) if hp.fourier_weight == "samples" else None

        def treatment(name: str) -> Treatment:
            how: Treatment = hp.fourier_bias
            if ctx.w0[name].ndim > 1:
                how = "fourier" if name in ctx.group("conv") else linear
            elif name in ctx.group("bn_stats") and how == "fourier":
                how = "mean"  # a running variance must stay positive
            return how

        stacked = T.stack(list(theta.values()))
        new = fourier_aggregate(stacked, treatment, g, hp.fourier_mask, hp.fourier_layout, weights)
        return {k: T.row(new, at) for at, k in enumerate(theta)}

    def _counts(self, name: str) -> bool:
        """True for parameters; movement leaves out batch-norm statistics."""
        return name in self.ctx.net.trainable

    def facts(self, server: SCFPFLServer) -> dict[str, Any]:
        """Return the clusters, and while there are none the movement of clients."""
        return {"clusters": server.cluster, **{k: v for k, v in server.moves.items() if k != "last"}}


is_own = T.has_tag(OWN)


def is_agent(name: str) -> bool:
    """True for the entries of the agent."""
    return not is_own(name)


def predictions(ctx: Context, params: Tree, x: Tensor, form: Literal["softmax", "logits"] = "logits") -> Tensor:
    """Return a model's predictions for items [n, classes]."""
    logits = ctx.outputs(params, x)
    return logits.softmax(-1) if form == "softmax" else logits


def accuracy(ctx: Context, params: Tree, split: Split) -> float:
    """Return the share of right answers; 0 on an empty split."""
    return float((predictions(ctx, params, split.x).argmax(1) == split.y).float().mean()) if len(split) else 0.0
