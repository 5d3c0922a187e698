"""Paired differences to controls: exact small cases, and the choice of pairs."""

import itertools
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.api import comparison_cells
from coterie.config import settings
from coterie.core.tasks import Classification
from coterie.engine.session import Objects, prepare
from coterie.errors import CoterieError
from coterie.methods import controls, method_names
from coterie.results.bootstrap import paired_differences, resampled
from coterie.results.controls import ControlTable, control_tables
from coterie.results.discovery import find_runs
from coterie.results.report import figures, page
from coterie.results.run import Run


class Made:
    """A run with given accuracies: hits of 100 test samples per client, by view."""

    group, last_round, finished, objects, headline = "g", 3, True, Objects(), "personal"
    steps = 100
    task = Classification(1)
    metric = task.metric

    def __init__(self, method: str, seed: int, title: str = "", total: int = 100, newcomers: int = 0, **hits):
        self.title, self.path = title or method, Path(f"{method}-s{seed}")
        self.settings = {"method": method, "seed": seed, "rounds": 3}
        n = len(next(iter(hits.values())))
        self.z = {"clients": np.arange(n), "newcomer": np.arange(n) >= n - newcomers}
        for view, values in hits.items():
            self.z[f"{view}/test/hits"] = np.array(values)[:, None]
            self.z[f"{view}/test/total"] = np.full((n, 1), total)
            self.z[f"{view}/test/loss"] = np.zeros(n)
        self.events = [{"round": 3, "eval": {f"{v}/test": {} for v in hits}, "evaluation": "x"}]

    def evaluation(self, round=None):
        return self.z

    def work(self, view=""):
        return {"steps": self.steps, "samples": 32 * self.steps}


def test_an_interval_is_that_of_all_possible_resamples() -> None:
    """Two seeds of two clients: 4 draws of seeds x 16 of clients, all equally likely."""
    by_seed = [(-20, 60), (10, 31)]  # accuracies in percent
    found: Counter[Fraction] = Counter()
    for first, second in itertools.product(by_seed, repeat=2):
        for a, b in itertools.product(first, repeat=2):
            for c, d in itertools.product(second, repeat=2):
                found[(Fraction(a + b, 2) + Fraction(c + d, 2)) / 2] += 1
    assert sum(found.values()) == 64

    values = np.array([[v / 100 for pair in by_seed for v in pair]])
    seeds = np.array([7, 7, 9, 9])
    means = resampled(values, seeds)
    assert set(np.round(100 * means[:, 0], 6)) == {float(v) for v in found}
    for value, count in found.items():  # frequencies within four standard errors
        share = np.isclose(100 * means[:, 0], float(value)).mean()
        assert abs(share - count / 64) < 4 * np.sqrt(count / 64 * (1 - count / 64) / 10_000)

    def quantile(q: float) -> float:
        below = 0
        for value in sorted(found):
            below += found[value]
            if below / 64 >= q:
                return float(value)
        raise AssertionError

    (d,) = paired_differences(values, seeds)
    assert (100 * d.low, 100 * d.high) == pytest.approx((quantile(0.025), quantile(0.975)))
    assert 100 * d.mean == pytest.approx((20 + 20.5) / 2)
    assert (d.gain, d.lose, d.tie, d.seeds, d.clients) == (3, 1, 0, 2, 4)


def test_the_spread_of_resampled_means_has_its_closed_form_for_unequal_seeds() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.normal(m, 0.1, n) for m, n in ((0.0, 4), (0.1, 9), (0.02, 30))]
    seeds = np.repeat([0, 1, 2], [4, 9, 30])
    shuffled = rng.permutation(len(seeds))  # the order of columns does not matter
    means = resampled(np.concatenate(parts)[None, shuffled], seeds[shuffled])
    between = np.var([p.mean() for p in parts])
    within = np.mean([p.var() / len(p) for p in parts])
    assert means.std() == pytest.approx(np.sqrt((between + within) / 3), rel=0.03)
    assert means.mean() == pytest.approx(np.mean([p.mean() for p in parts]), abs=0.003)


