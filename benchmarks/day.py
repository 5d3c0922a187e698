"""Run a federation of real processes through the failures of practice and compare its result with a replay.

    python benchmarks/day.py --method fedrep --out DIR [--rounds 40] [--behind 12] [--direct 4] [--seed 0]

On 127.0.0.1, with TLS and keys: `coterie serve`, two `coterie edge` with half of the `--behind` devices each, and
`--direct` devices attached to the cloud, all of them `coterie join`. During the rounds, devices are killed and stopped,
nodes are suspended and released, a key is rotated, one edge is killed, the other one moves, and the cloud is killed.
Two devices send false uploads after the third round, and one of them is replaced by an honest device later. One device
is slow while a fault is being caused, so that the rounds do not end before. Two more nodes connect and never answer.

At the end the same rounds are computed in one process without the clients that failed in them, and everything is
compared bit by bit: the states of server and edges, the scores of every round, and the private states and personal
models of all devices. The exit code is 0 only if nothing differs, no state was lost, and all planned faults happened.
"""

import argparse
import json
import logging
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coterie.engine.messages import TrainAnswer
from coterie.errors import CoterieError
from coterie.federation.device import DeviceHandler, join
from coterie.federation.identity.authority import Certs
from coterie.federation.localhost import processes
from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.policy.allow import Allow
from coterie.federation.protocol.messages import Answer, DeviceJob
from coterie.federation.replay import replay_differences
from coterie.federation.transport.node import Node

FIRST_LIE = 4  # first round with false uploads
PATIENCE = 300.0  # seconds for any single event to happen
DEADLINE = 25.0  # seconds for the answers of a round
HOLD = 18.0  # seconds that the slow device takes for a round
CONNECTED = "connected to"  # words in the log of a node that has connected
LOST = "starting from the initial state"  # words in the log of a device that has lost its state
SETTINGS: dict[str, dict[str, object]] = {
    "fedrep": {"partition": "dirichlet(0.5)"},
    "sc-fpfl": {"partition": "rotate(2)", "public": 50},
}
Say = Callable[[str], None]


# ---- nodes that are not `coterie join` -------------------------------------------------------------------------------
class HostileDevice(DeviceHandler):
    """Trains as asked and sends false uploads: too large, with an extra entry, or with too many samples, in turn."""

    lies = 0

    def answer(self, kind: str, round: int, job: DeviceJob) -> Answer:
        answer = super().answer(kind, round, job)
        if not isinstance(answer, TrainAnswer) or round < FIRST_LIE:
            return answer
        self.lies += 1
        if self.lies % 3 == 1:
            return replace(
                answer, upload={k: v + 1e4 if v.is_floating_point() else v for k, v in answer.upload.items()}
            )
        if self.lies % 3 == 2:
            return replace(answer, upload={**answer.upload, "more": torch.zeros(3)})
        return replace(answer, samples=answer.samples * 1000)


class SlowDevice(DeviceHandler):
    """Answers honestly, and slowly while the file `hold` exists."""

    hold = Path()

    def answer(self, kind: str, round: int, job: DeviceJob) -> Answer:
        until = time.monotonic() + HOLD
        time.sleep(0.3)
        while kind == "train" and self.hold.exists() and time.monotonic() < until:
            time.sleep(0.1)
        return super().answer(kind, round, job)


def run_node(kind: str, rest: Sequence[str]) -> None:
    """Be a hostile device, a slow device, or a mute node, which receives messages and never answers."""
    parser = argparse.ArgumentParser()
    for name in ("--cloud", "--ca", "--key"):
        parser.add_argument(name, required=True)
    for name in ("--data", "--state", "--client", "--allow", "--hold"):
        parser.add_argument(name)
    a, _ = parser.parse_known_args(rest)
    processes.die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if kind == "mute":

        def never(kind: str, round: int, shared: memoryview | None, own: memoryview) -> bytes:
            logging.info("message of kind %s, not answered", kind)
            threading.Event().wait()
            return b""

        Node(a.cloud, Path(a.ca), Path(a.key), never).run()
        return
    cls = {"hostile": HostileDevice, "slow": SlowDevice}[kind]
    handler = cls(a.data, Path(a.state), int(a.client), None, Allow.read(Path(a.allow)))
    if isinstance(handler, SlowDevice):
        handler.hold = Path(a.hold)
    join(a.cloud, Path(a.ca), Path(a.key), handler)


