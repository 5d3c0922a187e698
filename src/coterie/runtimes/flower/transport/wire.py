"""What a Coterie message looks like on Flower's wire, with one copy of the payload in memory and never two.

A message is a RecordDict: `head` (kind, round, ticket: numbers and text) beside `body` (ArrayRecord: one or two arrays
of bytes, `own` and `shared`; small ones ride in the head). Flower cuts arrays into chunks of 5 MB, names every chunk by
its SHA-256 and stores each once, so what all clients share crosses to the SuperLink once. Flower's own helpers hold a
large payload three to four times (all chunks are serialised before the first is pushed; a pulled array is joined
twice); here chunks go and come one at a time. Nothing is ever unpickled.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.errors import CoterieError
from coterie.runtimes.flower.transport import flower_api as fl
from coterie.runtimes.flower.transport.base import Buffer, UnreachableError, room

STYPE = "coterie"  # marks our arrays; version of the format
SMALL = 2**18  # up to here bytes ride in the head: every object of a message costs two requests, some 10 ms each
PREFIX = "body."
NAMES = {"own", "shared"}


@dataclass(frozen=True)
class Head:
    """The small things beside the payload. A reply echoes kind, round and ticket of what it answers."""

    kind: str
    round: int
    ticket: str  # random, known to the addressed node only: nobody else and no earlier reply can answer
    wire: int = 0  # in a reply: bytes the message it answers took on the node's link, framing included

    @staticmethod
    def read(record: Mapping[str, Any]) -> "Head":
        kind, round_, ticket, wire = (record.get(k) for k in ("kind", "round", "ticket", "wire"))
        if not (isinstance(kind, str) and type(round_) is int and isinstance(ticket, str) and type(wire) is int):
            raise CoterieError("the message has no valid head; is the other side of the same Coterie version?")
        return Head(kind, round_, ticket, wire)

    def refuse_unless(self, asked: "Head") -> None:
        """A reply must be the one to what was asked: same ticket, kind and round."""
        if self.round != asked.round:
            raise CoterieError(f"it is a reply of round {self.round}, asked was round {asked.round}")
        if self.ticket != asked.ticket or self.kind != asked.kind:
            raise CoterieError("it answers a message that was not sent to this node now (a replay?)")


def _array(data: memoryview) -> Any:
    """A Flower Array over the buffer, without a copy."""
    made: Any = fl.Array("uint8", (len(data),), STYPE, b"")
    made.data = data  # the constructor takes bytes only; chunks are memoryviews of whatever is here
    return made


def part(data: Buffer) -> Any:
    """Bytes ready to travel: as they are if few, else an Array. Make it once for all clients that get the same."""
    view = memoryview(data).cast("B")
    return bytes(view) if len(view) <= SMALL else _array(view)


def size(body: Mapping[str, Any]) -> int:
    """Payload bytes of a body's parts."""
    return sum(len(p) if isinstance(p, bytes) else len(p.data) for p in body.values())


def content(head: Head, body: Mapping[str, Any]) -> Any:
    """The RecordDict of a message with the part `own`, and perhaps `shared`."""
    arrays, fields = fl.ArrayRecord(), dict[str, Any](vars(head))
    for name, made in body.items():
        if isinstance(made, bytes):
            fields[PREFIX + name] = made
        else:
            arrays[name] = made
    return fl.RecordDict({"head": fl.ConfigRecord(fields), **({"body": arrays} if arrays else {})})


def question(head: Head, body: Mapping[str, Any], node: int, seconds: float, run: int, task: int) -> Any:
    """A message from the cloud, void after `seconds`. (Message's own constructor keeps the run in a global.)"""
    about = fl.Metadata(
        run_id=run, message_id="", src_node_id=fl.SUPERLINK_NODE_ID, dst_node_id=node, reply_to_message_id="",
        group_id=str(head.round), created_at=time.time(), ttl=seconds, message_type=fl.MessageType.QUERY,
        src_task_id=task,
    )  # fmt: skip
    return fl.make_message(metadata=about, content=content(head, body))


