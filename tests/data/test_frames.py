"""Tables: kinds of columns, encodings learnt from training rows, and sentences about tables that cannot be read."""

import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.data.federation import Federation, PartitionSettings, federate
from coterie.data.frames import TABLE_SUFFIXES, read_table, rows_like
from coterie.data.sources import load_dataset
from coterie.data.table import TableColumns, TableEncoding, agree_encoding, measure_rows
from coterie.errors import CoterieError


def ward(n: int = 12) -> pd.DataFrame:
    """Rows of two hospitals; the last row of every four is for testing and holds odd values."""
    test = np.arange(n) % 4 == 3
    return pd.DataFrame(
        {
            "age": np.where(test, 1000.0, np.arange(n)),
            "sex": np.where(test, "x", np.where(np.arange(n) % 2, "m", "f")),
            "smoker": np.arange(n) % 3 == 0,
            "admitted": pd.date_range("2000-01-02", periods=n),
            "died": np.where(np.arange(n) % 3 == 1, "yes", "no"),
            "hospital": np.where(np.arange(n) < n // 2, "a", "b"),
            "part": np.where(test, "test", "train"),
        }
    )


def dealt(frame: pd.DataFrame, **settings: object) -> Federation:
    data = coterie.from_frame(frame, target="died", client="hospital", split="part")
    return federate(data, PartitionSettings(partition="natural", min_size=1, val_share=0, **settings), seed=0)


def encoding(fed: Federation) -> TableEncoding:
    assert fed.dataset.table is not None
    return fed.dataset.table


def column(fed: Federation, name: str) -> np.ndarray:
    """The feature of this name, of all clients' training rows."""
    x = torch.cat([fed.data(i).train.x for i in fed.clients])
    return x[:, encoding(fed).feature_names.index(name)].numpy()


def test_features_are_numbers_then_categories_and_only_training_rows_decide() -> None:
    fed = dealt(ward())
    assert encoding(fed).feature_names == ["age", "smoker", "admitted", "sex=f", "sex=m"]
    ages = np.array([i for i in range(12) if i % 4 != 3], float)
    np.testing.assert_allclose(column(fed, "age"), (ages - ages.mean()) / ages.std(), atol=1e-6)
    days = ages + 1  # days since 2000-01-01
    np.testing.assert_allclose(column(fed, "admitted"), (days - days.mean()) / days.std(), atol=1e-6)
    assert column(fed, "sex=f").tolist() == [float(i % 2 == 0) for i in range(12) if i % 4 != 3]
    unknown = fed.test(0).x[:, 3:]  # the sex of test rows occurs in no training row
    assert not unknown.any()


def test_missing_values_become_the_mean_and_an_indicator() -> None:
    frame = ward()
    frame.loc[[0, 5], "age"] = np.nan
    frame.loc[[1], "sex"] = None
    fed = dealt(frame)
    assert encoding(fed).feature_names[-2:] == ["age is missing", "sex is missing"]
    rows = [i for i in range(12) if i % 4 != 3]
    assert column(fed, "age is missing").tolist() == [float(i in (0, 5)) for i in rows]
    assert column(fed, "age")[[0, rows.index(5)]].tolist() == [0.0, 0.0]
    assert column(fed, "sex is missing").tolist() == [float(i == 1) for i in rows]
    assert column(fed, "sex=f")[1] == column(fed, "sex=m")[1] == 0


def test_columns_without_values_give_no_feature_and_constants_are_zero() -> None:
    frame = ward().assign(empty=np.nan, late=np.where(ward()["part"] == "test", 5.0, np.nan), one=0.1)
    fed = dealt(frame)
    assert encoding(fed).feature_names == ["age", "smoker", "admitted", "one", "sex=f", "sex=m"]
    assert not column(fed, "one").any()
    assert any("no training row of frame has a value in empty, late" in s for s in fed.choices)


def test_scaling_client_takes_the_means_of_each_client() -> None:
    fed = dealt(ward(), scaling="client")
    for i in fed.clients:
        ages = fed.data(i).train.x[:, 0]
        torch.testing.assert_close(ages.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(ages.std(unbiased=False), torch.tensor(1.0))
    assert not np.isclose(column(dealt(ward()), "age")[:3].mean(), 0)
    assert fed.identity["scaling"] == "client" and "scaling" not in dealt(ward()).identity


def test_common_statistics_do_not_depend_on_the_order_or_number_of_clients() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(1e6, 1, 200), "c": rng.choice(list("uvw"), 200), "y": rng.normal(size=200)})
    data = coterie.from_frame(frame, target="y")
    assert data.table is not None
    parts = np.array_split(np.arange(200), 3)
    measured = [measure_rows(data.table, data.x, rows) for rows in parts]
    first, turned = (agree_encoding(data.table, m, False) for m in (measured, measured[::-1]))
    assert first == turned
    assert first.columns[0].std == pytest.approx(frame["a"].std(ddof=0), rel=1e-9)
    assert first.columns[0].mean == math.fsum(frame["a"]) / 200


