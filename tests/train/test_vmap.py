"""Stacked training gives what training client by client gives."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.config import Engine, settings
from coterie.core.method import Batch, ClientData, Download, Extras, Method, Phase, Split, Start, State
from coterie.core.tree import Tree
from coterie.engine.loop import Loop
from coterie.engine.session import Callbacks, Objects, Session, execute, prepare
from coterie.engine.session.resume import training_engine_at_start
from coterie.methods import find, method_names
from coterie.testing import CHECKS, Bench, SmallNet, close_loop, decided, events, open_loop, small_data
from coterie.train import engine_choice as choose
from coterie.train import trainer
from coterie.train.optimisers import Optimiser
from coterie.train.scoring import Case, Scorer, score_model
from coterie.train.trainer import train
from coterie.train.vmap import step as stack_step
from coterie.train.vmap.phase import Member
from coterie.train.vmap.step import UnstackableError, identity
from coterie.train.vmap.trainer import Stacker
from support.methods import METHODS

QUICK = ["fedavg", "ditto", "fedrep", "feddyn", "fedproto", "apfl", "fedcp"]


def session(method: type[Method], model: nn.Module | None = None, engine: str = "loop", **changes: Any) -> Session:
    base: dict[str, Any] = {"rounds": 2, "join": 1.0, "epochs": 2, "batch": 16, "lr": 0.1, "clients": 5, "seed": 3}
    base |= {"partition": "dirichlet(0.5)", "val_share": 0.2, "public": 30, "eval_every": 2, **changes}
    run = settings(method="fedavg", **base).model_copy(update={"method": method.__name__, "settings": {}})
    torch.manual_seed(0)
    kind = Engine.model_validate({"workers": 1, "engine": engine})
    return prepare(run, kind, Objects(method, small_data(300), model or SmallNet()))


def play(s: Session, folder: Path) -> Loop:
    loop = open_loop(s, folder)
    try:
        loop.run()
    finally:
        close_loop(loop)
    return loop


def close(a: Any, b: Any, at: str = "") -> None:
    """Equal, numbers to rounding. Processors round differently: 2.5e-6 was seen after two epochs."""
    if isinstance(a, Tensor) and a.is_floating_point():
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, equal_nan=True, msg=lambda m: f"{at}: {m}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for k in a:
            close(a[k], b[k], f"{at}/{k}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (v, w) in enumerate(zip(a, b, strict=True)):
            close(v, w, f"{at}/{i}")
    elif is_dataclass(a):  # a declared state
        assert type(a) is type(b), at
        for f in fields(a):
            close(getattr(a, f.name), getattr(b, f.name), f"{at}/{f.name}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5), at
    else:
        assert a == b, at


def same_run(method: type[Method], tmp: Path) -> None:
    loops = [play(session(method, engine=engine), tmp / engine) for engine in ("loop", "stack")]
    close(*(decided(x) for x in loops))
    close(*([numbers(e) for e in events(tmp / engine)] for engine in ("loop", "stack")))


def numbers(event: dict[str, Any]) -> dict[str, Any]:
    """An event without checksums, which do not know of rounding."""
    return {k: v for k, v in event.items() if k not in ("crc", "evaluation")}


@pytest.mark.parametrize("name", QUICK)
def test_a_stacked_run_is_the_loops_run(name: str, tmp_path: Path) -> None:
    same_run(find(name), tmp_path)


def test_fedcac_trains_the_same_models_though_it_may_rank_entries_otherwise(tmp_path: Path) -> None:
    """It ranks entries by how far they moved. A bias before batch norm moves by rounding alone, so masks may differ."""
    loops = [play(session(find("fedcac"), engine=e, rounds=1), tmp_path / e) for e in ("loop", "stack")]
    states = [[x.runtime.states.get(i) or {} for i in range(5)] for x in loops]
    assert all("mask" in state for state in states[0])
    close(*([{k: v for k, v in state.items() if k != "mask"} for state in one] for one in states))


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in method_names() if n not in QUICK and n != "fedcac"])
def test_a_stacked_run_is_the_loops_run_for_every_method(name: str, tmp_path: Path) -> None:
    same_run(find(name), tmp_path)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(nn.functional.dropout(hidden, 0.3, self.training))  # type: ignore[no-any-return]


class Careless(Method):
    """A loss that does not know of weights."""

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
        return nn.functional.cross_entropy(self.ctx.forward(params, batch.x), batch.y)


def both(
    method: type[Method], rule: Optimiser, model: nn.Module | None = None, trace: bool = False, **changes: Any
) -> dict[Any, str]:
    """Local training of every client by both engines, compared; the reasons of what was not stacked."""
    s = session(method, model, **changes)
    m, ctx = s.method, s.method.ctx
    stacker = Stacker(ctx, rule, patient=not trace)
    starts = []
    for i in ctx.clients:
        data = s.federation.data(i)
        starts.append((m.begin(m.init_client(data), m.down(m.setup(), [i], 1).to(i), data, 1), data))
    members = [Member.of(*start, share=0.5 if i == 1 else 1.0) for i, start in enumerate(starts)]
    stacker.train(m.phases(1), members, 1)
    for i, (got, start) in enumerate(zip(members, starts, strict=True)):
        trained, effort = train(ctx, rule, m.phases(1), *start, 1, 0.5 if i == 1 else 1.0)
        assert list(got.params) == list(trained.params)
        close(got.params, trained.params)
        close(got.aux, trained.aux)
        assert (got.effort.steps, got.effort.samples) == (effort.steps, effort.samples)
        assert got.effort.loss == pytest.approx(effort.loss, rel=1e-5)
    return stacker.reasons


FEDAVG = find("fedavg")


SGD, MOMENTUM = Optimiser(), Optimiser("sgd", 0.9, 0.01)


@pytest.mark.parametrize(
    ("rule", "norm"),  # a bias before batch norm has no gradient but rounding, which Adam blows up to full steps
    [(SGD, True), (SGD, False), (MOMENTUM, True), (MOMENTUM, False), (Optimiser("adam", 0, 0.01), False),
     (Optimiser("adamw", 0, 0.01), False)],
)  # fmt: skip
def test_optimisers_act_on_every_client_alone(rule: Optimiser, norm: bool) -> None:
    lr = 0.1 if rule.kind == "sgd" else 0.003
    assert both(FEDAVG, rule, SmallNet(norm=norm), lr=lr, partition="dirichlet(0.1)", min_size=2) == {}


@pytest.mark.parametrize("norm", [True, False])
def test_a_traced_step_is_the_step(norm: bool) -> None:
    assert both(find("fedavg"), Optimiser("sgd", 0.5), SmallNet(norm=norm), trace=True, clients=3, epochs=1) == {}


def test_batches_of_one_and_clients_smaller_than_a_batch() -> None:
    for norm in (True, False):
        assert both(FEDAVG, Optimiser(), SmallNet(norm=norm), batch=1 if not norm else 7, clients=12, epochs=1) == {}


def test_gradients_are_clipped_client_by_client() -> None:
    class Clipped(Method):
        def phases(self, round: int) -> list[Phase]:
            return [Phase(self.loss, clip=0.05)]

    assert both(Clipped, Optimiser(), SmallNet(norm=False)) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"clip": 1e-6},
        {"weight_decay": lambda k: 0.5 * k.endswith("bias")},
    ],
)
def test_what_a_phase_says_in_one_round_does_not_stay_for_the_next(changed: dict[str, Any]) -> None:
    """The same loss, first clipped or decaying a part of the entries, then not: traced steps are kept apart."""
    s = session(FEDAVG, SmallNet(norm=False))
    stacker = Stacker(s.method.ctx, Optimiser(), patient=False)
    rest = {"weight_decay": lambda k: 0.5} if "weight_decay" in changed else {}
    for t, own in enumerate((changed, rest), 1):
        phases = [Phase(s.method.loss, **own)]
        members = [Member(s.method.ctx.w0, {}, s.federation.data(i)) for i in range(5)]
        stacker.train(phases, members, t)
        for m in members:
            close(train(s.method.ctx, Optimiser(), phases, Start(s.method.ctx.w0), m.data, t)[0].params, m.params)


def test_a_loss_that_ignores_weights_gets_no_padding() -> None:
    assert both(Careless, Optimiser(), SmallNet(norm=False)) == {}


def test_noise_is_drawn_client_by_client_and_the_reason_is_said() -> None:
    assert both(FEDAVG, Optimiser(), Noisy())[0] == "it draws random numbers"


def test_a_branch_on_values_is_trained_client_by_client() -> None:
    class Branching(Method):
        def loss(self, params: Tree, batch: Batch, extras: Extras) -> Tensor:
            ce = self.ctx.ce(params, batch)
            return ce if float(ce.detach()) > 1 else 2 * ce

    assert "values" in both(Branching, Optimiser(), SmallNet(norm=False))[0]


def test_what_a_loss_holds_is_part_of_its_identity() -> None:
    def made(factor: Any) -> Any:
        return lambda params, batch, extras: factor

    assert identity(made(1.0)) == identity(made(1.0)) != identity(made(2.0))
    with pytest.raises(UnstackableError):
        identity(made(torch.ones(2)))


class PerSample(Method):
    """Its loss looks at a number per sample, which says how much the sample counts."""

    def begin(self, state: State, download: Tree, data: ClientData, round: int) -> Start:
        start = super().begin(state, download, data, round)
        return replace(start, per_sample=data.train.x.flatten(1).sum(1) % 1.0)

    def loss(self, params: Tree, batch: Batch, extras: Extras) -> torch.Tensor:
        assert batch.per_sample is not None
        each = torch.nn.functional.cross_entropy(self.ctx.forward(params, batch.x), batch.y, reduction="none")
        weight = batch.per_sample if batch.weight is None else batch.per_sample * batch.weight
        return (each * weight).sum() / weight.sum()


def test_what_a_method_knows_of_each_sample_is_drawn_with_it(tmp_path: Path) -> None:
    one, many = (play(session(PerSample, engine=e), tmp_path / e) for e in ("loop", "stack"))
    plain = play(session(FEDAVG, engine="loop"), tmp_path / "plain")
    for k, v in one.server["w"].items():
        assert torch.allclose(v, many.server["w"][k], atol=2e-5)
    assert any(not torch.allclose(v, plain.server["w"][k], atol=1e-3) for k, v in one.server["w"].items())
    s = session(PerSample)  # rows belong to their samples: the trainer's batches
    method, data = s.method, s.federation.data(0)
    per_sample = method.begin(method.init_client(data), method.ctx.w0, data, 1).per_sample
    for batch in (b for epoch in trainer._epochs(method.ctx, Phase(), data, 1, 1.0, per_sample) for b in epoch):
        assert torch.equal(batch.per_sample, batch.x.flatten(1).sum(1) % 1.0)


def test_auto_says_what_it_chose_and_a_resumed_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_timed", lambda clients: (1, 0.2, 0.1, 0.05, {}))
    said: list[str] = []
    halt = iter([True, False, False])
    assert not execute(
        session(FEDAVG, engine="auto"), tmp_path, Callbacks(on_warning=said.append, should_stop=lambda: next(halt))
    )
    assert said == ["engine stack: 100 ms stacked, 200 ms client by client for an epoch of 8 clients"]
    kept = json.loads((tmp_path / "settings.json").read_text())["engine"]
    assert kept == {
        "engine": "stack",
        "why": said[0].removeprefix("engine stack: "),
        "workers": None,
        "native": "",
        "by_pytorch": kept["by_pytorch"],
        "keep": 2,
        "state": "memory",
        "runtime": "local",
        "device": "cpu",
    }
    assert execute(session(FEDAVG), tmp_path, Callbacks(on_warning=said.append), resume=True)
    assert said[1] == "engine stack: as the run began"
    whole = play(session(FEDAVG, engine="stack"), tmp_path / "whole")
    assert (tmp_path / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()
    assert whole.done == 2


def test_a_stack_stays_in_one_process_where_halving_it_saves_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_timed", lambda clients: (1, 0.2, 0.1, 0.09, {}))
    choice = choose.choose_engine(session(FEDAVG).clients(), "auto")
    assert choice.workers == 1 and "one process" in choice.why
    many = session(FEDAVG, clients=40, partition="iid", min_size=1).clients()  # more participants than a stack holds
    assert choose.choose_engine(many, "auto").workers is None
    execute(session(FEDAVG, engine="auto"), tmp_path, Callbacks(should_stop=lambda: True))
    assert json.loads((tmp_path / "settings.json").read_text())["engine"]["workers"] == 1
    assert training_engine_at_start(session(FEDAVG), tmp_path).workers == 1  # a resumed run keeps that too


def test_auto_measures_both_and_takes_the_loop_for_convolutions() -> None:
    choice = choose.choose_engine(session(FEDAVG, SmallNet(norm=False)).clients(), "auto")
    assert "ms stacked" in choice.why
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))
    choice = choose.choose_engine(session(FEDAVG, net).clients(), "auto")
    assert choice.engine == "loop" and "convolutions" in choice.why


class Exchange(Method):
    """Opens with a round in which nobody trains, and refuses to go on without it."""

    def opening(self) -> bool:
        return True

    def down(self, server: dict[str, Any], ids: Any, round: int) -> Download:
        return Download(shared=server["w"] if round == 0 else server["after"])

    def aggregate(self, server: dict[str, Any], uploads: Any, round: int) -> dict[str, Any]:
        assert all(u.sender >= 0 and u.samples > 0 for u in uploads)
        new = super().aggregate(server, uploads, round)
        return {**new, "after": new["w"]}


def test_auto_plays_an_opening_that_trains_nothing_before_it_measures() -> None:
    choice = choose.choose_engine(session(Exchange, SmallNet(norm=False)).clients(), "auto")
    assert "ms stacked" in choice.why


class Stacked(Bench):
    def session(self, objects: Objects | None = None, **changes: Any) -> Session:
        s = super().session(objects, **changes)
        return replace(s, engine=s.engine.model_copy(update={"engine": "stack"}))


# A stacked run has the payloads and states of the loop's run, as tests above show: the checks of these hold for both.
# The bits after a resume, rounds with stragglers and dropouts, and targets that are numbers depend on the engine.
HELD = ["same_bits_after_a_resume", "any_subset_of_answers_is_aggregated", "numbers_are_learned_or_refused"]


@pytest.mark.parametrize("name", ["same_bits_after_a_resume", "payload_is_what_is_declared"])
def test_the_battery_holds_for_stacked_training(name: str, tmp_path: Path) -> None:
    CHECKS[name](Stacked(find("fedrep"), {}), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("method", METHODS)
def test_the_battery_holds_for_every_method_stacked(method: str, name: str, tmp_path: Path) -> None:
    CHECKS[name](Stacked(find(method), {}), tmp_path)


def test_the_number_of_workers_changes_rounding_only(tmp_path: Path) -> None:
    bench = Stacked(FEDAVG, {})
    one, two = bench.play(tmp_path / "1", rounds=1), bench.play(tmp_path / "2", workers=2, rounds=1)
    close(one.server, two.server)


def test_traces_are_made_of_frequent_shapes_only() -> None:
    calls = stack_step.Steps()
    flat = [torch.ones(2, 3), torch.ones(2, 4, 1), torch.ones(2, 4), torch.ones(2, 4), torch.ones(()), torch.ones(())]
    for _ in range(stack_step.TRACE_AFTER):
        calls("k", lambda *a: (a[0] * 2,), flat)
    assert not calls._traced
    assert torch.equal(calls("k", lambda *a: (a[0] * 2,), flat)[0], torch.full((2, 3), 2.0)) and calls._traced


def cases(s: Session, one: bool, sizes: list[int]) -> list[Case]:
    """Models of clients, all the same or each its own, on parts of these sizes."""
    w0, out = s.method.ctx.w0, []
    for i, n in enumerate(sizes):
        rng = torch.Generator().manual_seed(i)
        x, y = torch.rand(n, 1, 8, 8, generator=rng), torch.randint(10, (n,), generator=rng)
        own = {k: v + 0.3 * torch.randn(v.shape, generator=rng) if v.is_floating_point() else v for k, v in w0.items()}
        out.append(Case(w0 if one else own, {}, Split(x, y)))
    return out


@pytest.mark.parametrize("one", [True, False])
def test_many_clients_are_scored_at_once_as_one_by_one(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    s = session(find("fedavg"))
    many = cases(s, one, [300, 7, 0, 1, 41, 256])
    alone = [score_model(s.method, *c) for c in many]
    asked: list[int] = []
    predict = type(s.method).predict
    monkeypatch.setattr(type(s.method), "predict", lambda m, w, x, e: asked.append(len(x)) or predict(m, w, x, e))
    for a, b in zip(alone, Scorer(s.method)(many), strict=True):
        assert all(torch.equal(a.counts[k], b.counts[k]) for k in ("hits", "total"))
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-5)
    assert len(asked) == (3 if one else 2), "in chunks of 256, not client by client"


def test_what_cannot_be_stacked_is_scored_one_by_one() -> None:
    class Branches(Method):
        def predict(self, params: Tree, x: Tensor, extras: Extras) -> Tensor:
            return self.ctx.forward(params, x) if float(x.sum()) >= 0 else x

    s = session(Branches)
    many = cases(s, False, [12, 5])
    for a, b in zip([score_model(s.method, *c) for c in many], Scorer(s.method)(many), strict=True):
        assert torch.equal(a.counts["hits"], b.counts["hits"]) and float(a.loss) == float(b.loss)
