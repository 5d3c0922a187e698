"""What a Coterie message looks like on Flower's wire, with one copy of the payload in memory and never two.

A message is a RecordDict: `head` (kind, round, ticket: numbers and text) beside `body` (ArrayRecord: the values, each
an array of bytes in safetensors layout, so that nothing is ever unpickled; small ones ride in the head). Flower cuts
arrays into chunks of 5 MB, names every chunk by its SHA-256 and stores each once, so what all clients share crosses to
the SuperLink once. Flower's own helpers hold a large payload three to four times (all chunks are serialised before the
first is pushed; a pulled array is joined twice); here chunks go and come one at a time.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import codec
from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.runtimes.flower.transport.http import UnreachableError

STYPE = "coterie"  # marks our arrays; version of the format
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST = 8 * 2**30  # bytes of one payload, unless told otherwise
SMALL = 2**18  # up to here a value rides in the head: every object of a message costs two requests, some 10 ms each
PREFIX = "body."


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


def pack(value: Value) -> memoryview:
    """A value as one buffer in safetensors layout: what codec.loads reads too, made with a single copy."""
    skeleton, tensors = codec.split(value)
    header: dict[str, Any] = {"__metadata__": {"skeleton": json.dumps(skeleton)}}
    order = sorted(range(len(tensors)), key=lambda i: (-tensors[i].element_size(), i))  # keeps every tensor aligned
    at = 0
    for i in order:
        t = tensors[i]
        if t.dtype not in DTYPE_NAMES:
            raise CoterieError(f"tensors of type {t.dtype} do not travel")
        end = at + t.numel() * t.element_size()
        header[str(i)] = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    start = 8 + len(head)
    buffer = torch.empty(start + at, dtype=torch.uint8)
    view = _view(buffer)
    view[:start] = len(head).to_bytes(8, "little") + head
    for i in order:
        first, last = header[str(i)]["data_offsets"]
        if last > first:
            t = tensors[i].detach()
            buffer[start + first : start + last].view(t.dtype).view(t.shape).copy_(t)
    return view


def _view(buffer: Tensor) -> memoryview:
    raw: Any = buffer.numpy()
    return memoryview(raw)


def unpack(buffer: memoryview) -> Value:
    """Inverse of pack; the tensors look into the buffer, nothing is copied."""
    try:
        start = 8 + int.from_bytes(buffer[:8], "little")
        if start > len(buffer):
            raise ValueError("the header is longer than the message")
        header = json.loads(bytes(buffer[8:start]))
        skeleton = json.loads(header.pop("__metadata__")["skeleton"])
        data = buffer[start:]
        tensors = [_tensor(data, header[str(i)]) for i in range(len(header))]
        spans = sorted(entry["data_offsets"] for entry in header.values())
        ends = [0, *(last for _, last in spans)]
        if [first for first, _ in spans] != ends[:-1] or ends[-1] != len(data):
            raise ValueError("the tensors overlap or do not fill the message")
        return codec.join(skeleton, tensors)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as e:
        raise CoterieError(f"damaged or foreign payload: {type(e).__name__} {e}") from e


def _tensor(data: memoryview, entry: dict[str, Any]) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    first, last = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError("shapes and offsets must be whole numbers")
    count = math.prod(shape)
    if last - first != count * dtype.itemsize or last > len(data):
        raise ValueError("a tensor does not lie inside the message")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data[first:last], dtype=dtype, count=count).view(shape)


def array(data: memoryview) -> Any:
    """A Flower Array over the buffer, without a copy."""
    from flwr.app import Array

    made: Any = Array("uint8", (len(data),), STYPE, b"")
    made.data = data  # the constructor takes bytes only; chunks are memoryviews of whatever is here
    return made


def part(value: Value) -> Any:
    """A value ready to travel: bytes if small, else an Array. Make it once for all clients that get the same."""
    packed = pack(value)
    return bytes(packed) if len(packed) <= SMALL else array(packed)


def size(body: Mapping[str, Any]) -> int:
    """Payload bytes of a body's parts."""
    return sum(len(p) if isinstance(p, bytes) else len(p.data) for p in body.values())


