"""Versions of a client's private state on the disk of its device.

The cloud names the round whose state a job starts from: the last round in which it accepted this client's upload. So a
round that is repeated after a crash, or whose answer came too late, starts from the same state as the first time. Older
versions are for a cloud that goes back to an earlier round (`coterie serve --resume DIR --from-round N`).
"""

import fcntl
import logging
import time
from pathlib import Path
from typing import IO

from coterie.core.context import State
from coterie.engine import codec
from coterie.errors import CoterieError

KEEP_STATES = 10  # number of versions, equal to the cloud's number of checkpoints
log = logging.getLogger("coterie.device")


class DeviceStates:
    """Files `ROUND.state`, each of them complete."""

    def __init__(self, folder: Path, keep: int = KEEP_STATES):
        self.folder, self.keep = folder, max(2, keep)

    def path(self, round: int) -> Path:
        """Return the file of the state after a round."""
        return self.folder / f"{round:06d}.state"

    def rounds(self) -> list[int]:
        """Return the rounds whose states are stored."""
        return sorted(int(p.stem) for p in self.folder.glob("[0-9]*.state"))

    def read(self, base: int) -> State | None:
        """Return the state after round `base`; None for a client that has none yet (base -1)."""
        if base < 0:
            return None
        if self.path(base).exists():
            state: State = codec.read_value(self.path(base))
            return state or None  # empty: the method has no client state
        if not self.rounds():
            log.warning(
                "there is no state of round %s in %s (another or an empty disk?); starting from the initial state",
                base,
                self.folder,
            )
            return None
        stored = ", ".join(map(str, self.rounds()))
        raise CoterieError(
            f"the state of round {base} is not here; there are those of rounds {stored} (--keep {self.keep})"
        )

    def write(self, round: int, state: State, base: int) -> None:
        """Store the state after `round`, which began at `base`; delete versions that are not needed any more."""
        older = [r for r in self.rounds() if r < base]
        for r in set(self.rounds()) - {base, *older[1 - self.keep :]}:
            self.path(r).unlink(missing_ok=True)
        try:
            codec.save(self.path(round), state)
        except OSError as e:
            raise CoterieError(f"the state of round {round} could not be written: {e.strerror or e}") from e


def lock_folder(folder: Path, seconds: float = 0.0) -> IO[str]:
    """Lock a folder of states for this process; raises CoterieError if another process holds it after `seconds`."""
    until = time.monotonic() + seconds
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (folder / "lock").open("w")
    except OSError as e:
        raise CoterieError(f"state {folder} cannot be used: {e.strerror}") from e
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as e:
            if time.monotonic() >= until:
                file.close()
                raise CoterieError(f"state {folder} is in use by another process") from e
        time.sleep(0.2)
