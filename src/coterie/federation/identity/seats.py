"""Seats: the client number of each device in a run, decided once and stored by the cloud."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from coterie.core.context import ClientId
from coterie.core.tasks import MOST_SAMPLES
from coterie.engine.codec import Value
from coterie.engine.messages import check_message
from coterie.errors import CoterieError, sentence
from coterie.federation.identity.roles import NodeRole, scoped
from coterie.federation.protocol.messages import Attached, Hello
from coterie.storage.atomic import write_atomic

MAX_NEWCOMERS = 10_000  # seats beyond the clients that take part in training
MAX_DEVICES_OF_EDGE = 4096  # the server of an edge has at most as many connections
MAX_NAMED_STRANGERS = 20  # devices for which an edge may not speak and which messages list one by one
MAX_HELLO_BYTES = 2**16  # length of a device's answer to a plan
MAX_ATTACHED_BYTES = 2**22  # length of an edge's answer to a plan


class EdgeDevices(NamedTuple):
    """The devices behind an edge, by the cloud's names (EDGE/DEVICE)."""

    hellos: dict[str, Hello]
    refused: dict[str, str]  # devices that refused the plan or for which the edge may not speak, with the reasons


def read_hello(value: Value) -> Hello:
    """Check the answer of a node that is registered as a device."""
    if isinstance(value, Attached):
        raise CoterieError(
            "it is registered as a device and answers like an edge; edges are added with "
            "coterie nodes add --edge --devices"
        )
    return _check_range(check_message(value, Hello))


def read_attached(edge: str, role: NodeRole, value: Value) -> EdgeDevices:
    """Check the answer of an edge; devices for which it may not speak are refused."""
    if not role.is_edge:
        raise CoterieError(f'"{edge}" is not registered as an edge')
    if isinstance(value, Hello):
        raise CoterieError(f'"{edge}" is registered as an edge and answers like a device')
    answer = check_message(value, Attached)
    devices, strangers = EdgeDevices({}, {}), list[str]()
    names = answer.devices.keys() | answer.refused.keys()
    if len(names) > MAX_DEVICES_OF_EDGE:
        raise CoterieError(f"it speaks for {len(names)} devices, more than {MAX_DEVICES_OF_EDGE}")
    for device in sorted(names):
        name = scoped(edge, device)
        if not role.speaks_for(device):
            strangers.append(sentence(device, 63))
        elif device in answer.refused:
            devices.refused[name] = sentence(answer.refused[device])
        else:
            try:
                devices.hellos[name] = _check_range(answer.devices[device])
            except CoterieError as e:
                devices.refused[name] = str(e)
    for device in strangers[:MAX_NAMED_STRANGERS]:
        devices.refused[scoped(edge, device)] = f'edge "{edge}" may not speak for device "{device}"'
    if more := strangers[MAX_NAMED_STRANGERS:]:
        devices.refused[scoped(edge, "*")] = f'edge "{edge}" may not speak for {len(more)} more devices'
    return devices


def _check_range(hello: Hello) -> Hello:
    samples = [("samples", n, MOST_SAMPLES) for n in (hello.samples, *hello.later.values())]
    for name, value, highest in (("client", hello.client or 0, 2**31 - 1), *samples):
        if not 0 <= value <= highest:
            raise CoterieError(f"its hello has {name} {value}, which must be a whole number from 0 to {highest}")
    return hello


@dataclass(frozen=True)
class RosterEntry:
    """A device that has accepted the plan."""

    name: str  # the cloud's name of the device: NODE, or EDGE/DEVICE
    client: ClientId
    hello: Hello

    @property
    def via(self) -> str:
        """The node that the cloud is connected to: the device itself, or its edge."""
        return self.name.partition("/")[0]

    @property
    def device(self) -> str:
        """The device's name in the list of the server that it is connected to."""
        return self.name.rpartition("/")[2]

    @property
    def edge(self) -> str | None:
        """The edge that the device is behind; None if it is connected to the cloud."""
        return self.via if "/" in self.name else None


