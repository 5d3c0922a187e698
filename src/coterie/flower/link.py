"""The cloud's link to SuperNodes: requests and answers travel as messages of Flower's Grid.

A SuperNode gets a new id when it is started again, unless the SuperLink authenticates its key. Clients therefore have
names. The link asks each new node id for its name and for the secret in its state folder; a name belongs to the secret
that came with it first. A node that returns under a new id is sent its pending request again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message

from coterie.errors import CoterieError, sentence
from coterie.federation.identity.roles import NODE_NAME
from coterie.federation.transport import MAX_PAYLOAD, Buffer, Cause, Failure, LinkBytes, NodeReplies, WaitObserver
from coterie.flower.records import MESSAGE_TYPES, make_records, read_records
from coterie.storage.atomic import write_atomic

_LOOK_SECONDS = 1.0  # pause between looks at the SuperLink
_START_SECONDS = 120.0  # least time for an answer: every message starts a process on its node
_RETRY_SECONDS = 60.0  # pause before a node that gave no name is asked again
_RETURN_SECONDS = 25.0  # time for a node that was disconnected to come back
_UNAVAILABLE, _NODE_UNAVAILABLE = (3, 4), 5  # codes of flwr.app.Error: message or reply, node
log = logging.getLogger("coterie.cloud")


class NodeNames:
    """The names of a run's nodes and the digests of their secrets, in nodes.json."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._digests: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError as e:
            raise CoterieError(f"{path} is damaged ({e}); restore it from a backup") from None

    def claim(self, name: object, secret: object) -> str:
        """Return the name of a node; raise CoterieError if it is invalid or belongs to a different secret."""
        if not isinstance(name, str) or not NODE_NAME.fullmatch(name) or not isinstance(secret, str) or not secret:
            raise CoterieError("the node gave no valid name")
        digest = hashlib.sha256(secret.encode()).hexdigest()
        if self._digests.setdefault(name, digest) != digest:
            raise CoterieError(f'the name "{name}" belongs to a node with a different state folder')
        write_atomic(self.path, json.dumps(self._digests, indent=1).encode())
        return name


class FlowerLink:
    """Sends requests to the SuperNodes of a Flower run. It is a NodeLink, as GrpcServer is."""

    def __init__(self, grid: Any, names: NodeNames, on_wait: WaitObserver = lambda connected, asked: None):
        self.grid, self.names, self.on_wait = grid, names, on_wait
        self.ids: dict[str, int] = {}  # present node id of each name
        self.seen: dict[str, float] = {}  # time at which each name was last connected
        self._online: set[int] = set()
        self._named: set[int] = set()  # node ids that have or had a name
        self._asked: dict[str, int] = {}  # node ids that were asked for their names, by message id
        self._ask_after: dict[int, float] = {}  # time after which a node without a name is asked again
        self._looked_at = float("-inf")

    # ---- nodes -------------------------------------------------------------------------------------------------------
    def nodes(self) -> list[str]:
        """Names of the connected nodes."""
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._look()
        return sorted(name for name, node in self.ids.items() if node in self._online)

    def _look(self) -> None:
        """Read the connected node ids, and ask new ones for their names."""
        self._online = set(self.grid.get_node_ids())
        for message in self.pull(self._asked):
            self._take_name(self._asked.pop(message.metadata.reply_to_message_id), message)
        self._asked = {message: node for message, node in self._asked.items() if node in self._online}
        now = self._looked_at = time.monotonic()
        self.seen |= {name: now for name, node in self.ids.items() if node in self._online}
        for node in sorted(self._online - self._named - set(self._asked.values())):
            if now >= self._ask_after.get(node, now):
                self._ask_after[node] = now + _RETRY_SECONDS
                if (message := self.push(node, "name", 0, _START_SECONDS)) is not None:
                    self._asked[message] = node

    def _take_name(self, node: int, message: Any) -> None:
        try:
            head, _ = read_answer(message)
            name = self.names.claim(head.get("name"), head.get("secret"))
            log.info("node %s is %s", node, name)
            self.ids[name] = node
            self._named.add(node)
        except CoterieError as e:
            log.warning("node %s: %s", node, sentence(str(e), 2000))

    # ---- messages ----------------------------------------------------------------------------------------------------
    def push(self, node: int, kind: str, round: int, seconds: float, **payloads: Buffer | None) -> str | None:
        """Send a message; return its id, or None if the SuperLink did not take it."""
        records = make_records({"kind": kind, "round": round}, **payloads)
        message = Message(records, dst_node_id=node, message_type=MESSAGE_TYPES[kind], ttl=seconds, group_id=str(round))
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, messages: Iterable[str]) -> list[Any]:
        """Return the answers to these messages that have come."""
        ids = list(messages)
        return [m for m in self.grid.pull_messages(ids) if m.metadata.reply_to_message_id in ids] if ids else []

    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> NodeReplies:  # fmt: skip
        """Send requests and wait for the answers; the deadline is at least the time that a process needs to start."""
        exchange, replies = self.begin(payloads, kind, round, deadline, shared, largest), NodeReplies({}, {}, {})
        while True:
            new = exchange.poll()
            replies = NodeReplies(
                {**replies.answers, **new.answers}, {**replies.errors, **new.errors}, {**replies.traffic, **new.traffic}
            )
            if not exchange.waiting:
                return replies
            self.on_wait(self.nodes(), exchange.waiting)
            time.sleep(_LOOK_SECONDS / 2)

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> "FlowerExchange":  # fmt: skip
        """Send requests without waiting."""
        exchange = FlowerExchange(self, kind, round, max(deadline, _START_SECONDS), shared, largest, dict(payloads))
        exchange.ask()
        return exchange


