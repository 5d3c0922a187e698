"""Compare successive halving with the full grid: its winner and its number of rounds.

python benchmarks/tune.py --out FOLDER [--data-dir DIR] [--rounds 27] [--seeds 0,1,2] [--only digits]

Two tasks: FedProx (mu x lr) on digits, Ditto (lam x lr) on HAPT, nine combinations each. The grid trains all of
them to the end. Existing runs are not repeated. Prints a table.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from nets import for_hapt

import coterie
from coterie.config import Engine, engine
from coterie.results.grid import sweep
from coterie.results.run import Run
from coterie.results.search import Tuning

TASKS: dict[str, tuple[str, dict[str, list[float]], dict[str, Any]]] = {
    "digits": ("fedprox", {"lr": [0.01, 0.05, 0.2], "mu": [0.001, 0.1, 1.0]},
               {"clients": 12, "partition": "dirichlet(0.3)", "join": 0.5, "epochs": 1, "val_share": 0.2}),
    "hapt": ("ditto", {"lr": [0.01, 0.05, 0.2], "lam": [0.01, 0.1, 1.0]},
             {"model": for_hapt, "partition": "natural", "pool": "train", "test_from": "official", "join": 1.0,
              "epochs": 1, "val_share": 0.2}),
}  # fmt: skip


def grid(found: Tuning, how: Engine) -> dict[int, tuple[float, float]]:
    """Return validation and test values of every combination after the last round."""
    sweep([t.cell for t in found.trials], how)
    out = {}
    for t in found.trials:
        rounds = Run(t.cell.out).rounds.iloc[-1]
        out[t.number] = float(rounds["personal/val/mean"]), float(rounds["personal/test/mean"])
    return out


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--rounds", type=int, default=27)
    asked.add_argument("--seeds", default="0")
    asked.add_argument("--workers", type=int, default=1)
    asked.add_argument("--only", default="")
    a = asked.parse_args()
    print("| task | seed | search | winner | rounds | validation | test | all on validation data |")
    print("|---|---|---|---|---|---|---|---|")
    for data, seed in product(TASKS, map(int, a.seeds.split(","))):
        if a.only and data not in a.only.split(","):
            continue
        method, space, more = TASKS[data]
        found = coterie.tune(method, data, space=space, rounds=a.rounds, out=a.out / f"{data}-{seed}", seed=seed,
                             workers=a.workers, data_dir=a.data_dir, **more)  # fmt: skip
        best, spent = found.best, found.spent
        assert best is not None
        every = grid(found, engine(workers=a.workers, data_dir=a.data_dir))  # continues the paused trials to the end
        first = max(every, key=lambda i: every[i][0])
        text = ", ".join(f"{100 * v:.1f}" for v, _ in sorted(every.values(), reverse=True))
        for words, i, cost, more_text in (
            ("halving", best.number, spent, ""),
            ("grid", first, found.whole, text),
        ):
            chosen = ", ".join(f"{k} = {v}" for k, v in found.trials[i].chosen.items())
            val, test = every[i]
            row = (data, seed, words, chosen, cost, f"{100 * val:.1f}", f"{100 * test:.1f}", more_text)
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
