"""Quarantine: a sender whose answers were refused too often gets no requests until the operator releases it.

An accepted answer makes up for a part of a refusal, so that an honest sender with a rare outlier is never quarantined.

`quarantine.json` in the run's folder holds the counts. A release is a file in the folder `release/` there, named after
the sender; the cloud deletes it when it has released the sender. So a release also works while no cloud runs.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, unknown
from coterie.federation.cloud.upload_bounds import EntrySizes, UsualSizes
from coterie.storage.atomic import write_atomic

QUARANTINE_FILE, _RELEASES = "quarantine.json", "release"
FORGIVEN = 0.25  # part of a refusal that an accepted answer makes up for
_SENDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass
class Offender:
    """A sender whose answers were refused."""

    refusals: int = 0  # since its last release
    weight: float = 0.0  # refusals, less FORGIVEN for each accepted answer since
    quarantined: bool = False
    round: int = 0  # round of the last refusal
    reason: str = ""  # reason of the last refusal


@dataclass
class Quarantine:
    """The refusals of each sender, and the usual sizes of uploads in the last rounds."""

    folder: Path
    after: int = 3  # refusals that lead to quarantine; 0: no quarantine
    offenders: dict[str, Offender] = field(default_factory=dict)
    memory: UsualSizes = field(default_factory=UsualSizes)  # sizes of clients' uploads
    merged: UsualSizes = field(default_factory=UsualSizes)  # sizes of uploads that edges merged

    def __post_init__(self) -> None:
        stored = read_quarantine(self.folder)
        try:
            self.offenders = {
                str(k): Offender(**{"weight": float(v["refusals"]), **v}) for k, v in stored.get("senders", {}).items()
            }
            for memory, name in self._memories:
                memory.rounds = {int(r): dict(sizes) for r, sizes in stored.get(name, {}).items()}
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise CoterieError(f"{self.folder / QUARANTINE_FILE} is damaged ({e}); restore it from a backup") from None

    @property
    def _memories(self) -> tuple[tuple[UsualSizes, str], ...]:
        return (self.memory, "usual"), (self.merged, "usual_merged")

    @property
    def out(self) -> dict[str, str]:
        """Names of the senders in quarantine, with the reasons."""
        return {name: o.reason for name, o in self.offenders.items() if o.quarantined}

    def holds(self, name: str) -> bool:
        """True if this sender, or the edge it is behind, is in quarantine."""
        return any((o := self.offenders.get(n)) and o.quarantined for n in (name, name.partition("/")[0]))

    def refuse(self, name: str, round: int, reason: str) -> bool:
        """Count a refusal; return True if it puts the sender into quarantine."""
        offender = self.offenders.setdefault(name, Offender())
        offender.refusals, offender.round, offender.reason = offender.refusals + 1, round, reason
        offender.weight += 1
        is_new = bool(self.after) and offender.weight >= self.after and not offender.quarantined
        offender.quarantined = offender.quarantined or is_new
        self._write()
        return is_new

    def accept(self, names: Iterable[str]) -> None:
        """Note that answers of these senders were accepted."""
        for name in names:
            if (offender := self.offenders.get(name)) is not None:
                offender.weight = max(0.0, offender.weight - FORGIVEN)

    def remember(self, round: int, usual: EntrySizes, merged: EntrySizes) -> None:
        """Store the sizes of a round's uploads from clients, and of those that edges merged."""
        for (memory, _), sizes in zip(self._memories, (usual, merged), strict=True):
            if sizes:
                memory.add(round, sizes)
        if usual or merged:
            self._write()

    def go_back(self, round: int) -> None:
        """Forget the sizes of later rounds when a run is rolled back; senders stay in quarantine."""
        for memory, _ in self._memories:
            memory.rounds = {r: sizes for r, sizes in memory.rounds.items() if r <= round}

    def released(self) -> list[str]:
        """Carry out the releases ordered with `coterie release`; return the names of the senders."""
        names = []
        for path in sorted((self.folder / _RELEASES).glob("*")):
            if path.name.startswith("."):
                continue  # it is being written
            name = path.name.replace("=", "/")
            if self.offenders.pop(name, None) is not None:
                names.append(name)
                self._write()
            path.unlink(missing_ok=True)
        return names

    def _write(self) -> None:
        content = {
            "senders": {k: asdict(o) for k, o in sorted(self.offenders.items())},
            **{name: {str(r): sizes for r, sizes in memory.rounds.items()} for memory, name in self._memories},
        }
        path = self.folder / QUARANTINE_FILE
        write_atomic(path, json.dumps(content, indent=1).encode(), durable=False, mode=0o600)


def read_quarantine(folder: Path) -> dict[str, Any]:
    """Return the content of quarantine.json; empty if the file does not exist."""
    path = folder / QUARANTINE_FILE
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as e:
        raise CoterieError(f"{path} cannot be read ({e})") from None
    return content if isinstance(content, dict) else {}


def release_sender(folder: Path, name: str) -> None:
    """Order the cloud of a run to release a sender from quarantine."""
    if not (folder / "cloud.json").is_file():
        raise CoterieError(f"{folder} holds no federation (cloud.json is missing)")
    held = [str(k) for k, v in read_quarantine(folder).get("senders", {}).items() if v.get("quarantined")]
    if name not in held or not _SENDER_NAME.fullmatch(name):
        if not held:
            raise CoterieError(f"no sender is in quarantine in {folder}")
        raise unknown("sender in quarantine", name, held)
    (folder / _RELEASES).mkdir(exist_ok=True, mode=0o700)
    write_atomic(folder / _RELEASES / name.replace("/", "="), b"")
