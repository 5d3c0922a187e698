"""Every method has the weights of its reference (tests/reference/) to 1e-5, and a changed method has not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from coterie import testing
from coterie.core import tree as T
from coterie.core.method import Method, Start
from coterie.engine.loop import Loop, Schedule
from coterie.engine.round import Rules
from coterie.methods import build_method, find, method_names
from coterie.runtimes.inline import Inline
from coterie.storage.client_states import ClientStates
from coterie.storage.run_folder import Folder
from coterie.train.clients import Clients
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from reference import TOLERANCE, Case, Result, World, cases, evaluated, table, tensors
from support import TESTS, toy

OPTIMISER = ("optimizer", "momentum", "weight_decay")
WORLD = (*OPTIMISER, "rounds", "join", "epochs", "batch", "lr", "lr_decay", "public")


def worlds(case: Case, model: str) -> World:
    return World(model, **{k: v for k, v in case.run.items() if k in WORLD})


def engine(case: Case, world: World, tmp: Path, cls: type[Method] | None = None) -> Loop:
    """Run the method on the real loop to its end, without evaluation."""
    other = {k: v for k, v in case.run.items() if k not in WORLD}
    shared = {k: getattr(world, k) for k in WORLD if k not in OPTIMISER}
    method = toy.bind(
        cls or find(case.method),
        dict(case.settings),
        model=world.module(),
        data=world,
        **{**shared, **other, "seed": 0, "momentum": world.momentum, "public_items": world.public_part},
    )
    folder = Folder(tmp / "run")
    doing = Clients(method, world, Optimiser(world.optimizer, world.momentum, world.weight_decay))
    runtime = Inline(doing, ClientStates(folder.path, len(world.sizes), False), lambda i: world.sizes[i])
    loop = Loop(method, runtime, folder, Schedule(world.rounds, Rules(0, watch=False), final_trained=False))
    loop.evaluate = lambda last: None  # type: ignore[method-assign]
    loop.start()
    try:
        while loop.done < world.rounds:
            loop.step()
    finally:
        testing.close_loop(loop)
    return loop


def reference(case: Case, world: World) -> Result:
    """Run the reference; settings of the run that `World` lacks are passed as the reference's settings."""
    return case.reference(world, **case.settings, **{k: v for k, v in case.run.items() if k not in WORLD})


def compare(loop: Loop, world: World, expected: Result) -> float:
    """Return the largest difference; fail with its place if it exceeds the tolerance."""
    gaps = []
    method = loop.method
    if expected.whole is not None:
        gaps.append(gap("the global model", method.global_model(loop.server), expected.whole))
    for name, value in expected.server.items():
        held = loop.server[name] if isinstance(loop.server, dict) else getattr(loop.server, name)
        gaps.append(gap(f"the server's {name}", held, value))
    kept = {i: _kept(loop, world, i) for i in {*expected.states, *expected.clients, *expected.logits}}
    for i, entries in expected.states.items():
        for name, value in entries.items():
            gaps.append(gap(f"client {i}'s {name}", kept[i][name], value))
    for i in {*expected.clients, *expected.logits}:
        params, extras = method.personal(kept[i], toy.handed(loop, i), world.data(i))
        if i in expected.clients:
            gaps.append(gap(f"client {i}'s model", params, expected.clients[i]))
        x = world.test_part(i)[0]
        if i in expected.logits or isinstance(expected.clients[i], nn.Module):
            want = expected.logits[i] if i in expected.logits else evaluated(expected.clients[i], x)
            with torch.no_grad():
                gaps.append(gap(f"client {i}'s logits", method.predict(params, x, extras), want))
    for i, wanted in expected.adapted.items():
        own = method.personal(_kept(loop, world, i), toy.handed(loop, i), world.data(i))
        doing = loop.runtime.clients  # type: ignore[attr-defined]
        tuned = train(method.ctx, doing.rule, method.adapt(), Start(*own), world.data(i), loop.done + 1)[0].params
        gaps.append(gap(f"client {i}'s adapted model", tuned, wanted))
    assert gaps, "the reference returned nothing to compare"
    return max(gaps)


def _kept(loop: Loop, world: World, client: int) -> Any:
    kept = toy.state(loop, client)
    return loop.method.init_client(world.data(client)) if kept is None else kept


def gap(where: str, found: Any, wanted: Any) -> float:
    """Return the largest difference between two values of the same form: tensors, numbers, trees, lists, modules."""
    wanted = tensors(wanted) if isinstance(wanted, nn.Module) else wanted
    if isinstance(wanted, Mapping):
        assert set(found) == set(wanted), f"{where} has entries {sorted(found)}, not {sorted(wanted)}"
        return max((gap(f"{where}: {k}", found[k], v) for k, v in wanted.items()), default=0.0)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        assert len(found) == len(wanted), f"{where} has {len(found)} entries, not {len(wanted)}"
        return max((gap(f"{where}: {k}", found[k], v) for k, v in enumerate(wanted)), default=0.0)
    if not isinstance(wanted, Tensor | float):
        assert found == wanted, f"{where} is {found}, not {wanted}"
        return 0.0
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (found, wanted))
    assert a.shape == b.shape, f"{where} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
    far = float((a - b).abs().max()) if a.numel() else 0.0
    size = max(1.0, float(b.abs().max()) if b.numel() else 0.0)
    most = TOLERANCE * size * (5 if "logits" in where else 1)  # differences of weights add up in logits
    assert far <= most, f"{where} differs by {far:.1e}"  # NaN fails too
    return far


ALL = [
    pytest.param(c, m, id=f"{c.name}-{m}", marks=[pytest.mark.long] if m in c.long else [])
    for c in cases()
    for m in c.models
]


