"""Pauses, hostile devices, errors in hooks, and runs that go back to an earlier round, in real processes."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

from coterie.engine import codec
from coterie.federation.cloud import status as st
from coterie.federation.localhost.trial import LocalFederation
from coterie.storage import checkpoint
from support import TESTS
from support.replayed import same_as_replay

pytestmark = pytest.mark.long

ROUNDS = 6
GIVEN: dict[str, Any] = {
    "data": "digits", "subset": 400, "model": "mlp", "partition": "dirichlet(0.5)", "join": 1.0, "epochs": 100,
    "lr": 0.001, "rounds": ROUNDS, "eval_every": ROUNDS, "watch": False, "final_trained": False,
}  # fmt: skip
PATIENCE = 600.0  # seconds for a whole run on a busy machine


class Faulty(LocalFederation):
    """A federation with hostile devices, or with an error in the cloud's method."""

    lies: dict[int, str] = {}  # modes of hostile_device.py by number of the device  # noqa: RUF012
    broken = ""  # mode of broken_cloud.py
    again: tuple[str, ...] = ()  # options for a cloud that is started again

    def command(self, name: str) -> list[str]:
        kind, _, number = name.partition("-")
        plain = super().command(name)
        if name == "cloud" and self.again:
            plain = [sys.executable, "-m", "coterie", "serve", "--resume", str(self.out), *self.again]
        if name == "cloud" and self.broken:
            return [sys.executable, str(TESTS / "support" / "broken_cloud.py"), self.broken, *plain[3:]]
        if kind == "device" and int(number) in self.lies:
            return [sys.executable, str(TESTS / "support" / "hostile_device.py"), self.lies[int(number)], *plain[4:]]
        return plain


def federation(
    folder: Path, min_clients: int = 3, more: tuple[str, ...] = (), kind: Any = LocalFederation, **changes: Any
) -> Any:
    given = {**GIVEN, **changes}
    return kind(folder / "federation", "fedrep", 4, 0, given, deadline=20.0, min_clients=min_clients, more=more)


def until(test: Any, what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_a_run_without_devices_pauses_and_ends_with_code_3(tmp_path: Path) -> None:
    with federation(tmp_path, more=("--patience", "5")) as f:
        f.wait(PATIENCE, round=2)
        for i in range(4):
            f.children[f"device-{i}"].kill()
        until(lambda: f.status().get("state") == "paused", "it never paused")
        assert "of at least 3 clients" in f.status()["reason"]
        assert f.children["cloud"].wait(120) == 3
        done = f.events()[-1]["round"]
        assert done < ROUNDS and not [e for e in f.events() if len(e["failed"]) > 1], (
            "a round passed without its quorum"
        )
        assert f.status()["state"] == "failed" and f.status()["reason"].startswith("too few clients for 5 s")
        assert f.children["cloud"].log.read_text().count("paused, waiting for at most 5 s") == 1


def test_a_paused_run_resumes_when_devices_return_and_tells_them_its_end(tmp_path: Path) -> None:
    with federation(tmp_path, min_clients=4) as f:
        f.wait(PATIENCE, round=2)
        for i in (1, 2):
            f.children[f"device-{i}"].kill()
        until(lambda: f.status().get("state") == "paused", "it never paused")
        for i in (1, 2):
            f.launch(f"device-{i}")
        f.wait(PATIENCE)
        assert all(f.children[f"device-{i}"].wait(60) == 0 for i in range(4)), "devices did not learn the end"
        for i in range(4):
            text = f.children[f"device-{i}"].log.read_text()
            assert "has ended after 6 rounds; the personal model is" in text and "round 6 of 6: trained" in text
    assert [e["failed"] for e in f.events()] == [[]] * ROUNDS
    assert f.status()["state"] == "ended"
    same_as_replay(f, tmp_path / "replay")


def test_a_hostile_device_is_refused_and_quarantined(tmp_path: Path) -> None:
    f = federation(tmp_path, kind=Faulty)
    f.lies = {1: "huge"}
    with f:
        f.wait(PATIENCE)
        status = st.read_status(f.out)
    reasons = [e["reasons"]["1"] for e in f.events()]
    refused = [r for r in reasons if "device-1: the upload is" in r and "times as large as usual" in r]
    assert 1 <= len(refused) <= 3 and reasons[-1] == "device-1: it is in quarantine", reasons
    assert not any(e["nonfinite"] for e in f.events()), "the training of honest clients diverged"
    assert status["quarantine"].keys() == {"device-1"} and status["nodes"]["device-0"]["refusals"] == 0
    same_as_replay(f, tmp_path / "replay")


def test_a_sender_whose_upload_breaks_a_hook_is_refused(tmp_path: Path) -> None:
    f = federation(tmp_path, kind=Faulty)
    f.lies, f.broken = {1: "marked"}, "marked"
    with f:
        f.wait(PATIENCE)
    assert all(1 in e["failed"] for e in f.events())
    reasons = [e["reasons"]["1"] for e in f.events()]
    wanted = "device-1: FedRep failed on the upload: IndexError: index 99 is out of range"
    assert 1 <= reasons.count(wanted) <= 3 and reasons[-1] == "device-1: it is in quarantine", reasons
    same_as_replay(f, tmp_path / "replay")


def test_a_broken_hook_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    f = federation(tmp_path, kind=Faulty)
    f.broken = "always"
    with f:
        assert f.children["cloud"].wait(PATIENCE) == 2
        assert f.status()["state"] == "failed" and "whoever is left out: IndexError" in f.status()["reason"]
        assert "Traceback" in (f.out / "failure.log").read_text()
        assert f.children["cloud"].tail(1).startswith("coterie: FedRep failed in round 1, whoever is left out")


def test_a_run_that_goes_back_gives_the_same_results_again(tmp_path: Path) -> None:
    f = federation(tmp_path, kind=Faulty)
    f.stay = True
    with f:
        f.wait(PATIENCE)
        whole = (f.out / "events.jsonl").read_bytes()
        before = checkpoint.newest(f.out, "FedRep")
        models = [f.model(i).read_bytes() for i in range(4)]
        f.again = ("--from-round", "3")
        f.launch("cloud")
        until(lambda: f.events()[-1]["round"] < ROUNDS, "it did not go back")
        f.wait(PATIENCE)
        assert (f.out / "events.jsonl").read_bytes() == whole
        after = checkpoint.newest(f.out, "FedRep")
        assert codec.equal([before.server, before.edges], [after.server, after.edges])
        assert [f.model(i).read_bytes() for i in range(4)] == models
    same_as_replay(f, tmp_path / "replay")


def test_a_killed_cloud_is_shown_as_dead(tmp_path: Path) -> None:
    with federation(tmp_path) as f:
        f.wait(PATIENCE, round=1)
        f.children["cloud"].kill()
        time.sleep(st.HEARTBEAT_TIMEOUT + 2)
        shown = subprocess.run(
            [sys.executable, "-m", "coterie", "status", str(f.out)], capture_output=True, text=True, check=True
        ).stdout
    assert shown.startswith("dead (last heartbeat ") and "of 6" in shown
