"""What may cross a link: exact sentences for what may not, words in shapes, declared bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.schema import LARGEST_ENTRY, Entry, NonFiniteError, Schema, class_ids, counts, like
from coterie.core.tree import value_bytes
from coterie.errors import CoterieError

PLAIN = Schema({"w": Entry((2, 3)), "n": Entry((2,), torch.int32, low=0, high=9, part="counts")})
TABLE = Schema(
    {
        "rows": Entry(("labels", 4), kind="prototype", part="prototypes"),
        "ids": class_ids("labels", 10, "prototypes"),
        "amounts": counts("labels", "prototypes"),
        "mask": Entry((17,), torch.bool, part="mask", optional=True),
    },
    {"labels": (1, 10)},
)


def plain(**changes):
    return {"w": torch.zeros(2, 3), "n": torch.tensor([0, 9], dtype=torch.int32), **changes}


def table(n: int, **changes):
    ids = torch.arange(n, dtype=torch.int32)
    return {"rows": torch.zeros(n, 4), "ids": ids, "amounts": ids * 0 + 5, **changes}


# ---- sentences -------------------------------------------------------------------------------------------------------
BEYOND = "larger than anything that still learns"
SENTENCES = {
    "unknown": (PLAIN, plain(x=torch.zeros(1)), "the upload has an entry 'x' that is not declared"),
    "unknown, endless": (PLAIN, plain(**{"x" * 999: 1}), f"the upload has an entry '{'x' * 80}' that is not declared"),
    "missing": (PLAIN, {"w": torch.zeros(2, 3)}, "the upload lacks n"),
    "empty": (PLAIN, {}, "the upload lacks w"),
    "no tensor": (PLAIN, plain(w=[1.0]), "the upload has w that is not a tensor"),
    "type": (PLAIN, plain(w=torch.zeros(2, 3).double()), "the upload has w of type float64, not float32"),
    "integers": (PLAIN, plain(n=torch.zeros(2).long()), "the upload has n of type int64, not int32"),
    "shape": (PLAIN, plain(w=torch.zeros(3, 2)), "the upload has w of shape [3, 2], not [2, 3]"),
    "axes": (PLAIN, plain(w=torch.zeros(6)), "the upload has w of shape [6], not [2, 3]"),
    "scalar": (PLAIN, plain(w=torch.tensor(1.0)), "the upload has w of shape [], not [2, 3]"),
    "nan": (PLAIN, plain(w=torch.full((2, 3), math.nan)), "the upload has NaN or infinity in w"),
    "one nan": (PLAIN, plain(w=torch.tensor([[0, 0, 0], [0, math.nan, 0]])), "the upload has NaN or infinity in w"),
    "infinity": (PLAIN, plain(w=torch.full((2, 3), -math.inf)), "the upload has NaN or infinity in w"),
    "huge": (PLAIN, plain(w=torch.full((2, 3), 2e9)), f"the upload has 2e+09 in w, {BEYOND}"),
    "tiny": (PLAIN, plain(w=torch.full((2, 3), -2e9)), f"the upload has 2e+09 in w, {BEYOND}"),
    "too large": (PLAIN, plain(n=torch.tensor([3, 10]).int()), "the upload has 10 in n, outside 0 to 9"),
    "too small": (PLAIN, plain(n=torch.tensor([-1, 3]).int()), "the upload has -1 in n, outside 0 to 9"),
    "no such class": (TABLE, table(2, ids=torch.tensor([1, 10]).int()), "the upload has 10 in ids, outside 0 to 9"),
    "a class twice": (TABLE, table(2, ids=torch.tensor([1, 1]).int()), "the upload has the same value twice in ids"),
    "negative amount": (
        TABLE, table(2, amounts=torch.tensor([1, -1]).int()), "the upload has -1 in amounts, outside 0 to 2.14748e+09",
    ),
    "too many rows": (TABLE, table(11), "the upload has rows of shape [11, 4], not [labels, 4]"),
    "too few rows": (TABLE, table(0), "the upload has rows of shape [0, 4], not [labels, 4]"),
    "rows that do not agree": (
        TABLE, {**table(3), "ids": torch.arange(2).int()}, "the upload has ids of shape [2], not [labels]",
    ),
}  # fmt: skip

DIVERGED = ("nan", "one nan", "infinity", "huge", "tiny")


@pytest.mark.parametrize("case", SENTENCES)
def test_what_is_not_declared_gets_its_sentence(case):
    schema, tree, sentence = SENTENCES[case]
    with pytest.raises(CoterieError) as e:
        schema.check(tree, "the upload")
    assert str(e.value) == sentence
    assert isinstance(e.value, NonFiniteError) == (case in DIVERGED)


@pytest.mark.parametrize("extra", [{"x": torch.zeros(1)}, {"n": torch.zeros(9).int()}, {"n": 5}])
def test_nan_is_said_only_of_a_payload_that_is_otherwise_what_is_declared(extra):
    """Who counts the bytes of what diverged must be able to rely on its names, types and shapes."""
    tree = {"w": torch.full((2, 3), math.nan), "n": torch.zeros(2).int(), **extra}
    with pytest.raises(CoterieError) as e:
        PLAIN.check(tree, "it")
    assert not isinstance(e.value, NonFiniteError)


# ---- what is allowed -------------------------------------------------------------------------------------------------
def test_words_in_shapes_are_decided_by_the_sender_within_bounds_and_agree():
    for n in (1, 4, 10):
        TABLE.check(table(n), "it")
    TABLE.check(table(3, mask=torch.zeros(17, dtype=torch.bool)), "it")
    two = Schema({"a": Entry(("n", "m")), "b": Entry(("m",))}, {"n": (0, 5), "m": (2, 3)})
    two.check({"a": torch.zeros(0, 2), "b": torch.zeros(2)}, "it")
    with pytest.raises(CoterieError, match=r"^it has b of shape \[3\], not \[m\]$"):
        two.check({"a": torch.zeros(5, 2), "b": torch.zeros(3)}, "it")


def test_nothing_at_all_may_be_sent_only_where_that_is_declared():
    Schema(PLAIN.entries, may_be_empty=True).check({}, "it")
    Schema({}).check({}, "it")
    loose = PLAIN.optional()
    for tree in ({}, {"w": torch.zeros(2, 3)}, plain()):
        loose.check(tree, "it")
    with pytest.raises(CoterieError, match="shape"):
        loose.check({"w": torch.zeros(3)}, "it")


def test_nan_may_mark_what_is_absent_but_infinity_never():
    gaps = Schema({"rows": Entry((3, 2), nan=True, low=-1, high=1)})
    rows = torch.tensor([[math.nan, math.nan], [0.5, -0.5], [1.0, -1.0]])
    gaps.check({"rows": rows}, "it")
    gaps.check({"rows": torch.full((3, 2), math.nan)}, "it")
    for bad, words in ((math.inf, "NaN or infinity in rows"), (1.5, "1.5 in rows, outside -1 to 1")):
        spoiled = rows.clone()
        spoiled[1, 0] = bad
        with pytest.raises(CoterieError, match=words):
            gaps.check({"rows": spoiled}, "it")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_type_of_number_can_be_declared(dtype):
    one = Schema({"x": Entry((4,), dtype)})
    one.check({"x": torch.tensor([1, 0, 1, 1]).to(dtype)}, "it")
    one.check({"x": torch.zeros(4, dtype=dtype)}, "it")


def test_entries_like_a_tree_may_be_summed_if_they_are_numbers_of_a_model():
    tree = {"w": torch.zeros(2, 3), "count": torch.tensor(4), "h": torch.zeros(5).half()}
    made = like(tree)
    assert {k: (e.shape, e.dtype, e.summable) for k, e in made.items()} == {
        "w": ((2, 3), torch.float32, True), "count": ((), torch.int64, False), "h": ((5,), torch.float16, True),
    }  # fmt: skip
    assert not any(e.summable for e in like(tree, "statistic").values())
    assert like(tree, "update", "delta")["w"].part == "delta" and like(tree, optional=True)["w"].optional
    assert (made["w"].low, made["w"].high) == (-LARGEST_ENTRY, LARGEST_ENTRY) == (-1e9, 1e9)


# ---- bytes -----------------------------------------------------------------------------------------------------------
def test_types_weigh_what_they_take_and_booleans_one_bit():
    assert [value_bytes(17, d) for d in (torch.float32, torch.int64, torch.float16, torch.bool)] == [68, 136, 34, 3]
    assert [value_bytes(n, torch.bool) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_declared_bytes_are_those_of_the_payload_under_its_headings():
    assert PLAIN.nbytes() == 24 + 8 and PLAIN.parts(plain()) == {"model": 24, "counts": 8}
    assert TABLE.nbytes(labels=3) == 3 * 16 + 3 * 4 + 3 * 4 + 3
    assert TABLE.nbytes() == TABLE.nbytes(labels=10)  # a word without a value has its largest
    tree = table(3, mask=torch.zeros(17, dtype=torch.bool))
    assert TABLE.parts(tree) == {"prototypes": 3 * 24, "mask": 3}
    assert TABLE.parts({}) == {}
    with pytest.raises(CoterieError, match=r"^'x' may not be sent: the method's schema does not declare it$"):
        TABLE.parts({"x": torch.zeros(1)})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.booleans(), st.integers(0, 99))
def test_what_passes_the_check_has_the_declared_bytes(n, with_mask, seed):
    rng = torch.Generator().manual_seed(seed)
    tree = table(n, rows=torch.randn(n, 4, generator=rng), ids=torch.randperm(10, generator=rng)[:n].int())
    if with_mask:
        tree["mask"] = torch.rand(17, generator=rng) < 0.5
    TABLE.check(tree, "it")
    assert sum(TABLE.parts(tree).values()) == TABLE.nbytes(labels=n) - (0 if with_mask else 3)


def test_two_schemas_join_and_may_be_empty_only_if_both_may():
    both = PLAIN | TABLE
    assert set(both.entries) == {"w", "n", "rows", "ids", "amounts", "mask"} and both.lengths == TABLE.lengths
    both.check({**plain(), **table(2)}, "it")
    assert not (PLAIN.optional() | TABLE).may_be_empty and (PLAIN.optional() | TABLE.optional()).may_be_empty
