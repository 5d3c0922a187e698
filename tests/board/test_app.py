"""The board shows the state of run folders, never writes to them, and changes nothing without the token."""

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the board needs the extra board")

import httpx

import coterie
from coterie.board import control, guard, metrics, runs, server
from coterie.board.app import make_app, open_board
from coterie.board.federation import FederationStatus
from coterie.errors import CoterieError
from coterie.federation.cloud.liveness import Liveness
from coterie.storage import atomic as disk
from coterie.storage import run_folder as folder

pytestmark = pytest.mark.xdist_group("board")
PLAIN = {"clients": 4, "rounds": 3, "join": 1.0, "eval_every": 1, "epochs": 1, "min_size": 10, "workers": 1}
EVIL = '<img src=x onerror="alert(1)">'
TOKEN = "Vm9-the-right-one"
HOME = "http://127.0.0.1:8765"
RIGHT = {"x-coterie-token": TOKEN, "origin": HOME}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two finished runs, one with a name that contains a script."""
    root = tmp_path_factory.mktemp("board")
    coterie.run("fedavg", out=root / "deep" / "er" / "fedavg", **PLAIN)
    coterie.run("local", out=root / EVIL, **PLAIN)
    return root


class Client:
    """Requests without a network."""

    def __init__(self, app: Any):
        self.app = app

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=HOME) as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Read with the token, unless other headers replace it."""
        return self.request("GET", path, **{**more, "headers": {"x-coterie-token": TOKEN, **more.get("headers", {})}})

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)


def page(root: Path, federation: Path | None = None) -> Client:
    return Client(make_app(open_board(root, federation), TOKEN, 8765, ("board.example",)))


