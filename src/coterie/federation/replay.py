"""What a federation must have computed: the same rounds in one process, without those who failed in them.

For a trial on one machine, where the states of all devices can be read: if a state was lost, used twice, or given to
another client, or an upload counted that was refused, then something differs.
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
from coterie.core.method import ClientId
from coterie.engine import codec
from coterie.engine.edge_steps import preview
from coterie.engine.loop import Loop
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session, make_loop, prepare
from coterie.export.personal_model import as_module
from coterie.federation.cloud.program import reopen
from coterie.federation.device_states import States
from coterie.federation.identity.seats import Roster
from coterie.runtimes.base import Replies
from coterie.runtimes.inline import Inline
from coterie.storage import checkpoint
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import EVENTS, Folder, read_evaluation, read_log
from coterie.train.clients import Clients

ALIKE = ("participants", "failed", "nonfinite", "steps", "loss", "notes", "facts", "watch")  # of an event


class Without(Inline):
    """Clients that are missing from a round are not asked; a seat that was freed starts without state."""

    def __init__(
        self,
        clients: Clients,
        states: ClientStates,
        absent: Mapping[int, set[ClientId]],
        emptied: Mapping[ClientId, int] | None = None,  # the last round before a seat was freed
    ):
        super().__init__(clients, states)
        self.absent, self.emptied = absent, dict(emptied or {})

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        for r in requests:
            if r.round > self.emptied.get(r.client, r.round):
                del self.emptied[r.client]
                self.states.drop(r.client)
        gone = {r.client: "gone" for r in requests if r.client in self.absent.get(r.round, set())}
        found, missing = super().train([r for r in requests if r.client not in gone])
        return found, {**missing, **gone}


@dataclass(frozen=True)
class Replay:
    session: Session
    loop: Loop
    states: ClientStates
    rows: list[dict[str, Any]]  # of the federation's events.jsonl


def replay(run: Path, folder: Path) -> Replay:
    """Compute the run of a federation again in `folder`; its data must be named ones."""
    settings, cloud = reopen(run)
    session = prepare(settings, Engine(workers=1, data_dir=Path(cloud.data_dir) if cloud.data_dir else None))
    folder.mkdir(parents=True)
    states = session.states(folder)
    rows = read_log(run / EVENTS).rows
    emptied = Roster(run / "roster.json", len(session.method.ctx.clients)).emptied
    runtime = Without(session.clients(), states, {e["round"]: set(e["failed"]) for e in rows}, emptied)
    with Folder(folder) as made:
        loop = make_loop(session, made, runtime)
        loop.run()
    return Replay(session, loop, states, rows)


def differences(run: Path, folder: Path, devices: Mapping[ClientId, Path]) -> list[str]:
    """Where a federation is not, to the bit, what its replay is; a sentence each.

    `devices`: the folders for private state (`coterie join --state`) of the clients that are compared.
    """
    again = replay(run, folder)
    session, rows = again.session, again.rows
    rounds = [e["round"] for e in rows]
    if rounds != list(range(again.loop.first, session.settings.rounds + 1)):
        return [f"the rounds are {rounds}"]
    found = []
    theirs = {e["round"]: e for e in read_log(folder / EVENTS).rows}
    for e in rows:
        t = e["round"]
        found += [f"round {t}: {k} differ" for k in ALIKE if e[k] != theirs[t][k]]
        if "evaluation" in e:
            found += _scores(t, read_evaluation(run, e), read_evaluation(folder, theirs[t]))
    saved = checkpoint.newest(run, type(session.method).__name__)
    if not codec.equal([saved.server, saved.edges], [again.loop.server, again.loop.edges]):
        found.append("the states of server or edges differ")
    here = reopen(run)[1].run  # the folder that devices keep this run in
    for i, path in sorted(devices.items()):
        version = int(saved.clients.version[i]) if i < len(saved.clients.version) else -1
        found += [f"client {i}: {what}" for what in _device(again, i, path / here, version)]
    return found


def _scores(round: int, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> list[str]:
    """Hits, totals and losses of every client that was scored; in a replay everybody is."""
    at = {int(c): n for n, c in enumerate(theirs["clients"])}
    rows = [at[int(c)] for c in ours["clients"]]
    return [
        f"after round {round}: {k} differ"
        for k, v in ours.items()
        if k not in theirs or not np.array_equal(v, theirs[k][rows], equal_nan=v.dtype.kind == "f")
    ]


def _device(again: Replay, client: ClientId, folder: Path, version: int) -> list[str]:
    """Its private state of the round that counts, and its personal model if it is of the last round."""
    found = []
    if version >= 0:
        path = States(folder / str(client)).path(version)
        if not path.is_file():
            found.append(f"the state of round {version} is lost")
        elif not codec.equal(codec.load(path), again.states.get(client) or {}):
            found.append("the private state differs")
    model = folder / "model.safetensors"
    if model.is_file() and _round_of(model) == again.loop.done:
        ours, theirs = load_file(model), _personal(again, client)
        if ours.keys() != theirs.keys() or not all(torch.equal(v, theirs[k]) for k, v in ours.items()):
            found.append("the personal model differs")
    return found


def _round_of(model: Path) -> int:
    with safe_open(model, "pt") as f:
        return int(json.loads(f.metadata()["coterie"])["round"])


def _personal(again: Replay, client: ClientId) -> dict[str, torch.Tensor]:
    session, loop = again.session, again.loop
    data, method, t = session.federation.data(client), session.method_of(client), loop.done + 1
    shared, own = preview(session.method, loop.server, loop.edges, [client], t)[client]
    tree = model_in_use(method, session.clients().rule, again.states.get(client), {**shared, **own}, data, t)
    return dict(as_module(method, *tree).state_dict())


__all__ = ["Replay", "Without", "differences", "replay"]
