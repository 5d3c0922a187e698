"""Exchanges: requests to several nodes under one deadline, and their answers.

- Each request has a ticket. A node that reconnects is sent its request again, unless it reports that it has it. The
  answer with the ticket counts once, over whichever connection it arrives.
- A node whose connection broke has RETURN_SECONDS to reconnect, a node that said goodbye LEAVE_SECONDS.
- After this process itself was suspended, nodes have RESUME_SECONDS to reconnect.
"""

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.errors import CoterieError, sentence
from coterie.federation.transport.base import Buffer, Cause, Failure, LinkBytes, NodeReplies, aligned_buffer
from coterie.federation.transport.channel import ArrivingPayload, pb, read_message, wire_bytes
from coterie.federation.transport.event_loop import run_on_loop
from coterie.federation.transport.stream import NodeStream, OutgoingRequest

LOOK_SECONDS = 1.0  # pause between looks at the connected nodes while answers are awaited
RETURN_SECONDS = 25.0
LEAVE_SECONDS = 5.0
RESUME_SECONDS = 15.0
log = logging.getLogger("coterie.cloud")


@dataclass
class GrpcExchange:
    """Requests to several nodes, and what has come back. Changed on the event loop only."""

    owner: "Exchanges"
    pending: dict[str, OutgoingRequest]  # requests without an answer, by node
    deadline: float  # seconds that the nodes have
    until: float  # end of the deadline, by time.monotonic
    last_connected: dict[str, float] = field(default_factory=dict)  # by node that was connected since the start
    asked_again: set[str] = field(default_factory=set)  # nodes whose return was logged
    answers: dict[str, memoryview] = field(default_factory=dict)
    errors: dict[str, Failure] = field(default_factory=dict)
    traffic: dict[str, LinkBytes] = field(default_factory=dict)
    finished: threading.Event = field(default_factory=threading.Event)  # no request is pending

    @property
    def waiting(self) -> set[str]:
        """Nodes with a pending request, or with an outcome that `poll` has not returned yet."""
        return {*self.pending, *self.answers, *self.errors}

    @property
    def is_open(self) -> bool:
        """True while requests are pending and the deadline has not passed."""
        return not self.finished.is_set() and time.monotonic() < self.until

    def wait(self) -> None:
        """Wait until no request is pending, at most LOOK_SECONDS."""
        self.finished.wait(max(0.0, min(LOOK_SECONDS, self.until - time.monotonic())))

    def poll(self) -> NodeReplies:
        """Return what is new since the last call, without waiting."""
        return run_on_loop(self.owner.collect(self))

    def accept(self, request: OutgoingRequest, answer: memoryview) -> None:
        """Store the answer to a pending request."""
        del self.pending[request.node]
        self.answers[request.node] = answer
        self.traffic[request.node] = LinkBytes(request.payload_bytes, len(answer), request.bytes_down, request.bytes_up)
        self._check_finished()

    def fail(self, node: str, cause: Cause, reason: str) -> None:
        """Give up the request to a node."""
        self.pending.pop(node, None)
        self.errors[node] = Failure(cause, reason)
        log.warning("%s", reason)
        self._check_finished()

    def take_replies(self) -> NodeReplies:
        """Return what has come back since the last call, by name."""
        replies = NodeReplies(
            dict(sorted(self.answers.items())), dict(sorted(self.errors.items())), dict(sorted(self.traffic.items()))
        )
        self.answers, self.errors, self.traffic = {}, {}, {}
        return replies

    def _check_finished(self) -> None:
        if not self.pending:
            self.finished.set()


