"""Trust between hosts, with real processes: a cloud that asks for too much, runs one after another, TLS versions."""

import json
import os
import socket
import ssl
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import numpy as np
from safetensors.torch import load_file

from coterie.config import settings
from coterie.core import tree as T
from coterie.engine import codec
from coterie.engine.messages import TrainRequest
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.identity import authority as certs
from coterie.federation.localhost import processes
from coterie.federation.localhost.processes import Child
from coterie.federation.localhost.trial import LocalFederation
from coterie.federation.policy.audit import AUDIT_FILE, read_audit_log
from coterie.federation.protocol.messages import Common, DeviceJob, PlanText
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import listening
from support.federations import SMALL, simulated

pytestmark = pytest.mark.long

RUN = "0123456789abcdef" * 2
ALLOWED = """
methods = ["fedrep"]
models = ["mlp"]
[settings]
lr = {max = 0.1}
[settings.fedrep]
head_epochs = {max = 2}
[bounds]
rounds = 4
epochs = 3
bytes_up = 1000
"""


def asked(plan: dict[str, Any], **changes: Any) -> str:
    """A plan with other settings, as a cloud that changes its own program would send it."""
    return json.dumps({**plan, "settings": {**plan["settings"], **changes}})


def test_a_hostile_cloud_gets_nothing_that_a_device_does_not_allow(tmp_path: Path) -> None:
    made = certs.init(tmp_path / "certs", [])
    key = certs.add_node(made.root, "alice")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x_train=rng.integers(0, 255, (40, 4, 4), np.uint8), y_train=rng.integers(0, 3, 40))
    (tmp_path / "allow.toml").write_text(ALLOWED)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    chosen = settings("fedrep", clients=2, rounds=4, batch=32, lr=0.05, model="mlp", head_epochs=2, epochs=1)
    cloud = open_session(chosen, CloudSettings("certs", shape=(1, 4, 4), classes=3))
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json")
    shared = T.clone(cloud.method.setup()["w"])
    port = processes.free_port()
    join = [sys.executable, "-m", "coterie", "join", "--cloud", f"127.0.0.1:{port}", "--ca", str(made.ca)]
    join += ["--key", str(key), "--data", str(tmp_path / "mine.npz"), "--state", str(tmp_path / "state")]
    env = processes.bound({**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    device = Child("alice", [*join, "--allow", str(tmp_path / "allow.toml")], tmp_path / "alice.log", env)
    job = DeviceJob(RUN, -1, TrainRequest(1, 1, shared=shared))
    reasons: list[str] = []
    with listening(made, "127.0.0.1", port) as link:

        def wait(nodes: list[str]) -> None:
            until = time.monotonic() + 300
            while link.nodes() != nodes:
                assert time.monotonic() < until, device.tail()
                time.sleep(0.2)

        def send(kind: str, round: int, what: Any) -> str:
            common = None if kind == "hello" else codec.pack(Common())
            found = link.send({"alice": codec.pack(what)}, kind, round, 120, common, 2**20)
            return failed.why if (failed := found.errors.get("alice")) else ""

        device.start()
        wait(["alice"])
        own = plan["settings"]
        for words, text in (
            ('the code "evil:run" as its model, which this host does not allow', asked(plan, model="evil:run")),
            ('this host does not allow the model "lenet5"', asked(plan, model="lenet5")),
            ('this host does not allow the method "fedavg"', asked(plan, method="fedavg", settings={})),
            ("the plan sets lr = 0.9, this host allows at most 0.1", asked(plan, lr=0.9)),
            (
                "head_epochs = 9.0, this host allows at most 2",
                asked(plan, settings={**own["settings"], "head_epochs": 9}),
            ),
            ("the plan asks for 500 rounds, this host allows 4", asked(plan, rounds=500)),
            ("the plan asks for 50 epochs in a round, this host allows 3", asked(plan, epochs=50)),
            ("the plan sets warm_start", asked(plan, warm_start="/etc")),
            ("speaks protocol 99", json.dumps({**plan, "protocol": 99})),
        ):
            reasons.append(words)
            assert words in send("hello", 0, PlanText(text))
            assert "no plan of this run" in send("train", 1, job)
        assert not (tmp_path / "ran").exists() and not (tmp_path / "state" / RUN).exists()
        # an allowed plan; its rounds ask for more
        small = asked(plan)
        up = cloud.method.schema("up").nbytes()
        assert up > 1000
        reasons.append(f"a round of this method sends at least {up} bytes, this host allows 1000")
        assert reasons[-1] in send("hello", 0, PlanText(small))
        device.kill()
        wait([])
        (tmp_path / "allow.toml").write_text(ALLOWED.replace("1000", str(up + 500)))
        device.start()
        wait(["alice"])
        assert send("hello", 0, PlanText(small)) == ""
        reasons += ["round 5 is beyond the 4 rounds", "would send"]
        beyond = replace(job, request=replace(job.request, round=5))
        assert "round 5 is beyond the 4 rounds that this host allows" in send("train", 5, beyond)
        assert send("train", 1, job) == ""
        assert f"bytes, this host allows {up + 500} in a round" in send("train", 1, job)
        log = device.log.read_text()
    device.stop()
    found = read_audit_log(tmp_path / "state" / AUDIT_FILE)
    assert not found.damage
    left = [line for line in found.lines if line["way"] == "out" and "sizes" in line]
    assert [(line["message"], line["round"]) for line in left] == [("train", 1)]  # nothing else left the device
    refused = [line["refused"] for line in found.lines if "refused" in line]
    assert all(any(words in reason for reason in refused) for words in reasons)
    assert all("\n" not in reason and reason in log for reason in refused[-2:])


class Again(LocalFederation):
    """Further clouds with the same certificates, for the same devices."""

    number = 0

    def start(self) -> None:
        self.stay = True
        super().start()

    @property
    def out(self) -> Path:
        return self.folder / f"run-{self.number}"

    def next(self, **given: Any) -> None:
        self.number, self.given = self.number + 1, {**self.given, **given}
        self.children.pop("cloud", None)
        self.launch("cloud")


def test_runs_one_after_another_with_the_same_keys_and_states_are_kept_apart(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": 2, "eval_every": 2}
    runs: dict[int, tuple[str, dict[str, Any]]] = {}
    with Again(tmp_path / "federation", "fedrep", 2, 0, given, deadline=120) as f:
        for n in range(3):
            if n == 2:  # the third finds devices that were started again
                f.launch("device-0")
            if n:
                f.next(seed=n, rounds=2 + n)
            f.wait(240)
            runs[n] = f.run, dict(f.given)
        models = {
            (n, i): load_file(f.state(i) / run / "model.safetensors") for n, (run, _) in runs.items() for i in (0, 1)
        }
    assert len({run for run, _ in runs.values()}) == 3
    for n, (run, chosen) in runs.items():
        more = {k: v for k, v in chosen.items() if k != "clients"}
        alone = simulated(tmp_path / f"alone-{n}", "fedrep", 2, more)
        assert (f.folder / f"run-{n}" / "events.jsonl").read_text() == (alone.path / "events.jsonl").read_text()
        for i in (0, 1):
            lines = [line for line in read_audit_log(f.state(i) / AUDIT_FILE).lines if line.get("run") == run]
            trained = [line["round"] for line in lines if line["message"] == "train" and line["way"] == "out"]
            assert trained == list(range(1, chosen["rounds"] + 1))
    assert any(not np.array_equal(models[0, 0][k], models[1, 0][k]) for k in models[0, 0])


def test_only_tls_1_3_is_answered(tmp_path: Path) -> None:
    made, port = certs.init(tmp_path / "certs", []), processes.free_port()
    serve = [sys.executable, "-m", "coterie", "serve", "fedavg", "--certs", str(made.root), "--host", "127.0.0.1"]
    serve += ["--port", str(port), "--shape", "1,4,4", "--classes", "3", "--clients", "2"]
    env = processes.bound(os.environ)
    cloud = Child("cloud", [*serve, "--out", str(tmp_path / "run")], tmp_path / "cloud.log", env).start()
    until = time.monotonic() + 200
    while "waiting for" not in cloud.log.read_text():
        assert cloud.alive and time.monotonic() < until, cloud.tail()
        time.sleep(0.2)
    answered = {}
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=str(made.ca))
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2", "http/1.1"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is old is the point
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = version
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as s:
                    answered[version.name] = s.version()
            except (ssl.SSLError, ConnectionError):
                answered[version.name] = None
    cloud.stop()
    assert answered == {"TLSv1_1": None, "TLSv1_2": None, "TLSv1_3": "TLSv1.3"}
