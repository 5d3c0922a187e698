"""Messages between the hosts of a federation, carried by Flower: the only part of Coterie that knows Flower.

A message is a kind, a round and bytes. What the bytes mean, who is which client and what is done about somebody who
does not answer is decided elsewhere. `flower_api.py` names everything that is used of Flower.

    with superlink(certs, state, host, port), FlowerLink(address, certs) as link:       # a server
        answers, errors, traffic = link.send({"alice": own}, "train", round=3, deadline=600, shared=shared)

    Node(address, ca, key, lambda kind, round, shared, own: answer).run()               # a node
"""

from coterie.runtimes.flower.transport.flower_api import flower_env, use_flower
from coterie.runtimes.flower.transport.http import RefusedError, UnreachableError
from coterie.runtimes.flower.transport.link import FlowerLink, LinkBytes, Replies
from coterie.runtimes.flower.transport.node import Answering, Node
from coterie.runtimes.flower.transport.superlink import address, superlink
from coterie.runtimes.flower.transport.wire import LARGEST, Buffer

__all__ = [
    "LARGEST", "Answering", "Buffer", "FlowerLink", "LinkBytes", "Node", "RefusedError", "Replies", "UnreachableError",
    "address", "flower_env", "superlink", "use_flower",
]  # fmt: skip