def state_of(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file with its time and content."""
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(path.rglob("*")) if p.is_file()}


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_the_state_has_the_numbers_of_the_runs(made) -> None:
    found = {r["id"]: r for r in page(made).get("/api/state").json()["runs"]}
    assert set(found) == {"deep/er/fedavg", EVIL}
    mine, run = found["deep/er/fedavg"], coterie.open_run(made / "deep" / "er" / "fedavg")
    assert mine["state"] == "finished" and (mine["round"], mine["rounds"]) == (3, 3)
    assert mine["score"] == pytest.approx(100 * run.summary()["personal"]["last"])
    assert mine["bytes"] == sum(run.summary()["bytes"].values())
    assert mine["curves"]["personal"]["x"] == [1, 2, 3]
    assert mine["curves"]["personal"]["y"] == pytest.approx(list(100 * run.curve()), abs=1e-3)


def test_other_tasks_have_their_own_metric(tmp_path) -> None:
    settings = {"settings": {"rounds": 1}, "method": {}, "task": {"name": "regression", "outputs": 1}}
    event = {"round": 1, "participants": [], "failed": [], "nonfinite": [], "bytes": {}, "watch": {}, "loss": None}
    seen = runs.WatchedRun(tmp_path, "x", settings, [{**event, "eval": {"personal/test": {"mean": 2.5}}}])
    about = seen.snapshot()
    assert about["score"] == 2.5 and not about["metric"]["percent"] and about["curves"]["personal"]["y"] == [2.5]
    assert f'metric="{about["metric"]["name"]}"}} 2.5' in metrics.prometheus_text([about], None)


def test_a_metric_that_is_undefined_in_some_rounds_is_left_out_of_the_curves(tmp_path) -> None:
    settings = {"settings": {"rounds": 2}, "method": {}, "task": {"name": "binary", "outputs": 2}}
    event = {"participants": [], "failed": [], "nonfinite": [], "bytes": {}, "loss": None}
    rows = [{"round": t, **event, "watch": {"before": {"mean": v}}, "eval": {"personal/test": {"mean": v}}}
            for t, v in ((1, 0.5), (2, None))]  # fmt: skip
    about = runs.WatchedRun(tmp_path, "x", settings, rows).snapshot()
    assert about["state"] != "damaged" and about["score"] is None
    assert about["curves"]["personal"]["x"] == about["curves"]["participants"]["x"] == [1]


def test_runs_that_differ_in_their_seed_only_are_one_group(tmp_path) -> None:
    groups = [runs._group({"rounds": 3, "lr": lr, "seed": seed}) for seed, lr in ((0, 0.1), (1, 0.1), (0, 0.2))]
    assert groups[0] == groups[1] != groups[2]


def test_a_long_curve_is_thinned_with_its_bytes(tmp_path) -> None:
    seen = runs.WatchedRun(tmp_path, "x", {"settings": {"rounds": 1000}, "method": {}})
    event = {"participants": [], "failed": [], "nonfinite": [], "eval": {}, "loss": 1.0}
    watch = {"before": {"mean": 0.5}}
    sent = {"device-cloud": {"up": {"model": 1_000_000}}}
    seen.rows = [{"round": t, **event, "bytes": sent, "watch": watch if t % 2 else {}} for t in range(1, 1001)]
    for curve in seen.curves().values():
        assert len(curve["x"]) == len(curve["y"]) == len(curve["mb"]) == runs._POINTS and curve["x"] == curve["mb"]
    assert seen.curves()["loss"]["x"][-1] == 1000 and seen.curves()["participants"]["x"][-1] == 999


def test_reading_changes_nothing_in_a_run(made) -> None:
    before, client = state_of(made), page(made)
    for path in ("/", "/api/state", "/metrics", "/api/run?run=deep/er/fedavg", "/api/log?run=deep/er/fedavg"):
        assert client.get(path).status_code == 200
    assert state_of(made) == before and {p.name for p in made.iterdir()} == {"deep", EVIL}


def test_details_have_the_clients_with_labels_and_course(made) -> None:
    about = page(made).get("/api/run", params={"run": "deep/er/fedavg"}).json()
    z = coterie.open_run(made / "deep" / "er" / "fedavg").evaluation()
    assert about["clients"]["labels"] == z["personal/test/total"].tolist()
    assert (
        about["clients"]["course"]["FedAvg"]["x"] == [1, 2, 3] and about["settings"]["settings"]["method"] == "fedavg"
    )


def test_a_log_read_in_pieces_is_the_whole_log(made, tmp_path) -> None:
    blob = (made / "deep" / "er" / "fedavg" / "events.jsonl").read_bytes()
    target, log, at = tmp_path / "events.jsonl", folder.Log([]), 0
    whole = folder.read_log(made / "deep" / "er" / "fedavg" / "events.jsonl").rows
    for cut in (0, 10, 700, blob.index(b"\n") + 1, blob.index(b"\n") + 30, len(blob) - 1, len(blob)):
        target.write_bytes(blob[:cut])
        log, at = folder.more_log(target, log, at)
        assert log.rows == whole[: blob[:cut].count(b"\n")] and not log.damage
        assert at == blob[:cut].rfind(b"\n") + 1
    target.write_bytes(blob[: blob.index(b"\n") + 1])  # resumed from an older checkpoint
    assert folder.more_log(target, log, at)[0].rows == whole[:1]


@pytest.mark.parametrize(
    ("name", "spoil", "state", "words"),
    [
        ("events.jsonl", lambda b: b[:-40], "stopped", ""),  # an incomplete line
        ("events.jsonl", lambda b: b.replace(b'"round": 2', b'"round": 7'), "damaged", "damaged in line 2"),
        ("events.jsonl", lambda b: b"\x00\xff" * 50 + b"\n" + b, "damaged", "damaged in line 1"),
        ("settings.json", lambda b: b[:200], "damaged", "not JSON"),
        ("settings.json", lambda b: b"[]", "damaged", "no checksum"),
        ("settings.json", lambda b: None, "damaged", "settings.json is missing"),
        ("timing.jsonl", lambda b: b"\xff\xfe{", "finished", ""),
        ("events.jsonl", lambda b: disk.seal({"round": 1})[0], "damaged", "a different version"),
    ],
)
def test_damaged_and_incomplete_files_are_reported(made, tmp_path, name, spoil, state, words) -> None:
    shutil.copytree(made / "deep" / "er" / "fedavg", tmp_path / "r" / "x")
    file = tmp_path / "r" / "x" / name
    spoilt = spoil(file.read_bytes())
    file.unlink() if spoilt is None else file.write_bytes(spoilt)
    client = page(tmp_path / "r")
    (found,) = client.get("/api/state").json()["runs"]
    assert found["state"] == state and words in found["trouble"], found["trouble"]
    assert client.get("/api/run?run=x").status_code == 200 and client.get("/metrics").status_code == 200


def _hold(path: Path, pipe: Any) -> None:
    with folder.Folder(path) as f:
        f.write_settings({})
        pipe.send("open")
        pipe.recv()


def test_a_writing_process_and_its_end_are_noticed(tmp_path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_hold, args=(tmp_path / "run", theirs))
    child.start()
    assert ours.recv() == "open" and folder.writer(tmp_path / "run") == child.pid
    ours.send("close")
    child.join(20)
    assert folder.writer(tmp_path / "run") is None and folder.writer(tmp_path / "nowhere") is None


def test_the_time_left_is_that_of_recent_rounds(tmp_path) -> None:
    seen = runs.WatchedRun(tmp_path, "x", {"settings": {"rounds": 100}, "method": {}})
    event = {"participants": [], "failed": [], "nonfinite": [], "bytes": {}, "eval": {}, "watch": {}, "loss": None}
    seen.rows = [{"round": t, **event} for t in range(1, 51)]
    seen.seconds = {t: 100.0 if t <= 30 else 2.0 for t in range(1, 51)}
    assert seen.snapshot()["left"] == 100.0


def test_a_folder_whose_name_is_not_utf8_is_listed(made, tmp_path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd-\xff"))
    shutil.copytree(made / "deep" / "er" / "fedavg", odd)
    client = page(tmp_path)
    (found,) = client.get("/api/state").json()["runs"]
    assert found["id"] == "odd-\ufffd" and client.get("/api/run", params={"run": found["id"]}).status_code == 200
    assert client.get("/metrics").status_code == 200
    (odd / "settings.json").write_text("{")
    (found,) = page(tmp_path).get("/api/state").json()["runs"]
    assert "odd-\ufffd" in found["trouble"]


# ---- who may ask what ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8765"}, 200),
        ({"host": "board.example"}, 200),  # behind a known proxy
        ({"host": "evil.example"}, 421),  # DNS rebinding
        ({"host": "127.0.0.1:9999"}, 421),
        ({"host": "127.0.0.1.evil.example:8765"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": HOME, "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_requests_with_unknown_hosts_and_origins_are_refused(made, headers, status) -> None:
    assert page(made).get("/api/state", headers=headers).status_code == status


@pytest.mark.parametrize("what", ["start", "stop", "resume", "token"])
def test_changes_need_the_token(made, what, monkeypatch) -> None:
    client, about = page(made), {"run": "deep/er/fedavg", "method": "fedavg"}
    monkeypatch.setattr(control.Control, "start", lambda self, asked: "started")
    for headers in ({}, {"x-coterie-token": ""}, {"x-coterie-token": TOKEN[:-1]}, {"x-coterie-token": "ï" + TOKEN}):
        answer = client.post(f"/api/{what}", json=about, headers={k: v.encode("latin-1") for k, v in headers.items()})
        assert answer.status_code == 401, headers
    assert client.get(f"/api/{what}?run=deep/er/fedavg&x-coterie-token={TOKEN}").status_code in (404, 405)
    client = page(made)
    assert (
        client.post(f"/api/{what}", json=about, headers={**RIGHT, "origin": "http://evil.example"}).status_code == 403
    )
    assert client.post(f"/api/{what}", json=about, headers=RIGHT).status_code in (200, 400)


@pytest.mark.parametrize("path", ["/api/state", "/api/stream", "/api/run?run=deep/er/fedavg", "/api/log", "/metrics"])
def test_nothing_is_shown_without_the_token(made, path) -> None:
    client = page(made)
    for token in ("", "wrong", TOKEN[:-1]):
        answer = client.get(path, headers={"x-coterie-token": token})
        assert answer.status_code == 401 and "fedavg" not in answer.text
    assert str(made) not in client.get("/", headers={"x-coterie-token": ""}).text
    bearer = {"x-coterie-token": "", "authorization": f"Bearer {TOKEN}"}  # as Prometheus sends it
    assert path == "/api/stream" or client.get(path, headers=bearer).status_code in (200, 404)


def test_wrong_tokens_are_answered_late_and_lock_nobody_out(made, monkeypatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(guard.asyncio, "sleep", sleep)
    client = page(made)
    for _ in range(3):
        assert client.post("/api/token", headers={"x-coterie-token": "wrong"}).status_code == 401
        assert client.post("/api/token", headers=RIGHT).status_code == 200
    assert slept == [0.5] * 3


def test_a_kept_token_is_private_and_long(tmp_path) -> None:
    path = tmp_path / "token"
    token = server._kept_token(path)
    assert len(token) >= 20 and server._kept_token(path) == token and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(CoterieError, match="other users"):
        server._kept_token(path)
    path.write_text("short")
    with pytest.raises(CoterieError, match="20 characters"):
        server._kept_token(path)


@pytest.mark.parametrize("name", ["../x", "/etc", "deep", "..%2f..%2fetc", "deep/er/fedavg/../fedavg", ".", ""])
def test_no_path_leads_out_of_the_list_of_runs(made, name) -> None:
    client = page(made, made)
    for query in ({"run": name}, {"node": name}):
        assert client.get("/api/log", params=query).status_code == 404
    assert client.get("/api/run", params={"run": name}).status_code == 404
    for what in ("stop", "resume"):
        assert client.post(f"/api/{what}", json={"run": name}, headers=RIGHT).status_code == 404
    assert client.get(f"/{name}").status_code in (200, 404) and client.get("/static/../app.py").status_code == 404


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"method": "fedavgg"}, 'did you mean "fedavg"'),
        ({}, "method"),
        ({"method": "fedavg", "data": "os:system"}, "names code"),
        ({"method": "fedavg", "model": "a.b:c"}, "names code"),
        ({"method": "fedavg", "loss": "a.b:c"}, "names code"),
        ({"method": "fedavg", "--out": "x"}, "unknown setting"),
        ({"method": "fedavg", "out=x": "1"}, "unknown setting"),
        ({"method": "fedavg", "rounds": "-3"}, "rounds"),
        ({"method": "fedavg", "rounds": [1]}, "one short value"),
        ({"method": "fedavg", "data": "a\nb"}, "one short value"),
        ({"method": "fedavg", "name": "../x"}, "letters, digits"),
        ({"method": "fedavg", "name": ".hidden"}, "letters, digits"),
        ({"method": "fedavg", "name": "deep"}, "there is a folder"),
    ],
)
def test_invalid_runs_are_refused(made, asked, words, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was started"))
    answer = page(made).post("/api/start", json=asked, headers=RIGHT)
    assert answer.status_code == 400 and words in answer.text, answer.text


def test_values_cannot_become_options(tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **k: started.append(argv))
    control.Control(tmp_path).start({"method": "fedprox", "data": "--out", "mu": "0.5", "name": "n", "rounds": "7"})
    (argv,) = started
    assert argv[3:6] == ["run", "fedprox", f"--out={tmp_path / 'n'}"]
    assert set(argv[6:]) == {"--data=--out", "--rounds=7", "--set=mu=0.5"}


def test_only_running_runs_are_stopped_and_only_unfinished_ones_resumed(made, monkeypatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *a: pytest.fail("a process was signalled"))
    for what, words in (("stop", "is not running"), ("resume", "has finished")):
        answer = page(made).post(f"/api/{what}", json={"run": "deep/er/fedavg"}, headers=RIGHT)
        assert answer.status_code == 400 and words in answer.text


@pytest.mark.parametrize("body", [b"x" * 70_000, b"[1]", b"{", b'"a"', b"[" * 50_000])
def test_bodies_that_are_not_a_small_object_are_refused(made, body) -> None:
    assert page(made).post("/api/stop", content=body, headers=RIGHT).status_code == 400


def test_the_page_is_self_contained_and_locked_down(made) -> None:
    answer = page(made).get("/")
    policy = answer.headers["content-security-policy"]
    nonce = re.search(r"'nonce-([^']+)'", policy).group(1)
    assert answer.text.count("<script") == answer.text.count(f'<script nonce="{nonce}">') == 1
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "http://" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff" and TOKEN not in answer.text
    assert page(made).get("/").headers["content-security-policy"] != policy


def test_public_addresses_need_an_allowed_host(tmp_path) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        with pytest.raises(CoterieError, match="--allow-host"):
            server.serve_board(tmp_path, host=host)
    assert server.loopback("127.0.0.1") and server.loopback("::1") and not server.loopback("board.example")
    with server.listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(CoterieError, match="choose a different --port"):
            server.serve_board(tmp_path, port=taken.getsockname()[1])


# ---- metrics ---------------------------------------------------------------------------------------------------------
def test_metrics_are_in_the_format_of_prometheus(made) -> None:
    answer = page(made).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    form = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\[\\"n])*",?)*\})? [0-9.e+-]+')
    lines = answer.text.splitlines()
    assert all(form.fullmatch(x) for x in lines if not x.startswith("# ")), lines
    assert 'coterie_run_round{run="deep/er/fedavg",method="fedavg",seed="0"} 3' in lines
    assert any(r"onerror=\"alert(1)\"" in x for x in lines) and 'coterie_runs{state="finished"} 2' in lines
    assert lines.count("# TYPE coterie_run_round gauge") == 1


# ---- federations -----------------------------------------------------------------------------------------------------
def status(now: float, **more: object) -> dict[str, object]:
    seen = Liveness()
    seen.observe({"edge-0", "device-9"}, {"edge-0": {"edge-0/a"}})
    seen.uploaded("edge-0/a", 4)
    seen.refused("device-9", 4, "device-9: the upload lacks fc.weight")
    node = {n: {"connected": n in seen.connected, "last_seen": s.last, "round": s.round, "uploads": s.uploads,
                "refused": s.refused, "refusals": s.refusals, "client": i,
                "role": "edge" if n == "edge-0" else "device"}
            for i, (n, s) in enumerate(sorted(seen.nodes.items()))}  # fmt: skip
    node["edge-0/b"] = {"role": "device", "client": 7, "connected": False, "last_seen": now - 50}
    return {"state": "running", "method": "FedPC", "round": 4, "rounds": 9, "text": "accuracy 50.0", "places": 3,
            "nodes": node, "doing": "round 5: training", "waiting_for": ["device-9"], "heartbeat": now, "time": now,
            "wire": {"edge-cloud": {"up": {"payload": 5, "framing": 2}}}, "errors": ["e"], **more}  # fmt: skip


def test_a_federation_is_a_tree_with_refusals_and_awaited_nodes(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps(status(time.time())))
    found = page(tmp_path, tmp_path).get("/api/state").json()["federation"]
    (edge,) = found["edges"]
    assert [(d["name"], d["online"], d["round"]) for d in edge["devices"]] == [
        ("edge-0/a", True, 4), ("edge-0/b", False, None),
    ]  # fmt: skip
    (device,) = found["devices"]
    assert device["refused"][0]["why"] == "the upload lacks fc.weight" and device["refusals"] == 1
    assert found["waiting_for"] == ["device-9"] and found["online"] == 2 and found["score"] == "accuracy 50.0"
    text = metrics.prometheus_text([], found)
    assert 'coterie_node_online{node="edge-0/b",role="device"} 0' in text
    assert 'coterie_node_refused_uploads_total{node="device-9",role="device"} 1' in text


def test_a_cloud_without_heartbeat_is_silent_and_its_nodes_are_offline(tmp_path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(status(time.time() - 60)))
    assert FederationStatus(tmp_path).snapshot()["state"] == "dead"  # and its process is gone
    (tmp_path / "status.json").write_text(json.dumps(status(time.time() - 60, pid=os.getpid())))
    found = FederationStatus(tmp_path).snapshot()
    assert found["state"] == "silent" and "no heartbeat" in found["trouble"] and found["online"] == 0
    (tmp_path / "status.json").write_text(json.dumps(status(time.time() - 60, state="ended")))
    assert FederationStatus(tmp_path).snapshot()["trouble"] == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": 1}', json.dumps({"state": "x", "time": "y"}), "null"])
def test_an_unreadable_status_is_reported(tmp_path, text) -> None:
    (tmp_path / "status.json").write_text(text)
    assert "cannot be read" in FederationStatus(tmp_path).snapshot()["trouble"]
    assert page(tmp_path, tmp_path).get("/metrics").status_code == 200
