"""A client's private state on its own disk: the version the cloud counts on, some before it, and the newest.

The cloud says which round's state a job starts from (that of the last round in which it took this client's upload), so
a round that is repeated after a crash, or whose answer came too late, starts from where it started the first time.
Older versions are for a cloud that rolls back (`coterie serve --resume DIR --from-round N`).
"""

import fcntl
import logging
from pathlib import Path
from typing import IO

from coterie.core.method import State
from coterie.engine import codec
from coterie.errors import CoterieError

KEEP = 10  # versions of the state; as many as the cloud keeps checkpoints
log = logging.getLogger("coterie.device")


class States:
    """Files `ROUND.state`, each whole or not there at all."""

    def __init__(self, folder: Path, keep: int = KEEP):
        self.folder, self.keep = folder, max(2, keep)

    def path(self, round: int) -> Path:
        return self.folder / f"{round:06d}.state"

    def rounds(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob("[0-9]*.state"))

    def read(self, base: int) -> State | None:
        """The state after round `base`; None for a client that has none yet (base -1)."""
        if base < 0:
            return None
        if self.path(base).exists():
            found: State = codec.load(self.path(base))
            return found or None  # of a method without client state
        if not self.rounds():
            log.warning(
                "there is no state of round %s in %s (another or an empty disk?); starting from the initial state",
                base,
                self.folder,
            )
            return None
        there = ", ".join(map(str, self.rounds()))
        raise CoterieError(
            f"the state of round {base} is not here; there are those of rounds {there} (--keep {self.keep})"
        )

    def write(self, round: int, state: State, base: int) -> None:
        """Store the state after `round`, which began at `base`; unneeded versions are deleted first."""
        older = [r for r in self.rounds() if r < base]
        for r in set(self.rounds()) - {base, *older[1 - self.keep :]}:
            self.path(r).unlink(missing_ok=True)
        try:
            codec.save(self.path(round), state)
        except OSError as e:
            raise CoterieError(f"the state of round {round} could not be written: {e.strerror or e}") from e


def lock(folder: Path) -> IO[str]:
    """One process per folder of states."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = (folder / "lock").open("w")
    except OSError as e:
        raise CoterieError(f"state {folder} cannot be used: {e.strerror}") from e
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        held.close()
        raise CoterieError(f"state {folder} is in use by another process") from e
    return held
