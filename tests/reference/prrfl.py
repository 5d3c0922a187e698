"""PRR-FL: deputies travel, share low-frequency amplitudes, and teach or learn from the personal model."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, evaluated, load, tensors
from reference.fedbn import norm_names

ABOUT = About(
    CODE,
    (
        "means are over the clients that answered (the authors divide by their 4 clients); others keep their deputy",
        "layers are told by type, not by name",
        "the first epoch of every local training recovers",
    ),
)


def reference(
    world: World, r_first: float = 0.7, r_last: float = 0.95, alpha1: float = 0.7, alpha2: float = 0.9
) -> Result:
    own, deputy = ({i: world.module() for i in world.clients} for _ in range(2))
    for t in range(1, world.rounds + 1):
        ids = world.sampled(t)
        for i in ids:
            w, v = own[i], deputy[i]
            epochs = list(world.epochs_of(t, i))
            stage = "recover" if len(epochs) > 1 else "exchange"
            opts = [world.optimiser(m.parameters(), t) for m in (w, v)]
            for number, epoch in enumerate(epochs):
                for x, y in epoch:
                    a, b = w(x), v(x)
                    losses = [F.cross_entropy(a, y), F.cross_entropy(b, y)]
                    if stage in ("exchange", "sublimate"):
                        losses[0] = losses[0] + _kl(b, a)
                    if stage in ("recover", "exchange"):
                        losses[1] = losses[1] + _kl(a, b)
                    for opt, loss in zip(opts, losses, strict=True):
                        opt.zero_grad()
                        loss.backward()
                        opt.step()
                if number + 1 < len(epochs):
                    good, mine = _f1(world, i, v), _f1(world, i, w)
                    stage = "recover" if good < alpha1 * mine else "exchange" if good < alpha2 * mine else "sublimate"
        r = r_first + t / world.rounds * (r_last - r_first)
        apart = norm_names(deputy[0])
        trees = [tensors(deputy[i]) for i in ids]
        for k in [k for k in trees[0] if k not in apart]:
            values = [tree[k].double().numpy() for tree in trees]
            new = _amplitudes(values, r) if values[0].ndim > 1 else [np.mean(values, 0)] * len(values)
            for i, value in zip(ids, new, strict=True):
                load(deputy[i], {k: torch.from_numpy(value).float()})
    return Result(own, states={i: {"w": own[i]} for i in world.clients}, server={"bank": _bank(world, deputy)})


def _bank(world: World, deputy: dict[int, nn.Module]) -> dict:
    """All deputies without batch norm as rows, entries in alphabetical order."""
    apart = norm_names(deputy[0])
    rows = [torch.cat([v.flatten() for k, v in sorted(tensors(m).items()) if k not in apart]) for m in deputy.values()]
    return {"ids": list(world.clients), "flat": torch.stack(rows)}


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


def _f1(world: World, i: int, model: nn.Module) -> float:
    x, y = world.train_part(i)
    return float(f1_score(y, evaluated(model, x).argmax(1), average="macro"))


def _amplitudes(values: list[np.ndarray], r: float) -> list[np.ndarray]:
    """Mean amplitudes in a window around frequency 0 of every weight as a matrix (in, kh) x (kw, out)."""
    shape = values[0].shape
    four = [v.reshape(*shape, *([1] * (4 - v.ndim))).transpose(1, 2, 3, 0) for v in values]
    inner = four[0].shape
    f = [np.fft.fftshift(np.fft.fft2(v.reshape(inner[0] * inner[1], inner[2] * inner[3]))) for v in four]
    common = np.mean([np.abs(a) for a in f], 0)
    window = np.zeros(common.shape, bool)
    sides = []
    for size in common.shape:
        half = int(np.floor(r / 2 * size + 1e-9))
        sides.append(slice(size // 2 - half, size // 2 + half))
    window[tuple(sides)] = True
    out = []
    for a in f:
        mixed = np.where(window, common, np.abs(a)) * np.exp(1j * np.angle(a))
        back = np.real(np.fft.ifft2(np.fft.ifftshift(mixed)))
        out.append(back.reshape(inner).transpose(3, 0, 1, 2).reshape(shape).copy())
    return out


CASES = [
    Case("prr-fl", reference, run={"epochs": 3}, long=("cnn",)),
    Case("prr-fl", reference, {"r_first": 0.4}, tag="one epoch"),
]
