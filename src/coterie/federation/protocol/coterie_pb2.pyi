from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromNode(_message.Message):
    __slots__ = ("join", "answer", "chunk", "leave")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    answer: Answer
    chunk: bytes
    leave: Leave
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., chunk: _Optional[bytes] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class FromServer(_message.Message):
    __slots__ = ("welcome", "request", "chunk", "permit", "reject")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    request: Request
    chunk: bytes
    permit: Permit
    reject: Reject
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., chunk: _Optional[bytes] = ..., permit: _Optional[_Union[Permit, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("ticket", "max_bytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    max_bytes: int
    def __init__(self, ticket: _Optional[str] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("ticket", "kind", "round", "seconds", "shared_bytes", "own_bytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    kind: str
    round: int
    seconds: float
    shared_bytes: int
    own_bytes: int
    def __init__(self, ticket: _Optional[str] = ..., kind: _Optional[str] = ..., round: _Optional[int] = ..., seconds: _Optional[float] = ..., shared_bytes: _Optional[int] = ..., own_bytes: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("ticket", "kind", "round", "size", "error")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    kind: str
    round: int
    size: int
    error: Error
    def __init__(self, ticket: _Optional[str] = ..., kind: _Optional[str] = ..., round: _Optional[int] = ..., size: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("reason", "no_plan")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_PLAN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    no_plan: bool
    def __init__(self, reason: _Optional[str] = ..., no_plan: bool = ...) -> None: ...

class Permit(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    def __init__(self, ticket: _Optional[str] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("ticket", "reason")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    reason: str
    def __init__(self, ticket: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
