"""Tables lead with the model that a client would use: adapted for methods that fine-tune, otherwise personal."""

import pytest

import coterie
from coterie.board.runs import WatchedRun
from coterie.config import settings
from coterie.results.report import content
from coterie.results.report.figures.bars import client_scores
from coterie.results.report.figures.curves import best_view, over_rounds

SMALL = {"clients": 4, "rounds": 2, "epochs": 1, "model": "mlp", "workers": 1, "subset": 200, "eval_every": 1}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    out = tmp_path_factory.mktemp("headline")
    return coterie.compare(["fedavg", "fedavg-ft"], seeds=2, out=out / "c", **SMALL)


def test_methods_state_the_model_in_use() -> None:
    for method, more, view in (
        ("fedavg", {}, "personal"), ("fedrep", {}, "personal"), ("fedrep", {"final_epochs": 1}, "adapted"),
        ("fedavg-ft", {}, "adapted"), ("fedavg-ft", {"finetune_epochs": 0}, "personal"), ("lp-ft", {}, "adapted"),
        ("per-fedavg", {}, "adapted"), ("fedbabu", {}, "adapted"), ("fedavg-ft", {"headline": "global"}, "global"),
    ):  # fmt: skip
        assert settings(method, **more).headline == view


def test_a_table_leads_with_the_model_in_use_and_names_it_in_each_row(table) -> None:
    frame, text = table.table(), table.readable()
    ft, plain = "FedAvg + fine-tuning", "FedAvg"
    assert list(text.columns[:2]) == ["in use", "model"]
    assert text["model"].to_dict() == {"Local-Only": "personal", plain: "personal", ft: "adapted"}
    assert (
        frame.loc[ft, "in use"]
        == frame.loc[ft, "adapted"]
        != frame.loc[plain, "personal"]
        == frame.loc[plain, "in use"]
    )
    assert frame.loc[ft, "personal"] == frame.loc[plain, "personal"]
    runs = [r for r in table.runs if r.title == ft]
    assert frame.loc[ft, "worst 10%"] == sum(r.summary()["adapted"]["worst10"] for r in runs) / 2  # per seed, then mean


def test_runs_with_one_headline_keep_its_name_as_the_first_column(table) -> None:
    only = coterie.results.comparison.Comparison([r for r in table.runs if r.title != "FedAvg + fine-tuning"])
    assert only.readable().columns[0] == "personal" and "model" not in only.readable()


def test_controls_report_figures_and_board_show_the_model_in_use(table) -> None:
    ft = next(r for r in table.runs if r.title == "FedAvg + fine-tuning")
    pair = next(p for p in table.arena(methods=["fedavg-ft"], against=["fedavg"]).pairs)
    assert (pair.row.view, pair.against.view) == ("adapted", "personal")
    assert pair.row.label == "FedAvg + fine-tuning, adapted"
    scores = ft.clients()["adapted/test"]
    assert (client_scores([ft]).iloc[:, 0].to_numpy() == 100 * scores.to_numpy()).all()
    assert best_view(table.runs) == "in use/test/mean"
    assert over_rounds(table.runs, "in use/test/mean")[ft.title].iloc[-1] == pytest.approx(
        table.table().loc[ft.title, "in use"]
    )
    summary = content.summary_table(table)
    assert [c["name"] for c in summary["columns"][:2]] == ["in use", "model"]
    assert content.cost_data(table)[ft.title]["y"] == pytest.approx(100 * table.table().loc[ft.title, "in use"])
    shown = content.client_data(table)["0"]["values"][ft.title]
    assert shown == [pytest.approx(100 * v, abs=0.01) for v in scores]
    watched = WatchedRun(ft.path, "ft")
    watched.refresh()
    row = watched.snapshot()
    assert row["headline"] == "adapted" and row["score"] == pytest.approx(100 * ft.summary()["adapted"]["last"])
