"""The pieces of a federation, in one process: what a device answers, what is refused, who is which client."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import codec
from coterie import tree as T
from coterie.config import settings
from coterie.errors import CoterieError
from coterie.runtimes.flower import validate as v
from coterie.runtimes.flower.device import NO_PLAN, Member
from coterie.runtimes.flower.edge_messages import Shelf, filled, outline
from coterie.runtimes.flower.plan import Plan
from coterie.runtimes.flower.roster import Roster
from coterie.runtimes.flower.serve import Cloud, open_session
from coterie.runtimes.flower.states import States

RUN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def cloud() -> Any:
    """A cloud without data: two places, pictures of 1 x 4 x 4, three labels."""
    chosen = settings(method="fedrep", clients=2, rounds=4, epochs=1, batch=8, model="mlp")
    return open_session(chosen, Cloud("certs", shape=(1, 4, 4), classes=3))


@pytest.fixture
def member(tmp_path: Path, cloud: Any) -> Member:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (40, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=rng.integers(0, 3, 40))
    made = Member(str(tmp_path / "mine.npz"), tmp_path / "state")
    made.hello(Plan.of(cloud, RUN).model_dump_json())
    return made


def message(cloud: Any, base: int = -1, client: int = 1, **more: Any) -> Any:
    shared = T.clone(cloud.method.setup()["w"])
    common = {"run": RUN, "shared": shared, "watch": True, "global": None, "trained": False, **more}
    return {"common": common, "mine": {"client": client, "base": base, "each": {}, "share": 1.0}}


# ---- a device ----------------------------------------------------------------------------------------------------
def test_an_answer_holds_the_upload_and_no_state(member: Member, cloud: Any) -> None:
    answer = member.handle("train", 1, message(cloud))
    assert set(answer) == {"client", "samples", "before", "after", "tree", "note", "steps", "loss"}
    assert set(answer["tree"]) == {k for k in cloud.method.ctx.w0 if not cloud.method.private(k)}
    v.trained(answer, 1, cloud.method.ctx, 10**6)
    kept = States(member.state / RUN / "1")
    assert kept.rounds() == [1] and "own" in codec.load(kept.path(1))


def test_a_round_asked_again_gives_the_same_answer_and_the_next_starts_where_the_cloud_says(
    member: Member, cloud: Any
) -> None:
    first = member.handle("train", 1, message(cloud))
    assert codec.equal(member.handle("train", 1, message(cloud)), first)
    second = member.handle("train", 2, message(cloud, base=1))
    assert codec.equal(member.handle("train", 2, message(cloud, base=1)), second)
    late = member.handle("train", 3, message(cloud, base=1))  # the cloud did not take round 2
    assert States(member.state / RUN / "1").rounds() == [1, 3]
    assert codec.equal(member.handle("train", 3, message(cloud, base=1)), late)


def test_a_restarted_device_goes_on_with_its_state_and_place(member: Member, cloud: Any) -> None:
    member.handle("train", 1, message(cloud))
    expected = member.handle("train", 2, message(cloud, base=1))
    member._lock.close()
    again = Member(member.data, member.state)
    assert codec.equal(again.handle("train", 2, message(cloud, base=1)), expected)
    with pytest.raises(CoterieError, match="is client 1 of the run, not 0"):
        again.handle("train", 3, message(cloud, base=2, client=0))
    assert again.hello(Plan.of(cloud, RUN).model_dump_json())["client"] == 1


def test_a_score_leaves_the_personal_model_on_the_device(member: Member, cloud: Any) -> None:
    from safetensors.torch import load_file

    member.handle("train", 1, message(cloud))
    answer = member.handle("score", 2, message(cloud, base=1))
    assert set(v.scored(answer, 1, cloud.method.ctx)) == {"client", "personal/test", "personal/val"}
    model = load_file(member.state / RUN / "model.safetensors")
    own = States(member.state / RUN / "1").read(1)["own"]
    assert model.keys() == cloud.method.ctx.w0.keys() and all(torch.equal(model[k], own[k]) for k in own)


def spoil(value: Any, change: str) -> Any:
    shared = value["common"]["shared"]
    name = next(iter(shared))
    if change == "shape":
        shared[name] = shared[name][:-1]
    elif change == "nan":
        shared[name][0] = float("nan")
    elif change == "type":
        shared[name] = shared[name].double()
    elif change == "size":
        shared["more"] = torch.zeros(10**7)
    elif change == "name":
        shared[""] = torch.zeros(1)
    elif change == "run":
        value["common"]["run"] = "f" * 32
    elif change == "path":
        value["common"]["run"] = "../" * 10 + "ab"
    elif change == "round":
        value["mine"]["base"] = 5
    return value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("shape", "of shape"), ("nan", "NaN or infinity"), ("type", "of type torch.float64"), ("size", "larger than"),
        ("name", "impossible name"), ("run", NO_PLAN), ("path", "names no run"), ("round", "round 1 is over"),
    ],
)  # fmt: skip
def test_a_device_refuses_what_it_cannot_trust(member: Member, cloud: Any, change: str, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        member.handle("train", 1, spoil(message(cloud), change))
    assert States(member.state / RUN / "1").rounds() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"coterie": "9.9"}, "the cloud runs Coterie 9.9"), ({"source": "x"}, "has other code here"),
        ({"w0": "x"}, "first model differs"), ({"run": "short"}, "cannot be read"), ({"extra": 1}, "cannot be read"),
        ({"shape": [1, 8, 8]}, r"federation's are torch.float32 \(1, 8, 8\)"), ({"classes": ["0"]}, "has 1 classes"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(member: Member, cloud: Any, change: Any, reason: str) -> None:
    plan = Plan.of(cloud, RUN).model_dump(mode="json") | change
    with pytest.raises(CoterieError, match=reason):
        member.hello(json.dumps(plan))


def test_an_unknown_method_is_refused(member: Member, cloud: Any) -> None:
    plan = Plan.of(cloud, RUN).model_dump(mode="json")
    plan["settings"]["method"] = "fedrp"
    with pytest.raises(CoterieError, match='unknown method "fedrp"'):
        member.hello(json.dumps(plan))


def test_a_full_disk_leaves_the_old_state_whole(member: Member, cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    member.handle("train", 1, message(cloud))
    before = States(member.state / RUN / "1").read(1)

    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(codec, "save", full)
        with pytest.raises(CoterieError, match="could not be written: No space left"):
            member.handle("train", 2, message(cloud, base=1))
    assert codec.equal(States(member.state / RUN / "1").read(1), before)


def test_two_processes_cannot_share_a_state(member: Member) -> None:
    import subprocess
    import sys

    code = (
        f"from coterie.runtimes.flower.states import lock; from pathlib import Path; lock(Path({str(member.state)!r}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is in use by another process" in found.stderr


# ---- what the cloud refuses --------------------------------------------------------------------------------------
@pytest.fixture
def answer(member: Member, cloud: Any) -> Any:
    return member.handle("train", 1, message(cloud))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("client", 0, "is that of client 0, asked was 1"), ("samples", -1, "samples must be"), ("steps", 1.5, "steps"),
        ("samples", True, "samples must be"), ("note", {"a": "b"}, "note must hold numbers"), ("state", {}, "state"),
        ("after", {"hits": 1}, "hits, total and loss"), ("tree", [], "not a tree"), ("tree", {"a": 1}, "no tensor"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_one_is_refused(answer: Any, cloud: Any, field: str, value: Any, reason: str) -> None:
    with pytest.raises(CoterieError, match=reason):
        v.trained({**answer, field: value}, 1, cloud.method.ctx, 10**6)


def test_an_upload_that_is_too_large_is_refused(answer: Any, cloud: Any) -> None:
    size = T.nbytes(answer["tree"])
    v.trained(answer, 1, cloud.method.ctx, size)
    with pytest.raises(CoterieError, match=f"larger than the {size - 1} bytes"):
        v.trained(answer, 1, cloud.method.ctx, size - 1)


def test_uploads_unlike_the_others_and_not_as_declared_are_left_out() -> None:
    good = {"w": torch.zeros(3), "x:more": torch.zeros(2, 4)}
    trees = {0: good, 1: good, 2: {"w": torch.zeros(3)}, 3: {**good, "x:more": torch.zeros(8)}}
    assert set(v.odd_ones(trees, dict.fromkeys(trees, T.nbytes(good)))) == {2, 3}
    assert set(v.odd_ones({0: trees[2], 1: good}, dict.fromkeys(trees, T.nbytes(good)))) == {
        0
    }  # also if it comes first
    assert v.odd_ones({0: good, 1: good, 2: trees[2]}, {0: 44, 1: 44, 2: 12}) == {}  # a method that lets clients choose


def test_an_upload_kept_at_an_edge_leaves_its_shapes(answer: Any, cloud: Any) -> None:
    back = filled(outline(answer), 1, cloud.method.ctx, 10**6)
    assert {k: (t.shape, t.dtype) for k, t in back["tree"].items()} == {
        k: (t.shape, t.dtype) for k, t in answer["tree"].items()
    }
    assert T.nbytes(back["tree"]) == T.nbytes(answer["tree"]) and all(t.is_meta for t in back["tree"].values())


def test_a_message_to_an_edge_holds_every_tensor_once() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    shelf = Shelf()
    places = [shelf.put({"w": a, "v": b}), shelf.put({"w": a})]
    assert len(shelf.tensors) == 2
    back = Shelf(shelf.tensors)
    assert back.take(places[1])["w"] is a and back.take(places[0])["v"] is b
    with pytest.raises(CoterieError, match="missing"):
        back.take({"w": 7})


# ---- who is which client -----------------------------------------------------------------------------------------
def test_places_are_given_once_and_kept(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 2)
    hello = {"client": None, "labels": 3, "samples": 10}
    assert [roster.seat(n, n, hello).client for n in ("b", "a", "c", "b")] == [0, 1, 2, 0]
    assert roster.newcomers == [2]
    again = Roster(tmp_path / "roster.json", 2)
    assert [again.seat(n, n, hello).client for n in ("c", "d", "a")] == [2, 3, 1]
    with pytest.raises(CoterieError, match="client 1 is a already"):
        again.seat("e", "e", {**hello, "client": 1})
    with pytest.raises(CoterieError, match="is client 2 of this run and now says it is client 5"):
        again.seat("c", "c", {**hello, "client": 5})


@pytest.mark.parametrize("name", ["official", "log_updates"])
def test_settings_that_would_send_models_are_refused(name: str) -> None:
    with pytest.raises(CoterieError, match=f"{name} = true sends"):
        open_session(settings(method="fedavg", **{name: True}), Cloud("certs"))


def test_an_edge_needs_no_data(tmp_path: Path) -> None:
    """A method with a public set and a validation part can be built where there are neither."""
    chosen = settings(method="sc-fpfl", data="digits", subset=200, clients=3, public=20, rounds=2, model="mlp")
    session = open_session(chosen, Cloud("certs"))
    edge = Plan.of(session, RUN).session(None, None, None)
    assert edge.method.ctx.clients == session.method.ctx.clients
    assert codec.equal(edge.method.ctx.w0, session.method.ctx.w0)
    with pytest.raises(CoterieError, match="no data of its own"):
        edge.federation.data(0)
