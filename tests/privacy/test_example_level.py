"""Privacy of single samples: clipped sums, sealed data, budgets of clients, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import config
from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, Extras
from coterie.core.method import Method, Phase, Trained, Upload
from coterie.engine import codec
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.mrmtl import MRMTL
from coterie.privacy.clipping import norm_of
from coterie.privacy.device_side import DeviceSide
from coterie.privacy.example_level import check_local
from coterie.privacy.setting import privacy_setting
from coterie.testing import Bench, decided, events
from coterie.train.private_steps import PrivateSteps, clipped_sum
from coterie.train.trainer import steps_per_round
from support.short_runs import plain
from support.toy import bind, clients, gradient, mlp

pytest.importorskip("opacus")
DP = "example(epsilon=6, delta=1e-3, clip=1)"
BENCH = Bench(FedAvg, {}, plain)
SMALL: dict[str, Any] = {"data": "digits", "subset": 300, "clients": 4, "partition": "iid", "rounds": 2, "epochs": 1}


def test_the_clipped_sum_is_that_of_single_gradients() -> None:
    method = bind(FedAvg, model=mlp())
    ctx, (x, y) = method.ctx, clients().parts[0]
    names = list(ctx.w0)
    total, loss = clipped_sum(Phase(method.loss), ctx.w0, names, Batch(x, y), {}, 1.2)
    single = [gradient(ctx, ctx.w0, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    norms = [norm_of(g) for g in single]
    assert min(norms) < 1.2 < max(norms)
    for k in names:
        by_hand = sum(g[k] * min(1.0, 1.2 / n) for g, n in zip(single, norms, strict=True))
        assert torch.allclose(total[k], by_hand, atol=1e-5)
    assert float(loss) == pytest.approx(float(ctx.loss(ctx.w0, Batch(x, y))), rel=1e-5)


def test_without_noise_and_clipping_a_batch_of_all_samples_gives_the_plain_gradient() -> None:
    method = bind(FedAvg, model=mlp(), batch=100)
    ctx, (x, y) = method.ctx, clients().parts[0]
    steps = PrivateSteps(1e-12, 1e6)
    assert steps.picked(ctx, len(y), (1, 0, 0, 0)).tolist() == list(range(len(y)))
    got, _ = steps.gradient(ctx, Phase(method.loss), ctx.w0, list(ctx.w0), Batch(x, y), {}, len(y), (1, 0, 0, 0))
    for g, (k, v) in zip(got, gradient(ctx, ctx.w0, x, y).items(), strict=True):
        assert torch.allclose(g, v, atol=1e-4), k


def test_batches_are_poisson_samples_and_an_empty_one_is_noise_alone() -> None:
    method = bind(FedAvg, model=mlp(), batch=4)
    ctx = method.ctx
    steps = PrivateSteps(2.0, 0.5)
    sizes = [len(steps.picked(ctx, 40, (1, 0, 0, i))) for i in range(400)]
    assert 3.6 < sum(sizes) / 400 < 4.4 and 0 in sizes and max(sizes) > 8
    none = Batch(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    got, _ = steps.gradient(ctx, Phase(method.loss), ctx.w0, list(ctx.w0), none, {}, 40, (1, 0, 0, 0))
    again, _ = steps.gradient(ctx, Phase(method.loss), ctx.w0, list(ctx.w0), none, {}, 40, (1, 0, 0, 0))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert float(torch.cat([g.flatten() for g in got]).std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.3)


def test_a_prior_is_added_to_the_loss_without_privacy_and_to_the_noised_gradient_with_it() -> None:
    method = bind(MRMTL, {"lam": 3.0}, model=mlp(), batch=100)
    ctx, (x, y) = method.ctx, clients().parts[0]
    phase, extras = method.phases(1)[0], {"anchor": T.scaled(ctx.w0, 0.0)}
    assert phase.objective is not None and phase.prior is not None
    whole = phase.objective(ctx.w0, Batch(x, y), extras)
    norm = sum(float(v.square().sum()) for v in ctx.w0.values())
    assert float(whole) == pytest.approx(float(ctx.loss(ctx.w0, Batch(x, y))) + 1.5 * norm, rel=1e-5)
    got, _ = PrivateSteps(1e-12, 1e6).gradient(
        ctx, phase, ctx.w0, list(ctx.w0), Batch(x, y), extras, len(y), (1, 0, 0, 0)
    )
    for g, (k, v) in zip(got, gradient(ctx, ctx.w0, x, y).items(), strict=True):
        assert torch.allclose(g, v + 3 * ctx.w0[k], atol=1e-4), k


def test_a_run_spends_every_clients_budget_and_repeats_to_the_bit(tmp_path: Path) -> None:
    given = {"dp": DP, "join": 1.0, "rounds": 2, "clients": 3}
    first = BENCH.play(tmp_path / "one", **given)
    spent = events(tmp_path / "one")[-1]["privacy"]
    assert 0.98 * 6 < spent["epsilon"] <= 6 and spent["unit"] == "example" and spent["releases"] == 2
    assert codec.equal(decided(first), decided(BENCH.play(tmp_path / "two", workers=2, **given)))


def test_the_budget_covers_the_steps_of_all_rounds() -> None:
    session = BENCH.session(dp=DP)
    n = int(session.federation.sizes("train")[0])
    noise = session.clients().noise_of(n)
    assert noise is not None and noise.rate == 16 / n
    assert noise.per_round == steps_per_round(session.method, n) == -(-n // 16)
    assert noise.epsilon(3) <= 6 and not noise.over(2) and "epsilon = 6 is spent after 3 rounds" in noise.over(3)


class Peeping(FedAvg):
    """FedAvg that adds a mean of the client's data to its upload."""

    combines = "mean"

    def end(self, state: Any, trained: Trained, data: ClientData, round: int) -> tuple[Any, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload({k: v + data.train.x.mean() for k, v in upload.tree.items()})


class Jumping(FedAvg):
    """FedAvg with an update rule of its own."""

    def phases(self, round: int) -> list[Phase]:
        return [Phase(update=self.jump)]

    def jump(self, params: T.Tree, batch: Any, extras: Extras, rng: torch.Generator) -> T.Tree:
        return params


@pytest.mark.parametrize(("method", "words"), [
    (Peeping, "FedAvg reads data of a client outside of its losses"), (Jumping, "has an update rule of its own"),
])  # fmt: skip
def test_what_steps_do_not_noise_is_refused(method: type[Method], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        Bench(method, {}, plain).session(dp=DP)


@pytest.mark.parametrize(("method", "more", "words"), [
    ("fedavg", {"model": "mlp-bn"}, "batch norm mixes the samples of a batch"),
    ("fedavg", {"model": "mlp", "augment": "jitter(0.1)"}, "augment = jitter"),
    ("fedavg", {"model": "mlp", "class_weights": "balanced"}, "class_weights"),
    ("pfedme", {"model": "mlp"}, "a phase of pFedMe has an update rule of its own"),
    ("ifca", {"model": "mlp"}, "IFCA reads data of a client outside of its losses"),
    ("fedproto", {"model": "mlp"}, "FedProto reads data of a client outside of its losses"),
])  # fmt: skip
def test_what_cannot_be_protected_is_refused_before_any_work(method: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        prepare(config.settings(method, **SMALL, **more, dp=DP))


def test_uploads_are_noised_at_the_device_for_methods_that_need_single_ones(tmp_path: Path) -> None:
    method = bind(FedAvg, model=mlp())
    w, device = method.ctx.w0, DeviceSide(privacy_setting("local(sigma=0.5, clip=2)"))
    one, again = (device.upload(method, w, w, 1, 0) for _ in range(2))
    assert codec.equal(one, again)
    assert not codec.equal(one, device.upload(method, w, w, 1, 1))
    values = T.flatten(T.sub(one, w))
    assert float(values.std()) == pytest.approx(0.5 * 2 * 2, rel=0.35)  # two clients are up to twice the bound apart
    Bench(FedAvg, {}, plain).play(tmp_path, dp="local(epsilon=50, clip=1)", rounds=1)
    assert events(tmp_path)[-1]["privacy"]["epsilon"] <= 50
    from coterie.methods import find

    check_local(bind(find("cfl"), model=mlp()), "local(epsilon=8)")
    for name, words in (
        ("fedproto", "which FedProto uploads, is no value that noise can be added to"),
        ("ifca", "IFCA"),
    ):
        with pytest.raises(CoterieError, match=words):
            check_local(bind(find(name), model=mlp()), "local(epsilon=8)")


def test_a_budget_of_devices_ends_a_run_that_is_extended(tmp_path: Path) -> None:
    loop = BENCH.play(tmp_path, dp="local(epsilon=4, sigma=2)", rounds=6, eval_every=6)
    assert loop.ended and "the privacy budget epsilon = 4 is spent" in loop.ended
    assert loop.done < 6 and events(tmp_path)[-1]["privacy"]["epsilon"] <= 4


def test_the_mean_of_all_models_is_the_servers_model_under_full_participation(tmp_path: Path) -> None:
    loop = Bench(MRMTL, {"lam": 0.5}, plain).play(tmp_path, join=1.0, rounds=2)
    states = [loop.runtime.states.get(i)["v"] for i in range(5)]  # type: ignore[attr-defined]
    mean: dict[str, Tensor] = T.mean(states)
    assert all(torch.allclose(v, mean[k], atol=1e-5) for k, v in loop.server["w"].items())
