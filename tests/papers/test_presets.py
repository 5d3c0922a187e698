"""The papers' presets: every cell is a valid run, printed values are complete, and a table is rerun and compared."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.config import Engine
from coterie.data import from_arrays
from coterie.data.dataset import Dataset
from coterie.data.federation import federate
from coterie.engine.session import Callbacks
from coterie.errors import CoterieError
from coterie.papers import estimate, output, presets, printed_values, protocol, public_logs
from coterie.results.discovery import find_runs
from coterie.results.grid import sweep
from coterie.results.paper_metrics import best_layers
from coterie.results.report.figures import save_figure
from coterie.results.run import Run
from coterie.results.tables import markdown_table
from coterie.storage import atomic as disk

ITEMS = [(p, i.name) for p in presets.PAPERS for i in presets.items(p)]


@pytest.mark.parametrize(("paper", "name"), ITEMS)
def test_every_cell_of_every_item_is_a_valid_run(paper: str, name: str) -> None:
    it = presets.item(paper, name)
    for row in it.rows:
        for column in it.columns:
            s = presets.cell(it, row, column, 0, presets.Shrink())
            assert s.settings is not None and presets.statistic(it, column) in {
                *printed_values.STATISTICS, *printed_values.RELATIVE
            }  # fmt: skip


@pytest.mark.parametrize(("paper", "name"), [x for x in ITEMS if x[1].startswith("table")])
def test_rows_and_columns_are_those_of_the_printed_table(paper: str, name: str) -> None:
    it = presets.item(paper, name)
    theirs = [r for r in it.rows if not presets.is_ours(it, r)]
    found = {(r, c) for p, i, r, c in presets.printed() if (p, i) == (paper, name)}
    assert {r for r, _ in found} - {it.spread} == set(theirs) and {c for _, c in found} <= set(it.columns)
    data = {c: presets.cell(it, it.rows[0], c, 0, presets.Shrink()).data for c in it.columns}
    assert {data[c] for _, c in found} == set(data.values())  # no data set that the paper does not have


def test_the_protocols_are_the_papers() -> None:
    s = presets.cell(presets.item("fedcpmd", "table7"), "FedFomo", "FMNIST", 0, presets.Shrink())
    assert (s.rounds, s.join, s.epochs, s.batch, s.lr, s.optimizer, s.seed) == (200, 0.1, 5, 32, 0.01, "sgd", 42)
    assert s.federation.val_share == 0.2 and s.federation.test_share == 0.5 and s.federation.cap
    s = presets.cell(presets.item("fedgmh", "table2"), "FedGMH", "Cifar100_ExDir(5,5)", 1, presets.Shrink())
    assert (s.rounds, s.batch, s.epochs, s.lr_decay, s.seed) == (300, 100, 2, 0.99, 1)


def test_shorter_runs_keep_the_share_of_their_phases() -> None:
    shrink = presets.Shrink(rounds=20, subset=500, stand_in={"fmnist": "digits"})
    s = presets.cell(presets.item("fedcpmd", "table7"), "FedCPMD", "FMNIST", 0, shrink)
    assert s.settings["preparation"] == 6 and s.subset == 500 and s.data == "digits"
    it = presets.narrow(presets.item("fedcpmd", "table7"), ["fmnist"], ["FedAvg", "FedCPMD"])
    assert protocol.differences(it, shrink, 1) == [
        "digits instead of fmnist", "500 samples of digits instead of 1,797", "20 rounds instead of 200",
        "clients with at least 2 samples instead of 40", "short = fill instead of redraw",
        "preparation = 6 instead of 60 (FedCPMD)",
        "the FedCPMD row has one distance; the printed values are the best of four on test data",
    ]  # fmt: skip
    mine = presets.Shrink(subset=500, stand_in={"fmnist": "mine.npz"})  # a data set of unknown size
    one = presets.narrow(it, [], ["FedAvg"])
    assert protocol.differences(one, mine, 1) == [
        "mine.npz instead of fmnist", "500 samples of mine.npz", "clients with at least 2 samples instead of 40",
        "short = fill instead of redraw",
    ]  # fmt: skip
    assert protocol.differences(one, presets.Shrink(), 3) == []  # the paper states no number of seeds


def test_as_in_the_paper_is_said_only_without_differences() -> None:
    it = presets.narrow(presets.item("fedgmh", "table2"), ["mnist"], ["FedAvg", "FedGMH"])
    assert it.seeds == 5 and protocol.note(it, presets.Shrink(), 5) == "as in the paper"
    assert protocol.note(it, presets.Shrink(), 1) == "differs from the paper: 1 seed instead of 5"
    for changes, words in (
        ({"eval_every": 5}, "scored every 5 rounds instead of every 1"),
        ({"join": 0.5}, "0.5 of the clients in a round instead of 0.2"),
        ({"cap": True}, "cap = true instead of false"),
    ):
        assert protocol.note(it, presets.Shrink(changes=changes), 5) == f"differs from the paper: {words}"
    ours = presets.narrow(it, [], ["FedGMH"])
    assert "reading = code instead of paper" in protocol.note(ours, presets.Shrink(changes={"reading": "code"}), 5)
    assert presets.item("fedpc", "table4").seeds == 3 and presets.item("ecs-fl", "table2").seeds is None
    local = presets.narrow(presets.item("fedgmh", "table2"), [], ["local"])
    assert protocol.note(local, presets.Shrink(), 5).endswith("the paper has none of these rows")
    svhn = presets.narrow(presets.item("fedcpmd", "table7"), ["svhn"], ["FedAvg"])
    assert protocol.differences(svhn, presets.Shrink(), 1) == ["99,289 samples of svhn instead of 600,000"]
    fedpc = presets.narrow(presets.item("fedpc", "table4"), ["fmnist"], ["FedPC", "FedAvg", "FedPC", "loss as printed"])
    assert protocol.differences(fedpc, presets.Shrink(), 3) == [
        "the mean squared error instead of the printed loss (3), which cannot be trained (FedPC)"
    ]
    text = presets.cell(fedpc, "FedPC, loss as printed", "FMNIST beta=0.3 GM", 0, presets.Shrink())
    assert text.settings == {"reading": "text"} and presets.is_ours(fedpc, "FedPC, loss as printed")
    prr = protocol.note(presets.narrow(presets.item("sc-fpfl", "fig5"), [], ["FedAvg", "PRR-FL"]), presets.Shrink(), 1)
    assert "lr 0.01 without momentum" in prr and prr.endswith("(PRR-FL)")


def test_a_smaller_copy_of_a_data_set_has_smaller_clients() -> None:
    it = presets.narrow(presets.item("fedcpmd", "table7"), ["cifar10"], [])
    shrink = presets.Shrink(held={"cifar10": 25_000})
    assert presets.cell(it, "FedAvg", "CIFAR10", 0, shrink).federation.min_size == 16
    it = presets.narrow(it, [], ["FedAvg"])
    told = ["25,000 samples of cifar10 instead of 60,000", "clients with at least 16 samples instead of 40"]
    assert protocol.differences(it, shrink, 1) == told
    fixed = replace(shrink, changes={"min_size": 40})
    assert presets.cell(it, "FedAvg", "CIFAR10", 0, fixed).federation.min_size == 40
    assert protocol.differences(it, fixed, 1) == [told[0]]
    assert protocol.differences(it, presets.Shrink(held={"cifar10": 60_000}), 1) == []
    ten = presets.cell(presets.item("fedgmh", "table2"), "FedAvg", "Cifar10_ExDir(2,0.5)", 0, shrink)
    assert ten.federation.min_size == 4


@pytest.mark.parametrize(("paper", "name"), [("fedcpmd", "table7"), ("fedpc", "table4"), ("fedgmh", "table2")])
@pytest.mark.parametrize("subset", [2000, 5000])
def test_a_subset_can_be_divided_among_a_hundred_clients(paper: str, name: str, subset: int) -> None:
    it = presets.item(paper, name)
    s = presets.cell(it, "FedAvg", it.columns[0], 0, presets.Shrink(subset=subset))
    size = subset * 5 // 6 if s.federation.pool == "train" else subset
    items = from_arrays(np.zeros((size, 2, 2), np.uint8), np.arange(size) % 10, name="stand-in")
    given = s.federation.model_copy(update={"pool": "merged"})
    assert given.clients == 100 and federate(items, given, s.seed).sizes("all").min() >= given.min_size >= 2


def test_a_method_runs_with_the_protocol_of_its_paper() -> None:
    found = protocol.paper_run("fedgmh", data="mnist")
    it = presets.item("fedgmh", "table2")
    assert found.settings == presets.cell(it, "FedGMH", "MNIST_ExDir(2,0.5)", 0, presets.Shrink())
    assert found.note.startswith("fedgmh table2, FedGMH, MNIST_ExDir(2,0.5): differs from the paper: 1 seed instead of")
    same = protocol.paper_run("fedavg", "fedcpmd", "fmnist")
    assert same.note == "fedcpmd table7, FedAvg, FMNIST: as in the paper" and same.settings.seed == 42
    column = protocol.paper_run("fedrep", "fedgmh", "Cifar10_ExDir(2,5)")
    assert column.settings.federation.partition == "exdir(2,5)" and column.settings.data == "cifar10"
    changed = protocol.paper_run("fedcpmd", data="digits", changes={"rounds": 20, "lr": 0.1})
    assert (changed.settings.rounds, changed.settings.lr, changed.settings.settings["preparation"]) == (20, 0.1, 6)
    for words in (
        "digits instead of cifar10",
        "20 rounds instead of 200",
        "lr = 0.1 instead of 0.01",
        "has one distance",
    ):
        assert words in changed.note
    ours = protocol.paper_run("fedcpmd-random", changes={"batch": 8})
    assert ours.note.endswith("batch = 8 instead of 32; the paper has none of these rows")
    for wrong, words in ((("fedavg", None), "is not a method of the papers"), (("fedpc", "fedgmh"), "it is in fedpc")):
        with pytest.raises(CoterieError, match=words):
            protocol.paper_run(*wrong)


def test_one_run_as_in_the_paper_ends_with_the_papers_statistic(tmp_path: Path) -> None:
    said: list[str] = []
    small = {"model": "mlp", "rounds": 2, "clients": 20, "workers": 1, "out": tmp_path / "run"}
    run = coterie.run("fedgmh", "digits", as_in_paper=True, callbacks=Callbacks(on_info=said.append), **small)
    best = 100 * run.rounds["personal/test/mean"].max()
    words = "is the mean accuracy over clients at its best round; the paper prints 98.66"
    assert said[-1] == f"MNIST_ExDir(2,0.5): {best:.2f} {words}"
    found = protocol.paper_run("fedpc").item.columns  # three statistics of one run
    assert found == ("Cifar10 beta=0.3 GM", "Cifar10 beta=0.3 PMV", "Cifar10 beta=0.3 PML")
    lacks = output.values_of_run(protocol.paper_run("fedpc").item, run)
    assert len(lacks) == 3 and all("this run lacks" in words for words in lacks)


def test_one_run_of_sc_fpfl_has_clusters_and_short_runs_keep_the_share_of_rounds_before_them() -> None:
    found = protocol.paper_run("sc-fpfl")
    assert found.note == "sc-fpfl fig4, SC-FPFL, K=2: as in the paper"
    assert found.settings.federation.partition == "rotate(2)" and found.settings.settings["k0"] == 2
    assert protocol.paper_run("sc-fpfl", data="K=1").settings.federation.partition == "rotate(1)"
    short = protocol.paper_run("sc-fpfl", data="mnist", changes={"rounds": 10})
    assert short.settings.settings["min_round"] == 2
    words = "mnist instead of emnist; 10 rounds instead of 100; min_round = 2 instead of 20"
    assert short.note == f"sc-fpfl fig4, SC-FPFL, K=2: differs from the paper: {words}"
    start = protocol.paper_run("sc-fpfl", changes={"rounds": 10, "cluster_when": "start"})
    assert start.settings.settings == {"k0": 2, "cluster_when": "start"}
    assert protocol.paper_run("cfl", "sc-fpfl", changes={"rounds": 10}).settings.settings == {"first_round": 2}


def test_the_least_client_follows_the_samples_that_the_paper_uses() -> None:
    it = presets.item("sc-fpfl", "fig4")

    def least(**shrink: Any) -> int:
        return presets.cell(it, "SC-FPFL", "K=2", 0, presets.Shrink(**shrink)).federation.min_size

    # the paper takes some 30,000 of 814,255 pictures, and MNIST has as many
    assert least(stand_in={"emnist": "mnist"}) == 10
    assert least(subset=15_500) == 5 and least(subset=100) == 2


def test_unstated_settings_of_sc_fpfl_have_the_values_of_its_runs() -> None:
    for it in presets.items("sc-fpfl"):
        row = "LR=0.05" if it.name == "fig3" else "SC-FPFL"
        run = protocol.flat_settings(presets.cell(it, row, it.columns[0], 0, presets.Shrink()))
        assert {"lambda1", "g", "warmup_epochs"} <= it.unstated.keys()
        assert ("lr" in it.unstated) == (it.name != "fig3")  # which shows three rates
        for name, value in it.unstated.items():
            assert " " in name or value == run[name], name


def test_every_method_of_a_paper_has_a_run_as_in_the_paper() -> None:
    for paper in presets.PAPERS:
        assert protocol.paper_run(paper).settings.method == paper
        for name in {presets.method_of(paper, r) for i in presets.items(paper) for r in i.rows} - {"fedcpmd-assigned"}:
            assert protocol.paper_run(name, paper).settings.method == name
    with pytest.raises(CoterieError, match="coterie paper fedcpmd table4"):
        protocol.paper_run("fedcpmd-assigned")
    given = protocol.paper_run("fedcpmd-assigned", changes={"assignment": ["fc1"] * 100})
    assert given.settings.settings["assignment"] == ["fc1"] * 100


def test_printed_cells_are_counted_by_how_they_are_measured() -> None:
    it = presets.narrow(presets.item("fedgmh", "table2"), ["mnist"], ["FedAvg", "FedGMH"])
    first, second = it.columns
    seeds = {("FedAvg", first): 5, ("FedGMH", first): 4, ("FedAvg", second): 5}
    text = "of 72 printed cells, {} are measured at full size, {} at reduced size, 69 not at all"
    assert protocol.count_cells(it, seeds, presets.Shrink()) == text.format(2, 1)
    assert protocol.count_cells(it, seeds, presets.Shrink(rounds=5)) == text.format(0, 3)
    assert protocol.count_cells(it, seeds, presets.Shrink(held={"mnist": 9000})) == text.format(0, 3)
    assert protocol.count_cells(it, seeds, presets.Shrink(changes={"lr": 0.5})) == text.format(2, 1)
    drawn = presets.item("sc-fpfl", "fig4")
    assert protocol.count_cells(drawn, {}, presets.Shrink()) == "the paper prints no numbers for this item"


def test_a_dry_run_shows_cells_settings_and_time_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "measure", lambda *a: 1e-5)
    monkeypatch.setattr(estimate, "cache_file", lambda: tmp_path / "calibration.json")
    monkeypatch.setattr(estimate.os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    asked = ["paper", "fedcpmd", "table7", "--data", "fmnist", "--methods", "FedAvg,FedCPMD", "--workers", "1"]
    done = CliRunner().invoke(app, [*asked, "--dry-run", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0 and not (tmp_path / "o").exists() and not (tmp_path / "calibration.json").exists()
    words = " ".join(done.output.split())
    for part in ("FedCPMD", "preparation", "60.0", "in all runs: ", "rounds = 200", "2 runs, about", "nothing was run"):
        assert part in words
    assert "This machine is busy" in words
    assert "momentum" not in words  # It is zero in all runs.


@pytest.mark.parametrize("paper", presets.PAPERS)
def test_the_first_table_of_every_paper_has_a_dry_run_with_all_rows(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "measure", lambda *a: 1e-5)
    monkeypatch.setattr(estimate, "cache_file", lambda: tmp_path / "calibration.json")
    first = next(iter(presets.items(paper)))
    done = CliRunner().invoke(app, ["paper", paper, first.name, "--dry-run"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("name", "runs"), [("fig2", "7 runs"), ("table4", "6 runs")])
def test_a_dry_run_counts_the_runs_that_choose_layers(
    name: str, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "measure", lambda *a: 1e-5)
    monkeypatch.setattr(estimate, "cache_file", lambda: tmp_path / "calibration.json")
    done = CliRunner().invoke(app, ["paper", "fedcpmd", name, "--data", "svhn", "--dry-run", "--out", str(tmp_path)])
    assert done.exit_code == 0 and f"{runs}, about" in " ".join(done.output.split())


def test_the_same_setting_is_one_run_in_all_tables_of_fedcpmd() -> None:
    rows = {"table7": "FedCPMD", "table13": "JS", "table14": "gamma_0.1", "table15": "Kp_60", "fig5": "FedCPMD"}
    cells = [presets.cell(presets.item("fedcpmd", i), row, "MNIST", 0, presets.Shrink()) for i, row in rows.items()]
    assert len({protocol.build_method(s.method, s.settings).hp for s in cells}) == 1
    assert len({s.model_dump_json(exclude={"settings"}) for s in cells}) == 1
    assert cells[0].settings["sampler"] == "uniform"


def test_unknown_names_are_refused() -> None:
    for wrong in (lambda: presets.items("fedcmpd"), lambda: presets.item("fedcpmd", "table77")):
        with pytest.raises(CoterieError, match="did you mean"):
            wrong()
    it = presets.item("fedcpmd", "table7")
    with pytest.raises(CoterieError, match="fmist"):
        presets.narrow(it, ["fmist"], [])
    with pytest.raises(CoterieError, match="FedSomething"):
        presets.narrow(it, [], ["FedSomething"])


def test_a_table_is_rerun_and_compared(tmp_path: Path) -> None:
    it = presets.narrow(
        presets.item("fedcpmd", "table7"), ["fmnist"], ["FedAvg", "FedPer", "FedCPMD", "fedcpmd-random"]
    )
    changes = {"clients": 6, "min_size": 10, "model": "mlp-bn", "cap": False}
    shrink = presets.Shrink(rounds=6, changes=changes, stand_in={"fmnist": "digits"})
    cells = presets.cells(it, 2, shrink, tmp_path)
    status = sweep(list(cells.values()), Engine(workers=2))
    assert not status.failed
    table = printed_values.compare_with_printed(it, {k: Run(c.out) for k, c in cells.items()})
    assert list(table["method"]) == ["FedAvg", "FedPer", "FedCPMD", "FedCPMD, random layers"]
    first = table.iloc[0]
    assert first["printed"] == 77.701 and first["difference"] == pytest.approx(first["measured"] - 77.701)
    assert table.iloc[3]["remark"].startswith("ours") and table["std"].notna().all()
    gain, verdict = printed_values.printed_verdicts(it, table)
    best = max(table["measured"].iloc[:2])
    assert gain.startswith(f"FedCPMD minus the best other method: FMNIST {table['measured'].iloc[2] - best:+.3f}")
    assert "FMNIST: rank correlation" in verdict and "over 3 methods" in verdict
    assert "| FedPer | FMNIST | 95.71 |" in markdown_table(printed_values.printed_text(table))


def test_exact_ties_are_called_ties() -> None:
    it = presets.narrow(presets.item("fedcpmd", "table13"), ["fmnist"], [])
    lines = [("JS", 93.5, 80.0), ("Wasserstein", 95.3, 80.0), ("Hellinger", 95.2, 80.0)]
    table = pd.DataFrame([{"method": m, "column": "FMNIST", "printed": p, "measured": v} for m, p, v in lines])
    (verdict,) = printed_values.printed_verdicts(it, table)
    assert "rank correlation not defined" in verdict
    assert verdict.endswith("best: Wasserstein in the paper, a tie of JS, Wasserstein, Hellinger here")


def measured(item: str, rows: dict[str, list[float]]) -> tuple[presets.Item, pd.DataFrame]:
    """Return an item and its table with these measured values, in the order of the item's columns."""
    it = presets.item("fedcpmd", item)
    lines = [
        {"method": m, "column": c, "printed": presets.printed()["fedcpmd", item, m, c].value, "measured": v, "seeds": 1}
        for m, values in rows.items()
        for c, v in zip(it.columns, values, strict=True)
    ]
    return it, pd.DataFrame(lines)


