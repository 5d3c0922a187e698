"""Compare a text model from scratch, a frozen pretrained encoder, and low-rank adapters with several methods.

    python benchmarks/adapters.py --data-dir DIR --out DIR [--only "NAME|NAME"] [--seeds 0,1,2] [--show]

The data are AG News (agnews_small.npz in --data-dir), of which 1,200 texts of at most 32 tokens are divided among 20
clients by Dirichlet(0.3). Half of the clients take part in each of 10 rounds of two local epochs. The encoder is
MiniLM-L6 (examples/pretrained/minilm.py). Adapters of rank 8 are in its last two layers; what comes before them is
frozen, and is computed once per text for all runs. Runs are kept in the folder --out, and finished ones are not
repeated; `--show` prints only those.

The table has the mean accuracy over clients of the model that a client uses (the view `personal`), the worst tenth of
the clients, the megabytes that all participants send and receive in a round, and the processor time of a round without
evaluation.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "pretrained"))

import minilm
import torch

from coterie.config import Engine, settings
from coterie.data.dataset import Dataset
from coterie.data.features import SampleFeatures
from coterie.engine.session import Objects, execute, prepare
from coterie.results.run import Run

COMMON: dict[str, Any] = {
    "rounds": 10, "epochs": 2, "join": 0.5, "batch": 8, "optimizer": "adamw", "subset": 1200, "clients": 20,
    "partition": "dirichlet(0.3)", "short": "fill", "min_size": 40, "test_share": 0.3, "val_share": 0.1,
    "eval_every": 10, "checkpoint_every": 10, "watch": False, "final_trained": False,
}  # fmt: skip
FIRST = ",".join(["embeddings", *(f"encoder.layer.{i}" for i in range(4))])
SCRATCH: dict[str, Any] = {"model": "transformer", "model_options": {"width": 128}, "lr": 1e-3}
FROZEN: dict[str, Any] = {"model": "minilm", "freeze": "embeddings,encoder", "lr": 1e-2}
ADAPTERS: dict[str, Any] = {"model": "minilm", "freeze": FIRST, "lora_rank": 8, "lora_alpha": 16.0, "lr": 3e-3}
# name in the table: method and settings
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "from scratch, FedAvg": ("fedavg", SCRATCH),
    "from scratch, FedPer": ("fedper", SCRATCH),
    "from scratch, Local": ("local", SCRATCH),
    "frozen, FedAvg on the head": ("fedavg", FROZEN),
    "frozen, Local on the head": ("local", FROZEN),
    "adapters, Local": ("local", ADAPTERS),
    "adapters, FedIT": ("fedavg", ADAPTERS),
    "adapters, FFA-LoRA": ("fedavg", {**ADAPTERS, "freeze": f"{FIRST},lora:A"}),
    "adapters, FedSA-LoRA": ("fedper", {**ADAPTERS, "part": "lora:B,head"}),
    "adapters, private (FedPer)": ("fedper", {**ADAPTERS, "part": "lora"}),
    "adapters, private head (FedPer)": ("fedper", ADAPTERS),
    "adapters, Ditto": ("ditto", ADAPTERS),
    "adapters, FedDPA": ("feddpa", ADAPTERS),
}
COST = "cost.json"


def play(name: str, seed: int, data: Dataset, out: Path, stored: dict[str, SampleFeatures]) -> None:
    """Run one row with one seed, unless it is finished."""
    method, given = ROWS[name]
    chosen = settings(method=method, seed=seed, **{**COMMON, **given})
    if given is not SCRATCH:
        chosen = chosen.model_copy(update={"weights": str(minilm.weights())})
    session = prepare(chosen, Engine(workers=1), Objects(dataset=data))
    features, prefix = session.federation.features, session.method.ctx.net.prefix
    if features is not None and prefix is not None:
        known = stored.setdefault(prefix.last, features)  # the first layers are the same in all runs
        features.values, features.known = known.values, known.known
    begun = time.process_time()
    session.federation.compute_features()
    once = time.process_time() - begun
    execute(session, out)
    rounds = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    seconds = statistics.median(r["cpu"] for r in rounds if r["round"])  # training of clients only
    (out / COST).write_text(json.dumps({"seconds": seconds, "features": once}))


def row(name: str, runs: list[Path]) -> str:
    values: dict[str, list[float]] = {"mean": [], "worst10": [], "mb": [], "seconds": []}
    for path in runs:
        summary = Run(path).summary()
        sent = [parts for e in Run(path).events for way in e["bytes"].values() for parts in way.values()]
        values["mean"].append(100 * summary["personal"]["last"])
        values["worst10"].append(100 * summary["personal"]["worst10"])
        values["mb"].append(sum(sum(parts.values()) for parts in sent) / COMMON["rounds"] / 1e6)
        values["seconds"].append(json.loads((path / COST).read_text())["seconds"])
    mean = {k: statistics.mean(v) for k, v in values.items()}
    spread = f" ± {statistics.stdev(values['mean']):.1f}" if len(runs) > 1 else ""
    return f"| {name} | {mean['mean']:.1f}{spread} | {mean['worst10']:.1f} | {mean['mb']:.3f} | {mean['seconds']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [name for name in ROWS if not args.only or any(part in name for part in args.only.split("|"))]
    seeds = [int(s) for s in args.seeds.split(",")]
    stored: dict[str, SampleFeatures] = {}
    data = None if args.show else minilm.agnews(args.data_dir).subset(COMMON["subset"])
    for seed in seeds if data is not None else ():
        for name in wanted:
            out = args.out / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            if not (out / COST).exists():
                play(name, seed, data, out, stored)
                print(name, seed, flush=True)
    print("| model and method | accuracy | worst tenth | MB per round | seconds per round |\n|---|---|---|---|---|")
    for name in wanted:
        runs = [
            p for s in seeds if ((p := args.out / f"{name.replace(', ', '-').replace(' ', '-')}-{s}") / COST).exists()
        ]
        if runs:
            print(row(name, runs))


if __name__ == "__main__":
    main()
