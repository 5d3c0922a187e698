"""Tests of FedPer."""

import pytest
import torch

from coterie import testing
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.methods.local import Local
from support import families
from support.toy import NORMS, mlp, models, play, same


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("layers", "twin"), [(0, FedAvg), (2, Local)])
def test_fedper_with_no_personal_layer_is_fedavg_and_with_all_is_local(layers, twin, norm, tmp_path):
    a = play(FedPer, tmp_path, {"layers": layers}, model=mlp(norm), join=0.6)
    b = play(twin, tmp_path, model=mlp(norm), join=0.6)
    assert same(models(a), models(b))


def test_a_part_names_the_groups_that_stay(tmp_path):
    """FedSA-LoRA shares the matrices A only; private adapters share the head only."""
    for part, shared in (("lora:B,head", "lora:A"), ("lora", "head"), ("head", "lora")):
        session = families.session("fedper", "text transformer", lora_rank=2, settings={"part": part})
        loop = testing.play(testing.open_loop(session, tmp_path / shared.replace(":", "")))
        assert set(loop.server["w"]) == session.method.ctx.group(shared)


def test_the_part_head_is_the_default(tmp_path):
    a, b = (
        testing.play(testing.open_loop(families.session("fedper", "ConvNet", settings=own), tmp_path / name))
        for name, own in (("part", {"part": "head"}), ("layers", {"layers": 1}))
    )
    assert all(torch.equal(v, b.server["w"][k]) for k, v in a.server["w"].items())


@pytest.mark.parametrize(
    ("part", "words"),
    [("lora", "no such layers; set lora_rank"), ("haed", 'did you mean "head"'), (",", "names no group of layers")],
)
def test_a_part_that_the_model_lacks_is_refused(part, words):
    with pytest.raises(CoterieError, match=words):
        families.session("fedper", "ConvNet", settings={"part": part})
