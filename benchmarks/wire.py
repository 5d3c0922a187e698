"""Compare the ledger, the wire and the devices' audit logs over gRPC with mutual TLS, on one machine.

    python benchmarks/wire.py --out DIR [--methods fedavg,ditto]       every method, four devices, two rounds
    python benchmarks/wire.py --out DIR --saving [--devices 80] [--edges 4] [--kill 2]

The cloud, the edges and the devices are threads of this process with the real transport, handlers and checks; each node
has a certificate and a connection of its own. The first form prints, for each method, the bytes that the ledger counts
on the links of devices, what the wire and the audit logs have in addition, and a last line with the largest
differences. The wire has a head of at most 4 KB on each message.

With `--saving`, ECS-FL (mended), in which only the chosen devices send their models, is compared with FedAvg. In the
second round `--kill` of the chosen devices lose their connection when they are asked for their models.
"""

import argparse
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.config import settings
from coterie.engine.ledger import Page
from coterie.engine.loop import Loop
from coterie.engine.session import make_loop
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.cloud.runtime import FederationRuntime
from coterie.federation.cloud.waiting import WaitingRules
from coterie.federation.device import DeviceHandler
from coterie.federation.edge import EdgeHandler
from coterie.federation.localhost.nodes import LocalNodes
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.audit import AUDIT_FILE, AuditLog
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import listening
from coterie.federation.transport.node import Node
from coterie.methods import find, method_names
from coterie.models.zoo import ZOO
from coterie.storage.run_folder import Folder

NET = "coterie.testing:SmallNet"
SMALL: dict[str, Any] = {
    "data": "digits", "subset": 400, "model": NET, "rounds": 3, "join": 1.0, "epochs": 1, "batch": 16, "lr": 0.1,
    "partition": "dirichlet(0.5)", "val_share": 0.2, "public": 30, "seed": 3, "watch": False, "final_trained": False,
    "eval_every": 100,
}  # fmt: skip
ALLOW = Allow(methods=tuple(method_names()), models=(NET, *ZOO))


