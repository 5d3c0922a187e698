"""The bytes of a message by kind: the kinds of the method's schema, and those of scores and numbers."""

from collections.abc import Iterable, Mapping

from coterie.core import tree as T
from coterie.core.method import Method
from coterie.core.schema import Schema
from coterie.core.tree import Tree, value_bytes
from coterie.engine import codec
from coterie.engine.ledger import summed
from coterie.engine.messages import ScoreAnswer, ScoreRequest, SendAnswer, SendRequest, TrainAnswer, check_message
from coterie.errors import CoterieError
from coterie.federation.protocol.messages import Answer, DeviceJob, EdgeAnswer, NodeJob, Request, SumAnswer, SumRequest
from coterie.privacy.secure_sum.messages import MaskedWords, tensor_bytes

# "scores" are counts of predictions; "numbers" are samples, steps, loss and notes; "masked" and "keys" are those of
# secure sums
BytesByKind = dict[str, int]
_NUMBER_BYTES = 8


def of_request(method: Method, request: Request) -> BytesByKind:
    """Return the bytes of a request's payload."""
    if isinstance(request, SendRequest):
        return {}
    if isinstance(request, SumRequest):
        return {"keys": tensor_bytes(request.ask)}
    sizes = _of_tree(method.schema("down"), request.download)
    if isinstance(request, ScoreRequest) and request.global_model is not None:
        sizes = _added([sizes, {"model": T.nbytes(request.global_model)}])
    return sizes


def of_answer(method: Method, answer: Answer) -> BytesByKind:
    """Return the bytes of an answer's payload, scores and numbers."""
    if isinstance(answer, SendAnswer):
        return _of_tree(method.schema("up"), answer.upload) | {"numbers": _NUMBER_BYTES}
    if isinstance(answer, SumAnswer):
        return {"masked" if isinstance(answer.give, MaskedWords) else "keys": tensor_bytes(answer.give)}
    if isinstance(answer, TrainAnswer):
        scores = [s for s in (answer.before, answer.after) if s is not None]
        sizes = _of_tree(method.schema("up"), answer.upload)
        numbers = 3 + len(answer.note)
    else:
        scores, sizes, numbers = list(answer.scores.values()), {}, 1
    counts = sum(value_bytes(v.numel(), v.dtype) for s in scores for v in s.counts.values())
    if scores:
        sizes["scores"] = counts + _NUMBER_BYTES * len(scores)
    return sizes | {"numbers": _NUMBER_BYTES * numbers}


def of_job(method: Method, job: NodeJob) -> BytesByKind:
    """Return the bytes of a device's job, or of an edge's job for its devices and for itself."""
    if isinstance(job, DeviceJob):
        return of_request(method, job.request)
    sizes = [of_request(method, r) for r in job.requests]
    for task in job.merges:
        sizes += [_of_tree(method.schema("edge_down"), tree) for tree in task.edge.received]
        sizes.append({"state": _tensor_bytes(task.edge.state)})
    return _added(sizes)


def of_reply(method: Method, reply: object) -> BytesByKind:
    """Return the bytes of the reply of a device or an edge; empty if it is not a valid reply."""
    try:
        check_message(reply, type(reply))
    except (CoterieError, TypeError):
        return {}
    if isinstance(reply, TrainAnswer | ScoreAnswer | SendAnswer | SumAnswer):
        return of_answer(method, reply)
    if isinstance(reply, EdgeAnswer):
        sizes = [of_answer(method, a) for a in reply.answers]
        for merged in reply.merged:
            sizes += [_of_tree(method.schema("edge_up"), merged.upload), {"state": _tensor_bytes(merged.state)}]
        return _added(sizes)
    return {}


def _of_tree(schema: Schema, tree: Tree) -> BytesByKind:
    """Return the bytes of a tree; entries that the schema does not declare are of kind "undeclared".

    An entry that also shows labels has both kinds as its key.
    """
    sizes: BytesByKind = {}
    for name, v in tree.items():
        kind = " and ".join(schema.entries[name].kinds) if name in schema.entries else "undeclared"
        sizes[kind] = sizes.get(kind, 0) + value_bytes(v.numel(), v.dtype)
    return sizes


def _added(sizes: Iterable[Mapping[str, int]]) -> BytesByKind:
    return {kind: n for kind, n in sorted(summed(sizes).items()) if n}


def _tensor_bytes(value: object) -> int:
    return sum(value_bytes(v.numel(), v.dtype) for v in codec.tensors_of(value))
