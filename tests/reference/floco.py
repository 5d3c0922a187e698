"""Floco: heads of a simplex; clients are placed in it by principal components of their updates."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from torch import nn

from coterie.core.rng import key, torch_rng
from reference import CODE, About, Case, Result, World, average, body, copied, head, load, tensors

ABOUT = About(
    CODE,
    ("all clients train in round tau, which is averaged (the authors' code trains without averaging)",),
)


def projected(points: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[sizes, n, m]: the points [n, m] on simplices of these sizes, by bisection for the thresholds."""
    target = sizes[:, None, None]
    low, high = points.min(1, keepdims=True) - target, points.max(1, keepdims=True) + 0 * target
    for _ in range(100):
        middle = (low + high) / 2
        more = np.maximum(points - middle, 0).sum(2, keepdims=True) > target
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    return np.maximum(points - low, 0)


def energy(points: np.ndarray) -> float:
    pairs = [(i, j) for i in range(len(points)) for j in range(i)]
    return sum(max(float(np.linalg.norm(points[i] - points[j])), 1e-4) ** -2 for i, j in pairs)


def reference(world: World, endpoints: int, tau: int, rho: float) -> Result:
    server, M = world.module(), endpoints
    shape = head(server).weight.shape
    drawn = torch.randn(M, *shape, generator=torch_rng(0, "endpoints"))
    corners, places = drawn * (2 / sum(shape)) ** 0.5, {}
    for t in range(1, world.rounds + 1):
        ids = list(world.clients) if t == tau else world.sampled(t)
        local, new = [], []
        for i in ids:
            model, own = copied(server), nn.Parameter(corners.clone())
            opt = world.optimiser([*body(model).parameters(), head(model).bias, own], t)
            torch.default_generator.manual_seed(key(0, "noise", t, i))
            for x, y in world.batches(t, i):
                if i in places:
                    u = torch.rand(M) * 2 - 1
                    point = places[i] + rho * torch.rand(()) * u / u.abs().sum()
                else:
                    e = torch.empty(M).exponential_()
                    point = e / e.sum()
                weight = sum(p * w for p, w in zip(point, own, strict=True))
                opt.zero_grad()
                F.cross_entropy(F.linear(body(model)(x), weight, head(model).bias), y).backward()
                opt.step()
            local.append(model)
            new.append(own.data)
        if t == tau:
            updates = np.stack([(n - corners).flatten().numpy() for n in new]).astype(np.float64)
            found = np.zeros((len(ids), M))
            k = min(M, len(ids))
            found[:, :k] = PCA(k, svd_solver="full").fit_transform(updates)
            sizes = np.linspace(1e-4, 1, 1000)
            best = min(projected(found, sizes) / sizes[:, None, None], key=energy)
            places = {i: torch.from_numpy(p).float() for i, p in zip(ids, best, strict=True)}
        weights = [world.sizes[i] for i in ids]
        load(server, average(local, weights))
        corners = average([{"c": n} for n in new], weights)["c"]
    models = {}
    for i in world.clients:
        place = places.get(i, torch.full((M,), 1 / M))
        models[i] = copied(server)
        load(models[i][-1], {"weight": torch.einsum("m,mcd->cd", place, corners)})
    stats = {k: v for k, v in tensors(server).items() if not k.endswith(f"{len(server) - 1}.weight")}
    return Result(models, server={"w": {**stats, "x:endpoints": corners}})


CASES = [
    Case("floco", reference, {"endpoints": 3, "tau": 2, "rho": 0.1}),
    Case("floco", reference, {"endpoints": 10, "tau": 9, "rho": 0.1}, models=("mlp",), tag="before tau"),
]
