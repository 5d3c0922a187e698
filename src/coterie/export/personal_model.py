"""A personal model as a module and as one file that can be used without run, cloud or training data.

The file is safetensors. Its metadata describe how to build the network, what its outputs mean and how raw items become
its input. Nothing in the file is executed: code that it names is imported only with the caller's permission.
"""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from coterie.core.context import PER_PASS, Context, Extras
from coterie.core.method import Method
from coterie.core.net import Net
from coterie.core.tasks import Task
from coterie.core.tasks import make as make_task
from coterie.core.tree import Tree, plain
from coterie.data import target_types as targets
from coterie.data.arrays import items_like
from coterie.data.dataset import Array, InputScale, prepare_items
from coterie.data.frames import rows_like, target_values
from coterie.data.rotation import Interp
from coterie.data.table import TableEncoding
from coterie.engine.provenance import origin, recalled
from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.methods import build_method as build_method
from coterie.methods import method_names, registered_name, validation_sentence
from coterie.methods.restore import restored
from coterie.models.adaptation import Adaptation, adapt
from coterie.models.registry import ModelFactory, count_parameters, options_of_0_1
from coterie.models.registry import build_model as build_model
from coterie.models.zoo import ZOO
from coterie.storage import atomic as disk
from coterie.train.devices import CPU, method_on

FORMAT = 2
_FEW_NUMBERS = 10**7  # size of a model that any machine can build
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64, "float64": torch.float64}


# ---- metadata of a file ----------------------------------------------------------------------------------------------
class Items(BaseModel):
    """Raw items, and how they become the input of the network."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["uint8", "float32", "int64", "float64"]  # bytes 0..255, floats, token ids, or rows of a table
    shape: tuple[int, ...]  # shape of one item, channels first
    table: TableEncoding | None = None  # columns of a table and how they become features
    vocab: int | None = None  # upper bound of token ids; texts become ids by data/text.py
    normalize: InputScale = "standard"  # none: bytes as they are; unit: divided by 255; standard: mean and std too
    mean: tuple[FiniteFloat, ...] | None = None
    std: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] | None = None
    turn: FiniteFloat = 0.0  # degrees by which this client's pictures are rotated
    interp: Interp = "bilinear"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.type]

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of the network's input."""
        return torch.int64 if self.type == "int64" else torch.float32

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one item as the network takes it."""
        return self.shape if self.table is None else (len(self.table.feature_names),)

    def raw(self, x: Any, name: str = "the data") -> Tensor:
        """Return arrays, or the rows of a data frame, as a tensor in the form of the training data."""
        if self.table is not None:
            return torch.from_numpy(rows_like(name, x, self.table))
        return items_like(name, x, self.dtype, self.shape, self.vocab)

    def ready(self, x: Tensor) -> Tensor:
        """Return the network's input for raw items, prepared exactly as in training."""
        if self.table is not None:
            return self.table.encode(x, self.normalize == "standard")
        x = x.clone() if x.is_floating_point() else x
        return prepare_items(x, self.normalize, self.mean, self.std, self.turn, self.interp)

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return outputs of the network in the units of the targets."""
        return outputs if self.table is None else self.table.unscale_outputs(outputs)


class About(BaseModel):
    """The description of a model in its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    title: str  # title of the method
    client: str
    round: int
    run: str  # fingerprint of the run, or its id in a federation
    data: str
    task: str
    outputs: int
    classes: tuple[str, ...]  # names of classes or labels; empty where targets are numbers
    items: Items
    model: str | None  # registered name of the model; None: a model of the user
    own_model: str | None = None  # package.module:name of a model of the user
    built: bool = False  # the user's model was an instance, which cannot be built from its name
    options: dict[str, Any] = {}
    adaptation: Adaptation | None = None  # frozen layers and adapters; None: neither
    # the method that calls a model which is more than its network (two heads, a gate, a mixture)
    method: str | None = None  # a registered name or package.module:name
    settings: dict[str, Any] = {}
    names: tuple[str, ...] = Field((), description="tensors of the tree")
    extras: tuple[str, ...] = Field((), description="tensors of the extras")
    numbers: dict[str, Any] = Field({}, description="numbers of the extras")

    @staticmethod
    def of(session: Session, client: int, round: int, run: str) -> "About":
        """Return the description of a client's network."""
        fed, source = session.federation, session.model_of(client)
        data, s = fed.source(client), fed.settings
        own = None if isinstance(source, str) else source
        return About(
            title=session.method.card.title or type(session.method).__name__, client=fed.names[client], round=round,
            run=run, data=str(session.settings.data), task=fed.task.name, outputs=fed.task.outputs,
            classes=tuple(data.classes),
            items=Items(
                type=str(data.x.dtype).removeprefix("torch."), shape=tuple(data.x.shape[1:]), table=data.table,
                vocab=fed.dataset.vocab,
                normalize=s.normalize, mean=data.mean, std=data.std, turn=fed.rotation(client, round),
                interp=s.rotate_interp,
            ),
            model=source if isinstance(source, str) else None, own_model=None if own is None else origin(own),
            built=isinstance(own, nn.Module), options=dict(session.options_for(source)),
            adaptation=how if (how := Adaptation.of(session.settings)).changes else None,
        )  # fmt: skip

    def calling(self, session: Session, module: "PersonalModel") -> "About":
        """Return this description with the method that calls the model."""
        own = session.objects.method
        return self.model_copy(update={
            "method": registered_name(session.settings.method) if own is None else origin(own),
            "settings": session.method.hp.model_dump(mode="json"),
            "names": tuple(module.names), "extras": tuple(module.given), "numbers": disk.json_values(module.numbers),
        })  # fmt: skip


