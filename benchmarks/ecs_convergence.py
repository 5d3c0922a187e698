"""Draw the convergence of ECS-FL with weights 1/d, equation (12), on least squares beside the paper's bound C/sqrt(T).

python benchmarks/ecs_convergence.py --figure docs/images/ecs-fl-convergence.png

Ten clients with 40 samples of four numbers each take one full-batch step per round. Their losses are smooth and
strongly convex, as the paper assumes. They share their optimum, or differ a little, or one of them differs much.
Weights and mean are those of the method; a test runs the method itself on such problems.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from coterie.core import tree as T
from coterie.methods.ecsfl.selection import model_distances
from coterie.parts.similarity import inverse_distances

CLIENTS, SAMPLES, WIDTH, RATE = 10, 40, 4, 0.05


def distances(optima: torch.Tensor, rounds: int) -> np.ndarray:
    """Return the distance to the optimum of the mean loss after every round; optima [clients, 4]."""
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(CLIENTS, SAMPLES, WIDTH, generator=rng, dtype=torch.float64)
    y = torch.einsum("cnd,cd->cn", x, optima.double())
    best = torch.linalg.lstsq(x.flatten(0, 1), y.reshape(-1, 1)).solution[:, 0]
    w, out = torch.zeros(WIDTH, dtype=torch.float64), []
    for _ in range(rounds):
        slope = 2 * torch.einsum("cnd,cn->cd", x, x @ w - y) / SAMPLES
        models = w - RATE * slope
        d = model_distances({"w": models}, {"w": w})
        w = T.mean([{"w": m} for m in models], inverse_distances(d, 1e-12))["w"]
        out.append(float((w - best).norm()))
    return np.array(out)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--figure", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=400)
    asked = options.parse_args()
    best = torch.tensor([1.0, -2.0, 0.5, 3.0])
    outlier = best.expand(CLIENTS, WIDTH).clone()
    outlier[0] += 8
    cases = {
        "the same optimum": best.expand(CLIENTS, WIDTH),
        "optima that differ a little": best + 0.1 * torch.randn(10, 4, generator=torch.Generator().manual_seed(1)),
        "one optimum that differs much": outlier,
    }
    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    rounds = np.arange(1, asked.rounds + 1)
    first = 0.0
    for (name, optima), style in zip(cases.items(), ("-", "--", "-."), strict=True):
        d = distances(optima, asked.rounds)
        first = max(first, d[0])
        axes.loglog(rounds, d, style, label=name)
        print(f"{name}: {d[0]:.2f} after round 1, {d[99]:.2g} after 100, {d[-1]:.2g} after {asked.rounds}")
    axes.loglog(rounds, 3 * first / np.sqrt(rounds), ":", color="grey", label="C / sqrt(T)")
    axes.set_ylim(bottom=1e-4)
    axes.set(xlabel="round T", ylabel="distance to the optimum of the mean loss")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(asked.figure, dpi=120)


if __name__ == "__main__":
    main()
