"""Measure what each training option is worth: one run per option on CIFAR-10 (25,000 pictures), printed as one table.

python benchmarks/training_options.py --data-dir DIR --out FOLDER [--method fedavg] [--seeds 0,1] [--rows base,flip]

A row changes one option of the base run. Finished runs in FOLDER are not repeated, and interrupted ones are resumed.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import coterie

BASE: dict[str, Any] = {
    "subset": 25_000, "partition": "dirichlet(0.3)", "clients": 20, "join": 0.25, "batch": 32, "lr": 0.05,
    "watch": False, "final_trained": False,
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "momentum": {"momentum": 0.9, "lr": 0.01},
    "adamw": {"optimizer": "adamw(betas=(0.9, 0.99))", "lr": 0.001, "weight_decay": 0.01},
    "rmsprop": {"optimizer": "rmsprop", "lr": 0.0005},
    "weight decay": {"weight_decay": 5e-4},
    "clip": {"grad_clip": 1.0},
    "step over rounds": {"lr_rounds": "step(15, 0.3)"},
    "cosine over rounds": {"lr_rounds": "cosine"},
    "warm-up and cosine": {"lr_rounds": "warmup(5) + cosine"},
    "cosine over steps": {"lr_steps": "cosine"},
    "equal steps": {"local_steps": 52},  # as many as two epochs of a mean client
    "crop": {"augment": "crop(4)"},
    "flip": {"augment": "flip"},
    "crop and flip": {"augment": "crop(4) + flip"},
    "erase": {"augment": "erase"},
    "colour": {"augment": "colour(0.2)"},
    "mixup": {"augment": "mixup(0.2)"},
    "fedavgm": {"server_optimizer": "fedavgm(1.0, 0.9)"},
    "fedadagrad": {"server_optimizer": "fedadagrad(0.01)"},
    "fedadam": {"server_optimizer": "fedadam(0.01)"},
    "fedyogi": {"server_optimizer": "fedyogi(0.01)"},
    "crop, flip, cosine, fedavgm": {
        "augment": "crop(4) + flip", "lr_rounds": "cosine", "server_optimizer": "fedavgm(1.0, 0.9)",
    },
}  # fmt: skip


def measured(name: str, method: str, seed: int, rounds: int, out: Path, data_dir: Path | None) -> dict[str, Any]:
    """Return the row of one run, which is started or continued if it has not finished."""
    folder = out / f"{method}-{name.replace(', ', '-').replace(' ', '-')}-s{seed}"
    if not (folder / "settings.json").exists():
        more = {"epochs": 2, **BASE, **ROWS[name], "rounds": rounds, "eval_every": rounds, "seed": seed}
        if "local_steps" in more:
            del more["epochs"]
        run = coterie.run(method, "cifar10", "lenet5-nobn", out=folder, workers=1, data_dir=data_dir, **more)
    elif not (run := coterie.open_run(folder)).finished:
        run = coterie.resume(folder, workers=1, data_dir=data_dir)
    scores = run.events[-1]["eval"][f"{run.headline}/test"]
    seconds = float(run.rounds["seconds"].sum())
    clients = 100 * run.clients()[f"{run.headline}/test"].to_numpy()
    shown = {k: scores[k] for k in ("mean", "worst10", "pooled")}
    return {"option": name, "seed": seed, "seconds": seconds, **shown, "clients": clients}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over seeds in percent, with differences from the base run.

    The 95 % intervals are a bootstrap over the clients of all seeds, paired by client.
    """
    means = pd.DataFrame([{k: v for k, v in row.items() if k != "clients"} for row in rows])
    means = means.groupby("option", sort=False).mean()
    scores = {o: np.concatenate([r["clients"] for r in rows if r["option"] == o]) for o in means.index}
    lines = [
        "| option | mean | difference | 95 % interval | worst tenth | pooled | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in means.iterrows():
        gain = interval = ""
        if "base" in scores and name != "base":
            difference = scores[name] - scores["base"]
            picked = np.random.default_rng(0).integers(0, len(difference), (20_000, len(difference)))
            low, high = np.percentile(difference[picked].mean(1), [2.5, 97.5])
            gain, interval = f"{difference.mean():+.1f}", f"{low:.1f} to {high:.1f}"
        cells = [f"{100 * row['mean']:.1f}", gain, interval, *(f"{100 * row[k]:.1f}" for k in ("worst10", "pooled"))]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", default=None, help="names of rows, separated by commas; all rows by default")
    given = parser.parse_args()
    rows = []
    for name in ROWS if given.rows is None else given.rows.split(","):
        for seed in map(int, given.seeds.split(",")):
            rows.append(measured(name, given.method, seed, given.rounds, given.out, given.data_dir))
            print({k: v for k, v in rows[-1].items() if k != "clients"}, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
