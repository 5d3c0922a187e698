"""What a federation with failures must have computed: the same rounds in one process, without those who failed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from coterie import checkpoint, codec
from coterie.config import Engine
from coterie.exchange import preview
from coterie.folder import Folder
from coterie.messages import TrainAnswer, TrainRequest
from coterie.method import ClientId
from coterie.personal import as_module, in_use
from coterie.runtimes.base import Replies
from coterie.runtimes.flower.local import Local
from coterie.runtimes.inline import Inline
from coterie.runtimes.states import ClientStates
from coterie.session import client_states, make_loop, prepare
from coterie.train.clients import Clients


class Without(Inline):
    """Clients that are missing from a round are not asked."""

    def __init__(self, clients: Clients, states: ClientStates, absent: Mapping[int, set[ClientId]]):
        super().__init__(clients, states)
        self.absent = absent

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        gone = {r.client: "gone" for r in requests if r.client in self.absent.get(r.round, set())}
        found, missing = super().train([r for r in requests if r.client not in gone])
        return found, {**missing, **gone}


def same_as_replay(local: Local, folder: Path) -> None:
    """Every round is there once, and server and personal models are what the rounds' own list of failures says."""
    events = local.events()
    rounds = [e["round"] for e in events]
    assert rounds == list(range(rounds[0], local.settings.rounds + 1))
    session = prepare(local.settings, Engine(workers=1))
    folder.mkdir()
    states = client_states(session, folder)
    runtime = Without(session.clients(), states, {e["round"]: set(e["failed"]) for e in events})
    loop = make_loop(session, Folder(folder), runtime)
    assert loop.run()
    ours = checkpoint.newest(local.out, type(session.method).__name__)
    assert codec.equal([ours.server, ours.edges], [loop.server, loop.edges])
    for i in range(local.devices):
        if not local.model(i).exists():
            continue
        data, state = session.federation.data(i), states.get(i)
        shared, own = preview(session.method, loop.server, loop.edges, [i], loop.done + 1)[i]
        method = session.method_of(i)
        model = in_use(method, session.clients().rule, state, {**shared, **own}, data, loop.done + 1)
        expected = as_module(method, *model).state_dict()
        found = load_file(local.model(i))
        assert found.keys() == expected.keys()
        for k, v in found.items():
            assert torch.equal(v, expected[k]), f"client {i}, {k}"
