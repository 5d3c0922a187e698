"""The Ray runtime: the same run to the bit, over two nodes, and when actors or nodes die."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.config import Engine, settings
from coterie.engine import codec
from coterie.engine.messages import Job, TrainRequest
from coterie.engine.session import Callbacks, execute, prepare
from coterie.errors import CoterieError
from coterie.runtimes import ray as module
from coterie.runtimes.inline import Inline
from coterie.storage.client_states import StateLostError

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all tests


# ---- without Ray -----------------------------------------------------------------------------------------------------
def test_without_ray_one_sentence_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CoterieError, match=r"runtime = ray needs Ray; install it with `pip install 'coterie\[ray\]'`"):
        execute(_session("ray"), tmp_path / "run")


def test_an_address_without_ray_is_refused(tmp_path) -> None:
    session = prepare(settings(method="fedavg", clients=4), Engine(address="10.0.0.1:6379"))
    with pytest.raises(CoterieError, match="address is used only with runtime = ray"):
        execute(session, tmp_path / "run")


def test_lost_states_send_the_run_back_to_its_checkpoint_and_it_ends_the_same(tmp_path, monkeypatch) -> None:
    whole, broken, said = tmp_path / "whole", tmp_path / "broken", []
    execute(_session("local", workers=1), whole)
    original, failed = Inline.train, []

    def failing(self, requests):
        t = requests[0].round
        if t in (2, 5) and t not in failed:  # before the first checkpoint, and after it
            failed.append(t)
            raise StateLostError("gone")
        return original(self, requests)

    monkeypatch.setattr(Inline, "train", failing)
    assert execute(_session("local", workers=1), broken, Callbacks(on_warning=said.append))
    assert failed == [2, 5] and sum("gone; continuing" in s for s in said) == 2
    _same_runs(whole, broken)


def test_an_actor_answers_as_the_clients_do_and_keeps_their_states_apart(tmp_path) -> None:
    """What an actor does between hand-over and hand-back, without a cluster."""
    session = _session("local", workers=1)
    clients, runtime = session.clients(), Inline(session.clients(), session.states(tmp_path))
    server = session.method.setup()
    first = [TrainRequest(i, 1, server["w"]) for i in range(3)]
    actor = module.Actor(module._without_items(clients), session.federation.dataset.x.numpy(), True, None, 0)
    assert len(module._without_items(clients).federation.dataset.x) == 0 < len(clients.federation.dataset.x)

    def done(round, states):
        held = [module.Beside(i) for i in range(3)] if states else [None] * 3
        jobs = [Job(replace(r, round=round), h) for r, h in zip(first, held, strict=True)]
        (kind, packed), *left = actor.work("train", module._packed(jobs), *states)
        assert kind == "r"
        answers = module._unpacked(packed)
        assert [a.state for a in answers] == [module.Beside(i) for i in range(3)]
        return answers, left

    answers, states = done(1, [])
    expected, _ = runtime.train(first)
    for a in answers:
        assert codec.equal(a.answer, expected[a.answer.client])
        assert codec.equal(module._unpacked(states[a.answer.client]), runtime._pending[a.answer.client])
    runtime.keep(1, [0, 1, 2])
    again, _ = done(2, states)
    expected, _ = runtime.train([replace(r, round=2) for r in first])
    assert all(codec.equal(a.answer, expected[a.answer.client]) for a in again)


# ---- with Ray --------------------------------------------------------------------------------------------------------
def _session(runtime: str, address: str | None = None, method: str = "fedrep", workers: int = 2, **more):
    base = {"rounds": 6, "clients": 8, "epochs": 1, "eval_every": 3, "checkpoint_every": 3, "public": 20} | more
    return prepare(settings(method=method, **base), Engine(workers=workers, runtime=runtime, address=address))


def _same_runs(a: Path, b: Path) -> None:
    """Everything but the clock, byte for byte."""
    names = {p.relative_to(a) for p in a.rglob("*") if p.is_file()}
    assert names == {p.relative_to(b) for p in b.rglob("*") if p.is_file()}
    for name in names - {Path("timing.jsonl"), Path("settings.json")}:  # settings name the runtime
        if name.parts[0] == "checkpoints":
            x, y = (replace(codec.read_value(f / name), timing=0) for f in (a, b))
            assert codec.equal(x, y), name
        elif name.suffix == ".npz":
            x, y = (dict(np.load(f / name)) for f in (a, b))
            assert x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x), name
        else:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one processor each, as processes of their own, and no processor at the head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    yield SimpleNamespace(cluster=made, address=made.address, nodes=nodes)
    made.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("state", "method"),
    [("memory", "fedrep"), ("memory", "fedavg"), ("memory", "ecs-fl"), ("memory", "fedgmh"), ("disk", "fedrep")],
)
def test_two_nodes_give_the_run_of_one_machine_to_the_bit(state, method, cluster, tmp_path) -> None:
    for place in ("local", "ray"):
        session = _session(place, cluster.address if place == "ray" else None, method)
        engine = session.engine.model_copy(update={"state": state})
        execute(replace(session, engine=engine), tmp_path / place)
    _same_runs(tmp_path / "local", tmp_path / "ray")


@pytest.mark.long
def test_actors_sit_on_both_nodes(cluster, tmp_path) -> None:
    session = _session("ray")
    runtime = module.RayRuntime(session.clients(), session.states(tmp_path), 2, cluster.address)
    try:
        ask = lambda member: __import__("ray").get_runtime_context().get_node_id()  # noqa: E731 - goes there by value
        where = [m.__ray_call__.remote(ask) for m in runtime._members]
        assert len(set(runtime.ray.get(where))) == 2
    finally:
        runtime.close()


@pytest.mark.long
def test_an_actor_that_dies_is_replaced_and_the_run_is_the_same(cluster, tmp_path, monkeypatch) -> None:
    deaths = []
    original = module.RayRuntime._send

    def killing(self, i, what, jobs):
        refs = original(self, i, what, jobs)
        round = jobs[0].request.round
        if what == "train" and round in (2, 4) and round not in deaths:
            deaths.append(round)
            self.ray.kill(self._members[i])
        return refs

    execute(_session("local"), tmp_path / "local")
    monkeypatch.setattr(module.RayRuntime, "_send", killing)
    execute(_session("ray", cluster.address), tmp_path / "ray")
    assert deaths == [2, 4]
    _same_runs(tmp_path / "local", tmp_path / "ray")


@pytest.mark.long
def test_a_node_that_dies_takes_states_with_it_and_the_run_is_the_same(tmp_path, monkeypatch) -> None:
    """Big states, so that they lie on the node; the one left does all the work, from the newest checkpoint on."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(module, "READY", 3.0)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    done, said = [], []

    def tell(progress):
        done.append(progress.round)
        if len(done) == 5:  # checkpoint at 3, states of 4 and 5 only in the cluster
            made.remove_node(nodes[0], allow_graceful=False)

    big = {"method": "local", "model": "mlp", "model_options": {"hidden": [600, 600]}, "join": 1.0, "rounds": 7}
    try:
        execute(_session("local", **big), tmp_path / "local")
        execute(
            _session("ray", made.address, **big), tmp_path / "ray", Callbacks(on_round=tell, on_warning=said.append)
        )
    finally:
        made.shutdown()
    assert any("lost" in s for s in said) and done.count(4) == 2
    _same_runs(tmp_path / "local", tmp_path / "ray")


