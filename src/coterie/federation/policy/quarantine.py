"""Senders whose answers were refused too often are not asked any more, until the operator releases them.

`quarantine.json` in the run's folder holds what is known; a release is a file in `release/` there, named after the
sender and deleted by the cloud once it has been done. So a release also works while no cloud runs.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, unknown
from coterie.federation.cloud.upload_bounds import EntrySizes, UsualSizes
from coterie.storage.atomic import write_atomic

QUARANTINE_FILE, _RELEASES = "quarantine.json", "release"
_SENDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass
class Offender:
    refusals: int = 0  # since it was last released
    quarantined: bool = False
    round: int = 0  # of the last refusal
    reason: str = ""


@dataclass
class Quarantine:
    """Who was refused how often, and the usual sizes of uploads in the last rounds."""

    folder: Path
    after: int = 3  # refusals; 0: never
    offenders: dict[str, Offender] = field(default_factory=dict)
    memory: UsualSizes = field(default_factory=UsualSizes)
    merged: UsualSizes = field(default_factory=UsualSizes)  # the same of what edges have merged

    def __post_init__(self) -> None:
        found = read_quarantine(self.folder)
        try:
            self.offenders = {str(k): Offender(**v) for k, v in found.get("senders", {}).items()}
            for memory, name in self._memories:
                memory.rounds = {int(r): dict(sizes) for r, sizes in found.get(name, {}).items()}
        except (TypeError, ValueError, AttributeError) as e:
            raise CoterieError(f"{self.folder / QUARANTINE_FILE} is damaged ({e}); restore it from a back-up") from None

    @property
    def _memories(self) -> tuple[tuple[UsualSizes, str], ...]:
        return (self.memory, "usual"), (self.merged, "usual_merged")

    @property
    def out(self) -> dict[str, str]:
        """Who is in quarantine, and why."""
        return {name: o.reason for name, o in self.offenders.items() if o.quarantined}

    def holds(self, name: str) -> bool:
        """Is this sender, or the edge it is behind, in quarantine?"""
        return any((o := self.offenders.get(n)) and o.quarantined for n in (name, name.partition("/")[0]))

    def refuse(self, name: str, round: int, reason: str) -> bool:
        """Count a refusal; True if the sender goes into quarantine with it."""
        o = self.offenders.setdefault(name, Offender())
        o.refusals, o.round, o.reason = o.refusals + 1, round, reason
        new = bool(self.after) and o.refusals >= self.after and not o.quarantined
        o.quarantined = o.quarantined or new
        self._write()
        return new

    def remember(self, round: int, usual: EntrySizes, merged: EntrySizes) -> None:
        """Sizes of what clients sent, and of what edges merged."""
        for (memory, _), sizes in zip(self._memories, (usual, merged), strict=True):
            if sizes:
                memory.add(round, sizes)
        if usual or merged:
            self._write()

    def go_back(self, round: int) -> None:
        """A run that is rolled back forgets the sizes of later rounds; who is in quarantine stays there."""
        for memory, _ in self._memories:
            memory.rounds = {r: sizes for r, sizes in memory.rounds.items() if r <= round}

    def released(self) -> list[str]:
        """Do what `coterie release` asked for since the last look; the names of those who are free again."""
        found = []
        for path in sorted((self.folder / _RELEASES).glob("*")):
            if path.name.startswith("."):
                continue  # being written
            name = path.name.replace("=", "/")
            if self.offenders.pop(name, None) is not None:
                found.append(name)
                self._write()
            path.unlink(missing_ok=True)
        return found

    def _write(self) -> None:
        about = {
            "senders": {k: asdict(o) for k, o in sorted(self.offenders.items())},
            **{name: {str(r): sizes for r, sizes in memory.rounds.items()} for memory, name in self._memories},
        }
        write_atomic(self.folder / QUARANTINE_FILE, json.dumps(about, indent=1).encode(), durable=False, mode=0o600)


def read_quarantine(folder: Path) -> dict[str, Any]:
    path = folder / QUARANTINE_FILE
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as e:
        raise CoterieError(f"{path} cannot be read ({e})") from None
    return found if isinstance(found, dict) else {}


def release_sender(folder: Path, name: str) -> None:
    """Ask the cloud of this run to take a sender back."""
    if not (folder / "cloud.json").is_file():
        raise CoterieError(f"{folder} holds no federation (cloud.json is missing)")
    held = [str(k) for k, v in read_quarantine(folder).get("senders", {}).items() if v.get("quarantined")]
    if name not in held or not _SENDER_NAME.fullmatch(name):
        if not held:
            raise CoterieError(f"nobody is in quarantine in {folder}")
        raise unknown("sender in quarantine", name, held)
    (folder / _RELEASES).mkdir(exist_ok=True, mode=0o700)
    write_atomic(folder / _RELEASES / name.replace("/", "="), b"")


__all__ = ["Quarantine", "release_sender"]
