"""Class weights and losses of the user."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import coterie
from coterie import config
from coterie.core.context import Batch
from coterie.core.losses import batch_loss, check_class_weights, class_weights, weight_notes, weights_of_classes
from coterie.data.arrays import from_arrays
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.federation.policy.allow import Allow
from coterie.methods import find, method_names

SMALL = {"clients": 3, "rounds": 2, "subset": 300, "join": 1.0, "epochs": 1, "workers": 1}
WEIGHTS = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"


def smooth(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")


def mean_smooth(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, label_smoothing=0.1)


def plain(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def same(a, b) -> bool:
    one, two = a.personal(0).state_dict(), b.personal(0).state_dict()
    return all(torch.equal(one[k], two[k]) for k in one)


def test_weights_are_those_of_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(20, 4, generator=rng), torch.randint(4, (20,), generator=rng)
    w = torch.tensor([0.1, 2.0, 3.0, 0.0])
    each = F.cross_entropy(outputs, y, reduction="none")
    torch.testing.assert_close(batch_loss(each, y, w, None), F.cross_entropy(outputs, y, weight=w))
    real = (torch.arange(20) < 12).float()
    torch.testing.assert_close(batch_loss(each, y, w, real), F.cross_entropy(outputs[:12], y[:12], weight=w))
    ctx = prepare(config.settings("fedavg", class_weights=WEIGHTS, clients=3, subset=300))
    outputs, y, w = torch.randn(20, 10, generator=rng), torch.arange(20) % 10, torch.arange(1.0, 11)
    got = ctx.method.ctx.loss_of(outputs, Batch(outputs, y, class_weights=w))
    torch.testing.assert_close(got, F.cross_entropy(outputs, y, weight=w))


def test_balanced_weights_give_each_class_of_a_client_the_same_sum() -> None:
    y = torch.tensor([0, 0, 0, 2])
    w = class_weights("balanced", None, y, 4)
    torch.testing.assert_close(w, torch.tensor([4 / 6, 1.0, 2.0, 1.0]))  # as compute_class_weight of scikit-learn
    assert w[y].sum() == 4
    assert class_weights(None, None, y, 4) is None


def test_the_setting_is_written_in_one_way() -> None:
    assert check_class_weights([1, 2.5]) == check_class_weights("1,2.5") == check_class_weights(np.array([1, 2.5]))
    assert check_class_weights({"ill": 5, "well": 1}) == check_class_weights(" ill=5, well = 1") == "ill=5, well=1"
    assert weights_of_classes("ill=5", ["well", "ill"]) == (1.0, 5.0)
    for bad in ("heavy", "1,-2", [], "", [1, "x"], {"ill": -1}, 3, [float("nan")]):
        with pytest.raises(CoterieError, match="class_weights"):
            config.settings("fedavg", class_weights=bad)
    for setting, words in (("1, 2, 3", "3 numbers, and the data have 2"), ("0, 0", "all 0"), ("il=2", "ill")):
        with pytest.raises(CoterieError, match=words):
            weights_of_classes(setting, ["well", "ill"])


def test_weights_that_are_probably_not_meant_are_said() -> None:
    assert "is 0 for well, so" in weight_notes((0.0, 1.0), ("well", "ill"))[0]
    assert "between 1e-08 and 1" in weight_notes((1e-8, 1.0), ("well", "ill"))[0]
    assert weight_notes((1.0, 100.0), ("well", "ill")) == weight_notes(None, ()) == []


def test_wrong_losses_are_refused_before_training() -> None:
    for loss, words in (
        (lambda o, y: o, r"tensor of shape \[4, 10\]"), (lambda o, y: 3.0, "a float"), (lambda o: o, "TypeError"),
        (lambda o, y: torch.zeros(4), "does not depend"), ("nowhere:loss", "nowhere"), ("focal", "package.module"),
        (3, "loss = 3 is invalid"), (torch.nn.CrossEntropyLoss(), "loss = a CrossEntropyLoss is invalid"),
    ):  # fmt: skip
        with pytest.raises(CoterieError, match=words):
            coterie.run("fedavg", loss=loss, **SMALL)
    with pytest.raises(CoterieError, match="losses per item"):
        coterie.run("fedavg", loss=mean_smooth, class_weights=WEIGHTS, **SMALL)
    numbers = from_arrays(np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.linspace(0, 1, 60) ** 2)
    with pytest.raises(CoterieError, match="needs classes, and the task is regression"):
        coterie.run("fedavg", numbers, class_weights="balanced", clients=2)
    with pytest.raises(CoterieError, match="no class_weights"):
        coterie.run("fedmeta", class_weights="balanced", **SMALL)


def test_a_loss_of_the_user_is_the_tasks_where_it_computes_the_same(tmp_path) -> None:
    usual = coterie.run("fedrep", out=tmp_path / "usual", engine="loop", **SMALL)
    mine = coterie.run("fedrep", out=tmp_path / "mine", loss=plain, **SMALL)
    ones = coterie.run("fedrep", out=tmp_path / "ones", class_weights="2," * 9 + "2", **SMALL)
    for run in (mine, ones):
        a, b = usual.personal(0).state_dict(), run.personal(0).state_dict()
        for k in a:
            torch.testing.assert_close(a[k], b[k])
    other = coterie.run("fedrep", out=tmp_path / "other", loss=smooth, class_weights="balanced", **SMALL)
    two = coterie.run("fedrep", out=tmp_path / "two", loss=smooth, class_weights="balanced", **{**SMALL, "workers": 2})
    assert same(other, two) and not same(other, mine)
    recorded = json.loads((tmp_path / "other" / "settings.json").read_text())
    assert recorded["objects"]["loss"].endswith("test_losses:smooth") and "loss" in recorded["digests"]
    with pytest.raises(CoterieError, match="loss"):
        coterie.resume(tmp_path / "other", rounds=3, functions={"loss": plain})
    assert coterie.resume(tmp_path / "other", rounds=3).last_round == 3


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(method_names()))
def test_every_method_trains_with_the_loss_and_the_weights(name, tmp_path) -> None:
    """A method that ignored the setting would give the same models."""
    if "unweighted" in find(name).needs:
        pytest.skip("it refuses class weights")
    more = {**SMALL, "rounds": 3, "model": "lenet5" if "bn" in find(name).needs else "mlp"}
    try:
        usual = coterie.run(name, out=tmp_path / "usual", engine="loop", **more)
    except CoterieError as e:
        pytest.skip(str(e))
    for i, change in enumerate(({"class_weights": WEIGHTS}, {"loss": smooth})):
        run = coterie.run(name, out=tmp_path / str(i), **change, **more)
        states = [[r.personal(c).state_dict() for c in range(3)] for r in (usual, run)]
        assert any(not torch.equal(a[k], b[k]) for a, b in zip(*states, strict=True) for k in a)


def test_a_device_allows_the_code_of_a_loss() -> None:
    settings = config.settings("fedavg", loss="wards.training:focal")
    with pytest.raises(CoterieError, match=r"code .*does not allow"):
        Allow().check_plan(settings)
    Allow(code=("wards.training:*",)).check_plan(settings)
    with pytest.raises(CoterieError, match="class_weights"):
        Allow(settings={}).check_plan(config.settings("fedavg", class_weights="balanced"))