@dataclass
class FlowerExchange:
    """Requests to several nodes, of which each has at most one message under way."""

    link: FlowerLink
    kind: str
    round: int
    seconds: float
    shared: Buffer | None
    largest: int
    payloads: dict[str, Buffer]  # requests without an answer, by node
    sent: dict[str, tuple[int, str]] = field(default_factory=dict)  # node id and message id of the request, by node
    since: float = field(default_factory=time.monotonic)

    @property
    def waiting(self) -> set[str]:
        return set(self.payloads)

    def ask(self) -> None:
        """Send the pending requests of nodes that have no message yet, or had it under an earlier id."""
        left = self.since + self.seconds - time.monotonic()
        for name in sorted(self.link.nodes()):
            node = self.link.ids[name]
            if name in self.payloads and left > 0 and (name not in self.sent or self.sent[name][0] != node):
                if name in self.sent:
                    log.info("%s has reconnected; its request is sent again", name)
                own = self.payloads[name]
                message = self.link.push(node, self.kind, self.round, left, own=own, shared=self.shared)
                if message is not None:
                    self.sent[name] = node, message

    def poll(self) -> NodeReplies:
        """Return what is new since the last call, without waiting."""
        replies, names = NodeReplies({}, {}, {}), {message: name for name, (_, message) in self.sent.items()}
        for message in self.link.pull(m for m, name in names.items() if name in self.payloads):
            name = names[message.metadata.reply_to_message_id]
            try:
                head, parts = read_answer(message)
                replies.answers[name] = self._answer(head, parts)
                size = len(self.payloads[name]) + (0 if self.shared is None else len(self.shared))
                up = len(replies.answers[name])
                replies.traffic[name] = LinkBytes(size, up, size, up)
            except AnswerError as e:
                if e.cause is Cause.ABSENT:
                    self.sent.pop(name)  # it may come back
                    continue
                replies.errors[name] = Failure(e.cause, f"{name}: {sentence(str(e), 2000)}")
            except CoterieError as e:
                replies.errors[name] = Failure(Cause.WRONG, f"{name}: {e}")
        connected, now = set(self.link.nodes()), time.monotonic()
        for name in self.payloads.keys() - replies.answers.keys() - replies.errors.keys():
            if now - self.since >= self.seconds:
                replies.errors[name] = Failure(Cause.LATE, f"{name} did not answer within {self.seconds:g} s")
            elif name not in connected and now - self.link.seen.get(name, 0.0) > _RETURN_SECONDS:
                replies.errors[name] = Failure(Cause.ABSENT, f"{name} is not connected")
        for name in (*replies.answers, *replies.errors):
            del self.payloads[name]
        for failure in replies.errors.values():
            log.warning("%s", failure.why)
        self.ask()
        return replies

    def _answer(self, head: Mapping[str, Any], parts: Mapping[str, memoryview]) -> memoryview:
        """Return the answer; raise CoterieError if it is of a different request or too large."""
        if (head.get("kind"), head.get("round")) != (self.kind, self.round) or "answer" not in parts:
            raise CoterieError(f"it is not an answer to {self.kind} of round {self.round}")
        if len(parts["answer"]) > self.largest:
            size = len(parts["answer"])
            raise CoterieError(f"the payload of {size} bytes is larger than the {self.largest} allowed")
        return parts["answer"]


class AnswerError(CoterieError):
    """A node, or Flower in its place, answered with an error."""

    def __init__(self, cause: Cause, reason: str):
        super().__init__(reason)
        self.cause = cause


def read_answer(message: Any) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Return head and payloads of an answer; raise AnswerError if it is an error."""
    if message.has_error():
        code = message.error.code
        cause = Cause.LATE if code in _UNAVAILABLE else Cause.ABSENT if code == _NODE_UNAVAILABLE else Cause.DECLINED
        raise AnswerError(cause, f"Flower reports error {code}: {message.error.reason}")
    head, parts = read_records(message.content)
    if "error" in head:
        raise AnswerError(Cause.NO_PLAN if head.get("no_plan") is True else Cause.DECLINED, str(head["error"]))
    return head, parts