def test_only_the_same_clients_are_paired() -> None:
    ours, theirs = [50, 60, 70, 80, 90, 90], [49, 60, 68, 79, 89, 91]
    local = {s: Made("local", s, personal=theirs) for s in (0, 1)}
    mine = [Made("fedrep", s, personal=ours) for s in (0, 1)]
    (pair,) = ControlTable([*mine, *local.values()]).pairs
    d = pair.difference
    assert (d.gain, d.lose, d.tie) == (8, 2, 2)  # over both seeds; a difference of 0 is a tie
    assert d.mean == pytest.approx(4 / 600) and pair.mean == pytest.approx(440 / 600)
    assert -0.01 < d.low < d.mean < d.high < 0.03

    local[0].z["clients"] = local[0].z["clients"][::-1].copy()  # client 0 and client 5 swap their values
    (other,) = ControlTable([*mine, *local.values()]).pairs
    assert other.difference.mean == pytest.approx(d.mean)  # means do not depend on the pairing
    assert other.difference.high > 2 * d.high and other.difference.gain != d.gain

    turned = [Made("fedrep", 0, personal=ours), Made("local", 0, personal=theirs)]
    for r in turned:  # the same renumbering on both sides changes nothing
        r.z["clients"] = r.z["clients"][::-1].copy()
    straight = [Made("fedrep", 0, personal=ours), Made("local", 0, personal=theirs)]
    a, b = (ControlTable(runs).pairs[0].difference for runs in (turned, straight))
    assert (a.mean, a.gain, a.lose, a.tie) == (b.mean, b.gain, b.lose, b.tie)


def test_with_one_seed_the_interval_covers_clients_only() -> None:
    arena = ControlTable([Made("fedrep", 0, personal=[50, 60]), Made("local", 0, personal=[40, 60])])
    assert arena.pairs[0].difference.covers == "clients" and "clients only" in arena.covers()
    assert np.isnan(arena.pairs[0].std)
    two = ControlTable([Made(m, s, personal=[50, 60]) for m in ("fedrep", "local") for s in (0, 1)])
    assert two.pairs[0].difference.covers == "seeds and clients" and "only" not in two.covers()


def test_newcomers_and_runs_that_diverged_do_not_count() -> None:
    local = [Made("local", s, personal=[40, 60, 1], newcomers=1) for s in (0, 1)]
    mine = [Made("fedrep", s, personal=[50, 60, 99], newcomers=1) for s in (0, 1)]
    mine[1].z["personal/test/loss"][:] = np.nan
    arena = ControlTable([*local, *mine])
    (pair,) = arena.pairs
    assert pair.difference.clients == 2 and pair.difference.mean == pytest.approx(0.05)
    assert any("diverged" in w for w in arena.warnings()) and any("1 common seed" in w for w in arena.warnings())


def test_a_control_with_a_different_budget_is_reported() -> None:
    runs = [Made("fedrep", 0, personal=[50, 60]), Made("local", 0, personal=[40, 50])]
    assert not ControlTable(runs).warnings()
    runs[1].settings["epochs"] = 2
    assert ControlTable(runs).warnings() == ["fedrep and local were trained with different epochs"]


def test_different_test_parts_are_not_paired() -> None:
    arena = ControlTable([Made("fedrep", 0, personal=[50, 60]), Made("local", 0, personal=[40, 50], total=90)])
    assert not arena.pairs and any("test parts of their clients differ" in w for w in arena.warnings())


def test_a_method_is_compared_with_the_usual_controls_and_its_own() -> None:
    names = ["fedpc", "fedpc-random", "fedpc-no-proto", "fedpc-j1", "fedrep", "fedper", "local"]
    runs = [Made(n, 0, personal=[50, 60], trained=[55, 60]) for n in [*names, "fedavg"]]
    met = {row.label: [r.label for r in rivals] for row, rivals in ControlTable(runs).opponents()}
    usual = ["local", "fedavg", "fedavg, trained", "fedper"]
    assert met == {
        "fedpc": [*usual, "fedpc-no-proto", "fedpc-random"], "fedpc-j1": usual, "fedrep": usual,
    }  # fmt: skip
    met = {row.label: [r.label for r in rivals] for row, rivals in ControlTable(runs, view="trained").opponents()}
    assert met["fedrep, trained"] == ["local, trained", "fedavg, trained", "fedper, trained"]
    chosen = ControlTable(runs, against=["fedavg/trained", "fedrep"], methods=["fedpc"])
    assert [(p.row.label, p.against.label) for p in chosen.pairs] == [("fedpc", "fedavg, trained"), ("fedpc", "fedrep")]
    with pytest.raises(CoterieError, match='did you mean "fedper"'):
        ControlTable(runs, against=["fedpr"])
    with pytest.raises(CoterieError, match='did you mean "trained"'):
        ControlTable(runs, view="traned")


