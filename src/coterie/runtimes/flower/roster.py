"""Who is which client: names of nodes to numbers, decided once per run and kept on the cloud's disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie import codec
from coterie.errors import CoterieError
from coterie.runtimes.flower import validate as v


@dataclass(frozen=True)
class Seat:
    """A device that has said hello."""

    name: str
    client: int
    via: str  # the node of the cloud's SuperLink that leads to it: itself, or an edge
    labels: int

    @property
    def behind_edge(self) -> bool:
        return self.via != self.name


@dataclass
class Roster:
    """Clients 0 to places - 1 take part; whoever comes when all places are taken is a newcomer: scored, not sampled."""

    path: Path
    places: int
    numbers: dict[str, int] = field(default_factory=dict)
    seats: dict[int, Seat] = field(default_factory=dict)  # who has said hello since this program started

    def __post_init__(self) -> None:
        if self.path.is_file():
            self.numbers = {str(k): int(n) for k, n in json.loads(self.path.read_text()).items()}

    def seat(self, name: str, via: str, hello: Any) -> Seat:
        """The place of a node; raises when it asks for one that is another's."""
        v.need(isinstance(hello, dict), "its hello is not a dictionary")
        wanted, labels = hello.get("client"), v.whole(hello.get("labels"), "labels", 0, 2**31)
        if wanted is not None:
            v.whole(wanted, "client", 0, 2**31)
        holder = {n: k for k, n in self.numbers.items()}
        number = self.numbers.get(name)
        if number is None:
            if wanted is not None and holder.get(wanted, name) != name:
                raise CoterieError(f"client {wanted} is {holder[wanted]} already")
            free = (n for n in range(len(holder) + self.places + 1) if n not in holder)
            number = next(free) if wanted is None else wanted
            self.numbers[name] = number
            codec.write_atomic(self.path, json.dumps(self.numbers, indent=1).encode())
        elif wanted is not None and wanted != number:
            raise CoterieError(f"it is client {number} of this run and now says it is client {wanted}")
        found = self.seats[number] = Seat(name, number, via, labels)
        return found

    @property
    def newcomers(self) -> list[int]:
        return sorted(n for n in self.seats if n >= self.places)
