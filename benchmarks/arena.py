"""Compare the five papers' methods, as described and mended, with autopilot and the usual controls at equal training.

    python benchmarks/arena.py --data-dir DIR [--out DIR] [--only fmnist-0.1,hapt] [--seeds 10,11,12,13,14]
    python benchmarks/arena.py --show [--out DIR] [--figure FILE]

Each federation is one `coterie.compare` with `equal="steps"` and `use="best"`: every method has as many local steps as
FedAvg in 20 rounds of two epochs in which half of the clients take part. The rule `received` changes no training, so
the received models are scored afterwards from the same runs. Runs are kept under --out and continue where they stopped.

`--show` prints a table for each federation whose runs have all finished: mean accuracy over clients and the paired
difference to Local-Only with a 95 % interval over seeds and clients, for both rules of use; then the mean rank over
all federations with an interval over federations and seeds.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import coterie
from coterie.methods import find
from coterie.results.bootstrap import COVERAGE, paired_differences, resampled
from coterie.results.run import Run

FIVE = ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")
METHODS = (
    "local", "fedavg", "fedavg-ft", "fedper", "ditto", "fedala", "pfedsim", "autopilot",
    *FIVE, *(f"{name}-mended" for name in FIVE),
)  # fmt: skip
COMMON: dict[str, Any] = {
    "rounds": 20, "epochs": 2, "join": 0.5, "batch": 32, "lr": 0.05, "eval_every": 1000, "checkpoint_every": 1000,
    "watch": False, "final_trained": False, "public": 100, "val_share": 0.2, "fedavg-ft.finetune_epochs": 2,
}  # fmt: skip
SMALL: dict[str, Any] = {"clients": 20, "test_share": 0.5, "short": "fill", "min_size": 40}
PICTURES: dict[str, Any] = {"model": "lenet5", **SMALL}
HAPT = {"data": "hapt", "partition": "natural", "pool": "train", "test_from": "official", "model": "nets:for_hapt"}
FEDERATIONS: dict[str, dict[str, Any]] = {
    "fmnist-0.1": {"data": "fmnist", "subset": 3000, "partition": "dirichlet(0.1)", **PICTURES},
    "hapt": HAPT,
    "agnews-0.3": {"data": "agnews_small", "subset": 6000, "partition": "dirichlet(0.3)", **SMALL, "lr": 0.1},
    "mednist-0.3": {"data": "mednist", "subset": 3000, "partition": "dirichlet(0.3)", **PICTURES},
    "cifar10-0.1": {"data": "cifar10", "subset": 4000, "partition": "dirichlet(0.1)", **PICTURES},
    "svhn-0.1": {"data": "svhn", "subset": 4000, "partition": "dirichlet(0.1)", **PICTURES},
    "fmnist-1": {"data": "fmnist", "subset": 3000, "partition": "dirichlet(1.0)", **PICTURES},
    "cifar100-0.3": {"data": "cifar100", "subset": 5000, "partition": "dirichlet(0.3)", **PICTURES},
}
RULES = ("received", "best")


def cell(out: Path, federation: str, method: str, seed: int) -> Path:
    return out / federation / f"{method}-s{seed}"


@torch.no_grad()
def received_accuracy(run: Run) -> list[float]:
    """Return the accuracy of every client's received model, fine-tuned first where the method does so."""
    saved = run.saved()
    saved.session = replace(saved.session, settings=saved.session.settings.model_copy(update={"use": "received"}))
    federation, method = saved.session.federation, saved.method
    out = []
    for client in federation.clients:
        with torch.enable_grad():
            model = saved.adapted(client)
        test = federation.test(client)
        out.append(float((method.predict(model.params, test.x, model.extras).argmax(1) == test.y).float().mean()))
    return out


def score_received(folder: Path) -> None:
    """Write the accuracy of the received models next to a run."""
    if not (folder / "received.json").exists():
        (folder / "received.json").write_text(json.dumps(received_accuracy(Run(folder))))


def accuracies(folder: Path) -> dict[str, np.ndarray]:
    """Return the accuracy of every client for each rule of use."""
    run = Run(folder)
    best = run.clients()[f"{run.headline}/test"].to_numpy()
    return {"received": np.array(json.loads((folder / "received.json").read_text())), "best": best}


def finished(out: Path, federation: str, seeds: Sequence[int]) -> bool:
    return all((cell(out, federation, m, s) / "received.json").exists() for m in METHODS for s in seeds)


