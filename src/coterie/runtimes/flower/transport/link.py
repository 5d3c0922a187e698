"""The server's end of the wire, for a cloud as for an edge.

    with FlowerLink("HOST:PORT", certs) as link:
        link.nodes()                                              # names of who is connected
        answers, errors, traffic = link.send({"alice": data}, "train", round=3, deadline=600)

What was learned about Flower 1.41 and is relied on here (runs: server_run.py, wire format: wire.py):

- One HTTPS port carries the Fleet (nodes), Control (start runs, register nodes) and Runtime (a server program's
  messages) interfaces. Only the Fleet asks for keys; guard.py closes the others.
- Nodes are known by public key, registered over the Control interface with a name, as `flwr supernode register` does.
  Here the list is the directory nodes/ of the certificates, compared with the SuperLink's at every look.
- A message is delivered once. A node that dies with it never answers; if it comes back (a later activation) within the
  deadline, the message is sent again under the same ticket.
- A node believed to be online cannot activate again; our nodes deactivate their dead predecessor first.
- A SuperLink that lost its memory answers 401; so its state is kept in a database, and our nodes activate anew.
- A node is taken for gone after two missed heartbeats, 20 s. One that is started again is gone for a moment, between
  its predecessor's goodbye and its own activation.
- There is no limit on messages; arrays travel in chunks of 5 MB, a request each. A node's clock may be 5 s ahead of
  the SuperLink's and 5 min behind.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.errors import CoterieError, sentence
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.base import (
    LARGEST,
    Buffer,
    Cause,
    Failure,
    LinkBytes,
    RefusedError,
    Replies,
    UnreachableError,
    UntrustedError,
    by_name,
)
from coterie.runtimes.flower.transport.server_run import ServerRun

LOOK = 1.0  # seconds between looks at who is connected while waiting for replies
GRACE = 15.0  # seconds nodes have to come back after the SuperLink was away
RETURN = 5.0  # seconds a node has to come back that was there when it was asked
UNANSWERED = (3, 5)  # Flower's codes of the replies it makes for a message that ran out of time and a node that is gone
log = logging.getLogger("coterie.cloud")
Looked = Callable[[Collection[str], Collection[str]], None]  # told who is connected and who is asked


@dataclass(frozen=True)
class _Asked:
    """A message on its way."""

    client: str
    activated: str  # when its node last connected, as the SuperLink says


@dataclass
class _Round:
    """What one exchange knows: who is still asked, what came back."""

    heads: dict[str, wire.Head]  # of clients without an answer yet
    bodies: Mapping[str, Mapping[str, Any]]
    until: float
    largest: int
    deadline: float  # seconds, for a person
    run: ServerRun | None = None  # that the messages belong to
    looked: float = 0.0  # when it was last seen who is connected
    asked: dict[str, _Asked] = field(default_factory=dict)  # by Flower's message id
    seen: dict[str, float] = field(default_factory=dict)  # when a client that was asked was last connected
    answers: dict[str, memoryview] = field(default_factory=dict)
    errors: dict[str, Failure] = field(default_factory=dict)
    traffic: dict[str, LinkBytes] = field(default_factory=dict)

    def failed(self, client: str, cause: Cause, reason: str) -> None:
        self.heads.pop(client, None)
        self.errors[client] = Failure(cause, reason)
        log.warning("%s", reason)


@dataclass
class FlowerExchange:
    """Messages on their way, and their answers."""

    link: "FlowerLink"
    now: _Round

    @property
    def waiting(self) -> set[str]:
        """Who has neither answered nor been given up."""
        return set(self.now.heads)

    @property
    def left(self) -> float:
        """Seconds until everybody is given up."""
        return max(0.0, self.now.until - time.monotonic())

    def poll(self, looked: Looked = lambda connected, asked: None) -> Replies:
        """What is new since the last call; waits for nobody."""
        now = self.now
        if now.heads and self.left > 0:
            self.link._step(now, looked)
        if self.left <= 0:
            for client in list(now.heads):
                now.failed(client, Cause.LATE, f"{client} did not answer within {now.deadline:g} s")
        found = Replies(by_name(now.answers), by_name(now.errors), by_name(now.traffic))
        now.answers, now.errors, now.traffic = {}, {}, {}
        return found


class FlowerLink:
    """A server program's connection to its nodes. A lost or restarted SuperLink is waited for and a new run started."""

    def __init__(self, address: str, certs: Path | Certs, poll: float = 0.1):
        self.address = address
        self.certs = certs if isinstance(certs, Certs) else Certs(certs)
        self.poll = poll  # seconds between questions for replies, at first
        self.looked: Looked = lambda connected, asked: None
        self._run: ServerRun | None = None
        self._lost = float("-inf")  # when the SuperLink was last away

    def __enter__(self) -> "FlowerLink":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(completed=error is None)

    def open(self, wait: float = 60.0) -> None:
        """Register the nodes and start a run; a SuperLink that does not answer yet is waited for."""
        self._mended(lambda run: None, wait)

    def close(self, completed: bool = True) -> None:
        """End the run."""
        if self._run is not None:
            self._run.end(completed)
            self._run = None

    def nodes(self, wait: float = 60.0) -> list[str]:
        """Names of who is connected now. New keys in the directory are registered."""

        def look(run: ServerRun) -> list[str]:
            run.register()
            return sorted(run.online())

        found: list[str] = self._mended(look, wait)
        return found

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = LARGEST,
    ) -> "FlowerExchange":  # fmt: skip
        """Ask nodes and wait for nobody: `poll` of what is returned fetches what has come.

        `shared` goes to all, to the SuperLink once. An answer over `largest` bytes is refused unread.
        """
        common = {} if shared is None else {"shared": wire.part(shared)}
        bodies = {c: {"own": wire.part(payloads[c]), **common} for c in sorted(payloads)}
        heads = {c: wire.Head(kind, round, secrets.token_hex(16)) for c in bodies}
        return FlowerExchange(self, _Round(heads, bodies, time.monotonic() + deadline, largest, deadline))

    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = LARGEST,
    ) -> Replies:  # fmt: skip
        """Ask nodes; return who answered within `deadline` seconds, and for the others why they did not."""
        asked = self.begin(payloads, kind, round, deadline, shared, largest)
        found, pause = Replies({}, {}, {}), self.poll
        while True:
            new = asked.poll(self.looked)
            found.answers.update(new.answers)
            found.errors.update(new.errors)
            found.traffic.update(new.traffic)
            if not asked.waiting:
                return Replies(by_name(found.answers), by_name(found.errors), by_name(found.traffic))
            if new.answers or new.errors:
                pause = self.poll
            time.sleep(max(0.0, min(pause, asked.left)))
            pause = min(1.0, 1.1 * pause)

    def _step(self, now: _Round, looked: Looked) -> None:
        """Send what is not on its way, and fetch what has come."""
        try:
            if self._run is None:
                self._run = ServerRun(self.address, self.certs)
            if now.run is not self._run:  # what was on its way in the old run is gone
                now.run, now.asked, now.looked = self._run, {}, 0.0
            if time.monotonic() - now.looked > LOOK:
                self._ask(self._run, now, looked)
                now.looked = time.monotonic()
            self._collect(self._run, now)
        except (UnreachableError, RefusedError) as e:
            self._away(e)

    def _ask(self, run: ServerRun, now: _Round, looked: Looked) -> None:
        """Send what is not on its way: at first everything, later what a node took along when it died."""
        online = run.online()
        looked(online.keys(), list(now.heads))
        waiting = {about.client: (key, about) for key, about in now.asked.items()}
        new = []
        for client in list(now.heads):
            if client not in online:
                if not self._grace and time.monotonic() - now.seen.get(client, float("-inf")) > RETURN:
                    now.failed(client, Cause.ABSENT, f"{client} is not connected" + " any more" * (client in now.seen))
                continue
            now.seen[client] = time.monotonic()
            if client in waiting:
                key, about = waiting[client]
                if about.activated == online[client].last_activated_at:
                    continue
                del now.asked[key]
                log.info("%s came back, asking again", client)
            new.append(client)
        if new:
            left = max(1.0, now.until - time.monotonic())
            messages = [run.message(now.heads[c], now.bodies[c], online[c].node_id, left) for c in new]
            for client, key in zip(new, run.push(messages, now.largest), strict=True):
                now.asked[key] = _Asked(client, online[client].last_activated_at)

    def _collect(self, run: ServerRun, now: _Round) -> None:
        """Fetch the replies that are there."""
        found = run.replies(list(now.asked)) if now.asked else []
        for proto, tree in found:
            about = now.asked.pop(proto.metadata.reply_to_message_id, None)
            if about is None or about.client not in now.heads:
                continue
            client, before, cause = about.client, run.traffic, Cause.WRONG
            try:
                message = wire.pull(tree, run.objects.get, now.largest)
                if message.has_error():
                    if message.error.code in UNANSWERED:
                        continue  # asked again if it comes back; `_ask` gives it up if it does not
                    cause = Cause.DECLINED
                    raise CoterieError(sentence(message.error.reason, 2000) or "no reason given")
                head, parts = wire.opened(message.content)
                head.refuse_unless(now.heads[client])
            except (UnreachableError, RefusedError):
                raise
            except CoterieError as e:
                now.failed(client, cause, f"{client}: {e}")
            else:
                del now.heads[client]
                now.answers[client] = parts["own"]
                sizes = wire.size(now.bodies[client]), len(parts["own"]), max(0, head.wire), run.traffic - before
                now.traffic[client] = LinkBytes(*sizes)
            run.objects.confirm(proto.metadata.message_id)

    def _mended(self, work: Callable[[ServerRun], Any], wait: float) -> Any:
        """Do it; if the connection is lost, open a new run and do it again."""
        until = time.monotonic() + wait
        while True:
            try:
                if self._run is None:
                    self._run = ServerRun(self.address, self.certs)
                return work(self._run)
            except (UnreachableError, RefusedError) as e:
                self._away(e)
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)

    def _away(self, error: CoterieError) -> None:
        """A SuperLink that does not answer may come back with our run; one that refuses us has forgotten it."""
        if not self._grace:
            log.warning("%s; trying again", error)
        self._lost = time.monotonic()
        if isinstance(error, RefusedError):
            self._drop()
        elif isinstance(error, UntrustedError) and self._run is not None:
            self._run.trust()

    @property
    def _grace(self) -> bool:
        return time.monotonic() - self._lost < GRACE

    def _drop(self) -> None:
        if self._run is not None:
            self._run.drop()
            self._run = None