def test_printed_deviations_are_those_of_the_printed_rows() -> None:
    for name in ("table13", "table14"):
        it = presets.item("fedcpmd", name)
        theirs = [r for r in it.rows if not presets.is_ours(it, r)]
        values = {r: [presets.printed()["fedcpmd", name, r, c].value for c in it.columns] for r in theirs}
        _, table = measured(name, values)
        spread = printed_values._spread(it, table.to_dict("records"))
        assert [row["method"] for row in spread] == ["Std."] * 9
        for row in spread:
            misprint = f"Std./{row['column']}" in it.misprints
            assert row["difference"] == pytest.approx(-0.003 if misprint else 0, abs=0.0006)
        assert not any("Std." in line for line in printed_values.printed_verdicts(it, table))


def test_headline_gains_are_means_over_four_data_sets() -> None:
    gains = []
    for name in ("table7", "table10", "table11"):
        it = presets.item("fedcpmd", name)
        theirs = [r for r in it.rows if not presets.is_ours(it, r)]
        values = {r: [presets.printed()["fedcpmd", name, r, c].value for c in it.columns] for r in theirs}
        _, table = measured(name, values | {"FedCPMD": [v + 1 for v in values["FedCPMD"]]})
        each, mean = printed_values.headline_gain(it, table)
        gains.append(mean.split("mean over CIFAR100, CINIC10, SVHN, TinyImageNet: ")[1].split("; ")[:2])
    assert gains == [["+3.190", "printed values: +2.190"], ["+3.089", "printed values: +2.089"],
                     ["+4.963", "printed values: +3.963"]]  # fmt: skip
    assert each.startswith("FedCPMD minus the best other method: CIFAR10 +8.400 (printed values: +7.400)")
    assert printed_values.headline_gain(it, table[table["column"] != "SVHN"])[1:] == []  # not all four were run


