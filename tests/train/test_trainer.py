"""The trainer, its optimisers and keyed randomness."""

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Batch, Phase, Start, replace
from coterie.core.rng import key, numpy_rng, torch_rng
from coterie.methods.fedavg import FedAvg
from coterie.parts.gradient import clipped
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.toy import Toy, bind, clients, mlp, near, same


def one(n: int, seed: int = 0) -> Toy:
    return clients(1, sizes=(n,), seed=seed)


def go(n=10, phases=None, rule=None, round=1, share=1.0, norm=False, client=0, model=None, start=None, **ctx):
    """Train one client with n samples; return context, parameters, result and effort."""
    data = one(n)
    method = bind(FedAvg, model=model or mlp(norm), data=data, **ctx)
    if phases is None:
        phases = [Phase(method.loss)]
    phases = [replace(p, loss=method.loss) if p.loss is None and p.update is None else p for p in phases]
    given = replace(data.data(0), client=client)
    first = Start(start or method.ctx.w0)
    trained, effort = train(method.ctx, rule or Optimiser(), phases, first, given, round, share)
    return method.ctx, trained.params, trained, effort


def recorder(seen):
    """A loss that writes down the first input of every sample it is shown."""

    def loss(params, batch, extras):
        batches = [batch] if isinstance(batch, Batch) else batch
        seen.append([b.x[:, 0].tolist() for b in batches])
        return params["0.weight"].sum()

    return loss


# ---- what is trained on ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "norm", "steps", "samples"),
    [
        *((10, False, 3, 10), (9, False, 3, 9), (3, False, 1, 3), (1, False, 1, 1)),
        *((12, True, 3, 12), (10, True, 2, 10), (9, True, 2, 9), (3, True, 1, 3), (1, True, 0, 0)),
    ],
)
def test_a_tiny_last_batch_joins_the_one_before_it_only_with_batch_norm(n, norm, steps, samples):
    ctx, after, _, effort = go(n, norm=norm)
    assert (effort.steps, effort.samples) == (steps, samples)
    assert same(after, ctx.w0) == (steps == 0)


@pytest.mark.parametrize(
    ("phase", "steps"),
    [
        (Phase(epochs=0.5), 2),
        (Phase(epochs=1.5), 5),
        (Phase(epochs=2), 6),
        (Phase(epochs=0), 0),
        (Phase(steps=1), 1),
        (Phase(steps=7), 7),
        (Phase(steps=2, epochs=9), 2),
        (Phase(epochs=1, batches_per_step=2), 2),
        (Phase(epochs=2, batches_per_step=3), 2),
    ],
)
def test_epochs_may_be_fractions_and_steps_go_before_epochs(phase, steps):
    phase = replace(phase, loss=recorder([]))
    assert go(phases=[phase])[3].steps == steps


def test_an_epoch_shows_every_sample_once_in_a_new_order():
    seen = []
    go(phases=[Phase(recorder(seen), epochs=3)])
    orders = [[x for b in seen[e * 3 : e * 3 + 3] for x in b[0]] for e in range(3)]
    everything = sorted(one(10).parts[0][0][:, 0].tolist())
    assert all(sorted(o) == everything for o in orders) and len({tuple(o) for o in orders}) == 3
    assert [len(b[0]) for b in seen[:3]] == [4, 4, 2]


def test_batch_order_is_a_function_of_seed_round_client_stream_and_epoch():
    def order(**change):
        seen = []
        go(phases=[Phase(recorder(seen), stream=change.pop("stream", 0))], **change)
        return tuple(x for b in seen for x in b[0])

    base = order()
    assert order() == base and order(epochs=5)[:10] == base and order(lr=9.0) == base
    others = [order(seed=1), order(round=2), order(client=3), order(stream=1)]
    assert len({base, *others}) == 5


def test_two_phases_of_one_stream_see_the_same_batches():
    seen = []
    go(phases=[Phase(recorder(seen)), Phase(recorder(seen)), Phase(recorder(seen), stream=1)])
    assert seen[:3] == seen[3:6] != seen[6:]


def test_a_step_with_several_batches_takes_the_missing_ones_from_the_start_of_the_order():
    seen = []
    go(phases=[Phase(recorder(seen), batches_per_step=2)])
    assert len(seen) == 2 and seen[1][1] == seen[0][0] and seen[0][0] != seen[0][1]


