"""Measure what each training option is worth: one run per option on CIFAR-10 (25,000 pictures), printed as one table.

python benchmarks/training_options.py --data-dir DIR --out FOLDER [--method fedavg] [--seeds 0,1] [--rows base,flip]

A row changes one option of the base run. Finished runs in FOLDER are not repeated, and interrupted ones are resumed.
"""

import argparse
from pathlib import Path
from typing import Any

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
    return {"option": name, "seed": seed, "seconds": seconds, **{k: scores[k] for k in ("mean", "worst10", "pooled")}}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over seeds in percent, with the difference from the base run."""
    means = pd.DataFrame(rows).groupby("option", sort=False).mean()
    lines = ["| option | mean | difference | worst decile | pooled | seconds |", "|---|---|---|---|---|---|"]
    for name, row in means.iterrows():
        gain = f"{100 * (row['mean'] - means.loc['base', 'mean']):+.1f}" if "base" in means.index else ""
        scores = [f"{100 * row[k]:.1f}" for k in ("mean", "worst10", "pooled")]
        lines.append(f"| {name} | {scores[0]} | {gain} | {scores[1]} | {scores[2]} | {row['seconds']:.0f} |")
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
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
