"""Checkpoints of a loop: written atomically, and read back to the same bits."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from coterie import codec
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.loop import Loop


class WrongMethodError(CoterieError):
    """The checkpoint is sound but belongs to another method."""


def write(loop: Loop) -> None:
    """Client states first, then the file that names them: a crash in between leaves the checkpoint before it whole."""
    loop.store.commit()
    events, timing = loop.folder.offsets()
    kept = loop.folder.write_checkpoint(
        loop.done,
        {
            "round": loop.done,
            "method": type(loop.method).__name__,
            "server": loop.server,
            "edges": loop.edges,
            "version": torch.from_numpy(loop.store.version),
            "checksum": torch.from_numpy(loop.store.checksum),
            "bytes": loop.ledger.totals,
            "events": events,
            "timing": timing,
        },
    )
    loop.store.collect(min(kept))


def resume(loop: Loop) -> list[str]:
    """Continue from the newest sound checkpoint; returns a sentence for each that was not."""
    complaints: list[str] = []
    paths = loop.folder.checkpoints()
    method = type(loop.method).__name__
    for i in range(len(paths) - 1, -1, -1):
        try:
            saved = read(paths[i], method)
            loop.store.restore(saved["version"].numpy(), saved["checksum"].numpy())
            loop.store.verify()
            loop.folder.open_logs(saved["events"], saved["timing"])
        except WrongMethodError:
            raise
        except CoterieError as e:
            complaints.append(f"{e}; falling back to the checkpoint before it")
            continue
        kept = [saved["version"].numpy()]
        if i > 0:
            with suppress(CoterieError):
                kept.insert(0, read(paths[i - 1], method)["version"].numpy())
        for bad in paths[i + 1 :]:
            bad.unlink()
        loop.store.sweep(kept)
        loop.server, loop.edges, loop.done = saved["server"], saved["edges"], saved["round"]
        loop.ledger.totals = saved["bytes"]
        return complaints
    nothing = np.full_like(loop.store.version, -1)
    loop.store.restore(nothing, np.zeros_like(loop.store.checksum))
    loop.store.sweep([nothing])
    return [*complaints, "no sound checkpoint was found, so the run starts from its first round"]


def read(path: Path, method: str) -> codec.Value:
    saved = codec.load(path)
    if not isinstance(saved, dict) or "method" not in saved:
        raise CoterieError(f"{path} is not a checkpoint")
    if saved["method"] != method:
        raise WrongMethodError(f"{path} is a checkpoint of {saved['method']}, not of {method}")
    return saved
