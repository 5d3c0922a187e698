"""The report shows the numbers of the runs, names its statistics, and is safe to open."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest

import coterie
from coterie.errors import CoterieError
from coterie.results.comparison import Comparison
from coterie.results.discovery import find_runs
from coterie.results.report import content, figures, membership, origin, page
from coterie.results.run import Run
from coterie.storage import atomic as disk

pytestmark = pytest.mark.xdist_group("report")  # the runs are made once
PLAIN = {"clients": 6, "rounds": 3, "join": 1.0, "eval_every": 1, "epochs": 1, "min_size": 10, "checkpoint_every": 3,
         "partition": "dirichlet(0.5)"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    out = tmp_path_factory.mktemp("report") / "c"
    coterie.compare(["fedavg", "fedper", "fedpc"], seeds=2, out=out, workers=2, **PLAIN)
    return find_runs([out])


@pytest.fixture(scope="module")
def html(runs) -> str:
    return page.render(runs, command="coterie report runs -o r.html")


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))


def test_the_page_has_every_section_and_is_self_contained(html) -> None:
    assert [s.id for s in page.SECTIONS if f'<section id="{s.id}"' not in html] == ["items", "confusion"]
    assert "http" not in html and "<link" not in html and "src=" not in html.replace("image.src", "")
    assert "coterie report runs -o r.html" in html and "<main" in html and 'lang="en"' in html
    assert html.count("<table") == html.count("<caption")
    assert "2 seeds (0, 1)" in html and re.search(r"Runs made \d{4}-\d\d-\d\d \d\d:\d\d", html)


def test_gains_are_differences_to_local_only_over_all_seeds(runs) -> None:
    found = content.client_gains(Comparison(runs))["FedPer"]
    expected = {}
    for seed in (0, 1):
        alone, mine = (
            next(r for r in runs if r.title == t and r.settings["seed"] == seed) for t in ("Local-Only", "FedPer")
        )
        expected |= {
            (seed, i): 100 * v for i, v in (mine.clients()["personal/test"] - alone.clients()["personal/test"]).items()
        }
    assert {(s, i) for s, i, _ in found} == set(expected)
    np.testing.assert_allclose([v for *_, v in found], [expected[s, i] for s, i, _ in found], atol=0.006)
    row = next(r for r in content.gain_table(Comparison(runs))["rows"] if r["title"] == "FedPer")
    assert row["up"] + row["same"] + row["down"] == 12 and row["down"] == sum(v < 0 for v in expected.values())


def test_methods_with_the_same_displayed_number_are_ties(runs, monkeypatch) -> None:
    comparison = Comparison(runs)
    table = comparison.table().copy()
    table["personal"] = [0.9001, 0.9004, 0.5, 0.9]
    table["global"] = [np.nan, 0.7, np.nan, np.nan]
    monkeypatch.setattr(Comparison, "table", lambda self: table)
    marks = content.winners(comparison)
    assert marks["personal"] == [table.index[0], table.index[1], table.index[3]] and marks["global"] == [table.index[1]]
    summary = content.summary_table(comparison)
    assert [r["cells"][0]["tie"] for r in summary["rows"]] == [True, True, False, True] and summary["ties"]


def test_clients_have_their_labels_and_their_course(runs, html) -> None:
    found = data_of(html)["groups"][0]["clients"]
    assert set(found) == {"0", "1"}
    first = next(r for r in runs if r.title == "FedAvg" and r.settings["seed"] == 1)
    z = first.evaluation()
    assert found["1"]["labels"] == z["personal/test/total"].tolist()
    assert found["1"]["course"]["FedAvg"]["x"] == [1, 2, 3]
    assert found["1"]["course"]["FedAvg"]["y"][-1] == found["1"]["values"]["FedAvg"]
    share = z["personal/test/hits"].sum(1) / z["personal/test/total"].sum(1)
    np.testing.assert_allclose(found["1"]["values"]["FedAvg"], 100 * share, atol=0.006)


def test_pages_with_many_clients_keep_fewer_rounds(runs, monkeypatch) -> None:
    monkeypatch.setattr(content, "_MOST_NUMBERS", 8 * 6 * 3 - 1)  # eight runs of six clients, not quite three rounds
    assert content.client_data(Comparison(runs))["0"]["course"] == {}


def test_clusters_are_those_of_the_method(runs, html) -> None:
    mine = next(r for r in runs if r.title == "FedPC")
    groups = membership.client_groups(mine)
    expected = figures.groups.cluster_by_client(mine)
    assert {i: name for name, ids in groups.items() for i in ids} == {i: str(k) for i, k in expected.items()}
    assert membership.has_edges(mine) and not membership.has_edges(runs[0])
    assert list(data_of(html)["groups"][0]["clusters"]) == ["FedPC"]


def test_the_command_repeats_the_run(runs, tmp_path) -> None:
    from typer.testing import CliRunner

    from coterie.cli.app import app

    mine = next(r for r in runs if r.title == "FedPer" and r.settings["seed"] == 1)
    words = shlex.split(origin.command(mine))
    assert words[:3] == ["coterie", "run", "fedper"]
    assert (
        CliRunner().invoke(app, [*words[1:], "--workers", "1", "-q", "--out", str(tmp_path / "again")]).exit_code == 0
    )
    again = Run(tmp_path / "again")
    assert again.settings == mine.settings and again.events == mine.events


def test_a_federation_with_data_of_its_devices_has_a_report(runs, tmp_path) -> None:
    pytest.importorskip("grpc")
    from coterie.config import settings
    from coterie.federation.cloud.program import CloudSettings, open_session

    shutil.copytree(runs[0].path, tmp_path / "run")
    cloud = open_session(settings(method="fedavg", clients=6), CloudSettings("certs", shape=(1, 8, 8), classes=10))
    file = tmp_path / "run" / "settings.json"
    disk.write_json(file, {**disk.read_json(file), "partition": cloud.described()["partition"]})
    found = find_runs([tmp_path])
    text = page.render(found)
    assert "<h1>own data: by device, 1 method" in text and "6 clients;" in text and "digits, dirichlet" not in text
    assert origin.command(found[0]) == ""
    with pytest.raises(CoterieError, match="are on the devices of the federation"):
        figures.draw("labels", found)


def test_text_of_users_is_escaped(runs, tmp_path) -> None:
    evil = "<script>alert(1)</script>"
    for r in runs:
        r._title = f"{r.title}{evil}" if r.title == "FedPer" else r._title
    try:
        html = page.render(runs, title=evil, warnings=[evil], command=evil)
    finally:
        for r in runs:
            r._title = r._title.replace(evil, "") if r._title else r._title
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert f"FedPer{evil}" in data_of(html)["groups"][0]["methods"]


def test_figures_without_data_raise_an_error(runs, tmp_path) -> None:
    early = tmp_path / "early"
    shutil.copytree(runs[0].path, early)
    shutil.rmtree(early / "eval")
    shutil.rmtree(early / "checkpoints")
    row = {k: v for k, v in runs[0].events[0].items() if k != "evaluation"} | {"eval": {}, "watch": {}, "loss": None}
    (early / "events.jsonl").write_bytes(disk.seal(row)[0])
    mine = find_runs([early])
    for kind in figures.KINDS:
        if kind in ("bytes", "labels"):
            figures.draw(kind, mine)
        else:
            with pytest.raises(CoterieError, match=r"\w+ \w+"):
                figures.draw(kind, mine, axis="join")


def test_similarity_figures_have_one_scale_and_name_seeds(runs) -> None:
    drawn = figures.draw("similarity", [r for r in runs if r.title in ("FedAvg", "FedPC")])
    images = [a.images[0] for a in drawn.axes if a.images]
    assert {i.get_clim() for i in images} == {(-1, 1)}
    assert {a.get_title().split(":")[0] for a in drawn.axes if a.images} == {
        "FedAvg, seed 0", "FedAvg, seed 1", "FedPC, seed 0", "FedPC, seed 1",
    }  # fmt: skip
    assert all("cosine" in a.get_ylabel() for a in drawn.axes if not a.images)


def test_bars_start_at_zero_and_clients_have_whole_ticks(runs) -> None:
    assert figures.draw("bars", runs).axes[0].get_ylim()[0] == 0
    for axes in figures.draw("clients", runs).axes:
        assert all(t == round(t) for t in axes.get_xticks())


def test_thin_lines_are_the_single_seeds(runs) -> None:
    axes = figures.draw("rounds", runs).axes[0]
    mine = [r.rounds["personal/test/mean"].dropna() * 100 for r in runs if r.title == "FedAvg"]
    thin = [line.get_ydata() for line in axes.get_lines() if line.get_linewidth() < 1]
    assert len(thin) == len(runs)
    assert all(any(np.allclose(y, m) for y in thin) for m in mine)
