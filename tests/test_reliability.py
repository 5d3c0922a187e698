"""Damaged files, absurd settings, foreign data and wrong calls lead to a CoterieError or to the same bits.

The short versions draw a few cases of each kind; those marked `long` draw many, or try all.
"""

import contextlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.config import Engine, RunSettings, settings
from coterie.data.settings import PartitionSettings
from coterie.data.sources import load_dataset
from coterie.engine import codec
from coterie.engine.session import Callbacks, execute, prepare, rebuild
from coterie.errors import CoterieError
from coterie.methods import find, method_names
from coterie.results.report import page
from coterie.results.run import Run
from coterie.storage.run_folder import EVENTS, TIMING, checkpoints, read_checkpoint
from coterie.train import native
from support.command_line import coterie_command

TINY = {"subset": 240, "clients": 4, "epochs": 1, "rounds": 6, "eval_every": 2, "checkpoint_every": 2, "min_size": 5}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two runs: `whole` is finished; `half` was killed in round 6, with a checkpoint of round 4."""
    at = tmp_path_factory.mktemp("runs")
    session = prepare(settings("fedrep", **TINY), Engine(workers=1))
    execute(session, at / "whole")
    seen: list[int] = []
    execute(
        session, at / "half", Callbacks(on_round=lambda p: seen.append(p.round), should_stop=lambda: len(seen) == 5)
    )
    checkpoints(at / "half")[-1].unlink()
    return {"whole": at / "whole", "half": at / "half"}


def bits(path: Path) -> dict[str, bytes]:
    """Return the bytes of all results of a run except wall-clock times."""
    found = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    kept = {k: v for k, v in found.items() if k.startswith("eval") or k in (EVENTS, "settings.json")}
    newest = replace(codec.unpack(read_checkpoint(checkpoints(path)[-1])), timing=0)
    states = {k: v for k, v in found.items() if k.startswith("clients")}
    newest_of = {k.split("-")[0]: k for k in sorted(states)}  # the last version of each client
    return {**kept, "checkpoint": bytes(codec.pack(newest)), **{k: states[k] for k in newest_of.values()}}


def commands(path: Path) -> dict[str, Callable[[], Any]]:
    """Return the commands that read the folder of a run."""

    def exported() -> bytes:
        Run(path).export(1, path.parent / "client")
        return (path.parent / "client").read_bytes()

    def reported() -> str:
        said: list[str] = []
        html = page.write_report([path], path.parent / "page.html", complain=said.append).read_text()
        if said:
            raise CoterieError("; ".join(said))
        return html

    def summary() -> dict[str, Any]:
        return {k: v for k, v in Run(path).summary().items() if not k.startswith("seconds")}

    def listed() -> str:
        code, out, err = coterie_command("runs", str(path.parent))
        if code:
            assert err.startswith("coterie: ") and "Traceback" not in err
            raise CoterieError(err)
        return out

    return {"summary": summary, "listing": listed, "export": exported, "report": reported}


def without_times(value: Any) -> Any:
    """Return a command's output without the times of a report's runs and of its writing."""
    if not isinstance(value, str):
        return value
    return re.sub(r" Runs made [^.]*\.| Report written \S+ \d\d:\d\d", "", value)


def names(sentence: str, file: Path) -> bool:
    """True if the message names the file."""
    return file.name in sentence or (not file.exists() and f"{file.parent} holds no" in sentence)


def check(original: Path, damage: Callable[[Path], bytes | None], which: list[Path], at: Path) -> None:
    """Damage each file in turn: every command has the same output as before, or names the file."""
    run = at / "here" / "run"
    shutil.copytree(original, run)
    before = {name: without_times(command()) for name, command in commands(run).items()}
    for file in which:
        shutil.rmtree(at / "here")
        shutil.copytree(original, run)
        target = run / file
        spoiled = damage(target)
        cut = spoiled is not None and target.read_bytes().startswith(spoiled)
        whole_lines = cut and target.name == TIMING and spoiled.endswith(b"\n")
        if original.name == "half" and (whole_lines or (cut and target.name == EVENTS)):
            continue  # equals a run that was killed earlier
        if spoiled is None:
            target.unlink()
        else:
            target.write_bytes(spoiled)
        for name, command in commands(run).items():
            try:
                after = without_times(command())
                named = target.name in str(after)  # a report has it among its warnings
                assert named or after == before[name], f"{name} changed silently after damage to {file}"
            except CoterieError as e:
                assert names(str(e), target), f"{name}, {file}: {e}"
        resumed(run, target)


def resumed(run: Path, damaged: Path) -> None:
    """Resume a damaged run: it has the bits of the undamaged run in the end, or an error names the file."""
    said: list[str] = []
    try:
        execute(rebuild(run, Engine(workers=1)), run, Callbacks(on_warning=said.append), resume=True)
    except CoterieError as e:
        assert names(str(e), damaged), f"{damaged}: {e}"
        return
    whole = EXPECTED.setdefault("bits", {})
    found = bits(run)
    assert found.keys() == whole.keys()
    for name in whole:
        assert found[name] == whole[name], f"{name} differs after damage to {damaged}; said: {said}"


EXPECTED: dict[str, dict[str, bytes]] = {}


@pytest.fixture(autouse=True)
def expected(request: pytest.FixtureRequest) -> Iterator[None]:
    if "originals" in request.fixturenames:
        EXPECTED["bits"] = bits(request.getfixturevalue("originals")["whole"])
    yield


def files(run: Path) -> list[Path]:
    return sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file() and p.name != "lock")


def flipped(rng: random.Random) -> Callable[[Path], bytes]:
    def damage(file: Path) -> bytes:
        blob = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(blob))
        blob[bit // 8] ^= 1 << bit % 8
        return bytes(blob)

    return damage


def inserted(blob: bytes, at: int, noise: bytes) -> bytes:
    return blob[:at] + noise + blob[at + len(noise) :]


DAMAGES: dict[str, Callable[[bytes, int, bytes, bytes], bytes | None]] = {  # of the bytes, a place, noise, a neighbour
    "cut": lambda blob, at, noise, other: blob[:at],
    "emptied": lambda blob, at, noise, other: b"",
    "deleted": lambda blob, at, noise, other: None,
    "overwritten": lambda blob, at, noise, other: inserted(blob, at, noise),
    "lengthened": lambda blob, at, noise, other: blob + noise,
    "a piece cut out": lambda blob, at, noise, other: blob[:at] + blob[at + 9 :],
    "zeros": lambda blob, at, noise, other: b"\0" * len(blob),
    "a different file": lambda blob, at, noise, other: other,
    "null": lambda blob, at, noise, other: b"null",
    "an empty object": lambda blob, at, noise, other: b"{}",
    "an empty list": lambda blob, at, noise, other: b"[]\n",
}


def mutated(rng: random.Random, kind: str | None = None) -> Callable[[Path], bytes | None]:
    """Damage a file in one way of `DAMAGES`; None draws one for each file."""

    def damage(file: Path) -> bytes | None:
        blob, noise = file.read_bytes(), rng.randbytes(rng.randint(1, 40))
        others = [f for f in file.parent.iterdir() if f.is_file() and f != file]
        other = rng.choice(others).read_bytes() if others else noise
        return DAMAGES[kind or rng.choice([*DAMAGES])](blob, rng.randrange(len(blob)), noise, other)

    return damage


def one_of_each_kind(run: Path, rng: random.Random) -> list[Path]:
    """Return one file of each kind: settings, events, times, an evaluation, a checkpoint and a client's state."""
    kinds: dict[str, list[Path]] = {}
    for f in files(run):
        kinds.setdefault(f.parts[0], []).append(f)
    return [rng.choice(found) for found in kinds.values()]


