"""Personal models from a run's folder."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from coterie import disk
from coterie.checkpoint import Checkpoint, read
from coterie.errors import CoterieError
from coterie.exchange import preview
from coterie.folder import checkpoints
from coterie.method import Context, Extras, Method
from coterie.methods import build as build_method
from coterie.models.net import Net
from coterie.models.registry import build as build_model
from coterie.origins import origin, recalled
from coterie.runs.run import Run
from coterie.runtimes.states import ClientStates
from coterie.session import Factory, Session, client_states
from coterie.tasks import make as make_task
from coterie.train.trainer import train
from coterie.tree import Tree, clone, mean


class PersonalModel(nn.Module):
    """A personal model that is more than its network: two heads, a gate, a mixture.

    Its tensors are parameters and buffers of submodules: state_dict() is whole, and it can be trained further."""

    def __init__(self, method: Method, params: Tree, extras: Extras):
        super().__init__()
        net = method.ctx.net
        self._method, self.names = method, list(params)
        self.numbers = {k: v for k, v in extras.items() if not isinstance(v, Tensor)}
        self.model, self.extras, self.frozen = nn.Module(), nn.Module(), nn.Module()
        for name, v in params.items():
            moves = v.is_floating_point() and name.rsplit(":", 1)[-1] not in net.fixed
            _hold(self.model, name, v.detach().clone(), moves)
        for name, v in extras.items():
            if isinstance(v, Tensor):
                _hold(self.extras, name, v.detach().clone(), False)
        for name, v in net.constants().items():
            _hold(self.frozen, name, v.clone(), False)
        self.given = [k for k, v in extras.items() if isinstance(v, Tensor)]

    def forward(self, x: Tensor) -> Tensor:
        extras = {k: _held(self.extras, k) for k in self.given}
        return self._method.predict({k: _held(self.model, k) for k in self.names}, x, {**self.numbers, **extras})


def _path(name: str) -> list[str]:
    """`p:head.weight` as submodules p and head and a tensor weight."""
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
    found: Tensor = getattr(root.get_submodule(".".join(inner)), last)
    return found


class Saved:
    """A run as its newest checkpoint left it; the folder is only read."""

    def __init__(self, run: Run):
        if (run.description.get("engine") or {}).get("runtime") == "flower":
            raise CoterieError(f"the devices of {run.path} keep their models themselves, each in model.safetensors")
        self.session: Session = run.session()
        self.method = self.session.method
        files = checkpoints(run.path)
        if not files:
            raise CoterieError(f"{run.path / 'checkpoints'} holds no checkpoint yet")
        last = files[-1].with_name(f"{run.last_round:06d}.state")
        if run.finished and files[-1] != last:
            raise CoterieError(f"{last} is missing; `coterie run --resume {run.path}` recomputes it")
        self.checkpoint: Checkpoint = read(files[-1], type(self.method).__name__)
        self.states: ClientStates = client_states(self.session, run.path)
        self.states.look(self.checkpoint.clients)

    def personal(self, client: int | str) -> tuple[Tree, Extras]:
        """Parameters and extras of a client's personal model."""
        federation, saved = self.session.federation, self.checkpoint
        client = federation.number(client)
        data, method = federation.data(client), self.session.method_of(client)
        held = self.states.get(client)
        state = method.init_client(data) if held is None else held
        ask = method.newcomer if held is None else method.personal
        shared, own = preview(self.method, saved.server, saved.edges, [client], saved.round + 1)[client]
        with torch.no_grad():
            params, extras = ask(state, {**shared, **own}, data)
        return clone(params), extras

    def adapted(self, client: int | str) -> tuple[Tree, Extras]:
        """The same after the fine-tuning that comes before use, if the method has some."""
        params, extras = self.personal(client)
        method = self.session.method_of(self.session.federation.number(client))
        if not (phases := method.adapt()):
            return params, extras
        federation, rule = self.session.federation, self.session.clients().rule
        data = federation.data(federation.number(client))
        round = self.checkpoint.round + 1
        return train(method.ctx, rule, phases, params, extras, data, round)[:2]

    def plain(self) -> bool:
        """Is a personal model just the network with other parameters?"""
        return type(self.method).predict is Method.predict


def personal_trees(run: Run) -> tuple[Session, dict[int, Tree]]:
    """Parameters of every client's personal model at the newest checkpoint; newcomers are left out."""
    saved = Saved(run)
    return saved.session, {int(i): saved.personal(i)[0] for i in saved.method.ctx.clients}


def mean_model(path: Path) -> Tree:
    """The global model of a run, or else the mean of its clients' personal models."""
    saved = Saved(Run(path))
    whole = saved.method.global_model(saved.checkpoint.server)
    if whole is not None:
        return {k: whole[k].clone() for k in saved.method.ctx.w0}
    if not saved.plain():
        raise CoterieError(
            f"{path} has no global model, and a model of {saved.method.card.title} is more than its network; "
            "it cannot be started from"
        )
    names = saved.method.ctx.w0
    return mean([{k: saved.personal(i)[0][k] for k in names} for i in saved.method.ctx.clients])


def personal_module(run: Run, client: int | str) -> nn.Module:
    saved = Saved(run)
    params, extras = saved.adapted(client)
    method = saved.session.method_of(saved.session.federation.number(client))
    if not saved.plain():
        return PersonalModel(method, params, extras).eval()
    return _network(method.ctx.net, params, method.ctx.w0)