def test_a_missing_view_is_reported_and_replaced_by_the_personal_one() -> None:
    runs = [Made("fedrep", 0, personal=[50], adapted=[60]), Made("local", 0, personal=[40])]
    arena = ControlTable(runs, view="adapted")
    assert [(p.row.label, p.against.label) for p in arena.pairs] == [("fedrep, adapted", "local")]
    assert any("local has no adapted model" in w for w in arena.warnings())


def test_controls_that_methods_name_exist_and_are_their_own() -> None:
    named = {n: controls(n) for n in method_names() if controls(n)}
    assert {"fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl"} <= named.keys()
    for name, theirs in named.items():
        assert set(theirs) <= set(method_names()) and name not in theirs
    assert not controls("fedpc-random")  # not inherited


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("arena") / "compare"
    small = {"clients": 4, "rounds": 2, "epochs": 1, "model": "mlp", "partition": "dirichlet(0.5)"}
    found = coterie.compare(["fedrep"], against="fedavg/trained", seeds=2, out=out, workers=2, **small)
    assert found.titles == ["Local-Only", "FedRep", "FedAvg"]
    (pair,) = found.arena().pairs
    assert (pair.row.label, pair.against.label) == ("FedRep", "FedAvg, trained")
    return out


def cells(methods: list[str], against: str | list[str], **more) -> dict[str, dict]:
    found = comparison_cells(methods, "digits", None, 1, Path("nowhere"), against, **more)
    names = [c.settings.method for c in found]
    assert len(names) == len(set(names)) == len({c.out for c in found})
    return {c.settings.method: c.settings for c in found}


USUAL = ["local", "fedavg", "fedavg-ft", "fedper"]


def test_controls_are_added_once() -> None:
    assert [*cells(["fedrep"], "controls")] == ["local", "fedrep", "fedavg", "fedavg-ft", "fedper"]
    assert {*cells(["fedpc", "fedcpmd"], "controls")} == {
        *USUAL, "fedpc", "fedcpmd", "fedpc-no-proto", "fedpc-random", "fedcpmd-random", "fedcpmd-classifier",
    }  # fmt: skip
    assert {*cells(["fedper", "fedpc", "fedpc-random"], "controls")} == {
        *USUAL, "fedpc", "fedpc-no-proto", "fedpc-random",
    }  # fmt: skip
    assert {*cells(["fedrep"], ["ditto", "FedPer", "fedavg/trained"])} == {
        "local", "fedrep", "ditto", "fedper", "fedavg",
    }  # fmt: skip
    with pytest.raises(CoterieError, match='did you mean "fedper"'):
        cells(["fedrep"], ["fedpr"])


def test_a_control_has_the_settings_of_its_method() -> None:
    more = {"fedpc.reading": "text", "fedpc.gamma": 2.0, "fedpc.lr": 0.5, "fedpc-random.lr": 0.25}
    found = cells(["fedpc"], "controls", rounds=3, **more)
    assert found["fedpc"].settings == {"reading": "text", "gamma": 2.0} and found["fedpc"].lr == 0.5
    assert found["fedpc-random"].settings == {"reading": "text", "gamma": 2.0} and found["fedpc-random"].lr == 0.25
    assert found["fedpc-no-proto"].settings == {"reading": "text"} and found["fedpc-no-proto"].lr == 0.5
    assert found["fedper"].lr != 0.5 and {s.rounds for s in found.values()} == {3}
    assert len({s.federation for s in found.values()}) == len({s.seed for s in found.values()}) == 1


def test_a_class_of_the_user_may_name_controls() -> None:
    class Mine(coterie.Method):
        controls = ("fedprox",)

    assert [*cells([Mine], "controls")] == ["local", "Mine", "fedavg", "fedavg-ft", "fedper", "fedprox"]


