"""Tables: kinds of columns, encodings learnt from training rows, and sentences about tables that cannot be read."""

import math
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
    with pytest.raises(CoterieError, match='column "age" of new must hold number values'):
        rows_like("new", ward().astype({"age": str}).replace({"age": {"0.0": "old"}}), table)


@pytest.mark.parametrize(
    ("change", "asked", "sentence"),
    [
        (lambda f: f, {"target": "dead"}, 'no column "dead"; its columns are age, sex'),
        (lambda f: f, {"client": "ward"}, 'no column "ward"'),
        (lambda f: f, {"features": ["age", "weight"]}, 'no column "weight"'),
        (lambda f: f, {"features": ["age", "died"]}, '"died" of frame is named both as a feature'),
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


def test_names_are_not_a_category() -> None:
    frame = pd.DataFrame({"name": [f"person {i}" for i in range(200)], "y": [0, 1] * 100})
    with pytest.raises(CoterieError, match='"name" holds 200 different texts, and a category has at most 100'):
        coterie.from_frame(frame, target="y")


def test_a_file_that_cannot_be_read_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    target = TableColumns(target="y")
    for content, sentence in [
        ("a,b,a\n1,2,3\n", 'two columns called "a"'), ("", "it is empty"), ("a,y\n1,2\n1,2,3\n", "Expected 2 fields"),
    ]:  # fmt: skip
        path.write_text(content)
        with pytest.raises(CoterieError, match=sentence):
            load_dataset(str(path), columns=target)
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