def test_targets_of_a_regression_are_standardised_and_outputs_come_back() -> None:
    frame = pd.DataFrame({"x": np.arange(40.0), "price": 200_000 + 1000 * np.arange(40.0), "who": ["a", "b"] * 20})
    data = coterie.from_frame(frame, target="price", client="who")
    fed = federate(data, PartitionSettings(partition="natural"), seed=0)
    y = torch.cat([fed.data(i).train.y for i in fed.clients])
    torch.testing.assert_close(y.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    back = encoding(fed).unscale_outputs(fed.dataset.y)
    torch.testing.assert_close(back.flatten(), torch.tensor(frame["price"].to_numpy(np.float32)))
    assert not any("diverge" in note for note in fed.notes)


def test_a_file_a_frame_of_pandas_and_one_of_polars_are_the_same_data(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = ward()
    frame.loc[2, ["age", "sex"]] = None
    frame.to_csv(tmp_path / "ward.csv", index=False)
    frame.to_csv(tmp_path / "ward.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "ward.parquet")
    columns = TableColumns(target="died", client="hospital", split="part")
    files = [load_dataset(str(tmp_path / f"ward{s}"), columns=columns) for s in TABLE_SUFFIXES]
    frames = [
        coterie.from_frame(f, target="died", client="hospital", split="part")
        for f in (frame, polars.from_pandas(frame))
    ]
    assert len({d.digest for d in files + frames}) == 1
    assert files[0].client_names == ("a", "b") and files[0].classes == ("no", "yes")


def test_kinds_of_columns_can_be_named_and_gaps_are_read() -> None:
    frame = pd.DataFrame(
        {"zip": [10.0, np.nan, 20.0], "flag": [True, None, False], "day": ["2001-01-01", "", None], "y": list("aba")}
    ).replace({"day": {"": None}})
    data = coterie.from_frame(frame, target="y", features=["zip:category", "flag", "day"])
    assert data.table is not None
    assert [(c.kind, c.categories) for c in data.table.columns] == [
        ("category", ("10", "20")), ("boolean", ()), ("date", ()),
    ]  # fmt: skip
    assert data.x[0].tolist() == [0.0, 1.0, 366.0] and data.x[1].isnan().all()


def test_new_rows_are_read_by_the_names_of_columns() -> None:
    table = encoding(dealt(ward()))
    rows = rows_like("new", ward()[["admitted", "smoker", "sex", "age"]].iloc[:2].assign(sex=["m", "other"]), table)
    assert rows[:, [0, 1]].tolist() == [[0.0, 1.0], [1.0, -1.0]]
    with pytest.raises(CoterieError, match='new has no column "sex"'):
        rows_like("new", ward().drop(columns="sex"), table)
    with pytest.raises(CoterieError, match='column "age" of new must hold numbers, not "old"'):
        rows_like("new", ward().astype({"age": str}).replace({"age": {"0.0": "old"}}), table)


@pytest.mark.parametrize(
    ("change", "asked", "sentence"),
    [
        (lambda f: f, {"target": "dead"}, 'no column "dead"; its columns are age, sex'),
        (lambda f: f, {"client": "ward"}, 'no column "ward"'),
        (lambda f: f, {"features": ["age", "weight"]}, 'no column "weight"'),
        (lambda f: f, {"features": ["age", "died"]}, '"died" of frame is named twice: as target and as feature'),
        (lambda f: f, {"target": "hospital"}, '"hospital" of frame is named twice: as target and as client'),
        (lambda f: f, {"features": []}, "features names no column of frame"),
        (lambda f: f, {"features": ["age:colour"]}, 'unknown kind of column "colour"; known: boolean, category'),
        (lambda f: f, {"features": ["age:date"]}, '"age" of frame must hold dates such as 2024-12-31, not "0.0"'),
        (lambda f: f, {"features": ["age:boolean"]}, '"age" of frame must hold true and false, not "2"'),
        (lambda f: f, {"target": None}, "target must name the column of frame to predict"),
        (lambda f: f, {"target": 3}, 'no column "3"'),
        (lambda f: f, {"target": "admitted"}, '"admitted" of frame, the target, holds dates; make a number'),
        (lambda f: f.rename(columns={"died": "died, 30 d"}), {"target": "died, 30 d"}, "has a comma in its name"),
        (lambda f: f.rename(columns={"died": "died "}), {}, 'no column "died"; .*, "died "'),
        (lambda f: f.assign(age=[[1, 2]] * 12), {}, r'cells of column "age" of frame hold several values \(list\)'),
        (lambda f: f.assign(age=[1e300, -1e300] * 6), {}, '"age" of frame contains infinite values, or values beyond'),
        (lambda f: f["age"], {}, "is of type Series; a data frame of pandas or polars is needed"),
        (lambda f: f.assign(hospital=f["hospital"].where(f.index > 2)), {}, "the client, has 3 gaps"),
        (lambda f: f.assign(died=f["died"].where(f.index > 0)), {}, "the target, has 1 gap;"),
        (lambda f: f.iloc[:0], {}, "frame has no rows"),
        (lambda f: f.set_axis([*f.columns[:-1], "age"], axis=1), {}, 'two columns called "age"'),
        (lambda f: f.assign(age=[math.inf] * 12), {}, '"age" of frame contains infinite values'),
        (lambda f: f[["died", "hospital"]], {}, "no feature columns besides died, hospital"),
        (lambda f: f.to_dict(), {}, "is of type dict; a data frame of pandas or polars is needed"),
    ],
)
def test_a_frame_that_cannot_be_read_gets_one_sentence(change, asked, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CoterieError, match=sentence):
        coterie.from_frame(change(ward()), **{"target": "died", "client": "hospital", **asked})


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        (
            "age",
            ["n.a.", *"123456789", "10", "11"],
            'holds numbers and texts such as "n.a.", so it is read as 12 categ',
        ),
        ("age", [f"{i},5" for i in range(12)], 'holds numbers and texts such as "0,5"'),
        (
            "sex",
            ["f", "f ", *"mmmmm", *"fffff"],
            '"f" and "f " in column "sex" of frame are taken for different values',
        ),
        ("died", ["yes", "Yes", *["no"] * 10], '"yes" and "Yes" in column "died"'),
        ("hospital", [*["a"] * 6, *["a "] * 6], '"a" and "a " in column "hospital"'),
    ],
)
def test_texts_that_may_not_be_meant_are_noted(column: str, values: list[str], sentence: str) -> None:
    data = coterie.from_frame(ward().assign(**{column: values}), target="died", client="hospital")
    assert len(data.notes) == 1 and sentence in data.notes[0]
    if column == "age":
        assert not coterie.from_frame(ward().assign(age=values), target="died", features=["age:category"]).notes


def test_columns_of_names_and_targets_of_many_texts_are_noted() -> None:
    frame = pd.DataFrame({"name": [f"person {i}" for i in range(30)], "y": [0, 1] * 15})
    assert "30 different texts in 30 rows" in coterie.from_frame(frame, target="y").notes[0]
    assert "30 different texts, each taken for a class" in coterie.from_frame(frame, target="name").target_notes[0]


def test_decimals_are_numbers_and_names_of_columns_may_be_numbers() -> None:
    frame = pd.DataFrame(
        {0: [Decimal("1.5"), None, Decimal("2.5")], "y": [Decimal("0.25"), Decimal("1.5"), Decimal("3")]}
    )
    data = coterie.from_frame(frame, target="y", features=[0])  # type: ignore[list-item]  # a name that is a number
    assert data.kind == "regression" and data.y.flatten().tolist() == [0.25, 1.5, 3.0]
    assert data.x.flatten().nan_to_num(-1).tolist() == [1.5, -1.0, 2.5]


def test_a_column_with_one_value_is_mentioned() -> None:
    assert "all training rows of frame have the same value in one, which" in " ".join(
        dealt(ward().assign(one=7)).choices
    )


def test_new_rows_of_odd_forms_get_one_sentence() -> None:
    table = encoding(dealt(ward()))
    for given, sentence in [
        ({"age": 5, "sex": "f"}, "new must hold a list of values for each column, all of one length"),
        ({"age": [5, 6], "sex": ["f"]}, "all of one length"),
        (pd.concat([ward(), ward()[["age"]]], axis=1), 'two columns called "age"'),
        (np.full((1, 4), np.inf), "new contains infinite values"),
        (ward().assign(smoker=2), '"smoker" of new must hold true and false, not "2"'),
        (ward().assign(smoker="sometimes"), 'must hold true and false, not "sometimes"'),
        (ward().assign(sex=[["f"]] * 12), '"sex" of new hold several values'),
    ]:
        with pytest.raises(CoterieError, match=sentence):
            rows_like("new", given, table)


def test_names_are_not_a_category() -> None:
    frame = pd.DataFrame({"name": [f"person {i}" for i in range(200)], "y": [0, 1] * 100})
    with pytest.raises(CoterieError, match='"name" holds 200 different texts, and a category has at most 100'):
        coterie.from_frame(frame, target="y")


def test_a_file_that_cannot_be_read_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    target = TableColumns(target="y")
    for content, sentence in [
        ("a,b,a\n1,2,3\n", 'two columns called "a"'), ("", "it is empty"), ("a,y\n1,2\n1,2,3\n", "Expected 2 fields"),
        ("a,y\n0,1,2\n1,1,2\n", "rows of .* have 3 cells, and its first line has 2 names"),
    ]:  # fmt: skip
        path.write_text(content)
        with pytest.raises(CoterieError, match=sentence):
            load_dataset(str(path), columns=target)
    path.write_bytes("ort,y\nKöln,1\n".encode("latin-1"))
    with pytest.raises(CoterieError, match="its text is not UTF-8; save it in this encoding"):
        load_dataset(str(path), columns=target)
    with pytest.raises(CoterieError, match=r"missing\.csv does not exist"):
        load_dataset("missing.csv", columns=target)
    path.write_bytes(b"\x89PNG\r\n\0\0\0")
    with pytest.raises(CoterieError, match="cannot be read as a table"):
        load_dataset(str(path), columns=target)
    path.write_text("a,y\n")
    with pytest.raises(CoterieError, match="t has no rows"):
        load_dataset(str(path), columns=target)
    path.write_text("a,y\n1,2\n")
    with pytest.raises(CoterieError, match=r"is a table: name the column to predict \(--target NAME\); .* a, y"):
        load_dataset(str(path))
    (tmp_path / "t.parquet").write_bytes(b"PAR")
    with pytest.raises(CoterieError, match="cannot be read as a Parquet file"):
        load_dataset(str(tmp_path / "t.parquet"), columns=target)
    with pytest.raises(CoterieError, match="target names a column of a table, and digits is none"):
        load_dataset("digits", columns=target)


def test_a_csv_may_have_semicolons_question_marks_and_row_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(";a;y\n0;1;no\n1;?;yes\n2;3;no\n")
    data = load_dataset(str(tmp_path / "t.csv"), columns=TableColumns(target="y"))
    assert data.x.flatten().nan_to_num(-1).tolist() == [1.0, -1.0, 3.0]
    assert data.notes == ("column 1 of t has no name and is left out",)
    assert read_table(tmp_path / "t.csv").shape == (3, 3)