def table(out: Path, federation: str, seeds: Sequence[int]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the table of a federation, and the mean accuracy by rule [methods, seeds]."""
    got = {m: [accuracies(cell(out, federation, m, s)) for s in seeds] for m in METHODS}
    means = {rule: np.array([[a[rule].mean() for a in got[m]] for m in METHODS]) for rule in RULES}
    of_client = np.repeat(seeds, [len(a["best"]) for a in got["local"]])
    columns: dict[str, list[str]] = {}
    for rule in RULES:
        flat = {m: np.concatenate([a[rule] for a in got[m]]) for m in METHODS}
        gains = paired_differences(np.stack([100 * (flat[m] - flat["local"]) for m in METHODS]), of_client)
        columns[rule] = [
            f"{100 * mean.mean():.1f} | "
            + ("" if m == "local" else f"{d.mean:+.1f} [{d.low:+.1f}, {d.high:+.1f}] | {d.gain} / {d.lose}")
            + (" | " if m == "local" else "")
            for m, mean, d in zip(METHODS, means[rule], gains, strict=True)
        ]
    rounds = [json.loads((out / federation / "equal.json").read_text())["rounds"][f"{m}-s{seeds[0]}"] for m in METHODS]
    head = " | ".join(f"{rule} | minus Local-Only | gain / lose" for rule in RULES)
    lines = [f"**{federation}**, {len(of_client)} clients in {len(seeds)} seeds", ""]
    lines += [f"| method | rounds | {head} |", "|---|---:|" + "---:|---:|---:|" * len(RULES)]
    for i, m in enumerate(METHODS):
        lines.append(f"| {find(m).card.title} | {rounds[i]} | {' | '.join(columns[rule][i] for rule in RULES)} |")
    return [*lines, ""], means


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks [methods, seeds] of accuracies, 1 for the best; equal accuracies share their mean rank."""
    better = (values[None] > values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return better + (equal + 1) / 2


def mean_ranks(by_federation: dict[str, dict[str, np.ndarray]], rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean rank of each method, and its interval [2, methods] over federations and seeds."""
    each = [ranks(means[rule]) for means in by_federation.values()]
    which = np.repeat(np.arange(len(each)), [r.shape[1] for r in each])
    drawn = resampled(np.concatenate(each, axis=1), which)
    tail = (1 - COVERAGE) / 2
    return np.mean([r.mean(1) for r in each], axis=0), np.quantile(drawn, [tail, 1 - tail], axis=0)


def summary(by_federation: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """Return the table of mean ranks and of mean accuracies under the rule `received`."""
    found = {rule: mean_ranks(by_federation, rule) for rule in RULES}
    lines = [f"| method | {' | '.join(f'rank, {rule}' for rule in RULES)} | {' | '.join(by_federation)} |"]
    lines += ["|---|" + "---:|" * (len(RULES) + len(by_federation))]
    for i in np.argsort(found[RULES[0]][0], kind="stable"):
        shown = [f"{rank[i]:.1f} [{ends[0, i]:.1f}, {ends[1, i]:.1f}]" for rank, ends in found.values()]
        shown += [f"{100 * means[RULES[0]][i].mean():.1f}" for means in by_federation.values()]
        lines.append(f"| {find(METHODS[i]).card.title} | {' | '.join(shown)} |")
    return lines


def figure(by_federation: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Draw the mean rank of every method with its interval, for both rules of use."""
    fig, axes = plt.subplots(1, len(RULES), figsize=(10, 5.5), sharey=True, layout="constrained")
    order = np.argsort(-mean_ranks(by_federation, RULES[0])[0], kind="stable")
    for axis, rule in zip(axes, RULES, strict=True):
        rank, ends = mean_ranks(by_federation, rule)
        at = np.arange(len(order))
        colours = ["#b5532a" if METHODS[i].removesuffix("-mended") in FIVE else "#33658a" for i in order]
        axis.hlines(at, ends[0][order], ends[1][order], colors=colours)
        axis.scatter(rank[order], at, c=colours, zorder=3)
        axis.set_yticks(at, [find(METHODS[i]).card.title for i in order])
        axis.set_xlabel(f"mean rank in {len(by_federation)} federations (1: best), use = {rule}")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/arena"))
    parser.add_argument("--only", default=",".join(FEDERATIONS))
    parser.add_argument("--seeds", default="10,11,12,13,14")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    seeds, chosen = [int(s) for s in args.seeds.split(",")], args.only.split(",")
    for name in chosen if not args.show else ():
        if finished(args.out, name, seeds):
            continue
        coterie.compare(
            METHODS, seeds=seeds, equal="steps", use="best", out=args.out / name, workers=1, data_dir=args.data_dir,
            **{**COMMON, **FEDERATIONS[name]},
        )  # fmt: skip
        for method in METHODS:
            for seed in seeds:
                score_received(cell(args.out, name, method, seed))
        print(f"{name}: finished", flush=True)
    by_federation = {}
    for name in chosen:
        if finished(args.out, name, seeds):
            lines, by_federation[name] = table(args.out, name, seeds)
            print("\n".join(lines))
    if by_federation:
        print("\n".join(summary(by_federation)))
    if args.figure and by_federation:
        figure(by_federation, args.figure)


if __name__ == "__main__":
    main()
