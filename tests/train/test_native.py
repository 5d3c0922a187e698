"""The native block gives PyTorch's values and gradients, for every shape and mode."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.train import native
from coterie.train.native import library, op

needs_native = pytest.mark.skipif(not native.available(), reason=native.native_status())

MODES = ("none", "eval", "train")
# in, out channels, kernel, padding, height, width, batch: LeNet5's layers, odd sizes, one lane more or less than whole
# vectors, long runs that need several tiles, the smallest picture, a batch of one
SHAPES = [
    (1, 6, 5, 0, 28, 28, 4),
    (6, 16, 5, 0, 12, 12, 3),
    (3, 6, 5, 0, 32, 32, 2),
    (6, 16, 5, 0, 14, 14, 10),
    (3, 32, 5, 2, 11, 9, 2),
    (32, 64, 5, 0, 14, 14, 1),
    (1, 7, 3, 1, 9, 10, 3),
    (2, 9, 3, 0, 7, 5, 1),
    (5, 17, 3, 2, 6, 13, 2),
    (4, 24, 5, 1, 8, 7, 2),
    (17, 3, 3, 1, 5, 5, 3),
    (1, 1, 3, 0, 4, 4, 1),
    (13, 40, 3, 1, 4, 31, 1),
]


@pytest.fixture(autouse=True)
def switched_on() -> Any:
    native.enable(True)
    yield
    native.enable(None)


def case(shape: tuple[int, ...], mode: str, seed: int = 0) -> tuple[list[Tensor], list[Tensor | None], dict[str, Any]]:
    """Leaves (x, weight, bias, gamma, beta), running statistics, the other arguments."""
    ic, oc, k, pad, h, w, n = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw)

    leaves = [normal(n, ic, h, w) + 0.3, normal(oc, ic, k, k) / (ic * k * k) ** 0.5, normal(oc)]
    stats: list[Tensor | None] = [None, None]
    if mode != "none":
        leaves += [normal(oc), normal(oc)]  # gamma of either sign
        stats = [normal(oc), torch.rand(oc, generator=draw) + 0.5]
    return leaves, stats, {"training": mode == "train", "momentum": 0.2, "eps": 1e-5, "padding": pad}


def run(
    function: Any,
    leaves: list[Tensor],
    stats: list[Tensor | None],
    rest: dict[str, Any],
    dtype: torch.dtype,
    frozen: Any = (),
) -> list[Tensor | None]:
    """Output, gradients, moved statistics."""
    own = [t.detach().to(dtype, copy=True).requires_grad_(i not in frozen) for i, t in enumerate(leaves)]
    moved = [None if s is None else s.to(dtype, copy=True) for s in stats]
    full = own + [None] * (5 - len(own))
    out = function(*full, *moved, *rest.values())
    draw = torch.Generator().manual_seed(99)
    if out.requires_grad:
        out.backward(torch.randn(out.shape, generator=draw).to(dtype))
    return [out.detach(), *(t.grad for t in own), *moved]


def assert_close(found: list[Tensor | None], wanted: list[Tensor | None], tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), i
        if a is not None and b is not None:
            a, b = a.detach(), b.detach()
            assert a.shape == b.shape
            scale = max(1.0, float(b.abs().max()))
            assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, i


def no_ties(leaves: list[Tensor], stats: list[Tensor | None], rest: dict[str, Any]) -> list[Tensor | None]:
    """The reference in float64."""
    return run(op.unfused, leaves, stats, rest, torch.float64)


@needs_native
@pytest.mark.parametrize(("shape", "mode"), list(product(SHAPES, MODES)), ids=str)
def test_values_gradients_and_statistics_are_those_of_float64_pytorch(shape: tuple[int, ...], mode: str) -> None:
    leaves, stats, rest = case(shape, mode)
    kernel = native._load()
    assert_close(run(kernel, leaves, stats, rest, torch.float32), no_ties(leaves, stats, rest))


@needs_native
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2), (1,), (3, 4), (0, 1, 2, 3), (0, 2, 3, 4)])
def test_frozen_parts_get_no_gradient_and_do_not_change_the_others(frozen: tuple[int, ...], mode: str) -> None:
    leaves, stats, rest = case(SHAPES[1], mode)
    frozen = tuple(i for i in frozen if i < len(leaves))
    found = run(native.conv_block, leaves, stats, rest, torch.float32, frozen)
    wanted = no_ties(leaves, stats, rest)
    for i in frozen:
        wanted[1 + i] = None
    assert_close(found, wanted)


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_the_same_bits_come_out(mode: str) -> None:
    leaves, stats, rest = case(SHAPES[3], mode)
    kept = run(native.conv_block, leaves, stats, rest, torch.float32)
    with torch.no_grad():
        bare = run(native.conv_block, leaves, stats, rest, torch.float32)
    assert bare[1] is None
    assert torch.equal(kept[0], bare[0])  # type: ignore[arg-type]
    with torch.inference_mode():
        assert torch.equal(run(native.conv_block, leaves, stats, rest, torch.float32, range(5))[0], bare[0])  # type: ignore[arg-type]


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_non_contiguous_tensors_count_as_their_values(mode: str) -> None:
    leaves, stats, rest = case(SHAPES[1], mode)
    wanted = run(native.conv_block, leaves, stats, rest, torch.float32)
    x, weight = leaves[0], leaves[1]
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3), weight.to(memory_format=torch.channels_last)]
    own = [t.requires_grad_() for t in [*odd, *(torch.stack([t, t], 1)[:, 0] for t in leaves[2:])]]
    strided = [None if s is None else torch.stack([s, s], 1)[:, 1] for s in stats]
    assert not any(t.is_contiguous() for t in own)
    full: list[Any] = own + [None] * (5 - len(own))
    out = native.conv_block(*full, *strided, **rest)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(99))
    out.backward(dy.transpose(0, 1).contiguous().transpose(0, 1))
    for a, b in zip([out.detach(), *(t.grad for t in own), *strided], wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


@needs_native
def test_batch_norm_without_affine_or_without_running_statistics() -> None:
    leaves, stats, rest = case(SHAPES[1], "train")
    bare = run(native.conv_block, leaves[:3], stats, rest, torch.float32)
    assert_close(bare, run(op.unfused, leaves[:3], stats, rest, torch.float64))
    free = run(native.conv_block, leaves, [None, None], rest, torch.float32)
    assert_close(free, run(op.unfused, leaves, [None, None], rest, torch.float64))


@needs_native
def test_one_value_per_channel_is_refused_as_in_pytorch() -> None:
    leaves, stats, rest = case((1, 2, 5, 2, 1, 1, 1), "train")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        op.unfused(*leaves, *stats, *rest.values())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        native.conv_block(*leaves, *stats, **rest)


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_large_offsets_do_not_spoil_the_statistics(mode: str) -> None:
    leaves, stats, rest = case(SHAPES[0], mode)
    leaves[2] += 100.0
    if mode == "eval":
        stats[0] = stats[0] + 100.0  # type: ignore[operator]
    assert_close(run(native.conv_block, leaves, stats, rest, torch.float32), no_ties(leaves, stats, rest), 1e-4)


@needs_native
def test_nan_spreads_as_in_pytorch() -> None:
    leaves, stats, rest = case(SHAPES[1], "none")
    leaves[0][0, 0, 5, 5] = float("nan")  # reaches the last position of some windows, the first of others
    args = (*leaves, None, None, *stats, *rest.values())
    assert torch.equal(native.conv_block(*args).isnan(), op.unfused(*args).isnan())
    assert op.unfused(*args).isnan().any()


@needs_native
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4], SHAPES[7]])
def test_whole_numbers_give_the_same_bits_and_the_first_of_equal_maxima_wins(shape: tuple[int, ...]) -> None:
    leaves, stats, rest = case(shape, "none")
    leaves = [(2 * t).round().clamp(-1, 1) for t in leaves]  # many ties, sums exact in float32
    found, wanted = (run(f, leaves, stats, rest, torch.float32) for f in (native.conv_block, op.unfused))
    assert torch.equal(found[0], wanted[0])  # type: ignore[arg-type]
    assert_close(found, wanted)


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_two_runs_give_the_same_bits(mode: str) -> None:
    leaves, stats, rest = case(SHAPES[3], mode)
    first, second = (run(native.conv_block, leaves, stats, rest, torch.float32) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients_fall_back_to_pytorch(mode: str) -> None:
    def penalty(function: Any) -> list[Tensor]:
        leaves, stats, rest = case(SHAPES[1], mode)
        own = [t.requires_grad_() for t in leaves]
        out = function(*own, *[None] * (5 - len(own)), *stats, *rest.values())
        (g,) = torch.autograd.grad(out.square().sum(), own[1], create_graph=True)
        return list(torch.autograd.grad(g.square().mean(), own[:2]))

    assert_close(list(penalty(native.conv_block)), list(penalty(op.unfused)), 1e-4)


@needs_native
def test_a_tensor_changed_between_forward_and_backward_is_noticed() -> None:
    leaves, stats, rest = case(SHAPES[1], "none")
    weight = leaves[1].requires_grad_()
    out = native.conv_block(*leaves, None, None, *stats, **rest)
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@needs_native
def test_under_function_transforms_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("native code under a transform")

    monkeypatch.setattr(native, "_kernel", never)
    leaves, _, _ = case(SHAPES[1], "none")
    x, w, b = leaves
    stacked = torch.stack([w, 2 * w])
    out = torch.func.vmap(lambda w: native.conv_block(x, w, b))(stacked)
    assert_close([out[1]], [F.relu(F.max_pool2d(F.conv2d(x, 2 * w, b), 2))])
    assert torch.func.grad(lambda w: native.conv_block(x, w, b).sum())(w).shape == w.shape
    with pytest.raises(AssertionError, match="native code"):
        native.conv_block(x, w, b)


@pytest.mark.parametrize("why", ["dtype", "kernel", "padding", "off", "large", "pool"])
def test_what_the_kernels_do_not_know_pytorch_does(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernel", lambda *_: pytest.fail("native code"))
    x, w, pad = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), 0
    if why == "dtype":
        x, w = x.double(), w.double()
    if why == "kernel":
        w = torch.randn(4, 3, 2, 2)
    if why == "large":
        x, w = torch.randn(1, 256, 4, 4), torch.randn(256, 256, 3, 3)
    if why == "padding":
        pad = 3
    if why == "off":
        native.enable(False)
    if why == "pool":
        with pytest.raises(RuntimeError, match="too small"):
            native.conv_block(x[:, :, :3, :3], w)
        return
    assert torch.equal(native.conv_block(x, w, padding=pad), F.relu(F.max_pool2d(F.conv2d(x, w, padding=pad), 2)))


@needs_native
def test_modules_are_used_as_they_are_and_called_when_watched() -> None:
    torch.manual_seed(3)
    conv, bn, x = nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), torch.randn(4, 3, 12, 12)
    fast = native.block(conv, bn, x)
    assert int(bn.num_batches_tracked) == 1  # type: ignore[arg-type]
    mean = bn.running_mean.clone()  # type: ignore[union-attr]
    bn.reset_running_stats()
    seen = []
    hook = bn.register_forward_hook(lambda *_: seen.append(1))
    assert_close([native.block(conv, bn, x).detach(), bn.running_mean], [fast.detach(), mean])
    hook.remove()
    native.block(conv, bn, x)
    assert seen == [1]
    same = nn.Conv2d(3, 6, 3, padding="same")
    assert_close([native.block(same, None, x)], [F.relu(F.max_pool2d(same(x), 2))])
    wide = nn.Conv2d(3, 6, 3, stride=2)
    assert torch.equal(native.block(wide, None, x), F.relu(F.max_pool2d(wide(x), 2)))


SCRIPT = """
import torch
from coterie.train import native
torch.manual_seed(0)
x, w = torch.randn(2, 3, 12, 12), torch.randn(6, 3, 5, 5)
y = native.conv_block(x, w)
print(native.available(), float((y - native.unfused(x, w, *[None] * 5, False, 0.1, 1e-5, 0)).abs().max()) < 1e-4)
print(native.native_status())
print(y.double().sum().item().hex())
"""


def start(cache: Path, **env: str) -> "subprocess.Popen[str]":
    full = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[list[str], str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines(), err


def test_without_the_extension_one_line_says_that_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_path", lambda: None)
    kernel, kernels, status = op.load_kernel()
    assert kernel is None and kernels is None
    assert "was not built when Coterie was installed" in status


@needs_native
@pytest.mark.parametrize("name", library.usable_instructions())
def test_every_instruction_set_of_this_processor_passes_the_self_test(name: str) -> None:
    assert op.self_test(op.block_kernel(library.open_library(name))) < op.TOLERANCE


@needs_native
def test_an_instruction_set_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(library.UnavailableError, match="this processor has"):
        library.open_library("altivec")


@needs_native
@pytest.mark.long
def test_two_processes_compute_the_same_bits(tmp_path: Path) -> None:
    both = [finish(p)[0] for p in [start(tmp_path), start(tmp_path)]]
    assert both[0][0] == "True True"
    assert both[0] == both[1]


def test_the_self_test_notices_wrong_code() -> None:
    def wrong(*args: Any) -> Tensor:
        return op.unfused(*args) * 1.001

    assert op.self_test(op.unfused) == 0
    assert op.self_test(wrong) > op.TOLERANCE


def test_the_environment_switches_native_code_off(monkeypatch: pytest.MonkeyPatch) -> None:
    native.enable(None)
    monkeypatch.setenv("COTERIE_NATIVE", "0")
    assert not native.enabled()
    assert "switched off" in native.native_status()
    monkeypatch.setenv("COTERIE_NATIVE", "1")
    assert native.enabled()
