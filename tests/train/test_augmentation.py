"""Augmentations: what each may change, and equal bits for any number of workers and after a resume."""

import pytest
import torch

from coterie import config
from coterie.core.rng import torch_rng
from coterie.engine import codec
from coterie.engine.session import Callbacks, prepare
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.testing import Bench, decided, events
from coterie.testing.fixtures import close_loop, open_loop
from coterie.train.augmentation import augmented, check_augment, check_items

X = torch.randn(64, 3, 8, 10, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64)


def changed(text, x=X, y=Y):
    return augmented(text, x, y, torch_rng(0, "test"))


def test_a_crop_is_a_shifted_picture_with_zeros_from_outside():
    out, y = changed("crop(2)")
    assert torch.equal(y, Y)
    shifts = set()
    padded = torch.nn.functional.pad(X, (2,) * 4)
    for i in range(64):
        fits = [(a, b) for a in range(5) for b in range(5) if torch.equal(out[i], padded[i, :, a : a + 8, b : b + 10])]
        assert len(fits) == 1
        shifts.add(fits[0])
    assert len(shifts) > 15


def test_a_flip_mirrors_some_pictures_and_leaves_others():
    out, _ = changed("flip")
    mirrored = [torch.equal(out[i], X[i].flip(-1)) for i in range(64)]
    assert all(m or torch.equal(out[i], X[i]) for i, m in enumerate(mirrored)) and 16 < sum(mirrored) < 48
    assert torch.equal(changed("flip(1)")[0], X.flip(-1))


def test_an_erased_part_is_one_rectangle_in_all_channels():
    out, _ = changed("erase(1, 0.5)")
    for i in range(64):
        gone = (out[i] == 0).all(0)
        rows, columns = gone.any(1), gone.any(0)
        assert torch.equal(gone, rows[:, None] & columns[None, :]) and 1 <= rows.sum() <= 4 and 1 <= columns.sum() <= 5
        assert torch.equal(out[i][:, ~gone], X[i][:, ~gone])


def test_colour_is_affine_and_keeps_grey_pictures_grey():
    grey = X.mean(1, keepdim=True).expand_as(X)
    out, _ = changed("colour(0.3)", grey)
    assert torch.allclose(out, out.mean(1, keepdim=True).expand_as(out), atol=1e-6) and not torch.equal(out, grey)


@pytest.mark.parametrize("x", [X, X[:, :, 0], X[:, 0, 0]], ids=["pictures", "series", "table"])
def test_noise_and_factors_have_their_sizes(x):
    noise = changed("jitter(0.1)", x)[0] - x
    assert float(noise.std()) == pytest.approx(0.1, rel=0.1)
    factor = changed("scale(0.1)", x)[0] / x
    same = factor.flatten(2) if x.ndim > 2 else factor[..., None]
    assert torch.allclose(same, same[..., :1].expand_as(same), atol=1e-3)
    assert float(same[..., 0].std()) == pytest.approx(0.1, rel=0.35)


def test_mixup_mixes_pairs_and_draws_their_classes_by_share():
    x = torch.eye(2000)  # the mixture shows who was mixed, and how
    y = torch.arange(2000)
    out, drawn = changed("mixup(1.0)", x, y)
    assert torch.allclose(out.sum(1), torch.ones(2000)) and bool(((out > 0).sum(1) <= 2).all())
    assert bool((out[y, drawn] > 0).all())
    own = out.diagonal()
    assert float((drawn == y).float().mean()) == pytest.approx(float(own.mean()), abs=0.04)
    numbers = changed("mixup(1.0)", x, y[:, None].float())
    assert torch.allclose(numbers[1][:, 0], numbers[0] @ y.float(), rtol=1e-4)


def test_inputs_are_not_changed_in_place():
    before = X.clone()
    changed("crop + flip + erase + colour + jitter + scale + mixup")
    assert torch.equal(X, before)


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_bits_are_equal_for_any_number_of_workers_and_after_a_resume(name, tmp_path):
    bench, more = Bench(find(name), {}), {"augment": "jitter(0.3) + mixup"}
    whole = bench.play(tmp_path / "1", **more)
    two = bench.play(tmp_path / "2", workers=2, **more)
    loop = open_loop(bench.session(**more), tmp_path / "3")
    assert not loop.run(Callbacks(should_stop=lambda: loop.done >= 1))
    close_loop(loop)
    again = open_loop(bench.session(**more), tmp_path / "3")
    assert again.resume() == []
    again.run()
    close_loop(again)
    for at, other in (("2", two), ("3", again)):
        assert events(tmp_path / "1") == events(tmp_path / at)
        assert codec.equal(decided(whole), decided(other))
    assert not codec.equal(decided(whole), decided(bench.play(tmp_path / "plain")))


def test_wrong_augmentations_get_one_sentence():
    for bad in (
        "blur",
        "crop(0)",
        "crop(1.5)",
        "flip(2)",
        "flip(share='x')",
        "mixup(0)",
        "crop(1, 2)",
        "jitter(sigma=(1,))",
    ):
        with pytest.raises(CoterieError, match="augment"):
            check_augment(bad)
    with pytest.raises(CoterieError, match="needs pictures"):
        check_items("crop", X[:, 0], "classification")
    with pytest.raises(CoterieError, match=r"crop\(99\) shifts pictures of .* out of sight; lower padding"):
        check_items("crop(99)", X, "classification")
    with pytest.raises(CoterieError, match="tokens"):
        check_items("jitter", Y[:, None], "classification")
    with pytest.raises(CoterieError, match="survival"):
        check_items("mixup", X[:, 0, 0], "survival")
    assert check_augment("Crop(4)+flip") == "crop(4) + flip"


def test_the_run_refuses_what_its_items_cannot_have():
    session = prepare(config.settings("fedavg", subset=200, clients=3, rounds=1, augment="crop(1) + flip"))
    assert session.method.ctx.augment == "crop(1) + flip" and session.clients().method.ctx.loop_only