# ---- the federation --------------------------------------------------------------------------------------------------
class Day(LocalFederation):
    """The first devices are attached to edge-0, the next ones to edge-1, and the last ones to the cloud."""

    def __init__(self, folder: Path, method: str, behind: int, direct: int, rounds: int, seed: int, say: Say):
        if behind < 4 or behind % 2 or direct < 4:
            raise CoterieError("--behind must be even and at least 4, and --direct at least 4")
        self.behind, self.say, self.hold = behind, say, folder / "hold"
        self.moved: dict[str, Path] = {}  # new folders of edges that have moved
        self.honest = set[int]()  # hostile devices that were replaced by honest ones
        self.resumed = False
        devices, half = behind + direct, behind // 2
        given: dict[str, object] = {
            "data": "digits", "model": "mlp", "join": 1.0, "epochs": 1, "rounds": rounds, "seed": seed,
            "eval_every": 10, "final_trained": False, **SETTINGS[method],
        }  # fmt: skip
        super().__init__(folder, method, devices, 2, given, deadline=DEADLINE, min_clients=devices // 2 - 1)
        north, south, self.own = range(half), range(half, behind), range(behind, devices)
        self.killed = (north[0], self.own[1])
        self.stopped = (south[0], self.own[0])
        self.suspended = (south[1], self.own[1])
        self.rotated = self.own[0]
        self.slow = self.own[2]
        self.hostile = (north[-1], self.own[3])  # the second one becomes honest

    def above(self, device: int) -> str:
        return "cloud" if device >= self.behind else f"edge-{device // (self.behind // 2)}"

    def cloud_name(self, device: int) -> str:
        """Return the cloud's name of a device."""
        above = self.above(device)
        return f"device-{device}" if above == "cloud" else f"{above}/device-{device}"

    def certs(self, server: str) -> Certs:
        return Certs(self.moved[server] / "certs") if server in self.moved else super().certs(server)

    def command(self, name: str) -> list[str]:
        kind, _, number = name.partition("-")
        plain = super().command(name)
        if kind == "mute":
            server = "cloud" if not number else f"edge-{number}"
            files, where = self.certs(server), f"127.0.0.1:{self.ports[server]}"
            return [*self._self("mute"), "--cloud", where, "--ca", str(files.ca), "--key", str(files.key("mute"))]
        if kind == "device" and int(number) in set(self.hostile) - self.honest:
            return [*self._self("hostile"), *plain[4:]]
        if kind == "device" and int(number) == self.slow:
            return [*self._self("slow"), *plain[4:], "--hold", str(self.hold)]
        if kind == "cloud" and self.resumed:
            return [*plain[:3], "serve", "--resume", str(self.out)]
        return plain

    def arguments(self, name: str) -> list[str]:
        if name.startswith("mute"):
            return []
        arguments = super().arguments(name)
        if name in self.moved:
            for option, path in (("--ca", "cloud-ca.crt"), ("--key", f"{name}.key"), ("--state", "state")):
                arguments[arguments.index(option) + 1] = str(self.moved[name] / path)
        return arguments

    @staticmethod
    def _self(kind: str) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), "--as", kind]

    def start(self) -> None:
        self.certify()
        for server in ("cloud", "edge-0"):
            self._register(server, "mute")
        super().start()
        for name in ("mute", "mute-0"):
            self.launch(name)

    # ---- steps of the script -----------------------------------------------------------------------------------------
    @property
    def round(self) -> int:
        """The last finished round; -1 before the first."""
        events = self.events()
        return int(events[-1]["round"]) if events else -1

    def rounds_until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait with quick rounds; at other times the slow device delays them, so that the run does not end."""
        self.hold.unlink(missing_ok=True)
        self.until(what, true)
        self.hold.touch()

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait; raise CoterieError if the run ends, or after PATIENCE seconds."""
        end = time.monotonic() + PATIENCE
        while not true():
            cloud = self.children["cloud"]
            if not cloud.alive:
                raise CoterieError(f"the cloud ended before {what}:\n{cloud.tail()}")
            if time.monotonic() > end:
                raise CoterieError(f"{what} did not happen within {PATIENCE:g} s; see {self.folder / 'logs'}")
            time.sleep(0.05)

    def until_back(self, *clients: int) -> None:
        """Wait for a round that begins after this call and in which none of these clients fails."""
        since = self.round + 1
        self.rounds_until(
            f"the return of {self.names(clients)}",
            lambda: self.round > since and not set(clients) & set(self.events()[-1]["failed"]),
        )
        self.say(f"{self.names(clients)}: back")

    def until_failed(self, *clients: int) -> None:
        """Wait for a round in which all of these clients fail."""
        since = self.round
        self.rounds_until(
            f"a round without {self.names(clients)}",
            lambda: self.round > since and set(clients) <= set(self.events()[-1]["failed"]),
        )
        self.say(f"{self.names(clients)}: failed")

    def names(self, clients: Sequence[int]) -> str:
        return ", ".join(map(self.cloud_name, clients))

    def run_command(self, *words: str) -> None:
        self.say("$ coterie " + " ".join(words).replace(f"{self.folder}/", ""))
        done = subprocess.run([sys.executable, "-m", "coterie", *words], capture_output=True, text=True)
        if done.returncode:
            raise CoterieError(f"coterie {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")

    def signal_all(self, number: signal.Signals, clients: Sequence[int]) -> None:
        self.say(f"{number.name} to {self.names(clients)}")
        for i in clients:
            self.children[f"device-{i}"].signal(number)

    def start_all(self, *names: str) -> None:
        """Start processes and wait until they are connected."""
        self.say(f"start {', '.join(names)}")
        logs = {self.children[name].log: self.children[name].log.read_text().count(CONNECTED) for name in names}
        for name in names:
            self.launch(name)
        self.until("connections", lambda: all(log.read_text().count(CONNECTED) > n for log, n in logs.items()))

    # ---- the day -----------------------------------------------------------------------------------------------------
    def run_script(self) -> None:
        certs, edge = str(self.certs("cloud").root), "edge-1"
        self.rounds_until("the first round", lambda: self.round >= 1)
        self.say(f"{self.devices} devices, of which two are hostile and one is slow, and two mute nodes")
        # devices are killed and stopped
        self.signal_all(signal.SIGKILL, self.killed)
        self.until_failed(*self.killed)
        self.start_all(*(f"device-{i}" for i in self.killed))
        self.signal_all(signal.SIGSTOP, self.stopped)
        self.until_failed(*self.stopped)
        self.signal_all(signal.SIGCONT, self.stopped)
        self.until_back(*self.killed, *self.stopped)
        # hostile devices are quarantined after three refusals each
        self.rounds_until(
            "the quarantine of both hostile devices", lambda: len(self.status().get("quarantine", {})) == 2
        )
        self.say(f"in quarantine: {', '.join(self.status()['quarantine'])}")
        # devices are suspended and released, one of them behind an edge
        for i in self.suspended:
            self.run_command("nodes", "suspend", certs, self.cloud_name(i))
        self.until_failed(*self.suspended)
        for i in self.suspended:
            self.run_command("nodes", "release", certs, self.cloud_name(i))
        # a device gets a new key
        name = f"device-{self.rotated}"
        key = self.folder / "devices" / f"{name}.new.key"
        self.run_command("certs", "request", str(key), "--name", name)
        self.run_command("nodes", "rotate", certs, name, "--request", str(key.with_suffix(".csr")))
        shutil.copy(self.certs("cloud").next_certificate(name), key.with_suffix(".crt"))
        self.say(f"stop {name}")
        self.children[name].stop()
        self.keys[name] = key
        self.start_all(name)
        self.until_back(self.rotated, *self.suspended)
        if self.certs("cloud").next_certificate(name).exists():
            raise CoterieError(f"the old key of {name} is still accepted")
        # the cloud is killed during a round
        time.sleep(0.2)
        self.say("SIGKILL to the cloud")
        self.children["cloud"].kill()
        before, self.resumed = self.round, True
        self.say(f"$ coterie serve --resume {self.out.name}")
        self.launch("cloud")
        self.rounds_until("the next round", lambda: self.round > before)
        # one edge moves to a different address, the other one is killed
        south = [i for i in range(self.devices) if self.above(i) == edge]
        self.move(edge)
        self.until_failed(*south)
        self.start_all(edge, *(f"device-{i}" for i in south))
        self.until_back(*south)
        north = [i for i in range(self.devices) if self.above(i) == "edge-0"]
        self.say("SIGKILL to edge-0")
        self.children["edge-0"].kill()
        self.until_failed(*north)
        self.start_all("edge-0")
        # a hostile device is replaced by an honest one
        honest = self.hostile[1]
        self.say(f"stop device-{honest}")
        self.children[f"device-{honest}"].stop()
        self.honest.add(honest)
        self.start_all(f"device-{honest}")
        self.run_command("release", str(self.out), self.cloud_name(honest))
        self.until_back(honest, *(i for i in north if i != self.hostile[0]))
        self.hold.unlink()
        self.wait(PATIENCE + 10 * self.settings.rounds)
        self.say("the run has ended")

    def move(self, edge: str) -> None:
        """Move an edge as docs/operations.md describes: its files go to the new host, its devices get the address."""
        self.say(f"{edge} moves: stop it, copy certificates and key to a new folder, take a new port")
        self.children[edge].stop()
        there = self.folder / f"{edge}-moved"
        shutil.copytree(self.certs(edge).root, there / "certs")
        shutil.rmtree(self.certs(edge).root.parent)
        for file in (self.certs("cloud").key(edge), self.certs("cloud").certificate(edge)):
            shutil.copy(file, there / file.name)
        shutil.copy(self.certs("cloud").ca, there / "cloud-ca.crt")
        self.moved[edge], self.ports[edge] = there, processes.free_port()

    # ---- afterwards --------------------------------------------------------------------------------------------------
    def errors(self) -> list[str]:
        """Wait for the ends of all devices; describe everything that is not as expected."""
        errors = []
        hostile = self.hostile[0]
        for i in range(self.devices):
            child = self.children[f"device-{i}"]
            if (code := child.wait(60)) != 0:
                errors.append(f"device-{i} did not learn that the run has ended (exit code {code})")
            if LOST in child.log.read_text():
                errors.append(f"device-{i} lost its state")
            if i != hostile and not self.model(i).is_file():
                errors.append(f"device-{i} has no personal model")
        if self.status()["quarantine"].keys() != {self.cloud_name(hostile)}:
            errors.append(f"in quarantine are {sorted(self.status()['quarantine'])}")
        last = set(self.events()[-1]["failed"])
        if last != {hostile}:
            errors.append(f"clients {sorted(last)} were missing from the last round")
        return errors

    def failures(self) -> list[str]:
        """Return the rounds in which each device failed, with the reasons."""
        lines = []
        for i in range(self.devices):
            spans: list[tuple[str, list[int]]] = []
            for e in self.events():
                if i in e["failed"]:
                    why = (
                        e["reasons"][str(i)]
                        .removeprefix(f"{self.cloud_name(i)}: ")
                        .removeprefix(f"{self.cloud_name(i)} ")
                    )
                    if spans and spans[-1][0] == why and spans[-1][1][-1] == e["round"] - 1:
                        spans[-1][1].append(e["round"])
                    else:
                        spans.append((why, [e["round"]]))
            for why, rounds in spans:
                several = f"rounds {rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"round {rounds[0]}"
                lines.append(f"{self.cloud_name(i)}, {several}: {why[:160]}")
        return lines