def test_gains_of_fedpc_are_those_of_its_table_whatever_its_text_claims() -> None:
    it = presets.item("fedpc", "table4")
    rows = [
        {"method": r, "column": c, "printed": value, "measured": value + (r == "FedPC")}
        for (paper, _, r, c), p in presets.printed().items() if paper == "fedpc" for value in [p.value]
    ]  # fmt: skip
    each, mean = printed_values.headline_gain(it, pd.DataFrame(rows))
    for column, gain in {
        "Cifar10 beta=0.3 PMV": 7.2,
        "FMNIST beta=0.3 PMV": 4.1,
        "Cifar100 beta=0.3 GM": 2.0,
        "Cifar10 beta=1.0 PML": 0.6,
        "Cifar100 beta=1.0 PML": 1.7,
        "FMNIST beta=1.0 PML": 2.8,
    }.items():  # as the text names them
        assert f"{column} {gain + 1:+.3f} (printed values: {gain:+.3f})" in each
    assert mean.startswith("mean over these 18 columns: +4.172; printed values: +3.172; the text claims more than 5")


def test_fedpc_lists_the_choices_that_its_paper_leaves_open() -> None:
    it = presets.item("fedpc", "table4")
    flat = {r: protocol.flat_settings(presets.cell(it, r, it.columns[0], 0, presets.Shrink())) for r in it.rows}
    for name, value in it.unstated.items():
        setting, _, row = name.partition(" of ")
        if name not in ("J", "channels and kernels of the network"):
            assert flat[row or "FedPC"][setting] == value, name
    assert (flat["FedPC"]["J"], flat["FedPC"]["J_max"]) == (None, 10) and it.unstated[
        "J"
    ] == "by silhouette, at most 10"
    assert {"join", "official", "min_size", "eval_every", "pca", "lam of Ditto", "rho of FedNH"} <= it.unstated.keys()