def _network(net: Net, params: Tree, after: Tree) -> nn.Module:
    """The network with these values as an ordinary module: parameters, buffers and the counters of batch norm."""
    net.load({k: nn.Parameter(v) if k in net.trainable else v for k, v in params.items()})
    module = copy.deepcopy(net.module)
    net.load(after)
    for norm in module.modules():
        if isinstance(norm, _NormBase) and norm.track_running_stats:
            norm._buffers["num_batches_tracked"] = torch.tensor(0)
    return module.eval()


def export(run: Run, client: int | str, path: Path) -> str:
    """Write the personal model as safetensors; returns code that loads the file."""
    saved = Saved(run)
    session, number = saved.session, saved.session.federation.number(client)
    module = personal_module(run, client)
    fed, source = session.federation, session.model_of(number)
    own = None if isinstance(source, str) else source
    example = fed.dataset.ready(torch.zeros(1, dtype=torch.int64), fed.settings.normalize)
    about = {
        "model": source if isinstance(source, str) else None,
        "own_model": None if own is None else origin(own),
        "built": isinstance(own, nn.Module),
        "options": session.options_for(source),
        "shape": list(fed.shape),
        "task": fed.task.name,
        "outputs": fed.task.outputs,
        "labels": list(fed.dataset.classes),
        "dtype": str(example.dtype).removeprefix("torch."),
        "vocab": fed.dataset.vocab,
        "normalisation": {"mean": fed.dataset.mean, "std": fed.dataset.std, "normalize": fed.settings.normalize},
    }
    if isinstance(module, PersonalModel):
        about["method"] = session.settings.method if session.objects.method is None else origin(session.objects.method)
        about["settings"] = session.method.hp.model_dump(mode="json")
        about |= {"names": module.names, "extras": module.given, "numbers": disk.finite(module.numbers)}
    meta = {
        "method": run.title,
        "client": fed.names[number],
        "round": str(saved.checkpoint.round),
        "data": str(run.settings["data"]),
        "plain": str(saved.plain()).lower(),
        "coterie": json.dumps(about, sort_keys=True),
    }
    state = {k: v.detach().clone().contiguous() for k, v in module.state_dict().items()}
    disk.write_atomic(path, _in_order(save(state, meta)))
    if own is None:
        return f"import coterie\nmodel = coterie.load_model({str(path)!r})"
    name = getattr(own, "__name__", type(own).__name__)
    return f"import coterie\nmodel = coterie.load_model({str(path)!r}, model={name})  # {name}: your own"


def load_model(
    path: str | Path, *, model: nn.Module | Factory | None = None, method: type[Method] | None = None
) -> nn.Module:
    """The personal model of an exported file, in evaluation mode. A model or method of your own is imported by the name
    it had, if it can be; else give the same again."""
    path = Path(path)
    try:
        with safe_open(path, "pt") as f:
            about = json.loads((f.metadata() or {}).get("coterie", "null"))
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as e:
        raise CoterieError(f"{path} cannot be read as an exported model: {str(e).splitlines()[0]}") from None
    if about is None:
        raise CoterieError(f"{path} was not written by `coterie export`")
    module = _module(path, about, model)
    if "names" not in about:
        _fill(module, tensors, path)
        return module.eval()
    frozen = {k.removeprefix("frozen."): v for k, v in tensors.items() if k.startswith("frozen.")}
    module.load_state_dict(frozen, strict=False)
    shape, dtype = tuple(about["shape"]), getattr(torch, about["dtype"])
    net = Net(module, torch.zeros(2, *shape, dtype=dtype))
    cls = method or (recalled(about["method"]) if ":" in about["method"] else about["method"])
    if cls is None:
        raise CoterieError(f"{path} was made with a method of your own ({about['method']}); give method = it")
    bound = build_method(cls, about["settings"])
    task = make_task(about["task"], about["outputs"])
    bound.ctx = Context(net, net.state(), (0,), task, rounds=1, join=1, epochs=1, batch=1, lr=0.1, seed=0)
    params = {k: _found(tensors, "model", k, path) for k in about["names"]}
    extras = {k: _found(tensors, "extras", k, path) for k in about["extras"]}
    return PersonalModel(bound, params, {**about["numbers"], **extras}).eval()


def _module(path: Path, about: dict[str, Any], model: nn.Module | Factory | None) -> nn.Module:
    """The architecture that a file is of."""
    source = model or about["model"]
    if source is None and not about["built"]:
        source = recalled(about["own_model"])
    if source is None:
        raise CoterieError(f"{path} was made with a model of your own ({about['own_model']}); give model = it")
    dtype = getattr(torch, about["dtype"])
    shape, outputs = tuple(about["shape"]), about["outputs"]
    options = {} if isinstance(source, nn.Module) else about["options"]
    return build_model(source, shape, outputs, dtype=dtype, vocab=about["vocab"], options=options)


def _fill(module: nn.Module, tensors: Tree, path: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:200]
        raise CoterieError(f"the model does not fit {path}: {reason}") from None


def _found(tensors: Tree, part: str, name: str, path: Path) -> Tensor:
    at = ".".join([part, *_path(name)])
    if at not in tensors:
        raise CoterieError(f"{path} lacks {at}")
    return tensors[at]


def _in_order(blob: bytes) -> list[bytes]:
    """The same safetensors file with its metadata sorted: the library writes them in any order."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, blob[start:]]
