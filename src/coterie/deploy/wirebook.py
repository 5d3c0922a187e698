"""Bytes on the wire, per link and direction: payloads (the ledger's trees with their names) and what framing adds."""

from collections.abc import Mapping
from typing import Any

from coterie.deploy.transport import Wire

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

    def close_round(self) -> Page:
        page, self._round = self._round, {}
        return page