class Curve:
    """A finished run of four rounds with these accuracies of the global model, and a training loss that falls."""

    def __init__(self, *global_: float):
        names = ("global/official/pooled", "global/official/loss", "note/train_loss")
        self.rounds = pd.DataFrame(dict(zip(names, (global_, [4, 3, 2, 1.0], [0.4, 0.3, 0.2, 0.1]), strict=True)))
        self.rounds.index = pd.RangeIndex(1, 5)

    def curve(self, *name: str) -> pd.Series:
        return self.rounds["/".join(name)]


def test_the_figures_that_ecs_fl_prints_in_words_and_losses_are_computed() -> None:
    it = presets.item("ecs-fl", "fig3")
    curves = {"FedAvg": (0.5, 0.5, 0.6, 0.6), "FedProx": (0.1, 0.6, 0.5, 0.7), "ECS-FL": (0.7, 0.5, 0.65, 0.8)}
    runs = {(row, c, 0): Curve(*curves[row]) for row in curves for c in it.columns}
    table = printed_values.compare_with_printed(it, runs)  # type: ignore[arg-type]
    found = {(r["method"], r["column"]): (r["printed"], r["measured"]) for _, r in table.iterrows()}
    assert found["ECS-FL", "FashionMNIST shards ahead from round"] == (10, 3)  # not round 1, after which it fell behind
    assert found["ECS-FL", "CIFAR10 shards lead"] == (2.5, pytest.approx(10))
    assert ("FedAvg", "CIFAR10 shards lead") not in found  # the rivals themselves have none
    behind = {k: Curve(*(1 - x for x in curves[k[0]])) for k in runs}
    lost = printed_values.compare_with_printed(it, behind)  # type: ignore[arg-type]
    assert "not ahead at the end" in set(lost["remark"])

    two = presets.item("ecs-fl", "table2")
    table = printed_values.compare_with_printed(two, {("ECS-FL", c, 0): Curve(0.1, 0.9, 0.2, 0.8) for c in two.columns})  # type: ignore[arg-type]
    losses = {r["column"]: (r["printed"], r["measured"]) for _, r in table.iterrows() if "loss" in r["column"]}
    assert losses["CIFAR10 loss, final"] == (0.038, 0.1) and losses["CIFAR10 loss, best"] == (0.049, 0.3)
    assert losses["CIFAR10 test loss"][1] == 1
    text = printed_values.printed_text(table)
    assert set(text[text["column"] == "CIFAR10 loss, final"]["printed"]) == {"0.038"}


