"""The one serialiser: what comes back is what was written, to the bit; what was tampered with gets a sentence."""

import json
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.runtimes.workers import Arena
from support.codec_values import values

ARENA = Arena()


# ---- what is written comes back --------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(values)
def test_any_value_survives_the_codec_the_arena_and_a_copy_to_the_bit(value):
    packed = codec.pack(value)
    assert codec.equal(codec.unpack(packed), value)
    assert codec.equal(ARENA.read(ARENA.write(value)), value)
    assert codec.equal(codec.deep_copy(value), value)
    assert bytes(codec.pack(codec.unpack(packed))) == bytes(packed)  # equal values, equal bytes


def test_equal_means_the_same_bits():
    nan, zero = torch.tensor([math.nan]), torch.tensor([0.0])
    assert codec.equal(nan, nan.clone()) and not codec.equal(nan, zero) and not codec.equal(zero, -zero)
    assert not codec.equal(torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max]))
    assert not codec.equal(zero, zero.double()) and not codec.equal({"a": zero}, {"b": zero})
    assert codec.equal(math.nan, float("nan")) and not codec.equal(0.0, -0.0)
    assert not codec.equal(1, True) and not codec.equal(1, 1.0) and not codec.equal({1: 2}, {"1": 2})


def test_views_and_slices_are_written_as_what_they_show():
    big = torch.arange(12.0).reshape(3, 4)
    value = {"row": big[1], "turned": big.T, "again": big[1], "mask": (big > 3).T}
    assert codec.equal(codec.unpack(codec.pack(value)), value)


def test_a_value_comes_back_with_aligned_memory_and_with_its_own_if_asked():
    value = {
        "a": torch.randn(3, 5), "b": [torch.arange(7), torch.empty(0, 4), None, 1.5], 3: {"x": torch.tensor(True)},
        "h": torch.randn(9).to(torch.bfloat16), "t": torch.randn(4, 6).t(), "nan": torch.tensor([float("nan"), -0.0]),
    }  # fmt: skip
    packed = codec.pack(value)
    looks, owns = codec.unpack(packed), codec.unpack(packed, copy=True)
    assert codec.equal(value, looks) and codec.equal(value, owns)
    for back in (looks, owns):
        assert all(t.data_ptr() % codec.ALIGN == 0 for t in codec.tensors_of(back) if t.numel())
    packed[:] = bytes(len(packed))
    assert codec.equal(value, owns) and not codec.equal(value, looks)


# ---- sizes -----------------------------------------------------------------------------------------------------------
def size(value) -> int:
    return len(codec.pack(value))


def test_a_tensor_object_that_occurs_often_is_stored_once_and_comes_back_as_one():
    big = torch.randn(10_000)
    once, often = size([big]), size([big] * 50 + [{"again": big}])
    assert once > 40_000 and often < once + 1000
    assert size([big, big.clone()]) > 80_000  # equal is not the same
    back = codec.unpack(codec.pack([big, {"x": big}]))
    assert back[0] is back[1]["x"]
    copied = codec.deep_copy([big, {"x": big}])
    assert copied[0] is copied[1]["x"] and copied[0] is not big
    assert len(codec.tensors_of([big, {"x": big}])) == 1


