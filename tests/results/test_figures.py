"""Figures show the numbers of the runs."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import CoterieError
from coterie.results.discovery import find_runs, grouped
from coterie.results.report import figures, page
from coterie.results.report.figures import bars, curves, groups, style
from coterie.results.run import Run
from coterie.results.statistics import gain_counts
from coterie.storage import atomic as disk

PLAIN = {"clients": 6, "rounds": 4, "join": 1.0, "eval_every": 2, "model": "mlp-bn", "epochs": 1, "min_size": 10,
         "partition": "dirichlet(0.5)", "log_updates": True}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    out = tmp_path_factory.mktemp("figures")
    coterie.compare(["fedavg", "fedper"], seeds=2, out=out / "compare", workers=2, **PLAIN)
    for distance in ("js", "w2", "hellinger"):
        coterie.run("fedcpmd", out=out / "compare" / distance, workers=1, preparation=2, distance=distance, **PLAIN)
    return find_runs([out / "compare"])


def of(runs: list[Run], *titles: str) -> list[Run]:
    return [r for r in runs if r.title in titles]


def test_runs_of_one_method_are_named_by_their_different_settings(runs) -> None:
    assert {r.title for r in runs} == {
        "Local-Only", "FedAvg", "FedPer", "FedCPMD (distance js)", "FedCPMD (distance w2)",
        "FedCPMD (distance hellinger)",
    }  # fmt: skip
    assert {r.group for r in runs} == {"digits, dirichlet(0.5)"}


def test_a_curve_is_the_mean_over_seeds_in_percent(runs) -> None:
    mine = of(runs, "FedAvg")
    frame = curves.over_rounds(runs, "personal/test/mean", 100)
    expected = 100 * np.mean([r.rounds["personal/test/mean"].dropna() for r in mine], axis=0)
    np.testing.assert_allclose(frame["FedAvg"], expected)
    drawn = figures.draw("rounds", runs).axes[0]
    line = next(x for x in drawn.get_lines() if x.get_label() == "FedAvg")
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert list(line.get_xdata()) == [2, 4]


def test_participants_are_drawn_as_running_means_of_ten_rounds() -> None:
    import pandas as pd

    class Long:
        title, group = "x", ""
        column = staticmethod(str)
        rounds = pd.DataFrame({"participants/before/pooled": np.arange(40) / 40}, index=range(1, 41))

    frame = curves.over_rounds([Long()], "participants/before/pooled", 100)
    assert list(frame.index) == list(range(10, 41)) and frame["x"].iloc[0] == pytest.approx(
        100 * np.mean(range(10)) / 40
    )


def test_bytes_add_up_over_links_and_directions(runs) -> None:
    (first, *_) = of(runs, "FedPer")
    frame = curves.megabytes([first])
    total = sum(n for e in first.events for d in e["bytes"].values() for p in d.values() for n in p.values())
    assert frame["FedPer"].iloc[-1] == pytest.approx(total / 1e6)
    assert curves.megabytes(of(runs, "Local-Only"))["Local-Only"].iloc[-1] == 0


def test_aun_is_the_logged_value(runs) -> None:
    (first, *_) = of(runs, "FedCPMD (distance js)")
    line = figures.draw("aun", [first]).axes[0].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), [e["notes"]["aun"] for e in first.events])


def test_gains_are_differences_to_local_only_and_are_counted(runs) -> None:
    frame = bars.client_scores(of(runs, "Local-Only", "FedAvg"))
    per_seed = [r.clients()["personal/test"] for r in of(runs, "FedAvg")]
    assert len(per_seed) > 1 and list(frame.index.names) == ["seed", "client"]
    np.testing.assert_allclose(frame["FedAvg"], 100 * np.concatenate(per_seed))  # client i of two seeds: two clients
    drawn = figures.draw("clients", of(runs, "Local-Only", "FedAvg"))
    gained = frame["FedAvg"] - frame["Local-Only"]
    up, down = gain_counts(gained)
    texts = [t.get_text() for t in drawn.axes[1].get_legend().get_texts()]
    assert f"FedAvg: {up} gain, {down} lose" in texts
    np.testing.assert_allclose(drawn.axes[1].get_lines()[0].get_ydata(), np.sort(gained))


def test_bars_are_means_with_their_spread_over_seeds(runs) -> None:
    frame = bars.heights(runs)
    values = [100 * r.summary()["personal"]["last"] for r in of(runs, "FedPer")]
    assert frame.loc["FedPer", "digits, dirichlet(0.5)"] == pytest.approx(np.mean(values))
    assert frame.loc["FedPer", "± digits, dirichlet(0.5)"] == pytest.approx(np.std(values, ddof=1))
    drawn = figures.draw("bars", runs).axes[0]
    assert sorted(p.get_height() for p in drawn.patches) == pytest.approx(sorted(frame["digits, dirichlet(0.5)"]))


def test_an_axis_is_a_setting_of_run_federation_or_method(runs, tmp_path) -> None:
    more = [coterie.run("fedavg", out=tmp_path / str(j), workers=1, **{**PLAIN, "join": j}) for j in (0.5, 1.0)]
    data = bars.over_axis(grouped(more), "join")["digits"]["FedAvg"]
    assert list(data.index) == [0.5, 1.0]
    np.testing.assert_allclose(data["mean"], [100 * r.summary()["personal"]["last"] for r in more])
    assert bars.position(more[0], "partition") == 0.5 and bars.position(more[0], "clients") == 6
    with pytest.raises(CoterieError, match='no setting "beta"'):
        bars.over_axis(more, "beta")
    with pytest.raises(CoterieError, match="--axis"):
        figures.draw("axis", more)


def test_layers_and_their_agreement(runs) -> None:
    mine = [r for r in runs if "FedCPMD" in r.title]
    for r in mine:
        assert groups.layer_of(r) == {int(k): v for k, v in r.events[-1]["facts"]["layer"].items()}
        assert sum(groups.cluster_sizes(r).values()) == 6
    a, b, c = {0: "x", 1: "x"}, {0: "x", 1: "y"}, {0: "x", 1: "z"}
    assert groups.agreement([a, b, c]) == {0: 3, 1: 1}
    panels = [x for x in figures.draw("layers", mine).axes if x.get_visible()]
    assert len(panels) == len({r.title for r in mine}) + 1
    with pytest.raises(CoterieError, match="no layer map"):
        figures.draw("layers", of(runs, "FedAvg"))


def test_clients_are_sorted_by_cluster_in_the_similarity_figure(runs) -> None:
    run = next(r for r in runs if "FedCPMD" in r.title)
    order, C = groups.cosines(run)
    where = groups.cluster_by_client(run)
    assert sorted(order) == list(range(6)) and [where[i] for i in order] == sorted(where[i] for i in order)
    np.testing.assert_allclose(np.diag(C), 1, atol=1e-9)
    np.testing.assert_allclose(C, C.T)
    _, same = groups.cosines(of(runs, "FedAvg")[0])
    np.testing.assert_allclose(same, 1, atol=1e-6)  # all clients have the global model


def test_names_of_lines_keep_their_order_and_distance() -> None:
    at = style.spread_apart([0.5, 0.5, 0.9, 0.51], 0.1)
    assert at[0] < at[3] < at[2] and min(np.diff(sorted(at))) >= 0.1 - 1e-9
    assert np.mean(at[:2] + at[3:]) == pytest.approx(np.mean([0.5, 0.5, 0.51])) and at[2] == 0.9
    crowd = style.spread_apart([1.0] * 5, 0.1)
    assert max(crowd) <= 1 + 1e-9 and min(np.diff(sorted(crowd))) >= 0.1 - 1e-9


def test_every_kind_is_written_as_png_svg_and_pdf(runs, tmp_path) -> None:
    chosen = {"layers": [r for r in runs if "FedCPMD" in r.title], "sizes": [r for r in runs if "FedCPMD" in r.title]}
    with pytest.raises(CoterieError, match="run it with official = true"):
        figures.draw("official", runs)  # test_paper_metrics.py draws it
    for kind in [k for k in figures.KINDS if k != "official"]:
        mine = chosen.get(kind, runs[:2] if kind == "similarity" else runs)
        png, svg, pdf = figures.save_figure(figures.draw(kind, mine, axis="join"), tmp_path / f"{kind}.png", dpi=40)
        assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()
        assert pdf.read_bytes().startswith(b"%PDF") and b"/FontFile2" in pdf.read_bytes()  # the font is embedded
    with pytest.raises(CoterieError, match=r'not "\.gif"'):
        figures.save_figure(figures.draw("loss", runs), tmp_path / "x.gif")
    with pytest.raises(CoterieError, match='unknown kind of figure "round"; did you mean "rounds"'):
        figures.draw("round", runs)


def test_the_report_shows_every_group_and_paper_table(runs, tmp_path) -> None:
    html = page.render(runs, items=[{
        "paper": "fedcpmd", "item": "table7", "title": "T", "what": "w", "note": "as in the paper", "ours": ["FedPer"],
        "columns": ["method", "printed"], "rows": [["FedPer", "95.71"], ["FedAvg", "77.70"]], "verdicts": ["v1"],
    }])  # fmt: skip
    assert (
        "printed and measured" in html and "95.71" in html and html.count('class="own"') == 1 and "<li>v1</li>" in html
    )
    assert "digits, dirichlet(0.5)" in html


def test_a_folder_of_a_different_version_is_reported(runs, tmp_path) -> None:
    copy = tmp_path / "old"
    shutil.copytree(runs[0].path, copy)
    found = disk.read_json(copy / "settings.json")
    del found["partition"]
    disk.write_json(copy / "settings.json", found)
    with pytest.raises(CoterieError, match="a different version of Coterie"):
        Run(copy)
    with pytest.raises(CoterieError, match="there are no runs"):
        find_runs([Path(tmp_path / "nowhere")])