@pytest.mark.long
def test_mistakes_are_one_sentence(cluster, tmp_path) -> None:
    with pytest.raises(CoterieError, match="workers = 5 is more than the cluster's 2 processors"):
        execute(_session("ray", cluster.address, workers=5), tmp_path / "a")
    with pytest.raises(CoterieError, match=r"there is no Ray cluster at address = 127.0.0.1:1"):
        execute(_session("ray", "127.0.0.1:1"), tmp_path / "b")


@pytest.mark.long
def test_the_command_runs_on_a_cluster_of_its_own_and_leaves_the_stop_handler_alone(tmp_path) -> None:
    pytest.importorskip("ray")
    words = ["run", "fedrep", "--clients", "6", "--rounds", "3", "--epochs", "1", "--workers", "2", "-q", "--out"]
    for runtime in ("local", "ray"):
        command = [sys.executable, "-m", "coterie", *words, str(tmp_path / runtime), "--runtime", runtime]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout == "" and done.stderr == "", done.stderr
    _same_runs(tmp_path / "local", tmp_path / "ray")
    before = signal.getsignal(signal.SIGTERM)
    ray = module._ray()
    if not ray.is_initialized():
        module._connect(ray, 1, None)
        ray.shutdown()
    assert signal.getsignal(signal.SIGTERM) is before
