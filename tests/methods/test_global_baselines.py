"""FedAvg + fine-tuning, LP-FT, SCAFFOLD, MOON, FedNova and q-FFL held to their papers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie.core import tree as T
from coterie.core.method import Batch, Upload
from coterie.errors import CoterieError
from coterie.export.run_models import Saved, export
from coterie.methods import build
from coterie.methods.fednova import STEPS, gradients_in
from coterie.methods.qffl import LOSS
from coterie.train.trainer import train
from support.short_runs import HEAD, bound, jittered, near, plain, play, same, session, size, state, traffic, watch

CLIENTS = range(5)
STATS = {"bn1.running_mean", "bn1.running_var"}


# ---- fine-tuning -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg-ft", "lp-ft"])
def test_fine_tuning_never_feeds_back_into_fedavg(method: str) -> None:
    tuned, avg = play(method, eval_every=1), play("fedavg", eval_every=1)
    assert same(tuned.server["w"], avg.server["w"])
    assert "adapted/test" in tuned.events[-1]["eval"] and "adapted/test" not in avg.events[-1]["eval"]  # type: ignore[attr-defined]


def fine_tuned(method: str, **own: float) -> Any:
    s = session(method, own=own)
    w0 = s.method.ctx.w0
    return w0, train(s.method.ctx, s.clients().rule, s.method.adapt(), w0, {}, s.federation.data(0), 1)[0]


def test_fedavg_ft_is_plain_training_of_a_copy() -> None:
    s = session("fedavg", epochs=3)
    _, tuned = fine_tuned("fedavg-ft", finetune_epochs=3)
    phases = s.method.phases(1)
    trained = train(s.method.ctx, s.clients().rule, phases, s.method.ctx.w0, {}, s.federation.data(0), 1)[0]
    assert same(tuned, trained)


def test_lp_ft_trains_the_head_first_and_everything_after_it() -> None:
    w0, probed = fine_tuned("lp-ft", finetune_epochs=0)
    assert {k for k in w0 if not torch.equal(w0[k], probed[k])} == HEAD
    w0, both = fine_tuned("lp-ft")
    assert all(not torch.equal(w0[k], both[k]) for k in w0)
    assert same(fine_tuned("lp-ft", head_epochs=0)[1], fine_tuned("fedavg-ft")[1])
    assert build("lp-ft", {"head_epochs": 0, "finetune_epochs": 0}).adapt() == []


def test_the_fine_tuned_model_is_the_one_that_is_exported(tmp_path: Path) -> None:
    run = coterie.run("fedavg-ft", "digits", clients=3, rounds=1, out=tmp_path / "run", workers=1, finetune_epochs=1)
    first, tuned = (dict(m.state_dict()) for m in (run.session().method.ctx.net.module, run.personal(0)))
    assert export(run, 0, tmp_path / "0.safetensors").startswith("import coterie")
    saved = load_file(tmp_path / "0.safetensors")
    assert all(torch.equal(saved[k], tuned[k]) for k in saved)
    with torch.no_grad():
        scores = Saved(run)
        data = scores.session.federation.data(0)
        whole, _ = scores.personal(0)
        before, after = (float(scores.method.ctx.ce(w, Batch(*data.train))) for w in (whole, saved))
    assert after < before and first.keys() >= saved.keys()


# ---- SCAFFOLD --------------------------------------------------------------------------------------------------------
def test_scaffold_is_fedavg_in_its_first_round() -> None:
    scaffold, avg = play("scaffold", rounds=1), play("fedavg", rounds=1, weighting="uniform")
    assert near(scaffold.server["w"], avg.server["w"])


def test_scaffold_server_control_is_the_mean_of_all_clients_under_partial_participation_and_failures() -> None:
    loop = play("scaffold", rounds=4, join=0.6, dropout=0.3)
    kept = [state(loop, i)["c"] for i in CLIENTS if state(loop, i) is not None]
    for k, c in loop.server["c"].items():
        assert torch.allclose(c, sum(own[k] for own in kept) / 5, atol=1e-5), k
        assert bool(c.abs().sum() > 0), k


def test_scaffold_control_is_the_mean_gradient_of_the_last_local_training() -> None:
    """One step on the whole data: c_i is then the gradient at the model received."""
    s = session("scaffold", plain(), rounds=1, batch=1000)
    loop, seen = watch(s)
    w0 = s.method.ctx.w0
    for u in seen[0]:
        data = s.federation.data(u.sender)
        leaves = {k: v.clone().requires_grad_() for k, v in w0.items()}
        gradient = torch.autograd.grad(s.method.ctx.ce(leaves, Batch(*data.train)), list(leaves.values()))
        assert near(state(loop, u.sender)["c"], dict(zip(leaves, gradient, strict=True)), 1e-5)


def test_scaffold_sends_the_trained_entries_twice() -> None:
    loop = play("scaffold")
    ctx = loop.method.ctx
    both = size(ctx.w0) + size(ctx.w0, set(ctx.net.trainable))
    assert traffic(loop, "up") == traffic(loop, "down") == [both] * 3
    assert not STATS & loop.server["c"].keys()


# ---- MOON ------------------------------------------------------------------------------------------------------------
def test_moon_without_its_term_is_fedavg() -> None:
    moon, avg = play("moon", own={"mu": 0}), play("fedavg")
    assert same(moon.server["w"], avg.server["w"])


def test_moon_has_nothing_to_contrast_in_the_first_round() -> None:
    """Its last model is the one it received, so the term is log 2 for every sample, whatever the features."""
    moon, avg = play("moon", plain(), rounds=1), play("fedavg", plain(), rounds=1)
    assert near(moon.server["w"], avg.server["w"], 1e-5)
    moon, avg = play("moon", plain(), rounds=3, join=1.0), play("fedavg", plain(), rounds=3, join=1.0)
    assert not near(moon.server["w"], avg.server["w"], 1e-3)


def test_moon_draws_features_to_the_received_model_and_from_the_last() -> None:
    s = session("moon", own={"mu": 1.0, "tau": 1.0})
    method, data = s.method, s.federation.data(0)
    batch = Batch(data.train.x[:6], data.train.y[:6])
    own, other = method.ctx.w0, jittered(method.ctx.w0, 1, 0.5)
    losses = [
        float(method.loss(own, batch, {"received": a, "last": b})) for a, b in ((own, other), (own, own), (other, own))
    ]
    assert losses[0] < losses[1] < losses[2]
    assert losses[1] == pytest.approx(float(method.ctx.ce(own, batch)) + float(torch.tensor(2.0).log()), abs=1e-5)


def test_moon_keeps_the_model_it_uploaded() -> None:
    loop, seen = watch(session("moon"))
    last = {u.sender: u.tree for round in seen for u in round}
    assert all(same(state(loop, i)["last"], tree) for i, tree in last.items())


# ---- FedNova ---------------------------------------------------------------------------------------------------------
def stepped(method: Any, sender: int, tree: T.Tree, steps: int, samples: int) -> Upload:
    return Upload({**tree, STEPS: torch.tensor([steps], dtype=torch.int32)}, {}, sender, samples)


def test_fednova_with_equal_numbers_of_steps_is_fedavg() -> None:
    method = bound("fednova")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    after = method.aggregate(server, [stepped(method, i, m, 7, 30 + i) for i, m in enumerate(models)], 1)
    assert near(after["w"], T.mean(models, [30, 31]), 1e-5)


def test_fednova_divides_changes_by_steps_and_averages_statistics() -> None:
    method = bound("fednova")
    server = method.setup()
    models = [jittered(server["w"], i) for i in (1, 2)]
    uploads = [stepped(method, 0, models[0], 2, 10), stepped(method, 1, models[1], 6, 30)]
    after = method.aggregate(server, uploads, 1)["w"]
    effective = 0.25 * 2 + 0.75 * 6
    for k, v in server["w"].items():
        moves = [m[k] - v for m in models]
        normal = v + effective * (0.25 * moves[0] / 2 + 0.75 * moves[1] / 6)
        assert torch.allclose(after[k], 0.25 * models[0][k] + 0.75 * models[1][k] if k in STATS else normal, atol=1e-5)


def test_fednova_ignores_the_move_of_a_client_that_took_no_step() -> None:
    method = bound("fednova")
    server = method.setup()
    after = method.aggregate(server, [stepped(method, 0, jittered(server["w"], 1), 0, 10)], 1)["w"]
    assert all(torch.equal(after[k], server["w"][k]) for k in method.ctx.net.trainable)


def test_fednova_counts_the_steps_of_each_client() -> None:
    s = session("fednova", epochs=3, rounds=1, stragglers=0.5)
    _, seen = watch(s)
    taken = {u.sender: int(u.tree[STEPS]) for u in seen[0]}
    per_epoch = {i: sum(len(p) > 1 for p in s.federation.data(i).train.y.split(16)) for i in taken}
    assert all(n % per_epoch[i] == 0 and 1 <= n // per_epoch[i] <= 3 for i, n in taken.items())
    assert len({n // per_epoch[i] for i, n in taken.items()}) > 1, "the seed draws no straggler"


def test_fednova_weights_of_gradients_under_momentum_are_the_sums_of_the_paper() -> None:
    assert [gradients_in(n, 0.0) for n in (0, 1, 5)] == [0, 1, 5]
    for n in (0, 1, 2, 7):
        by_hand = sum(sum(0.9**j for j in range(n - k)) for k in range(n))
        assert gradients_in(n, 0.9) == pytest.approx(by_hand)
    assert session("fednova", momentum=0.9).method.ctx.momentum == 0.9
    assert session("fednova", momentum=0.9, optimizer="adam").method.ctx.momentum == 0.0


# ---- q-FFL -----------------------------------------------------------------------------------------------------------
def lossy(sender: int, tree: T.Tree, loss: float) -> Upload:
    return Upload({**tree, LOSS: torch.tensor([loss])}, {}, sender, 10 + sender)


def test_q_ffl_with_zero_q_is_fedavg() -> None:
    fair, avg = play("q-ffl", own={"q": 0}), play("fedavg", weighting="uniform")
    assert same(fair.server["w"], avg.server["w"])
    fair, avg = play("q-ffl", own={"q": 0}, weighting="samples"), play("fedavg")
    assert same(fair.server["w"], avg.server["w"])


def test_q_ffl_takes_the_step_of_the_paper() -> None:
    method = bound("q-ffl", own={"q": 2.0})
    w, lr = method.setup()["w"], method.ctx.lr
    models, losses = [jittered(w, i) for i in (1, 2)], [0.5, 2.0]
    after = method.aggregate({"w": w}, [lossy(i, m, losses[i]) for i, m in enumerate(models)], 1)["w"]
    names = sorted(method.ctx.net.trainable)
    g = [{k: (w[k] - m[k]) / lr for k in names} for m in models]
    squares = [sum(float(v.square().sum()) for v in one.values()) for one in g]
    h = [2 * F * square + F**2 / lr for F, square in zip(losses, squares, strict=True)]
    for k in names:
        step = sum(F**2 * one[k] for F, one in zip(losses, g, strict=True)) / sum(h)
        assert torch.allclose(after[k], w[k] - step, atol=1e-6), k
    assert all(torch.allclose(after[k], (models[0][k] + models[1][k]) / 2) for k in STATS)


def test_q_ffl_sends_the_loss_at_the_model_received() -> None:
    s = session("q-ffl", rounds=1)
    loop, seen = watch(s)
    for u in seen[0]:
        x, y = s.federation.data(u.sender).train
        logits = s.method.ctx.forward(s.method.ctx.w0, x)
        assert float(u.tree[LOSS]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), abs=1e-5)
    assert traffic(loop, "up") == [size(s.method.ctx.w0) + 4] and traffic(loop, "down") == [size(s.method.ctx.w0)]


BAD: list[tuple[str, dict[str, float]]] = [("q-ffl", {"q": -1}), ("moon", {"tau": 0}), ("scaffold", {"server_lr": 0})]


@pytest.mark.parametrize(("method", "bad"), BAD)
def test_impossible_settings_get_a_sentence(method: str, bad: dict[str, float]) -> None:
    with pytest.raises(CoterieError, match=next(iter(bad))):
        build(method, bad)