@dataclass
class Roster:
    """The seats of a run: clients 0 to places - 1 take part in training, later ones are newcomers."""

    path: Path
    places: int
    numbers: dict[str, int] = field(default_factory=dict)  # client number of each device, by name
    entries: dict[ClientId, RosterEntry] = field(default_factory=dict)  # devices that were admitted since the start
    emptied: dict[ClientId, int] = field(default_factory=dict)  # freed seats, with the last round before that

    def __post_init__(self) -> None:
        self.numbers = _read_numbers(self.path)
        self.emptied = {self._client(k): n for k, n in _read_numbers(self._emptied_file).items()}

    @property
    def _emptied_file(self) -> Path:
        return self.path.with_name("freed.json")

    def _client(self, text: str) -> ClientId:
        try:
            return int(text)
        except ValueError as e:
            raise _damaged(self._emptied_file, e) from None

    def admit(
        self, name: str, hello: Hello, write: bool = True, reserved: Mapping[str, ClientId] = MappingProxyType({})
    ) -> RosterEntry:
        """Give a device its seat; raise CoterieError if it asks for a seat that is not its own.

        `reserved` are the seats that the operator has bound to names. If `write` is False, the caller must call `write`
        later.
        """
        holder = {n: k for k, n in (*reserved.items(), *self.numbers.items())}
        number, wanted = self.numbers.get(name), hello.client
        if number is None:
            own = reserved.get(name)
            if own is not None and self.name(own) is None:
                if wanted not in (None, own):
                    raise CoterieError(f"seat {own} is reserved for it and it asks to be client {wanted}")
                wanted = own
                del holder[own]
            if wanted is not None and wanted in holder:
                raise CoterieError(f"seat {wanted} already belongs to {holder[wanted]}")
            free = (n for n in range(len(holder) + 1) if n not in holder)
            number = next(free) if wanted is None else wanted
            if number >= self.places + MAX_NEWCOMERS:
                raise CoterieError(f"client {number} is beyond the {self.places} seats and {MAX_NEWCOMERS} newcomers")
            self.numbers[name] = number
            if write:
                self.write()
        elif wanted is not None and wanted != number:
            raise CoterieError(f"it is client {number} of this run and now asks to be client {wanted}")
        entry = self.entries[number] = RosterEntry(name, number, hello)
        return entry

    def free(self, name: str, to: str | None, round: int) -> ClientId:
        """Take the seat from a device and return its number; the seat is for `to`, or for the next new device.

        Client states of rounds up to `round` are those of the device before.
        """
        if name not in self.numbers:
            raise CoterieError(f'"{name}" has no seat to free')
        if to is not None and to in self.numbers:
            raise CoterieError(f'"{to}" is client {self.numbers[to]} already')
        number = self.numbers.pop(name)
        self.entries.pop(number, None)
        self.emptied[number] = round
        # first, so that no device can get the state of the one before
        write_atomic(self._emptied_file, json.dumps(self.emptied, indent=1).encode())
        if to is not None:
            self.numbers[to] = number
        self.write()
        return number

    def write(self) -> None:
        """Store the seats."""
        write_atomic(self.path, json.dumps(self.numbers, indent=1).encode())

    def name(self, client: ClientId) -> str | None:
        """Return the name of the device with this seat, even if it was not admitted since the start."""
        return next((name for name, n in self.numbers.items() if n == client), None)

    @property
    def newcomers(self) -> list[int]:
        """Client numbers of the newcomers that were admitted since the start."""
        return sorted(n for n in self.entries if n >= self.places)


def _read_numbers(path: Path) -> dict[str, int]:
    """Read a JSON object of name to int; a missing file counts as empty."""
    try:
        return {str(k): int(n) for k, n in json.loads(path.read_text()).items()} if path.is_file() else {}
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise _damaged(path, e) from None


def _damaged(path: Path, why: Exception) -> CoterieError:
    return CoterieError(f"{path} is damaged ({why}); restore it from a backup")