@pytest.mark.parametrize("state", ["whole", "half"])
def test_a_flipped_bit_in_any_file_is_reported_or_repaired(
    state: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(state)
    check(originals[state], flipped(rng), one_of_each_kind(originals[state], rng), tmp_path)


def test_lost_cut_or_exchanged_files_are_reported_or_repaired(originals: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(7)
    check(originals["whole"], mutated(rng), rng.sample(files(originals["whole"]), 6), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("state", ["whole", "half"])
def test_many_flipped_bits(state: str, part: int, originals: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(f"{state} {part}")
    check(originals[state], flipped(rng), one_of_each_kind(originals[state], rng), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("state", ["whole", "half"])
def test_every_damage_of_every_kind_of_file(state: str, kind: str, originals: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(f"{state} {kind}")
    check(originals[state], mutated(rng, kind), one_of_each_kind(originals[state], rng), tmp_path)


def test_one_damaged_run_does_not_hide_the_others(
    originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # short paths leave room for the other columns
    for name in ("a", "b", "c", "d"):
        shutil.copytree(originals["whole"], tmp_path / "runs" / name)
    events = Path("runs", "b") / EVENTS
    events.write_bytes(events.read_bytes().replace(b'"round": 3', b'"round": 8'))
    (tmp_path / "runs" / "c" / "settings.json").write_text("{")
    (tmp_path / "runs" / "d" / "settings.json").unlink()
    code, out, err = coterie_command("runs", "runs")
    assert code == 1 and "in runs" in out and " a " in out and len(err.strip().splitlines()) == 3
    assert f"{events} is damaged in line 3" in err and "c/settings.json" in err and "runs/d" in err
    code, _, err = coterie_command("report", "runs", "-o", "page.html")
    assert code == 1 and f"{events} is damaged in line 3" in err
    assert f"{events} is damaged in line 3" in Path("page.html").read_text()


def test_a_finished_run_without_times_is_finished(originals: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(originals["whole"], run)
    (run / TIMING).unlink()
    before = (run / EVENTS).stat().st_mtime_ns, checkpoints(run)[-1].stat().st_mtime_ns
    said: list[str] = []
    execute(rebuild(run, Engine(workers=1)), run, Callbacks(on_warning=said.append), resume=True)
    assert not said and before[1] == checkpoints(run)[-1].stat().st_mtime_ns
    found = Run(run)
    assert found.finished and "seconds" not in found.summary()
    code, out, _ = coterie_command("run", "--resume", str(run))
    assert code == 0 and "nan" not in out


def test_damaged_times_are_reported(originals: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(originals["whole"], run)
    times = run / TIMING
    times.write_bytes(times.read_bytes().replace(b'"round": 2', b'"round": 3'))
    assert Run(run).warnings() == [f"{times} is damaged in line 2; seconds are incomplete"]
    shutil.copy(originals["whole"] / TIMING, times)
    assert Run(run).warnings() == []
    *lines, _ = times.read_bytes().splitlines(keepends=True)
    times.write_bytes(b"".join(lines))
    assert Run(run).warnings() == [f"{times} lacks 1 of 6 rounds; seconds are incomplete"]
    times.unlink()
    assert Run(run).warnings() == [f"{times} lacks 6 of 6 rounds; seconds are incomplete"]


def test_a_killed_run_may_lack_the_time_of_its_last_round(originals: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(originals["half"], run)
    *lines, last = (run / TIMING).read_bytes().splitlines(keepends=True)
    (run / TIMING).write_bytes(b"".join(lines))
    assert json.loads(last)["round"] == Run(run).last_round == 5 and Run(run).warnings() == []
    (run / TIMING).write_bytes(b"".join(lines[:-1]))
    assert Run(run).warnings() == [f"{run / TIMING} lacks 1 of 4 rounds; seconds are incomplete"]


def test_changed_inputs_change_the_identity_of_data(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32), np.arange(120) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    run = coterie.run("fedavg", tmp_path / "mine.npz", out=tmp_path / "run", clients=3, rounds=1, epochs=1, workers=1)
    x[5, 2] += 1e-3
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    with pytest.raises(CoterieError, match="have changed since it ran"):
        coterie.resume(run.path)


def test_diverged_models_are_counted_and_reported(tmp_path: Path) -> None:
    more = ["--clients", "4", "--set", "eval_every=1", "--set", "subset=240", "--set", "min_size=5", "--workers", "1"]
    code, out, err = coterie_command(
        "run", "ditto", "--lr", "1000", "--rounds", "6", *more, "--out", str(tmp_path / "a")
    )
    assert code == 4 and "diverged" in out and "4 of 4 clients give NaN" in err
    assert Run(tmp_path / "a").summary()["personal"]["nonfinite"] == 4
    code, out, err = coterie_command("runs", str(tmp_path))
    assert code == 0 and "diverged" in out
    coterie_command("report", str(tmp_path), "-o", str(tmp_path / "page.html"))
    html = (tmp_path / "page.html").read_text()
    assert "4 of 4 clients give NaN or infinity" in html and "NaN," not in html and "NaN]" not in html


def test_two_exports_are_equal_in_bytes_and_name_their_round(originals: dict[str, Path], tmp_path: Path) -> None:
    from safetensors import safe_open

    for name in ("a", "b"):
        Run(originals["half"]).export(1, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(str(tmp_path / "a"), framework="pt") as f:
        assert f.metadata()["round"] == "4"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/run", "x" * 300])
def test_a_path_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / place)
    code, _, err = coterie_command("run", "fedavg", "--rounds", "1", "--clients", "3", "--workers", "1", "--out", out)
    assert code == 2 and err.startswith("coterie: ") and len(err.strip().splitlines()) == 1
    code, _, err = coterie_command("report", str(tmp_path), "-o", out)
    assert code == 2 and len(err.strip().splitlines()) == 1


# ---- absurd settings -------------------------------------------------------------------------------------------------
NASTY: list[Any] = [
    float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 10**30, -1, 0, 0.5, 1e-320, True, "", "x", "\0",
    "é" * 300, [], [1], {}, {"a": 1}, None, "dirichlet(1e999)", "dirichlet(nan)", "exdir(0,1)", "shards(999999999)",
    "1" * 5000, "rotate(3)", "natural", "../..", "module:thing", "os:system", 2**63, -(2**63), 1.5, "inf", [[[[]]]],
    {"": ""},
]  # fmt: skip


def setting_names() -> list[tuple[str, str]]:
    """Return (method, setting) for every setting of runs, of federations and of all methods."""
    shared = [n for c in (RunSettings, PartitionSettings) for n in c.model_fields if n != "method"]
    own = [(m, n) for m in method_names() for n in find(m).Settings.model_fields]
    return [("fedavg", n) for n in shared] + own


def try_setting(method: str, name: str, value: Any, out: Path) -> None:
    """Run with a setting, or assert that it is refused with a message of readable length."""
    needs = find(method).needs
    model = "mlp-bn" if "bn" in needs else "mlp"
    given = {"subset": 120, "clients": 3, "min_size": 5, "rounds": 2, "epochs": 1, "model": model, "public": 10}
    given |= {"join": 1.0, "partition": "iid", name: value}
    try:
        session = prepare(settings(method, **given), Engine(workers=1))
        if session.settings.rounds == 2 and session.settings.epochs < 3 and len(session.federation.clients) == 3:
            execute(session, out)
    except CoterieError as e:
        assert "\n" not in str(e)


def test_absurd_settings_are_refused_or_run(tmp_path: Path) -> None:
    rng = random.Random(0)
    for method, name in rng.sample(setting_names(), 40):
        try_setting(method, name, rng.choice(NASTY), tmp_path / f"{method}-{name}")


@pytest.mark.long
@pytest.mark.parametrize("part", range(11))
def test_770_absurd_settings(part: int, tmp_path: Path) -> None:
    rng = random.Random(f"settings {part}")
    for number in range(70):
        method, name = rng.choice(setting_names())
        try_setting(method, name, rng.choice(NASTY), tmp_path / str(number))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_setting_takes_infinity(value: float) -> None:
    for method, name in setting_names():
        owner = next((c for c in (RunSettings, PartitionSettings) if name in c.model_fields), find(method).Settings)
        if "float" in str(owner.model_fields[name].annotation):
            with pytest.raises(CoterieError):
                settings(method, **{name: value})


@pytest.mark.parametrize("value", ["1e308", "inf", "nan", "-inf"])
def test_excessive_rates_and_epochs_are_refused(value: str, tmp_path: Path) -> None:
    for name in ("lr", "epochs", "weight_decay"):
        code, _, err = coterie_command("run", "fedavg", "--set", f"{name}={value}", "--out", str(tmp_path / "run"))
        assert code == 2 and name in err and not (tmp_path / "run").exists()


TOMLS = [
    "federation = 3", "settings = 3", "federation = []", "[federation]\nclients = 'x'", "[[federation]]\nclients = 3",
    "lr = inf", "seed = 1" + "0" * 5000, "a = " + "[" * 3000, "x", "\0", "= 3", "data = 3",
    "model = {a = 1}", "model_options = 3", "model_options = {seed = 3}", "model_options = {source = 'x'}",
    "lr = 1979-05-27", "[model_options]\nhidden = 1979-05-27", "join = 'x'", "batch = 1.5",
]  # fmt: skip


@pytest.mark.parametrize("text", TOMLS, ids=range(len(TOMLS)))
def test_a_wrong_file_of_settings_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    for command in (["run", "fedavg"], ["compare", "fedavg"]):
        code, _, err = coterie_command(
            *command, "--config", str(tmp_path / "run.toml"), "--rounds", "1", "--out", str(tmp_path / "o")
        )
        assert code == 2 and err.startswith("coterie: ") and len(err.strip().splitlines()) == 1, err
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "text", ["federation=3", "settings=3", "settings={a=1}", "lr=", "=", "model_options={dtype=1}"]
)
def test_a_wrong_assignment_is_refused(text: str, tmp_path: Path) -> None:
    code, _, err = coterie_command("run", "fedavg", "--set", text, "--out", str(tmp_path / "o"))
    assert code == 2 and err.startswith("coterie: ") and len(err.strip().splitlines()) == 1, err


# ---- foreign data ----------------------------------------------------------------------------------------------------
def arrays(rng: random.Random) -> dict[str, Any]:
    """Return arrays that may or may not be a data set."""
    draw = np.random.default_rng(rng.randrange(2**32))
    n = rng.choice([0, 1, 2, 30, 60])
    shapes = [(n,), (n, 4), (n, 0), (n, 8, 8), (n, 8, 0), (n, 3, 8, 8), (n, 8, 8, 3), (n, 2, 2, 2, 2), (), (n, 12, 3)]
    kinds = [np.float32, np.float64, np.float16, np.uint8, np.int64, np.int8, bool, "U5", "S5", "complex64", "M8[s]"]
    kind = np.dtype(rng.choice(kinds))

    def made(shape: tuple[int, ...]) -> Any:
        if kind.kind in "US":
            return np.full(shape, "word", kind)
        return (draw.normal(size=shape) * rng.choice([1, 300, 1e30])).astype("f8").astype(kind)

    labels = [
        draw.integers(0, 3, n), draw.integers(-5, 3, n), np.zeros(n), draw.normal(size=n), np.full(n, np.nan),
        np.zeros((n, 2)), np.array(["a", "b", "c"])[draw.integers(0, 3, n)], np.zeros(max(0, n - 1), int),
        np.array(3), np.full(n, 2**62),
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        found = {"x": made(rng.choice(shapes)), "y": rng.choice(labels)}
        if rng.random() < 0.3:
            found |= {"x_test": made(rng.choice(shapes)), "y_test": rng.choice(labels)}
        if rng.random() < 0.3:
            found["client"] = rng.choice(labels)
    return found


def try_data(rng: random.Random, at: Path) -> None:
    """Write random arrays to a file, damage it or not, and prepare a run with it."""
    file = at / "data.npz"
    np.savez(file, **arrays(rng))
    blob = file.read_bytes()
    if rng.random() < 0.5:
        cut = rng.randrange(len(blob))
        file.write_bytes(rng.choice([blob[:cut], blob[:cut] + rng.randbytes(4) + blob[cut + 4 :], b"", blob[cut:]]))
    try:
        prepare(settings("fedavg", data=str(file), clients=2, min_size=2, rounds=1), Engine(workers=1))
    except CoterieError as e:
        assert "\n" not in str(e)


@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|Discarding|imaginary).*")
def test_foreign_data_are_refused_or_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        try_data(rng, tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|Discarding|imaginary).*")
@pytest.mark.parametrize("part", range(9))
def test_630_foreign_data(part: int, tmp_path: Path) -> None:
    rng = random.Random(f"data {part}")
    for _ in range(70):
        try_data(rng, tmp_path)


def test_odd_sources_are_refused(tmp_path: Path) -> None:
    import zipfile

    np.savez(tmp_path / "texts.npz", x=np.array([["a", "b"], ["c", "d"]]), y=[0, 1])
    with zipfile.ZipFile(tmp_path / "member.npz", "w") as z:
        z.writestr("x_train", "hello")
    np.savez(tmp_path / "thin.npz", x=np.zeros((6, 8, 0), np.uint8), y=[0, 1, 0, 1, 0, 1])
    (tmp_path / "deep" / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    (tmp_path / "deep" / "a" / "b" / "c" / "d" / "e" / "x.png").write_bytes(b"")
    wrong = ["texts.npz", "member.npz", "thin.npz", "deep", "nothing.npz"]
    for name in [*(str(tmp_path / w) for w in wrong), "///", "/", "x" * 300, "a\0b", ":", "os:getcwd", "", ".."]:
        with pytest.raises(CoterieError):
            load_dataset(name)


def test_a_model_that_changes_its_input_is_refused() -> None:
    class Rude(torch.nn.Module):
        def __init__(self, classes: int, training_only: bool = False):
            super().__init__()
            self.only, self.flat, self.out = training_only, torch.nn.Flatten(), torch.nn.Linear(64, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training or not self.only:
                x *= 2
            return self.out(self.flat(x))  # type: ignore[no-any-return]

    for rude in (Rude(10), Rude(10, training_only=True)):
        with pytest.raises(CoterieError, match="changes its input in place"):
            coterie.run("fedavg", "digits", rude, clients=3, rounds=1, workers=1)


# ---- calls -----------------------------------------------------------------------------------------------------------
CALLS: dict[str, Callable[[Path], Any]] = {
    "workers 0": lambda at: coterie.run(workers=0, out=at),
    "workers text": lambda at: coterie.run(workers="many", out=at),  # type: ignore[arg-type]
    "state": lambda at: coterie.run(state="x", out=at),  # type: ignore[arg-type]
    "runtime": lambda at: coterie.run(runtime="moon", out=at),  # type: ignore[arg-type]
    "engine": lambda at: coterie.run(engine="steam", out=at),  # type: ignore[arg-type]
    "address": lambda at: coterie.run(address="10.0.0.1", out=at),
    "data path": lambda at: coterie.run(data=at / "gone.npz", out=at),
    "data number": lambda at: coterie.run(data=3, out=at),  # type: ignore[arg-type]
    "data none": lambda at: coterie.run(data=None, out=at),  # type: ignore[arg-type]
    "data dir": lambda at: coterie.run(data_dir=at / "gone", out=at),
    "model number": lambda at: coterie.run(model=3, out=at),  # type: ignore[arg-type]
    "method number": lambda at: coterie.run(3, out=at),  # type: ignore[arg-type]
    "method class": lambda at: coterie.run(dict, out=at),  # type: ignore[arg-type]
    "out number": lambda at: coterie.run(out=3),  # type: ignore[arg-type]
    "setting": lambda at: coterie.run(out=at, no_such=3),
    "settings": lambda at: coterie.run(out=at, settings=3),
    "federation": lambda at: coterie.run(out=at, federation=3),
    "federation text": lambda at: coterie.run(out=at, federation="iid"),
    "stack keeps": lambda at: coterie.run(engine="stack", opt_state="keep", out=at),
    "no methods": lambda at: coterie.compare("fedavg", out=at),
    "methods twice": lambda at: coterie.compare(["fedavg", "fedavg"], out=at),
    "methods twice, spelt": lambda at: coterie.compare(["fedavg", "FedAvg"], out=at),
    "methods number": lambda at: coterie.compare([3], out=at),  # type: ignore[list-item]
    "seeds 0": lambda at: coterie.compare(["fedavg"], seeds=0, out=at),
    "seeds none": lambda at: coterie.compare(["fedavg"], seeds=[], out=at),
    "seeds twice": lambda at: coterie.compare(["fedavg"], seeds=[1, 1], out=at),
    "seeds text": lambda at: coterie.compare(["fedavg"], seeds="ab", out=at),  # type: ignore[arg-type]
    "seeds below 0": lambda at: coterie.compare(["fedavg"], seeds=[-1], out=at),
    "seed": lambda at: coterie.compare(["fedavg"], seed=1, out=at),
    "clients of one": lambda at: coterie.compare(["fedavg", "fedprox"], out=at, **{"fedprox.clients": 3}),
    "resume nothing": lambda at: coterie.resume(at / "gone"),
    "resume number": lambda at: coterie.resume(3),  # type: ignore[arg-type]
    "open none": lambda at: coterie.open_run(None),  # type: ignore[arg-type]
    "open file": lambda at: coterie.open_run(__file__),
    "arrays": lambda at: coterie.from_arrays([1, 2], None),
    "ragged arrays": lambda at: coterie.from_arrays([[1], [1, 2]], [0, 1]),
    "torch": lambda at: coterie.from_torch(3),
    "empty list of methods": lambda at: coterie.compare([], out=at),
    "empty model": lambda at: coterie.run("fedavg", "digits", torch.nn.Sequential(), out=at),
    "optimiser object": lambda at: coterie.run(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1), out=at),
    "tune nothing": lambda at: coterie.tune("fedavg", space={}, out=at),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_refused_and_writes_nothing(case: str, tmp_path: Path) -> None:
    with pytest.raises(CoterieError) as e:
        CALLS[case](tmp_path / "out")
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_240_calls_with_absurd_arguments(part: int, tmp_path: Path) -> None:
    rng = random.Random(f"calls {part}")
    arguments = ["method", "data", "model", "out", "workers", "state", "runtime", "address", "engine", "data_dir"]
    shared = ["lr", "clients", "partition", "public", "newcomers", "subset", "model_options", "seed", "batch"]
    for number in range(40):
        given = {rng.choice([*arguments, *shared]): rng.choice(NASTY) for _ in range(2)}
        base: dict[str, Any] = {"rounds": 1, "epochs": 1, "clients": 3, "subset": 120, "min_size": 5, "workers": 1}
        place = {"out": tmp_path / str(number)}
        with contextlib.suppress(CoterieError):
            if given.get("address") or given.get("runtime"):
                continue
            coterie.run(**{**base, **place, **given})


def test_compare_gives_every_method_the_same_data(tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounds": 1, "clients": 3, "epochs": 1, "workers": 1, "subset": 240}
    found = coterie.compare(["fedavg", "cfl", "fedprox"], out=tmp_path, normalize="unit", min_size=20, mu=0.3, **more)
    partitions = {json.dumps(r.description["partition"], sort_keys=True) for r in found.runs}
    assert len(partitions) == 1
    assert {r.settings["federation"]["min_size"] for r in found.runs} == {20}
    assert {r.settings["federation"]["normalize"] for r in found.runs} == {"unit"}
    assert not found.warnings()


def test_two_meanings_of_one_name_are_refused() -> None:
    class Settings(coterie.Settings):
        min_size: int = 3

    class Mine(coterie.Method):
        pass

    Mine.Settings = Settings
    with pytest.raises(CoterieError, match='"min_size"'):
        settings(Mine)


class FedRep(coterie.Method):
    """Plain averaging under the name of a registered method."""


def mlp(classes: int) -> torch.nn.Module:
    """A model under the name of a built-in one."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, classes))


def test_own_objects_are_not_mistaken_for_built_in_ones(tmp_path: Path) -> None:
    small: dict[str, Any] = {"clients": 3, "rounds": 1, "epochs": 1, "workers": 1}
    x = np.random.default_rng(0).normal(size=(120, 1, 8, 8)).astype(np.float32)
    data = coterie.from_arrays(x, np.arange(120) % 10, name="digits")
    cases = {"method": FedRep, "data": data, "model": mlp}
    for name, thing in cases.items():
        out = tmp_path / name
        given: dict[str, Any] = {"method": "fedavg", "data": "digits", "model": "mlp", name: thing}
        made = coterie.run(**given, out=out, **small)
        if name == "data":  # made in this test, so it cannot be imported; the others are imported by name
            for reopen in (coterie.resume, lambda path: coterie.open_run(path).personal(0)):
                with pytest.raises(CoterieError, match="data of your own"):
                    reopen(out)
        else:
            found = coterie.open_run(out).personal(0)
            for a, b in zip(made.personal(0).parameters(), found.parameters(), strict=True):
                assert torch.equal(a, b)
        again = coterie.open_run(out, **{name: thing})
        for a, b in zip(made.personal(0).parameters(), again.personal(0).parameters(), strict=True):
            assert torch.equal(a, b)
        coterie.resume(out, **{name: thing}, workers=1)


def test_a_comparison_does_not_mix_data(tmp_path: Path) -> None:
    rng, small = np.random.default_rng(0), {"clients": 3, "rounds": 1, "epochs": 1, "workers": 1}
    for fold in range(2):
        np.savez(tmp_path / "mine.npz", x=rng.normal(size=(90, 5)).astype(np.float32), y=np.arange(90) % 3)
        if fold == 0:
            coterie.compare(["fedavg"], tmp_path / "mine.npz", out=tmp_path / "c", **small)
    with pytest.raises(CoterieError, match="have changed since it ran"):
        coterie.compare(["fedavg", "fedprox"], tmp_path / "mine.npz", out=tmp_path / "c", **small)


def test_a_damaged_run_of_a_comparison_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more: dict[str, Any] = {"clients": 3, "rounds": 3, "epochs": 1, "workers": 1, "eval_every": 1, "out": tmp_path}
    before = coterie.compare(["fedavg"], **more).table().drop(columns=["s/round", "CPU s"])
    (tmp_path / "fedavg-s0" / "eval" / "000002.npz").write_bytes(b"")
    events = tmp_path / "local-s0" / EVENTS
    events.write_bytes(events.read_bytes()[:-20])
    after = coterie.compare(["fedavg"], **more).table().drop(columns=["s/round", "CPU s"])
    assert before.equals(after)
    assert "000002.npz is damaged" in caplog.text and f"{events} is " in caplog.text


def test_resume_with_a_different_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 255, (60, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(60) % 3)
    chosen = settings("fedavg", data=str(tmp_path / "mine.npz"), clients=2, rounds=2, epochs=1, model="lenet5")
    monkeypatch.setattr(native, "_wanted", None)  # its value in a fresh process
    session = prepare(chosen, Engine(workers=1))
    execute(session, tmp_path / "run", Callbacks(should_stop=lambda: True))
    monkeypatch.setenv("COTERIE_NATIVE", "0")
    with pytest.raises(CoterieError, match="cannot be continued bit-identically"):
        coterie.resume(tmp_path / "run")
