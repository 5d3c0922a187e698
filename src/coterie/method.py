"""The interface of a method. The defaults of every hook are FedAvg with an optional private part.

Everything that crosses the network is a Download or an Upload. Server hooks see their own state and uploads; client
hooks see the client's own data, its own state and what was sent to it. State is made of numbers, text, tensors, lists
and dictionaries (codec.py), so that it can be checkpointed and deployed; hooks never keep anything on `self`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coterie import tree as T
from coterie.models.layers import Names
from coterie.models.net import Net
from coterie.rng import torch_rng
from coterie.tree import Names as Predicate
from coterie.tree import Tree, everything

ClientId = int
EdgeId = int
State = dict[str, Any]  # of a server, a client or an edge; see codec.py for what it may hold
Extras = dict[str, Any]  # what the losses of one client need beside parameters and batch
ANNOUNCE = "announce:"  # mark of the entries a device may send ahead of the rest of its upload (see Method.calls)


class Batch(NamedTuple):
    x: Tensor  # [batch, ...]
    y: Tensor  # [batch]
    weight: Tensor | None = None  # [batch], 0 for padding; None: all count


class Split(NamedTuple):
    x: Tensor  # [n, ...] ready for the model
    y: Tensor  # [n] int64

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """What a client's hooks may look at. Its test part is not here: it decides nothing."""

    client: ClientId
    train: Split
    val: Split
    classes: int
    public: Tensor | None = None  # unlabelled items every party has, if the federation has some

    @property
    def label_counts(self) -> Tensor:
        """Training samples per class [classes]."""
        return torch.bincount(self.train.y, minlength=self.classes)


Loss = Callable[[Tree, Batch, Extras], Tensor | tuple[Tensor, Any]]
Update = Callable[[Tree, Any, Extras, torch.Generator], Tree]


@dataclass(frozen=True)
class Phase:
    """One stretch of local training; None means the run's own setting."""

    loss: Loss | None = None  # pure: (params, batch, extras) -> scalar or (scalar, aux); aux collect in extras["aux"]
    trains: Predicate = everything  # masks the update, not the gradient; batch norm of a frozen layer stands still
    epochs: float | None = None
    steps: int | None = None  # instead of epochs
    lr: float | None = None
    split: Literal["train", "val"] = "train"
    stream: int = 0  # phases with equal streams see equal batch orders
    batches_per_step: int = 1  # then loss or update gets a tuple of batches
    update: Update | None = None  # (params, batch, extras, rng) -> params, instead of loss and optimiser
    every_epoch: Callable[[Tree, Extras, ClientData], tuple[Tree, Extras]] | None = None
    clip: float | None = None  # largest gradient norm
    decays: Predicate = everything  # which entries weight decay acts on
    weight_decay: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Download:
    """What a server sends: `shared` to everybody, `edge` to one edge and all its clients, `each` to one client."""

    shared: Tree = field(default_factory=dict)
    each: Mapping[ClientId, Tree] = field(default_factory=dict)
    edge: Mapping[EdgeId, Tree] = field(default_factory=dict)

    def to(self, client: ClientId) -> Tree:
        """What this client receives, as one tree."""
        return {**self.shared, **self.each.get(client, {})}


@dataclass(frozen=True)
class Upload:
    """What a client (or an edge) sends. `tree` is the payload and is counted; `note` holds numbers for the log."""

    tree: Tree
    note: Mapping[str, float] = field(default_factory=dict)
    sender: int = -1  # client or edge id, written by the runtime
    samples: int = 0  # training samples behind it, written by the runtime


@dataclass(frozen=True)
class Edge:
    """An aggregator between clients and cloud, as its hooks see it."""

    id: EdgeId
    clients: tuple[ClientId, ...]  # attached, whether sampled or not
    state: State
    download: Download  # what it received this round


