"""A value as a small JSON message and one buffer: what crosses between processes, and lies in shared memory."""

import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.codec import Value, join, split

ALIGN = 64  # as PyTorch's own allocator, so that every runtime computes on equally aligned tensors
Place = tuple[str, list[int], int]  # dtype, shape, first byte


class Packed(NamedTuple):
    message: bytes
    buffer: np.ndarray  # [bytes] uint8


def lay_out(tensors: list[Tensor]) -> tuple[list[Place], int]:
    """Where each tensor goes, and how many bytes there are in all."""
    places: list[Place] = []
    at = 0
    for t in tensors:
        places.append((str(t.dtype).removeprefix("torch."), list(t.shape), at))
        at += -(-t.numel() * t.element_size() // ALIGN) * ALIGN
    return places, at


def fill(buffer: Any, tensors: list[Tensor], places: list[Place]) -> None:
    for t, place in zip(tensors, places, strict=True):
        if t.numel():
            view(buffer, place).copy_(t.detach())


def view(buffer: Any, place: Place) -> Tensor:
    """A tensor on the bytes of the buffer: valid as long as nobody writes there."""
    dtype, shape, at = getattr(torch, place[0]), place[1], place[2]
    n = math.prod(shape)
    return (
        torch.frombuffer(buffer, dtype=dtype, count=n, offset=at).reshape(shape)
        if n
        else torch.zeros(shape, dtype=dtype)
    )


def pack(value: Value) -> Packed:
    skeleton, tensors = split(value)
    places, size = lay_out(tensors)
    buffer = np.empty(size, np.uint8)
    fill(buffer, tensors, places)
    return Packed(json.dumps([skeleton, places]).encode(), buffer)


def unpack(packed: Packed) -> Value:
    """The value with memory of its own."""
    skeleton, places = json.loads(packed[0])
    own = torch.empty(len(packed[1]), dtype=torch.uint8)  # PyTorch's allocator aligns it
    np.copyto(own.numpy(), packed[1])
    return join(skeleton, [view(own.numpy(), place) for place in places])
