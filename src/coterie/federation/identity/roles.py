"""The role of a node. The operator sets it when the node is added; a node cannot claim a role.

The role is in NAME.json, next to the node's public key in nodes/, as in {"role": "edge", "devices": ["alice",
"ward-*"]}. A node without such a file is a device. The devices of an edge have their names in the edge's own list of
nodes. The cloud knows them as EDGE/DEVICE: two edges may each have a device `site`, and an edge can speak only for its
own devices.

The file also says whether the node is suspended (it keeps its key and seat and gets no requests), which devices of an
edge are suspended, and, while a key is rotated, how long the old key is valid (admin.py).
"""

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from coterie.errors import CoterieError

Role = Literal["device", "edge"]
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DEVICE_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,62}")  # a node's name, or a pattern with * and ?


@dataclass(frozen=True)
class NodeRole:
    """The role of a node, as the operator has set it."""

    role: Role = "device"
    devices: tuple[str, ...] = ()  # names and patterns of the devices for which an edge speaks
    suspended: bool = False
    without: tuple[str, ...] = ()  # suspended devices of an edge, by the edge's names for them
    old_key_until: float | None = None  # seconds since 1970; None: the key is not being rotated
    seats: Mapping[str, int] = field(default_factory=dict)  # client numbers reserved for devices; "": the node itself

    @staticmethod
    def of(role: Role, devices: Sequence[str]) -> "NodeRole":
        """Return the role of a new node; raise CoterieError if role and devices do not fit."""
        if role not in get_args(Role):
            raise CoterieError(f'role "{role}" must be device or edge')
        if role == "edge" and not devices:
            raise CoterieError("an edge needs the names of its devices, or a pattern such as ward-*")
        if role == "device" and devices:
            raise CoterieError("only an edge speaks for devices")
        for name in devices:
            if not isinstance(name, str) or not _DEVICE_PATTERN.fullmatch(name):
                raise CoterieError(
                    f'device "{name}" must be letters, digits, dot, dash or underscore, or contain * or ?'
                )
        return NodeRole(role, tuple(devices))

    @staticmethod
    def read(path: Path) -> "NodeRole":
        """Return the role in a file; a node without a file is a device."""
        if not path.is_file():
            return NodeRole()
        try:
            fields = json.loads(path.read_text())
            until = fields.get("old_key_until")
            return replace(
                NodeRole.of(fields["role"], fields["devices"]),
                suspended=bool(fields.get("suspended", False)),
                without=tuple(map(str, fields.get("without", ()))),
                old_key_until=None if until is None else float(until),
                seats={str(k): int(n) for k, n in fields.get("seats", {}).items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CoterieError) as e:
            raise CoterieError(f"{path} does not contain the role of a node: {e}") from e

    def text(self) -> str:
        """Return the content of the file."""
        fields: dict[str, object] = {"role": self.role, "devices": list(self.devices)}
        if self.suspended:
            fields["suspended"] = True
        if self.without:
            fields["without"] = list(self.without)
        if self.old_key_until is not None:
            fields["old_key_until"] = self.old_key_until
        if self.seats:
            fields["seats"] = dict(self.seats)
        return json.dumps(fields) + "\n"

    @property
    def is_edge(self) -> bool:
        return self.role == "edge"

    def speaks_for(self, device: str) -> bool:
        """True if the node is an edge and the device is one of its own."""
        possible = self.is_edge and NODE_NAME.fullmatch(device) is not None
        return possible and any(fnmatch.fnmatchcase(device, name) for name in self.devices)


def reserved_seats(roles: Mapping[str, NodeRole]) -> dict[str, int]:
    """Return the client numbers that the operator has reserved, by the cloud's names of the devices."""
    return {scoped(n, d) if d else n: seat for n, role in roles.items() for d, seat in role.seats.items()}


def scoped(edge: str, device: str) -> str:
    """Return the cloud's name of a device behind an edge."""
    return f"{edge}/{device}"