@dataclass(frozen=True)
class Context:
    """What every party of a run knows. Made by the runtime, read-only."""

    net: Net
    w0: Tree
    clients: tuple[ClientId, ...]
    classes: int
    rounds: int
    join: float
    epochs: float
    batch: int
    lr: float
    seed: int
    weighting: Literal["samples", "uniform"] | None = None  # None: as the method's card says
    bn_stats: Literal["shared", "local"] = "shared"
    lr_decay: float = 1.0
    public: int = 0  # unlabelled items that every party has

    def lr_at(self, round: int) -> float:
        """The local rate of a round; decay acts from round 2 on."""
        return float(self.lr * self.lr_decay ** max(0, round - 1))

    def group(self, name: str) -> Names:
        return self.net.layout.group(name)

    def rng(self, purpose: str, *keys: int | str) -> torch.Generator:
        return torch_rng(self.seed, purpose, *keys)

    def forward(self, params: Tree, x: Tensor) -> Tensor:
        return self.net.forward(params, x)

    def features(self, params: Tree, x: Tensor) -> Tensor:
        return self.net.features(params, x)

    def logits(self, params: Tree, z: Tensor) -> Tensor:
        return self.net.logits(params, z)

    def ce(self, params: Tree, batch: Batch) -> Tensor:
        """Mean cross-entropy of the batch."""
        return cross_entropy(self.net.forward(params, batch.x), batch)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    each = F.cross_entropy(logits, batch.y, reduction="none")
    return (each * batch.weight).sum() / batch.weight.sum().clamp(min=1)


