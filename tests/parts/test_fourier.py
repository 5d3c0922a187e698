"""SC-FPFL, properties 7 to 11, and the reference pair of the Fourier step."""

import pytest
import torch

from coterie.errors import CoterieError
from coterie.parts import fourier as Fo

A = torch.tensor([[3, -1, 4, 1], [-5, 9, 2, -6], [5, 3, -5, 8], [9, -7, 9, 3]], dtype=torch.float64)
B = torch.tensor([[2, 7, -1, 8], [2, -8, 1, 8], [-2, 8, 4, 5], [9, 0, -4, 5]], dtype=torch.float64)
PAIR = torch.stack([A, B])
RNG = torch.Generator().manual_seed(0)
LAYOUTS = ["tile", "kernel_major", "prrfl"]


@pytest.mark.parametrize(
    ("g", "a", "b"),
    [
        (0, [3.375, -0.625, 4.375, 1.375], [1.625, 6.625, -1.375, 7.625]),
        (
            0.25,
            [4.552248560, -1.593885038, 3.454929975, 2.601063573],
            [1.474237574, 7.854679783, -1.091846820, 6.527710970],
        ),
        (
            0.5,
            [4.500673534, -0.559801272, 2.543285020, 4.280199786],
            [0.635173461, 7.705975247, -2.569933281, 7.243566080],
        ),
    ],
)
def test_reference_pair_to_nine_digits(g, a, b) -> None:
    out = Fo.fourier_mean(PAIR, g)
    torch.testing.assert_close(out[:, 0], torch.tensor([a, b], dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", ["symmetric", "halfopen"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_p7_identical_edges_are_left_alone(dtype, mask, layout) -> None:
    w = torch.randn(1, 6, 3, 5, 5, generator=RNG, dtype=dtype)
    out = Fo.fourier_mean(w.expand(3, -1, -1, -1, -1), 0.35, mask, layout)
    torch.testing.assert_close(out, w.expand_as(out), rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    assert out.dtype == dtype


def test_p7_one_edge_is_skipped_bit_for_bit() -> None:
    tree = {"w": torch.randn(1, 4, 3), "b": torch.randn(1, 4)}
    out = Fo.fourier_aggregate(tree, lambda name: "fourier")
    assert all(torch.equal(out[k], v) for k, v in tree.items())


def test_p8_g_half_makes_all_amplitudes_the_mean_and_keeps_phases() -> None:
    out = torch.fft.fft2(Fo.fourier_mean(PAIR, 0.5))
    before = torch.fft.fft2(PAIR)
    torch.testing.assert_close(out.abs(), before.abs().mean(0).expand(2, 4, 4), rtol=0, atol=1e-10)
    torch.testing.assert_close(out / out.abs(), before / before.abs(), rtol=0, atol=1e-10)
    assert not torch.allclose(Fo.fourier_mean(PAIR, 0.5)[0], PAIR.mean(0), atol=0.1)


@pytest.mark.parametrize(("shape", "counts"), [((9, 7), (1, 15, 35, 63)), ((80, 30), (1, 615, 1197, 2400))])
def test_p9_mask_is_symmetric_with_the_stated_counts(shape, counts) -> None:
    for g, count in zip((0, 0.25, 0.35, 0.5), counts, strict=True):
        mask = Fo.low_mask(*shape, g)
        assert int(mask.sum()) == count
        assert torch.equal(mask, mask.flip(0, 1).roll((1, 1), (0, 1)))


@pytest.mark.parametrize("size", [(9, 7), (8, 6), (80, 30)])
def test_p9_symmetric_inverse_is_real_and_halfopen_is_not(size) -> None:
    m = torch.randn(3, *size, generator=RNG, dtype=torch.float64)
    for g in (0, 0.25, 0.35, 0.5):
        assert float(Fo.average_amplitudes(m, Fo.low_mask(*size, g)).imag.abs().max()) < 1e-12
    assert float(Fo.average_amplitudes(m, Fo.low_mask(*size, 0.35, "halfopen")).imag.abs().max()) > 1e-3


def test_p10_high_amplitudes_and_all_phases_are_preserved() -> None:
    m = torch.randn(3, 9, 7, generator=RNG, dtype=torch.float64)
    mask = Fo.low_mask(9, 7, 0.25)
    before, after = torch.fft.fft2(m), torch.fft.fft2(Fo.fourier_mean(m, 0.25))
    torch.testing.assert_close(after.abs()[:, ~mask], before.abs()[:, ~mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(after / after.abs(), before / before.abs(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 1, 5, 5), (4, 3, 2, 3), (7, 5), (4, 3, 5), (2, 3, 2, 2, 2), (1, 1, 1, 1)])
def test_p11_reshape_and_back_is_exact(layout, shape) -> None:
    w = torch.randn(2, *shape, generator=RNG)
    assert torch.equal(Fo.from_matrix(Fo.to_matrix(w, layout), shape, layout), w)


def test_layouts_put_entries_where_they_say() -> None:
    w = torch.arange(2 * 3 * 4 * 5).reshape(1, 2, 3, 4, 5).float()
    o, c, r, s = 1, 2, 3, 4
    entry = w[0, o, c, r, s]
    tile, major, prrfl = (Fo.to_matrix(w, layout)[0] for layout in LAYOUTS)
    assert tile.shape == (8, 15) and tile[o * 4 + r, c * 5 + s] == entry
    assert torch.equal(tile[4:8, 10:15], w[0, 1, 2])
    assert major.shape == (8, 15) and major[r * 2 + o, s * 3 + c] == entry
    assert prrfl.shape == (12, 10) and prrfl[c * 4 + r, s * 2 + o] == entry


def test_frequencies_are_integers_in_dft_order() -> None:
    for n in (1, 2, 7, 8, 9):
        assert torch.equal(Fo.frequencies(n), (torch.fft.fftfreq(n, dtype=torch.float64) * n).round().long())


def test_phase_of_vanishing_coefficients_is_zero() -> None:
    m = torch.stack([torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 5.0]])]).double()
    got = torch.fft.fft2(Fo.average_amplitudes(m, Fo.low_mask(2, 2, 0.5))[0])
    torch.testing.assert_close(got.real, torch.fft.fft2(m[1]).abs() / 2)


def test_prrfl_without_window_is_the_identity_and_the_window_grows() -> None:
    torch.testing.assert_close(Fo.fourier_mean(PAIR, 0.0, "halfopen", "prrfl"), PAIR, rtol=0, atol=1e-12)
    assert [Fo.prrfl_window(t, 50) for t in (0, 50)] == [0.7, pytest.approx(0.95)]
    assert int(Fo.low_mask(10, 10, 0.35, "halfopen").sum()) == 36  # 2 * floor(3.5) a side


def test_weights_average_amplitudes_by_samples() -> None:
    out = torch.fft.fft2(Fo.fourier_mean(PAIR, 0.5, weights=torch.tensor([3.0, 1.0])))
    before = torch.fft.fft2(PAIR).abs()
    torch.testing.assert_close(out[0].abs(), 0.75 * before[0] + 0.25 * before[1], rtol=0, atol=1e-10)


def test_aggregate_treats_every_entry_as_told_and_changes_no_input() -> None:
    tree = {"w": PAIR.clone(), "b": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "k": torch.ones(2, 3)}
    before = {k: v.clone() for k, v in tree.items()}
    out = Fo.fourier_aggregate(tree, {"w": "fourier", "b": "mean", "k": "keep"}.__getitem__, 0.25)
    assert torch.equal(out["w"], Fo.fourier_mean(PAIR, 0.25))
    assert out["b"].tolist() == [[2.0, 4.0], [2.0, 4.0]]
    assert torch.equal(out["k"], tree["k"]) and all(torch.equal(before[k], v) for k, v in tree.items())
    bias = Fo.fourier_aggregate({"b": tree["b"]}, lambda name: "fourier", 0.5)["b"]
    assert bias.shape == (2, 2)


def test_g_outside_its_range_is_refused() -> None:
    with pytest.raises(CoterieError, match="g must lie"):
        Fo.low_mask(4, 4, 0.7)
