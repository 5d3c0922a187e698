"""The interface of a method. The defaults of every hook are FedAvg with an optional private part.

Everything that crosses the network is a Download or an Upload. Server hooks see their own state and uploads; client
hooks see the client's own data, its own state and what was sent to it. State is made of numbers, text, tensors, lists
and dictionaries (codec.py), so that it can be checkpointed and deployed; hooks never keep anything on `self`.
Methods whose clients talk to edge servers also derive from EdgeMethod (edges.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coterie.core import tree as T
from coterie.core.layers import Names
from coterie.core.net import Net
from coterie.core.rng import torch_rng
from coterie.core.schema import Link, Schema, like
from coterie.core.tasks import Classification, Task
from coterie.core.tree import Names as Predicate
from coterie.core.tree import Tree, everything
from coterie.errors import CoterieError

ClientId = int
EdgeId = int
State = dict[str, Any]  # of a server, a client or an edge; see codec.py for what it may hold
Extras = dict[str, Any]  # what the losses of one client need beside parameters and batch


class Batch(NamedTuple):
    x: Tensor  # [batch, ...]
    y: Tensor  # [batch] int64 classes, or [batch, ...] float32
    weight: Tensor | None = None  # [batch], 0 for padding; None: all count
    beside: Tensor | None = None  # [batch, ...]: rows of extras["beside"], if `begin` gave any


class Split(NamedTuple):
    x: Tensor  # [n, ...] ready for the model
    y: Tensor  # [n] int64 classes, or [n, ...] float32

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """The data that a client's hooks may use. The test part is not included."""

    client: ClientId
    train: Split
    val: Split
    classes: int  # 0 where targets are no classes
    public: Tensor | None = None  # unlabelled items every party has, if the federation has some

    @property
    def label_counts(self) -> Tensor:
        """Training samples per class [classes]."""
        if not self.classes:
            raise CoterieError("label_counts needs classes, and the targets of this task are none")
        return torch.bincount(self.train.y, minlength=self.classes)


Loss = Callable[[Tree, Batch, Extras], Tensor | tuple[Tensor, Any]]
Update = Callable[[Tree, Any, Extras, torch.Generator], Tree]


@dataclass(frozen=True)
class Phase:
    """One phase of local training; None means the run's own setting."""

    loss: Loss | None = None  # pure: (params, batch, extras) -> scalar or (scalar, aux); aux collect in extras["aux"]
    trains: Predicate = everything  # masks the update, not the gradient; batch norm of a frozen layer is not updated
    epochs: float | None = None
    steps: int | None = None  # instead of epochs
    stream: int = 0  # phases with equal streams see equal batch orders
    batches_per_step: int = 1  # then loss or update gets a tuple of batches
    update: Update | None = None  # (params, batch, extras, rng) -> params, instead of loss and optimiser
    every_epoch: Callable[[Tree, Extras, ClientData], tuple[Tree, Extras]] | None = None
    clip: float | None = None  # largest gradient norm
    unclipped: Callable[[Tree, Extras], Tensor] | None = None  # part of the objective whose gradient is not clipped
    lr: float | None = None
    decays: Predicate = everything  # which entries weight decay acts on
    weight_decay: float | None = None


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
    """What a client (or an edge) sends. `tree` is the payload and is counted; `note` holds numbers for the log only."""

    tree: Tree
    note: Mapping[str, float] = field(default_factory=dict)
    sender: int = -1  # client or edge id, written by the runtime
    samples: int = 0  # training samples behind it, written by the runtime


