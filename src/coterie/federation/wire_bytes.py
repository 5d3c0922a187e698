"""Bytes on the wire per link and direction: payloads, and what the transport adds to them."""

import json
from pathlib import Path

from coterie.federation.protocol.messages import WireBytes
from coterie.storage.atomic import write_atomic

WireTotals = dict[str, dict[str, dict[str, int]]]  # link -> down, up -> payload, framing


class WireBytesLog:
    """A file with a line per round. A round that is repeated after a crash replaces its line and later ones."""

    def __init__(self, path: Path):
        self.path = path
        self._rounds: dict[int, WireTotals] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            if line.endswith("}"):
                content = json.loads(line)
                self._rounds[content["round"]] = content["links"]
        self._open_round: WireTotals = {}
        self._complete = False  # True if the file holds exactly the lines in `_rounds`

    @property
    def totals(self) -> WireTotals:
        """Bytes of all rounds, including the open one."""
        totals: WireTotals = {}
        for links in (*self._rounds.values(), self._open_round):
            for link, ways in links.items():
                for way, line in ways.items():
                    _add(totals, link, way, line["payload"], line["framing"])
        return totals

    def count(self, link: str, traffic: WireBytes) -> None:
        """Add the traffic of a link to the open round."""
        t = traffic
        _add(self._open_round, link, "down", t.payload_down, max(0, t.total_down - t.payload_down))
        _add(self._open_round, link, "up", t.payload_up, max(0, t.total_up - t.payload_up))

    def close_round(self, round: int) -> None:
        """Write the line of a round."""
        self._complete = self._complete and not any(r >= round for r in self._rounds)
        self._rounds = {r: links for r, links in self._rounds.items() if r < round} | {round: self._open_round}
        self._open_round = {}
        lines = [json.dumps({"round": r, "links": links}) + "\n" for r, links in self._rounds.items()]
        if not self._complete:
            self._complete = True
            write_atomic(self.path, "".join(lines).encode(), durable=False)
            return
        with self.path.open("a") as f:
            f.write(lines[-1])


def _add(totals: WireTotals, link: str, way: str, payload: int, framing: int) -> None:
    line = totals.setdefault(link, {}).setdefault(way, {"payload": 0, "framing": 0})
    line["payload"] += payload
    line["framing"] += framing