def test_runs_that_never_divided_the_clients_are_remarked() -> None:
    class Finished:
        def __init__(self, **facts: Any):
            self.events = [{"round": t, "facts": facts} for t in range(3)]

        def summary(self) -> dict[str, Any]:
            return {"personal": {"last": 0.5}}

    it = presets.narrow(presets.item("sc-fpfl", "fig4"), ["K=2"], ["FedAvg", "CFL", "SC-FPFL"])
    one, two = Finished(clusters={"0": 0, "1": 0}), Finished(clusters={"0": 0, "1": 1})
    runs = {("FedAvg", "K=2", 0): Finished(), ("CFL", "K=2", 0): two, ("SC-FPFL", "K=2", 0): Finished(clusters={})}
    table = printed_values.compare_with_printed(it, runs)  # type: ignore[arg-type]
    assert list(table["remark"]) == ["", "", "one cluster to the end"]
    runs = {("CFL", "K=2", 0): one, ("CFL", "K=2", 1): two}
    table = printed_values.compare_with_printed(it, runs)  # type: ignore[arg-type]
    assert list(table["remark"]) == ["one cluster to the end in 1 of 2 runs"]


def test_gains_in_words_stand_beside_the_measured_range() -> None:
    it = presets.item("sc-fpfl", "fig4")
    value = {"FedAvg": 80.0, "CFL": 88.0, "PRR-FL": 85.0, "SC-FPFL": 90.0}
    lines = [(m, c, v + 2 * (c == "K=5" and m == "CFL")) for m, v in value.items() for c in ("K=1", "K=2", "K=5")]
    lines += [("FedAvg", "K=1", 0.0)]  # K = 1 is not part of the claim
    table = pd.DataFrame([{"method": m, "column": c, "printed": np.nan, "measured": v} for m, c, v in lines])
    assert printed_values.printed_verdicts(it, table) == [
        "SC-FPFL minus FedAvg, CFL, PRR-FL at K=2, K=5: +0.00 to +10.00 points (+3 to +13 in the paper)",
        "SC-FPFL minus FedAvg, CFL at K=1: +2.00 to +90.00 points (0 in the paper)",
    ]
    some = table[table["method"].isin(["SC-FPFL", "CFL"]) & (table["column"] == "K=2")]
    assert printed_values.printed_verdicts(it, some) == [
        "SC-FPFL minus CFL at K=2: +2.00 to +2.00 points (+3 to +13 in the paper)"
    ]
    assert presets.printed()["sc-fpfl", "fig6", "SC-FPFL", "K=4 clusters after round"].value == 30