def test_impossible_controls_are_refused_before_anything_is_trained(cli, tmp_path) -> None:
    args = ["compare", "fedavg", "--against", "fedcpmd-full", "--set", "fedcpmd-full.layer=none", "--rounds", "1"]
    code, _, err = cli(*args, "--out", "c")
    assert code == 2 and 'unknown layer "none"' in err and not list(tmp_path.rglob("events.jsonl"))


def test_a_reading_that_is_not_the_default_is_part_of_the_title() -> None:
    class Described(Run):
        def __init__(self, method: str, title: str, settings: dict, **more):
            self.description = {"settings": {"method": method}, "method": {"title": title, "settings": settings} | more}
            self.description |= {"versions": more.get("versions", {"coterie": "0.1.0"})}
            self._title = ""

    new = {"versions": {"coterie": "0.2.0"}}
    assert Described("fedgmh", "FedGMH", {"reading": "code"}, reading="code", **new).title == "FedGMH (code)"
    assert Described("fedgmh", "FedGMH", {"reading": "paper"}, reading="", **new).title == "FedGMH"
    assert Described("fedper", "FedPer", {}, **new).title == "FedPer"
    # version 0.1 called the mended method by the paper's name
    assert Described("fedpc", "FedPC", {"reading": "mended"}).title == "FedPC (mended in 0.1)"
    assert Described("fedpc", "FedPC", {"reading": "paper"}).title == "FedPC (paper in 0.1)"
    session = prepare(settings("fedgmh", reading="code", clients=4))
    assert session.described()["method"]["reading"] == "code"
    assert prepare(settings("fedavg", clients=4)).described()["method"]["reading"] == ""


def test_finished_runs_are_compared_with_controls_from_their_folders(folder, cli, monkeypatch) -> None:
    code, out, _ = cli("arena", str(folder), "--json")
    rows = json.loads(out)
    assert code == 0 and [r["against"] for r in rows] == ["Local-Only", "FedAvg", "FedAvg"]
    assert [r["against_score"] for r in rows] == ["personal", "personal", "trained"]
    runs = {(r.title, r.settings["seed"]): r.clients() for r in find_runs([folder])}
    gaps = [runs["FedRep", s]["personal/test"] - runs["FedAvg", s]["trained/test"] for s in (0, 1)]
    assert rows[2]["difference"] == pytest.approx(np.mean([g.mean() for g in gaps]))
    assert rows[2]["gain"] == sum((g > 0).sum() for g in gaps) and rows[2]["clients"] == 8
    assert rows[2]["low"] <= rows[2]["difference"] <= rows[2]["high"]

    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli("arena", str(folder), "--against", "fedavg/trained")
    assert code == 0 and "FedAvg, trained" in out and "gain" in out
    assert err == "coterie: FedRep trained 5 times as much as FedAvg, trained (198 and 40 local steps)\n"
    code, out, _ = cli("arena", str(folder), "--markdown")
    assert code == 0 and "| FedAvg, trained |" in out
    code, _, err = cli("arena", str(folder / "fedrep-s0"))
    assert code == 2 and "no method together with a control" in err and len(err.strip().splitlines()) == 1


def test_figure_and_report_show_the_same_pairs(folder, tmp_path) -> None:
    runs = find_runs([folder])
    (arena,) = control_tables(runs)
    axes = figures.draw("arena", runs).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == [p.against.label for p in arena.pairs]
    points = [c.lines[0].get_xdata()[0] for c in axes.containers]
    assert points == pytest.approx([100 * p.difference.mean for p in arena.pairs])
    text = page.write_report([folder], tmp_path / "r.html").read_text()
    assert "Against controls" in text and "FedAvg, trained" in text
    ((_, table),) = arena.readable().items()
    assert all(f">{cell.split()[0]}</td>" in text for cell in table["difference [95 %]"])


def test_rows_with_different_training_are_named_once() -> None:
    rivals = [Made(name, 0, personal=[50, 60]) for name in ("local", "fedrep", "fedper")]
    method, names = Made("ditto", 0, personal=[70, 80]), ["local", "fedrep", "fedper"]
    assert ControlTable([method, *rivals], names).warnings() == []
    method.steps, rivals[2].steps = 210, 200
    assert ControlTable([method, *rivals], names).warnings() == [
        "ditto trained 2.1 times as much as local, fedrep (210 and 100 local steps)"
    ]
