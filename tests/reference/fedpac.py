"""FedPAC: body averaged, features drawn to class means, heads combined by the solution of a quadratic problem."""

from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import CODE, About, Case, Result, World, average, body, copied, head, load, tensors

ABOUT = About(
    CODE,
    ("the head is trained at the run's rate (0.1 there)", "class means are of a pass in evaluation mode"),
)


def features(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return body(copied(model).eval())(x).double()


def best(P: np.ndarray) -> np.ndarray:
    """Of all supports, the one whose stationary point is feasible and lowest: exact for a few clients."""
    found, least = None, np.inf
    for k in range(1, len(P) + 1):
        for support in combinations(range(len(P)), k):
            part = np.linalg.solve(P[np.ix_(support, support)], np.ones(k))
            if (part <= 0).any():
                continue
            a = np.zeros(len(P))
            a[list(support)] = part / part.sum()
            if a @ P @ a < least:
                found, least = a, a @ P @ a
    assert found is not None
    return np.where(found > 1e-3, found, 0)


def reference(world: World, lam: float, head_epochs: int = 1) -> Result:
    server, heads, means = world.module(), {i: head(world.module()) for i in world.clients}, {}
    for t in range(1, world.rounds + 1):
        ids, local, V, H, sums, counts = world.sampled(t), [], [], [], {}, {}
        for i in ids:
            x, y = world.train_part(i)
            model = copied(server)
            load(model[-1], tensors(heads[i]))
            z, n = features(model, x), len(y)
            own = {k: z[y == k].mean(0) for k in y.unique().tolist()}
            h = torch.zeros(world.classes, z.shape[1], dtype=torch.float64)
            v = 0.0
            for k, mu in own.items():
                p = float((y == k).sum()) / n
                h[k] = p * mu
                v += p * float(z[y == k].square().sum(1).mean()) - p * p * float(mu.square().sum())
            V.append(v / n)
            H.append(h)
            frozen = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
            for m in frozen:
                m.eval()
            world.fit(model, t, i, params=head(model).parameters(), epochs=head_epochs)
            for m in frozen:
                m.train()

            def loss(model: nn.Module, x: Tensor, y: Tensor, own: dict = own, means: dict = means) -> Tensor:
                z = body(model)(x)
                ce = F.cross_entropy(head(model)(z), y)
                if not means:
                    return ce
                target = torch.stack([means.get(int(k), own[int(k)]).float() for k in y])
                return ce + lam * F.mse_loss(z, target)

            world.fit(model, t, i, loss, body(model).parameters())
            local.append(model)
            z = features(model, x)
            for k in y.unique().tolist():
                sums[k] = sums.get(k, 0) + z[y == k].sum(0)
                counts[k] = counts.get(k, 0) + int((y == k).sum())
        for at, i in enumerate(ids):
            gaps = torch.stack([(H[at] - h).flatten() for h in H])
            a = best((torch.diag(torch.tensor(V, dtype=torch.float64)) + gaps @ gaps.T).numpy())
            combined = average([head(m) for m in local], a.tolist())
            heads[i] = load(copied(heads[i]), combined)
        load(server, average(local, [world.sizes[i] for i in ids]))
        means = {k: sums[k] / counts[k] for k in sums}
    models = {}
    for i in world.clients:
        models[i] = copied(server)
        load(models[i][-1], tensors(heads[i]))
    return Result(models)


CASES = [
    Case("fedpac", reference, {"lam": 1.0}),
    Case("fedpac", reference, {"lam": 0.2}, {"epochs": 2, "join": 0.7}, models=("mlp",), tag="mild"),
]