@pytest.mark.parametrize(
    ("paper", "row", "column", "subset", "train", "test"),
    [
        ("ecs-fl", "ECS-FL", "FashionMNIST final", None, 60_000, 10_000),
        ("sc-fpfl", "SC-FPFL", "K=2", "21000+10000", 20_000, 10_000),
    ],
)
def test_runs_use_as_many_images_as_the_paper_states(
    paper: str, row: str, column: str, subset: str | None, train: int, test: int
) -> None:
    name = "table2" if paper == "ecs-fl" else "fig4"
    s = presets.cell(presets.item(paper, name), row, column, 0, presets.Shrink())
    assert s.subset == subset
    names = tuple(map(str, range(10)))
    x, y = torch.zeros(70_000, 1, 2, 2, dtype=torch.uint8), torch.arange(70_000) % 10
    pictures = Dataset("pictures", x, y, names, torch.arange(70_000) >= 60_000)
    pictures = pictures.subset(*map(int, subset.split("+"))) if subset else pictures
    federation = federate(pictures, s.federation, 0)
    assert federation.sizes("train").sum() + federation.sizes("val").sum() == train
    assert federation.sizes("test").sum() == test
    assert (federation.public() is None) == (s.federation.public == 0)


def test_given_layers_are_those_with_which_each_client_is_most_accurate(tmp_path: Path) -> None:
    it = presets.narrow(presets.item("fedcpmd", "table5"), ["mnist"], ["Mean-cluster", "Mean-cluster", "pooled"])
    changes = {"clients": 5, "min_size": 10, "model": "mlp-bn", "cap": False}
    shrink = presets.Shrink(rounds=3, changes=changes, stand_in={"mnist": "digits"})
    first = {c.out: c for c in presets.first_cells(it, 1, shrink, tmp_path)}
    assert [c.settings.settings["layer"] for c in first.values()] == ["fc1", "fc2", "classifier"]
    assert presets.cells(it, 1, shrink, tmp_path) == {}  # layers are not known yet
    assert not sweep(list(first.values()), Engine(workers=2)).failed
    runs = {c.settings.settings["layer"]: Run(c.out) for c in first.values()}
    cells = presets.cells(it, 1, shrink, tmp_path)
    assert len(cells) == 2 and len({c.out for c in cells.values()}) == 1
    given = next(iter(cells.values())).settings
    assert given.method == "fedcpmd-assigned" and given.federation.val_share == 0
    for client, layer in enumerate(given.settings["assignment"]):
        scores = {k: r.clients()["personal/val"][client] for k, r in runs.items()}
        assert scores[layer] == max(scores.values())
        assert layer == [k for k in scores if scores[k] == scores[layer]][-1]  # a tie goes to the deepest
    assert presets.statistic(it, "MNIST", "Mean-cluster") == "clusters" != presets.statistic(it, "MNIST")
    two = presets.layer_cells(presets.item("fedcpmd", "table4"), "Mean-cluster", "MNIST", 0, presets.Shrink())
    assert list(two) == ["fc1", "classifier"] and {s.model for s in two.values()} == {"lenet5-2fc"}
    with pytest.raises(CoterieError, match="val_share above 0"):
        best_layers({"fc1": coterie.run("fedcpmd-full", layer="fc1", clients=3, rounds=1, val_share=0,
                                        out=tmp_path / "no", workers=1, epochs=0.1)})  # fmt: skip


def test_the_size_of_a_cluster_stands_beside_the_printed_one(tmp_path: Path) -> None:
    it = presets.narrow(presets.item("fedcpmd", "fig2"), ["cinic10"], ["two linear layers"])
    run = coterie.run(
        "fedcpmd-assigned", clients=3, rounds=1, epochs=0.1, workers=1, out=tmp_path, model="mlp-bn",
        assignment=["fc1", "classifier", "fc1"],
    )  # fmt: skip
    table = printed_values.compare_with_printed(it, {("two linear layers", c, 0): run for c in it.columns})
    assert table["measured"].tolist() == [2, 0, 1]
    assert table["printed"].fillna(-1).tolist() == [79, -1, 21]