@dataclass
class Wired:
    """A federation over gRPC with its devices."""

    loop: Loop
    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)

    def links(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the bytes on the wire of the last round, by link and direction."""
        runtime = self.loop.runtime
        assert isinstance(runtime, FederationRuntime)
        runtime.wire.close_round(self.loop.done)
        last = (self.folder / "run/wire.jsonl").read_text().splitlines()[-1]
        links: dict[str, dict[str, dict[str, int]]] = json.loads(last)["links"]
        return links


@contextmanager
def federation(folder: Path, certified: LocalNodes, method: str, **given: Any) -> Iterator[Wired]:
    """Open a federation of threads: a cloud, the edges and the devices that have certificates in `certified`."""
    chosen = settings(method=method, clients=certified.devices, **{**SMALL, **given})
    session = open_session(chosen, CloudSettings("none"))
    (folder / "run").mkdir(parents=True)
    threads: list[threading.Thread] = []
    nodes: dict[str, Node] = {}

    def start(name: str, server: str, handle: Any) -> None:
        files = certified.certs(server)
        address = f"127.0.0.1:{certified.ports[server]}"
        nodes[name] = Node(address, files.ca, files.key(name), handle)
        threads.append(threading.Thread(target=nodes[name].run, daemon=True))
        threads[-1].start()

    with ExitStack() as stack:
        cloud = stack.enter_context(listening(certified.certs("cloud"), "127.0.0.1", certified.ports["cloud"]))
        for name in certified.edge_names:
            below = stack.enter_context(listening(certified.certs(name), "127.0.0.1", certified.ports[name]))
            audit = AuditLog(folder / name / AUDIT_FILE)
            start(name, "cloud", EdgeHandler(below, ALLOW, audit, stay=True, roles=certified.certs(name).roles).handle)
        for i in session.federation.clients:
            device = DeviceHandler("digits", folder / "devices" / str(i), i, None, ALLOW, stay=True)
            stack.callback(device.close)
            start(f"device-{i}", certified.above(i), device.handle)
        waiting = WaitingRules(len(session.method.ctx.clients), 120.0, seconds=120.0)
        plan = FederationPlan.of(session, f"{time.time_ns():032x}")
        roles = certified.certs("cloud").roles
        runtime = FederationRuntime(session.method, cloud, plan, roles, folder / "run", waiting)
        loop = make_loop(session, Folder(folder / "run"), runtime)
        try:
            yield Wired(loop, folder, nodes)
        finally:
            loop.folder.close()
            for node in nodes.values():
                node.stopping.set()
            for thread in threads:
                thread.join(10)


def ledger_bytes(page: Mapping[str, Any], way: str) -> int:
    """Return the bytes of devices; clients of a method without edges are linked to the cloud in the ledger."""
    return sum(sum(page.get(link, {}).get(way, {}).values()) for link in ("device-edge", "device-cloud"))


def audited(folder: Path, round: int, way: str) -> tuple[int, int]:
    """Return the bytes and the number of the messages of a round's training in the devices' audit logs."""
    lines = [json.loads(x) for log in folder.glob(f"devices/*/{AUDIT_FILE}") for x in log.read_text().splitlines()]
    jobs = [x for x in lines if x["way"] == way and x["message"] in ("train", "send") and x["round"] == round]
    return sum(n for x in jobs for kind, n in x.get("sizes", {}).items() if kind != "numbers"), len(jobs)


@dataclass(frozen=True)
class Line:
    """Bytes of two rounds in one direction."""

    ledger: int
    wire: int  # payloads on the wire minus the ledger
    audit: int  # the audit logs minus the ledger
    messages: int
    framing: int


def compared(wired: Wired, rounds: int) -> dict[str, Line]:
    """Run the first rounds, which score no clients, and compare what was counted, by direction."""
    loop, out = wired.loop, {}
    loop.start()
    sums = {way: [0, 0, 0, 0, 0] for way in ("down", "up")}
    while loop.done < rounds:
        before: Page = loop.bytes
        loop.step()
        links = wired.links()
        at_devices = [links[link] for link in ("device-edge", "device-cloud") if link in links]
        for way, said in (("down", "in"), ("up", "out")):
            counted = ledger_bytes(loop.bytes, way) - ledger_bytes(before, way)
            logged, messages = audited(wired.folder, loop.done, said)
            payload = sum(ways[way]["payload"] for ways in at_devices)
            framing = sum(ways[way]["framing"] for ways in at_devices)
            found = (counted, payload - counted, logged - counted, messages, framing)
            sums[way] = [a + b for a, b in zip(sums[way], found, strict=True)]
    for way, values in sums.items():
        out[way] = Line(*values)
    return out


def certified(folder: Path, devices: int, edges: int) -> LocalNodes:
    """Make certificates for a federation of this size."""
    nodes = LocalNodes(folder, "digits", "fedavg", None, devices, edges)
    nodes.certify()
    return nodes


def every_method(out: Path, methods: Sequence[str]) -> None:
    """Print a line for each method, and the largest differences."""
    nodes = certified(out / "nodes", 4, 0)
    print("| method | ledger down | ledger up | wire, per message | audit logs | framing |")
    print("|---|---:|---:|---:|---:|---:|")
    worst, unequal = 0.0, []
    for name in methods:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with federation(folder, nodes, name) as wired:
                lines = compared(wired, 2)
        except CoterieError as e:
            print(f"| {name} | {e} | | | | |")
            unequal.append(name)
            continue
        messages = sum(x.messages for x in lines.values())
        more = sum(x.wire for x in lines.values()) / max(1, messages)
        logs = sum(abs(x.audit) for x in lines.values())
        share = sum(x.framing for x in lines.values()) / max(1, messages)
        worst = max(worst, more)
        unequal += [name] if logs or more < 0 else []
        down, up = lines["down"].ledger, lines["up"].ledger
        print(f"| {name} | {down:,} | {up:,} | {more:+.0f} | {logs:+d} | {share:.0f} |", flush=True)
    print(
        f"{len(methods)} methods; the wire has at most {worst:.0f} bytes more per message; unequal: {unequal or 'none'}"
    )


class Lossy:
    """Cuts the connections of the first devices that are asked for their models in a round."""

    def __init__(self, wired: Wired, round: int, kill: int):
        self.wired, self.round, self.left, self.killed = wired, round, kill, list[str]()
        self._lock = threading.Lock()
        for name, node in wired.nodes.items():
            if name.startswith("device"):
                node.handle = self._watching(name, node.handle)

    def _watching(self, name: str, handle: Any) -> Any:
        def answer(kind: str, round: int, shared: Any, own: Any) -> Any:
            with self._lock:
                dies = kind == "send" and round == self.round and self.left > 0
                self.left -= dies
            if dies:
                self.killed.append(name)
                self.wired.nodes[name].stopping.set()
                time.sleep(5)
            return handle(kind, round, shared, own)

        return answer


def saving(out: Path, devices: int, edges: int, kill: int) -> None:
    """Print the bytes that devices send per round with ECS-FL (mended) and with FedAvg."""
    nodes = certified(out / "nodes", devices, edges)
    sent: dict[str, float] = {}
    model = 0
    for name in ("fedavg", "ecs-fl-mended"):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        own = {"n_edges": max(1, edges), "epsilon": 0.0} if name != "fedavg" else {}
        small = {"subset": None, "model": "mlp", "min_size": 2, "batch": 32, "val_share": 0.0, "public": 0}
        with federation(folder, nodes, name, **{**small, **own}) as wired:
            model = sum(v.numel() * 4 for v in wired.loop.method.ctx.w0.values())
            lossy = Lossy(wired, 2, kill if name != "fedavg" else 0)
            found = compared(wired, 2)["up"]
            event = json.loads((folder / "run/events.jsonl").read_text().splitlines()[-1])
        sent[name] = (found.ledger + found.wire) / 2
        shown = f"{found.ledger / 2:,.0f} B per round in the ledger, {sent[name]:,.0f} B of payload on the wire"
        more = f"audit logs {found.audit:+d} B, {found.messages / 2:g} messages, framing {found.framing / 2:,.0f} B"
        print(f"{find(name).card.title}: {shown}, {more}")
        if lossy.killed:
            print(f"  disconnected when called: {', '.join(lossy.killed)}; failed in that round: {event['failed']}")
            print(f"  aggregated in that round: {event['facts']}")
    print(f"a model has {model:,} B; ECS-FL sends {sent['ecs-fl-mended'] / sent['fedavg']:.1%} of FedAvg's payload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", help="comma-separated list (default: all)")
    parser.add_argument("--saving", action="store_true")
    parser.add_argument("--devices", type=int, default=80)
    parser.add_argument("--edges", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("coterie").setLevel(logging.CRITICAL)
    if args.saving:
        saving(args.out, args.devices, args.edges, args.kill)
    else:
        every_method(args.out, args.methods.split(",") if args.methods else method_names())


if __name__ == "__main__":
    main()
