"""What a federation with failures must have computed: the same rounds in one process, without those who failed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from coterie import codec
from coterie.config import Engine
from coterie.folder import Folder
from coterie.runtimes.flower.local import Local
from coterie.runtimes.workers import Inline
from coterie.session import make_loop, prepare


class Without(Inline):
    """Clients that are missing from a round are not asked."""

    absent: dict[int, set[int]]

    def run(self, requests: Sequence[Any]) -> list[Any]:
        out = []
        for r in requests:
            gone = self.absent.get(r["round"], set()) if r["op"] == "train" else set()
            here = super().run([{**r, "jobs": [j for j in r["jobs"] if j["client"] not in gone]}])[0]
            answers = {a["client"]: a for a in here}
            out.append([answers.get(j["client"], {"client": j["client"], "missing": "gone"}) for j in r["jobs"]])
        return out


def same_as_replay(local: Local, folder: Path, tolerance: float = 1e-6) -> None:
    """Every round is there once, and server and personal models are what the rounds' own list of failures says."""
    events = local.events()
    rounds = [e["round"] for e in events]
    first = rounds[0]
    assert rounds == list(range(first, local.settings.rounds + 1))
    session = prepare(local.settings, Engine(workers=1))
    folder.mkdir()
    runtime = Without(session.device())
    runtime.absent = {e["round"]: set(e["failed"]) for e in events}
    loop = make_loop(session, Folder(folder), runtime)
    assert loop.run()
    ours = codec.load(sorted((local.out / "checkpoints").glob("*.safetensors"))[-1])
    (shape, tensors), (other, expected) = codec.split(ours["server"]), codec.split(loop.server)
    assert shape == other
    for x, y in zip(tensors, expected, strict=True):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=0)
    for i in range(local.devices):
        if not local.model(i).exists():
            continue
        data = session.federation.data(i)
        state = loop.store.get(i)
        state = session.method.init_client(data) if state is None else state
        with torch.no_grad():
            params, _ = session.method.personal(state, loop.download(i), data)
        for k, v in load_file(local.model(i)).items():
            torch.testing.assert_close(v, params[k], atol=tolerance, rtol=0, msg=f"client {i}, {k}")
