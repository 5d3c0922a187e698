"""A run's folder: damaged, moved or lost files are reported in a sentence, and written data are durable."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.storage import atomic as disk
from coterie.storage.run_folder import (
    Folder,
    checkpoints,
    read_checkpoint,
    read_evaluation,
    read_log,
    read_settings,
    read_timing,
)


def written(path: Path, rounds: int = 5, **settings: object) -> Path:
    """A small folder as a run leaves it: evaluations in rounds 2 and 4, checkpoints at 4 and 5."""
    folder = Folder(path)
    folder.write_settings({"settings": {"lr": 0.05, **settings}})
    folder.open_logs()
    for t in range(1, rounds + 1):
        if t % 2 == 0:
            folder.evaluation(t, {"clients": np.arange(3), "personal/test/loss": np.ones(3) / t})
        folder.event(round=t, loss=1 / t, participants=[0, 1])
        folder.timing(round=t, seconds=0.1)
        folder.write_checkpoint(t, b"state of round %d" % t)
    folder.close()
    return path


def flips(blob: bytes, step: int = 1) -> list[bytes]:
    """Every `step`-th single-bit flip."""
    return [
        blob[: n // 8] + bytes([blob[n // 8] ^ (1 << n % 8)]) + blob[n // 8 + 1 :]
        for n in range(0, 8 * len(blob), step)
    ]


def test_two_equal_runs_are_equal_in_bytes(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    files = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    assert [str(f) for f in files] == [
        "checkpoints/000004.state", "checkpoints/000005.state", "eval/000002.npz", "eval/000004.npz",
        "events.jsonl", "lock", "settings.json", "timing.jsonl",
    ]  # fmt: skip
    assert all((a / f).read_bytes() == (b / f).read_bytes() for f in files)


def test_every_flipped_bit_of_events_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "run") / "events.jsonl"
    whole, rows = path.read_bytes(), read_log(path).rows
    for blob in flips(whole):
        path.write_bytes(blob)
        log = read_log(path)
        assert str(path) in log.damage and "line" in log.damage
        assert all(r in rows for r in log.rows)


def test_lines_that_are_lost_repeated_or_swapped_are_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "run") / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for n, other in enumerate([lines[:1] + lines[2:], lines[:2] + lines[1:], [lines[1], lines[0], *lines[2:]]]):
        path.write_bytes(b"".join(other))
        assert "damaged in line" in read_log(path).damage, n


def test_every_flipped_bit_of_settings_and_checkpoints_is_named(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    settings, checkpoint = run / "settings.json", run / "checkpoints" / "000005.state"
    whole = checkpoint.read_bytes()
    for blob in flips(whole):
        checkpoint.write_bytes(blob)
        with pytest.raises(CoterieError, match=r"000005\.state is damaged"):
            read_checkpoint(checkpoint)
    content, whole = read_settings(run), settings.read_bytes()
    for blob in flips(whole):
        settings.write_bytes(blob)
        try:
            assert read_settings(run) == content
        except CoterieError as e:
            assert "settings.json" in str(e)
    settings.write_bytes(whole.replace(b"0.05", b"0.06"))
    with pytest.raises(CoterieError, match="damaged or edited"):
        read_settings(run)


def test_every_flipped_bit_of_an_evaluation_is_named(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    event, file = read_log(run / "events.jsonl").rows[1], run / "eval" / "000002.npz"
    assert np.array_equal(read_evaluation(run, event)["clients"], np.arange(3))
    for blob in [*flips(file.read_bytes(), 7), b""]:
        file.write_bytes(blob)
        with pytest.raises(CoterieError, match=r"000002\.npz is damaged"):
            read_evaluation(run, event)
    file.unlink()
    with pytest.raises(CoterieError, match=r"000002\.npz is missing"):
        read_evaluation(run, event)


def test_a_checkpoint_of_another_run_or_round_is_refused(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path / "ours"), written(tmp_path / "theirs", lr=0.1)
    newest = ours / "checkpoints" / "000005.state"
    newest.write_bytes((theirs / "checkpoints" / "000005.state").read_bytes())
    with pytest.raises(CoterieError, match="another run"):
        read_checkpoint(newest)
    newest.write_bytes((ours / "checkpoints" / "000004.state").read_bytes())
    with pytest.raises(CoterieError, match="damaged"):
        read_checkpoint(newest)
    assert read_checkpoint(checkpoints(ours)[0]) == b"state of round 4"


def test_a_log_goes_on_where_the_checkpoint_says(tmp_path: Path) -> None:
    whole, cut = written(tmp_path / "whole"), tmp_path / "cut"
    folder = Folder(cut)
    folder.write_settings({"settings": {"lr": 0.05}})
    folder.open_logs()
    offsets = []
    for t in range(1, 4):
        if t % 2 == 0:
            folder.evaluation(t, {"clients": np.arange(3), "personal/test/loss": np.ones(3) / t})
        folder.event(round=t, loss=1 / t, participants=[0, 1])
        folder.timing(round=t, seconds=0.1)
        offsets.append(folder.offsets())
    folder.close()
    with (cut / "events.jsonl").open("ab") as f:
        f.write(b'{"round": 4, "lo')  # killed while writing
    assert [r["round"] for r in read_log(cut / "events.jsonl").rows] == [1, 2, 3]
    (cut / "timing.jsonl").unlink()  # is missed, but decides nothing
    folder = Folder(cut)
    folder.open_logs(*offsets[1])
    for t in range(3, 6):
        if t % 2 == 0:
            folder.evaluation(t, {"clients": np.arange(3), "personal/test/loss": np.ones(3) / t})
        folder.event(round=t, loss=1 / t, participants=[0, 1])
        folder.timing(round=t, seconds=0.1)
    folder.close()
    assert (cut / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    assert [r["round"] for r in read_timing(cut / "timing.jsonl").rows] == [3, 4, 5]


def test_going_on_after_damage_is_refused_or_mends_the_log(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    events, size = run / "events.jsonl", (run / "events.jsonl").stat().st_size
    (run / "eval" / "000004.npz").write_bytes(b"")
    folder = Folder(run)
    with pytest.raises(CoterieError, match=r"000004\.npz is damaged"):
        folder.open_logs(size)
    events.write_bytes(events.read_bytes().replace(b'"loss": 0.5', b'"loss": 0.6'))
    with pytest.raises(CoterieError, match="line 2"):
        folder.open_logs(size)
    said: list[str] = []
    folder.open_logs(size, complain=said.append)
    folder.event(round=6)
    folder.close()
    assert len(said) == 2
    log = read_log(events)
    assert not log.damage and [r["round"] for r in log.rows] == [1, 3, 4, 5, 6] and "evaluation" not in log.rows[2]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/coterie", "x" * 300, "a\0b", "closed/run"])
def test_a_place_that_cannot_be_a_folder_gets_a_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    if place.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(CoterieError, match="cannot be used"):
        Folder(tmp_path / place)


def test_one_writer_at_a_time_also_among_threads(tmp_path: Path) -> None:
    folder, found = Folder(tmp_path / "run"), []

    def other() -> None:
        try:
            Folder(tmp_path / "." / "run")
        except CoterieError as e:
            found.append(str(e))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "in use by another run of this process" in found[0]
    script = "from coterie.storage.run_folder import Folder; from pathlib import Path; "
    script += f"Folder(Path({str(tmp_path / 'run')!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "in use by another process" in done.stderr
    folder.close()
    Folder(tmp_path / "run").close()


def test_a_folder_without_a_run_is_left_as_it_was(tmp_path: Path) -> None:
    Folder(tmp_path / "new").close()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "note").write_text("mine")
    Folder(tmp_path / "old").close()
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["note"]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    for name in (".settings.json.0a1b2c3d.tmp", "eval/.000002.npz.0a1b2c3d.tmp", "checkpoints/.000005.x.tmp"):
        (run / name).write_bytes(b"half")
    Folder(run).close()
    assert not list(run.rglob("*.tmp"))


def test_files_follow_the_umask_and_states_are_private(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        run = written(tmp_path / "run")
        disk.write_atomic(run / "clients" / "1-000001.state", b"state", durable=False, mode=0o600)
    finally:
        os.umask(old)
    mode = {str(p.relative_to(run)): stat.S_IMODE(p.stat().st_mode) for p in run.rglob("*")}
    assert mode["clients/1-000001.state"] == 0o600
    assert all(m == 0o644 for name, m in mode.items() if "." in name and not name.startswith("clients"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_met_where_the_line_is_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.write_settings({})
    folder.open_logs()
    folder._close_logs()
    folder._events = open("/dev/full", "ab", buffering=0)  # type: ignore[assignment]  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match="No space left"):
        folder.event(round=1)
    folder.close()  # and not here


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    line, _ = disk.seal({"loss": float("nan"), "most": [np.float64("inf"), np.int64(3)]})
    assert json.loads(line) == {"loss": None, "most": [None, 3], "crc": json.loads(line)["crc"]}
