"""Optimisers, learning-rate schedules, clipping and local steps, against PyTorch's own."""

import functools
import math

import pytest
import torch
from torch import nn

from coterie import config
from coterie.core.method import Phase, Start
from coterie.core.rng import torch_rng
from coterie.core.schedules import check_schedule, lr_factor
from coterie.engine.session import Objects, prepare
from coterie.errors import CoterieError
from coterie.federation.policy.allow import Allow, count_epochs
from coterie.methods.fedavg import FedAvg
from coterie.train.optimisers import check_fit, check_optimiser, known_optimisers, named_optimiser, optimiser
from coterie.train.trainer import train
from support.toy import bind, clients, mlp, same

TEN = clients(1, sizes=(10,))


def go(rule, rounds=1, memory=None, **ctx):
    """Train one client of ten samples in batches of four for some rounds; return its parameters."""
    method = bind(FedAvg, data=TEN, **ctx)
    w = method.ctx.w0
    for t in range(1, rounds + 1):
        w = train(method.ctx, rule, method.phases(t), Start(w), TEN.data(0), t, memory=memory)[0].params
    return w


def torch_loop(make, rounds=1, epochs=1, scheduler=None, clip=None, keep=False):
    """Return what a plain loop of PyTorch makes of the same samples in the same order."""
    module, (x, y) = mlp().train(), TEN.parts[0]
    own = make(module.parameters())
    for t in range(1, rounds + 1):
        own = own if keep or t == 1 else make(module.parameters())
        schedule = scheduler(own) if scheduler else None
        for epoch in range(epochs):
            order = torch.randperm(10, generator=torch_rng(0, "batches", t, 0, 0, epoch))
            for rows in order.split(4):
                own.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                own.step()
                if schedule is not None:
                    schedule.step()
    return {k: v.detach() for k, v in module.named_parameters()}


