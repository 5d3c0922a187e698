"""Bytes on the wire, per link and direction: payloads (the ledger's trees with their names) and what framing adds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie import codec
from coterie.runtimes.flower.transport.link import Wire

Page = dict[str, dict[str, dict[str, int]]]  # link -> down, up -> payload, framing


class WireBook:
    def __init__(self) -> None:
        self.totals: Page = {}
        self._round: Page = {}

    def count(self, link: str, wires: Mapping[str, Wire]) -> None:
        for w in wires.values():
            self.add(link, "down", w.payload_down, w.total_down)
            self.add(link, "up", w.payload_up, w.total_up)

    def add(self, link: str, direction: str, payload: int, total: int) -> None:
        for book in (self.totals, self._round):
            line = book.setdefault(link, {}).setdefault(direction, {"payload": 0, "framing": 0})
            line["payload"] += payload
            line["framing"] += max(0, total - payload)

    def include(self, page: Any) -> None:
        """What an edge has counted on the links to its devices."""
        for link, directions in page.items() if isinstance(page, dict) else ():
            for direction, line in directions.items():
                payload = int(line["payload"])
                self.add(str(link), str(direction), payload, payload + int(line["framing"]))

    def close_round_of(self, path: Path, round: int) -> None:
        """Write the round's bytes as a line of its own."""
        with path.open("a") as f:
            f.write(json.dumps({"round": round, "links": self.close_round()}) + "\n")

    def restore(self, path: Path, last: int) -> None:
        """The totals up to round `last`; lines of rounds that are repeated are dropped."""
        lines = path.read_text().splitlines() if path.is_file() else []
        kept = [x for x in lines if x.endswith("}") and json.loads(x)["round"] <= last]
        for line in kept:
            self.include(json.loads(line)["links"])
        self._round = {}
        codec.write_atomic(path, "".join(x + "\n" for x in kept).encode(), durable=False)

    def close_round(self) -> Page:
        page, self._round = self._round, {}
        return page
