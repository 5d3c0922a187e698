"""Checks of messages from other hosts, before they are used; each raises CoterieError with one sentence.

Payloads are checked by the method's schemas where they are used: in the cloud by `engine.round.close`, where edges are
merged by `engine.edge_steps.merge`, on a device before it trains. This module checks the rest of a message.
"""

import math
from collections.abc import Iterable, Mapping

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.core.schema import LARGEST_ENTRY, Link, Schema, like
from coterie.core.tasks import Task
from coterie.core.views import VIEWS
from coterie.engine import codec
from coterie.engine.codec import Value
from coterie.engine.messages import (
    Bytes,
    MergeAnswer,
    MergeRequest,
    ScoreAnswer,
    ScoreRequest,
    SendAnswer,
    SendRequest,
    TrainAnswer,
    TrainRequest,
    check_message,
    check_score,
)
from coterie.engine.round import counted_samples
from coterie.errors import CoterieError
from coterie.federation.protocol.messages import Answer, Request, SumAnswer, SumRequest, WireBytes

_SCORES = {f"{view}/{part}" for view in VIEWS for part in ("test", "val")}
_HEADER_BYTES = 2**16  # bytes of a message in addition to its tensors
_LARGEST_NOTE = 1e9  # largest number for the log; NaN and infinity mean that training diverged
_ENTRY_BYTES = 512  # bytes in the header for each tensor


class SamplesError(CoterieError):
    """The number of samples in an answer is not the one that the device announced."""


# ---- checks of the cloud and of edges --------------------------------------------------------------------------------
def check_answer(answer: Value, request: Request, samples: int, task: Task) -> Answer:
    """Return the answer of a device whose hello announced `samples` training samples; its upload is not checked."""
    if isinstance(request, TrainRequest):
        return _check_trained(check_message(answer, TrainAnswer), request, samples, task)
    if isinstance(request, SendRequest):
        sent = check_message(answer, SendAnswer)
        _check_sender(sent, request, samples)
        return sent
    if isinstance(request, SumRequest):
        given = check_message(answer, SumAnswer)
        if given.client != request.client:
            raise CoterieError(f"the answer is of client {given.client}, the request was for client {request.client}")
        return given
    return _check_scored(check_message(answer, ScoreAnswer), request, samples, task)


def _check_trained(a: TrainAnswer, request: TrainRequest, samples: int, task: Task) -> TrainAnswer:
    _check_sender(a, request, samples)
    if a.steps < 0 or a.seen < 0:
        raise CoterieError(f"it reports {a.steps} steps and {a.seen} samples")
    for score in (a.before, a.after):
        if score is not None:
            check_score(score, task)
    if a.update is not None or (not request.watch and (a.before or a.after)):
        raise CoterieError("the answer contains more than was requested")
    check_note(a.note)
    return a


def _check_scored(a: ScoreAnswer, request: ScoreRequest, samples: int, task: Task) -> ScoreAnswer:
    _check_sender(a, request, samples)
    if "personal/test" not in a.scores or not a.scores.keys() <= _SCORES or a.model is not None:
        raise CoterieError("the answer contains other scores than were requested")
    if a.steps < 0 or a.seen < 0:
        raise CoterieError(f"it reports {a.steps} steps and {a.seen} samples")
    for score in a.scores.values():
        check_score(score, task)
    return a


def _check_sender(a: TrainAnswer | ScoreAnswer | SendAnswer, request: Request, samples: int) -> None:
    if a.client != request.client:
        raise CoterieError(f"the answer is of client {a.client}, the request was for client {request.client}")
    if a.samples != samples:
        raise SamplesError(f"the answer reports {a.samples} samples, the hello reported {samples}")


def check_note(note: Mapping[str, float]) -> None:
    """Raise CoterieError if a note has too many or too long names, or numbers that are too large."""
    if len(note) > 1000 or any(len(k) > 200 for k in note):
        raise CoterieError("the note is too long")
    for k, v in note.items():
        if math.isfinite(v) and abs(v) > _LARGEST_NOTE:
            raise CoterieError(f"in the note, {k!r} is {v:g}")


