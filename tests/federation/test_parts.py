"""Parts of a federation in one process: answers of a device, refused messages, jobs and bytes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.config import settings
from coterie.core import tree as T
from coterie.engine import codec
from coterie.engine.messages import Score, ScoreAnswer, ScoreRequest, TrainAnswer, TrainRequest
from coterie.errors import CoterieError
from coterie.export.personal_model import load_model
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.device import DeviceHandler
from coterie.federation.device_states import DeviceStates
from coterie.federation.policy.allow import Allow
from coterie.federation.protocol.messages import Common, DeviceJob, EdgeJob, split_common, with_common
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.validation import check_answer
from coterie.federation.wire_bytes import WireBytesLog

RUN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def cloud() -> Any:
    """Return the session of a cloud without data: two seats, images of 1 x 4 x 4, three classes."""
    chosen = settings(method="fedrep", clients=2, rounds=4, epochs=1, batch=8, model="mlp")
    return open_session(chosen, CloudSettings("certs", shape=(1, 4, 4), classes=3))


def test_a_session_on_the_devices_own_data_can_be_described(cloud: Any) -> None:
    assert cloud.described()["client_names"] is None


@pytest.fixture
def device(tmp_path: Path, cloud: Any) -> Iterator[DeviceHandler]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (40, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=rng.integers(0, 3, 40))
    handler = DeviceHandler(str(tmp_path / "mine.npz"), tmp_path / "state")
    handler.hello(FederationPlan.of(cloud, RUN).model_dump_json())
    yield handler
    handler.close()


def training(cloud: Any, round: int = 1, base: int = -1, client: int = 1, **more: Any) -> DeviceJob:
    shared = T.clone(cloud.method.setup()["w"])
    return DeviceJob(RUN, base, TrainRequest(client, round, **{"shared": shared, "watch": True, **more}))


def trained(device: DeviceHandler, cloud: Any, round: int = 1, base: int = -1, **more: Any) -> TrainAnswer:
    answer = device.answer("train", round, training(cloud, round, base, **more))
    assert isinstance(answer, TrainAnswer)
    return answer


# ---- a device ----------------------------------------------------------------------------------------------------
def test_an_answer_holds_the_upload_and_no_state(device: DeviceHandler, cloud: Any) -> None:
    answer = trained(device, cloud)
    assert set(answer.upload) == {k for k in cloud.method.ctx.w0 if not cloud.method.private(k)}
    check_answer(answer, training(cloud).request, answer.samples, cloud.method.ctx.task)
    states = DeviceStates(device.state / RUN / "1")
    assert states.rounds() == [1] and "own" in codec.read_value(states.path(1))


def test_a_repeated_round_gives_the_same_answer_and_starts_from_the_named_state(
    device: DeviceHandler, cloud: Any
) -> None:
    first = trained(device, cloud)
    assert codec.equal(trained(device, cloud), first)
    second = trained(device, cloud, 2, base=1)
    assert codec.equal(trained(device, cloud, 2, base=1), second)
    late = trained(device, cloud, 3, base=1)  # the cloud did not accept the upload of round 2
    assert DeviceStates(device.state / RUN / "1").rounds() == [1, 3]
    assert codec.equal(trained(device, cloud, 3, base=1), late)


def test_a_restarted_device_continues_with_its_state_and_seat(device: DeviceHandler, cloud: Any) -> None:
    trained(device, cloud)
    expected = trained(device, cloud, 2, base=1)
    device.close()
    again = DeviceHandler(device.data, device.state)
    assert codec.equal(trained(again, cloud, 2, base=1), expected)
    with pytest.raises(CoterieError, match="is client 1 of the run, not 0"):
        trained(again, cloud, 3, base=2, client=0)
    assert again.hello(FederationPlan.of(cloud, RUN).model_dump_json()).client == 1
    again.close()


def test_a_device_can_go_back_to_every_stored_state(device: DeviceHandler, cloud: Any) -> None:
    device.keep = 3
    answers = [trained(device, cloud, t, base=t - 1 or -1) for t in (1, 2, 3, 4)]
    states = DeviceStates(device.state / RUN / "1")
    assert states.rounds() == [1, 2, 3, 4]
    again = trained(device, cloud, 3, base=2)  # the cloud went back to round 2
    assert codec.equal(again, answers[2]) and states.rounds() == [1, 2, 3]
    assert codec.equal(trained(device, cloud, 4, base=3), answers[3])
    assert states.rounds() == [1, 2, 3, 4]
    trained(device, cloud, 2, base=1)
    with pytest.raises(
        CoterieError, match=r"state of round 3 is not here; there are those of rounds 1, 2 \(--keep 3\)"
    ):
        trained(device, cloud, 4, base=3)


def test_scoring_writes_the_personal_model_on_the_device(device: DeviceHandler, cloud: Any) -> None:
    from safetensors.torch import load_file

    samples = trained(device, cloud).samples
    request = ScoreRequest(1, 2, T.clone(cloud.method.setup()["w"]))
    answer = check_answer(
        device.answer("score", 2, DeviceJob(RUN, 1, request)), request, samples, cloud.method.ctx.task
    )
    assert isinstance(answer, ScoreAnswer) and set(answer.scores) == {"personal/test", "personal/val"}
    model = load_file(device.state / RUN / "model.safetensors")
    state = DeviceStates(device.state / RUN / "1").read(1)
    assert state is not None
    own = state["own"]
    assert model.keys() == cloud.method.ctx.w0.keys() and all(torch.equal(model[k], own[k]) for k in own)
    # the file alone is enough to repeat the score on raw bytes
    again, federation = load_model(device.state / RUN / "model.safetensors"), device.session(RUN).federation.own
    assert federation is not None and again.about.items.type == "uint8" and again.about.round == 1
    rows = federation.indices(0, "test")
    raw = federation.dataset
    score = answer.scores["personal/test"].counts
    accuracy = again.predict(raw.x[rows].squeeze(1).numpy(), raw.y[rows].numpy()).scores["accuracy"]
    assert accuracy == pytest.approx(float(score["hits"].sum() / score["total"].sum()))


def spoiled(job: DeviceJob, change: str) -> DeviceJob:
    shared = job.request.shared
    name = next(iter(shared))
    if change == "shape":
        shared[name] = shared[name][:-1]
    elif change == "nan":
        shared[name][0] = float("nan")
    elif change == "type":
        shared[name] = shared[name].double()
    elif change == "huge":
        shared[name][0] = 3e38
    elif change == "more":
        shared["more"] = torch.zeros(1)
    elif change == "less":
        del shared[name]
    elif change == "run":
        return replace(job, run="f" * 32)
    elif change == "path":
        return replace(job, run="../" * 10 + "ab")
    elif change == "base":
        return replace(job, base=5)
    elif change == "round":
        return replace(job, request=replace(job.request, round=2))
    elif change == "share":
        return replace(job, request=replace(job.request, share=2.0))
    elif change == "update":
        return replace(job, request=replace(job.request, log_update=True))
    return job


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("shape", "of shape"), ("nan", "NaN or infinity"), ("type", "of type float64"), ("huge", "larger than"),
        ("more", "not declared"), ("less", "lacks"), ("run", "no plan of this run"), ("path", "names no run"),
        ("base", "round 1 is over"), ("round", "holds a request of round 2"), ("share", "share must"),
        ("update", "does not send them"),
    ],
)  # fmt: skip
def test_a_device_refuses_invalid_jobs(device: DeviceHandler, cloud: Any, change: str, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        device.answer("train", 1, spoiled(training(cloud), change))
    assert DeviceStates(device.state / RUN / "1").rounds() == []


@pytest.mark.parametrize("message", [None, {}, Common(), training])
def test_a_device_answers_only_jobs(device: DeviceHandler, cloud: Any, message: Any) -> None:
    job = training(cloud) if callable(message) else message
    kind = "explode" if callable(message) else "train"
    with pytest.raises(CoterieError, match=r"expected a|cannot answer"):
        device.handle(kind, 1, None, memoryview(bytearray(codec.pack(job))))


def test_a_device_does_not_send_entries_that_its_method_does_not_declare(
    device: DeviceHandler, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = type(cloud.method).end

    def leaky(self: Any, state: Any, trained: Any, *more: Any) -> Any:
        state, upload = end(self, state, trained, *more)
        return state, replace(upload, tree=trained.params)  # the private head included

    monkeypatch.setattr(type(cloud.method), "end", leaky)
    with pytest.raises(CoterieError, match=r"the upload made here has an entry .* that is not declared"):
        trained(device, cloud)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"coterie": "9.9", "source": "x"}, r"the code of .* differs from that of the cloud \(Coterie 9.9\)"),
        ({"coterie": "9.9", "protocol": 99, "more": 1}, r"speaks protocol 99 \(Coterie 9.9\), this host protocol \d"),
        ({"w0": "x"}, "initial model differs"), ({"run": "short"}, "cannot be read"), ({"extra": 1}, "cannot be read"),
        ({"shape": [1, 8, 8]}, r"federation's are torch.float32 \(1, 8, 8\)"), ({"classes": ["0"]}, "not among the 1 "),
    ],
)  # fmt: skip
def test_an_incompatible_plan_is_refused(device: DeviceHandler, cloud: Any, change: Any, reason: str) -> None:
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json") | change
    with pytest.raises(CoterieError, match=reason):
        device.hello(json.dumps(plan))


@pytest.mark.parametrize(
    "change",
    [
        {"places": 10**7}, {"shape": [10**9, 10**9]}, {"shape": [-1]}, {"shape": [2**14, 2**14]}, {"shape": [1] * 9},
        {"targets": 10**12}, {"vocab": 10**12}, {"mean": [float("nan")]}, {"std": [0.0]}, {"std": [float("inf")]},
        {"mean": [0.0] * 100_000},
    ],
)  # fmt: skip
def test_a_plan_with_absurd_numbers_is_refused_before_it_is_used(cloud: Any, change: Any) -> None:
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json") | change
    with pytest.raises(CoterieError, match="the cloud's plan cannot be read") as e:
        FederationPlan.read(json.dumps(plan))
    assert "\n" not in str(e.value) and len(str(e.value)) < 400
    with pytest.raises(CoterieError, match="more than"):
        FederationPlan.read(json.dumps(plan) + " " * 2**20)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_options": {"hidden": [25_000] * 3}}, "mlp has 1250[0-9]{6} parameters, this host allows 100000000"),
        ({"model": None, "model_options": {"hidden": [25_000] * 3}}, "has 1250[0-9]{6} parameters"),
        ({"epochs": 1e6}, "asks for 1e.06 epochs in a round, this host allows 1000"),
        ({"rounds": 10**9}, "asks for 1000000000 rounds, this host allows 100000"),
    ],
)
def test_a_plan_cannot_exhaust_a_device(device: DeviceHandler, cloud: Any, change: Any, reason: str) -> None:
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json")
    plan["settings"] |= change
    with pytest.raises(CoterieError, match=reason):
        device.hello(json.dumps(plan))


def test_plans_of_runs_without_work_do_not_pile_up(
    device: DeviceHandler, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(device, cloud)
    plan = FederationPlan.of(cloud, RUN)
    for n in range(5):
        device.hello(plan.model_copy(update={"run": f"{n:032x}"}).model_dump_json())
    assert sorted(p.parent.name for p in device.state.glob("*/plan.json")) == [f"{4:032x}", RUN]
    monkeypatch.setattr("coterie.federation.device._MAX_RUNS", 1)
    with pytest.raises(CoterieError, match="has the states of 1 runs; remove those of old runs"):
        device.hello(plan.model_copy(update={"run": f"{5:032x}"}).model_dump_json())
    device.hello(plan.model_dump_json())  # the run that it has may go on


def test_a_different_package_version_with_the_same_protocol_is_accepted(device: DeviceHandler, cloud: Any) -> None:
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json") | {"coterie": "9.9"}
    assert device.hello(json.dumps(plan)).samples == 27


def test_an_unknown_method_is_refused(device: DeviceHandler, cloud: Any) -> None:
    plan = FederationPlan.of(cloud, RUN).model_dump(mode="json")
    plan["settings"]["method"] = "fedrp"
    with pytest.raises(CoterieError, match='unknown method "fedrp"'):
        device.hello(json.dumps(plan))


def test_a_full_disk_leaves_the_old_state_intact(
    device: DeviceHandler, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(device, cloud)
    before = DeviceStates(device.state / RUN / "1").read(1)

    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(codec, "save", full)
        with pytest.raises(CoterieError, match="could not be written: No space left"):
            trained(device, cloud, 2, base=1)
    assert codec.equal(DeviceStates(device.state / RUN / "1").read(1), before)


def test_two_processes_cannot_share_a_state(device: DeviceHandler) -> None:
    import subprocess
    import sys

    code = "from coterie.federation.device_states import lock_folder; from pathlib import Path; "
    code += f"lock_folder(Path({str(device.state)!r}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is in use by another process" in process.stderr


# ---- answers that are refused -----------------------------------------------------------------------------------
@pytest.fixture
def answer(device: DeviceHandler, cloud: Any) -> TrainAnswer:
    return trained(device, cloud)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("client", 0, "is of client 0, the request was for client 1"), ("samples", 0, "the hello reported"), 
        ("steps", -1, "-1 steps"),
        ("samples", 31, "the hello reported"), ("samples", True, "impossible value"),
        ("steps", 1.5, "impossible value"),
        ("note", {"a": "b"}, "impossible value"), ("note", {"a": 1e300}, "in the note, .a. is 1e"), 
        ("note", {str(i): 1.0 for i in range(2000)}, "too long"), ("after", {"hits": 1}, "impossible value"),
        ("upload", [], "impossible value"), ("upload", {"a": 1}, "impossible value"), ("update", torch.ones(1), "more"),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_refused(answer: TrainAnswer, cloud: Any, field: str, value: Any, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        check_answer(replace(answer, **{field: value}), training(cloud).request, answer.samples, cloud.method.ctx.task)


@pytest.mark.parametrize("change", ["hits", "negative", "length", "many"])
def test_an_impossible_score_is_refused(answer: TrainAnswer, cloud: Any, change: str) -> None:
    score = answer.before
    assert score is not None
    hits, total = score.counts["hits"], score.counts["total"]

    def changed(**counts: torch.Tensor) -> Score:
        return replace(score, counts={**score.counts, **counts})

    wrong = {
        "hits": changed(hits=total + 1), "negative": changed(hits=hits - 100), "length": changed(hits=hits[:2]),
        "many": changed(total=total + 2**40),
    }  # fmt: skip
    with pytest.raises(CoterieError, match="score"):
        check_answer(
            replace(answer, before=wrong[change]), training(cloud).request, answer.samples, cloud.method.ctx.task
        )


# ---- jobs and bytes ----------------------------------------------------------------------------------------------
def test_the_common_part_of_jobs_is_taken_out_and_put_back() -> None:
    w, mine = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    jobs = {
        "a": DeviceJob(RUN, 1, ScoreRequest(0, 2, {**w, "x": torch.ones(1)}, {"y": torch.ones(2)}, w)),
        "b": EdgeJob(RUN, 1.0, {1: "d"}, {1: -1}, (ScoreRequest(1, 2, {**w, "x": torch.ones(1)}, {}, w),), ()),
    }
    common, rest = split_common(jobs)
    assert common.shared.keys() == {"w"} and common.global_model is w
    assert len(codec.tensors_of(common)) == 1 and len(codec.tensors_of(rest)) == 3
    assert codec.equal({name: with_common(common, job) for name, job in rest.items()}, jobs)
    alone, _ = split_common({**jobs, "c": DeviceJob(RUN, 1, ScoreRequest(2, 2, mine, {}, w))})
    assert alone.shared == {}  # a different tensor of the same name is not common


def test_bytes_of_repeated_rounds_are_counted_once(tmp_path: Path) -> None:
    from coterie.federation.protocol.messages import WireBytes

    book = WireBytesLog(tmp_path / "wire.jsonl")
    for t in (1, 2, 3):
        book.count("device-cloud", WireBytes(10, 20, 15, 22))
        book.close_round(t)
    with book.path.open("a") as f:
        f.write('{"round": 4, "li')  # a crash
    again = WireBytesLog(book.path)
    again.count("device-cloud", WireBytes(1, 1, 1, 1))
    again.close_round(3)
    assert [json.loads(x)["round"] for x in book.path.read_text().splitlines()] == [1, 2, 3]
    assert again.totals == {"device-cloud": {
        "down": {"payload": 21, "framing": 10}, "up": {"payload": 41, "framing": 4},
    }}  # fmt: skip


# ---- sessions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["official", "log_updates"])
def test_settings_that_would_send_models_are_refused(name: str) -> None:
    with pytest.raises(CoterieError, match=f"{name} = true sends"):
        open_session(settings(method="fedavg", **{name: True}), CloudSettings("certs"))


def test_an_edge_needs_no_data(tmp_path: Path) -> None:
    """An edge can build a method with public items and validation data without having either."""
    chosen = settings(method="sc-fpfl", data="digits", subset=200, clients=3, public=20, rounds=2, model="mlp")
    session = open_session(chosen, CloudSettings("certs"))
    edge = FederationPlan.of(session, RUN).session(None, None, None, Allow())
    assert edge.method.ctx.clients == session.method.ctx.clients
    assert codec.equal(edge.method.ctx.w0, session.method.ctx.w0)
    with pytest.raises(CoterieError, match="no data of its own"):
        edge.federation.data(0)