@pytest.mark.parametrize(
    ("epochs", "share", "steps"), [(5, 0.5, 6), (5, 0.1, 3), (1, 0.9, 3), (0.5, 0.1, 2), (5, 1.0, 15)]
)
def test_a_straggler_does_whole_epochs_and_at_least_one(epochs, share, steps):
    assert go(epochs=epochs, share=share)[3].steps == steps


# ---- optimisers ------------------------------------------------------------------------------------------------------
RULES = [
    (Optimiser(), lambda p, lr: torch.optim.SGD(p, lr)),
    (Optimiser("sgd", 0.0, 0.05), lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.05)),
    (Optimiser("sgd", 0.9, 0.05), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.05)),
    (Optimiser("adam"), lambda p, lr: torch.optim.Adam(p, lr)),
    (Optimiser("adam", 0.0, 0.05), lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.05)),
    (Optimiser("adamw", 0.0, 0.05), lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.05)),
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("rule", "make"), RULES)
def test_optimisers_are_those_of_torch(rule, make, norm, clip):
    _, after, _, effort = go(phases=[Phase(epochs=3, clip=clip)], rule=rule, norm=norm)
    module, (x, y) = mlp(norm).train(), one(10).parts[0]
    optimiser = make(module.parameters(), 0.1)
    losses = []
    for epoch in range(3):
        order = torch.randperm(10, generator=torch_rng(0, "batches", 1, 0, 0, epoch))
        for rows in (order[:4], order[4:]) if norm else order.split(4):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimiser.step()
            losses.append(float(loss.detach()))
    expected = {k: v for k, v in module.state_dict().items() if k in after}
    assert near(after, expected, atol=1e-6)
    assert effort.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.parametrize(("rule", "make"), RULES)
def test_an_optimiser_that_keeps_its_memory_goes_on_where_it_stopped(rule, make):
    data, method = one(10), bind(FedAvg, model=mlp(), data=one(10))
    module, (x, y) = mlp().train(), data.parts[0]
    optimiser, w, memory = make(module.parameters(), 0.1), method.ctx.w0, {}
    for t in (1, 2, 3):
        frozen = {k: v.clone() for k, v in memory.items()}
        given = dict(memory)
        w = train(method.ctx, rule, method.phases(t), Start(w), data.data(0), t, memory=given)[0].params
        assert same(memory, frozen)  # the tensors that were handed in belong to somebody else
        memory = given
        order = torch.randperm(10, generator=torch_rng(0, "batches", t, 0, 0, 0))
        for a in (0, 4, 8):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[order[a : a + 4]]), y[order[a : a + 4]]).backward()
            optimiser.step()
        assert near(w, {k: v.detach() for k, v in module.named_parameters()}, atol=1e-6)
    assert bool(memory) == (rule.kind != "sgd" or rule.momentum > 0)


def test_weight_decay_spares_what_the_phase_says():
    weights = ("0.weight", "2.weight")
    _, after, _, _ = go(phases=[Phase(weight_decay=lambda k: 0.1 * (k in weights))], rule=Optimiser("sgd", 0.5, 0.1))
    module, (x, y) = mlp(), one(10).parts[0]
    named = dict(module.named_parameters())
    groups = [{"params": [named[k] for k in weights], "weight_decay": 0.1}]
    groups += [{"params": [v for k, v in named.items() if k not in weights], "weight_decay": 0.0}]
    optimiser = torch.optim.SGD(groups, 0.1, momentum=0.5)
    order = torch.randperm(10, generator=torch_rng(0, "batches", 1, 0, 0, 0))
    for a in (0, 4, 8):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[order[a : a + 4]]), y[order[a : a + 4]]).backward()
        optimiser.step()
    assert near(after, {k: v.detach() for k, v in named.items()})


def test_a_phase_overrides_weight_decay():
    own, rule = Phase(weight_decay=lambda name: 0.2), Optimiser("sgd", 0.9, 0.05)
    assert same(go(phases=[own], rule=rule)[1], go(rule=Optimiser("sgd", 0.9, 0.2))[1])
    assert not same(go(phases=[own], rule=rule)[1], go(rule=rule)[1])


def test_the_rate_decays_per_round_from_the_second_on():
    ctx = bind(FedAvg, lr=0.2, lr_decay=0.5).ctx
    assert [ctx.lr_at(t) for t in (0, 1, 2, 3)] == [0.2, 0.2, 0.1, 0.05]
    assert same(go(round=3, lr=0.2, lr_decay=0.5)[1], go(round=3, lr=0.05)[1])
    assert not same(go(round=3, lr=0.2)[1], go(round=3, lr=0.05)[1])


