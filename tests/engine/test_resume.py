"""Runs that are killed, damaged, locked or out of disk: nothing written is lost, and resuming is bit-identical."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.config import Engine, settings
from coterie.engine import codec
from coterie.engine.session import Callbacks, execute, prepare, rebuild
from coterie.errors import CoterieError
from coterie.storage import atomic as disk
from coterie.storage import checkpoint
from coterie.storage.checkpoint import Checkpoint
from coterie.storage.run_folder import START, checkpoints

SETTINGS = ["--rounds", "40", "--clients", "8", "--epochs", "2", "--set", "checkpoint_every=3", "--set", "eval_every=4"]
CFL_SPLITS = ["--set", "eps1=10", "--set", "eps2=0.01", "--set", "first_round=5"]


def coterie(*args: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from coterie.cli import main; main()", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload, no-any-return]


def finish(*args: str) -> None:
    process = coterie(*args)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error


def same_results(a: Path, b: Path) -> None:
    assert (a / "events.jsonl").read_bytes() == (b / "events.jsonl").read_bytes()
    for file in sorted((a / "eval").iterdir()):
        with np.load(file) as x, np.load(b / "eval" / file.name) as y:
            assert all(np.array_equal(x[k], y[k]) for k in x.files)
    one, two = newest(a), newest(b)
    assert codec.equal(replace(one, timing=0), replace(two, timing=0))  # wall-clock lines have no fixed length
    for client, version in enumerate(one.clients.version.tolist()):
        if version >= 0:
            files = [state_file(p, client, version) for p in (a, b)]
            assert files[0].read_bytes() == files[1].read_bytes()


def newest(folder: Path) -> Checkpoint:
    saved = codec.read_value(checkpoints(folder)[-1])
    assert isinstance(saved, Checkpoint)
    return saved


def state_file(folder: Path, client: int, version: int) -> Path:
    return next((folder / "clients").rglob(f"{client}-{version:06d}.state"))


def killed_and_resumed(method: str, tmp_path: Path, kills: int, seed: int, *more: str) -> None:
    """The knife falls at a random moment of the rounds, evaluations and checkpoints included."""
    whole, cut = tmp_path / f"{method}-whole", tmp_path / f"{method}-cut"
    finish("run", method, *SETTINGS, *more, "--out", str(whole), "-q")
    lines = (whole / "timing.jsonl").read_text().splitlines()
    length = sum(json.loads(line)["seconds"] for line in lines)
    rng = random.Random(seed)
    command, done = ["run", method, *SETTINGS, *more, "--out", str(cut), "-q"], 0
    for _ in range(kills):
        before = (cut / "events.jsonl").stat().st_mtime_ns if (cut / "events.jsonl").exists() else 0
        process = coterie(*command)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:  # its rounds begin when the log is opened
            if (cut / "events.jsonl").exists() and (cut / "events.jsonl").stat().st_mtime_ns > before:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.9) * length / kills)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            done += 1
        _, error = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), error
        command = ["run", "--resume", str(cut), "-q"]
    assert 2 * done >= kills, "the run ended before most kills"
    finish("run", "--resume", str(cut), "-q")
    same_results(whole, cut)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    killed_and_resumed("fedrep", tmp_path, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedrep", "ditto", "cfl"])
def test_a_run_that_is_killed_seven_times_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    killed_and_resumed(method, tmp_path, 7, 100, *(CFL_SPLITS if method == "cfl" else []))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish("run", "fedrep", *SETTINGS, "--out", str(whole), "-q")
    process = coterie("run", "fedrep", *SETTINGS, "--out", str(cut))
    until = time.monotonic() + 120
    while not (cut / "events.jsonl").exists() or (cut / "events.jsonl").read_text().count("\n") < 5:
        assert process.poll() is None and time.monotonic() < until, "the run never got to its fifth round"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    if process.returncode == 130:  # else it was quicker than the signal
        assert f"coterie run --resume {cut}" in error
    finish("run", "--resume", str(cut), "-q")
    same_results(whole, cut)


@pytest.fixture
def paused(tmp_path: Path) -> Path:
    """A run of six rounds that stopped after the fourth, with checkpoints at 3 and 4."""
    chosen = settings(method="fedrep", rounds=6, clients=5, epochs=1, checkpoint_every=3, eval_every=2)
    seen: list[int] = []
    session = prepare(chosen, Engine(workers=1))
    execute(
        session,
        tmp_path / "run",
        Callbacks(on_round=lambda p: seen.append(p.round), should_stop=lambda: len(seen) == 4),
    )
    execute(session, tmp_path / "whole")
    return tmp_path / "run"


def resumed(folder: Path) -> list[str]:
    said: list[str] = []
    execute(rebuild(folder, Engine(workers=1)), folder, Callbacks(on_warning=said.append), resume=True)
    return said


def test_a_damaged_checkpoint_falls_back_to_the_one_before(paused: Path) -> None:
    last = checkpoints(paused)[-1]
    last.write_bytes(last.read_bytes()[:-100])
    said = resumed(paused)
    assert len(said) == 1 and last.name in said[0] and "before it" in said[0]
    same_results(paused.parent / "whole", paused)


def test_a_damaged_client_state_falls_back_too(paused: Path) -> None:
    client = int(newest(paused).clients.version.argmax())
    state_file(paused, client, 4).write_bytes(b"\0" * 50)
    assert "damaged" in resumed(paused)[0]
    same_results(paused.parent / "whole", paused)


def test_without_any_sound_checkpoint_the_run_starts_again(paused: Path) -> None:
    for file in (paused / "checkpoints").iterdir():
        file.write_bytes(b"nothing")
    assert "first round" in resumed(paused)[-1]
    same_results(paused.parent / "whole", paused)


def test_edited_settings_are_refused(paused: Path) -> None:
    file = paused / "settings.json"
    file.write_text(file.read_text().replace('"method": "fedrep"', '"method": "fedper"'))
    with pytest.raises(CoterieError, match=r"settings\.json was damaged or edited"):
        resumed(paused)


def test_a_checkpoint_says_whose_it_is(paused: Path) -> None:
    with pytest.raises(CoterieError, match="checkpoint of FedRep, not of FedPer"):
        checkpoint.load_checkpoint(checkpoints(paused)[-1], "FedPer")


def test_a_checkpoint_of_another_method_is_passed_over(paused: Path, tmp_path: Path) -> None:
    chosen = settings(method="fedper", rounds=6, clients=5, epochs=1, checkpoint_every=3, eval_every=2)
    execute(prepare(chosen, Engine(workers=1)), tmp_path / "other")
    file = sorted((paused / "checkpoints").iterdir())[0]
    file.write_bytes((tmp_path / "other" / "checkpoints" / file.name).read_bytes())
    sorted((paused / "checkpoints").iterdir())[-1].unlink()
    assert "another run" in resumed(paused)[0]
    same_results(paused.parent / "whole", paused)


def test_a_changed_partition_is_refused(paused: Path) -> None:
    found = disk.read_json(paused / "settings.json")
    found["settings"]["federation"]["test_share"] = 0.3
    disk.write_json(paused / "settings.json", found)
    with pytest.raises(CoterieError, match="have changed"):
        resumed(paused)


def test_a_run_in_use_is_locked(paused: Path) -> None:
    script = (
        f"from coterie.storage.run_folder import Folder; from pathlib import Path; f = Folder(Path({str(paused)!r}))"
    )
    script += "; print('locked', flush=True); import time; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == "locked"
        with pytest.raises(CoterieError, match="in use"):
            resumed(paused)
    finally:
        other.kill()
        other.communicate()
    resumed(paused)


@pytest.mark.long
def test_a_full_disk_gets_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the checkpoint does not fit, the logs do."""
    out = tmp_path / "run"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (18_000, resource.RLIM_INFINITY))

    args = ["--rounds", "4", "--clients", "5", "--epochs", "1", "--set", "checkpoint_every=2", "--set", "watch=false"]
    process = coterie("run", "fedavg", *args, "--workers", "1", "--out", str(out), "-q", preexec_fn=limit)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2, error
    assert error.strip().startswith("coterie: writing to") and len(error.strip().splitlines()) == 1
    assert not list(out.rglob(".*")), "half-written files were left behind"
    finish("run", "--resume", str(out), "-q")