def opened(record: Any) -> tuple[Head, dict[str, memoryview]]:
    """Head and parts of a received RecordDict; the parts are writable, large ones are not copied."""
    if "head" not in record.config_records:
        raise CoterieError("the message is not one of Coterie's")
    fields = record.config_records["head"]
    parts: dict[str, memoryview] = {}
    for name, raw in fields.items():
        if name.startswith(PREFIX) and isinstance(raw, bytes):
            copied = room(len(raw))
            copied[:] = raw
            parts[name.removeprefix(PREFIX)] = copied
    parts.update({name: made.data for name, made in record.array_records.get("body", {}).items()})
    if "own" not in parts or not parts.keys() <= NAMES:
        raise CoterieError("the message has no payload, or one that is not Coterie's")
    return Head.read(fields), parts


def push(
    messages: Iterable[Any],
    announce: Callable[[list[Any], list[Any]], tuple[Iterable[str], str]],
    put: Callable[[str, str, bytes], bool],
) -> list[str]:
    """Send messages: `announce` names them and is told what is missing and the session, `put` sends one object."""
    with fl.no_object_id_recompute():
        protos, trees, objects, ids = [], [], {}, []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            ids.append(message.object_id)
            protos.append(fl.message_to_proto(fl.remove_content_from_message(message)))
            trees.append(fl.get_object_tree(message))
            objects.update(fl.get_all_nested_objects(message))
        missing, session = announce(protos, trees)
        wanted = set(missing)
        for key, found in objects.items():
            if key in wanted and not put(session, key, found.deflate()):
                raise UnreachableError("the SuperLink did not take it: the run has ended or the transfer was too slow")
    return ids


def pull(tree: Any, get: Callable[[str], bytes | None], largest: int, patience: float = 60.0) -> Any:
    """The object a tree describes; `get` fetches one object, None while it is still on its way.

    A payload over `largest` bytes is refused before its chunks are fetched.
    """
    budget = largest

    def fetch(key: str) -> bytes:
        started, pause = time.monotonic(), 0.01
        while (found := get(key)) is None:
            if time.monotonic() - started > patience:
                raise CoterieError("a part of the message never arrived")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
        return found

    def read(key: str) -> Any:
        nonlocal budget
        raw = fetch(key)
        kind, children, _ = fl.get_object_head_values_from_object_content(raw)
        if kind == "ArrayRecord":  # Flower's own inflate takes arrays of bytes only
            record = fl.ArrayRecord()
            for name, child in json.loads(fl.get_object_body(raw, fl.ArrayRecord)).items():
                record[name] = read(child)
            return record
        if kind == "Array":
            return payload(json.loads(fl.get_object_body(raw, fl.Array)), children)
        budget -= len(raw)
        if budget < 0 or kind not in fl.inflatable_class_registry:
            raise CoterieError(f"the message is larger than the {largest} bytes allowed, or of unknown type")
        return fl.inflatable_class_registry[kind].inflate(raw, {child: read(child) for child in children} or None)

    def payload(about: Any, children: list[str]) -> Any:
        nonlocal budget
        (length,) = about["shape"] if len(about["shape"]) == 1 else (-1,)
        budget -= length
        if length < 0 or about["stype"] != STYPE:
            raise CoterieError("the payload is not one of Coterie's")
        if budget < 0:
            raise CoterieError(f"the payload of {length} bytes is larger than the {largest} allowed")
        if len(about["arraychunk_ids"]) > 1 + length // 2**20:  # Flower's chunks have 5 MB
            raise CoterieError("the payload comes in too many parts")
        buffer, at = room(length), 0
        for index in about["arraychunk_ids"]:
            chunk = fetch(children[index])
            piece = memoryview(chunk)[chunk.index(b"\x00") + 1 :]
            if at + len(piece) > length:
                raise CoterieError("the payload is longer than it says")
            buffer[at : at + len(piece)] = piece
            at += len(piece)
        if at != length:
            raise CoterieError("the payload is shorter than it says")
        return _array(buffer)

    try:
        return read(tree.object_id)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
        raise CoterieError(f"damaged message: {type(e).__name__} {e}") from e