class Exchanges:
    """The open exchanges of a server and the streams of its nodes. A node has at most one pending request.

    Except for `make`, everything happens on the event loop.
    """

    def __init__(self) -> None:
        self.streams: dict[str, NodeStream] = {}  # by node
        self.left_at: dict[str, float] = {}  # time of a node's last goodbye
        self.looked_at = time.monotonic()  # time of the last look at the connected nodes
        self._resumed_at = float("-inf")  # time at which this process was last seen to have been suspended
        self._open: list[GrpcExchange] = []

    def make(
        self,
        payloads: Mapping[str, Buffer],
        kind: str,
        round: int,
        deadline: float,
        shared: Buffer | None,
        largest: int,
    ) -> GrpcExchange:
        """Return an exchange that has not begun."""
        until = time.monotonic() + deadline
        requests = {
            node: OutgoingRequest(node, kind, round, secrets.token_hex(16), until, largest, payloads[node], shared)
            for node in sorted(payloads)
        }
        return GrpcExchange(self, requests, deadline, until)

    def connected(self) -> set[str]:
        """Names of the connected nodes."""
        return {name for name, stream in self.streams.items() if not stream.ended}

    def with_request_to(self, node: str) -> GrpcExchange | None:
        """Return the exchange that has a pending request to a node."""
        return next((exchange for exchange in self._open if node in exchange.pending), None)

    def waiting_for(self, request: OutgoingRequest) -> GrpcExchange | None:
        """Return the exchange in which this request is pending."""
        exchange = self.with_request_to(request.node)
        return exchange if exchange is not None and exchange.pending[request.node] is request else None

    def ask(self, node: str) -> None:
        """Send a node its pending request, if there is one and the node is connected."""
        stream, exchange = self.streams.get(node), self.with_request_to(node)
        if stream is None or stream.ended or exchange is None:
            return
        request = exchange.pending[node]
        if node in exchange.last_connected and node not in exchange.asked_again and not stream.has(request):
            log.info("%s has reconnected; its request is sent again", node)
            exchange.asked_again.add(node)
        exchange.last_connected[node] = time.monotonic()
        if request.payload_bytes > stream.max_bytes:
            reason = f"the payload of {request.payload_bytes} bytes is larger than the {stream.max_bytes} allowed"
            exchange.fail(node, Cause.DECLINED, f"{node}: {reason}")
            return
        stream.start_sending(request)

    async def begin(self, exchange: GrpcExchange) -> None:
        """Send the requests of an exchange."""
        self._open.append(exchange)
        for node in list(exchange.pending):
            self.ask(node)

    async def end(self, exchange: GrpcExchange) -> None:
        """Give up all pending requests of an exchange."""
        if exchange in self._open:
            self._open.remove(exchange)
        for node in list(exchange.pending):
            exchange.fail(node, Cause.LATE, f"{node} did not answer within {exchange.deadline:g} s")
            stream = self.streams.get(node)
            if stream is not None and stream.is_sending:
                stream.end("the node did not receive its request in time")

    async def collect(self, exchange: GrpcExchange) -> NodeReplies:
        """Return what is new in an exchange; give up absent nodes, and after the deadline all others."""
        now, connected = time.monotonic(), self.connected()
        for node in list(exchange.pending):
            if node in connected:
                exchange.last_connected[node] = now
            elif now - exchange.last_connected.setdefault(node, now) > RETURN_SECONDS:
                exchange.fail(node, Cause.ABSENT, f"{node} is not connected any more")
        if now >= exchange.until or not exchange.pending:
            await self.end(exchange)
        return exchange.take_replies()

    async def look(self, exchange: GrpcExchange) -> tuple[set[str], list[str]]:
        """Give up nodes that stay away; return the connected nodes and those with a pending request."""
        now = time.monotonic()
        if now - self.looked_at > 5 * LOOK_SECONDS:
            self._resumed_at = now
        self.looked_at = now
        connected = self.connected()
        for node in list(exchange.pending):
            if node in connected:
                exchange.last_connected[node] = now
            elif now - self._resumed_at > RESUME_SECONDS:
                seen = exchange.last_connected.get(node, float("-inf"))
                left = self.left_at.get(node, float("-inf")) >= seen
                if now - seen > (LEAVE_SECONDS if left else RETURN_SECONDS):
                    again = " any more" if node in exchange.last_connected else ""
                    exchange.fail(node, Cause.ABSENT, f"{node} is not connected{again}")
        return connected, list(exchange.pending)


class AnswerReader:
    """Reads the messages of one node and gives complete answers to the exchange that waits for them."""

    def __init__(self, stream: NodeStream, exchanges: Exchanges):
        self._stream, self._exchanges = stream, exchanges
        self._request: OutgoingRequest | None = None  # the request whose answer arrives; None: it is discarded
        self._payload: ArrivingPayload | None = None

    async def run(self) -> bool:
        """Read until the stream ends; return True if the node said that it leaves."""
        while (message := await read_message(self._stream.context)) is not None:
            content = message.WhichOneof("content")
            if content == "leave":
                return True
            if content == "answer" and self._payload is None:
                await self._offer(message.answer, wire_bytes(message))
            elif content == "chunk" and self._payload is not None:
                self._add(self._payload, message)
            else:
                raise CoterieError("it sent a message at the wrong time")
        return False

    async def _offer(self, answer: pb.Answer, size: int) -> None:
        """Permit the payload of an answer, or reject it."""
        request = self._offered_to(answer.ticket)
        if request is None:
            reason = "its request is not pending any more"
        else:
            request.bytes_up += size
            reason = self._refusal(request, answer)
        if request is None or reason:
            await self._stream.send(pb.FromServer(reject=pb.Reject(ticket=answer.ticket, reason=reason)))
            return
        await self._stream.send(pb.FromServer(permit=pb.Permit(ticket=request.ticket)), request)
        self._request, self._payload = request, ArrivingPayload(aligned_buffer(answer.size), answer.size)
        if not answer.size:
            self._complete(self._payload)

    def _offered_to(self, ticket: str) -> OutgoingRequest | None:
        """Return the pending request with this ticket."""
        exchange = self._exchanges.with_request_to(self._stream.name)
        request = None if exchange is None else exchange.pending[self._stream.name]
        matches = request is not None and hmac.compare_digest(ticket.encode(), request.ticket.encode())
        return request if matches else None

    def _refusal(self, request: OutgoingRequest, answer: pb.Answer) -> str:
        """Fail the request and return the reason, if the answer is an error, of a different round or too large."""
        reason, cause = "", Cause.WRONG
        if answer.HasField("error"):
            cause = Cause.NO_PLAN if answer.error.no_plan else Cause.DECLINED
            reason = sentence(answer.error.reason, 2000) or "no reason given"
        elif (answer.kind, answer.round) != (request.kind, request.round):
            reason = f"it is a reply of round {answer.round}, asked was round {request.round}"
        elif not answer.HasField("size"):
            reason = "its answer has neither a size nor an error"
        elif answer.size > request.largest:
            reason = f"the payload of {answer.size} bytes is larger than the {request.largest} allowed"
        if reason and (exchange := self._exchanges.waiting_for(request)) is not None:
            exchange.fail(request.node, cause, f"{request.node}: {reason}")
        return reason

    def _add(self, payload: ArrivingPayload, message: pb.FromNode) -> None:
        complete = payload.add(message.chunk)
        if self._request is not None:
            self._request.bytes_up += wire_bytes(message)
            if self._exchanges.waiting_for(self._request) is None:
                payload.buffer = self._request = None  # the rest is received and discarded
        if complete:
            self._complete(payload)

    def _complete(self, payload: ArrivingPayload) -> None:
        request, self._request, self._payload = self._request, None, None
        if request is not None and payload.buffer is not None:
            exchange = self._exchanges.waiting_for(request)
            if exchange is not None:
                exchange.accept(request, payload.buffer)