class Settings(BaseModel):
    """Typed settings of a method; a subclass lists them with defaults, bounds and a line of description."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Payload(NamedTuple):
    """Declared bytes of one participant in one ordinary round."""

    up: int
    down: int


class Method:
    """FedAvg with a private part: names for which `private` holds stay on the client, all others travel."""

    Settings: ClassVar[type[Settings]] = Settings
    title: ClassVar[str] = ""  # as the papers write it
    paper: ClassVar[str] = ""
    year: ClassVar[int] = 0
    family: ClassVar[str] = ""  # letters of spec: G F S R M C P
    personal_part: ClassVar[str] = "nothing"
    needs: ClassVar[tuple[str, ...]] = ()  # of: bn, val, head, public, full
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    trial: ClassVar[Mapping[str, Any]] = {}  # own settings for the battery's small task, if the defaults do not fit it
    # A: checked against the authors' code, B: against others' code, P: written from the paper itself,
    # C: reconstructed from published descriptions only, with open points; marked in tables
    certainty: ClassVar[str] = "A"

    ctx: Context  # bound by the runtime before any hook is called
    hp: Any  # the settings; a method annotates it with its own class

    def __init__(self, **settings: Any):
        self.hp = self.Settings(**settings)

    def check(self) -> None:
        """Called once, bound, before any work: raise CoterieError for settings that cannot work here."""

    # ---- what is private -------------------------------------------------------------------------------------------
    def private(self, name: str) -> bool:
        """Does this entry of the model stay on the client?"""
        return False

    def stays(self, name: str) -> bool:
        """private, and the batch-norm statistics when the run keeps those local."""
        return self.private(name) or (self.ctx.bn_stats == "local" and name in self.ctx.group("bn_stats"))

    def payload(self, labels: int, round: int = 1) -> Payload:
        """Declared bytes for a client with `labels` classes: the shared part each way."""
        size = T.nbytes(T.drop(self.ctx.w0, self.stays))
        return Payload(size, size)

    def payload_of(self, server: State, client: ClientId, labels: int, round: int) -> Payload:
        """The same for one client and round when it depends on what the server knows before that round."""
        return self.payload(labels, round)

    # ---- server: sees its own state and uploads ---------------------------------------------------------------------
    def setup(self) -> State:
        return {"w": T.clone(T.drop(self.ctx.w0, self.stays))}

    def opening(self) -> bool:
        """Is there a round 0, in which every client takes part?"""
        return False

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        """The participants of a round; round 0 is everybody."""
        clients = self.ctx.clients
        m = len(clients) if round == 0 else max(1, int(self.ctx.join * len(clients) + 0.5))
        picked = torch.randperm(len(clients), generator=rng)[:m]
        return sorted(clients[int(i)] for i in picked)

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        return Download(shared=server["w"])

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """What clients are handed to score and use; default: what they would be sent in this (the next) round."""
        return self.down(server, ids, round)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Uploads come in the order of ids, from whoever answered (at least one)."""
        return {**server, "w": T.mean([u.tree for u in uploads], self.weights(uploads))}

    def weights(self, uploads: Sequence[Upload]) -> list[float] | None:
        uniform = (self.ctx.weighting or self.weighting) == "uniform"
        return None if uniform else [float(u.samples) for u in uploads]

    def global_model(self, server: State) -> Tree | None:
        """One complete model for everybody, or None if the method has none."""
        return server["w"] if "w" in server and not (self.ctx.w0.keys() - server["w"].keys()) else None

    def predict_global(self, params: Tree, x: Tensor) -> Tensor:
        return self.ctx.forward(params, x)

    def part(self, name: str) -> str:
        """Under which heading the ledger counts this entry of a payload."""
        return "model"

    def facts(self, server: State) -> dict[str, Any]:
        """What a reader of the log wants to know of the server's state (clusters, norms); JSON."""
        return {}

    # ---- edges: only for methods with an edge tier -----------------------------------------------------
    def edges(self, server: State) -> dict[EdgeId, list[ClientId]] | None:
        return None

    def init_edge(self, edge: EdgeId, clients: Sequence[ClientId]) -> State:
        return {}

    def relay(self, edge: Edge, ids: Sequence[ClientId], round: int) -> Download:
        """What an edge hands on to its sampled clients; default: as received."""
        got = edge.download
        return Download({**got.shared, **got.edge.get(edge.id, {})}, {i: got.each[i] for i in ids if i in got.each})

    def calls(self, edge: Edge, announced: Sequence[Upload], round: int) -> Collection[ClientId] | None:
        """Who is to send the rest, judged by the entries marked ANNOUNCE alone; None: everybody sends all at once."""
        return None

    def merge(self, edge: Edge, uploads: Sequence[Upload], round: int) -> tuple[State, Upload]:
        """What an edge makes of its clients' uploads; default: their mean, weighted as the run says."""
        return edge.state, Upload(T.mean([u.tree for u in uploads], self.weights(uploads)))

    # ---- client: sees its own data, its own state and what was sent to it ------------------------------
    def init_client(self, data: ClientData) -> State:
        own = T.keep(self.ctx.w0, self.stays)
        return {"own": T.clone(own)} if own else {}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        """Where local training starts. The runtime clones the tree before it trains; extras["idle"] means not to."""
        return {**download, **state.get("own", {})}, {}

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return self.ctx.ce(params, batch)

    def phases(self, round: int) -> list[Phase]:
        return [Phase(self.loss)] if round > 0 else []

    def end(self, state: State, params: Tree, extras: Extras, data: ClientData, round: int) -> tuple[State, Upload]:
        """What the client keeps and what it sends."""
        own = T.keep(params, self.stays)
        return ({**state, "own": own} if own else state), Upload(T.drop(params, self.stays))

    def trained(self, state: State, params: Tree, extras: Extras) -> tuple[Tree, Extras]:
        """The client's own model right after local training (`state` is already the new one)."""
        return params, extras

    def personal(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        """The model that is scored, exported and used."""
        return {**download, **state.get("own", {})}, {}

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        return self.ctx.forward(params, x)

    def adapt(self) -> list[Phase]:
        """Fine-tuning of a copy before scoring, or for a newcomer."""
        return []


__all__ = [
    "ANNOUNCE", "Batch", "ClientData", "ClientId", "Context", "Download", "Edge", "EdgeId", "Extras", "Method",
    "Payload", "Phase", "Settings", "Split", "State", "Tree", "Upload", "cross_entropy", "replace",
]  # fmt: skip
