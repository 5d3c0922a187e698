"""Maps device names to client numbers; decided once per run and stored by the cloud."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coterie.core.method import ClientId
from coterie.core.tasks import MOST
from coterie.engine.codec import Value
from coterie.engine.messages import check
from coterie.errors import CoterieError, sentence
from coterie.federation.identity.roles import NodeRole, scoped
from coterie.federation.protocol.messages import Attached, Hello
from coterie.storage.atomic import write_atomic

MAX_NEWCOMERS = 10_000  # no run has more of these
MAX_DEVICES_OF_EDGE = 4096  # devices of an edge, whose server has no more connections
MAX_NAMED_STRANGERS = 20  # devices that an edge may not speak for are named one by one up to this number
MAX_HELLO_BYTES = 2**16  # a device's hello, with room to spare
MAX_ATTACHED_BYTES = 2**22  # an edge's, with those of its devices


class Behind(NamedTuple):
    """Who is behind an edge, by the cloud's names (EDGE/DEVICE)."""

    hellos: dict[str, Hello]
    refused: dict[str, str]  # with the reason: the device's own, or that the edge may not speak for it


def read_hello(value: Value) -> Hello:
    """The answer of a node that is registered as a device."""
    if isinstance(value, Attached):
        raise CoterieError(
            "it is registered as a device and answers like an edge; edges are added with "
            "coterie nodes add --edge --devices"
        )
    return _possible(check(value, Hello))


def read_attached(edge: str, role: NodeRole, value: Value) -> Behind:
    """The answer of an edge. Whatever it says about devices that it was not given is refused and changes nothing."""
    if not role.is_edge:
        raise CoterieError(f'"{edge}" is not registered as an edge')
    if isinstance(value, Hello):
        raise CoterieError(f'"{edge}" is registered as an edge and answers like a device')
    answer = check(value, Attached)
    found, strangers = Behind({}, {}), list[str]()
    names = answer.devices.keys() | answer.refused.keys()
    if len(names) > MAX_DEVICES_OF_EDGE:
        raise CoterieError(f"it speaks for {len(names)} devices, more than {MAX_DEVICES_OF_EDGE}")
    for device in sorted(names):
        name = scoped(edge, device)
        if not role.speaks_for(device):
            strangers.append(sentence(device, 63))
        elif device in answer.refused:
            found.refused[name] = sentence(answer.refused[device])
        else:
            try:
                found.hellos[name] = _possible(answer.devices[device])
            except CoterieError as e:
                found.refused[name] = str(e)
    for device in strangers[:MAX_NAMED_STRANGERS]:
        found.refused[scoped(edge, device)] = f'edge "{edge}" may not speak for device "{device}"'
    if more := strangers[MAX_NAMED_STRANGERS:]:
        found.refused[scoped(edge, "*")] = f'edge "{edge}" may not speak for {len(more)} more devices'
    return found


def _possible(hello: Hello) -> Hello:
    for what, value, most in (("client", hello.client or 0, 2**31 - 1), ("samples", hello.samples, MOST)):
        if not 0 <= value <= most:
            raise CoterieError(f"its hello has {what} {value}, which must be a whole number from 0 to {most}")
    return hello


@dataclass(frozen=True)
class RosterEntry:
    """A device that has said hello."""

    name: str  # as the cloud knows it: NODE, or EDGE/NODE
    client: ClientId
    samples: int

    @property
    def via(self) -> str:
        """The node of the cloud's SuperLink that leads to it: itself, or an edge."""
        return self.name.partition("/")[0]

    @property
    def device(self) -> str:
        """Its name where it is attached."""
        return self.name.rpartition("/")[2]

    @property
    def edge(self) -> str | None:
        """The edge it is behind, if any."""
        return self.via if "/" in self.name else None


@dataclass
class Roster:
    """Clients 0 to places - 1 take part; later devices are newcomers: evaluated, not sampled."""

    path: Path
    places: int
    numbers: dict[str, int] = field(default_factory=dict)
    entries: dict[ClientId, RosterEntry] = field(default_factory=dict)  # who has said hello since this program started
    emptied: dict[ClientId, int] = field(default_factory=dict)  # seats that were freed, and the last round before that

    def __post_init__(self) -> None:
        self.numbers = _numbers(self.path)
        self.emptied = {self._seat(k): n for k, n in _numbers(self._emptied).items()}

    @property
    def _emptied(self) -> Path:
        return self.path.with_name("freed.json")

    def _seat(self, text: str) -> ClientId:
        try:
            return int(text)
        except ValueError as e:
            raise _damaged(self._emptied, e) from None

    def admit(self, name: str, hello: Hello, write: bool = True) -> RosterEntry:
        """The place of a device; raises when it asks for one that is another's. Without `write`, call `write` later."""
        holder = {n: k for k, n in self.numbers.items()}
        number, wanted = self.numbers.get(name), hello.client
        if number is None:
            if wanted is not None and wanted in holder:
                raise CoterieError(f"client {wanted} is {holder[wanted]} already")
            free = (n for n in range(len(holder) + 1) if n not in holder)
            number = next(free) if wanted is None else wanted
            if number >= self.places + MAX_NEWCOMERS:
                raise CoterieError(f"client {number} is beyond the {self.places} places and {MAX_NEWCOMERS} newcomers")
            self.numbers[name] = number
            if write:
                self.write()
        elif wanted is not None and wanted != number:
            raise CoterieError(f"it is client {number} of this run and now says it is client {wanted}")
        found = self.entries[number] = RosterEntry(name, number, hello.samples)
        return found

    def free(self, name: str, to: str | None, round: int) -> ClientId:
        """Take the seat from `name`, for the next newcomer or for `to`; states up to `round` are those of `name`."""
        if name not in self.numbers:
            raise CoterieError(f'"{name}" has no seat to free')
        if to is not None and to in self.numbers:
            raise CoterieError(f'"{to}" is client {self.numbers[to]} already')
        number = self.numbers.pop(name)
        self.entries.pop(number, None)
        self.emptied[number] = round
        write_atomic(self._emptied, json.dumps(self.emptied, indent=1).encode())  # first: no one gets another's state
        if to is not None:
            self.numbers[to] = number
        self.write()
        return number

    def write(self) -> None:
        write_atomic(self.path, json.dumps(self.numbers, indent=1).encode())

    def name(self, client: ClientId) -> str | None:
        """Whose seat it is, also of somebody who has not said hello since this program started."""
        return next((name for name, n in self.numbers.items() if n == client), None)

    @property
    def newcomers(self) -> list[int]:
        return sorted(n for n in self.entries if n >= self.places)


def _numbers(path: Path) -> dict[str, int]:
    """A file of whole numbers by name; none is an empty one."""
    try:
        return {str(k): int(n) for k, n in json.loads(path.read_text()).items()} if path.is_file() else {}
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise _damaged(path, e) from None


def _damaged(path: Path, why: Exception) -> CoterieError:
    return CoterieError(f"{path} is damaged ({why}); restore it from a back-up")