# ---- modules ---------------------------------------------------------------------------------------------------------
class PersonalModel(nn.Module):
    """A personal model that is more than its network: two heads, a gate, a mixture.

    All its tensors are parameters and buffers of submodules, so `state_dict()` is complete and it can be trained.
    """

    def __init__(self, method: Method, params: Tree, extras: Extras):
        super().__init__()
        net = method.ctx.net
        self._method, self.names = method, list(params)
        self.numbers = {k: v for k, v in extras.items() if not isinstance(v, Tensor)}
        self.model, self.extras, self.frozen = nn.Module(), nn.Module(), nn.Module()
        for name, v in params.items():
            moves = v.is_floating_point() and plain(name) not in net.fixed
            _hold(self.model, name, v.detach().clone(), moves)
        for name, v in extras.items():
            if isinstance(v, Tensor):
                _hold(self.extras, name, v.detach().clone(), False)
        for name, v in net.constants().items():
            _hold(self.frozen, name, v.clone(), False)
        self.given = [k for k, v in extras.items() if isinstance(v, Tensor)]

    def forward(self, x: Tensor) -> Tensor:
        extras = {k: _held(self.extras, k) for k in self.given}
        self._method = method_on(self._method, x.device)  # after `to`
        return self._method.predict({k: _held(self.model, k) for k in self.names}, x, {**self.numbers, **extras})


def _path(name: str) -> list[str]:
    """Split `p:head.weight` into the submodules p and head and the tensor weight."""
    return [part for part in re.split(r"[.:]", name) if part]


def _hold(root: nn.Module, name: str, value: Tensor, trainable: bool) -> None:
    *inner, last = _path(name)
    for part in inner:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if trainable:
        root.register_parameter(last, nn.Parameter(value))
    else:
        root.register_buffer(last, value)


def _held(root: nn.Module, name: str) -> Tensor:
    *inner, last = _path(name)
    value: Tensor = getattr(root.get_submodule(".".join(inner)), last)
    return value


def as_module(method: Method, params: Tree, extras: Extras) -> nn.Module:
    """Return a personal model in evaluation mode: the network itself if the method does not override `predict`."""
    if type(method).predict is not Method.predict:
        return PersonalModel(method, params, extras).eval()
    return _network(method.ctx.net, params, method.ctx.w0)


def _network(net: Net, params: Tree, after: Tree) -> nn.Module:
    """Return the network with these values as an ordinary module, with parameters, buffers and batch-norm counters."""
    net.load({k: nn.Parameter(v) if k in net.trainable else v for k, v in params.items()})
    module = copy.deepcopy(net.module)
    net.load(after)
    for norm in module.modules():
        if isinstance(norm, _NormBase) and norm.track_running_stats:
            norm._buffers["num_batches_tracked"] = torch.tensor(0)
    return module.eval()


# ---- predictions -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for items."""

    values: Array  # class numbers [n], or [n, k]: predicted numbers, labels of 0 and 1, or log risks
    labels: tuple[str, ...]  # names of the predicted classes [n]; empty if targets are not classes
    proba: Array | None  # probabilities [n, classes]; None where targets are numbers
    outputs: Array  # outputs of the network [n, outputs]
    scores: dict[str, float]  # metrics of the task; empty if no targets were given


