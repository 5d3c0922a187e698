"""Bytes on the wire, per link and direction: payloads (the ledger's trees with their names) and what framing adds."""

import json
from pathlib import Path

from coterie.federation.protocol.messages import WireBytes
from coterie.storage.atomic import write_atomic

Page = dict[str, dict[str, dict[str, int]]]  # link -> down, up -> payload, framing


class WireBytesLog:
    """A file with a line per round. Rounds that are repeated after a crash replace what it says about them."""

    def __init__(self, path: Path):
        self.path = path
        self._lines: dict[int, Page] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            if line.endswith("}"):
                found = json.loads(line)
                self._lines[found["round"]] = found["links"]
        self._now: Page = {}
        self._whole = False  # is the file, to its last line, what is known here?

    @property
    def totals(self) -> Page:
        found: Page = {}
        for page in (*self._lines.values(), self._now):
            for link, ways in page.items():
                for way, line in ways.items():
                    _add(found, link, way, line["payload"], line["framing"])
        return found

    def count(self, link: str, traffic: WireBytes) -> None:
        t = traffic
        _add(self._now, link, "down", t.payload_down, max(0, t.total_down - t.payload_down))
        _add(self._now, link, "up", t.payload_up, max(0, t.total_up - t.payload_up))

    def close_round(self, round: int) -> None:
        """Write the round's bytes as a line of its own."""
        self._whole = self._whole and not any(r >= round for r in self._lines)
        self._lines = {r: page for r, page in self._lines.items() if r < round} | {round: self._now}
        self._now = {}
        lines = [json.dumps({"round": r, "links": page}) + "\n" for r, page in self._lines.items()]
        if not self._whole:
            self._whole = True
            write_atomic(self.path, "".join(lines).encode(), durable=False)
            return
        with self.path.open("a") as f:
            f.write(lines[-1])


def _add(page: Page, link: str, way: str, payload: int, framing: int) -> None:
    line = page.setdefault(link, {}).setdefault(way, {"payload": 0, "framing": 0})
    line["payload"] += payload
    line["framing"] += framing
