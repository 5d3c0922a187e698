"""Tests of FedBABU."""

from typing import Any

import pytest
import torch

from coterie.core import tree as T
from support.short_runs import CLIENTS, HEAD, bound, play, same, session, size, state, traffic, watch


@pytest.mark.parametrize("rule", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_fedbabu_head_is_the_initial_one_to_the_bit(rule: dict[str, Any]) -> None:
    loop = play("fedbabu", **rule)
    w0 = loop.method.ctx.w0
    whole = loop.method.global_model(loop.server)
    assert whole is not None and all(torch.equal(whole[k], w0[k]) for k in HEAD)
    assert all(torch.equal(state(loop, i)["own"][k], w0[k]) for i in CLIENTS if state(loop, i) for k in HEAD)
    assert all(not torch.equal(whole[k], w0[k]) for k in whole if k not in HEAD)


def test_fedbabu_is_fedrep_without_head_epochs_under_a_common_head() -> None:
    babu = play("fedbabu")
    rep = play("fedrep", own={"head_epochs": 0, "body_epochs": 1}, weighting="uniform")
    assert same(babu.server["w"], rep.server["w"])


def test_fedbabu_without_fine_tuning_is_the_global_model_and_fine_tuning_never_feeds_back() -> None:
    s = session("fedbabu", own={"finetune_epochs": 0}, eval_every=1)
    none, _ = watch(s)
    assert s.method.adapt() == []
    data = s.federation.data(0)
    whole = s.method.global_model(none.server)
    assert whole is not None
    assert same(s.method.personal(s.method.init_client(data), none.server["w"], data)[0], whole)
    tuned = play("fedbabu", eval_every=1)
    assert same(none.server["w"], tuned.server["w"])
    assert tuned.events[-1]["eval"]["adapted/test"] != tuned.events[-1]["eval"]["personal/test"]  # type: ignore[attr-defined]


def test_fedbabu_fine_tunes_all_or_the_head_for_the_epochs_asked() -> None:
    (whole,) = bound("fedbabu").adapt()
    (head,) = bound("fedbabu", own={"finetune": "head", "finetune_epochs": 2}).adapt()
    assert whole.epochs == 5 and whole.trains("fc1.weight") and whole.trains("classifier.bias")
    assert head.epochs == 2 and not head.trains("fc1.weight") and head.trains("classifier.bias")


def test_fedbabu_counts_the_body_and_weighs_clients_equally() -> None:
    s = session("fedbabu")
    loop, seen = watch(s)
    body = size(s.method.ctx.w0) - size(s.method.ctx.w0, HEAD)
    assert traffic(loop, "up") == traffic(loop, "down") == [body] * 3
    assert same(loop.server["w"], T.mean([u.tree for u in seen[-1]]))