class Predictor(nn.Module):
    """A personal model with its preprocessing. `predict` takes raw items; a call as a module takes prepared items.

    `to(device)` moves it, as any module.
    """

    def __init__(self, network: nn.Module, about: About):
        super().__init__()
        self.network, self.about = network, about

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return outputs

    @property
    def task(self) -> Task:
        return make_task(self.about.task, self.about.outputs)

    @torch.no_grad()
    def predict(self, x: Any, y: Any = None, name: str = "the data") -> Predictions:
        """Return predictions for raw items, such as bytes 0..255 [n, H, W] or the rows of a data frame.

        If targets `y` are given, or a data frame has their columns, metrics are computed too.
        """
        if y is None and self.about.items.table is not None and not isinstance(x, np.ndarray | dict):
            y = target_values(x, self.about.items.table, name)
        raw, task, classes = self.about.items.raw(x, name), self.task, self.about.classes
        device = next((v.device for v in self.network.state_dict().values()), CPU)
        ready = (self.about.items.ready(part).to(device) for part in torch.split(raw, PER_PASS))
        parts = [self.network(items).to(CPU) for items in ready]
        outputs = self.about.items.in_units(torch.cat(parts))
        scores: dict[str, float] = {}
        if y is not None:
            true = targets.targets_like(name, np.asarray(y), self.about.task, classes, self.about.outputs)
            counts = {k: v[None].numpy() for k, v in task.count(outputs, true).items()}
            scores = {k: float(v[0]) for k, v in task.measured(counts).items()}
        values, proba = _decode(task, outputs)
        labels = tuple(classes[i] for i in values.tolist()) if task.classes else ()
        return Predictions(values.numpy(), labels, None if proba is None else proba.numpy(), outputs.numpy(), scores)


