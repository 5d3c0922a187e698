"""Pauses, hostile devices, errors in hooks, and runs that go back to an earlier round, in real processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.engine import codec
from coterie.federation.cloud import status as st
from coterie.storage import checkpoint
from support.paced import ROUNDS, SECONDS, Paced
from support.replayed import same_as_replay

pytestmark = pytest.mark.long

DEADLINE = 60.0  # seconds for an answer, on a busy machine
FEW = {"rounds": 30}


def paused(f: Paced) -> bool:
    return f.status().get("state") == "paused"


def test_a_run_without_devices_pauses_and_ends_with_code_3(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE, more=("--patience", "5")) as f:
        f.until_failed()
        for i in range(4):
            f.children[f"device-{i}"].kill()
        f.until(lambda: paused(f), "it never paused")
        assert "of at least 3 clients" in f.status()["reason"]
        assert f.children["cloud"].wait(120) == 3
        assert f.events()[-1]["round"] < ROUNDS
        assert not [e for e in f.events() if len(e["failed"]) > 1], "a round passed without its quorum"
        assert f.status()["state"] == "failed" and f.status()["reason"].startswith("too few clients for 5 s")
        assert f.log("cloud").count("paused, waiting for at most 5 s") == 1


def test_a_paused_run_resumes_when_devices_return_and_tells_them_its_end(tmp_path: Path) -> None:
    with Paced(tmp_path, devices=4, deadline=DEADLINE, given=FEW) as f:
        f.until_failed()
        for i in (1, 2):
            f.children[f"device-{i}"].kill()
        f.until(lambda: paused(f), "it never paused")
        for i in (1, 2):
            f.launch(f"device-{i}")
        f.finish()
        assert all(f.children[f"device-{i}"].wait(60) == 0 for i in range(4)), "devices did not learn the end"
        for i in range(4):
            text = f.log(f"device-{i}")
            assert "has ended after 30 rounds; the personal model is" in text and "round 30 of 30: trained" in text
        assert [e["failed"] for e in f.events()] == [[]] * 30
        assert f.status()["state"] == "ended"
        same_as_replay(f, tmp_path / "replay")


def test_a_hostile_device_is_refused_and_quarantined(tmp_path: Path) -> None:
    f = Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE, late=(1,))
    f.modes["device-1"] = "huge"
    with f:
        f.until_failed(1)
        f.launch("device-1")
        f.until(lambda: f.reason(1) == "device-1: it is in quarantine", "the quarantine")
        f.finish()
        reasons = [e["reasons"]["1"] for e in f.events()]
        refused = [r for r in reasons if "device-1: the upload is" in r and "times as large as usual" in r]
        assert len(refused) == 3 and reasons[-1] == "device-1: it is in quarantine", reasons
        assert not any(e["nonfinite"] for e in f.events()), "the training of honest clients diverged"
        status = st.read_status(f.out)
        assert status["quarantine"].keys() == {"device-1"} and status["nodes"]["device-0"]["refusals"] == 0
        same_as_replay(f, tmp_path / "replay")


def test_a_sender_whose_upload_breaks_a_hook_is_refused(tmp_path: Path) -> None:
    f = Paced(tmp_path, devices=4, min_clients=3, deadline=DEADLINE, late=(1,))
    f.modes["device-1"], f.broken = "marked", "marked"
    with f:
        f.until_failed(1)
        f.launch("device-1")
        f.until(lambda: f.reason(1) == "device-1: it is in quarantine", "the quarantine")
        f.finish()
        assert all(1 in e["failed"] for e in f.events())
        reasons = [e["reasons"]["1"] for e in f.events()]
        wanted = "device-1: FedRep failed on the upload: IndexError: index 99 is out of range"
        assert reasons.count(wanted) == 3 and reasons[-1] == "device-1: it is in quarantine", reasons
        same_as_replay(f, tmp_path / "replay")


def test_a_broken_hook_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    f = Paced(tmp_path, min_clients=3, deadline=DEADLINE)
    f.broken = "always"
    with f:
        assert f.children["cloud"].wait(SECONDS) == 2
        assert f.status()["state"] == "failed" and "whoever is left out: IndexError" in f.status()["reason"]
        assert "Traceback" in (f.out / "failure.log").read_text()
        assert f.children["cloud"].tail(1).startswith("coterie: FedRep failed in round 1, whoever is left out")


def test_a_run_that_goes_back_gives_the_same_results_again(tmp_path: Path) -> None:
    f = Paced(tmp_path, deadline=DEADLINE, given={"rounds": 6})
    f.stay = True
    with f:
        f.finish()
        whole = (f.out / "events.jsonl").read_bytes()
        before = checkpoint.newest(f.out, "FedRep")
        models = [f.model(i).read_bytes() for i in range(3)]
        f.again = ("--from-round", "3")
        f.hold.touch()
        f.launch("cloud")
        f.until(lambda: f.events()[-1]["round"] < 6, "it did not go back")
        f.finish()
        assert (f.out / "events.jsonl").read_bytes() == whole
        after = checkpoint.newest(f.out, "FedRep")
        assert codec.equal([before.server, before.edges], [after.server, after.edges])
        assert [f.model(i).read_bytes() for i in range(3)] == models
        same_as_replay(f, tmp_path / "replay")


def test_a_killed_cloud_is_shown_as_dead(tmp_path: Path) -> None:
    with Paced(tmp_path, deadline=DEADLINE) as f:
        f.until(f.events, "a round")
        f.children["cloud"].kill()
        time.sleep(st.HEARTBEAT_TIMEOUT + 2)
        shown = subprocess.run(
            [sys.executable, "-m", "coterie", "status", str(f.out)], capture_output=True, text=True, check=True
        ).stdout
    assert shown.startswith("dead (last heartbeat ") and f"of {ROUNDS}" in shown
