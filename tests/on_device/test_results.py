"""Training on a device that is not the processor: a stand-in for a GPU, which refuses tensors of the processor."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coterie
from coterie.config import Engine
from coterie.data.sources import load_dataset
from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.export.personal_model import load_model
from coterie.methods import find, method_names
from coterie.testing import CHECKS, Bench, SmallNet, close_loop, decided, events, open_loop, play
from coterie.train import native
from coterie.train.devices import find_devices
from support import standin
from support.families import FAMILIES
from support.families import session as family_session
from support.in_process_link import federation, simulated

TESTS = Path(__file__).parent.parent
TIGHT = 400_000  # bytes in addition to those in use: enough for four clients in a stack, and not for five
NAME = standin.NAME
KINDS = ("loop", "stack")
# methods that draw a number for every batch on the processor and move it
DRAW_PER_BATCH = ("fedmd", "floco")
# checks of the battery in which no client is computed, or whose worker processes cannot be forked once the device runs
ELSEWHERE = ("bad_settings_get_a_sentence", "settings_have_names_of_their_own", "same_bits_for_any_number_of_workers")


def bench(method: str, device: str, engine: Any = "loop", model: Any = None) -> Bench:
    more = {} if model is None else {"model": model}
    return Bench(find(method), {}, engine=Engine(workers=1, device=device, engine=engine), **more)


def agree(a: codec.Value, b: codec.Value, error: float = 1e-4) -> bool:
    """True if both values have the same structure and the same tensors up to rounding."""
    ours, theirs = codec.tensors_of(a), codec.tensors_of(b)
    same = [x.shape == y.shape and x.dtype == y.dtype for x, y in zip(ours, theirs, strict=True)]
    return all(same) and all(
        torch.allclose(x.double(), y.double(), error, error / 10, equal_nan=True)
        for x, y in zip(ours, theirs, strict=True)
    )


def same_on_both(method: str, engine: str, tmp: Path, model: Any = None, **changes: Any) -> None:
    """Run a method on the processor and on the device; results and evaluations agree up to rounding."""
    loops, scores = [], []
    for device in ("cpu", NAME):
        loops.append(bench(method, device, engine, model).play(tmp / device, **changes))
        scores.append([e["eval"] for e in events(tmp / device)])
    on_cpu, on_device = (decided(loop) for loop in loops)
    assert all(t.device.type == "cpu" for t in codec.tensors_of(on_device)), "what is kept is not on the processor"
    assert agree(on_cpu, on_device), "states differ from those of the processor"
    for row, other in zip(*scores, strict=True):
        assert row.keys() == other.keys()
        for view, values in row.items():
            assert values == pytest.approx(other[view], rel=1e-4, abs=1e-6, nan_ok=True), view


# ---- equal results ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "engine"), [("fedper", "loop"), ("ditto", "stack"), ("fedpc", "loop")])
def test_results_are_those_of_the_processor(method: str, engine: str, tmp_path: Path) -> None:
    same_on_both(method, engine, tmp_path, rounds=2, eval_every=2)


@pytest.mark.long
@pytest.mark.parametrize("engine", KINDS)
@pytest.mark.parametrize("method", method_names())
def test_results_of_every_method_are_those_of_the_processor(method: str, engine: str, tmp_path: Path) -> None:
    same_on_both(method, engine, tmp_path)


# ---- models ----------------------------------------------------------------------------------------------------------
class Dropping(SmallNet):
    """The small model with dropout before its head, whose noise is drawn from the device's generator."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.fc1(x.flatten(1))))
        return self.classifier(F.dropout(torch.relu(self.fc2(x)), 0.3, self.training))


