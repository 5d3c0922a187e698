"""Comparisons from Python: callbacks, tables as text, and what notebooks show."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie import testing
from coterie.errors import CoterieError
from coterie.results.comparison import Comparison
from coterie.results.run import Run
from coterie.results.tables import latex_table, latex_text

FEW = {"clients": 4, "rounds": 2, "epochs": 1, "partition": "iid", "workers": 2, "lr": 0.2}
DATA = testing.small_data(160)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison, list[tuple[str, int, float]]]:
    """A comparison with two seeds, and what its callback heard."""
    out, heard = tmp_path_factory.mktemp("comparison") / "c", []
    found = coterie.compare(
        ["fedavg"], DATA, "mlp", against="fedavg/trained", seeds=2, out=out,
        on_round=lambda p: heard.append((p.run, p.round, p.event["loss"])), **FEW,
    )  # fmt: skip
    return out, found, heard


def test_on_round_hears_every_round_of_every_run(made: tuple[Path, Comparison, list[tuple[str, int, float]]]) -> None:
    _, found, heard = made
    assert {r.path.name for r in found.runs} == {"local-s0", "local-s1", "fedavg-s0", "fedavg-s1"}
    for run in found.runs:
        mine = [(round, loss) for name, round, loss in heard if name == run.path.name]
        assert mine == list(run.rounds["loss"].items())


def test_a_callback_stops_all_runs_after_that_round_and_they_can_be_continued(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"stopped before the end of local-s0, fedavg-s0; .*no run has finished"):
        coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "c", on_round=lambda p: p.round == 1, **FEW)
    assert Run(tmp_path / "c" / "local-s0").last_round == 1
    found = coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "c", **FEW)
    assert [r.last_round for r in found.runs] == [2, 2]

    def broken(p: coterie.Progress) -> None:
        raise KeyError("x")

    with pytest.raises(CoterieError, match="on_round broken failed after round 1: KeyError"):
        coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "b", on_round=broken, **FEW)
    for wrong in ({"on_round": 3}, {"track": "tensorbord"}):
        with pytest.raises(CoterieError, match=r'on_round = 3 is invalid|did you mean "tensorboard"'):
            coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "w", **wrong, **FEW)
    assert not (tmp_path / "w").exists()


def test_every_run_of_a_comparison_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:  # writes a file, because runs have processes of their own
        def __init__(self, folder: str, purge_step: int):
            self.file = Path(folder).with_suffix(".txt")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.file.open("a").write(f"{name} {step}\n")

        def flush(self) -> None: ...

        close = flush

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "c", track="tensorboard", **FEW)
    for name in ("local-s0", "fedavg-s0"):
        lines = (tmp_path / "c" / name / "tensorboard.txt").read_text().splitlines()
        assert [line for line in lines if line.startswith("loss")] == ["loss 1", "loss 2"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CoterieError, match="track = wandb needs a package that is not installed: pip install wandb"):
        coterie.compare(["fedavg"], DATA, "mlp", out=tmp_path / "w", track="wandb", **FEW)
    assert not (tmp_path / "w").exists()


def test_files_hold_the_tables(made: tuple[Path, Comparison, list[tuple[str, int, float]]]) -> None:
    out, found, _ = made
    stored = pd.read_csv(out / "table.csv", index_col="method")
    assert stored["personal"].to_dict() == {k: pytest.approx(v) for k, v in found.table()["personal"].items()}
    assert (out / "table.md").read_text() == found.markdown() and (out / "table.tex").read_text() == found.latex()
    arena = found.arena()
    assert pd.read_csv(out / "arena.csv")["difference"].tolist() == pytest.approx(arena.frame()["difference"].tolist())
    assert (out / "arena.md").read_text() == arena.markdown() and (out / "arena.tex").read_text() == arena.latex()


def test_intervals_are_those_of_the_means_of_the_table(
    made: tuple[Path, Comparison, list[tuple[str, int, float]]],
) -> None:
    _, found, _ = made
    table, intervals = found.table(), found.intervals()
    for title in found.titles:
        runs = [r for r in found.runs if r.title == title]
        clients = np.concatenate([r.clients()["personal/test"] for r in runs])
        assert table.loc[title, "personal"] == pytest.approx(clients.mean())  # all seeds have as many clients
        low, high = intervals.loc[title]
        assert clients.min() <= low <= clients.mean() <= high <= clients.max()
        text = rf"\[{100 * low:.1f}, {100 * high:.1f}\]"
        assert re.search(rf"^{title} & .*{text}", found.latex(), re.MULTILINE)


def test_latex_marks_the_best_of_each_column(
    made: tuple[Path, Comparison, list[tuple[str, int, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found, _ = made
    values = pd.DataFrame({"personal": [0.5, 0.9, 0.90001], "std": [0.2, 0.1, 0.3], "pooled": [0.4, 0.4, 0.4]})
    values.index = pd.Index(["a", "b", "c"])
    assert found._best(values, "personal") == ["b", "c"]  # equal as they are shown
    assert found._best(values, "std") == ["b"] and found._best(values, "pooled") == []
    assert found._best(values, "s/round") == []
    shown = latex_table(pd.DataFrame({"x_1": ["-1 ± 2", "3"]}, index=pd.Index(["a&b", "c"], name="%")), [("c", "x_1")])
    assert shown == (
        "\\begin{tabular}{lr}\n\\toprule\n\\% & x\\_1 \\\\\n\\midrule\na\\&b & $-$1 $\\pm$ 2 \\\\\n"
        "c & \\textbf{3} \\\\\n\\bottomrule\n\\end{tabular}\n"
    )
    assert latex_text("fedavg-2 [-1.5, +2]") == "fedavg-2 [$-$1.5, +2]"


def test_objects_show_their_numbers(made: tuple[Path, Comparison, list[tuple[str, int, float]]]) -> None:
    _, found, _ = made
    lines = repr(found).splitlines()
    assert lines[0] == "accuracy in percent, mean over clients; bytes and time per round"
    value = found.readable().loc["FedAvg", "personal"]
    assert any(line.startswith("FedAvg ") and value in line for line in lines)
    assert f"<td>{value}</td>" in found._repr_html_()
    run = found.runs[0]
    last = run.metric.text(run.summary()["personal"]["last"])
    assert "<b>Local-Only</b>" in run._repr_html_() and f"<th>personal</th>\n      <td>{last}</td>" in run._repr_html_()
    arena = found.arena()
    assert "FedAvg, trained" in repr(arena) and "FedAvg, trained" in arena._repr_html_()


def test_the_commands_print_tables_in_a_format(
    made: tuple[Path, Comparison, list[tuple[str, int, float]]], cli
) -> None:  # type: ignore[no-untyped-def]
    folder, found, _ = made
    code, out, _ = cli("arena", str(folder), "--against", "fedavg/trained", "--methods", "fedavg", "--format", "latex")
    assert code == 0 and out.rstrip().endswith(found.arena().latex().rstrip())
    code, out, _ = cli("arena", str(folder), "--against", "local", "--format", "csv")
    assert code == 0 and out.startswith("group,method,score,against,")
    small = ["--clients", "4", "--rounds", "1", "--epochs", "1", "--model", "mlp", "--out", "c", "--workers", "2"]
    code, out, err = cli("compare", "fedavg", *small, "--format", "latex")
    assert code == 0 and out == Path("c/table.tex").read_text(), err
    code, _, err = cli("compare", "fedavg", *small, "--format", "tex")
    assert code == 2 and 'unknown format "tex"' in err


def test_choices_of_autopilot_in_words_and_all_clients_and_rounds(tmp_path: Path) -> None:
    few = {**FEW, "workers": 1, "rounds": 4, "join": 1.0, "eval_every": 2, "val_share": 0.3}
    run = coterie.run("autopilot", DATA, "mlp", out=tmp_path / "a", **few)
    facts = run.events[-1]["facts"]
    assert len(run.choices()) == len(facts["chosen"]) == 4
    for sentence, (client, chosen) in zip(run.choices(), facts["chosen"].items(), strict=True):
        assert re.match(rf"client \w+ uses {re.escape(chosen)}(: |$)", sentence)
        ahead, n = abs(facts["ahead_of_own"][client]), facts["validated"][client]
        assert chosen == "own" or (f"{ahead:.2f} nats per sample" in sentence and f"its {n} validation" in sentence)
    frame = run.client_rounds()
    assert frame.index.names == ["round", "client"] and len(frame) == 8
    pd.testing.assert_frame_equal(frame.loc[4][run.clients().columns], run.clients())
