"""Personal models taken out of a run's folder."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.codec import load
from coterie.errors import CoterieError
from coterie.folder import Folder
from coterie.loop import Loop
from coterie.method import Extras, Method
from coterie.runs.run import Run
from coterie.runtimes.states import Store
from coterie.runtimes.workers import Inline
from coterie.session import Session, make_loop
from coterie.tree import Tree, clone


class PersonalModel(nn.Module):
    """A personal model that is more than its network: two heads, a gate, a mixture."""

    def __init__(self, method: Method, params: Tree, extras: Extras):
        super().__init__()
        self._method, self._params, self._extras = method, params, extras

    def forward(self, x: Tensor) -> Tensor:
        return self._method.predict(self._params, x, self._extras)


def personal_tree(run: Run, client: int) -> tuple[Session, Tree, Extras]:
    """Parameters and extras of a client's personal model at the newest checkpoint."""
    session = run.session()
    if client not in session.federation.clients:
        raise CoterieError(
            f"the run has no client {client}; they are numbered 0 to {len(session.federation.clients) - 1}"
        )
    loop = _frozen(session, run.path)
    data = session.federation.data(client)
    state = loop.store.get(client)
    if state is None:
        state = session.method.init_client(data)
    with torch.no_grad():
        params, extras = session.method.personal(state, loop.download(client), data)
    return session, clone(params), extras


def personal_trees(run: Run) -> tuple[Session, dict[int, Tree]]:
    """Parameters of every client's personal model at the newest checkpoint; newcomers are left out."""
    session = run.session()
    loop = _frozen(session, run.path)
    out = {}
    with torch.no_grad():
        for client in session.method.ctx.clients:
            data, state = session.federation.data(client), loop.store.get(client)
            if state is None:
                state = session.method.init_client(data)
            out[int(client)] = clone(session.method.personal(state, loop.download(client), data)[0])
    return session, out


def personal_module(run: Run, client: int) -> nn.Module:
    session, params, extras = personal_tree(run, client)
    if extras or type(session.method).predict is not Method.predict:
        return PersonalModel(session.method, params, extras).eval()
    net = session.method.ctx.net
    net.load({k: nn.Parameter(v) if k in net.trainable else v for k, v in params.items()})
    module = copy.deepcopy(net.module)
    net.load(session.method.ctx.w0)
    return module.eval()


def export(run: Run, client: int, path: Path) -> str:
    """Write the personal model as safetensors; returns how to load it."""
    session, params, extras = personal_tree(run, client)
    plain = not extras and type(session.method).predict is Method.predict
    meta = {
        "method": run.title,
        "client": str(client),
        "round": str(run.last_round),
        "data": str(run.settings["data"]),
        "model": str(run.settings["model"] or "default"),
        "plain": str(plain).lower(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in params.items()}, path, metadata=meta)
    if plain:
        return f"from safetensors.torch import load_file\nmodel.load_state_dict(load_file({str(path)!r}), strict=False)"
    return f"import coterie\nmodel = coterie.open_run({str(run.path)!r}).personal({client})"


def _frozen(session: Session, path: Path) -> Loop:
    """A loop that stands where the newest checkpoint left it; the folder is only read."""
    files = sorted((path / "checkpoints").glob("[0-9]*.safetensors"))
    if not files:
        raise CoterieError(f"{path} has no checkpoint yet")
    saved: dict[str, Any] = load(files[-1])
    folder = Folder.__new__(Folder)
    folder.path = path
    loop = make_loop(session, folder, Inline(session.device()))
    loop.store = Store(path, len(session.federation.clients), disk=True)
    loop.store.restore(saved["version"].numpy(), saved["checksum"].numpy())
    loop.server, loop.edges, loop.done = saved["server"], saved["edges"], saved["round"]
    return loop
