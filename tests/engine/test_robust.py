"""Robust estimates: closed forms, entries that are not parameters, lies, methods, workers, resume and refusals."""

import pytest
import torch

from coterie import config
from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.engine.combining import Combiner
from coterie.engine.robust import RobustEstimate, check_robust
from coterie.engine.session import Callbacks, prepare
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.fedavg import FedAvg
from coterie.testing import Bench, decided, events
from coterie.testing.fixtures import close_loop, open_loop
from support.toy import bind, mlp

METHOD = bind(FedAvg, model=mlp(norm=True))
SENT = METHOD.ctx.w0
TRAINED = METHOD.ctx.net.trainable


def moved(change: float, statistics: float | None = None) -> Tree:
    """Return an upload whose parameters moved by a number, and its other entries by another."""
    other = change if statistics is None else statistics
    return {k: v + (change if k in TRAINED else other) for k, v in SENT.items()}


def combine(text: str, trees: list[Tree], samples: list[int] | None = None, rounds: int = 1) -> tuple[Tree, Combiner]:
    combiner = Combiner(RobustEstimate(check_robust(text)))
    uploads = [Upload(t, sender=10 + i, samples=(samples or [1] * len(trees))[i]) for i, t in enumerate(trees)]
    for t in range(1, rounds + 1):
        upload, combiner = combiner.combined(METHOD, SENT, uploads, t)
    return upload.tree, combiner


def assert_moved(tree: Tree, change: float, statistics: float) -> None:
    assert list(tree) == list(SENT)
    for k, v in tree.items():
        assert v.dtype == SENT[k].dtype
        assert torch.allclose(v, SENT[k] + (change if k in TRAINED else statistics), atol=1e-5), k


# five clients; the last one lies. The distance of two uploads is |a - b| times a constant.
LINE = [0.0, 1.0, 2.0, 4.0, 100.0]


@pytest.mark.parametrize(("text", "expected"), [
    ("median", 2.0), ("trimmed(0.2)", 7 / 3), ("trimmed(0.4)", 2.0),
    # the sums of the 2 smallest squared distances: 0: 1 + 4, 1: 1 + 1, 2: 1 + 4, 4: 4 + 9
    ("krum(1)", 1.0), ("krum", 1.0), ("multi-krum(1, 3)", 1.0), ("Multi-Krum(f=1)", 7 / 4),
    ("geometric-median", 2.0), ("geometric-median(1000)", 2.0),
    ("norm-clip(1)", (0 + 1 + 2 + 2 + 2) / 5), ("norm-clip(2)", (0 + 1 + 2 + 4 + 4) / 5),
])  # fmt: skip
def test_five_clients_on_a_line_give_the_closed_form(text: str, expected: float) -> None:
    statistics = [5.0, 3.0, 4.0, 0.0, 9.0]  # in another order, so that no client hides behind its parameters
    tree, combiner = combine(text, [moved(*pair) for pair in zip(LINE, statistics, strict=True)])
    assert_moved(tree, expected, 4.0)
    facts = combiner.facts()["robust"]
    assert facts["clients"] == 5
    if "krum" in text.lower():
        assert 14 not in facts["chosen"]
    if text == "norm-clip(1)":
        assert facts["clipped"] == [13, 14]


def test_centered_clipping_starts_from_the_change_of_the_round_before() -> None:
    size = sum(SENT[k].numel() for k in TRAINED) ** 0.5  # the norm of a change by one
    trees, tau = [moved(x) for x in LINE], 3 * size
    center = 0.0
    for rounds in (1, 2):
        for _ in range(2):
            center += sum(max(-3.0, min(3.0, x - center)) for x in LINE) / 5
        tree, combiner = combine(f"centered-clip({tau}, 2)", trees, rounds=rounds)
        assert_moved(tree, center, 2.0)
    assert combiner.facts()["robust"]["clipped"] == [14]


def test_norm_clipping_keeps_the_weights_and_the_others_do_not() -> None:
    trees = [moved(x) for x in (1.0, 2.0, 3.0)]
    assert_moved(combine("norm-clip(9)", trees, [6, 1, 1])[0], 11 / 8, 2.0)
    for text in ("median", "geometric-median", "trimmed(0.34)", "centered-clip(1e8)"):
        assert_moved(combine(text, trees, [600, 1, 1])[0], 2.0, 2.0)