OPTIONS = {
    "adam": {"betas": (0.8, 0.9), "amsgrad": True}, "adamw": {"betas": (0.9, 0.99)}, "sgd": {"dampening": 0.3},
    "rmsprop": {"alpha": 0.9, "momentum": 0.5, "centered": True}, "adagrad": {"initial_accumulator_value": 0.1},
    "nadam": {"momentum_decay": 0.01}, "radam": {"decoupled_weight_decay": True}, "rprop": {"etas": (0.4, 1.3)},
    "adadelta": {"rho": 0.8}, "adamax": {"eps": 1e-6}, "asgd": {"t0": 2.0}, "adafactor": {"d": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimiser_of_torch_takes_the_steps_of_torch(name, keep):
    cls, options = known_optimisers()[name], OPTIONS[name]
    decay = 0.0 if name == "rprop" else 0.02
    text = check_optimiser(f"{cls.__name__}({', '.join(f'{k}={v}' for k, v in options.items())})")
    rule = optimiser(text, weight_decay=decay, keep=keep)
    more = options | ({} if name == "rprop" else {"weight_decay": decay})
    expected = torch_loop(lambda p: cls(p, lr=0.05, **more), rounds=2, keep=keep)
    assert same(go(rule, 2, {} if keep else None, lr=0.05), expected)


def test_options_that_are_settings_or_unknown_are_refused():
    for text, words in [
        ("adam(lr=0.1)", "set lr"), ("sgd(momentum=0.9)", "set momentum"), ("adam(beta=0.9)", "betas"),
        ("adam(0.9)", "one name"), ("adamm", "adam"), ("adam(betas=open('x'))", "must be a name"), ("a.b", "must be"),
        ("adam(foreach=True)", "foreach"), ("adam+sgd", "one name"), ("(" * 300, "must be"),
    ]:  # fmt: skip
        with pytest.raises(CoterieError, match=words):
            check_optimiser(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lbfgs", "closure"),
        ("sparseadam", "dense gradients"),
        ("muon", "2D"),
        ("adam(betas=(2.0, 0.9))", "beta"),
        ("adamw(betas=0.9)", "does not take these values of its options"),
    ],
)
def test_an_optimiser_that_cannot_train_the_model_is_refused_before_work(text, words):
    with pytest.raises(CoterieError, match=f"cannot train this model.*{words}"):
        check_fit(optimiser(text), [torch.zeros(3, 4), torch.zeros(3)])


def test_a_function_that_returns_no_optimiser_is_refused():
    with pytest.raises(CoterieError, match="returned a NoneType instead of a torch optimiser"):
        check_fit(optimiser("tests:nothing", lambda params, lr: None), [torch.zeros(3)])


def test_weight_decay_of_an_optimiser_without_it_is_refused():
    with pytest.raises(CoterieError, match="no weight decay"):
        check_fit(optimiser("rprop", weight_decay=0.1), [torch.zeros(3)])


def test_a_class_of_torch_and_a_partial_of_it_are_their_names():
    assert named_optimiser(torch.optim.RMSprop) == "rmsprop"
    assert named_optimiser(functools.partial(torch.optim.AdamW, betas=(0.9, 0.99))) == "adamw(betas=(0.9, 0.99))"
    assert named_optimiser(len) is None


def make_slow(params, lr):
    """An optimiser of the user: SGD at a tenth of the rate."""
    return torch.optim.SGD(params, lr=lr / 10)


def test_a_function_of_the_user_makes_the_optimiser():
    rule = optimiser("tests:make_slow", make_slow)
    assert same(go(rule, lr=0.5), go(optimiser("sgd"), lr=0.05))
    assert rule.loop_only


# ---- schedules -------------------------------------------------------------------------------------------------------
LR = torch.optim.lr_scheduler
SCHEDULES = [
    ("step(3, 0.5)", lambda o: LR.StepLR(o, 3, 0.5)),
    ("exponential(0.9)", lambda o: LR.ExponentialLR(o, 0.9)),
    ("cosine(0.1)", lambda o: LR.CosineAnnealingLR(o, 9, eta_min=0.1)),
    ("linear(0.2)", lambda o: LR.LinearLR(o, 1.0, 0.2, 9)),
    ("warmup(4, 0.25)", lambda o: LR.LinearLR(o, 0.25, 1.0, 4)),
]


@pytest.mark.parametrize(("text", "make"), SCHEDULES)
def test_schedules_are_those_of_torch(text, make):
    """Nine rounds by lr_at, and nine steps (three epochs of three batches) inside a round."""
    own = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, expected = make(own), []
    for _ in range(9):
        expected.append(own.param_groups[0]["lr"])
        own.step()
        schedule.step()
    ctx = bind(FedAvg, rounds=9, lr=1.0, lr_rounds=text).ctx
    assert [ctx.lr_at(t) for t in range(1, 10)] == pytest.approx(expected, rel=1e-12)
    assert ctx.lr_at(10) == ctx.lr_at(9)  # models after the last round are trained at its rate
    trained = go(optimiser("sgd", momentum=0.9), lr=1.0, epochs=3, lr_steps=text)
    plain = torch_loop(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), epochs=3, scheduler=make)
    assert all(torch.allclose(trained[k], v, atol=1e-6) for k, v in plain.items())


def test_factors_of_joined_schedules_are_multiplied_and_checked():
    text = check_schedule("lr_rounds", "warmup(2, 0.5)+step(4,0.1)")
    assert text == "warmup(2, 0.5) + step(4, 0.1)"
    assert [lr_factor(text, t, 10) for t in (0, 1, 2, 5)] == pytest.approx([0.5, 0.75, 1.0, 0.1])
    for bad in (
        "step",
        "step(0)",
        "cosine(2)",
        "warmup(3, 0)",
        "sine",
        "step(every='x')",
        "cosine(end=(1, 2))",
        "step(every=1, every=2)",
    ):
        with pytest.raises(CoterieError, match="lr_steps"):
            check_schedule("lr_steps", bad)