def run_day(folder: Path, method: str, behind: int, direct: int, rounds: int, seed: int) -> list[str]:
    """Run the whole day and compare it with its replay; describe everything that is not as expected."""
    began = time.monotonic()
    folder.mkdir(parents=True)
    with (folder / "day.log").open("w") as log:

        def say(text: str) -> None:
            line = f"{time.monotonic() - began:6.1f} s  round {max(0, day.round):2d}  {text}"
            for f in (sys.stdout, log):
                print(line, file=f, flush=True)

        day = Day(folder, method, behind, direct, rounds, seed, say)
        try:
            with day:
                day.run_script()
                errors = day.errors()
        except CoterieError as e:
            return [str(e)]
        for text in day.failures():
            say(text)
        states = {i: day.state(i) for i in range(day.devices)}
        errors += replay_differences(day.out, folder / "replay", states)
        times = [json.loads(x)["seconds"] for x in (day.out / "timing.jsonl").read_text().splitlines()]
        say(f"{len(times)} rounds, of {statistics.median(times):.1f} s (median) to {max(times):.1f} s")
        for text in errors or ["equal to the replay, to the bit; no state was lost"]:
            say(text)
    return errors


def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        run_node(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(SETTINGS), default="fedrep")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--behind", type=int, default=12, help="devices behind the two edges")
    parser.add_argument("--direct", type=int, default=4, help="devices attached to the cloud")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    if a.out.exists():
        sys.exit(f"{a.out} exists already")
    try:
        errors = run_day(a.out, a.method, a.behind, a.direct, a.rounds, a.seed)
    except CoterieError as e:
        errors = [str(e)]
    sys.exit("\n".join(errors) or 0)


if __name__ == "__main__":
    main()