def test_columns_of_one_run_share_it(tmp_path: Path) -> None:
    cells = presets.cells(
        presets.narrow(presets.item("fedpc", "table4"), ["fmnist"], ["FedPC"]), 1, presets.Shrink(), tmp_path
    )
    assert len(cells) == 6 and len({c.out for c in cells.values()}) == 2


def test_printed_values_are_complete() -> None:
    path = Path(presets.__file__).with_name("printed.csv")
    with path.open() as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == len(presets.printed()) == 1294
    assert presets.printed()["fedgmh", "table2", "FedGMH", "MNIST_ExDir(2,0.5)"].std == 0.15


def test_commas_inside_parentheses_do_not_separate() -> None:
    from coterie.cli.options import commas

    assert commas("mnist, MNIST_ExDir(2,0.5),x") == ["mnist", "MNIST_ExDir(2,0.5)", "x"] and commas(None) == []


def test_methods_whose_names_have_commas_can_be_chosen() -> None:
    it = presets.item("sc-fpfl", "fig4")
    wanted = ["FedAvg", "SC-FPFL", "clusters first", "SC-FPFL"]
    assert presets.narrow(it, [], wanted).rows == ("FedAvg", "SC-FPFL", "SC-FPFL, clusters first")
    with pytest.raises(CoterieError, match='"clusters last"'):
        presets.narrow(it, [], ["SC-FPFL", "clusters last"])


def test_runs_of_an_earlier_version_with_fewer_settings_are_found_again(tmp_path: Path) -> None:
    it = presets.narrow(presets.item("fedcpmd", "table7"), ["fmnist"], ["FedAvg"])
    (cell,) = presets.cells(it, 1, presets.Shrink(), tmp_path).values()
    old = tmp_path / "fedavg-fmnist-s42-00000000"
    old.mkdir()
    written = cell.settings.model_dump(mode="json")
    del written["log_updates"]
    disk.write_json(old / "settings.json", {"settings": written})
    assert next(iter(presets.cells(it, 1, presets.Shrink(), tmp_path).values())).out == old
    disk.write_json(old / "settings.json", {"settings": {**written, "unheard_of": 1}})
    assert next(iter(presets.cells(it, 1, presets.Shrink(), tmp_path).values())).out == cell.out


def test_an_item_lists_its_needs() -> None:
    needs = presets.needs(presets.item("sc-fpfl", "fig4"))
    assert needs.data == ("emnist",)
    assert needs.more == ("public set of 1,000", "validation part", "official test part")
    assert "validation part for some methods" in presets.needs(presets.item("fedcpmd", "table7")).more
    for paper in presets.PAPERS:
        assert presets.not_experiments(paper).endswith((".", "tests."))


def test_an_estimate_is_samples_times_seconds_over_workers(tmp_path: Path) -> None:
    class Clock:
        def seconds_per_sample(self, s: object) -> float:
            return 2.0

    it = presets.narrow(presets.item("fedcpmd", "table13"), ["fmnist", "cinic10"], ["JS", "Hellinger"])
    sizes = {"fmnist": (600, 400), "cinic10": (6000, 4000)}
    found = estimate.estimate(it, Clock(), sizes, {"fmnist"}, 4)  # type: ignore[arg-type]
    # 200 rounds of a tenth of 500 training samples, five epochs, and two passes over as much test data; eleven scores
    work = 200 * 0.1 * (500 * 5 + 2 * 0.35 * 500) + 10 * 0.35 * 2 * 500 + 500 * 5
    assert found.available == pytest.approx(2 * work * 2.0 * estimate.FACTORS["fedcpmd"] / 4)
    assert found.all == pytest.approx(11 * found.available)
    assert [estimate.duration_text(s) for s in (5, 600, 7200, 1e6)] == ["5 s", "10 min", "2.0 h", "11.6 days"]


