"""A client keeps the best model it has trained, by validation data (FedCPMD, FedPC, FedGMH, ECS-FL)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Split
from coterie.methods import find
from coterie.parts.keep_best import BEST, SCORE, best, kept, validation_score
from coterie.testing import Bench

MENDED = [("fedcpmd-mended", "use"), ("fedpc-mended", "use"), ("ecs-fl-mended", "use"), ("fedgmh-mended", "score")]


def made() -> tuple[Any, Any, list[dict[str, torch.Tensor]]]:
    """A context, a client's data, and three models by rising validation score."""
    session = Bench(find("fedavg"), {}).session(val_share=0.3)
    ctx, data = session.method.ctx, session.federation.data(0)
    rng = torch.Generator().manual_seed(1)
    moved = ctx.net.trainable
    models = [
        {k: v + 0.5 * torch.randn(v.shape, generator=rng) if k in moved else v for k, v in ctx.w0.items()}
        for _ in range(40)
    ]
    models.sort(key=lambda m: validation_score(ctx, m, data.val))
    found = [models[0], models[20], models[-1]]
    a, b, c = (validation_score(ctx, m, data.val) for m in found)
    assert a < b < c
    return ctx, data, found


def test_the_better_model_is_kept_and_of_equals_the_newer() -> None:
    ctx, data, (bad, fair, good) = made()
    state = kept(ctx, {}, fair, data)
    assert state[BEST] is fair and state[SCORE] == validation_score(ctx, fair, data.val)
    assert kept(ctx, state, bad, data)[BEST] is fair
    assert kept(ctx, state, good, data)[BEST] is good
    again = T.clone(fair)
    assert kept(ctx, state, again, data)[BEST] is again


def test_what_is_received_is_used_only_if_it_is_better() -> None:
    ctx, data, (bad, fair, good) = made()
    state = kept(ctx, {}, fair, data)
    assert best(ctx, state, bad, data) is fair and best(ctx, state, good, data) is good
    assert best(ctx, {}, bad, data) is bad  # nothing has been kept
    lost = {k: v * torch.nan for k, v in fair.items()}
    assert best(ctx, state, lost, data) is fair and kept(ctx, state, lost, data) == state
    assert kept(ctx, {}, lost, data) == {}


def test_without_validation_data_nothing_is_kept() -> None:
    ctx, data, (bad, _, good) = made()
    none = Bench(find("fedavg"), {}).session(val_share=0).federation.data(0)
    assert not len(none.val) and kept(ctx, {}, good, none) == {}
    assert best(ctx, kept(ctx, {}, good, data), bad, none) is bad


def test_a_right_answer_counts_more_than_any_loss() -> None:
    ctx, data, models = made()
    x, y = data.val
    for w in models:
        right = float((ctx.forward(w, x).argmax(1) == y).float().mean())
        last = ctx.net.head_names[0]
        huge = {**w, last: 1e4 * w[last]}  # nearly the same answers, an enormous loss
        assert right - 0.5 / len(y) <= validation_score(ctx, w, data.val) <= right
        hits = float((ctx.forward(huge, x).argmax(1) == y).float().mean())
        assert hits - 0.5 / len(y) <= validation_score(ctx, huge, Split(x, y)) <= hits


@pytest.mark.parametrize(("name", "setting"), MENDED, ids=[n for n, _ in MENDED])
def test_clients_of_the_mended_readings_use_their_best(name: str, setting: str, tmp_path: Path) -> None:
    """And what is sent does not depend on it."""
    run = {"rounds": 4, "join": 1.0, "val_share": 0.3}
    other = {"use": "received"} if setting == "use" else {"score": "own"}
    with_best = Bench(find(name), {}).play(tmp_path / "a", **run)
    without = Bench(find(name), other).play(tmp_path / "b", **run)
    assert getattr(with_best.method.hp, setting) == "best"
    assert with_best.bytes == without.bytes
    states = [loop.runtime.states.get(0) for loop in (with_best, without)]  # type: ignore[attr-defined]
    assert BEST in states[0] and BEST not in states[1]
    ctx, data = with_best.method.ctx, Bench(find(name), {}).session(**run).federation.data(0)
    download = with_best.method.deliver(with_best.server, [0], 5).to(0)
    if name in ("fedcpmd-mended", "ecs-fl-mended"):
        params, _ = with_best.method.personal(states[0], download, data)
        assert validation_score(ctx, params, data.val) >= states[0][SCORE]