@pytest.mark.parametrize(("case", "model"), ALL)
def test_a_method_has_the_weights_of_its_reference(case: Case, model: str, tmp_path: Path) -> None:
    world = worlds(case, model)
    start = tensors(world.module())
    loop = engine(case, world, tmp_path)
    expected = reference(case, world)
    compare(loop, world, expected)
    models = [expected.whole, *expected.clients.values()]
    moved = [gap_of(start, tensors(m) if isinstance(m, nn.Module) else m) for m in models if m is not None]
    assert not moved or max(moved) > 0.01, "no model has changed, so there is nothing to compare"


def gap_of(start: Mapping[str, Tensor], tree: Mapping[str, Tensor]) -> float:
    return max((float((v - start[k]).abs().max()) for k, v in tree.items() if k in start), default=1.0)


# ---- a changed method is found out -----------------------------------------------------------------------------------
def scaled_loss(cls: Any) -> type[Method]:
    class Changed(cls):
        def loss(self, *args: Any) -> Any:
            return 1.01 * super().loss(*args)

    return Changed


def nothing_private(cls: Any) -> type[Method]:
    class Changed(cls):
        def private(self, name: str) -> bool:
            return False

    return Changed


def other_weights(cls: Any) -> type[Method]:
    class Changed(cls):
        def weights(self, uploads: Any) -> Any:
            return [float(u.samples) for u in uploads] if super().weights(uploads) is None else None

    return Changed


def phases_reversed(cls: Any) -> type[Method]:
    class Changed(cls):
        def phases(self, round: int) -> Any:
            return super().phases(round)[::-1]

    return Changed


def no_anchor(cls: Any) -> type[Method]:
    class Changed(cls):
        def begin(self, *args: Any) -> Any:
            start = super().begin(*args)
            return start.adding(anchor={k: torch.zeros_like(v) for k, v in start.extras["anchor"].items()})

    return Changed


def batches_swapped(cls: Any) -> type[Method]:
    class Changed(cls):
        def outer(self, params: Any, batches: Any, *rest: Any) -> Any:
            return super().outer(params, batches[::-1], *rest)

    return Changed


def mixed_evenly(cls: Any) -> type[Method]:
    class Changed(cls):
        def mixing(self, V: Tensor, rows: Tensor) -> Tensor:
            return torch.full((len(rows), len(V)), 1 / len(V))

    return Changed


def an_epoch_early(cls: Any) -> type[Method]:
    class Changed(cls):
        def learned(self, *args: Any) -> Any:
            with mock.patch.object(self, "hp", self.hp.model_copy(update={"window": self.hp.window - 1})):
                return super().learned(*args)

    return Changed


def wrong_model_picked(cls: Any) -> type[Method]:
    class Changed(cls):
        def pick(self, models: Any, data: Any) -> int:
            best = super().pick(models, data)
            return (best + 1) % len(models)

    return Changed


def statistics_compared(cls: Any) -> type[Method]:
    class Changed(cls):
        def aggregate(self, *args: Any) -> Any:
            with mock.patch(
                "coterie.methods.cfl.vectors", lambda ctx, trees: torch.stack([T.flatten(t) for t in trees])
            ):
                return super().aggregate(*args)

    return Changed


def prototypes_shrunk(cls: Any) -> type[Method]:
    class Changed(cls):
        def aggregate(self, *args: Any) -> Any:
            server = super().aggregate(*args)
            return {**server, "prototypes": 0.99 * server["prototypes"]}

    return Changed


def other_mode(cls: Any) -> type[Method]:
    class Changed(cls):
        def _reference(self, received: Any) -> Any:
            return received

    return Changed


CHANGES: list[tuple[str, str, Callable[[Any], type[Method]]]] = [
    ("fedavg", "mlp", other_weights),
    ("fedprox", "cnn", scaled_loss),
    ("ditto", "mlp", no_anchor),
    ("fedper", "mlp", nothing_private),
    ("fedrep", "mlp", phases_reversed),
    ("per-fedavg", "mlp", batches_swapped),
    ("fedamp", "mlp", mixed_evenly),
    ("fedala", "mlp", an_epoch_early),
    ("ifca", "mlp", wrong_model_picked),
    ("cfl[norms]", "cnn", statistics_compared),
    ("fedproto", "mlp", prototypes_shrunk),
    ("fedcp", "cnn", other_mode),
]


@pytest.mark.parametrize(("name", "model", "change"), CHANGES, ids=[f"{m}-{c.__name__}" for m, _, c in CHANGES])
def test_a_changed_method_is_not_equal_to_its_reference(name: str, model: str, change: Any, tmp_path: Path) -> None:
    case = next(c for c in cases() if c.name == name)
    world = worlds(case, model)
    loop = engine(case, world, tmp_path, change(find(case.method)))
    with pytest.raises(AssertionError, match=r"differs by|has entries|, not "):
        compare(loop, world, reference(case, world))


# ---- all of them -----------------------------------------------------------------------------------------------------
def test_references_import_nothing_they_are_to_check() -> None:
    for path in (TESTS / "reference").glob("*.py"):
        if path.name != "table.py":
            assert "coterie.methods" not in path.read_text().replace("of coterie.methods or", ""), path.name
            assert "from coterie.parts" not in path.read_text(), path.name


def test_every_method_has_a_reference() -> None:
    ours = {name for name in method_names() if find(name).__module__.startswith("coterie.")}
    assert not ours - {case.method for case in cases()}, "write one in tests/reference/ (see its __init__.py)"


def test_settings_of_every_case_are_settings_of_its_method() -> None:
    for case in cases():
        build_method(case.method, dict(case.settings))


def test_the_page_of_parity_is_up_to_date() -> None:
    assert table.PAGE.read_text() == table.page(), "run: python tests/reference/table.py"
