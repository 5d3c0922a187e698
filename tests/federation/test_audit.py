"""The audit log: what came and left is in it, a lost or changed line is noticed, and nobody else may read it."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.engine.messages import TrainAnswer
from coterie.errors import CoterieError
from coterie.federation.policy import audit
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog, locate_audit_log, read_audit_log
from support.in_process_link import NET, federation, simulated


def filled(path: Path, rounds: int = 4) -> AuditLog:
    log = AuditLog(path)
    for t in range(1, rounds + 1):
        log.write(AuditLine("r", t, "train", "out", "cloud", {"model": 10 * t}, {"w": 10 * t}))
    return log


def test_lines_are_read_back_with_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / AUDIT_FILE
    filled(path).write(AuditLine("r", 5, "score", "out", "cloud", refused="no\nmore"))
    found = read_audit_log(path)
    assert not found.damage and not found.torn and len(found.lines) == 5
    assert found.lines[1] | {"time": ""} == {
        "time": "", "run": "r", "round": 2, "message": "train", "way": "out", "peer": "cloud",
        "sizes": {"model": 20}, "entries": {"w": 20},
    }  # fmt: skip
    assert found.lines[4]["refused"] == "no\nmore" and "sizes" not in found.lines[4]
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_process_goes_on_with_the_chain(tmp_path: Path) -> None:
    path = tmp_path / AUDIT_FILE
    filled(path).close()
    before = path.read_bytes()
    filled(path, 2).close()
    assert path.read_bytes().startswith(before)
    assert not read_audit_log(path).damage and len(read_audit_log(path).lines) == 6


@pytest.mark.parametrize("keep", [1, 20, -3])
def test_a_line_that_was_cut_short_is_no_damage(tmp_path: Path, keep: int) -> None:
    path = tmp_path / AUDIT_FILE
    filled(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:keep])
    assert (read_audit_log(path).torn, read_audit_log(path).damage, len(read_audit_log(path).lines)) == (1, [], 3)
    filled(path, 2).close()
    assert (read_audit_log(path).torn, read_audit_log(path).damage, len(read_audit_log(path).lines)) == (1, [], 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"model": 20', b'"model": 19'), *lines[2:]],
        lambda lines: [*lines[:-1], lines[-1].replace(b'"model": 40', b'"model": 39')],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0], b"x\n", *lines[2:]],
    ],
)
def test_a_line_that_was_removed_or_changed_is_noticed(tmp_path: Path, change: Any) -> None:
    path = tmp_path / AUDIT_FILE
    filled(path).close()
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert read_audit_log(path).damage and "\n" not in read_audit_log(path).damage[0]
    shown = CliRunner().invoke(app, ["audit-log", str(path)])
    assert shown.exit_code == 1 and "changed" in shown.stderr


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CoterieError, match=r"the audit log .* cannot be used"):
        AuditLog(tmp_path / "file" / AUDIT_FILE)
    log = AuditLog(tmp_path / AUDIT_FILE)
    log.close()
    with pytest.raises(CoterieError, match=r"the audit log .* cannot be written"):
        log.write(AuditLine("r", 1, "train", "out", "cloud"))


def test_audit_log_shows_rounds_and_refusals(tmp_path: Path) -> None:
    filled(tmp_path / AUDIT_FILE).write(AuditLine("r", 2, "score", "out", "cloud", refused="not \x1b[31mallowed"))
    shown = CliRunner().invoke(app, ["audit-log", str(tmp_path), "--round", "2"])
    assert shown.exit_code == 0 and "model 20 B" in shown.stdout and "2 of 5 lines" in shown.stdout
    assert "?[31mallowed" in shown.stdout and "\x1b" not in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["audit-log", str(tmp_path), "--refused", "--json"]).stdout)
    assert [line["round"] for line in found["lines"]] == [2]
    assert found["chain"] == read_audit_log(tmp_path / AUDIT_FILE).chain
    with pytest.raises(CoterieError, match="is not an audit log and contains none"):
        locate_audit_log(tmp_path / "nothing")


# ---- a federation --------------------------------------------------------------------------------------------------
def lines(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    found = read_audit_log(folder / AUDIT_FILE)
    assert not found.damage and not found.torn
    return [line for line in found.lines if wanted.items() <= line.items()]


@pytest.mark.parametrize("edges", [0, 2])
def test_both_ends_log_the_same_bytes_and_bits_stay_the_same(tmp_path: Path, edges: int) -> None:
    with federation(tmp_path, "fedrep", edges, join=1.0, subset=200, settings={"head_epochs": 1}) as f:
        assert f.loop.run()
        events = (tmp_path / "run" / "events.jsonl").read_text()
        simulated(tmp_path / "local", f.session)
        up = sum(e.size({}) for e in f.session.method.schema("up").entries.values())
    assert events == (tmp_path / "local" / "events.jsonl").read_text()
    for i in range(4):
        left = lines(tmp_path / "devices" / str(i), message="train", way="out")
        assert [line["sizes"]["model"] for line in left] == [up] * 3
        assert all(sum(line["entries"].values()) == up and "scores" in line["sizes"] for line in left)
        if not edges:
            came = lines(tmp_path / "run", message="train", way="in", peer=f"device-{i}")
            assert [line["sizes"] for line in came] == [line["sizes"] for line in left]
    if edges:
        came = lines(tmp_path / "run", message="train", way="in", peer="edge-0")
        assert [line["sizes"]["model"] for line in came] == [2 * up] * 3
        left = lines(tmp_path / "edge-0", message="train", way="out", peer="cloud")
        assert [line["sizes"] for line in came] == [line["sizes"] for line in left]
    sent = lines(tmp_path / "run", message="train", way="out")
    assert len(sent) == 3 * (edges or 4)


def test_a_refusal_is_in_the_logs_of_both_sides(tmp_path: Path) -> None:
    with federation(tmp_path, "fedrep", join=1.0, rounds=2) as f:

        def short(answer: Any) -> Any:
            if isinstance(answer, TrainAnswer):
                answer.upload.popitem()
            return answer

        f.link.spoil["device-1"] = short
        assert f.loop.run()
        with pytest.raises(CoterieError):
            f.link.handlers["device-0"]("hello", 0, None, memoryview(b"nothing that could be read"))
    (first, _) = [line for line in lines(tmp_path / "run", peer="device-1") if "refused" in line]
    assert first["round"] == 1 and first["refused"].startswith("the upload lacks")


@pytest.mark.parametrize(
    ("allow", "words", "edges"),
    [
        (Allow(models=(NET,), methods=("fedavg",)), 'does not allow the method "fedrep"', 1),
        (Allow(), "which this host does not allow", 0),
        (Allow(models=(NET,), rounds=2), "the plan asks for 3 rounds, this host allows 2", 0),
        (Allow(models=(NET,), epochs=1), "round 1 would train for 2 epochs, this host allows 1", 0),
        (Allow(models=(NET,), kinds=("prototype", "scores")), 'does not let "model" leave', 0),
        (Allow(models=(NET,), entries=("nothing",)), "does not let the entry", 0),
        (Allow(models=(NET,), bytes_up=100), "a round of this method sends at least", 0),
        (Allow(models=(NET,), bytes_down=100), "a round of this method receives at least", 0),
    ],
)
def test_a_plan_beyond_what_is_allowed_is_refused_and_nothing_leaves(
    tmp_path: Path, allow: Allow, words: str, edges: int
) -> None:
    with federation(tmp_path, "fedrep", edges, allow={1: allow}, clients=2, rounds=3, settings={"head_epochs": 1}) as f:
        f.runtime.membership.update()
        name = "edge-0/device-1" if edges else "device-1"
        assert words in f.runtime.membership.excluded[name] and "\n" not in f.runtime.membership.excluded[name]
        assert any(
            line.startswith(f"{name} is not in the run: ") and words in line for line in f.runtime.liveness.errors
        )
    (refused,) = lines(tmp_path / "devices" / "1", way="out")
    assert words in refused["refused"] and "sizes" not in refused
    (told,) = lines(tmp_path / "run", peer=name)
    assert told["refused"] == refused["refused"]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_job_beyond_what_is_allowed_is_refused_and_nothing_leaves(tmp_path: Path, way: str) -> None:
    """The plan is within the bounds, the round is not: training after evaluation is too much."""
    with federation(tmp_path / "first", "fedrep", join=1.0, rounds=2, eval_every=1, clients=2) as f:
        schemas = f.session.method.schema("up"), f.session.method.schema("down")
        up, down = (s.nbytes() for s in schemas)
    enough = {"bytes_up": up + 100} if way == "up" else {"bytes_down": 2 * down - 1}
    allow = Allow(models=(NET,), **enough)
    with federation(tmp_path, "fedrep", join=1.0, rounds=2, eval_every=1, clients=2, allow={1: allow}) as f:
        assert f.loop.run()
        assert any("device-1: round" in line and "this host allows" in line for line in f.runtime.liveness.errors), (
            f.runtime.liveness.errors
        )
    mine = lines(tmp_path / "devices" / "1")
    assert any(line["message"] == "train" and "in a round" in line.get("refused", "") for line in mine)
    for t in (1, 2, 3):
        left = sum(sum(line.get("sizes", {}).values()) for line in mine if line["way"] == "out" and line["round"] == t)
        assert left <= allow.bytes_up


def test_a_full_file_is_put_aside_and_the_chain_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 400)
    monkeypatch.setattr(audit, "_TAIL_BYTES", 10)  # less than a line
    path = tmp_path / AUDIT_FILE
    filled(path, 5).close()
    filled(path, 5).close()
    parts = sorted(p.name for p in tmp_path.iterdir())
    assert parts[:3] == [AUDIT_FILE, f"{AUDIT_FILE}.1", f"{AUDIT_FILE}.2"] and len(parts) >= 4
    whole = read_audit_log(path)
    assert not whole.damage and [line["round"] for line in whole.lines] == [1, 2, 3, 4, 5] * 2
    (tmp_path / f"{AUDIT_FILE}.1").rename(tmp_path / "moved")
    rest = read_audit_log(path)
    assert not rest.damage and 0 < len(rest.lines) < 10 and rest.chain == whole.chain
    (tmp_path / f"{AUDIT_FILE}.2").unlink()
    (tmp_path / "moved").rename(tmp_path / f"{AUDIT_FILE}.1")
    assert read_audit_log(path).damage  # one in the middle is missing
