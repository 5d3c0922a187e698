"""The steps of a round between the cloud and its clients, at the cloud or at an edge."""

from collections.abc import Sequence
from dataclasses import replace

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.edges import ANNOUNCE, EdgeMethod
from coterie.core.method import Download, Method, Upload
from coterie.core.tree import Tree
from coterie.engine.ledger import summed
from coterie.engine.messages import Bytes, MergeAnswer, MergeRequest, TrainAnswer, TrainRequest
from coterie.engine.round import Edges, attach, receive


def downloads(
    method: Method, server: State, edges: Edges, sent: Download, ids: Sequence[ClientId], round: int
) -> dict[ClientId, tuple[Tree, Tree]]:
    """Return what each client receives of `sent`, directly or through its edge: the shared part, and its own."""
    received = {i: (sent.shared, sent.each.get(i, {})) for i in ids}
    for edge, members in attach(method, server, edges, sent, ids):
        assert isinstance(method, EdgeMethod)
        relayed = method.relay(edge, members, round)
        received |= {i: (relayed.shared, relayed.each.get(i, {})) for i in members}
    return received


def preview(
    method: Method, server: State, edges: Edges, ids: Sequence[ClientId], round: int
) -> dict[ClientId, tuple[Tree, Tree]]:
    """Return each client's download for scoring before this round."""
    return downloads(method, server, edges, method.deliver(server, ids, round), ids, round)


def relay(method: EdgeMethod, task: MergeRequest) -> tuple[list[TrainRequest], Bytes]:
    """Return the requests of an edge's clients with their downloads, and the bytes sent to all sampled clients."""
    handed = method.relay(task.edge, task.clients, task.round)
    requests = [replace(r, shared=handed.shared, own=handed.each.get(r.client, {})) for r in task.requests]
    schema = method.schema("down")
    return requests, summed(schema.parts(handed.to(i)) for i in task.clients)


def merge(method: EdgeMethod, task: MergeRequest, answers: Sequence[TrainAnswer], down: Bytes) -> MergeAnswer:
    """Merge the answers of an edge's clients; clients that are not called send only their announcement."""
    got = receive(task.schemas, sorted(answers, key=lambda a: a.client))
    ahead = [replace(u, tree=T.keep(u.tree, lambda k: k.startswith(ANNOUNCE))) for u in got.uploads]
    called = method.calls(task.edge, ahead, task.round)
    crossed = [u if called is None or u.sender in called else a for u, a in zip(got.uploads, ahead, strict=True)]
    state, upload = method.merge(task.edge, crossed, task.round) if crossed else (task.edge.state, Upload({}))
    sizes = got.bytes | {u.sender: task.schemas[u.sender].parts(u.tree) for u in crossed}
    return MergeAnswer(
        edge=task.edge.id,
        state=state,
        upload=upload.tree,
        note=dict(upload.note),
        senders=tuple(u.sender for u in crossed),
        samples=sum(u.samples for u in crossed),
        down=down,
        up=summed(sizes.values()),
        refused=got.refused,
        nonfinite=tuple(got.nonfinite),
    )