def test_a_calibration_is_measured_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = presets.cell(presets.item("fedcpmd", "table7"), "FedAvg", "FMNIST", 0, presets.Shrink())
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(estimate.os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    assert estimate.Calibration(path).seconds_per_sample(s) > 0 and not path.exists()  # a busy machine: not stored
    monkeypatch.setattr(estimate.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    first = estimate.Calibration(path).seconds_per_sample(s)
    assert 0 < first < 1
    monkeypatch.setattr(estimate, "measure", lambda *a: pytest.fail("measured twice"))
    assert estimate.Calibration(path).seconds_per_sample(s) == first
    monkeypatch.setattr(estimate, "measure", lambda *a: 7.0)
    assert estimate.Calibration(path, fresh=True).seconds_per_sample(s) == 7.0
    path.write_text("{")
    assert estimate.Calibration(path).seconds_per_sample(s) == 7.0


class Logged:
    """A run of 200 rounds whose participants score 0.9 and 0.92 in turn."""

    settings: ClassVar = {"data": "fmnist", "federation": {"partition": "dirichlet(0.1)"}}
    path = Path("x")
    rounds = pd.DataFrame(
        {f"participants/{w}/pooled": [0.90, 0.92] * 100 for w in ("before", "after")}, index=range(1, 201)
    )


def test_windows_are_compared_with_the_public_logs() -> None:
    mean, error = public_logs.window(Logged(), "before_191_200")  # type: ignore[arg-type]
    assert mean == pytest.approx(91) and error == pytest.approx(np.std([90, 92] * 5, ddof=1) / np.sqrt(10))
    table = public_logs.compare_with_logs(
        presets.item("fedcpmd", "public"), {("FedAvg", "FMNIST alpha=0.1", 0): Logged()}
    )  # type: ignore[dict-item]
    assert len(table) == 10 and len(public_logs.windows()) == 324
    last = table[table["window"] == "before 191 to 200"].iloc[0]
    assert last["theirs"] == 77.701  # printed for FedAvg in FedCPMD's Table 7
    assert last["apart"] == pytest.approx((91 - 77.701) / (np.sqrt(2) * error)) and not last["within two"]
    assert "FedAvg" in public_logs.log_verdicts(table)[0]


def test_the_public_logs_are_the_source_of_the_printed_tables() -> None:
    names = {"fmnist": "FMNIST", "mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR10"}
    for method in ("FedAvg", "FedProx", "FedRep"):
        for data, column in names.items():
            theirs = public_logs.windows()["0.1", data, method]["before_191_200"]
            assert presets.printed()["fedcpmd", "table7", method, column].value == pytest.approx(theirs, abs=0.01)


def test_an_item_writes_table_report_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_figure, "__defaults__", (30,))  # coarse pictures are drawn faster
    small = ["--rounds", "4", "--instead", "fmnist=digits", "--set", "clients=6", "--set", "min_size=10", "--set",
             "model=mlp-bn", "--set", "cap=false", "--out", str(tmp_path / "o")]  # fmt: skip
    asked = ["paper", "fedcpmd", "table13", "--data", "fmnist", "--methods", "JS,fedcpmd-auto", *small]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    at = tmp_path / "o" / "table13"
    assert {p.name for p in at.iterdir()} == {"item.json", "side.csv", "side.md", "report.html", "figures"}
    assert {p.stem for p in (at / "figures").iterdir()} == {"sizes", "rounds", "bars"}
    html, text = (at / "report.html").read_text(), (at / "side.md").read_text()
    assert "digits instead of fmnist" in text and "4 rounds instead of 200" in text
    assert "as the paper does not state it: min_size = 40, cap = true" in text
    assert "printed and measured" in html and 'class="own"' in html and "FedCPMD, distance auto" in html
    assert [r.title for r in find_runs([at])] == ["JS", "FedCPMD, distance auto"]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("events.jsonl")}
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "o").rglob("events.jsonl")}  # no run was repeated
    assert CliRunner().invoke(app, ["report", str(tmp_path / "o"), "-o", str(tmp_path / "r.html")]).exit_code == 0
    assert "printed and measured" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedcmpd", "table7"], 'unknown paper "fedcmpd"; did you mean "fedcpmd"?'),
        (["list", "fedcmpd"], 'unknown paper "fedcmpd"'),
        (["fedcpmd"], "name a table or figure of fedcpmd"),
        (["fedcpmd", "table77"], 'unknown item of fedcpmd "table77"'),
        (["fedcpmd", "table7", "--data", "fmist"], "fmist"),
        (["fedcpmd", "table7", "--methods", "FedSomething"], "FedSomething"),
        (["fedcpmd", "table7", "--instead", "fmnist"], "--instead takes pairs"),
        (["fedcpmd", "public"], "has no finished run to compare"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CoterieError) as e:
        CliRunner().invoke(app, ["paper", *words, "--out", str(tmp_path)], catch_exceptions=False)
    assert sentence in str(e.value) and "\n" not in str(e.value)


def test_missing_data_are_reported_and_do_not_stop_other_runs(tmp_path: Path) -> None:
    asked = ["paper", "fedcpmd", "fig2", "--data", "cinic10", "--data-dir", str(tmp_path), "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2 and "cinic10" in done.output + (done.stderr or "")
    assert "Traceback" not in done.output


def test_results_of_a_different_version_are_refused(tmp_path: Path) -> None:
    it = presets.narrow(presets.item("fedcpmd", "table7"), ["fmnist"], ["FedAvg"])
    (cell,) = presets.cells(it, 1, presets.Shrink(), tmp_path).values()
    cell.out.mkdir()
    written = {**cell.settings.model_dump(mode="json"), "unheard_of": 1}
    about = {"settings": written, "method": {}, "partition": {}, "versions": {"coterie": "9.9"}}
    disk.write_json(cell.out / "settings.json", about)
    with pytest.raises(CoterieError, match=r"a different version of Coterie \(9\.9\)"):
        cell.finished()


def test_a_default_given_explicitly_is_the_same_run(tmp_path: Path) -> None:
    it = presets.narrow(presets.item("fedcpmd", "table7"), ["fmnist"], ["FedCPMD"])

    def out(**changes: object) -> Path:
        return next(iter(presets.cells(it, 1, presets.Shrink(changes=changes), tmp_path).values())).out

    assert out() == out(distance="js") != out(distance="w2")
    old = tmp_path / "fedcpmd-fmnist-s42-00000000"  # found by its meaning, and continued with its own settings
    old.mkdir()
    written = presets.cell(it, "FedCPMD", "FMNIST", 0, presets.Shrink(changes={"distance": "js"}))
    disk.write_json(old / "settings.json", {"settings": written.model_dump(mode="json")})
    (cell,) = presets.cells(it, 1, presets.Shrink(), tmp_path).values()
    assert (cell.out, cell.settings) == (old, written)
    with pytest.raises(CoterieError, match="distance"):
        out(distance="none of these")