def content(head: Head, body: Mapping[str, Any]) -> Any:
    """The RecordDict of a message whose parts are named `value`, or `shared` and `each`."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    arrays, fields = ArrayRecord(), dict[str, Any](vars(head))
    for name, made in body.items():
        if isinstance(made, bytes):
            fields[PREFIX + name] = made
        else:
            arrays[name] = made
    return RecordDict({"head": ConfigRecord(fields), **({"body": arrays} if arrays else {})})


def question(head: Head, body: Mapping[str, Any], node: int, seconds: float, run: int, task: int) -> Any:
    """A message from the cloud, void after `seconds`. (Message's own constructor keeps the run in a global.)"""
    from flwr.app import MessageType, Metadata
    from flwr.app.message import make_message
    from flwr.common.constant import SUPERLINK_NODE_ID

    about = Metadata(
        run_id=run, message_id="", src_node_id=SUPERLINK_NODE_ID, dst_node_id=node, reply_to_message_id="",
        group_id=str(head.round), created_at=time.time(), ttl=seconds, message_type=MessageType.QUERY, src_task_id=task,
    )  # fmt: skip
    return make_message(metadata=about, content=content(head, body))


def opened(record: Any) -> tuple[Head, Value, int]:
    """Head, value (dictionaries of `shared` and `each` joined) and payload bytes of a received RecordDict."""
    if "head" not in record.config_records:
        raise CoterieError("the message is not one of Coterie's")
    fields = record.config_records["head"]
    head = Head.read(fields)
    body = {k.removeprefix(PREFIX): v for k, v in fields.items() if k.startswith(PREFIX) and isinstance(v, bytes)}
    body.update(record.array_records.get("body", {}))
    parts = {name: unpack(_buffer(made)) for name, made in body.items()}
    if "value" in parts:
        return head, parts["value"], size(body)
    if not parts or not all(isinstance(value, dict) for value in parts.values()):
        raise CoterieError("the shared and the own part of a message must be dictionaries")
    return head, {**parts.get("shared", {}), **parts.get("each", {})}, size(body)


def _buffer(made: Any) -> memoryview:
    if not isinstance(made, bytes) and made.stype != STYPE:
        raise CoterieError(f'arrays of type "{made.stype}" are not Coterie\'s')
    data = made if isinstance(made, bytes) else made.data
    # torch wants writable memory; large payloads come so, except through the ClientApp of a stock SuperNode
    return memoryview(bytearray(data)) if isinstance(data, bytes) else data


def push(
    messages: Iterable[Any],
    announce: Callable[[list[Any], list[Any]], tuple[Iterable[str], str]],
    put: Callable[[str, str, bytes], bool],
) -> list[str]:
    """Send messages: `announce` names them and is told what is missing and the session, `put` sends one object."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )

    with no_object_id_recompute():
        protos, trees, objects, ids = [], [], {}, []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            ids.append(message.object_id)
            protos.append(message_to_proto(remove_content_from_message(message)))
            trees.append(get_object_tree(message))
            objects.update(get_all_nested_objects(message))
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
    from flwr.app import Array, ArrayRecord
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_head_values_from_object_content,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

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
        kind, children, _ = get_object_head_values_from_object_content(raw)
        if kind == "ArrayRecord":  # Flower's own inflate takes arrays of bytes only
            record = ArrayRecord()
            for name, child in json.loads(get_object_body(raw, ArrayRecord)).items():
                record[name] = read(child)
            return record
        if kind != "Array":
            budget -= len(raw)
            if budget < 0 or kind not in inflatable_class_registry:
                raise CoterieError(f"the message is larger than {largest} bytes or of unknown type")
            return inflatable_class_registry[kind].inflate(raw, {child: read(child) for child in children} or None)
        about = json.loads(get_object_body(raw, Array))
        (length,) = about["shape"] if len(about["shape"]) == 1 else (-1,)
        budget -= length
        if length < 0 or about["stype"] != STYPE:
            raise CoterieError("the payload is not one of Coterie's")
        if budget < 0:
            raise CoterieError(f"the payload of {length} bytes is larger than the {largest} allowed")
        buffer = _view(torch.empty(length, dtype=torch.uint8))
        at = 0
        for index in about["arraychunk_ids"]:
            chunk = fetch(children[index])
            skip = chunk.index(b"\x00") + 1
            piece = memoryview(chunk)[skip:]
            if at + len(piece) > length:
                raise CoterieError("the payload is longer than it says")
            buffer[at : at + len(piece)] = piece
            at += len(piece)
        if at != length:
            raise CoterieError("the payload is shorter than it says")
        return array(buffer)

    try:
        return read(tree.object_id)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise CoterieError(f"damaged message: {type(e).__name__} {e}") from e
