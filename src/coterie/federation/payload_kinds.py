"""What a message holds, in bytes by kind: the kinds of the method's schema, and those of what goes with a payload."""

from collections.abc import Iterable, Mapping

from coterie.core import tree as T
from coterie.core.method import Method
from coterie.core.schema import Link, Schema
from coterie.core.tree import Tree, value_bytes
from coterie.engine import codec
from coterie.engine.messages import ScoreAnswer, ScoreRequest, TrainAnswer, check
from coterie.errors import CoterieError
from coterie.federation.protocol.messages import Answer, DeviceJob, EdgeAnswer, NodeJob, Request

Sizes = dict[str, int]  # bytes; "scores" are counts of predictions, "numbers" samples, steps, loss and notes
NUMBER = 8


def of_tree(schema: Schema, tree: Tree) -> Sizes:
    """An entry that is not declared counts as "undeclared"."""
    found: Sizes = {}
    for name, v in tree.items():
        kind = schema.entries[name].kind if name in schema.entries else "undeclared"
        found[kind] = found.get(kind, 0) + value_bytes(v.numel(), v.dtype)
    return found


def of_request(method: Method, request: Request) -> Sizes:
    found = of_tree(method.schema("down"), request.download)
    if isinstance(request, ScoreRequest) and request.global_model is not None:
        found = added([found, {"model": T.nbytes(request.global_model)}])
    return found


def of_answer(method: Method, answer: Answer) -> Sizes:
    if isinstance(answer, TrainAnswer):
        scores = [s for s in (answer.before, answer.after) if s is not None]
        found = of_tree(method.schema("up"), answer.upload)
        numbers = 3 + len(answer.note)
    else:
        scores, found, numbers = list(answer.scores.values()), {}, 1
    counted = sum(value_bytes(v.numel(), v.dtype) for s in scores for v in s.counts.values())
    return found | ({"scores": counted + NUMBER * len(scores)} if scores else {}) | {"numbers": NUMBER * numbers}


def of_job(method: Method, job: NodeJob) -> Sizes:
    """What is sent to a device, or to an edge for its devices and for itself."""
    if isinstance(job, DeviceJob):
        return of_request(method, job.request)
    found = [of_request(method, r) for r in job.requests]
    for task in job.merges:
        found += [of_tree(method.schema("edge_down"), tree) for tree in task.edge.received]
        found.append({"state": _tensors(task.edge.state)})
    return added(found)


def of_reply(method: Method, reply: object) -> Sizes:
    """What a device or an edge answered; nothing, if it is not an answer."""
    try:
        check(reply, type(reply))
    except (CoterieError, TypeError):
        return {}
    if isinstance(reply, TrainAnswer | ScoreAnswer):
        return of_answer(method, reply)
    if isinstance(reply, EdgeAnswer):
        found = [of_answer(method, a) for a in reply.answers]
        link: Link = "edge_up"
        for done in reply.merged:
            found += [of_tree(method.schema(link), done.upload), {"state": _tensors(done.state)}]
        return added(found)
    return {}


def added(sizes: Iterable[Mapping[str, int]]) -> Sizes:
    found: Sizes = {}
    for one in sizes:
        for kind, n in one.items():
            found[kind] = found.get(kind, 0) + n
    return {kind: n for kind, n in sorted(found.items()) if n}


def total(sizes: Sizes) -> int:
    return sum(sizes.values())


def _tensors(value: object) -> int:
    return sum(value_bytes(v.numel(), v.dtype) for v in codec.tensors_of(value))