@dataclass(frozen=True)
class Context:
    """What every party of a run knows. Created by the runtime, read-only."""

    net: Net
    w0: Tree
    clients: tuple[ClientId, ...]
    task: Task
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
    headline: str = "personal"  # the view that tables lead with
    momentum: float = 0.0  # of the run's optimiser, if it is SGD

    @property
    def classes(self) -> int:
        """Number of classes; 0 where targets are no classes. How many outputs a model has, `task.outputs` says."""
        return self.task.classes

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

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """The task's mean loss of the batch: cross-entropy, squared error, ..."""
        return self.loss_of(self.net.forward(params, batch.x), batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The same of outputs [batch, outputs] that are there already."""
        return self.task.loss(outputs, batch.y, batch.weight)

    def ce(self, params: Tree, batch: Batch) -> Tensor:
        """Mean cross-entropy of the batch, for methods that mean just that; they declare `needs = ("classes",)`."""
        if not self.classes:
            raise CoterieError(f"cross-entropy needs classes, and the task is {self.task.name}; ask for ctx.loss")
        return self.loss(params, batch)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """For methods that need classes."""
    return Classification(logits.shape[1]).loss(logits, batch.y, batch.weight)


class Settings(BaseModel):
    """Typed settings of a method; a subclass lists them with defaults, bounds and a line of description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Moment:
    """Identifies a payload: the client (or edge), the round, and the server's state before it."""

    server: State
    client: ClientId
    round: int


@dataclass(frozen=True)
class Card:
    """Description of a method, for tables, pages and `coterie show`."""

    title: str = ""  # as the papers write it
    paper: str = ""  # authors, venue, year, DOI or arXiv number
    year: int = 0
    family: str = ""  # letters: G global, F fine-tuning, S split, R regularised, M mixing, C clusters, P prototypes
    personal: str = "nothing"  # which part of a client's model is its own
    # A: checked against the authors' code, B: against others' code, P: written from the paper itself,
    # C: reconstructed from published descriptions only, with open points; marked in tables
    certainty: str = "A"
    compute: str = ""  # what a round costs beside FedAvg's local training, in words


class Method:
    """FedAvg with a private part: names for which `private` holds stay on the client, all others travel."""

    Settings: ClassVar[type[Settings]] = Settings
    card: ClassVar[Card] = Card()
    needs: ClassVar[tuple[str, ...]] = ()  # of: bn, val, some_val, head, public, full, classes
    # registered names of what a claim about this very class must beat beside the usual controls: its idea drawn at
    # random, or a part of it taken away; subclasses do not inherit them
    controls: ClassVar[tuple[str, ...]] = ()
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    # what the models of all clients have in common: everything, the head and its features, or only the classes
    agree: ClassVar[Literal["model", "head", "output"]] = "model"
    # a newcomer's model is made with the items of its training part and without their labels, so it may have none
    unlabelled: ClassVar[bool] = False

    ctx: Context  # bound by the runtime before any hook is called
    hp: Any  # the settings; a method annotates it with its own class

    def __init__(self, **settings: Any):
        self.hp = self.Settings(**settings)

    def check(self) -> None:
        """Called once before any work: raise CoterieError for settings that cannot work with this model or data."""

    # ---- what is private -------------------------------------------------------------------------------------------
    def private(self, name: str) -> bool:
        """Does this entry of the model stay on the client?"""
        return False

    def stays(self, name: str) -> bool:
        """private, and the batch-norm statistics when the run keeps those local."""
        return self.private(name) or (self.ctx.bn_stats == "local" and name in self.ctx.group("bn_stats"))

    # ---- what may cross a link -----------------------------------------------------------------------------------
    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """The entries of a payload on this link: exactly those of one client and round, or of any (`now` is None).

        The default is the shared part of the model on every link.
        """
        return self.model_schema

    @cached_property
    def model_schema(self) -> Schema:
        """The shared part of the model."""
        return Schema(like(T.drop(self.ctx.w0, self.stays)))

    # ---- server: sees its own state and uploads ---------------------------------------------------------------------
    def setup(self) -> State:
        """The server's initial state."""
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
        """What is sent to the participants `ids`."""
        return Download(shared=server["w"])

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """What clients receive for evaluation and use; default: what they would be sent in the next round."""
        return self.down(server, ids, round)

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """The server's next state; uploads are in the order of client ids, and there is at least one."""
        return {**server, "w": T.mean([u.tree for u in uploads], self.weights(uploads))}

    def weights(self, uploads: Sequence[Upload]) -> list[float] | None:
        uniform = (self.ctx.weighting or self.weighting) == "uniform"
        return None if uniform else [float(u.samples) for u in uploads]

    def global_model(self, server: State) -> Tree | None:
        """One complete model for everybody, or None if the method has none."""
        return server["w"] if "w" in server and not (self.ctx.w0.keys() - server["w"].keys()) else None

    def cluster_of(self, server: State) -> Mapping[ClientId, int] | None:
        """The cluster (or edge) of each client that is in one, for the mean over clusters; None: there are none."""
        return None

    def predict_global(self, params: Tree, x: Tensor) -> Tensor:
        """Logits of the global model."""
        return self.ctx.forward(params, x)

    def facts(self, server: State) -> dict[str, Any]:
        """Facts about the server's state for the log, such as clusters; must be JSON."""
        return {}

    # ---- client: sees its own data, its own state and what was sent to it ------------------------------
    def init_client(self, data: ClientData) -> State:
        """A client's initial private state."""
        own = T.keep(self.ctx.w0, self.stays)
        return {"own": T.clone(own)} if own else {}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        """Where local training starts. The runtime clones the tree before it trains; extras["idle"] means not to."""
        return {**download, **state.get("own", {})}, {}

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """The loss of a batch; a pure function."""
        return self.ctx.loss(params, batch)

    def phases(self, round: int) -> list[Phase]:
        """The local training of a round, as a list of phases."""
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

    def newcomer(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        """The model of a client that has never trained (`state` is init_client's): the best there is without training,
        never initial weights where the server has trained ones.
        """
        return self.personal(state, download, data)

    def watched(self, state: State, download: Tree, data: ClientData) -> tuple[Tree, Extras]:
        """The model that `watch` scores before local training, in every round; cheaper than a costly `personal`."""
        return self.personal(state, download, data)

    def received_model(self, state: State, download: Tree, data: ClientData, round: int) -> tuple[Tree, Extras]:
        """The client's model as put together from what it receives, before local training: where that starts.

        A method that trains several models at once says which one it is; else it is the personal one.
        """
        params, extras = self.begin(state, download, data, round)
        return self.personal(state, download, data) if self.ctx.w0.keys() - params.keys() else (params, extras)

    def cluster_model(self, state: State, download: Tree, data: ClientData) -> Tree | None:
        """The model of the client's cluster or edge, with nothing of the client's own in it; None: there is none."""
        return None

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        """Logits of the personal model."""
        return self.ctx.forward(params, x)

    def adapt(self) -> list[Phase]:
        """Fine-tuning of a copy before scoring, or for a newcomer."""
        return []


__all__ = [
    "Batch", "Card", "ClientData", "ClientId", "Context", "Download", "EdgeId", "Extras", "Method", "Moment", "Phase",
    "Schema", "Settings", "Split", "State", "Tree", "Upload", "cross_entropy", "replace",
]  # fmt: skip
