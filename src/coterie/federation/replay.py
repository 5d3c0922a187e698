"""Compute the rounds of a federation again in one process, without the clients that failed, and compare the results.

This is for a trial on one machine, where the states of all devices can be read. The results differ if a state was lost,
was used twice or was given to the wrong client, or if a refused upload was counted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from coterie.config import Engine
from coterie.core.context import ClientId
from coterie.engine import codec
from coterie.engine.edge_steps import preview
from coterie.engine.loop import Loop
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session, make_loop, prepare
from coterie.export.personal_model import as_module
from coterie.federation.cloud.program import reopen
from coterie.federation.device_states import DeviceStates
from coterie.federation.identity.seats import Roster
from coterie.runtimes.base import Replies
from coterie.runtimes.inline import Inline
from coterie.storage import checkpoint
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import EVENTS, Folder, read_evaluation, read_log
from coterie.train.clients import Clients

_FIELDS = ("participants", "failed", "nonfinite", "steps", "loss", "notes", "facts", "watch")  # compared in events


class ReplayRuntime(Inline):
    """Does not ask clients that failed in a round, and drops the state of a seat that was freed."""

    def __init__(
        self,
        clients: Clients,
        states: ClientStates,
        failed: Mapping[int, set[ClientId]],  # by round
        emptied: Mapping[ClientId, int] | None = None,  # last round before a seat was freed
    ):
        super().__init__(clients, states)
        self.failed, self.emptied = failed, dict(emptied or {})

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        """Train the clients that did not fail."""
        for r in requests:
            if r.round > self.emptied.get(r.client, r.round):
                del self.emptied[r.client]
                self.states.drop(r.client)
        failed = {r.client: "failed" for r in requests if r.client in self.failed.get(r.round, set())}
        answers, missing = super().train([r for r in requests if r.client not in failed])
        return answers, {**missing, **failed}


@dataclass(frozen=True)
class Replay:
    """A federation's run that was computed again."""

    session: Session
    loop: Loop
    states: ClientStates
    rows: list[dict[str, Any]]  # events of the federation


def replay(run: Path, folder: Path) -> Replay:
    """Compute the run of a federation again in `folder`; it must use named data."""
    settings, cloud = reopen(run)
    session = prepare(settings, Engine(workers=1, data_dir=Path(cloud.data_dir) if cloud.data_dir else None))
    folder.mkdir(parents=True)
    states = session.states(folder)
    rows = read_log(run / EVENTS).rows
    emptied = Roster(run / "roster.json", len(session.method.ctx.clients)).emptied
    runtime = ReplayRuntime(session.clients(), states, {e["round"]: set(e["failed"]) for e in rows}, emptied)
    with Folder(folder) as made:
        loop = make_loop(session, made, runtime)
        loop.run()
    return Replay(session, loop, states, rows)


def replay_differences(run: Path, folder: Path, devices: Mapping[ClientId, Path]) -> list[str]:
    """Replay a federation in `folder` and describe every difference to the original.

    `devices` holds the folders of private states (`coterie join --state`) of the clients that are compared.
    """
    again = replay(run, folder)
    session, rows = again.session, again.rows
    rounds = [e["round"] for e in rows]
    if rounds != list(range(again.loop.first, session.settings.rounds + 1)):
        return [f"the rounds are {rounds}"]
    different = []
    replayed = {e["round"]: e for e in read_log(folder / EVENTS).rows}
    for e in rows:
        t = e["round"]
        different += [f"round {t}: {k} differ" for k in _FIELDS if e[k] != replayed[t][k]]
        if "evaluation" in e:
            different += _scores(t, read_evaluation(run, e), read_evaluation(folder, replayed[t]))
    saved = checkpoint.newest(run, type(session.method).__name__)
    if not codec.equal([saved.server, saved.edges], [again.loop.server, again.loop.edges]):
        different.append("the states of server or edges differ")
    name = reopen(run)[1].run  # folder of this run on the devices
    for i, path in sorted(devices.items()):
        version = int(saved.clients.version[i]) if i < len(saved.clients.version) else -1
        different += [f"client {i}: {what}" for what in _device(again, i, path / name, version)]
    return different


def _scores(round: int, original: Mapping[str, np.ndarray], replayed: Mapping[str, np.ndarray]) -> list[str]:
    """Compare the scores of the clients that the federation scored; a replay scores all clients."""
    at = {int(c): n for n, c in enumerate(replayed["clients"])}
    rows = [at[int(c)] for c in original["clients"]]
    return [
        f"after round {round}: {k} differ"
        for k, v in original.items()
        if k not in replayed or not np.array_equal(v, replayed[k][rows], equal_nan=v.dtype.kind == "f")
    ]


def _device(again: Replay, client: ClientId, folder: Path, version: int) -> list[str]:
    """Compare the private state that counts, and the personal model if it is that of the last round."""
    different = []
    if version >= 0:
        path = DeviceStates(folder / str(client)).path(version)
        if not path.is_file():
            different.append(f"the state of round {version} is lost")
        elif not codec.equal(codec.read_value(path), again.states.get(client) or {}):
            different.append("the private state differs")
    model = folder / "model.safetensors"
    if model.is_file() and _round_of(model) == again.loop.done:
        original, replayed = load_file(model), _personal(again, client)
        if original.keys() != replayed.keys() or not all(torch.equal(v, replayed[k]) for k, v in original.items()):
            different.append("the personal model differs")
    return different


def _round_of(model: Path) -> int:
    with safe_open(model, "pt") as f:
        return int(json.loads(f.metadata()["coterie"])["round"])


def _personal(again: Replay, client: ClientId) -> dict[str, torch.Tensor]:
    session, loop = again.session, again.loop
    data, method, t = session.federation.data(client, loop.done), session.method_of(client), loop.done + 1
    shared, own = preview(session.method, loop.server, loop.edges, [client], t)[client]
    tree = model_in_use(
        method, session.clients().rule, again.states.get(client), {**shared, **own}, data, t, use=session.use
    )
    return dict(as_module(method, *tree).state_dict())
