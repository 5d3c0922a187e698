"""The nodes of a run: which are connected, which client each device is, and which may not take part."""

import logging
import time
from collections.abc import Callable, Collection, Mapping

from coterie.core.context import ClientId
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud.dispatch import Dispatcher, Greeting
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.state_versions import StateVersions
from coterie.federation.identity.admin import SUSPENDED, seat_orders
from coterie.federation.identity.roles import NodeRole, reserved_seats, scoped
from coterie.federation.identity.seats import Roster, read_attached, read_hello
from coterie.federation.policy.quarantine import Quarantine
from coterie.federation.protocol.messages import Hello
from coterie.federation.transport import Failure

_RETRY = 60.0  # seconds after which a refused node gets the plan again
_LATE_ROUNDS = 2  # deadlines missed in a row after which a node is not asked until it has answered a hello
_RETURN = 20.0  # seconds for which a node that was connected is expected back before a round starts
log = logging.getLogger("coterie.cloud")


class Membership:
    """The seats of a run and the nodes that hold them, as of the last `update`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        roster: Roster,
        roles: Callable[[], Mapping[str, NodeRole]],  # reads the roles of all registered nodes
        versions: StateVersions,
        quarantine: Quarantine,
        liveness: Liveness,
    ):
        self.dispatcher, self.roster, self.roles = dispatcher, roster, roles
        self.versions, self.quarantine, self.liveness = versions, quarantine, liveness
        self.greeting = Greeting(dispatcher)
        self.begun = False  # True once enough clients have come for the first round
        self.connected: set[ClientId] = set()  # clients that can be asked
        self.edges: dict[str, list[str]] = {}  # connected devices (EDGE/DEVICE) of every connected edge
        self.known_roles: Mapping[str, NodeRole] = {}
        self.refused: dict[str, tuple[str, float]] = {}  # reason and time of the latest refusal, by name of the node
        self._logged: dict[str, str] = {}  # refusals that were logged
        self._deadlines_missed: dict[str, int] = {}  # number in a row, by name of the node
        self._greet_again: set[str] = set()  # devices whose data are not those of their hello
        self._edges_asked = 0.0  # time at which edges were last asked for their devices
        # a run that was resumed expects the devices that it had before
        self._last_seen = dict.fromkeys(roster.numbers.values(), time.monotonic())

    # ---- questions ---------------------------------------------------------------------------------------------------
    @property
    def participants(self) -> int:
        """Number of connected clients that are not newcomers."""
        return sum(client < self.roster.places for client in self.connected)

    @property
    def silent(self) -> set[str]:
        """Nodes that missed several deadlines; they are not asked before they have answered a hello."""
        return {name for name, times in self._deadlines_missed.items() if times >= _LATE_ROUNDS}

    @property
    def excluded(self) -> dict[str, str]:
        """Nodes that do not take part in the run, with the reason."""
        reasons = {name: reason for name, (reason, _) in self.refused.items()}
        reasons |= {name: f"in quarantine: {reason}" for name, reason in self.quarantine.out.items()}
        for name, role in self.known_roles.items():
            suspended = [name] if role.suspended else [scoped(name, device) for device in role.without]
            reasons |= dict.fromkeys(suspended, SUSPENDED)
        return reasons

    def expecting(self) -> bool:
        """True if a client that was here a moment ago may come back, or one that was just greeted may answer."""
        now = time.monotonic()
        away = (t for client, t in self._last_seen.items() if client not in self.connected)
        return any(now - t < _RETURN for t in away) or (not self.begun and bool(self.greeting.waiting(_RETURN)))

    def missing(self) -> list[str]:
        """Return the names of the devices that the cloud waits for before a round."""
        recently = time.monotonic() - _RETURN
        return [
            name
            for name, client in sorted(self.roster.numbers.items())
            if client not in self.connected and (not self.begun or self._last_seen.get(client, recently) > recently)
        ]

    def name(self, client: ClientId) -> str:
        """Return the name of the node that holds a client's seat."""
        return self.roster.name(client) or f"client {client}"

    def named(self, client: ClientId, reason: str) -> str:
        """Return the reason with the name of the client's node in front."""
        name = self.name(client)
        via = name.partition("/")[0]
        return reason if reason.startswith((f"{name} ", f"{name}:", f"{via}:")) else f"{name}: {reason}"

    def why_absent(self, client: ClientId) -> str:
        """Return the reason why a client is not asked."""
        name = self.name(client)
        via, _, device = name.partition("/")
        if self.quarantine.holds(name):
            return f"{name}: it is in quarantine"
        if self._suspended(via, device):
            return f"{name}: {SUSPENDED}"
        return f"{name} is not connected"

    def _suspended(self, node: str, device: str = "") -> bool:
        role = self.known_roles.get(node, NodeRole())
        return role.suspended or device.rpartition("/")[2] in role.without

    # ---- events ------------------------------------------------------------------------------------------------------
    def update(self) -> None:
        """Look for connected nodes and the operator's orders, and send the plan to new nodes."""
        attached, now = set(self.dispatcher.link.nodes()), time.monotonic()
        for name in self.quarantine.released():
            log.info("%s was released from quarantine", name)
        self._read_roles()
        self._free_seats()
        nodes = {n for n in attached if not self._suspended(n) and not self.quarantine.holds(n)}
        edges = {n for n in nodes if self.known_roles.get(n, NodeRole()).is_edge}
        self.refused = {
            n: refusal
            for n, refusal in self.refused.items()
            if n.partition("/")[0] in nodes and now - refusal[1] < _RETRY
        }
        if self.begun:  # before the first round, which waits for hellos, a new connection brings no second hello
            self.greeting.forget_absent(attached)
        known = {entry.name for entry in self.roster.entries.values()} - self._greet_again - self.silent
        self._greet_devices(nodes - edges - known - self.refused.keys())
        self._ask_edges(edges - self.refused.keys())
        behind = {name for edge, devices in self.edges.items() for name in devices if not self._suspended(edge, name)}
        ready = behind | (nodes - edges - self.silent - self._greet_again)
        self.connected = {
            client
            for client, entry in self.roster.entries.items()
            if entry.name in ready and not self.quarantine.holds(entry.name)
        }
        self._last_seen |= dict.fromkeys(self.connected, now)
        self.liveness.observe(attached, self.edges)
        self.liveness.changed()

    def answered(self, node: str) -> None:
        """Record that a node kept its deadline."""
        self._deadlines_missed.pop(node, None)

    def missed_deadline(self, node: str) -> None:
        """Record that a node was connected and did not answer in time."""
        self._deadlines_missed[node] = self._deadlines_missed.get(node, 0) + 1

    def greet_again(self, device: str) -> None:
        """Ask a device for another hello before its next request: its data are not those of its last hello."""
        self._greet_again.add(device)

    def _read_roles(self) -> None:
        before = self.known_roles
        try:
            self.known_roles = self.roles()
        except CoterieError as e:
            self.liveness.problem(str(e))  # the roles of the last update hold
        for name, client in self.roster.numbers.items():
            via, _, device = name.partition("/")
            removed = via in before and via not in self.known_roles
            if removed or self._suspended(via, device) or self.quarantine.holds(name):
                self._last_seen.pop(client, None)  # it is not expected back

    def _free_seats(self) -> None:
        """Carry out the operator's orders about seats."""
        for path, order in seat_orders(self.roster.path.parent):
            try:
                if order is None:
                    raise CoterieError(f"{path} is not an order")
                holder = self.roster.numbers.get(order.name, -1)
                client = self.roster.free(order.name, order.to, self.versions.last_round(holder))
                self._last_seen.pop(client, None)
                self.connected.discard(client)
                log.info("seat %s of %s is free%s", client, order.name, f" for {order.to}" if order.to else "")
            except CoterieError as e:
                self.liveness.problem(str(e))
            path.unlink(missing_ok=True)

    # ---- hellos ------------------------------------------------------------------------------------------------------
    def _greet_devices(self, nodes: Collection[str]) -> None:
        hellos, failures = self.greeting.ask(sorted(nodes))
        for name, value in sorted(hellos.items()):
            self.answered(name)
            try:
                self._admit(name, read_hello(value))
            except CoterieError as e:
                self._refuse(name, str(e))
        self._refuse_failed(failures)

    def _ask_edges(self, edges: Collection[str]) -> None:
        """Send the plan to edges; they pass it on and answer with the hellos of their devices."""
        self.edges = {e: devices for e, devices in self.edges.items() if e in set(edges) - self.silent}
        complete = (
            len(self.connected) >= self.roster.places and all(self.edges.values()) and len(self.edges) == len(edges)
        )
        if complete and time.monotonic() - self._edges_asked < _RETURN:
            return  # an edge reports absent devices in every round; a new device can wait a moment
        self._edges_asked = time.monotonic()
        replies, failures = self.dispatcher.greet_edges(edges)
        for edge, value in sorted(replies.items()):
            self.answered(edge)
            try:
                behind = read_attached(edge, self.known_roles.get(edge, NodeRole()), value)
            except CoterieError as e:
                self._refuse(edge, str(e))
                self.edges.pop(edge, None)
                continue
            self._forget_refusals(edge, {edge, *behind.hellos, *behind.refused})
            known = {entry.name for entry in self.roster.entries.values()} - self._greet_again
            seats = len(self.roster.numbers)
            for name, hello in behind.hellos.items():
                if name not in known and name not in self.refused:
                    self._admit(name, hello, write=False)
            if len(self.roster.numbers) > seats:
                self.roster.write()
            for name, reason in behind.refused.items():
                self._refuse(name, reason)
            if edge in edges:  # a late answer may come from an edge that is out by now
                self.edges[edge] = sorted(behind.hellos)
        for edge in failures:
            self.edges.pop(edge, None)
        self._refuse_failed(failures)

    def _forget_refusals(self, edge: str, named: Collection[str]) -> None:
        """Forget refusals of devices that an edge no longer names, so that it cannot fill memory with them."""
        for refusals in (self.refused, self._logged):
            for name in [n for n in refusals if n.partition("/")[0] == edge and n not in named]:
                del refusals[name]

    def _admit(self, name: str, hello: Hello, write: bool = True) -> None:
        self._greet_again.discard(name)
        reserved = reserved_seats(self.known_roles)
        try:
            log.info("%s is client %s", name, self.roster.admit(name, hello, write, reserved).client)
            self._logged.pop(name, None)
        except CoterieError as e:
            self._refuse(name, str(e))

    def _refuse_failed(self, failures: Mapping[str, Failure]) -> None:
        for name, failure in failures.items():
            if not failure.passing:
                self._refuse(name, failure.why)

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason, time.monotonic()
        if self._logged.get(name) != reason and self.dispatcher.line_budget.take(name):
            why = reason.removeprefix(f"{name}: ")
            self.liveness.problem(f"{name} is not in the run: {why}")
            self.dispatcher.note_refused_hello(name, sentence(why))
        self._logged[name] = reason