@pytest.mark.parametrize("rule", [r for r, _ in RULES])
def test_optimiser_state_starts_empty_in_every_phase_and_round(rule):
    _, once, _, _ = go(rule=rule, phases=[Phase()])
    again = go(rule=rule, phases=[Phase()], start=once)[1]
    assert same(go(rule=rule, phases=[Phase(), Phase()])[1], again)


@pytest.mark.parametrize("rule", [r for r, _ in RULES])
def test_what_is_not_trained_keeps_its_bits(rule):
    ctx, after, _, _ = go(rule=rule, norm=True, phases=[Phase(trains=lambda k: k.startswith("3."), epochs=2)])
    assert {k for k in after if not torch.equal(after[k], ctx.w0[k])} == {"3.weight", "3.bias"}


def test_a_parameter_the_model_holds_fixed_is_not_trained():
    module = mlp()
    module[0].weight.requires_grad_(False)
    ctx, after, _, _ = go(model=module, rule=Optimiser("adam", 0.0, 0.1))
    assert "0.weight" not in after and not any(torch.equal(after[k], ctx.w0[k]) for k in after)


def test_clipping_bounds_the_common_norm_and_leaves_small_gradients():
    big, small = [torch.full((4,), 3.0), None, torch.full((1,), 8.0)], [torch.tensor([0.3]), torch.tensor([0.4])]
    assert torch.allclose(
        T.flatten(dict(enumerate(g for g in clipped(big, 2.0) if g is not None))).norm(), torch.tensor(2.0)
    )
    assert clipped(big, 2.0)[1] is None
    assert all(torch.equal(a, b) for a, b in zip(clipped(small, 2.0), small, strict=True))


# ---- the rest of a phase ---------------------------------------------------------------------------------------------
def test_training_leaves_the_tree_it_is_given_alone():
    ctx = bind(FedAvg, model=mlp(True)).ctx
    start = T.clone(ctx.w0)
    before = T.clone(start)
    after = go(norm=True, start=start)[1]
    assert same(start, before) and not any(v.requires_grad for v in (*start.values(), *after.values()))


def test_every_epoch_runs_after_each_epoch_and_may_replace_parameters_and_extras():
    calls = []

    def hook(params, extras, data):
        calls.append(len(data.train))
        return {**params, "2.bias": torch.full_like(params["2.bias"], 7.0)}, {**extras, "epochs": len(calls)}

    _, after, trained, _ = go(phases=[Phase(epochs=2.5, every_epoch=hook)])
    assert calls == [10, 10, 10] and trained.extras["epochs"] == 3
    assert torch.equal(after["2.bias"], torch.full((3,), 7.0))


def test_second_results_of_a_loss_are_collected():
    phase = Phase(lambda p, b, e: (p["0.weight"].sum(), len(b.y)))
    assert go(phases=[phase])[2].aux == [4, 4, 2]


def test_an_own_update_rule_carries_parameters_and_gets_keyed_randomness():
    drawn = []

    def update(params, batch, extras, rng):
        drawn.append(float(torch.rand((), generator=rng)))
        return {**params, "2.bias": params["2.bias"] + len(batch.y)}

    ctx, after, _, effort = go(phases=[Phase(update=update)])
    assert torch.equal(after["2.bias"], ctx.w0["2.bias"] + 10) and effort.steps == 3
    first = list(drawn)
    go(phases=[Phase(update=update)])
    assert drawn[3:] == first and len(set(first)) == 3


def test_noise_inside_the_model_is_keyed_by_round_and_client():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    base = go(model=model)[1]
    torch.rand(5)  # what was drawn before does not matter
    assert same(go(model=model)[1], base)
    flat = Phase(steps=1)
    assert not same(*(go(model=model, n=4, phases=[flat], round=r)[1] for r in (1, 2)))


# ---- keys ------------------------------------------------------------------------------------------------------------
def test_keys_are_the_same_on_every_machine_and_differ_in_every_argument():
    assert key(0, "batches", 1, 2) == 6593225018797679335
    keys = {
        key(0, "a", 1, 2),
        key(0, "a", 12),
        key(0, "a", 2, 1),
        key(0, "b", 1, 2),
        key(1, "a", 1, 2),
        key(0, "a1", 2),
    }
    assert len(keys) == 6 and all(0 <= k < 2**63 for k in keys)
    assert float(torch.rand((), generator=torch_rng(3, "x"))) == float(torch.rand((), generator=torch_rng(3, "x")))
    assert numpy_rng(3, "x").integers(1000, size=4).tolist() == numpy_rng(3, "x").integers(1000, size=4).tolist()
