"""What travels between cloud and edges: jobs of several devices in one message, with every tensor in it once.

A logical edge (a cluster of the method) whose participants are all behind one physical edge is relayed and merged
there: its devices' uploads end at the edge, and the cloud gets their shapes and the merged upload. Otherwise uploads
pass through and the cloud merges them itself, which gives the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie import tree as T
from coterie.codec import Value
from coterie.method import ANNOUNCE, Context, Download, Edge
from coterie.runtimes.flower import validate as v
from coterie.runtimes.flower.transport.wire import DTYPE_NAMES, DTYPES
from coterie.tree import Tree


class Shelf:
    """Tensors of a message, each once; trees become names with places on the shelf."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self._at: dict[int, int] = {}

    def put(self, tree: Mapping[str, Tensor]) -> dict[str, int]:
        places = {}
        for name, t in tree.items():
            if id(t) not in self._at:
                self._at[id(t)] = len(self.tensors)
                self.tensors.append(t)
            places[name] = self._at[id(t)]
        return places

    def take(self, places: Any) -> Tree:
        v.need(isinstance(places, dict), "a tree of the message is none")
        v.need(all(type(i) is int and 0 <= i < len(self.tensors) for i in places.values()), "a tensor is missing")
        return {str(name): self.tensors[i] for name, i in places.items()}


def pack_edge(edge: Edge, shelf: Shelf, ids: Sequence[int]) -> Value:
    """A logical edge with what it was sent, for its members alone."""
    sent = edge.download
    return {
        "id": edge.id, "clients": list(edge.clients), "ids": list(ids), "state": edge.state,
        "shared": shelf.put(sent.shared), "edge": shelf.put(sent.edge.get(edge.id, {})),
        "each": {i: shelf.put(sent.each[i]) for i in edge.clients if i in sent.each},
    }  # fmt: skip


def unpack_edge(value: Value, shelf: Shelf) -> tuple[Edge, list[int]]:
    each = {int(i): shelf.take(t) for i, t in value["each"].items()}
    sent = Download(shelf.take(value["shared"]), each, {int(value["id"]): shelf.take(value["edge"])})
    clients = tuple(int(i) for i in value["clients"])
    return Edge(int(value["id"]), clients, value["state"], sent), [int(i) for i in value["ids"]]


def outline(answer: Value) -> Value:
    """An answer whose upload stays at the edge: shapes and types in its place, announcements as they are."""
    shapes = {k: [DTYPE_NAMES[t.dtype], list(t.shape)] for k, t in answer["tree"].items()}
    return {**answer, "tree": T.keep(answer["tree"], lambda k: k.startswith(ANNOUNCE)), "shapes": shapes}


def filled(answer: Any, client: int, ctx: Context, largest: int) -> Value:
    """Inverse of outline, with tensors that have no content: enough for the ledger."""
    v.need(isinstance(answer, dict), "the answer is not a dictionary")
    shapes = answer.get("shapes")
    rest = v.trained({k: x for k, x in answer.items() if k != "shapes"}, client, ctx, largest)
    v.need(isinstance(shapes, dict), "the answer has no shapes")
    tree: Tree = {}
    for name, about in (shapes or {}).items():
        kind, shape = about
        v.need(kind in DTYPES and all(type(n) is int and n >= 0 for n in shape), f"the shape of {name} is none")
        here = rest["tree"].get(name)
        tree[name] = here if here is not None else torch.empty(shape, dtype=DTYPES[kind], device="meta")
    return {**rest, "tree": tree, "checked": True}
