"""School with privacy of single samples, beside printed values: FedAvg, Local-Only and MR-MTL at one epsilon.

    python benchmarks/privacy_school.py --data school.npz [--epsilon 6] [--seeds 5] [--rounds 200] [--out DIR]

Protocol of Liu et al., NeurIPS 2022 (arXiv 2206.07902), figure 3(c): 139 schools, a linear model, 200 rounds of one
epoch, batch 32, rate 0.01, delta 1e-3, clip 1, 30 % of each school for testing, features standardised by the training
part of the school, scores as (y - 1) / 69. The archive has x, y and client. Printed values are those of the authors'
repository (kenziyuliu/private-cross-silo-fl). Batches are drawn by Poisson sampling here, as the accountant assumes,
and all weights are zero at first.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from torch import nn

import coterie
from coterie.data.arrays import from_arrays
from coterie.data.dataset import Dataset

PRINTED = {"fedavg": 0.02564, "local": 0.02628, "mr-mtl": 0.02394}


def school(path: Path, seed: int) -> Dataset:
    """Return the schools with a split of their own for each seed."""
    with np.load(path) as archive:
        x, y, client = archive["x"].astype(np.float64), archive["y"], archive["client"]
    rng, test = np.random.default_rng(seed), np.zeros(len(y), bool)
    for c in np.unique(client):
        rows = rng.permutation(np.flatnonzero(client == c))
        test[rows[: int(0.3 * len(rows))]] = True
        mine, train = client == c, (client == c) & ~test
        deviation = x[train].std(0)
        x[mine] = (x[mine] - x[train].mean(0)) / np.where(deviation > 0, deviation, 1)
    split = np.where(test, "test", "train")
    targets = ((y - 1) / 69).astype(np.float32)
    return from_arrays(x.astype(np.float32), targets, name="school", client=client, split=split, task="regression")


def zero_linear() -> nn.Module:
    """Return a linear model that starts at zero: clipped gradients are slow to undo other initial values."""
    layer = nn.Linear(28, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=6.0, help="0: without privacy")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--methods", default=",".join(PRINTED))
    parser.add_argument("--lam", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("runs/privacy-school"))
    args = parser.parse_args()
    dp = {"dp": f"example(epsilon={args.epsilon}, delta=1e-3, clip=1)"} if args.epsilon else {}
    found: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        data = school(args.data, seed)
        for name in args.methods.split(","):
            begun, own = time.perf_counter(), {"lam": args.lam} if name == "mr-mtl" else {}
            run = coterie.run(
                name, data, zero_linear(), partition="natural", test_from="given", val_share=0.0, normalize="none",
                min_size=1,
                rounds=args.rounds, join=1.0, epochs=1, batch=32, lr=0.01, eval_every=args.rounds, watch=False,
                final_trained=False, checkpoint_every=args.rounds, seed=seed, workers=1, weighting="uniform",
                out=args.out / f"{name}-{args.epsilon:g}-{args.rounds}-s{seed}", **own, **dp,
            )  # fmt: skip
            counts = run.evaluation()
            squared, samples = counts["personal/test/squared"][:, 0], counts["personal/test/samples"]
            each = squared / samples
            found.setdefault(name, []).append(float(each.mean()))
            spent = run.events[-1].get("privacy", {})
            words = f"mean over schools {each.mean():.5f}, pooled {squared.sum() / samples.sum():.5f}"
            epsilon, seconds = spent.get("epsilon", float("inf")), time.perf_counter() - begun
            print(f"{name:8} seed {seed}: {words}, epsilon {epsilon:.3f}, {seconds:.0f} s", flush=True)
    print(f"\nepsilon {args.epsilon:g}, {args.rounds} rounds, {args.seeds} seeds: test mean squared error")
    for name, values in found.items():
        print(f"{name:8} {np.mean(values):.5f} +- {np.std(values):.5f}   printed {PRINTED.get(name, float('nan')):.5f}")


if __name__ == "__main__":
    main()