def test_clipping_of_the_run_is_that_of_torch_and_a_phase_overrides_it():
    clip = optimiser("sgd", clip=0.05)
    assert all(
        torch.allclose(v, torch_loop(lambda p: torch.optim.SGD(p, lr=0.1), clip=0.05)[k], atol=1e-7)
        for k, v in go(clip).items()
    )
    method = bind(FedAvg, data=TEN)
    own = train(method.ctx, clip, [Phase(method.loss, clip=1e6)], Start(method.ctx.w0), TEN.data(0), 1)[0].params
    assert same(own, go(optimiser("sgd")))


# ---- local steps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("phase", "share", "steps"), [
    (Phase(), 1.0, 7), (Phase(), 0.5, 3), (Phase(), 0.01, 1), (Phase(epochs=2), 1.0, 6), (Phase(steps=2), 1.0, 2),
])  # fmt: skip
def test_local_steps_replace_the_epochs_of_the_run_only(phase, share, steps):
    method = bind(FedAvg, data=TEN, local_steps=7, epochs=99)
    phase = Phase(method.loss, epochs=phase.epochs, steps=phase.steps)
    effort = train(method.ctx, optimiser("sgd"), [phase], Start(method.ctx.w0), TEN.data(0), 1, share)[1]
    assert effort.steps == steps
    assert math.isclose(count_epochs(method, [Phase(method.loss)], 10), 7 / 3)


# ---- settings and policies -------------------------------------------------------------------------------------------
SMALL = {"subset": 200, "clients": 3, "partition": "iid", "rounds": 2}


@pytest.mark.parametrize(("given", "words"), [
    ({"local_steps": 3, "epochs": 2}, "takes the place of epochs"),
    ({"optimizer": "adam(betas=(0.9, 0.99))", "momentum": 0.9}, "has no effect"),
    ({"lr_rounds": "sine"}, "lr_rounds"), ({"optimizer": "nosuch"}, "optimizer"), ({"grad_clip": 0}, "grad_clip"),
])  # fmt: skip
def test_wrong_settings_get_one_sentence(given, words):
    with pytest.raises(CoterieError, match=words):
        config.settings("fedavg", **SMALL, **given)


def test_methods_that_cannot_follow_refuse_or_say_so():
    with pytest.raises(CoterieError, match="SCAFFOLD needs one learning rate"):
        prepare(config.settings("scaffold", **SMALL, lr_steps="cosine"))
    with pytest.raises(CoterieError, match="PRR-FL needs local work in epochs"):
        prepare(config.settings("prr-fl", **SMALL, local_steps=3))
    assert any("per-fedavg" in n.lower() and "grad_clip = 1.0" in n
               for n in prepare(config.settings("per-fedavg", **SMALL, grad_clip=1.0)).warnings())  # fmt: skip
    assert not prepare(config.settings("fedavg", **SMALL, grad_clip=1.0, optimizer="AdamW")).warnings()


def test_batch_norm_with_batches_of_one_is_refused():
    with pytest.raises(CoterieError, match="batch = 1 is too small"):
        prepare(config.settings("fedbn", **SMALL, batch=1))


def test_a_host_allows_settings_and_code_of_training_only_if_its_policy_does():
    strict = Allow.of({"settings": {"optimizer": ["SGD", "AdamW(betas=(0.9,0.99))"]}})
    strict.check_plan(config.settings("fedavg", optimizer="adamw(betas=(0.9, 0.99))"))
    for given in (
        {"lr_rounds": "cosine"},
        {"lr_steps": "cosine"},
        {"local_steps": 3},
        {"grad_clip": 1.0},
        {"augment": "flip"},
    ):
        with pytest.raises(CoterieError, match=f"the plan sets {next(iter(given))}"):
            strict.check_plan(config.settings("fedavg", **given))
    code = config.settings("fedavg", optimizer="wards.training:make")
    with pytest.raises(CoterieError, match="as its optimizer, which this host does not allow"):
        Allow().check_plan(code)
    Allow.of({"code": ["wards.training:*"]}).check_plan(code)


def test_a_function_is_recorded_with_its_code():
    chosen = config.settings("fedavg", **SMALL, optimizer="test_training_options:make_slow")
    session = prepare(chosen, objects=Objects(functions={"optimizer": make_slow}))
    assert session.rule.make is make_slow and "optimizer" in session.described()["digests"]
