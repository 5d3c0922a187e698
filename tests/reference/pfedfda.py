"""pFedFDA: heads by linear discriminant analysis of mixtures of the client's and the common Gaussians."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.rng import torch_rng
from reference import CODE, About, Case, Result, World, average, body, copied, head, load, tensors

ABOUT = About(
    CODE,
    (
        "features of a clean pass after training (collected during training there)",
        "folds by order of the samples (shuffled there), shares of the mixture on a grid (quasi-Newton there)",
    ),
)
EPS = 1e-4


def lda(means: Tensor, cov: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    d = len(cov)
    cov = (1 - EPS) * cov + EPS * torch.trace(cov) / d * torch.eye(d, dtype=cov.dtype)
    weight = means @ torch.linalg.inv(cov)
    return weight, torch.log(prior.to(means)) - 0.5 * torch.diag(means @ weight.T)


def estimate(z: Tensor, y: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    means = torch.stack([z[y == k].mean(0) if (y == k).any() else common[k] for k in range(len(common))])
    scatter = sum(torch.outer(a - means[k], a - means[k]) for a, k in zip(z, y, strict=True))
    return means, scatter / max(len(y) - 1, 1) + 1e-4 + torch.eye(z.shape[1], dtype=z.dtype)


def mixed(z: Tensor, y: Tensor, common: tuple[Tensor, Tensor], prior: Tensor) -> tuple[Tensor, Tensor]:
    seen: dict[int, int] = {}
    rank = []
    for k in y.tolist():
        rank.append(seen.get(k, 0))
        seen[k] = rank[-1] + 1
    use = [a for a, k in enumerate(y.tolist()) if seen[k] > 1]
    halves = [[a for a in use if rank[a] % 2 == r] for r in (0, 1)]
    parts = [(estimate(z[halves[r]], y[halves[r]], common[0]), halves[1 - r]) for r in (0, 1)] if use else []

    def risk(shares: tuple[float, float]) -> float:
        total = 0.0
        for own, test in parts:
            means, cov = (s * a + (1 - s) * b for s, a, b in zip(shares, own, common, strict=True))
            weight, bias = lda(means, cov, prior)
            total += float(F.cross_entropy(z[test] @ weight.T + bias, y[test]))
        return total

    best, width = (0.5, 0.5), 0.5
    for _ in range(2 if use else 0):
        ticks = torch.linspace(-width, width, 11, dtype=torch.float64).tolist()
        pairs = [(a, c) for a in ticks for c in ticks]
        tried = [(min(1.0, max(0.0, best[0] + a)), min(1.0, max(0.0, best[1] + c))) for a, c in pairs]
        best, width = min(tried, key=risk), width / 5
    shares = best if use else (0.0, 0.0)
    own = estimate(z, y, common[0])
    means, cov = (s * a + (1 - s) * b for s, a, b in zip(shares, own, common, strict=True))
    return means.float(), cov.float()


def features(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return body(copied(model).eval())(x).double()


def reference(world: World) -> Result:
    server = world.module()
    d = head(server).in_features
    means, cov = torch.rand(world.classes, d, generator=torch_rng(0, "means")), torch.eye(d)
    prior = {}
    for i in world.clients:
        shares = torch.bincount(world.train_part(i)[1], minlength=world.classes) / world.sizes[i] + EPS
        prior[i] = shares / shares.sum()

    def gaussians(model: nn.Module, i: int) -> tuple[Tensor, Tensor]:
        x, y = world.train_part(i)
        return mixed(features(model, x), y, (means.double(), cov.double()), prior[i].double())

    for t in range(1, world.rounds + 1):
        ids, local, found = world.sampled(t), [], []
        for i in ids:
            model = copied(server)
            weight, bias = lda(means, cov, prior[i])
            load(head(model), {"weight": weight, "bias": bias})
            world.fit(model, t, i, params=body(model).parameters())
            local.append(model)
            found.append(gaussians(model, i))
        sizes = [world.sizes[i] for i in ids]
        mean = average(local, sizes)
        load(server, {k: v for k, v in mean.items() if k in dict(body(server).state_dict())})
        both = average([{"means": m, "cov": c} for m, c in found], sizes)
        means, cov = both["means"], both["cov"]
    models = {}
    for i in world.clients:
        models[i] = copied(server)
        weight, bias = lda(*gaussians(server, i), prior[i])
        load(head(models[i]), {"weight": weight, "bias": bias})
    stats = {k: v for k, v in tensors(server).items() if k in dict(body(server).state_dict())}
    return Result(models, server={"w": {**stats, "x:means": means, "x:covariance": cov}})


CASES = [Case("pfedfda", reference)]
