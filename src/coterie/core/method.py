"""The interface of a method. The defaults of all hooks are FedAvg with an optional private part.

Everything that crosses the network is a Download or an Upload. Server hooks see the server's state and uploads; client
hooks see the client's data, its state and what was sent to it. A state holds numbers, text, tensors, lists,
dictionaries and dataclasses declared with @state, so that it can be stored; hooks keep nothing on `self`.
Methods whose clients talk to edge servers derive from EdgeMethod (edges.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, Context, EdgeId, EdgeState, Extras, Split, State
from coterie.core.schema import Link, Schema, like
from coterie.core.tree import Predicate, Tree, everything
from coterie.core.views import ModelView, Use
from coterie.errors import CoterieError

Loss = Callable[[Tree, Batch, Extras], Tensor | tuple[Tensor, Any]]
Update = Callable[[Tree, Any, Extras, torch.Generator], Tree]


# ---- what hooks take and return --------------------------------------------------------------------------------------
class Settings(BaseModel):
    """Typed settings of a method; a subclass lists them with defaults, bounds and a line of description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    fixed: ClassVar[Mapping[str, Any]] = {}  # defaults that make a variant (parts/variants.py)


@dataclass(frozen=True)
class Card:
    """Description of a method, for tables, pages and `coterie show`."""

    title: str = ""  # spelling of the papers
    paper: str = ""  # authors, venue, year, DOI or arXiv number
    year: int = 0
    family: str = ""  # letters: G global, F fine-tuning, S split, R regularised, M mixing, C clusters, P prototypes
    personal: str = "nothing"  # the part of a client's model that is its own
    # A: checked against the authors' code, B: against code of others, P: written from the paper itself,
    # C: reconstructed from published descriptions only, with open points; marked in tables; O: Coterie's own method
    certainty: str = "A"
    compute: str = ""  # cost of a round in addition to FedAvg's local training, in words


@dataclass(frozen=True)
class Moment:
    """Identifies a payload: the client (or edge), the round, and the server's state before it."""

    server: State
    client: ClientId
    round: int


@dataclass(frozen=True)
class Download:
    """A server's payload: `shared` for all clients, `edge` for an edge and its clients, `each` for single clients."""

    shared: Tree = field(default_factory=dict)
    each: Mapping[ClientId, Tree] = field(default_factory=dict)
    edge: Mapping[EdgeId, Tree] = field(default_factory=dict)

    def to(self, client: ClientId) -> Tree:
        """Return what this client receives, as one tree."""
        return {**self.shared, **self.each.get(client, {})}


@dataclass(frozen=True)
class Upload:
    """An upload of a client or an edge: `tree` is the payload and is counted, `note` holds numbers for the log only."""

    tree: Tree
    note: Mapping[str, float] = field(default_factory=dict)
    sender: int = -1  # client or edge id, written by the runtime
    samples: int = 0  # number of training samples behind it, written by the runtime


@dataclass(frozen=True)
class Start:
    """The start of a client's local training."""

    params: Tree  # cloned before training
    extras: Extras = field(default_factory=dict)  # further arguments of the losses
    train: bool = True  # False: the client skips the phases of this round
    per_sample: Tensor | None = None  # a value for each training sample [n, ...], found in Batch.per_sample

    def adding(self, **extras: Any) -> "Start":
        """Return the same start with further extras."""
        return replace(self, extras={**self.extras, **extras})

    @property
    def model(self) -> "Model":
        """The start as a model to be scored or used."""
        return Model(self.params, self.extras)


@dataclass(frozen=True)
class Trained:
    """The result of a client's local training."""

    params: Tree
    extras: Extras = field(default_factory=dict)
    aux: Sequence[Any] = ()  # second results of the loss, one per step, of the last phase whose loss returns a pair
    steps: int = 0  # steps of all phases


class Client(NamedTuple):
    """A client as `model` sees it."""

    state: State
    download: Tree
    data: ClientData
    round: int
    trained: Trained | None = None  # given for the view "trained"; `state` is then the new state


class Model(NamedTuple):
    """A model to be scored or used: parameters, and extras for `predict`."""

    params: Tree
    extras: Extras = {}  # noqa: RUF012, never written to


