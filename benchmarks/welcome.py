"""Accuracy of a newcomer against its number of samples: HAPT, five people held out, every method.

python benchmarks/welcome.py --data-dir DIR --out FOLDER [--methods fedavg,ditto] [--rounds 15] [--figure FILE]

25 people train; each of the other five is welcomed with 0, 1, 5, 20 and all samples per class of its training part and
scored on its own test part. What FOLDER/results.jsonl has is not computed again.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

import coterie
from coterie.data import load
from coterie.errors import CoterieError
from coterie.methods import find, known
from coterie.rng import numpy_rng

PEOPLE = 5
AMOUNTS = (0, 1, 5, 20, None)  # samples per class; None: all


def net(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 12, 8, stride=4), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Conv1d(12, 16, 6, stride=3), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


def some(y: np.ndarray, amount: int | None, person: int) -> np.ndarray:
    """Positions of so many samples of each class, the same ones for every method."""
    if amount is None:
        return np.arange(len(y))
    order = numpy_rng(0, "welcome", person).permutation(len(y))
    return np.sort(np.concatenate([order[y[order] == c][:amount] for c in np.unique(y)]))


def measure(name: str, out: Path, data_dir: Path | None, rounds: int, done: set[tuple[str, str, str]]) -> list[dict]:
    folder = out / "runs" / name
    torch.manual_seed(0)
    if (folder / "settings.json").exists():
        run = coterie.resume(folder, model=net, workers=1, data_dir=data_dir)
    else:
        run = coterie.run(
            name, "hapt", net, partition="natural", pool="train", test_from="official", newcomers=PEOPLE, workers=1,
            rounds=rounds, epochs=1, join=0.4, lr=0.1, momentum=0.5, eval_every=rounds, watch=False, out=folder,
            data_dir=data_dir, final_trained=False,
        )  # fmt: skip
    data, fed = load("hapt", data_dir), run.session().federation
    rows = []
    for person in fed.clients[-PEOPLE:]:
        own = torch.cat([fed.indices(person, "train"), fed.indices(person, "val")]).sort().values
        x, y = data.x[own].numpy(), data.y[own].numpy()
        test = fed.indices(person, "test")
        xt, yt = data.x[test].numpy(), data.y[test].numpy()
        for amount in AMOUNTS:
            if (name, fed.names[person], str(amount)) in done:
                continue
            row = {"method": name, "person": fed.names[person], "amount": amount}
            at = some(y, amount, person)
            if amount == 0:
                received = run.welcome(x).model.predict(xt, yt).scores["accuracy"]
                row |= {"personal": received, "received": received}
            else:
                try:
                    scores = run.welcome(x[at], y[at], xt, yt).scores
                except CoterieError as e:
                    scores = {}
                    row["refused"] = str(e)
                row |= {k: v["accuracy"] for k, v in scores.items()}
            rows.append(row)
    return rows


def table(path: Path) -> pd.DataFrame:
    """Mean over the people, a row per method and a column per amount."""
    rows = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
    rows["amount"] = rows["amount"].map(lambda a: "all" if pd.isna(a) else str(int(a)))
    wide = rows.pivot_table(index="method", columns="amount", values="personal")
    local = rows[rows["amount"] != "0"].groupby("amount")["local"].mean()
    wide.loc["local training alone"] = local
    return (100 * wide[[c for c in ("0", "1", "5", "20", "all") if c in wide]]).round(1)


def figure(found: pd.DataFrame, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    named = ["fedavg", "fedavg-ft", "ditto", "fedrep", "fedbabu", "apfl", "local training alone"]
    for name, row in found.iterrows():
        chosen = name in named
        ax.plot(range(len(row)), row, lw=2 if chosen else 0.6, color=None if chosen else "0.8",
                zorder=2 if chosen else 1, label=name if chosen else None, marker="o" if chosen else None)  # fmt: skip
    ax.set_xticks(range(len(found.columns)), found.columns)
    ax.set_xlabel("samples per class")
    ax.set_ylabel("accuracy (%), mean over five people")
    ax.legend(fontsize=8)
    fig.savefig(path, dpi=150)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--data-dir", type=Path)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--methods", default="")
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--figure", type=Path)
    a = asked.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["method"], r["person"], str(r["amount"])) for r in lines}
    count = {m: sum(r["method"] == m for r in lines) for m in known()}
    for name in a.methods.split(",") if a.methods else known():
        if count.get(name, 0) >= PEOPLE * len(AMOUNTS) or "fedclip" in find(name).__module__:
            continue
        try:
            rows = measure(name, a.out, a.data_dir, a.rounds, done)
        except CoterieError as e:
            print(f"{name}: {e}", flush=True)
            continue
        with path.open("a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{name}: done", flush=True)
    if path.exists():
        found = table(path)
        print(found.to_string())
        if a.figure:
            figure(found, a.figure)


if __name__ == "__main__":
    main()
