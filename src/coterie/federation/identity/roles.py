"""What a node may be: written by the operator when the node is added, never claimed by the node itself.

Beside a node's public key in nodes/ lies NAME.json, as in {"role": "edge", "devices": ["alice", "ward-*"]}. A node
without one is a device. The devices of an edge are named in the edge's own list of nodes; the cloud knows them as
EDGE/DEVICE, so two edges may each have a device `site`, and no edge can speak for anybody else's.

The file also says whether the node is suspended (it keeps key and seat and is not asked), which devices of an edge are,
and, while a key is rotated, until when the old one holds (nodes.py).
"""

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from coterie.errors import CoterieError

Role = Literal["device", "edge"]
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # of a node
_DEVICE_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,62}")  # a node's name, or one with * and ?


@dataclass(frozen=True)
class NodeRole:
    role: Role = "device"
    devices: tuple[str, ...] = ()  # for whom an edge speaks: names and patterns
    suspended: bool = False
    without: tuple[str, ...] = ()  # devices of an edge that are suspended, by their names there
    old_key_until: float | None = None  # seconds since 1970; None: no key is being rotated

    @staticmethod
    def of(role: Role, devices: Sequence[str]) -> "NodeRole":
        if role not in get_args(Role):
            raise CoterieError(f'role "{role}" must be device or edge')
        if role == "edge" and not devices:
            raise CoterieError("an edge needs the names of its devices, or a pattern such as ward-*")
        if role == "device" and devices:
            raise CoterieError("only an edge speaks for devices")
        for name in devices:
            if not isinstance(name, str) or not _DEVICE_PATTERN.fullmatch(name):
                raise CoterieError(f'device "{name}" must be letters, digits, dot, dash or underscore, or hold * or ?')
        return NodeRole(role, tuple(devices))

    @staticmethod
    def read(path: Path) -> "NodeRole":
        if not path.is_file():
            return NodeRole()
        try:
            found = json.loads(path.read_text())
            made = NodeRole.of(found["role"], found["devices"])
            until = found.get("old_key_until")
            return replace(
                made,
                suspended=bool(found.get("suspended", False)),
                without=tuple(map(str, found.get("without", ()))),
                old_key_until=None if until is None else float(until),
            )
        except (OSError, ValueError, KeyError, TypeError, CoterieError) as e:
            raise CoterieError(f"{path} does not say what the node may be: {e}") from e

    def text(self) -> str:
        found: dict[str, object] = {"role": self.role, "devices": list(self.devices)}
        if self.suspended:
            found["suspended"] = True
        if self.without:
            found["without"] = list(self.without)
        if self.old_key_until is not None:
            found["old_key_until"] = self.old_key_until
        return json.dumps(found) + "\n"

    @property
    def is_edge(self) -> bool:
        return self.role == "edge"

    def speaks_for(self, device: str) -> bool:
        known = self.is_edge and NODE_NAME.fullmatch(device) is not None
        return known and any(fnmatch.fnmatchcase(device, name) for name in self.devices)


def scoped(edge: str, device: str) -> str:
    """The cloud's name of a device behind an edge."""
    return f"{edge}/{device}"