def test_the_median_of_an_even_number_is_the_middle_of_two_and_a_single_upload_is_itself() -> None:
    assert_moved(combine("median", [moved(x) for x in (0.0, 1.0, 4.0, 9.0)])[0], 2.5, 2.5)
    for text in ("median", "krum", "multi-krum", "geometric-median", "trimmed", "norm-clip", "centered-clip"):
        assert_moved(combine(text, [moved(3.0)])[0], 3.0, 3.0)


def test_the_geometric_median_is_the_point_of_least_total_distance() -> None:
    rng = torch.Generator().manual_seed(0)
    trees = [{k: v + torch.randn(v.shape, generator=rng) for k, v in SENT.items()} for _ in range(6)]
    tree, _ = combine("geometric-median(2000)", trees)
    rows = torch.stack([T.flatten(t, TRAINED) for t in trees]).double()
    at = T.flatten(tree, TRAINED).double()

    def total(point: torch.Tensor) -> float:
        return float((rows - point).norm(dim=1).sum())

    pull = ((rows - at) / (rows - at).norm(dim=1, keepdim=True)).sum(0)  # the gradient, zero at the minimum
    assert float(pull.norm()) < 1e-4
    assert total(at) < min(total(rows.mean(0)), *map(total, rows))


@pytest.mark.parametrize("text", [
    "median", "trimmed(0.2)", "krum(1)", "multi-krum(1)", "geometric-median", "norm-clip(2)", "centered-clip",
])  # fmt: skip
def test_one_liar_of_five_moves_no_estimate_far(text: str) -> None:
    honest = [moved(x, x) for x in (0.9, 1.0, 1.1, 1.0)]
    for lie in (moved(-1e6), moved(1.0, 1e6), moved(1e6, 1.0)):
        tree, _ = combine(text, [*honest, lie], [1, 1, 1, 1, 1])
        assert all(float((v - SENT[k] - 1).abs().max()) < 0.85 for k, v in tree.items()), text


@pytest.mark.parametrize("name", [
    "fedavg", *(pytest.param(name, marks=pytest.mark.long) for name in ("fedrep", "pfedfda", "fedgkd")),
])  # fmt: skip
def test_methods_learn_with_a_median_and_bits_do_not_depend_on_workers_or_a_resume(name: str, tmp_path) -> None:
    bench, more = Bench(find(name), {}), {"robust": "centered-clip", "server_optimizer": "fedavgm", "join": 1.0}
    whole = bench.play(tmp_path / "1", **more)
    assert "robust" in events(tmp_path / "1")[-1]["combined"]
    two = bench.play(tmp_path / "2", workers=2, **more)
    loop = open_loop(bench.session(**more), tmp_path / "3")
    assert not loop.run(Callbacks(should_stop=lambda: loop.done >= 1))
    close_loop(loop)
    again = open_loop(bench.session(**more), tmp_path / "3")
    assert again.resume() == []
    assert again.combiner is not None and "center" in again.combiner.memory["robust"]
    again.run()
    close_loop(again)
    for at, other in (("2", two), ("3", again)):
        assert events(tmp_path / "1") == events(tmp_path / at)
        assert codec.equal(decided(whole), decided(other))


def test_wrong_settings_and_methods_are_refused() -> None:
    bad = ("mean", "krum(0)", "krum(1.5)", "trimmed(0.5)", "trimmed(0)", "norm-clip(0)", "median + krum", "median(1)",
           "centered-clip(1, 0)", "krum(f=True)", "multi-krum(1, None, 2)", 3, "")  # fmt: skip
    for text in bad:
        with pytest.raises(CoterieError, match="robust"):
            config.settings("fedavg", robust=text)
    small = {"subset": 200, "clients": 8, "join": 1.0, "partition": "iid", "rounds": 2}
    prepare(config.settings("local", **small, robust="median"))  # it sends nothing
    for name, why in (("ifca", "needs single ones"), ("fedproto", "needs single ones"), ("fedpc", "at edges")):
        with pytest.raises(CoterieError, match=f"robust = median needs a method that only averages.*{why}"):
            prepare(config.settings(name, **small, robust="median"))
    for text, why in (("krum(3)", "2 f . 3 = 9"), ("trimmed(0.1)", "at least 0.125"), ("multi-krum(1, 8)", "most 7")):
        with pytest.raises(CoterieError, match=why):
            prepare(config.settings("fedavg", **small, robust=text))
    with pytest.raises(CoterieError, match="at least 3 participants"):
        prepare(config.settings("fedavg", **{**small, "join": 0.25}, robust="median"))