class Convolving(nn.Module):
    """A convolution block, which has native code on the processor, and a frozen buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6 * 16, 10)
        self.register_buffer("order", torch.arange(6 * 16).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(native.block(self.conv, self.bn, x).flatten(1)[:, self.order])


def test_native_convolutions_are_for_the_processor_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_on_both("fedavg", "loop", tmp_path, Convolving, rounds=2, eval_every=2)
    monkeypatch.setattr(native, "_load", lambda: pytest.fail("native code was chosen on a different device"))
    monkeypatch.setattr(native, "_kernel", None)
    block = Convolving().to(NAME)
    assert native.block(block.conv, block.bn, torch.randn(3, 1, 8, 8).to(NAME)).device.type == NAME


@pytest.mark.long
@pytest.mark.parametrize("engine", KINDS)
def test_noise_of_a_model_is_keyed_on_the_device_too(engine: str, tmp_path: Path) -> None:
    same_on_both("fedrep", engine, tmp_path, Dropping)


@pytest.mark.long
@pytest.mark.parametrize("engine", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_networks_trains_on_the_device(family: str, engine: str, tmp_path: Path) -> None:
    runs = []
    for device in ("cpu", NAME):
        session = family_session("fedper", family, engine)
        how = session.engine.model_copy(update={"device": device, "engine": engine})
        runs.append(decided(play(open_loop(replace(session, engine=how), tmp_path / device))))
    # rounding grows from step to step in MobileNetV2, whose gradients agree in float64 only: it is run, not compared
    assert agree(*runs, error=1e9 if family == "MobileNetV2" else 1e-4)


# ---- copies ----------------------------------------------------------------------------------------------------------
def copies(method: str, engine: str, tmp: Path, **changes: Any) -> tuple[standin.Copies, int]:
    """Return the copies and the steps of a round after the first ones, in which data are moved to the device."""
    session = bench(method, NAME, engine).session(watch=False, final_trained=False, eval_every=99, **changes)
    loop = open_loop(session, tmp)
    loop.start()
    for _ in range(2):
        loop.step()
    with standin.counted() as counts:
        loop.step()
    close_loop(loop)
    return counts[0], loop.event["steps"]


FEW: dict[str, Any] = {"epochs": 1, "batch": 64}
MANY: dict[str, Any] = {"epochs": 4, "batch": 8}


@pytest.mark.parametrize("engine", KINDS)
def test_no_copy_crosses_per_batch(engine: str, tmp_path: Path) -> None:
    few, many = copies("fedper", engine, tmp_path / "few", **FEW), copies("fedper", engine, tmp_path / "many", **MANY)
    assert few[0] == many[0] and few[1] < many[1]


@pytest.mark.long
@pytest.mark.parametrize("method", [m for m in method_names() if m not in DRAW_PER_BATCH])
def test_no_method_copies_per_batch(method: str, tmp_path: Path) -> None:
    """What a client decides may cost a few copies more or less, which a copy per batch would exceed."""
    (few, one), (many, more) = (
        copies(method, "loop", tmp_path / "few", **FEW),
        copies(method, "loop", tmp_path / "many", **MANY),
    )
    assert sum(many) - sum(few) <= max(0, more - one) / 3, f"{few} copies in {one} steps, {many} in {more}"


def test_every_client_costs_the_same_number_of_copies(tmp_path: Path) -> None:
    counts = [copies("fedavg", "loop", tmp_path / str(n), join=n / 5) for n in (1, 2, 3)]
    one, two, three = (c.to_host for c, _ in counts)
    assert three - two == two - one > 0


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_a_device_out_of_memory_takes_fewer_clients_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = bench("fedavg", NAME, "stack").play(tmp_path / "plain", join=1.0, rounds=2)
    session = bench("fedavg", NAME, "stack").session(join=1.0, rounds=2)
    loop = open_loop(session, tmp_path / "tight")
    with standin.memory_limit(TIGHT):
        loop.run()
    close_loop(loop)
    assert f"{NAME}:0 is out of memory with 5 clients at a time; going on with 4" in caplog.messages
    assert agree(decided(plain), decided(loop))


def test_too_little_memory_for_one_client_is_a_sentence(tmp_path: Path) -> None:
    loop = open_loop(bench("fedavg", NAME).session(), tmp_path)
    with standin.memory_limit(2000), pytest.raises(CoterieError, match="out of memory with one client at a time") as e:
        loop.run()
    close_loop(loop)
    assert "\n" not in str(e.value) and "lower batch" in str(e.value)


# ---- runs ------------------------------------------------------------------------------------------------------------
RUN: dict[str, Any] = {
    "rounds": 4, "clients": 4, "epochs": 1, "subset": 300, "model": "mlp", "workers": 1, "checkpoint_every": 1,
    "val_share": 0.2, "seed": 1,
}  # fmt: skip


def stopped_after_two(out: Path, device: str) -> None:
    coterie.run("fedper", out=out, device=device, on_round=lambda p: p.round == 2, engine="loop", **RUN)


@pytest.mark.parametrize(("began", "then"), [(NAME, NAME), (NAME, "cpu"), ("cpu", NAME)])
def test_a_run_moves_between_devices(began: str, then: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = coterie.run("fedper", out=tmp_path / "whole", device="cpu", engine="loop", **RUN)
    stopped_after_two(tmp_path / "moved", began)
    moved = coterie.resume(tmp_path / "moved", **({} if then == began else {"device": then}), workers=1)
    described = json.loads((tmp_path / "moved" / "settings.json").read_text())["engine"]
    assert described["device"] == ("cpu" if began == "cpu" else f"{NAME}:0")
    said = [m for m in caplog.messages if "up to rounding, not to the bit" in m]
    assert bool(said) == (began != then)
    for a, b in zip(whole.events, moved.events, strict=True):
        assert a["participants"] == b["participants"] and a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    x = load_dataset("digits").x[:20].numpy()
    for client in (0, 3):
        assert moved.predict(client, x).outputs == pytest.approx(whole.predict(client, x).outputs, rel=1e-3, abs=1e-4)


def test_a_personal_model_is_exported_to_the_processor_and_predicts_anywhere(tmp_path: Path) -> None:
    run = coterie.run("apfl", out=tmp_path / "run", device=NAME, **RUN)
    x = load_dataset("digits").x[:20].numpy()
    expected = run.predict(0, x).outputs
    run.export(0, tmp_path / "model.safetensors")
    model = load_model(tmp_path / "model.safetensors")
    assert (model.predict(x).outputs == expected).all()
    model.to(NAME)
    assert {v.device.type for v in model.state_dict().values()} == {NAME}
    assert model.predict(x).outputs == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_stacks_are_the_default_on_a_device(tmp_path: Path) -> None:
    run = coterie.run("fedavg", out=tmp_path / "fedavg", device=NAME, **{**RUN, "rounds": 1})
    engine = json.loads((run.path / "settings.json").read_text())["engine"]
    assert (engine["engine"], engine["why"], engine["device"]) == ("stack", f"the default on {NAME}:0", f"{NAME}:0")
    kept = coterie.run(
        "fedavg", out=tmp_path / "kept", device=NAME, opt_state="keep", momentum=0.5, **{**RUN, "rounds": 1}
    )
    assert json.loads((kept.path / "settings.json").read_text())["engine"]["engine"] == "loop"


def test_a_device_of_a_federation_trains_on_its_own_device(tmp_path: Path) -> None:
    with federation(tmp_path, "fedper", device=find_devices(NAME)[0]) as f, standin.counted() as counts:
        assert f.loop.run()
        simulation = simulated(tmp_path / "simulation", f.session)
        assert f.runtime.liveness.errors == []
    assert counts[0].to_device > 0
    assert agree([f.loop.server, f.loop.bytes], [simulation.server, simulation.bytes])
    assert (tmp_path / "devices" / "0").glob("*/model.safetensors")


WORKERS = """
import sys
sys.path.insert(0, {tests!r})
from support import standin
standin.load()
import coterie
run = coterie.run("fedper", out={out!r}, device="standin", workers={workers}, engine="loop", **{more!r})
print(standin.load().is_initialized())
"""


@pytest.mark.long
def test_workers_share_a_device_with_the_same_bits(tmp_path: Path) -> None:
    """The processes are forked from one in which the device has not been used."""
    more = {k: v for k, v in RUN.items() if k != "workers"}
    for workers in (2, 1):
        text = WORKERS.format(tests=str(TESTS), out=str(tmp_path / str(workers)), more=more, workers=workers)
        done = subprocess.run([sys.executable, "-c", text], check=True, timeout=300, capture_output=True, text=True)
        used_here = done.stdout.split()[-1] == "True"
        assert used_here == (workers == 1), "only the worker processes use the device"
    a, b = ((tmp_path / w / "events.jsonl").read_text() for w in ("1", "2"))
    assert a == b


# ---- the battery -----------------------------------------------------------------------------------------------------
CASES = [
    pytest.param(m, name, marks=pytest.mark.xdist_group(m), id=f"{m}-{name}")
    for m in method_names()
    for name in CHECKS
    if name not in ELSEWHERE
]


@pytest.mark.long
@pytest.mark.parametrize(("method", "name"), CASES)
def test_battery(method: str, name: str, tmp_path: Path) -> None:
    CHECKS[name](bench(method, NAME), tmp_path)
