"""The content of Flower messages: a head with the kind and the round, and payloads in the federation's own encoding."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from coterie.errors import CoterieError
from coterie.federation.transport import Buffer

MESSAGE_TYPES = {"name": "query", "hello": "query", "over": "query", "train": "train", "score": "evaluate"}
_HEAD, _PAYLOADS = "coterie", "payloads"


def make_records(head: Mapping[str, str | int | bool], **payloads: Buffer | None) -> RecordDict:
    """Return the records of a message. The SuperLink stores equal payloads of several messages once."""
    arrays = {
        name: Array(dtype="uint8", shape=(len(payload),), stype="coterie", data=bytes(payload))
        for name, payload in payloads.items()
        if payload is not None
    }
    return RecordDict({_HEAD: ConfigRecord(dict(head)), _PAYLOADS: ArrayRecord(arrays)})


def read_records(records: Any) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Return head and payloads of a message; raise CoterieError if it is not one of this app."""
    head, payloads = records.get(_HEAD), records.get(_PAYLOADS)
    if not isinstance(head, ConfigRecord) or not isinstance(payloads, ArrayRecord):
        raise CoterieError("the message is not one of Coterie's")
    # a copy, because the codec wants memory that it may write to
    return dict(head), {name: memoryview(bytearray(array.data)) for name, array in payloads.items()}
