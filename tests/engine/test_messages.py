"""Everything that travels in a round survives the codec; a message that cannot be right gets one sentence."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.edges import Edge
from coterie.core.method import Download, Upload
from coterie.core.schema import Entry, Schema, class_ids, like
from coterie.core.states import STATE_CLASSES
from coterie.core.tasks import Classification
from coterie.data.table import ColumnStatistics
from coterie.engine import codec
from coterie.engine.messages import (
    Job,
    MergeAnswer,
    MergeRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
    SendAnswer,
    SendRequest,
    TrainAnswer,
    TrainRequest,
    TrainResult,
    check_message,
    check_score,
)
from coterie.errors import CoterieError
from coterie.federation.protocol import messages as hosts
from coterie.privacy.secure_sum import messages as secure
from coterie.runtimes.ray import Beside
from coterie.storage import checkpoint
from coterie.storage.client_states import Index
from support.codec_values import values

W = {"0.weight": torch.arange(6.0).view(2, 3), "mask": torch.tensor([True, False, True])}
SCORE = Score({"hits": torch.tensor([1, 0, 2]), "total": torch.tensor([3, 0, 2])}, 1.5)
SCHEMA = Schema({**like(W), "ids": class_ids("labels", 3)}, {"labels": (0, 3)}, may_be_empty=True)
TRAIN = TrainRequest(3, 7, W, {"own": torch.zeros(2)}, 0.25, True, True)
ANSWER = TrainAnswer(3, W, {"alpha": 0.5, "n": 2}, 12, 4, math.nan, SCORE, None, torch.ones(5))
EDGE = Edge(2, (0, 3), {"kept": [1, {"x": torch.ones(2)}]}, Download(W, {3: W}, {2: {"y": torch.zeros(1)}}))
INDEX = Index(torch.tensor([-1, 4]), torch.tensor([0, 2**32 - 1]))
SCORING = ScoreRequest(1, 8, W, {}, W, ("trained", "edge"), True)
MERGE = MergeRequest(EDGE, 7, (0, 3), (TRAIN,), {3: SCHEMA})
MERGED = MergeAnswer(2, {"kept": 1}, W, {"x": 1.0}, (0, 3), 19, {"model": 27}, {"model": 27}, {1: "no"}, (4,))
COLUMN = ColumnStatistics("number", 7, True, 1.5, 2.5)
HELLO, WIRE = hosts.Hello(None, 12), hosts.WireBytes(1, 2, 3, 4)
TABLE = hosts.TableAnswer({"age": COLUMN}, ("age",), "regression", ())
BYTES = torch.arange(4, dtype=torch.uint8)
TERMS, KEYS = secure.SumTerms("s", 3, 0.5), secure.PublicKeys(1, BYTES, BYTES, BYTES, BYTES)
NEIGHBOURS = secure.NeighbourKeys(torch.tensor([True, False]), (KEYS,))
SURVIVORS, WORDS = secure.Survivors((0, 3)), secure.MaskedWords(1, torch.tensor([-1, 2], dtype=torch.int32))
SUMS = (
    TERMS, KEYS, NEIGHBOURS, SURVIVORS, WORDS, secure.SealedShares(1, BYTES), secure.IncomingShares((0, 3), BYTES),
    secure.RevealedShares(1, BYTES), hosts.SignedKeys(KEYS, BYTES, {0: "ab"}),
    hosts.OfferedKeys(NEIGHBOURS, {0: BYTES}), hosts.SumRequest(1, 7, SURVIVORS), hosts.SumAnswer(1, WORDS),
)  # fmt: skip
MESSAGES = {
    m.__class__.__name__: m
    for m in (
        SCORE, TRAIN, ANSWER, EDGE, SCHEMA, INDEX, SCORING, SCHEMA.entries["ids"], EDGE.download,
        MERGE, MERGED, HELLO, WIRE, SendRequest(3, 7), SendAnswer(3, W, 12),
        ScoreAnswer(1, {"personal/test": SCORE, "global/val": replace(SCORE, samples=(W["mask"], W["mask"]))}, 12, W),
        Beside(3), Job(TRAIN, {"own": W}), TrainResult(ANSWER, {"own": W}), Upload(W, {"a": 1.0}, 3, 12),
        checkpoint.Checkpoint(5, "FedAvg", {"w": W}, {2: {}}, INDEX, {"edge-cloud": {"up": {"model": 3}}}, 100, 50),
        hosts.PlanText("{}"), hosts.RunOver("run", 8), hosts.Common(W, None),
        hosts.Attached({"a": HELLO, "b": hosts.Hello(3, 0)}, {"c": "no"}),
        hosts.DeviceJob("run", -1, SCORING),
        hosts.EdgeJob("run", 60.0, {3: "a"}, {3: -1}, (TRAIN, SCORING), (MERGE,)),
        hosts.EdgeAnswer((ANSWER,), {1: "gone"}, (MERGED,), WIRE),
        COLUMN, hosts.TableQuestion("{}"), TABLE, hosts.TableAnswers({"a": TABLE}, {"b": "no"}), *SUMS,
    )
}  # fmt: skip
FROM_AFAR = [
    TrainRequest, TrainAnswer, MergeRequest, MergeAnswer, ScoreRequest, ScoreAnswer, SendRequest, SendAnswer,
    hosts.PlanText, hosts.Hello, hosts.RunOver, hosts.Attached, hosts.Common, hosts.DeviceJob, hosts.EdgeJob,
    hosts.EdgeAnswer, hosts.TableQuestion, hosts.TableAnswer, hosts.TableAnswers, hosts.SumRequest, hosts.SumAnswer,
]  # fmt: skip


def test_no_message_is_forgotten_here():
    assert {
        n
        for n, cls in STATE_CLASSES.items()
        if cls.__module__.startswith("coterie.") and "methods" not in cls.__module__
    } == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_survives_the_codec_to_the_bit(name):
    message = MESSAGES[name]
    back = codec.unpack(codec.pack(message))
    assert type(back) is type(message) and codec.equal(back, message)
    assert codec.equal(codec.deep_copy(message), message)
    assert check_message(back, type(message)) is back  # fields keep their types


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_cannot_be_changed(name):
    with pytest.raises(AttributeError):
        setattr(MESSAGES[name], fields(MESSAGES[name])[0].name, 1)


def test_what_many_requests_share_is_stored_once():
    big = {"w": torch.randn(10_000)}
    one, many = ([TrainRequest(i, 1, big, {"own": torch.ones(1)}) for i in range(n)] for n in (1, 100))
    assert len(codec.pack(many)) < len(codec.pack(one)) + 100 * 300
    back = codec.unpack(codec.pack(many))
    assert len({id(r.shared["w"]) for r in back}) == 1 and len({id(r.own["own"]) for r in back}) == 100


# ---- what came from another host -------------------------------------------------------------------------------------
WRONG = {
    "client as text": (replace(TRAIN, client="3"), "client"),
    "client as truth": (replace(TRAIN, client=True), "client"),
    "client far below": (replace(TRAIN, client=-2), "client"),
    "round without end": (replace(TRAIN, round=2**60), "round"),
    "round as a fraction": (replace(TRAIN, round=1.5), "round"),
    "share as text": (replace(TRAIN, share="all"), "share"),
    "share missing": (replace(TRAIN, share=None), "share"),
    "watch as a number": (replace(TRAIN, watch=1), "watch"),
    "a tree that is a list": (replace(TRAIN, shared=[1]), "shared"),
    "a tree of numbers": (replace(TRAIN, shared={"w": 1.0}), "shared"),
    "a tree with numbered names": (replace(TRAIN, own={1: torch.ones(1)}), "own"),
    "a note of text": (replace(ANSWER, note={"a": "b"}), "note"),
    "a note with tensors": (replace(ANSWER, note={"a": torch.ones(1)}), "note"),
    "a score that is none": (replace(ANSWER, before={"hits": 1}), "before"),
    "a score of lists": (replace(ANSWER, before=replace(SCORE, counts={"hits": [1, 2]})), "before"),
    "senders by name": (replace(MESSAGES["MergeAnswer"], senders=["a"]), "senders"),
    "bytes as fractions": (replace(MESSAGES["MergeAnswer"], up={"model": 0.5}), "up"),
    "reasons for nobody": (replace(MESSAGES["MergeAnswer"], refused={"1": "no"}), "refused"),
    "state as a list": (replace(MESSAGES["MergeAnswer"], state=[1]), "state"),
    "a schema of an unknown kind": (
        replace(MESSAGES["MergeRequest"], schemas={3: Schema({"w": replace(Entry((1,)), kind="gossip")})}),
        "schemas",
    ),
    "requests of another kind": (replace(MESSAGES["MergeRequest"], requests=(SCORING,)), "requests"),
    "scores without names": (replace(MESSAGES["ScoreAnswer"], scores={1: SCORE}), "scores"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_field_of_the_wrong_type_gets_one_sentence(what):
    message, name = WRONG[what]
    kind = type(message)
    with pytest.raises(CoterieError) as e:
        check_message(codec.unpack(codec.pack(message)), kind)
    assert str(e.value) == f"the field {name} of a {kind.__name__} has an impossible value"


def test_another_message_than_expected_gets_one_sentence():
    with pytest.raises(CoterieError, match=r"^expected a TrainAnswer, got a TrainRequest$"):
        check_message(TRAIN, TrainAnswer)
    with pytest.raises(CoterieError, match=r"^expected a TrainAnswer, got a dict$"):
        check_message({"client": 1}, TrainAnswer)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FROM_AFAR), st.data())
def test_any_value_in_any_field_is_right_or_gets_a_sentence(kind, data):
    message = MESSAGES[kind.__name__]
    name = data.draw(st.sampled_from([f.name for f in fields(kind)]))
    sent = replace(message, **{name: data.draw(values)})
    try:
        got = check_message(codec.unpack(codec.pack(sent)), kind)
    except CoterieError as e:
        assert str(e) == f"the field {name} of a {kind.__name__} has an impossible value"
    else:
        assert codec.equal(got, sent)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FROM_AFAR), st.data())
def test_mutated_bytes_give_a_sound_message_or_a_sentence(kind, data):
    blob = bytearray(codec.pack(MESSAGES[kind.__name__]))
    header = 16 + int.from_bytes(blob[8:16], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(8, header - 1))] = data.draw(
            st.sampled_from(b'0123456789-{}[]",:tdpcy nul') | st.integers(0, 255)
        )
    try:
        got = check_message(codec.unpack(blob), kind)
    except CoterieError as e:
        assert "\n" not in str(e)
    else:
        assert type(got) is kind


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        ({"hits": torch.tensor([1, 0])}, r"a score must hold hits of shape \[3\]"),
        ({"total": torch.tensor([[3, 0, 2]])}, r"a score must hold total of shape \[3\]"),
        ({"hits": torch.tensor([1.0, 0.0, 2.0])}, r"a score must hold hits of shape \[3\]"),
        ({"hits": torch.tensor([4, 0, 2])}, "a score cannot have more hits than samples"),
        ({"hits": torch.tensor([-1, 0, 2])}, "a score cannot count fewer than 0 or more than 1000000000 samples"),
        ({"other": torch.tensor([1, 0, 2])}, "a score of classification must hold hits, total"),
    ],
)
def test_a_score_must_be_able_to_be_true(score, sentence):
    check_score(SCORE, Classification(3))
    with pytest.raises(CoterieError, match=f"^{sentence}$"):
        check_score(replace(SCORE, counts={**SCORE.counts, **score}), Classification(3))


def test_a_download_is_what_all_get_and_what_is_for_one():
    assert set(TRAIN.download) == {"0.weight", "mask", "own"}
    asked = replace(TRAIN, own={"mask": torch.zeros(3)})
    assert torch.equal(asked.download["mask"], torch.zeros(3))  # its own goes before what is shared
    up = MESSAGES["MergeAnswer"].as_upload
    assert (up.sender, up.samples, up.note) == (2, 19, {"x": 1.0}) and up.tree is W