@pytest.mark.parametrize("n", [1, 7, 8, 9, 8000])
def test_booleans_take_one_bit_each(n):
    mask = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
    made = codec.encode(mask)
    assert made.size - made.offsets[0] == -(-((n + 7) // 8) // codec.ALIGN) * codec.ALIGN
    assert torch.equal(codec.unpack(codec.pack(mask)), mask)


# ---- what cannot be --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", lambda: 0])
def test_what_a_state_may_not_hold_gets_a_sentence(bad):
    with pytest.raises(CoterieError, match=f"not {type(bad).__name__}"):
        codec.pack({"x": bad})


def test_a_type_of_tensor_that_cannot_be_stored_gets_a_sentence():
    with pytest.raises(CoterieError, match=r"^tensors of type torch.complex64 cannot be stored or sent$"):
        codec.pack([torch.zeros(2, dtype=torch.complex64)])


def test_damaged_or_foreign_data_get_a_sentence(tmp_path):
    blob = codec.pack({"x": torch.ones(3)})
    for broken in (blob[: len(blob) // 2], b"", b"\x80\x04pickle", os.urandom(64)):
        with pytest.raises(CoterieError, match="damaged or foreign"):
            codec.unpack(broken)
    (tmp_path / "f").write_bytes(blob[:-64])
    with pytest.raises(CoterieError, match="cannot be read"):
        codec.read_value(tmp_path / "f")
    with pytest.raises(CoterieError, match=r"none is missing$"):
        codec.read_value(tmp_path / "none")


def forged(skeleton, places=()) -> bytearray:
    """Data whose header says whatever it likes."""
    header = json.dumps([skeleton, list(places)]).encode()
    blob = bytearray(codec.MAGIC + len(header).to_bytes(8, "little") + header)
    return blob + bytes(-len(blob) % codec.ALIGN + 256)


FORGED = {
    "a tensor that is too long": ({"t": 0}, [["float32", [65], 0]]),
    "a tensor behind the end": ({"t": 0}, [["float32", [1], 256]]),
    "two tensors in one place": ([{"t": 0}, {"t": 1}], [["float32", [8], 0], ["float32", [8], 0]]),
    "a tensor out of line": ({"t": 0}, [["float32", [1], 4]]),
    "a negative length": ({"t": 0}, [["float32", [-1], 0]]),
    "a length that is no number": ({"t": 0}, [["float32", ["3"], 0]]),
    "empty, with strides beyond all bounds": ({"t": 0}, [["float32", [0, 2**62, 2**62], 0]]),
    "empty, with a length beyond all bounds": ({"t": 0}, [["bool", [0, 2**70], 0]]),
    "an unknown type": ({"t": 0}, [["complex64", [1], 0]]),
    "a tensor that is not there": ({"t": 3}, []),
    "a tensor of negative number": ({"t": -1}, [["float32", [1], 0]]),
    "an unknown mark": ({"z": 0}, []),
    "two marks": ({"t": 0, "d": {}}, []),
    "an unknown class": ({"c": ["Popen", "true"]}, []),
    "a class without its fields": ({"c": ["Score"]}, []),
    "a class with too many fields": ({"c": ["Score", 1, 2, 3, 4]}, []),
    "a key that cannot be one": ({"p": [[{"d": {}}, 1]]}, []),
    "a list where a dictionary belongs": ({"d": [1]}, []),
    "depth without end": (None, []),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_header_gets_one_sentence(what):
    if what == "depth without end":
        header = b"[" + b"[" * 100_000 + b"]" * 100_000 + b",[]]"
        blob = bytearray(codec.MAGIC + len(header).to_bytes(8, "little") + header)
    else:
        blob = forged(*FORGED[what])
    with pytest.raises(CoterieError, match="damaged or foreign data: ") as e:
        codec.unpack(blob, copy=True)
    assert "\n" not in str(e.value)


SAMPLE = {
    "w": torch.arange(6.0).view(2, 3), "mask": torch.tensor([True, False, True]), "n": [1, 2.5, None, "text"],
    "deep": {7: torch.zeros(0, 4), 8: {"x": torch.tensor(3)}}, "type": torch.int32,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes_give_a_value_or_a_sentence_and_nothing_else(data):
    blob = bytearray(codec.pack(SAMPLE))
    header = 16 + int.from_bytes(blob[8:16], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1) | st.integers(0, len(blob) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        blob = blob[: data.draw(st.integers(0, len(blob)))]
    try:
        codec.unpack(blob)
    except CoterieError as e:
        assert "\n" not in str(e)


# ---- files -----------------------------------------------------------------------------------------------------------
def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "f"
    codec.save(path, {"x": 1})
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        codec.save(path, {"x": 2})
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["f"]


def test_a_file_has_the_rights_asked_for(tmp_path):
    codec.save(tmp_path / "own", {}, mode=0o600)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
