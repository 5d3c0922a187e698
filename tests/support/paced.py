"""A federation in real processes whose rounds last until a test lets it finish, with hostile and changed processes."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.federation.localhost.trial import LocalFederation
from support import TESTS

ROUNDS = 60
GIVEN: dict[str, Any] = {
    "data": "digits", "subset": 600, "model": "mlp", "partition": "dirichlet(0.5)", "join": 1.0, "epochs": 1,
    "rounds": ROUNDS, "eval_every": 10, "final_trained": False,
}  # fmt: skip
SECONDS = 300.0  # for any event, on a busy machine
UPGRADED = """
import sys
from coterie.federation.protocol import version as protocol
protocol.PROTOCOL += int(sys.argv.pop(1))
from coterie.federation.protocol import plan
plan.version = protocol.version = lambda name: "9.9.9"
from coterie.cli import main
main()
"""


class Paced(LocalFederation):
    """device-0 is slow until `finish`, so that rounds last."""

    def __init__(self, folder: Path, method: str = "fedrep", devices: int = 3, edges: int = 0, **more: Any):
        given = {**GIVEN, **more.pop("given", {})}
        self.modes = {"device-0": "slow"}  # modes of hostile_device.py
        self.upgraded: dict[str, int] = {}  # processes of another version, and by how much their protocol differs
        self.broken = ""  # mode of broken_cloud.py
        self.again: tuple[str, ...] = ()  # options of a cloud that is resumed
        super().__init__(folder / "f", method, devices, edges, given, **{"deadline": 30.0, **more})

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hold.touch()
        super().start()

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    def finish(self) -> None:
        self.hold.unlink(missing_ok=True)
        self.wait(SECONDS)

    def command(self, name: str) -> list[str]:
        plain = super().command(name)
        if name == "cloud" and self.again:
            plain = [sys.executable, "-m", "coterie", "serve", "--resume", str(self.out), *self.again]
        if name == "cloud" and self.broken:
            return [sys.executable, str(TESTS / "support" / "broken_cloud.py"), self.broken, *plain[3:]]
        if name in self.modes:
            return [sys.executable, str(TESTS / "support" / "hostile_device.py"), self.modes[name], *plain[4:]]
        if name in self.upgraded:
            return [sys.executable, "-c", UPGRADED, str(self.upgraded[name]), *plain[3:]]
        return plain

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not true():
            assert self.children["cloud"].alive, f"the cloud ended before: {what}\n{self.children['cloud'].tail()}"
            assert time.monotonic() < end, what
            time.sleep(0.05)

    def until_failed(self, *clients: int) -> int:
        """Wait until exactly these are missing from a round that began after now, and return the round."""
        since = self.events()[-1]["round"] + 1 if self.events() else 1
        self.until(
            lambda: self.events() and self.events()[-1]["round"] > since and self.events()[-1]["failed"] == [*clients],
            f"a round without {clients} alone",
        )
        return int(self.events()[-1]["round"])

    def until_busy(self, name: str) -> None:
        """Wait until a slow device works on a request."""
        busy = self.folder / f"busy-{name}"
        busy.unlink(missing_ok=True)
        self.until(busy.exists, f"a request to {name}")

    def reason(self, client: int) -> str:
        return str(self.events()[-1]["reasons"][str(client)])

    def log(self, name: str) -> str:
        return self.children[name].log.read_text()
