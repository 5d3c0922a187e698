"""Messages between the hosts of a federation, over gRPC or Flower: the only part of Coterie that knows either.

A message is a kind, a round and bytes. What the bytes mean, who is which client and what is done about somebody who
does not answer is decided elsewhere. `flower_api.py` names everything that is used of Flower.

    with listening(certs, host, port) as link:                                   # a server
        answers, errors, traffic = link.send({"alice": own}, "train", round=3, deadline=600, shared=shared)

    Node(address, ca, key, lambda kind, round, shared, own: answer).run()               # a node
"""

from coterie.federation.transport.base import (
    MAX_PAYLOAD,
    Answering,
    Buffer,
    Cause,
    Failure,
    LinkBytes,
    NodeReplies,
    RefusedError,
    UnreachableError,
    address,
)
from coterie.federation.transport.choose import Node, listening

__all__ = [
    "MAX_PAYLOAD",
    "Answering",
    "Buffer",
    "Cause",
    "Failure",
    "LinkBytes",
    "Node",
    "NodeReplies",
    "RefusedError",
    "UnreachableError",
    "address",
    "listening",
]  # fmt: skip
