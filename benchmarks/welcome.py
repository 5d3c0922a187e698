"""Measure the accuracy of a newcomer against its number of samples: HAPT, five people held out, every method.

python benchmarks/welcome.py --data-dir DIR --out FOLDER [--methods fedavg,ditto] [--seeds 0,1] [--figure FILE]

25 people train; each of the other five is a newcomer with 0, 1, 5, 20 and all samples per class of its training part,
scored on its own test part. Results in FOLDER/results.jsonl are not repeated. Prints a table of all methods.
"""

import argparse
import json
import math
import time
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from nets import for_hapt

import coterie
import coterie.export.newcomers
from coterie.core.rng import numpy_rng
from coterie.data import load_dataset
from coterie.errors import CoterieError
from coterie.methods import find, method_names

PEOPLE = 5
AMOUNTS = (0, 1, 5, 20, None)  # samples per class; None: all
ALONE = "training alone"
TRAIN_ALONE = coterie.export.newcomers._local_scores
NAMED = ("SC-FPFL", "Ditto", "FedAvg", "FedBABU", "FedRep", "CD2-pFed", "FedGH")  # named in the figure


def some(y: np.ndarray, amount: int | None, person: int, seed: int) -> np.ndarray:
    """Return the positions of a number of samples of each class, the same for every method."""
    if amount is None:
        return np.arange(len(y))
    order = numpy_rng(seed, "welcome", person).permutation(len(y))
    return np.sort(np.concatenate([order[y[order] == c][:amount] for c in np.unique(y)]))


def measure(name: str, out: Path, data_dir: Path | None, rounds: int, seed: int) -> list[dict]:
    folder = out / "runs" / f"{name}-{seed}"
    torch.manual_seed(seed)
    if (folder / "settings.json").exists():
        run = coterie.resume(folder, model=for_hapt, workers=1, data_dir=data_dir)
    else:
        run = coterie.run(
            name, "hapt", for_hapt, partition="natural", pool="train", test_from="official", newcomers=PEOPLE,
            workers=1, rounds=rounds, epochs=1, join=0.4, lr=0.05, momentum=0.5, eval_every=rounds, watch=False,
            out=folder, data_dir=data_dir, final_trained=False, seed=seed,
        )  # fmt: skip
    data, fed = load_dataset("hapt", data_dir), run.session().federation
    # local training is the same for every method and measured once
    coterie.export.newcomers._local_scores = TRAIN_ALONE if name == "fedavg" else lambda *_: {"accuracy": math.nan}
    rows = []
    for person in fed.clients[-PEOPLE:]:
        own = torch.cat([fed.indices(person, "train"), fed.indices(person, "val")]).sort().values
        x, y = data.x[own].numpy(), data.y[own].numpy()
        test = fed.indices(person, "test")
        xt, yt = data.x[test].numpy(), data.y[test].numpy()
        for amount in AMOUNTS:
            row = {"method": name, "title": run.title, "seed": seed, "person": fed.names[person], "amount": amount}
            at = some(y, amount, person, seed)
            try:
                if amount == 0:
                    row["personal"] = run.welcome(x).model.predict(xt, yt).scores["accuracy"]
                else:
                    found = run.welcome(x[at], y[at], xt, yt)
                    row |= {k: v["accuracy"] for k, v in found.scores.items()} | {"kept": found.kept}
            except CoterieError as e:
                row["refused"] = str(e)
            rows.append(row)
    return rows


def table(path: Path) -> pd.DataFrame:
    """Return means over people in percent: a row per method, a column per amount and one for the global model."""
    rows = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
    rows["amount"] = rows["amount"].map(lambda a: "all" if pd.isna(a) else str(int(a)))
    wide = rows.pivot_table(index="title", columns="amount", values="personal", aggfunc=_mean, dropna=False)
    wide["global"] = rows[rows["amount"] == "all"].groupby("title")["global"].agg(_mean)
    fedavg = rows[rows["method"] == "fedavg"]  # the global model is the same for every method
    wide.loc[ALONE] = fedavg.groupby("amount")["local"].agg(_mean)
    shown = (100 * wide[["0", "1", "5", "20", "all", "global"]]).round(1)
    return shown.sort_values("all", ascending=False, kind="stable")


def _mean(values: pd.Series) -> float:
    """Return the mean over people, or NaN if one of them has no value."""
    return float(values.mean()) if values.notna().all() else math.nan


def figure(found: pd.DataFrame, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7.2, 4.4), constrained_layout=True)
    curves, whole = found.drop(columns="global"), found["global"].get("FedAvg", math.nan)
    at = range(len(curves.columns))
    for name, row in curves.iterrows():
        if name == ALONE:
            ax.plot(at, row, lw=2, color="k", ls="--", marker="o", ms=4, zorder=3, label="training alone")
        elif name not in NAMED:
            ax.plot(at, row, lw=0.6, color="0.8", zorder=1)
    for name in NAMED:
        if name in curves.index:
            ax.plot(at, curves.loc[name], lw=2, marker="o", ms=4, zorder=2, label=name)
    ax.axhline(whole, color="0.4", lw=1, ls=":", zorder=1, label="global model of FedAvg")
    ax.set_xticks(at, ["none", *curves.columns[1:]])
    ax.set_ylim(0, 100)
    ax.set_xlabel("labelled samples per class; grey: the other methods")
    ax.set_ylabel("accuracy (%), mean over five people")
    ax.legend(fontsize=8, loc="lower right")
    fig.savefig(path, dpi=110)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--methods", default="")
    asked.add_argument("--seeds", default="0")
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--figure", type=Path)
    a = asked.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["method"], r["seed"]) for r in lines}
    names = a.methods.split(",") if a.methods else method_names()
    for seed, name in product(map(int, a.seeds.split(",")), names):
        if (name, seed) in done:
            continue
        if "fedclip" in find(name).__module__:
            print(f"{name}: left out: an example for pictures", flush=True)
            continue
        start = time.process_time()
        try:
            rows = measure(name, a.out, a.data_dir, a.rounds, seed)
        except CoterieError as e:
            print(f"{name}: {e}", flush=True)
            continue
        with path.open("a") as f:
            f.write("".join(json.dumps(row) + "\n" for row in rows))
        refused = {r["refused"] for r in rows if "refused" in r}
        print(f"{name}, seed {seed}: {time.process_time() - start:.0f} s", *refused, sep="; ", flush=True)
    if path.exists():
        found = table(path)
        print("| method |", " | ".join(found.columns), "|")
        print("|---|" + "---|" * len(found.columns))
        for name, row in found.iterrows():
            print(f"| {name} |", " | ".join("" if math.isnan(v) else f"{v:.1f}" for v in row), "|")
        if a.figure:
            figure(found, a.figure)


if __name__ == "__main__":
    main()