def _decode(task: Task, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return predicted values and probabilities for the outputs of a network."""
    if task.classes:
        return outputs.argmax(1), outputs.softmax(1)
    if task.name == "multilabel":
        return (outputs > 0).long(), outputs.sigmoid()
    return (outputs.exp() if task.name == "count" else outputs), None


# ---- files -----------------------------------------------------------------------------------------------------------
def write_model(path: Path, module: nn.Module, about: About, durable: bool = True) -> None:
    """Write a model as one file."""
    meta = {
        "method": about.title, "client": about.client, "round": str(about.round), "run": about.run,
        "data": about.data, "plain": str(about.method is None).lower(),
        "coterie": about.model_dump_json(exclude={"adaptation"} if about.adaptation is None else None),
    }  # fmt: skip
    state = {k: v.detach().to(CPU).clone().contiguous() for k, v in module.state_dict().items()}
    disk.write_atomic(path, _in_order(save(state, meta)), durable=durable)


def run_fingerprint(session: Session) -> str:
    """Return a fingerprint of everything that determines a run's results, whatever its folder and its workers."""
    described = session.described()
    return disk.fingerprint(
        {k: described[k] for k in ("settings", "method", "digests", "task", "tensors", "partition")}
    )


def describe_model(session: Session, client: int, module: nn.Module, round: int, run: str) -> About:
    """Return the description of a client's model for its file."""
    about = About.of(session, client, round, run)
    return about.calling(session, module) if isinstance(module, PersonalModel) else about


def load_model(
    path: str | Path,
    *,
    model: nn.Module | ModelFactory | None = None,
    method: type[Method] | None = None,
    allow_module: Sequence[str] = (),
) -> Predictor:
    """Return the personal model of a file, in evaluation mode.

    A model or method of your own must be given again, or is imported by the name in the file if `allow_module` lists
    that name (`package.module:name`, or `package.module:*` for all names of a module).
    """
    if not isinstance(path, str | Path):
        raise CoterieError(f"a personal model is loaded from a file, not from {path!r}")
    path = Path(path)
    if path.exists() and not path.is_file():
        raise CoterieError(f"{path} is not a file; a personal model is loaded from a file")
    try:
        with safe_open(path, "pt") as f:
            text = (f.metadata() or {}).get("coterie")
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as e:
        raise CoterieError(f"{path} cannot be read as a personal model: {str(e).splitlines()[0]}") from None
    if text is None:
        raise CoterieError(f"{path} was not written by `coterie export` or by a device")
    about = _about(path, text)
    if about.model == "ecsfl-cnn" and "fc2.weight" in tensors:  # three fully connected layers, as in version 0.1
        about = about.model_copy(update={"options": options_of_0_1(about.model, about.options)})
    module = _module(path, about, model, allow_module, sum(v.numel() for v in tensors.values()))
    if about.method is None:
        _fill(module, tensors, path)
        return Predictor(module, about).eval()
    frozen = {k.removeprefix("frozen."): v for k, v in tensors.items() if k.startswith("frozen.")}
    module.load_state_dict(frozen, strict=False)
    net = Net(module, torch.zeros(2, *about.items.input_shape, dtype=about.items.input_dtype))
    named = method or _method(path, about.method, allow_module)
    bound = build_method(*restored(named, about.settings))
    task = make_task(about.task, about.outputs)
    bound.ctx = Context(net, net.state(), (0,), task, planned_rounds=1, join=1, epochs=1, batch=1, lr=0.1, seed=0)
    params = {k: _tensor(tensors, "model", k, path) for k in about.names}
    extras = {k: _tensor(tensors, "extras", k, path) for k in about.extras}
    return Predictor(PersonalModel(bound, params, {**about.numbers, **extras}), about).eval()


def _about(path: Path, text: str) -> About:
    try:
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise CoterieError(f"{path} was written by a different version of Coterie; export the model again")
        return About(**fields)
    except ValidationError as e:
        raise CoterieError(f"{path} is damaged: {validation_sentence('its description', e)}") from None
    except (ValueError, TypeError, AttributeError) as e:
        raise CoterieError(f"{path} is damaged: its description cannot be read ({e})") from None


def _module(
    path: Path, about: About, model: nn.Module | ModelFactory | None, allow: Sequence[str], numbers: int
) -> nn.Module:
    """Build the network that a file describes; `numbers` is the size of all tensors in the file.

    A file must not ask for much more memory than it has itself.
    """
    source: Any = model
    if source is None and about.model is not None:
        source = about.model if ":" not in about.model else _imported(path, "model", about.model, allow)
    elif source is None:
        if about.built or about.own_model is None:
            raise CoterieError(f"{path} was made with a model of your own ({about.own_model}); pass it as model")
        source = _imported(path, "model", about.own_model, allow)
    options = {} if isinstance(source, nn.Module) else about.options
    items = about.items
    if source in ZOO:
        size = count_parameters(source, items.input_shape, about.outputs, items.vocab, options)
        if size > max(_FEW_NUMBERS, 10 * numbers):
            raise CoterieError(f"{path} describes a model of {size:,} numbers and holds {numbers:,}; it is damaged")
    module = build_model(
        source, items.input_shape, about.outputs, dtype=items.input_dtype, vocab=items.vocab, options=options
    )
    if about.adaptation is not None:
        adapt(module, torch.zeros(2, *items.input_shape, dtype=items.input_dtype), about.adaptation, seed=0)
    return module


def _method(path: Path, name: str, allow: Sequence[str]) -> str | type[Method]:
    if ":" not in name:
        if name not in method_names():
            raise CoterieError(f'{path} was made with the method "{name}", which is not installed here')
        return name
    cls = _imported(path, "method", name, allow)
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise CoterieError(f"{path} names {name} as its method, which is not a Method class")
    return cls


def _imported(path: Path, what: str, name: str, allow: Sequence[str]) -> Any:
    """Import the code that a file names if the caller allows that name."""
    if name not in allow and f"{name.partition(':')[0]}:*" not in allow:
        raise CoterieError(
            f'{path} names the code "{name}" as its {what}, which is imported only with your permission: pass it as '
            f'{what}, or allow "{name}" (allow_module, --allow-module)'
        )
    code = recalled(name)
    if code is None:
        raise CoterieError(f"{path} was made with a {what} of your own ({name}), which cannot be imported here")
    return code


def _fill(module: nn.Module, tensors: Tree, path: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:200]
        raise CoterieError(f"the model does not fit {path}: {reason}") from None


def _tensor(tensors: Tree, part: str, name: str, path: Path) -> Tensor:
    at = ".".join([part, *_path(name)])
    if at not in tensors:
        raise CoterieError(f"{path} lacks {at}")
    return tensors[at]


def _in_order(blob: bytes) -> list[bytes]:
    """Return the same safetensors file with sorted metadata; the library writes them in any order."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, blob[start:]]
