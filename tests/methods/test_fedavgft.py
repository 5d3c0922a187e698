"""Tests of FedAvg with fine-tuning and LP-FT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie.core.method import Batch, Start
from coterie.methods import build_method
from coterie.train.trainer import train
from support.short_runs import HEAD, play, same, session


@pytest.mark.parametrize("method", ["fedavg-ft", "lp-ft"])
def test_fine_tuning_never_feeds_back_into_fedavg(method: str) -> None:
    tuned, avg = play(method, eval_every=1), play("fedavg", eval_every=1)
    assert same(tuned.server["w"], avg.server["w"])
    assert "adapted/test" in tuned.events[-1]["eval"] and "adapted/test" not in avg.events[-1]["eval"]  # type: ignore[attr-defined]


def fine_tuned(method: str, **own: float) -> Any:
    s = session(method, own=own)
    w0 = s.method.ctx.w0
    return w0, train(s.method.ctx, s.clients().rule, s.method.adapt(), Start(w0), s.federation.data(0), 1)[0].params


def test_fedavg_ft_is_plain_training_of_a_copy() -> None:
    s = session("fedavg", epochs=3)
    _, tuned = fine_tuned("fedavg-ft", finetune_epochs=3)
    phases = s.method.phases(1)
    trained = train(s.method.ctx, s.clients().rule, phases, Start(s.method.ctx.w0), s.federation.data(0), 1)[0].params
    assert same(tuned, trained)


def test_lp_ft_trains_the_head_first_and_everything_after_it() -> None:
    w0, probed = fine_tuned("lp-ft", finetune_epochs=0)
    assert {k for k in w0 if not torch.equal(w0[k], probed[k])} == HEAD
    w0, both = fine_tuned("lp-ft")
    assert all(not torch.equal(w0[k], both[k]) for k in w0)
    assert same(fine_tuned("lp-ft", head_epochs=0)[1], fine_tuned("fedavg-ft")[1])
    assert build_method("lp-ft", {"head_epochs": 0, "finetune_epochs": 0}).adapt() == []


def test_the_fine_tuned_model_is_the_one_that_is_exported(tmp_path: Path) -> None:
    run = coterie.run("fedavg-ft", "digits", clients=3, rounds=1, out=tmp_path / "run", workers=1, finetune_epochs=1)
    first, tuned = (dict(m.state_dict()) for m in (run.session().method.ctx.net.module, run.personal(0)))
    assert run.export(0, tmp_path / "0.safetensors").startswith("import coterie")
    saved = load_file(tmp_path / "0.safetensors")
    assert all(torch.equal(saved[k], tuned[k]) for k in saved)
    with torch.no_grad():
        scores = run.saved()
        data = scores.session.federation.data(0)
        whole, _ = scores.personal(0)
        before, after = (float(scores.method.ctx.ce(w, Batch(*data.train))) for w in (whole, saved))
    assert after < before and first.keys() >= saved.keys()
