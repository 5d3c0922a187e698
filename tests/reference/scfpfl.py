"""SC-FPFL: clusters by predictions, Fourier mixing of the clusters' models, and an agent that relearns at home."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import PAPER, About, Case, Result, World, average, copied, evaluated, load, two_means

ABOUT = About(
    f"{PAPER} (`sc-fpfl`), our change (`sc-fpfl-mended`)",
    (
        "the number of clusters is found in the eigenvalues (mended: by modularity) unless it is given",
        "the models of the first average travel with the predictions",
    ),
)


def reference(  # type: ignore[no-untyped-def]
    world: World, warmup_epochs: int, score: str, g: float = 0.35, lambda1: float = 0.9, kl_weight: float = 1.0,
    local_train_each_round: bool = False, accept: str = "agent", sends: str = "kept", kl_when: str = "always",
    clustering: bool = True, mixing: bool = True, agent: bool = True, fourier_linear: str = "fourier",
    fourier_bias: str = "mean", centred: bool = False, **_,
) -> Result:  # fmt: skip
    own = {i: world.fit(world.module(), 0, i, epochs=warmup_epochs) for i in world.clients}
    of = _clusters(world, own, centred) if clustering else {i: i for i in world.clients}
    theta = []
    for k in range(max(of.values()) + 1):
        here = [i for i in world.clients if of[i] == k]
        theta.append(average([own[i] for i in here], [world.sizes[i] for i in here]))

    def mix(theta: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return _mixed(theta, g, fourier_linear, fourier_bias) if mixing else theta

    hat = mix(theta)
    for t in range(1, world.rounds + 1):
        ids, sent = world.sampled(t), {}
        for i in ids:
            edge = load(world.module(), hat[of[i]])
            new, mine = copied(edge), own[i]
            if not agent:
                own[i] = sent[i] = world.fit(new, t, i)
                continue
            lost = kl_when == "always" or _right(world, i, mine) > _right(world, i, edge)
            trained = world.fit(copied(mine), t, i, stream=1) if local_train_each_round else mine
            teacher = copied(trained).eval()

            def relearn(
                model: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module = teacher, lost: bool = lost
            ) -> Tensor:
                logits = model(x)
                with torch.no_grad():
                    target = teacher(x).softmax(1)
                distance = F.kl_div(logits.log_softmax(1), target, reduction="batchmean")
                return F.cross_entropy(logits, y) + kl_weight * float(lost) * distance

            world.fit(new, t, i, relearn)
            if accept == "best":
                own[i] = max((new, edge, trained), key=lambda m: _right(world, i, m))
            else:
                own[i] = new if _right(world, i, new) >= lambda1 * _right(world, i, trained) else trained
            sent[i] = own[i] if sends == "kept" else new
        for k in range(len(theta)):
            if here := [i for i in ids if of[i] == k]:
                theta[k] = average([sent[i] for i in here], [world.sizes[i] for i in here])
        hat = mix(theta)
    clients = own if score == "own" else {i: load(world.module(), hat[of[i]]) for i in world.clients}
    return Result(clients, server={"cluster": of, "theta": dict(enumerate(theta)), "hat": dict(enumerate(hat))})


def _right(world: World, i: int, model: nn.Module) -> float:
    x, y = world.val_part(i)
    return float((evaluated(model, x).argmax(1) == y).float().mean())


def _clusters(world: World, models: dict[int, nn.Module], centred: bool) -> dict[int, int]:
    """Two clusters: cosines of predictions, normalised Laplacian, rows of its first two eigenvectors, k-means.

    The mended method compares logits without each client's mean over the items.
    """
    z = torch.stack([evaluated(m, world.public_part).double() for m in models.values()])
    if centred:
        flat = (z - z.mean(1, keepdim=True)).flatten(1)
        s = torch.stack([torch.cosine_similarity(a[None], flat, dim=1) for a in flat]).clamp(0, 1)
    else:
        p = z.softmax(-1)
        s = torch.stack([torch.stack([torch.cosine_similarity(a, b, dim=1).sum() for b in p]) for a in p])
    root = s.sum(1).rsqrt()
    lap = torch.eye(len(s)) - root[:, None] * s * root[None]
    h = torch.linalg.eigh(lap).eigenvectors[:, :2]
    return dict(zip(models, two_means(h / h.norm(dim=1, keepdim=True)), strict=True))


def _mixed(theta: list[dict[str, Tensor]], g: float, linear: str, bias: str) -> list[dict[str, Tensor]]:
    """Common low amplitudes of convolution weights; of linear ones if asked, or if there is no convolution."""
    if len(theta) == 1:
        return theta
    has_convolution = any(v.ndim == 4 for v in theta[0].values())
    if linear == "auto":
        linear = "keep" if has_convolution else "fourier"
    out: list[dict[str, Tensor]] = [{} for _ in theta]
    for k in theta[0]:
        values = [tree[k].double().numpy() for tree in theta]
        how = {1: bias, 2: linear}.get(values[0].ndim, "fourier")
        if how == "keep":
            new = values
        elif how == "mean":
            new = [np.mean(values, 0)] * len(values)
        else:
            shape = values[0].shape
            four = [v.reshape(*shape, *([1] * (4 - v.ndim))).transpose(0, 2, 1, 3) for v in values]
            a, b, c, d = four[0].shape
            f = [np.fft.fft2(v.reshape(a * b, c * d)) for v in four]
            common = np.mean([np.abs(z) for z in f], 0)
            rows, columns = (np.abs(np.fft.fftfreq(n) * n) <= np.floor(g * n + 1e-9) + 1e-6 for n in common.shape)
            low = rows[:, None] & columns[None]
            new = []
            for z in f:
                back = np.real(np.fft.ifft2(np.where(low, common, np.abs(z)) * np.exp(1j * np.angle(z))))
                new.append(back.reshape(a, b, c, d).transpose(0, 2, 1, 3).reshape(shape).copy())
        for tree, value in zip(out, new, strict=True):
            tree[k] = torch.from_numpy(np.array(value)).float()
    return out


def no_agent(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return reference(world, agent=False, **settings)


def cluster_only(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return reference(world, agent=False, mixing=False, **settings)


def mended(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    """The best of agent, edge and own model, and a teacher only where something was lost."""
    return reference(
        world,
        kl_when="own_better",
        accept="best",
        sends="agent",
        local_train_each_round=False,
        centred=True,
        **settings,
    )


def mended_no_agent(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return no_agent(world, centred=True, **settings)


def mended_cluster_only(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return cluster_only(world, centred=True, **settings)


def fourier_only(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return reference(world, clustering=False, **settings)


def mended_fourier_only(world: World, **settings) -> Result:  # type: ignore[no-untyped-def]
    return mended(world, clustering=False, **settings)


FIRST = {"score": "own", "warmup_epochs": 2}
CLUSTERS = {"cluster_when": "start", "k0": 2, "embed_dim": "k0", "isodata": "off", "predict": "softmax"}
FOURIER = {"g": 0.35, "g_schedule": "const", "fourier_linear": "fourier", "fourier_bias": "mean",
           "fourier_mask": "symmetric", "fourier_layout": "tile", "fourier_weight": "uniform"}  # fmt: skip
AGENT = {"lambda1": 0.9, "local_train_each_round": False, "agent_fail": "keep", "kl_weight": 1.0}
PUBLIC = {"public": 12}
TEXT_FOURIER = FOURIER | {"fourier_linear": "auto", "fourier_bias": "keep"}
TEXT = FIRST | CLUSTERS | TEXT_FOURIER | AGENT
MENDED = FOURIER | {"score": "own", "warmup_epochs": 2, "kl_weight": 1.0}
TWO = {"cluster_when": "start", "k0": 2}
CASES = [
    Case("sc-fpfl-mended", mended, MENDED | TWO, PUBLIC | {"rounds": 4}),
    Case(
        "sc-fpfl-mended-no-agent",
        mended_no_agent,
        {k: v for k, v in (MENDED | TWO).items() if k != "kl_weight"},
        PUBLIC,
        long=("cnn",),
    ),
    Case(
        "sc-fpfl-mended-cluster-only",
        mended_cluster_only,
        TWO | {"score": "own", "warmup_epochs": 2},
        PUBLIC,
        long=("cnn",),
    ),
    Case("sc-fpfl-mended-no-kl", mended, MENDED | TWO | {"kl_weight": 0.0}, PUBLIC, long=("cnn",)),
    Case("sc-fpfl-mended-fourier-only", mended_fourier_only, MENDED, long=("cnn",)),
    Case("sc-fpfl", reference, TEXT, PUBLIC),
    Case("sc-fpfl-no-kl", reference, TEXT | {"kl_weight": 0.0}, PUBLIC, long=("cnn",)),
    Case("sc-fpfl-no-agent", no_agent, FIRST | CLUSTERS | TEXT_FOURIER, PUBLIC, long=("cnn",)),
    Case("sc-fpfl-cluster-only", cluster_only, FIRST | CLUSTERS, PUBLIC, long=("cnn",)),
    Case("sc-fpfl-fourier-only", fourier_only, FIRST | TEXT_FOURIER | AGENT, long=("cnn",)),
    Case(
        "sc-fpfl",
        reference,
        TEXT | {"score": "edge", "local_train_each_round": True},
        PUBLIC,
        tag="own model trains in every round, edge scored",
        long=("cnn",),
    ),
]
