"""Tests of PRR-FL."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import f1_score

from coterie.core import tree as T
from coterie.core.method import Start, Upload
from coterie.methods.local import Local
from coterie.methods.prrfl import PRRFL, lessons, macro_f1, stage
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.head_methods import batch_of, bound, gradients, noisy, opened, round_of, same


def deputies(method, count, seed=0):
    """Return uploads with different values."""
    base = T.drop(method.ctx.w0, method.stays)
    return [Upload(noisy(base, lambda k: True, seed + i), {}, i, 10 * (i + 1)) for i in range(count)]


def sent(method, server, client):
    return method.down(server, [client], 2).to(client)


def test_prrfl_of_one_client_aggregates_to_its_upload() -> None:
    method, _ = bound(PRRFL)
    upload = deputies(method, 1)[0]
    assert same(sent(method, method.aggregate(method.setup(), [upload], 1), 0), upload.tree)


def test_prrfl_of_identical_clients_is_the_identity() -> None:
    method, _ = bound(PRRFL)
    one = deputies(method, 1)[0]
    server = method.aggregate(method.setup(), [Upload(one.tree, {}, i, 5) for i in range(3)], 1)
    for i in range(3):
        assert all(torch.allclose(v, one.tree[k], atol=1e-5) for k, v in sent(method, server, i).items())


def test_prrfl_without_a_window_leaves_weights_alone() -> None:
    method, _ = bound(PRRFL, r_first=0.0, r_last=0.0)
    uploads = deputies(method, 3)
    server = method.aggregate(method.setup(), uploads, 1)
    assert all(same(sent(method, server, u.sender), u.tree) for u in uploads)
    method, _ = bound(PRRFL)
    server = method.aggregate(method.setup(), uploads, 1)
    assert not same(sent(method, server, 0), uploads[0].tree)


def test_prrfl_averages_amplitudes_over_the_answers_and_biases_plainly() -> None:
    method, _ = bound(PRRFL, r_first=1.0, r_last=1.0)  # the half-open window of full size holds every frequency
    a = {k: torch.randn(v.shape) for k, v in deputies(method, 1)[0].tree.items()}
    uploads = [Upload(a, {}, 0, 1), Upload({k: 3 * v for k, v in a.items()}, {}, 4, 99)]
    server = method.aggregate(method.setup(), uploads, 1)
    even = [k for k in a if a[k].ndim == 2 and not any(n % 2 for n in a[k].shape)]
    assert even
    for i in (0, 4):
        got = sent(method, server, i)
        assert all(torch.allclose(got[k], 2 * a[k], atol=1e-4) for k in [*even, "fc1.bias"])
    start = T.drop(method.ctx.w0, method.stays)
    assert same(sent(method, server, 2), start)  # client 2 did not answer


def test_prrfl_each_client_gets_its_own_deputy_without_batch_norm() -> None:
    method, clients = bound(PRRFL)
    uploads = deputies(method, 2)
    server = method.aggregate(method.setup(), uploads, 1)
    trees = [sent(method, server, i) for i in (0, 1)]
    assert not torch.allclose(trees[0]["fc1.weight"], trees[1]["fc1.weight"], atol=1e-2)
    assert not method.ctx.group("bn") & (trees[0].keys() | round_of(method, clients[0])[2].tree.keys())


def test_prrfl_personal_model_is_never_overwritten_by_the_server() -> None:
    method, clients = bound(PRRFL)
    state = {**method.init_client(clients[0]), "w": noisy(method.ctx.w0, lambda k: k.startswith("fc"))}
    download = deputies(method, 1, 7)[0].tree
    params, _ = method.begin(state, download, clients[0], 2).model
    assert same(T.tagged("w", params), state["w"])
    assert same(T.keep(T.tagged("v", params), lambda k: k in download), download)
    assert same(method.personal(state, download, clients[0])[0], state["w"])


@pytest.mark.parametrize(
    ("deputy", "personal", "expected"),
    [
        (0, 0.5, "recover"),
        (0.34, 0.5, "recover"),
        (0.36, 0.5, "exchange"),
        (0.46, 0.5, "sublimate"),
        (0, 0, "sublimate"),
    ],
)
def test_prrfl_stage_is_recover_only_below_alpha1(deputy: float, personal: float, expected: str) -> None:
    assert stage(deputy, personal, 0.7, 0.9) == expected


@pytest.mark.parametrize(
    ("now", "listens"), [("recover", (False, True)), ("exchange", (True, True)), ("sublimate", (True, False))]
)
def test_prrfl_only_the_listening_model_learns_from_the_other(now: str, listens: tuple[bool, bool]) -> None:
    w, v = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    got = torch.autograd.grad(lessons(w, v, now), [w, v], allow_unused=True)  # type: ignore[arg-type]
    assert tuple(g is not None and bool(g.any()) for g in got) == listens
    p, q = w.detach().softmax(1), v.detach().softmax(1)
    to_w, to_v = (q * (q / p).log()).sum(1).mean(), (p * (p / q).log()).sum(1).mean()
    expected = listens[0] * to_w + listens[1] * to_v
    assert torch.allclose(lessons(w, v, now).detach(), expected, atol=1e-6)  # type: ignore[arg-type]


def test_prrfl_starts_with_recover_and_with_one_epoch_exchanges_only() -> None:
    for epochs, first in ((1, "exchange"), (2, "recover"), (5, "recover")):
        method, clients = bound(PRRFL, {"epochs": epochs})
        assert opened(method, clients[0])[1]["stage"] == first
    method, clients = bound(PRRFL, {"epochs": 1})
    assert round_of(method, clients[0])[1]["stage"] == "exchange"


def test_prrfl_in_recover_the_personal_model_trains_as_local_only() -> None:
    method, clients = bound(PRRFL, {"epochs": 2})
    params, extras = opened(method, clients[0])
    params, batch = noisy(params, lambda k: k == "v:fc2.weight"), batch_of(clients[0])
    alone, local = gradients(method, params, batch, extras), bound(Local)[0]
    plain = gradients(local, T.tagged("w", params), batch, {})
    assert all(torch.equal(g, alone["w:" + k]) for k, g in plain.items())
    taught = gradients(method, params, batch, {**extras, "stage": "exchange"})
    assert not torch.equal(taught["w:fc1.weight"], alone["w:fc1.weight"])


def test_prrfl_scoring_between_epochs_moves_no_batch_norm_and_follows_the_f1() -> None:
    method, clients = bound(PRRFL)
    params, _ = opened(method, clients[0])
    phases = [replace(phase, epochs=80) for phase in bound(Local)[0].phases(1)]
    good = train(method.ctx, Optimiser(), phases, Start(method.ctx.w0), clients[0], 1)[0].params
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in params.items()}
    leaves |= {"w:" + k: v.clone().requires_grad_("running" not in k) for k, v in good.items()}
    with method.ctx.net.train_mode(), torch.no_grad():
        before = T.clone(leaves)
        _, extras = method.next_stage(leaves, {"stage": "exchange", "left": 3}, clients[0])
    assert same(T.clone(leaves), before)
    assert extras == {"stage": "recover", "left": 2}
    assert macro_f1(method.ctx.forward(good, clients[0].train.x), clients[0].train.y) > 0.5


def test_macro_f1_is_scikit_learns() -> None:
    rng = torch.Generator().manual_seed(0)
    for y, guess in torch.randint(0, 5, (6, 2, 9), generator=rng):
        expected = f1_score(y.numpy(), guess.numpy(), average="macro", zero_division=0)
        assert macro_f1(torch.eye(7)[guess], y) == pytest.approx(expected)