def test_an_existing_run_is_never_overwritten(paused: Path) -> None:
    process = coterie("run", "fedavg", "--out", str(paused), "-q")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and "already holds a run" in error


def test_initial_values_that_cannot_be_read_get_a_sentence(paused: Path) -> None:
    (paused / START).mkdir()
    with pytest.raises(CoterieError, match=f"{START} cannot be read"):
        rebuild(paused)
    (paused / START).rmdir()
    (paused / START).write_bytes(b"not safetensors")
    with pytest.raises(CoterieError, match=f"{START} cannot be read"):
        rebuild(paused)


def test_a_run_of_version_0_1_with_short_last_batches_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = prepare(settings(method="fedavg", clients=4, seed=1)).federation.sizes("train")
    batch = next(b for b in range(8, 40) if any(n > b and 0 < n % b < 4 for n in sizes))
    monkeypatch.setattr("coterie.engine.session.spec.version", lambda name: "0.1.5")
    for model in ("mlp-bn", "mlp"):
        chosen = settings(method="fedavg", rounds=2, clients=4, epochs=1, seed=1, batch=batch, model=model)
        execute(prepare(chosen, Engine(workers=1)), tmp_path / model, Callbacks(should_stop=lambda: True))
    assert any("with batch norm they now join" in s for s in resumed(tmp_path / "mlp-bn"))
    assert not resumed(tmp_path / "mlp")
