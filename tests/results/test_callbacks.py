"""Callbacks after rounds, early stopping on validation data, trackers, scripts without a main guard."""

import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

import coterie
from coterie import testing
from coterie.errors import CoterieError
from coterie.results.run import Run

FEW = {"clients": 4, "rounds": 30, "epochs": 1, "join": 1.0, "partition": "iid", "eval_every": 1, "lr": 0.2,
       "final_trained": True, "watch": False}  # fmt: skip
DATA = testing.small_data(160)


def events(run: Run) -> bytes:
    return (run.path / "events.jsonl").read_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("stopped") / "r"
    return coterie.run("fedavg", DATA, "mlp", stop_after=2, out=out, workers=1, checkpoint_every=3, **FEW)


def test_a_run_ends_when_validation_stops_improving(stopped: Run) -> None:
    curve = stopped.curve(part="val")
    assert 3 <= stopped.last_round < 30 and stopped.finished
    best = int(curve.idxmax())  # the first of equal ones
    assert stopped.last_round == best + 2
    assert stopped.ended == (
        f"accuracy on validation data was best in round {best} and no better in the last 2 evaluations"
    )
    assert "trained/test/mean" in stopped.rounds and (stopped.path / "checkpoints").exists()
    assert stopped.rounds["trained/test/mean"].notna().tolist() == [False] * (stopped.last_round - 1) + [True]


def test_an_early_end_is_the_same_for_workers_and_interruptions(stopped: Run, tmp_path: Path) -> None:
    halves = coterie.run("fedavg", DATA, "mlp", stop_after=2, out=tmp_path / "r", workers=2, checkpoint_every=3,
                         on_round=lambda p: p.round == stopped.last_round - 1, **FEW)  # fmt: skip
    assert not halves.finished and halves.last_round == stopped.last_round - 1
    whole = coterie.resume(halves.path, data=DATA, workers=1)
    assert whole.finished and events(whole) == events(stopped)
    again = coterie.resume(halves.path, data=DATA, workers=1)
    assert events(again) == events(stopped)
    with pytest.raises(CoterieError, match=r"ended early .*best in round.*; it cannot get more rounds"):
        coterie.resume(halves.path, data=DATA, workers=1, rounds=60)
    assert Run(halves.path).settings["rounds"] == 30


def test_a_run_ends_in_the_first_round_that_reaches_its_target_also_when_resumed(stopped: Run, tmp_path: Path) -> None:
    curve = stopped.curve(part="val")
    target = float(curve.max())
    first = int(curve.index[curve >= target][0])
    one = coterie.run("fedavg", DATA, "mlp", stop_at=target, out=tmp_path / "a", workers=1, checkpoint_every=3, **FEW)
    assert one.finished and one.last_round == first < 30
    value = f"{100 * target:.1f}"
    assert one.ended == f"accuracy on validation data reached {value}: it was {value} in round {first}"
    halves = coterie.run("fedavg", DATA, "mlp", stop_at=target, out=tmp_path / "b", workers=2, checkpoint_every=3,
                         on_round=lambda p: p.round == first - 1, **FEW)  # fmt: skip
    assert not halves.finished
    assert events(coterie.resume(halves.path, data=DATA, workers=1)) == events(one)
    assert events(coterie.resume(halves.path, data=DATA, workers=1)) == events(one)


def test_early_stopping_needs_validation_data_and_a_target_that_is_a_share(tmp_path: Path) -> None:
    for name, value in (("stop_after", 2), ("stop_at", 0.5)):
        with pytest.raises(CoterieError, match=f"{name} needs a validation part"):
            coterie.run("fedavg", DATA, "mlp", **{name: value}, val_share=0.0, out=tmp_path / "r", **FEW)
    with pytest.raises(CoterieError, match=r"stop_at = 90 is not a share between 0 and 1; 0\.9 is accuracy 90 %"):
        coterie.run("fedavg", DATA, "mlp", stop_at=90, out=tmp_path / "r", **FEW)


def test_callbacks_run_after_every_round_and_their_errors_are_reported(tmp_path: Path) -> None:
    few = {**FEW, "rounds": 2, "workers": 1, "final_trained": False}
    heard: list[int] = []
    losses: list[float] = []

    def broken(p: object) -> None:
        raise KeyError("x")

    def loss(p: coterie.Progress) -> None:
        losses.append(p.event["loss"])

    run = coterie.run(
        "fedavg", DATA, "mlp", out=tmp_path / "r", on_round=[lambda p: heard.append(p.round), loss], **few
    )
    assert heard == [1, 2] and losses == run.rounds["loss"].tolist()
    with pytest.raises(
        CoterieError, match="on_round broken failed after round 1: KeyError: 'x'; the run can be resumed"
    ):
        coterie.run("fedavg", DATA, "mlp", out=tmp_path / "b", on_round=broken, **few)
    assert coterie.resume(tmp_path / "b", data=DATA, workers=1).finished
    with pytest.raises(CoterieError, match="on_round = 3 is invalid"):
        coterie.run("fedavg", DATA, "mlp", out=tmp_path / "c", on_round=[3], **few)
    with pytest.raises(CoterieError, match='unknown tracker "tensorbord"; did you mean "tensorboard"'):
        coterie.run("fedavg", DATA, "mlp", out=tmp_path / "c", track="tensorbord", **few)
    assert not (tmp_path / "c").exists()


