"""What surrounds training: codec, store, workers, ledger, and rounds in which things go wrong."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import codec
from coterie import tree as T
from coterie.errors import CoterieError
from coterie.folder import Folder
from coterie.ledger import Ledger, weigh
from coterie.method import Upload
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.runtimes.states import Store
from coterie.runtimes.workers import Arena
from toy import Toy, W, clients, events, mlp, models, open_toy, play, same

# ---- codec and arena -------------------------------------------------------------------------------------------------
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
tensors = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
values = st.recursive(
    numbers | tensors,
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("t"), v, max_size=3)
        | st.dictionaries(st.integers(0, 99), v, max_size=3)
    ),
    max_leaves=8,
)


ARENA = Arena()


@settings(max_examples=40, deadline=None)
@given(values)
def test_any_value_survives_the_codec_and_the_arena_to_the_bit(value):
    assert codec.equal(codec.loads(codec.dumps(value)), value)
    assert codec.equal(ARENA.read(ARENA.write(value)), value)


def test_equal_means_the_same_bits():
    nan, zero = torch.tensor([math.nan]), torch.tensor([0.0])
    assert codec.equal(nan, nan.clone()) and not codec.equal(nan, zero) and not codec.equal(zero, -zero)
    assert not codec.equal(torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max]))
    assert not codec.equal(zero, zero.double()) and not codec.equal({"a": zero}, {"b": zero})


def test_views_and_slices_are_written_as_what_they_show():
    big = torch.arange(12.0).reshape(3, 4)
    value = {"row": big[1], "turned": big.T, "again": big[1]}
    assert codec.equal(codec.loads(codec.dumps(value)), value)


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", lambda: 0])
def test_what_a_state_may_not_hold_gets_a_sentence(bad):
    with pytest.raises(CoterieError, match=f"not {type(bad).__name__}"):
        codec.dumps({"x": bad})


def test_damaged_or_foreign_data_get_a_sentence(tmp_path):
    blob = codec.dumps({"x": torch.ones(3)})
    for broken in (blob[: len(blob) // 2], b"", b"\x80\x04pickle", os.urandom(64)):
        with pytest.raises(CoterieError, match="damaged or foreign"):
            codec.loads(broken)
    (tmp_path / "f").write_bytes(blob[:-1])
    with pytest.raises(CoterieError, match="cannot be read"):
        codec.load(tmp_path / "f")


# ---- store -----------------------------------------------------------------------------------------------------------
def state(c: float) -> dict:
    return {"own": {"w": torch.full((3,), c)}}


def files(store: Store) -> set[str]:
    return {p.name.removesuffix(".safetensors") for p in store.folder.glob("*/*")}


@pytest.mark.parametrize("disk", [False, True])
def test_a_store_keeps_the_versions_that_checkpoints_need(disk, tmp_path):
    store = Store(tmp_path, 3, disk)
    assert store.get(1) is None
    kept = []
    for round in (1, 2, 3):
        store.put(1, state(round), round)
        if round == 1:
            store.put(2, state(9), 1)
        assert codec.equal(store.get(1), state(round))
        store.commit()
        kept.append((store.version.copy(), store.checksum.copy()))
        store.collect(max(1, round - 1))  # as if the last two checkpoints were kept
    assert files(store) == {"1-000002", "1-000003", "2-000001"}
    again = Store(tmp_path, 3, disk)
    again.restore(*kept[1])
    assert codec.equal(again.get(1), state(2)) and codec.equal(again.get(2), state(9)) and again.get(0) is None
    again.verify()


def test_states_reach_the_disk_at_a_checkpoint_or_at_once(tmp_path):
    memory, disk = Store(tmp_path / "m", 2, False), Store(tmp_path / "d", 2, True)
    for store in (memory, disk):
        store.put(0, state(1), 1)
    assert files(memory) == set() and files(disk) == {"0-000001"}
    memory.commit()
    assert files(memory) == {"0-000001"}


def test_a_method_without_client_state_writes_no_files(tmp_path):
    loop = play(FedAvg, tmp_path)
    assert files(loop.store) == set() and loop.store.get(0) is None


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_state_is_found(how, tmp_path):
    store = Store(tmp_path, 2, True)
    store.put(1, state(1), 4)
    path = store.path(1, 4)
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(blob if how == "flip" else blob[:-2])
    for look in (store.verify, lambda: store.get(1)):
        with pytest.raises(CoterieError, match=r"client 1 is (damaged|missing)"):
            look()


def test_after_a_crash_files_without_a_checkpoint_are_swept_away(tmp_path):
    store = Store(tmp_path, 2, True)
    store.put(0, state(1), 1)
    old = store.version.copy()
    store.put(0, state(2), 2)
    new = store.version.copy()
    store.put(0, state(3), 3)
    (store.folder / "0000" / ".0-000003.safetensors.half").write_bytes(b"x")
    store.sweep([old, new])
    assert files(store) == {"0-000001", "0-000002"}
    store.collect(2)
    assert files(store) == {"0-000002"}


# ---- workers ---------------------------------------------------------------------------------------------------------
class Mortal(Ditto):
    """Kills its worker once, while it serves client 3."""

    def begin(self, state, download, data, round):
        mark = os.environ["MORTAL"]
        if data.client == 3 and round == 2 and not os.path.exists(mark):  # noqa: PTH110
            open(mark, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), signal.SIGKILL)
        return super().begin(state, download, data, round)


def test_a_killed_worker_is_replaced_and_the_results_are_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("MORTAL", str(tmp_path / "died"))
    a = play(Mortal, tmp_path, workers=2, model=mlp(True))
    assert (tmp_path / "died").exists()
    b = play(Ditto, tmp_path, workers=1, model=mlp(True))
    assert codec.equal(a.server, b.server) and same(models_of(a), models_of(b))
    assert (a.folder.path / "events.jsonl").read_bytes() == (b.folder.path / "events.jsonl").read_bytes()


def models_of(loop):
    return {i: loop.store.get(i)["v"] for i in range(5)}


def test_workers_that_keep_dying_are_given_up(tmp_path, monkeypatch):
    class Doomed(FedAvg):
        def begin(self, state, download, data, round):
            os._exit(1)

    with pytest.raises(RuntimeError, match="keep dying"):
        play(Doomed, tmp_path, workers=2)


class Faulty(FedAvg):
    def end(self, state, params, extras, data, round):
        if data.client == 4 and round == 2:
            raise ZeroDivisionError("no number")
        return super().end(state, params, extras, data, round)


class Refusing(FedAvg):
    def begin(self, state, download, data, round):
        raise CoterieError("mu = 3 is not possible here")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_names_method_stage_client_and_round(workers, tmp_path):
    with pytest.raises(RuntimeError, match="Faulty, train of client 4 in round 2: ZeroDivisionError: no number"):
        play(Faulty, tmp_path, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_the_user_stays_one_sentence(workers, tmp_path):
    with pytest.raises(CoterieError, match=r"^mu = 3 is not possible here$"):
        play(Refusing, tmp_path, workers=workers)


# ---- ledger ----------------------------------------------------------------------------------------------------------
def test_the_ledger_weighs_dtypes_and_booleans_by_the_bit():
    tree = {"w": torch.zeros(3, 2), "mask": torch.zeros(17, dtype=torch.bool), "ids": torch.zeros(5, dtype=torch.int32)}
    assert weigh(tree, lambda name: name) == {"w": 24, "mask": 3, "ids": 20}
    assert T.nbytes(tree) == 47
    book = Ledger(lambda name: "mask" if name == "mask" else "model")
    assert book.count("device-cloud", "up", tree, times=2) == 47
    assert book.close_round() == {"device-cloud": {"up": {"model": 88, "mask": 6}}}
    book.count("device-cloud", "up", {"w": torch.zeros(1)})
    assert book.close_round() == {"device-cloud": {"up": {"model": 4}}} and book.close_round() == {}
    assert book.totals == {"device-cloud": {"up": {"model": 92, "mask": 6}}}


# ---- rounds in which things go wrong ---------------------------------------------------------------------------------
class Diverging(FedAvg):
    """Clients 1 and 3 send NaN and infinity in round 2."""

    def end(self, state, params, extras, data, round):
        _, upload = super().end(state, params, extras, data, round)
        bad = {1: math.nan, 3: math.inf}.get(data.client) if round == 2 else None
        tree = upload.tree if bad is None else {**upload.tree, "2.bias": torch.full((3,), bad)}
        return {"rounds": [*state.get("rounds", []), round]}, Upload(tree)


def test_uploads_that_are_not_finite_are_left_out_counted_and_reported(tmp_path):
    loop = play(Diverging, tmp_path)
    assert [e["nonfinite"] for e in events(loop)] == [[], [1, 3], []]
    assert all(e["bytes"]["device-cloud"]["up"]["model"] == 4 * W * 5 for e in events(loop))
    assert T.finite(loop.server["w"])
    assert [loop.store.get(i)["rounds"] for i in (0, 1)] == [[1, 2, 3], [1, 3]]  # their state is as it was before
    sound = [0, 2, 4]
    plain = open_toy(FedAvg, tmp_path)
    plain.server = plain.method.setup()
    plain.folder.open_logs()
    plain._round(1)
    plain.method.sample = lambda server, round, rng: sound
    plain._round(2)
    again = play(Diverging, tmp_path, rounds=2)
    assert same(again.server["w"], plain.server["w"])


def test_a_round_without_any_sound_upload_changes_nothing(tmp_path):
    data = Toy([(x * math.nan, y) for x, y in clients().parts], 3)
    loop = play(FedAvg, tmp_path, data=data, rounds=1)
    assert events(loop)[0]["nonfinite"] == [0, 1, 2, 3, 4] and events(loop)[0]["loss"] is None
    assert same(loop.server["w"], loop.method.ctx.w0)


def test_dropout_and_stragglers_are_keyed_by_the_seed(tmp_path):
    def run(**change):
        given = {"dropout": 0.4, "stragglers": 0.5, **change}
        loop = play(Local, tmp_path, data=clients(8), epochs=4, rounds=3, watch=False, **given)
        return [(e["failed"], e["steps"]) for e in events(loop)]

    base = run()
    assert run() == base == run(workers=2) and run(seed=1) != base
    calm = run(dropout=0.0, stragglers=0.0)
    assert all(failed == [] for failed, _ in calm)
    assert 2 <= sum(len(failed) for failed, _ in base) <= 18  # of 24
    slow = run(dropout=0.0)
    assert all(s[1] < c[1] for s, c in zip(slow, calm, strict=True))


def test_who_fails_was_sent_to_but_sends_nothing_and_keeps_its_state(tmp_path):
    loop = play(Ditto, tmp_path, dropout=0.5, rounds=1, seed=3)
    event = events(loop)[0]
    failed = set(event["failed"])
    assert 0 < len(failed) < 5
    assert event["bytes"]["device-cloud"]["down"]["model"] == 4 * W * 5
    assert event["bytes"]["device-cloud"]["up"]["model"] == 4 * W * (5 - len(failed))
    assert {i for i in range(5) if loop.store.get(i) is None} == failed


def test_the_sample_of_a_round_does_not_depend_on_earlier_rounds(tmp_path):
    method = open_toy(FedAvg, tmp_path, join=0.4).method
    picks = [method.sample({}, t, method.ctx.rng("sample", t)) for t in (3, 1, 2, 3)]
    assert picks[0] == picks[3] and all(p == sorted(p) and len(p) == 2 for p in picks)


def test_events_are_json_and_equal_for_equal_settings(tmp_path):
    a, b = (play(FedAvg, tmp_path, model=mlp(True)) for _ in range(2))
    lines = (a.folder.path / "events.jsonl").read_bytes()
    assert lines == (b.folder.path / "events.jsonl").read_bytes()
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [1, 2, 3]
    assert same(models(a), models(b))


def test_events_are_json_that_any_language_reads(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.open_logs()
    folder.event(round=1, loss=float("nan"), deep={"a": [1.5, float("inf")]}, t=torch.tensor([1, 2]))
    folder.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert json.loads(text) == {"round": 1, "loss": None, "deep": {"a": [1.5, None]}, "t": [1, 2]}
    assert "NaN" not in text and "Infinity" not in text


def test_optimisers_remember_on_disk_through_workers_and_a_resumed_run(tmp_path):
    from coterie.config import Engine
    from coterie.config import settings as chosen
    from coterie.runs.run import Run
    from coterie.session import execute, prepare

    def ends(name, engine, stop=0, **more):
        s = chosen(method="fedper", clients=4, epochs=1, join=0.5, rounds=4, checkpoint_every=2, momentum=0.9, **more)
        looks = iter(range(100))
        done = execute(prepare(s, engine), tmp_path / name, stopped=lambda: 0 < stop <= next(looks))
        assert done == (not stop)
        if stop:
            execute(prepare(s, engine), tmp_path / name, resume=True)
        return Run(tmp_path / name).clients()["personal/test"].tolist()

    whole = ends("whole", Engine(workers=1), opt_state="keep")
    cut = ends("cut", Engine(workers=2, state="disk"), stop=2, opt_state="keep")
    assert whole == cut != ends("reset", Engine(workers=1))
    with pytest.raises(CoterieError, match="opt_state = keep needs loop"):
        ends("no", Engine(workers=1, engine="stack"), opt_state="keep")