def check_merged(
    method: Method, answer: MergeAnswer, task: MergeRequest, answered: Mapping[ClientId, TrainAnswer]
) -> MergeAnswer:
    """Return an edge's answer about a cluster that it merged; the merged upload itself is not checked."""
    asked = [r.client for r in task.requests if r.client in answered]
    named = [*answer.senders, *answer.refused, *answer.nonfinite]
    if answer.edge != task.edge.id or sorted(named) != sorted(asked):
        raise CoterieError("it was merged from other clients than those that answered")
    claimed = {i: answered[i].samples for i in answer.senders}
    if answer.samples != sum(counted_samples(claimed, task.weight_cap).values()):
        raise CoterieError("the merged upload reports a different number of samples than its senders have")
    check_note(answer.note)
    _check_bytes(answer.down, method.schema("down"), len(task.clients), "down")
    _check_bytes(answer.up, method.schema("up"), len(task.requests), "up")
    for v in codec.tensors_of(answer.state):
        if v.is_floating_point() and v.numel() and not bool((v.isnan() | (v.abs() <= LARGEST_ENTRY)).all()):
            raise CoterieError("the state of the edge has values that are infinite or too large")
    return answer


def _check_bytes(sizes: Bytes, schema: Schema, payloads: int, way: str) -> None:
    """Raise CoterieError if more bytes are counted than the payloads have; refused payloads may be larger."""
    parts = {e.part for e in schema.entries.values()}
    counted = sum(v for k, v in sizes.items() if k != "refused")
    if not sizes.keys() <= {*parts, "refused"} or any(v < 0 for v in sizes.values()):
        raise CoterieError(f"bytes ({way}) are counted under unknown headings")
    if counted > payloads * schema.nbytes():
        raise CoterieError(f"{counted} bytes ({way}) are more than {payloads} payloads have")


def check_wire(wire: WireBytes) -> WireBytes:
    """Return the byte counts that an edge reports; raises CoterieError if one is negative."""
    if min(wire.payload_down, wire.payload_up, wire.total_down, wire.total_up) < 0:
        raise CoterieError("it reports impossible byte counts")
    return wire


def largest_message(method: Method, links: Iterable[Link]) -> int:
    """Return the number of bytes that a message with a payload of each of these links may have."""
    size = _HEADER_BYTES
    for schema in map(method.schema, links):
        size += schema.nbytes() + _ENTRY_BYTES * len(schema.entries)
    return size


# ---- checks of devices and of edges ----------------------------------------------------------------------------------
def check_request(method: Method, request: Request, round: int) -> None:
    """Raise CoterieError if a request, or the download in it, is not valid for the round."""
    if request.round != round:
        raise CoterieError(f"the message of round {round} holds a request of round {request.round}")
    if isinstance(request, SendRequest | SumRequest):
        return
    method.schema("down").check(request.download, "the download")
    if isinstance(request, TrainRequest):
        if not 0 <= request.share <= 1:
            raise CoterieError("share must lie between 0 and 1")
        if request.log_update:
            raise CoterieError("log_updates = true sends updates to the cloud; this device does not send them")
        return
    if request.official:
        raise CoterieError("official = true sends personal models to the cloud; this device does not send them")
    if request.global_model is not None:
        Schema(like(method.ctx.w0)).check(request.global_model, "the global model")


def check_task(method: Method, task: MergeRequest, names: Mapping[ClientId, str]) -> None:
    """Raise CoterieError if an edge's part of a round, as it comes from the cloud, is not complete."""
    asked = [r.client for r in task.requests]
    if len(set(asked)) < len(asked) or not set(asked) <= set(task.clients) & task.schemas.keys() & names.keys():
        raise CoterieError(f"the job of edge {task.edge.id} is not complete")
    schema = method.schema("edge_down").optional()
    for tree in task.edge.received:
        schema.check(tree, f"the download of edge {task.edge.id}")
