"""The types that callers of the transport see. This module does not need gRPC."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from coterie.errors import CoterieError

Buffer = bytes | bytearray | memoryview
AnswerFunction = Callable[[str, int, memoryview | None, memoryview], Buffer]  # (kind, round, shared, own) -> answer
WaitObserver = Callable[[Collection[str], Collection[str]], None]  # (connected nodes, nodes without an answer)
MAX_PAYLOAD = 8 * 2**30  # bytes of one payload, unless the caller sets a smaller limit


class UnreachableError(CoterieError):
    """The other side does not respond at the moment; a later attempt may succeed."""


class UntrustedError(UnreachableError):
    """The other side's certificate is not valid, or not signed by the authority in our file."""


class RefusedError(CoterieError):
    """The server does not accept this node's key or protocol version."""


class NoPlanError(CoterieError):
    """The node has no plan of the run that a message belongs to; the server then sends the plan again."""

    def __init__(self) -> None:
        super().__init__("this node has no plan of this run")


@dataclass(frozen=True)
class LinkBytes:
    """Bytes exchanged with one node for one request: the payloads, and everything sent for them."""

    payload_down: int
    payload_up: int
    total_down: int
    total_up: int


class Cause(Enum):
    """Why a node gave no valid answer."""

    ABSENT = "absent"  # the node is not connected
    LATE = "late"  # the node is connected and did not answer in time
    DECLINED = "declined"  # the node answered with an error message
    NO_PLAN = "no plan"  # the node has no plan of the run
    WRONG = "wrong"  # the message of the node is not an answer to the request


@dataclass(frozen=True)
class Failure:
    """A request without a valid answer."""

    cause: Cause
    why: str  # an explanation for the operator, with the node's name

    @property
    def passing(self) -> bool:
        """True if the node was only absent or late."""
        return self.cause in (Cause.ABSENT, Cause.LATE)


class NodeReplies(NamedTuple):
    """The result of a request, by node: answers, failures, and bytes of the nodes that answered."""

    answers: dict[str, memoryview]
    errors: dict[str, Failure]
    traffic: dict[str, LinkBytes]


class Exchange(Protocol):
    """Requests to several nodes that were sent without waiting for the answers."""

    @property
    def waiting(self) -> set[str]:
        """Nodes with a pending request, or with an outcome that `poll` has not returned yet."""

    def poll(self) -> NodeReplies:
        """Return what is new since the last call, without waiting."""


class NodeLink(Protocol):
    """The connections of the cloud or of an edge to its nodes."""

    def nodes(self) -> list[str]:
        """Names of the connected nodes."""

    def send(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> NodeReplies:  # fmt: skip
        """Send requests and wait for the answers, at most `deadline` seconds.

        `shared` goes to all nodes, in addition to their own payloads. An answer of more than `largest` bytes is
        refused.
        """

    def begin(
        self, payloads: Mapping[str, Buffer], kind: str, round: int, deadline: float, shared: Buffer | None = None,
        largest: int = MAX_PAYLOAD,
    ) -> Exchange:  # fmt: skip
        """Send requests as `send` does, without waiting."""


def aligned_buffer(length: int) -> memoryview:
    """Return a writable buffer that starts at a multiple of 64 bytes, as torch's own memory does."""
    raw: Any = np.empty(length + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return memoryview(raw[start : start + length])
