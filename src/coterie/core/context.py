"""Arguments of a method's hooks: the run's context, a client's data and batches of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.core.layers import Names
from coterie.core.losses import LossFunction, batch_loss
from coterie.core.net import Net
from coterie.core.rng import torch_rng
from coterie.core.schedules import lr_factor
from coterie.core.tasks import Task
from coterie.core.tree import Tree
from coterie.errors import CoterieError

ClientId = int
EdgeId = int
State = Any  # state of a server or a client: a dictionary, or a dataclass declared with @state (states.py)
EdgeState = dict[str, Any]
PER_PASS = 256  # samples in one forward pass without gradients: activations of small networks stay in cache
Extras = dict[str, Any]  # values that a client's losses need in addition to parameters and batch


class Batch(NamedTuple):
    x: Tensor  # [batch, ...]
    y: Tensor  # [batch] int64 classes, or [batch, ...] float32
    weight: Tensor | None = None  # [batch], 0 for padding; None: every sample counts
    per_sample: Tensor | None = None  # [batch, ...]: rows of Start.per_sample
    class_weights: Tensor | None = None  # [classes]; None: all classes weigh alike


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
    classes: int  # 0 if the task is not a classification
    public: Tensor | None = None  # unlabelled items that all clients share, if the federation has some

    @property
    def label_counts(self) -> Tensor:
        """Training samples per class [classes]."""
        if not self.classes:
            raise CoterieError("label_counts is defined for classification tasks only")
        return torch.bincount(self.train.y, minlength=self.classes)


@dataclass(frozen=True)
class Context:
    """The settings and the initial model that the server and all clients of a run know; read-only."""

    net: Net
    w0: Tree
    clients: tuple[ClientId, ...]
    task: Task
    planned_rounds: int  # rounds that the run began with; a method whose training uses it declares plans_ahead
    join: float
    epochs: float
    batch: int
    lr: float
    seed: int
    weighting: Literal["samples", "uniform"] | None = None  # None: the method's own
    bn_stats: Literal["shared", "local"] = "shared"
    lr_decay: float = 1.0
    public: int = 0  # number of unlabelled items that the server and all clients share
    public_items: Tensor | None = None  # these items [public, ...], for server hooks; clients find them in their data
    headline: str = "personal"  # the view that tables lead with
    momentum: float = 0.0  # momentum of the run's optimiser, if it is SGD
    lr_rounds: str | None = None  # schedule of the learning rate over the rounds (schedules.py)
    lr_steps: str | None = None  # schedule of the learning rate over the steps of each phase
    augment: str | None = None  # augmentation of training batches (train/augmentation.py)
    local_steps: int | None = None  # steps of a phase that names neither steps nor epochs, instead of `epochs`
    class_weights: str | None = None  # setting of this name (losses.py)
    fixed_weights: tuple[float, ...] | None = None  # the weights that it lists, by class
    own_loss: LossFunction | None = None  # the user's, instead of the task's
    changing: bool = False  # True if the clients' data change during the run
    # where trees, batches and states of training are; hooks of the server and of edges always see the processor
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable

    @property
    def classes(self) -> int:
        """Number of classes; 0 if the task is not a classification. A model has `task.outputs` outputs."""
        return self.task.classes

    def participants(self, clients: int | None = None) -> int:
        """Number of participants of a round among this many clients; by default all of the run."""
        return max(1, int(self.join * (len(self.clients) if clients is None else clients) + 0.5))

    def lr_at(self, round: int) -> float:
        """Learning rate of a round; lr_decay and lr_rounds change it from round 2."""
        lr = self.lr * self.lr_decay ** max(0, round - 1)
        return float(lr if self.lr_rounds is None else lr * lr_factor(self.lr_rounds, round - 1, self.planned_rounds))

    def on(self, device: torch.device) -> "Context":
        """Return the context of hooks whose trees are on this device."""
        if device == self.device:
            return self
        items = None if self.public_items is None else self.public_items.to(device)
        w0 = {k: v.to(device) for k, v in self.w0.items()}
        return replace(self, net=self.net.on(device), w0=w0, public_items=items, device=device)

    @property
    def loop_only(self) -> str:
        """The reason why clients are trained one by one, whatever the engine; empty if stacks are possible."""
        if self.augment:
            return "stacks do not augment batches (augment is set)"
        if self.class_weights or self.own_loss is not None:
            name = "class_weights" if self.class_weights else "loss"
            return f"stacks have the task's loss without class weights ({name} is set)"
        return "stacks have one learning rate for all steps of a round (lr_steps is set)" if self.lr_steps else ""

    def group(self, name: str) -> Names:
        """Names of the model's entries in a group: "head", "body", "bn", "conv", "layer:NAME", ..."""
        return self.net.layout.group(name)

    def rng(self, purpose: str, *keys: int | str) -> torch.Generator:
        """Return a generator keyed by the run's seed, a purpose and further keys (round, client, ...)."""
        return torch_rng(self.seed, purpose, *keys)

    def forward(self, params: Tree, x: Tensor) -> Tensor:
        """Outputs of the model [batch, outputs]."""
        return self.net.forward(params, x)

    def features(self, params: Tree, x: Tensor) -> Tensor:
        """Features that enter the head [batch, width]."""
        return self.net.features(params, x)

    def logits(self, params: Tree, z: Tensor) -> Tensor:
        """Outputs of the head for features z [batch, width]."""
        return self.net.logits(params, z)

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """Mean loss of a training batch: cross-entropy, squared error, ..., or the loss of the user."""
        return self.loss_of(self.net.forward(params, batch.x), batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Mean loss of a training batch for given outputs [batch, outputs]."""
        if self.own_loss is None and batch.class_weights is None:
            return self.task.loss(outputs, batch.y, batch.weight)
        each = (self.own_loss or self.task.each)(outputs, batch.y)
        return batch_loss(each, batch.y, batch.class_weights, batch.weight)

    def ce(self, params: Tree, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch, for methods that declare `needs = ("classes",)`."""
        if not self.classes:
            raise CoterieError(f"cross-entropy needs classes, but the task is {self.task.name}; use ctx.loss")
        return self.loss(params, batch)

    @torch.no_grad()
    def outputs(
        self, params: Tree, x: Tensor, chunk: int = PER_PASS, through: Callable[[Tree, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Outputs [n, outputs] of the model on many items, without gradients, `chunk` items at a time.

        `through` is used instead of `forward`, for example `ctx.features`.
        """
        through = through or self.forward
        return torch.cat([through(params, part) for part in torch.split(x, chunk)])

    @torch.no_grad()
    def losses(self, params: Tree, split: Split, chunk: int = PER_PASS) -> Tensor:
        """Summed loss of the task on each chunk of a split [chunks], without gradients."""
        parts = zip(torch.split(split.x, chunk), torch.split(split.y, chunk), strict=True)
        return torch.stack([self.task.total(self.forward(params, x), y) for x, y in parts])