@dataclass(frozen=True, eq=False)
class TaskLoss:
    """The task's mean loss of one model of the tree, optionally with a pull towards a reference.

    The pull adds pull / 2 times the squared distance of the trainable entries. A phase with such a loss says all that
    it computes, so a trainer may compute it in a different way.
    """

    ctx: Context
    tag: str = ""  # tag of the model's entries in the tree; empty: they have none
    pull: float = 0.0
    reference: str = "anchor"  # name of the reference in the extras: a tree with plain names

    def __call__(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Return the loss of a batch."""
        own = T.tagged(self.tag, params) if self.tag else params
        loss = self.ctx.loss(own, batch)
        if self.pull == 0:
            return loss
        return loss + self.pull / 2 * T.sqdist(own, extras[self.reference], self.ctx.net.trainable)

    def name(self, entry: str) -> str:
        """Return the name of the model's entry in the tree."""
        return f"{self.tag}{T.MARK}{entry}" if self.tag else entry


def unless_overridden(method: "Method", owner: type["Method"], hook: str, declared: TaskLoss) -> Loss:
    """Return `declared`, which the loss hook of the class `owner` computes, or the hook if a subclass overrides it."""
    own: Loss = getattr(method, hook)
    return declared if getattr(type(method), hook) is getattr(owner, hook) else own


@dataclass(frozen=True)
class Phase:
    """One phase of local training; None means the run's own setting."""

    loss: Loss | None = None  # pure: (params, batch, extras) -> scalar or (scalar, aux); see Trained.aux
    trains: Predicate = everything  # masks the update, not the gradient; batch norm of a frozen layer is not updated
    epochs: float | None = None
    steps: int | None = None  # instead of epochs
    stream: int = 0  # phases with equal streams see equal batch orders
    batches_per_step: int = 1  # if more than one, `update` gets a tuple of batches
    update: Update | None = None  # (params, batch, extras, rng) -> params, instead of loss and optimiser
    every_epoch: Callable[[Tree, Extras, ClientData], tuple[Tree, Extras]] | None = None
    clip: float | None = None  # largest gradient norm
    lr: float | None = None
    weight_decay: Callable[[str], float] | None = None  # by name of the entry
    prior: Callable[[Tree, Extras], Tensor] | None = (
        None  # added to the loss; depends on no sample (see docs/privacy.md)
    )

    @property
    def objective(self) -> Loss | None:
        """The loss with the prior added."""
        return self.loss if self.loss is None or self.prior is None else partial(_with_prior, self.loss, self.prior)


def _with_prior(
    loss: Loss, prior: Callable[[Tree, Extras], Tensor], params: Tree, batch: Batch, extras: Extras
) -> Tensor | tuple[Tensor, Any]:
    value = loss(params, batch, extras)
    pull = prior(params, extras)
    return (value[0] + pull, value[1]) if isinstance(value, tuple) else value + pull


# ---- the method ------------------------------------------------------------------------------------------------------
class Method:
    """FedAvg with a private part: names for which `private` is true stay on the client, all others travel."""

    Settings: ClassVar[type[Settings]] = Settings
    card: ClassVar[Card] = Card()
    needs: ClassVar[tuple[str, ...]] = ()  # keys of _NEEDS in engine/session/build.py
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    # mean: after round 0, aggregate(uploads) is aggregate of their mean with `weights`, so that one combined upload may
    # stand for all; uploads: it needs single ones. A class with an `aggregate` of its own declares it
    combines: ClassVar[Literal["mean", "uploads"]] = "mean"

    ctx: Context  # set by the runtime before any hook is called
    hp: Any  # the settings; a method annotates it with its own class

    def __init__(self, **settings: Any):
        self.hp = self.Settings(**settings)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "aggregate" in cls.__dict__ and "combines" not in cls.__dict__:
            cls.combines = "uploads"
        check_hooks(cls)

    # ---- what is private, and what may cross a link ------------------------------------------------------------------
    def private(self, name: str) -> bool:
        """True if this entry of the model stays on the client."""
        return False

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        """Declare the entries of a payload on a link.

        With `now` the schema is exact for one client and round. If `now` is None, it covers every payload of the run.
        """
        return self.model_schema

    # ---- server: sees its state and uploads --------------------------------------------------------------------------
    def setup(self) -> State:
        """Return the server's initial state."""
        return {"w": T.clone(T.drop(self.ctx.w0, self.stays))}

    def down(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Return what is sent to the participants `ids`."""
        return Download(shared=server["w"])

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        """Return the server's next state. There is at least one upload; uploads are in the order of client ids."""
        return {**server, "w": T.mean([u.tree for u in uploads], self.weights(uploads))}

    # ---- client: sees its data, its state and what was sent to it ----------------------------------------------------
    def init_client(self, data: ClientData) -> State:
        """Return a client's initial private state."""
        own = T.keep(self.ctx.w0, self.stays)
        return {"own": T.clone(own)} if own else {}

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        """Return the start of local training: parameters, and extras for the losses."""
        return Start({**download, **state.get("own", {})})

    def phases(self, round: int) -> list[Phase]:
        """Return the phases of a round's local training."""
        return [Phase(self.loss)] if round > 0 else []

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        """Loss of a batch; a pure function."""
        return self.ctx.loss(params, batch)

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        """Return what the client keeps and what it sends."""
        own = T.keep(trained.params, self.stays)
        return ({**state, "own": own} if own else state), Upload(T.drop(trained.params, self.stays))

    def personal(self, state: State, download: Tree, data: ClientData) -> Model:
        """Return the client's model that is scored, exported and used."""
        return Model({**download, **state.get("own", {})})

    # ---- helpers for hooks -------------------------------------------------------------------------------------------
    def stays(self, name: str) -> bool:
        """True for private entries, and for batch-norm statistics if the run keeps those local."""
        return self.private(name) or (self.ctx.bn_stats == "local" and name in self.ctx.group("bn_stats"))

    @cached_property
    def model_schema(self) -> Schema:
        """Schema of the shared part of the model."""
        return Schema(like(T.drop(self.ctx.w0, self.stays)))

    def weights(self, uploads: Sequence[Upload]) -> list[float] | None:
        """Weights of the uploads in a mean: numbers of samples, or None for a uniform mean."""
        uniform = (self.ctx.weighting or self.weighting) == "uniform"
        return None if uniform else [float(u.samples) for u in uploads]

    # ---- rarely needed: settings and participants --------------------------------------------------------------------
    # registered names of the controls that a claim about this class must beat in addition to the usual ones: its idea
    # drawn at random, or a part of it removed; not inherited
    controls: ClassVar[tuple[str, ...]] = ()
    # parts that the models of all clients share: the model, the head and its features, or only the outputs
    agree: ClassVar[Literal["model", "head", "output"]] = "model"
    # True if training depends on ctx.planned_rounds: a run that is extended then differs from one that began longer
    plans_ahead: ClassVar[bool] = False
    # the rule for the model that a client uses, unless the run says otherwise (train/rule_of_use.py)
    use: ClassVar[Use] = "received"
    # True if a newcomer's model needs no labels, so that it can be made from items alone
    unlabelled: ClassVar[bool] = False

    def required(self) -> tuple[str, ...]:
        """Return `needs`, and what these settings need in addition."""
        return self.needs

    def departures(self) -> list[str]:
        """Return sentences for intended departures of these settings from the paper; a run prints them at its start."""
        return []

    def check(self) -> None:
        """Raise CoterieError if the settings cannot work with this model or data; called once before any work."""

    def opening(self) -> bool:
        """True if the run has a round 0, in which all clients take part."""
        return False

    def sample(self, server: State, round: int, rng: torch.Generator) -> list[ClientId]:
        """Return the participants of a round; all clients in round 0."""
        clients = self.ctx.clients
        picked = torch.randperm(len(clients), generator=rng)[: None if round == 0 else self.ctx.participants()]
        return sorted(clients[int(i)] for i in picked)

    # ---- rarely needed: evaluation and use ---------------------------------------------------------------------------
    def model(self, view: ModelView, client: Client) -> Model | None:
        """Return the client's model for a view; None if the view has no model.

        - personal: what `personal` returns.
        - newcomer: the same for a client that never took part (its state is init_client's). It must not hold initial
          values where the server has trained ones.
        - watched: scored before local training if `watch` is set; override it if `personal` is costly.
        - received: where local training starts, if that is one complete model; otherwise the personal model.
        - trained: the result of local training, if that is one complete model; otherwise the personal model.
        - edge: the model of the client's cluster or edge, without entries of the client's own.
        """
        if view == "edge":
            return None
        if view in ("received", "trained"):
            now = client.trained or started(self, *client[:4])
            if not self.ctx.w0.keys() - now.params.keys():
                return Model(now.params, now.extras)
        return self.personal(client.state, client.download, client.data)

    def deliver(self, server: State, ids: Sequence[ClientId], round: int) -> Download:
        """Return what clients receive for evaluation and use; by default what the next round would send."""
        return self.down(server, ids, round)

    def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
        """Return the outputs of a client's model."""
        return self.ctx.forward(params, x)

    def adapt(self) -> list[Phase]:
        """Return the phases that fine-tune a copy of the personal model before it is scored or used."""
        return []

    @property
    def in_use(self) -> Literal["personal", "adapted"]:
        """The view of the model that a client would use, which tables lead with; it depends on settings only."""
        return "personal"

    def global_model(self, server: State) -> Tree | None:
        """Return the complete model that is the same for all clients; None if the method has no such model."""
        w = server.get("w") if isinstance(server, dict) else getattr(server, "w", None)
        return w if w is not None and not (self.ctx.w0.keys() - w.keys()) else None

    def predict_global(self, params: Tree, x: Tensor) -> Tensor:
        """Return the outputs of the global model."""
        return self.ctx.forward(params, x)

    def cluster_of(self, server: State) -> Mapping[ClientId, int] | None:
        """Return the cluster or edge of each client that has one, for means over clusters; None without clusters."""
        return None

    def facts(self, server: State) -> dict[str, Any]:
        """Return facts about the server's state for the log, such as clusters, as JSON values."""
        return {}


def task_loss(loss: Loss | None) -> TaskLoss | None:
    """Return what a phase's loss computes if it is the task's; None if it may be anything else."""
    if isinstance(loss, TaskLoss):
        return loss
    owner = getattr(loss, "__self__", None)
    if isinstance(owner, Method) and getattr(loss, "__func__", None) is Method.loss:
        return TaskLoss(owner.ctx)
    return None


# ---- errors for methods written for version 0.1 ----------------------------------------------------------------------
_REPLACED = {
    "newcomer": 'model(view, client) for the view "newcomer"',
    "watched": 'model(view, client) for the view "watched"',
    "received_model": 'model(view, client) for the view "received"',
    "cluster_model": 'model(view, client) for the view "edge"',
    "trained": 'model(view, client) for the view "trained"',
}


def check_hooks(cls: type[Method]) -> None:
    """Raise CoterieError if a class defines hooks as version 0.1 had them."""
    for name, new in _REPLACED.items():
        if inspect.isfunction(cls.__dict__.get(name)):
            raise CoterieError(f"{cls.__name__}.{name}: this hook is gone since version 0.2; override {new}")
    end = cls.__dict__.get("end")
    if inspect.isfunction(end) and {"params", "extras"} <= inspect.signature(end).parameters.keys():
        raise CoterieError(
            f"{cls.__name__}.end: since version 0.2 its parameters are end(self, state, trained, data, round); "
            "use trained.params and trained.extras"
        )


def started(method: Method, state: State, download: Tree, data: ClientData, round: int) -> Start:
    """Call `begin`; raise CoterieError if it returns a tuple, as in version 0.1."""
    start = method.begin(state, download, data, round)
    if not isinstance(start, Start):
        raise CoterieError(
            f"{type(method).__name__}.begin returned a {type(start).__name__}; since version 0.2 it returns "
            "Start(params, extras, train=True, per_sample=None)"
        )
    return start


__all__ = [
    "Batch", "Card", "Client", "ClientData", "ClientId", "Context", "Download", "EdgeId", "EdgeState", "Extras",
    "Loss", "Method", "Model", "Moment", "Phase", "Schema", "Settings", "Split", "Start", "State", "TaskLoss",
    "Trained", "Tree", "Update", "Upload", "replace", "started", "task_loss",
    "unless_overridden",
]  # fmt: skip