class FakeWriter:
    made: ClassVar[list["FakeWriter"]] = []

    def __init__(self, folder: str, purge_step: int):
        self.folder, self.start, self.rows = folder, purge_step, []
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, step))

    def flush(self) -> None:
        pass

    close = flush


def test_trackers_get_the_numbers_and_missing_packages_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**FEW, "rounds": 2, "workers": 1, "final_trained": False}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=FakeWriter))
    coterie.run("fedavg", DATA, "mlp", out=tmp_path / "t", track="tensorboard", **few)
    (writer,) = FakeWriter.made
    assert writer.start == 1 and ("personal/val/mean", 2) in writer.rows and ("loss", 1) in writer.rows

    calls: list[tuple[str, object]] = []
    info = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    fake = types.SimpleNamespace(
        start_run=lambda run_id, run_name: calls.append(("start", run_id or run_name)) or info,
        log_params=lambda p: calls.append(("params", p["lr"])),
        log_metrics=lambda m, step: calls.append(("metrics", step)),
        end_run=lambda status: calls.append(("end", status)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    coterie.run("fedavg", DATA, "mlp", out=tmp_path / "m", track="mlflow", on_round=lambda p: p.round == 1, **few)
    assert calls == [("start", "m"), ("params", "0.2"), ("metrics", 1), ("end", "FINISHED")]
    calls.clear()
    coterie.resume(tmp_path / "m", data=DATA, workers=1, track="mlflow")
    assert calls == [("start", "abc"), ("metrics", 2), ("end", "FINISHED")]
    for name in ("mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        kind = name.rpartition(".")[2]
        with pytest.raises(CoterieError, match=rf"track = {kind} needs a package .* pip install 'coterie\[track\]'"):
            coterie.run("fedavg", DATA, "mlp", out=tmp_path / "n", track=kind, **few)


def test_weights_and_biases_continues_the_run_it_logged_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**FEW, "rounds": 2, "workers": 1, "final_trained": False}
    calls: list[tuple[object, ...]] = []
    logged: list[dict[str, float]] = []

    def init(dir: str, **known: object) -> types.SimpleNamespace:
        calls.append(("init", known.get("id"), known.get("resume"), known.get("name")))
        return types.SimpleNamespace(
            id="abc",
            log=lambda values, step: calls.append(("log", step)) or logged.append(values),
            finish=lambda exit_code: calls.append(("finish", exit_code)),
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    coterie.run("fedavg", DATA, "mlp", out=tmp_path / "w", track="wandb", on_round=lambda p: p.round == 1, **few)
    assert calls == [("init", None, None, "w"), ("log", 1), ("finish", 0)]
    calls.clear()
    run = coterie.resume(tmp_path / "w", data=DATA, workers=1, track="wandb")
    assert calls == [("init", "abc", "must", None), ("log", 2), ("finish", 0)]
    assert [values["loss"] for values in logged] == run.rounds["loss"].tolist()


@pytest.mark.long
def test_real_trackers_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**FEW, "rounds": 2, "workers": 1, "final_trained": False}
    pytest.importorskip("tensorboard")
    coterie.run("fedavg", DATA, "mlp", out=tmp_path / "t", track="tensorboard", **few)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "t" / "tensorboard"))
    found.Reload()
    assert [e.step for e in found.Scalars("personal/val/mean")] == [1, 2]
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "ml").as_uri())
    coterie.run("fedavg", DATA, "mlp", out=tmp_path / "m", track="mlflow", **few)
    assert list((tmp_path / "ml").rglob("metrics/**/mean"))


SCRIPT = """
import coterie
run = coterie.run("fedavg", "digits", "mlp", clients=4, rounds=2, epochs=1, workers=2, out=OUT)
print("finished", run.finished, run.last_round)
"""


@pytest.mark.long
def test_scripts_and_notebooks_work_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"OUT = 'a'\n{SCRIPT}")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "finished True 2", done.stderr
    done = subprocess.run(
        [sys.executable, "-"], cwd=tmp_path, capture_output=True, text=True, input=f"OUT = 'b'\n{SCRIPT}"
    )
    assert done.stdout.split("\n")[0] == "finished True 2", done.stderr
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"OUT = 'c'\n{SCRIPT}")])
    kernel = {"resources": {"metadata": {"path": str(tmp_path)}}, "timeout": 600}
    nbclient.NotebookClient(book, **kernel).execute()
    assert "finished True 2" in book.cells[0].outputs[-1]["text"]
