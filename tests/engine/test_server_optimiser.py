"""Server optimisers: closed forms, methods that combine by a mean, workers and resume."""

import math

import pytest
import torch

from coterie import config
from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.engine import codec
from coterie.engine.combining import Combiner
from coterie.engine.server_optimiser import ServerOptimiser, check_server_optimiser
from coterie.engine.session import Callbacks, prepare
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.fedavg import FedAvg
from coterie.testing import Bench, decided, events
from coterie.testing.fixtures import close_loop, open_loop
from support.toy import bind, mlp

CHANGES = (0.5, -0.2, 0.1)  # mean change of every parameter in three rounds


def by_hand(rule: str) -> list[float]:
    """Return the three steps of one parameter, written out."""
    lr, b1, b2, tau, m, v, steps = 0.1, 0.9, 0.99, 0.01, 0.0, 0.01**2, []
    for d in CHANGES:
        if rule == "fedavgm":
            m = 0.8 * m + d
            steps.append(0.5 * m)
            continue
        if rule == "fedadagrad":
            v = v + d * d
            steps.append(lr * d / (math.sqrt(v) + tau))
            continue
        m = b1 * m + (1 - b1) * d
        if rule == "fedadam":
            v = b2 * v + (1 - b2) * d * d
        else:
            v = v - (1 - b2) * d * d * (1 if v > d * d else -1)
        steps.append(lr * m / (math.sqrt(v) + tau))
    return steps


@pytest.mark.parametrize(("text", "rule"), [
    ("fedavgm(0.5, 0.8)", "fedavgm"), ("fedadagrad(0.1, 0.01)", "fedadagrad"),
    ("FedAdam(0.1, tau=0.01)", "fedadam"), ("fedyogi(lr=0.1, tau=0.01)", "fedyogi"),
])  # fmt: skip
def test_three_steps_are_those_of_the_papers(text: str, rule: str) -> None:
    method = bind(FedAvg, model=mlp(norm=True))
    combiner, w = Combiner(moves=(ServerOptimiser(check_server_optimiser(text)),)), method.ctx.w0
    for t, (d, step) in enumerate(zip(CHANGES, by_hand(rule), strict=True), 1):
        # weights 1 and 3: the mean of the changes 4d - 3 and 1 is d
        uploads = [Upload({k: v + x for k, v in w.items()}, sender=i, samples=n) for i, (x, n) in
                   enumerate([(4 * d - 3, 1), (1.0, 3)])]  # fmt: skip
        upload, combiner = combiner.combined(method, w, uploads, t)
        assert upload.samples == 4
        for k, v in upload.tree.items():
            moved = step if k in method.ctx.net.trainable else d  # statistics of batch norm are averaged
            assert torch.allclose(v, w[k] + moved, atol=1e-5), k
        w = upload.tree


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_fedavgm_without_momentum_is_the_mean_and_others_differ(name: str, tmp_path) -> None:
    def server(at: str, **more: object) -> dict[str, torch.Tensor]:
        return Bench(find(name), {}).play(tmp_path / at, eval_every=9, watch=False, **more).server["w"]

    plain, same = server("a"), server("b", server_optimizer="fedavgm(1, 0)")
    assert all(torch.allclose(same[k], v, atol=1e-6) for k, v in plain.items())
    other = server("c", server_optimizer="fedadam")
    assert not T.sqdist(plain, other, plain) < 1e-8


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_bits_are_equal_for_any_number_of_workers_and_after_a_resume(name: str, tmp_path) -> None:
    bench, more = Bench(find(name), {}), {"server_optimizer": "fedyogi(lr=0.05)"}
    whole = bench.play(tmp_path / "1", **more)
    two = bench.play(tmp_path / "2", workers=2, **more)
    loop = open_loop(bench.session(**more), tmp_path / "3")
    assert not loop.run(Callbacks(should_stop=lambda: loop.done >= 1))
    close_loop(loop)
    again = open_loop(bench.session(**more), tmp_path / "3")
    assert again.resume() == []
    assert again.combiner is not None and again.combiner.memory["server_optimizer"]["m"]
    again.run()
    close_loop(again)
    for at, other in (("2", two), ("3", again)):
        assert events(tmp_path / "1") == events(tmp_path / at)
        assert codec.equal(decided(whole), decided(other))


def test_methods_that_need_single_uploads_and_wrong_settings_are_refused() -> None:
    small = {"subset": 200, "clients": 3, "partition": "iid", "rounds": 2}
    for name in ("local", "autopilot", "ifca", "fedpc", "fedproto"):
        with pytest.raises(CoterieError, match="needs a method that"):
            prepare(config.settings(name, **small, server_optimizer="fedadam"))
    for bad in ("adam", "fedadam(lr=0)", "fedavgm(1, 1)", "fedadam(x=1)", "fedadam + fedavgm", "fedadam(lr=(1,))"):
        with pytest.raises(CoterieError, match="server_optimizer"):
            config.settings("fedavg", server_optimizer=bad)
