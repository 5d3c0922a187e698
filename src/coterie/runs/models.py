"""Personal models from a run's folder."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from coterie import disk
from coterie.checkpoint import Checkpoint, read
from coterie.errors import CoterieError
from coterie.exchange import preview
from coterie.folder import checkpoints
from coterie.method import Extras, Method
from coterie.runs.run import Run
from coterie.runtimes.states import ClientStates
from coterie.session import Session, client_states
from coterie.train.trainer import train
from coterie.tree import Tree, clone


class PersonalModel(nn.Module):
    """A personal model that is more than its network: two heads, a gate, a mixture."""

    def __init__(self, method: Method, params: Tree, extras: Extras):
        super().__init__()
        self._method, self._params, self._extras = method, params, extras

    def forward(self, x: Tensor) -> Tensor:
        return self._method.predict(self._params, x, self._extras)


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

    def personal(self, client: int) -> tuple[Tree, Extras]:
        """Parameters and extras of a client's personal model."""
        federation, saved = self.session.federation, self.checkpoint
        if client not in federation.clients:
            raise CoterieError(f"the run has no client {client}; they are numbered 0 to {len(federation.clients) - 1}")
        data, method = federation.data(client), self.session.method_of(client)
        state = self.states.get(client)
        if state is None:
            state = method.init_client(data)
        shared, own = preview(self.method, saved.server, saved.edges, [client], saved.round + 1)[client]
        with torch.no_grad():
            params, extras = method.personal(state, {**shared, **own}, data)
        return clone(params), extras

    def adapted(self, client: int) -> tuple[Tree, Extras]:
        """The same after the fine-tuning that comes before use, if the method has some."""
        params, extras = self.personal(client)
        method = self.session.method_of(client)
        if not (phases := method.adapt()):
            return params, extras
        data, rule = self.session.federation.data(client), self.session.clients().rule
        round = self.checkpoint.round + 1
        return train(method.ctx, rule, phases, params, extras, data, round)[:2]

    def plain(self, extras: Extras) -> bool:
        """Is the personal model just the network with these parameters?"""
        return not extras and type(self.method).predict is Method.predict


def personal_trees(run: Run) -> tuple[Session, dict[int, Tree]]:
    """Parameters of every client's personal model at the newest checkpoint; newcomers are left out."""
    saved = Saved(run)
    return saved.session, {int(i): saved.personal(i)[0] for i in saved.method.ctx.clients}


def personal_module(run: Run, client: int) -> nn.Module:
    saved = Saved(run)
    params, extras = saved.adapted(client)
    if not saved.plain(extras):
        return PersonalModel(saved.session.method_of(client), params, extras).eval()
    ctx = saved.session.method_of(client).ctx
    net = ctx.net
    net.load({k: nn.Parameter(v) if k in net.trainable else v for k, v in params.items()})
    module = copy.deepcopy(net.module)
    net.load(ctx.w0)
    return module.eval()


def export(run: Run, client: int, path: Path) -> str:
    """Write the personal model as safetensors; returns how to load it."""
    saved = Saved(run)
    params, extras = saved.adapted(client)
    plain = saved.plain(extras)
    meta = {
        "method": run.title,
        "client": str(client),
        "round": str(saved.checkpoint.round),
        "data": str(run.settings["data"]),
        "model": str(run.settings["model"] or "default"),
        "plain": str(plain).lower(),
    }
    disk.write_atomic(path, _in_order(save({k: v.contiguous() for k, v in params.items()}, meta)))
    if plain:
        return f"from safetensors.torch import load_file\nmodel.load_state_dict(load_file({str(path)!r}), strict=False)"
    return f"import coterie\nmodel = coterie.open_run({str(run.path)!r}).personal({client})"


def _in_order(blob: bytes) -> list[bytes]:
    """The same safetensors file with its metadata sorted: the library writes them in any order."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, blob[start:]]
