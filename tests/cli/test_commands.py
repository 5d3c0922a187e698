"""The command line as a person uses it: results, and one sentence with exit code 2 for every mistake."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from coterie.errors import unknown
from coterie.methods import method_names
from support.methods import METHODS

SMALL = ["--clients", "5", "--rounds", "2", "--epochs", "1", "--workers", "1"]


MISTAKES = {
    "unknown method": (["run", "fedrp"], 'did you mean "fedrep"'),
    "unknown data": (["run", "fedavg", "--data", "digts"], 'did you mean "digits"'),
    "unknown model": (["run", "fedavg", "--model", "mpl"], 'did you mean "mlp"'),
    "unknown setting": (["run", "fedprox", "--set", "mv=1"], 'did you mean "mu"'),
    "setting of another method": (["run", "fedavg", "--set", "head_epochs=1"], "head_epochs"),
    "impossible setting": (["run", "fedprox", "--set", "mu=-1"], "mu"),
    "join 0": (["run", "fedavg", "--join", "0"], "join"),
    "join 2": (["run", "fedavg", "--join", "2"], "join"),
    "more clients than samples": (["run", "fedavg", "--clients", "5000"], "clients"),
    "alpha 0": (["run", "fedavg", "--partition", "dirichlet(0)"], "alpha"),
    "alpha below 0": (["run", "fedavg", "--partition", "dirichlet(-1)"], "alpha"),
    "unknown partition": (["run", "fedavg", "--partition", "dirichlt(1)"], 'did you mean "dirichlet'),
    "model does not fit": (["run", "fedavg", "--model", "lenet5"], "1x8x8"),
    "batch norm missing": (["run", "fedbn", "--model", "mlp"], "batch norm"),
    "compare what cannot run": (
        ["compare", "fedavg", "fedbn", "--model", "mlp"],
        "FedBN needs a model with batch norm",
    ),
    "wrong state": (["run", "fedavg", "--state", "cloud"], "state"),
    "no method": (["run"], "name a method"),
    "missing config": (["run", "--config", "none.toml"], "none.toml"),
    "bad assignment": (["run", "fedavg", "--set", "mu"], "key=value"),
    "resume of nothing": (["run", "--resume", "nowhere"], "no run"),
    "resume with settings": (["run", "fedavg", "--resume", "nowhere"], "leave out"),
    "export of nothing": (["export", "nowhere", "--client", "1"], "no run"),
    "report of nothing": (["report", "nowhere"], "no runs"),
    "runs of nothing": (["runs", "nowhere"], "no runs"),
    "show unknown": (["show", "fedravg"], 'did you mean "fedavg"'),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_sentence_and_writes_nothing(case: str, cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    args, words = MISTAKES[case]
    code, out, err = cli(*args)
    assert code == 2
    assert err.startswith("coterie: ") and words in err and len(err.strip().splitlines()) == 1
    assert not out and not list(tmp_path.iterdir())


def test_a_truncated_data_file_gets_a_sentence(cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    whole = tmp_path / "data" / "set.npz"
    whole.parent.mkdir()
    np.savez(whole, x_train=np.zeros((50, 4), np.float32), y_train=np.arange(50) % 3)
    whole.write_bytes(whole.read_bytes()[:200])
    code, _, err = cli("run", "fedavg", "--data", str(whole), "--out", "out")
    assert code == 2 and "set.npz" in err and len(err.strip().splitlines()) == 1 and not Path("out").exists()


def test_run_writes_a_run_and_json(cli) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = cli(
        "run", "fedrep", *SMALL, "--out", "r", "--json", "--set", "body_epochs=2", "--set", "momentum=0.5"
    )
    found = json.loads(out)
    assert code == 0 and found["finished"] and 0 <= found["personal"]["last"] <= 1
    stored = json.loads(Path("r/settings.json").read_text())
    assert stored["method"]["settings"]["body_epochs"] == 2 and stored["settings"]["momentum"] == 0.5
    assert stored["partition"]["sha256"]


def test_config_file_and_options(cli) -> None:  # type: ignore[no-untyped-def]
    Path("c.toml").write_text(
        'method = "fedprox"\nrounds = 3\nlr = 0.2\n[federation]\nclients = 4\n[settings]\nmu = 0.5\n'
    )
    code, _, err = cli("run", "--config", "c.toml", "--rounds", "1", "--out", "r", "-q", "--workers", "1")
    assert code == 0, err
    stored = json.loads(Path("r/settings.json").read_text())["settings"]
    assert (stored["method"], stored["rounds"], stored["lr"]) == ("fedprox", 1, 0.2)
    assert stored["federation"]["clients"] == 4 and stored["settings"] == {"mu": 0.5}


def test_compare_always_has_local_only(cli) -> None:  # type: ignore[no-untyped-def]
    more = ["--set", "mu=0.3", "--seeds", "2"]
    code, out, err = cli("compare", "fedavg", "fedprox", *SMALL, "--out", "c", "--json", *more)
    assert code == 0, err
    table = json.loads(out)["table"]
    assert list(table) == ["Local-Only", "FedAvg", "FedProx"] and table["FedAvg"]["seeds"] == 2
    assert table["Local-Only"]["MB up"] == 0 and table["FedAvg"]["MB up"] == table["FedProx"]["MB up"] > 0
    assert json.loads(Path("c/fedprox-s1/settings.json").read_text())["settings"]["settings"] == {"mu": 0.3}
    assert Path("c/table.csv").exists() and "FedProx" in Path("c/table.md").read_text()
    code, _, _ = cli("compare", "fedavg", "fedprox", *SMALL, "--out", "c", "-q", *more)
    assert code == 0, "finished cells are skipped"
    code, _, err = cli("compare", "fedavg", *SMALL, "--out", "c", "-q", "--lr", "0.3")
    assert code == 2 and "different settings" in err
    code, out, _ = cli("report", "c", "-o", "page.html")
    page = Path("page.html").read_text()
    assert code == 0 and "FedProx" in page and "http" not in page.replace("http-equiv", "")


def test_compare_gives_all_methods_what_one_of_them_needs(cli) -> None:  # type: ignore[no-untyped-def]
    code, out, err = cli("compare", "fedbn", "sc-fpfl-no-agent", *SMALL, "--rounds", "1", "--out", "c")
    assert code == 0 and "batch norm (needed by FedBN)" in out and "public set" in out, err
    assert "not comparable" not in err
    found = [json.loads(p.read_text()) for p in Path("c").glob("*/settings.json")]
    assert len(found) == 3 and len({f["partition"]["sha256"] for f in found}) == 1
    assert {f["settings"]["model"] for f in found} == {"default-bn"}
    assert len({f["parameters"] for f in found}) == 1


@pytest.mark.parametrize("name", ["fedbn", "fedap", "sc-fpfl"])
def test_a_method_runs_with_nothing_but_its_name_and_says_what_was_chosen(name: str, cli) -> None:  # type: ignore[no-untyped-def]
    code, out, err = cli("run", name, *SMALL[2:])
    assert code == 0 and (" needs a model with batch norm: mlp-bn" in out or " needs a public set: 200" in out), err


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_nothing_but_its_name(name: str, cli) -> None:  # type: ignore[no-untyped-def]
    code, _, err = cli("run", name, "--rounds", "2")
    assert code == 0, err


def test_compare_gives_a_marked_setting_to_one_method(cli) -> None:  # type: ignore[no-untyped-def]
    sets = ["--set", "mu=0.3", "--set", "fedap.mu=0.6", "--set", "fedprox.lr=0.2"]
    code, _, err = cli("compare", "fedap", "fedprox", *SMALL, "--model", "mlp-bn", "--out", "c", "-q", *sets)
    assert code == 0, err
    found = {m: json.loads(Path(f"c/{m}-s0/settings.json").read_text())["settings"] for m in ("fedap", "fedprox")}
    assert found["fedap"]["settings"]["mu"] == 0.6 and found["fedprox"]["settings"]["mu"] == 0.3
    assert found["fedap"]["lr"] != 0.2 and found["fedprox"]["lr"] == 0.2
    code, _, err = cli("compare", "fedap", *SMALL, "--set", "fedprx.mu=1", "-q")
    assert code == 2 and "fedprx" in err


def test_export_gives_a_model_that_scores_as_recorded(cli) -> None:  # type: ignore[no-untyped-def]
    import torch

    import coterie

    cli("run", "fedper", *SMALL, "--out", "r", "-q")
    code, out, _ = cli("export", "r", "--client", "3")
    assert code == 0 and "coterie.load_model('r/client-3.safetensors')" in out
    run = coterie.open_run("r")
    model, test = run.personal(3), run.session().federation.test(3)
    with torch.no_grad():
        accuracy = (model(test.x).argmax(1) == test.y).float().mean()
    assert float(accuracy) == pytest.approx(float(run.clients().loc[3, "personal/test"]))
    assert model.state_dict().keys() == load_file("r/client-3.safetensors").keys()
    with torch.no_grad():
        assert torch.equal(coterie.load_model("r/client-3.safetensors")(test.x), model(test.x))


@pytest.mark.parametrize("what", ["methods", "data", "models"])
def test_lists(what: str, cli) -> None:  # type: ignore[no-untyped-def]
    name = {"methods": "fedrep", "data": "tinyimagenet", "models": "lenet5"}[what]
    code, out, _ = cli("list", what)
    assert code == 0 and name in out
    code, out, _ = cli("list", what, "--json", "--search", name)
    assert code == 0 and name in [row["name"] for row in json.loads(out)]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    from coterie.cli import screen

    return lambda n: monkeypatch.setattr(screen.console, "width", n)


@pytest.mark.parametrize("width", [80, 200])
def test_methods_are_folded_filtered_and_fit_the_screen(width: int, cli, columns) -> None:  # type: ignore[no-untyped-def]
    columns(width)
    code, out, _ = cli("list", "methods", "--family", "clusters", "--bytes")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines[:-1])) <= width
    assert "fedcpmd (+" in out and "fedcpmd-random" not in out and "fedavg" not in out and "KB up" in out
    row = next(line for line in lines if " cfl " in line)
    assert "18.8" in row and ("the cluster" in row) == (width == 200)
    assert json.loads(cli("list", "methods", "--variants", "--json", "--search", "fedcpmd-random")[1])


def test_bytes_of_a_method_that_needs_batch_norm_are_of_a_model_with_it(cli) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(cli("list", "methods", "--bytes", "--json", "--search", "fedbn")[1])
    assert float(found[0]["KB up"]) > 0


def test_an_unknown_family_is_told_the_families(cli) -> None:  # type: ignore[no-untyped-def]
    code, _, err = cli("list", "methods", "--family", "zebra")
    assert code == 2 and "clusters" in err


def test_show_names_idea_paper_and_settings(cli) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = cli("show", "fedrep")
    assert code == 0 and "Collins" in out and "head_epochs" in out and "head stays on the client" in out


@pytest.mark.parametrize("name", method_names())
def test_show_speaks_of_no_python_internals(name: str, cli, columns) -> None:  # type: ignore[no-untyped-def]
    columns(200)
    code, out, _ = cli("show", name)
    assert code == 0
    for word in ("Union", "Annotated", "FieldInfo", "Literal", "Ge(", "Gt(", "NoneType", "<class"):
        assert word not in out, word


def test_version_and_names(cli) -> None:  # type: ignore[no-untyped-def]
    import coterie

    code, out, _ = cli("--version")
    assert code == 0 and out.strip() == f"coterie {coterie.__version__}"
    assert {"run", "compare", "Method", "__version__"} <= set(dir(coterie))
    assert all(hasattr(coterie, name) for name in dir(coterie))


def test_runs_are_sorted_dated_and_fit_80_columns(cli, columns) -> None:  # type: ignore[no-untyped-def]
    columns(80)
    for name in ("first-run-with-a-rather-long-name-for-a-folder", "b"):
        assert cli("run", "local", *SMALL, "--rounds", "1", "--out", f"runs/{name}", "-q")[0] == 0
    os.utime("runs/b/settings.json", (1e9, 1e9))
    code, out, _ = cli("runs")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert out.index("first-run") < out.index("2001-09-09") and "Local-Only" in out and "1/1" in out
    by_name = json.loads(cli("runs", "--sort", "name", "--json")[1])
    assert [Path(r["run"]).name[0] for r in by_name] == ["b", "f"] and 0 <= by_name[0]["value"] <= 1


@pytest.mark.parametrize(
    ("typed", "known_names", "hint"),
    [
        ("mv", ["mu", "pool"], 'did you mean "mu"'),
        ("mpl", ["mlp", "lenet5"], 'did you mean "mlp"'),
        ("dir", ["exdir", "dirichlet"], 'did you mean "dirichlet"'),
        ("foo", ["pool", "mu"], "known: mu, pool"),
        ("resnet18", ["lenet5", "mlp"], "known: lenet5, mlp"),
        ("head-epochs", ["head_epochs"], 'did you mean "head_epochs"'),
    ],
)
def test_hints_are_close_or_list_the_choices(typed: str, known_names: list[str], hint: str) -> None:
    assert hint in str(unknown("name", typed, known_names))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["list", "data", "--family", "split"], "are for methods; leave them out for data"),
        (["paper", "fedpc", "table4", "--dry-run", "--methods", ""], "--methods names nothing; leave it out for all"),
        (["compare", "fedavg", "--also", "zebra"], 'unknown column "zebra"; known: clusters'),
        (["flower", "new", "app", "fedrep", "--shape", "1,28,28"], "--shape needs --classes too"),
    ],
)
def test_options_without_effect_or_partner_are_refused_before_work(cli, words, sentence) -> None:  # type: ignore[no-untyped-def]
    code, _, err = cli(*words)
    assert code == 2 and sentence in err and "1/" not in err


def test_data_show_draws_who_has_what(cli) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(cli("data", "show", "--clients", "6", "--out", "q.png", "--json")[1])
    assert len(found["clients"]) == 6 and Path(found["picture"]).exists()
    one = found["clients"][0]
    assert one["train"] + one["val"] + one["test"] == sum(one["labels"].values()) > 0
    code, out, _ = cli("data", "show", "--clients", "6", "--out", "p.png")
    assert code == 0 and Path("p.png").stat().st_size > 5000 and "median" in out
