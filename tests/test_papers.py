"""The papers' presets: every cell is a valid run, printed values are the papers', and a table reruns side by side."""

import csv
from pathlib import Path

import pytest

from coterie.config import Engine
from coterie.errors import CoterieError
from coterie.papers import presets, side
from coterie.runs.sweep import sweep

ITEMS = [(p, i.name) for p in presets.PAPERS for i in presets.items(p)]


@pytest.mark.parametrize(("paper", "name"), ITEMS)
def test_every_cell_of_every_item_is_a_valid_run(paper: str, name: str) -> None:
    it = presets.item(paper, name)
    for row in it.rows:
        for column in it.columns:
            s = presets.cell(it, row, column, 0, presets.Shrink())
            assert s.settings is not None and presets.statistic(it, column) in side.STATISTICS


@pytest.mark.parametrize(("paper", "name"), [x for x in ITEMS if x[1].startswith("table")])
def test_rows_and_columns_are_those_of_the_printed_table(paper: str, name: str) -> None:
    it = presets.item(paper, name)
    theirs = [r for r in it.rows if not presets.is_ours(it, r)]
    found = {(r, c) for p, i, r, c in presets.printed() if (p, i) == (paper, name)}
    assert {r for r, _ in found} == set(theirs) and {c for _, c in found} <= set(it.columns)


def test_the_protocols_are_the_papers() -> None:
    s = presets.cell(presets.item("fedcpmd", "table7"), "FedFomo", "FMNIST", 0, presets.Shrink())
    assert (s.rounds, s.join, s.epochs, s.batch, s.lr, s.optimizer, s.seed) == (200, 0.1, 5, 32, 0.01, "sgd", 42)
    assert s.federation.val_share == 0.2 and s.federation.test_share == 0.5 and s.federation.cap
    s = presets.cell(presets.item("fedgmh", "table2"), "FedGMH", "Cifar100_ExDir(5,5)", 1, presets.Shrink())
    assert (s.rounds, s.batch, s.epochs, s.lr_decay, s.seed) == (300, 100, 2, 0.99, 1)


def test_shorter_runs_keep_the_share_of_their_phases_and_say_so() -> None:
    shrink = presets.Shrink(rounds=20, subset=500, stand_in={"fmnist": "digits"})
    s = presets.cell(presets.item("fedcpmd", "table7"), "FedCPMD", "FMNIST", 0, shrink)
    assert s.settings["preparation"] == 6 and s.subset == 500 and s.data == "digits"
    assert shrink.words() == ["20 rounds", "500 samples of each data set", "digits instead of fmnist"]
    assert presets.Shrink().words() == []


def test_unknown_names_get_a_sentence() -> None:
    for wrong in (lambda: presets.items("fedcmpd"), lambda: presets.item("fedcpmd", "table77")):
        with pytest.raises(CoterieError, match="did you mean"):
            wrong()
    it = presets.item("fedcpmd", "table7")
    with pytest.raises(CoterieError, match="fmist"):
        presets.choose(it, ["fmist"], [])
    with pytest.raises(CoterieError, match="FedSomething"):
        presets.choose(it, [], ["FedSomething"])


def test_a_table_reruns_side_by_side(tmp_path: Path) -> None:
    it = presets.choose(
        presets.item("fedcpmd", "table7"), ["fmnist"], ["FedAvg", "FedPer", "FedCPMD", "fedcpmd-random"]
    )
    changes = {"clients": 6, "min_size": 10, "model": "mlp-bn", "cap": False}
    shrink = presets.Shrink(rounds=6, changes=changes, stand_in={"fmnist": "digits"})
    cells = presets.cells(it, 2, shrink, tmp_path)
    status = sweep(list(cells.values()), Engine(workers=2))
    assert not status.failed
    from coterie.runs.run import Run

    table = side.frame(it, {k: Run(c.out) for k, c in cells.items()})
    assert list(table["method"]) == ["FedAvg", "FedPer", "FedCPMD", "FedCPMD, random layers"]
    first = table.iloc[0]
    assert first["printed"] == 77.701 and first["difference"] == pytest.approx(first["measured"] - 77.701)
    assert table.iloc[3]["remark"].startswith("ours") and table["std"].notna().all()
    (verdict,) = side.verdicts(it, table)
    assert "FMNIST: rank correlation" in verdict and "over 3 methods" in verdict
    assert "| FedPer | FMNIST | 95.71 |" in side.markdown(table)


def test_columns_of_one_run_share_it(tmp_path: Path) -> None:
    cells = presets.cells(
        presets.choose(presets.item("fedpc", "table4"), ["fmnist"], ["FedPC"]), 1, presets.Shrink(), tmp_path
    )
    assert len(cells) == 6 and len({c.out for c in cells.values()}) == 2


def test_printed_values_are_complete() -> None:
    path = Path(presets.__file__).with_name("printed.csv")
    with path.open() as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == len(presets.printed()) == 1260
    assert presets.printed()["fedgmh", "table2", "FedGMH", "MNIST_ExDir(2,0.5)"].std == 0.15


def test_commas_inside_parentheses_do_not_divide() -> None:
    from coterie.cli.paper import _commas

    assert _commas("mnist, MNIST_ExDir(2,0.5),x") == ["mnist", "MNIST_ExDir(2,0.5)", "x"] and _commas(None) == []
