"""Repeat PFLlib's public table for Fashion-MNIST: printed accuracies and those of our methods.

    python benchmarks/pfllib_table.py --data-dir DIR [--rounds 50] [--subset 7000] [--methods fedavg,fedper] [--out DIR]

The protocol is PFLlib's: 20 clients, Dirichlet 0.1 over all 70,000 pictures, a quarter of a client's pictures for
testing, its CNN, one local epoch, batches of 10, rate 0.005, all clients in every round; the score is the best round's
accuracy pooled over samples. PFLlib trains 2000 rounds. Runs continue where they stopped, also with more
rounds in a later call, and the table compares all methods over the rounds that all of them have. `--show` prints the
table without training.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.config import Engine, settings
from coterie.data.sources import load_dataset
from coterie.engine.session import Callbacks, execute, prepare, rebuild
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.results.run import Run

PRINTED = {  # practical label skew, FMNIST: mean of three trials
    "fedavg": 85.85, "fedprox": 85.63, "per-fedavg": 95.10, "pfedme": 97.25, "ditto": 97.47, "apfl": 97.25,
    "fedfomo": 97.21, "fedamp": 97.20, "fedala": 97.66, "fedper": 97.44, "fedrep": 97.56, "fedrod": 97.52,
    "fedbabu": 97.46, "fedcp": 97.89, "gpfl": 97.81, "feddbe": 97.69, "fedproto": 97.40,
}  # fmt: skip
OURS = ("local", "fedavg-ft")  # controls that are not in PFLlib's table
MORE = ("lp-ft", "scaffold", "moon", "fedpac", "fedas", "fedtgp", "pfedfda")  # newer or global methods, run on request
DEFAULT = [
    "local", "fedavg", "fedper", "feddbe", "fedrep", "gpfl", "fedcp", "fedproto", "fedrod", "fedala", "ditto", "apfl",
    "fedavg-ft", "fedprox", "fedbabu",
]  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "fedrep": {"head_epochs": 1, "body_epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "fedavg-ft": {"finetune_epochs": 1},
    "lp-ft": {"head_epochs": 1, "finetune_epochs": 1},
}
ADAPTED = {"fedavg-ft", "lp-ft", "fedbabu", "per-fedavg"}  # scored after fine-tuning
PROTOCOL: dict[str, Any] = {
    "data": "fmnist", "model": "fedgmh-cnn", "clients": 20, "partition": "dirichlet(0.1)", "cap": True, "min_size": 40,
    "test_share": 0.25, "val_share": 0.0, "rounds": 2000, "join": 1.0, "epochs": 1, "batch": 10, "lr": 0.005,
    "weighting": "samples", "eval_every": 5, "checkpoint_every": 5, "watch": False, "final_trained": False,
}  # fmt: skip


def advance(method: str, until: int, out: Path, engine: Engine, subset: int | None, data: Any) -> None:
    """Run or continue a method up to a round."""
    folder = out / method
    resume = (folder / "settings.json").exists()
    if resume and Run(folder).last_round >= until:
        return
    chosen = settings(method=method, settings=OWN.get(method, {}), subset=subset, **PROTOCOL)
    session = rebuild(folder, engine) if resume else prepare(chosen, engine, loaded=data)
    seen = {"round": 0}

    def tell(progress: Any) -> None:
        seen["round"] = progress.round

    stopped: Callable[[], bool] = lambda: seen["round"] >= until  # noqa: E731
    execute(session, folder, Callbacks(on_round=tell, on_warning=print, should_stop=stopped), resume=resume)
    print(f"{method}: round {Run(folder).last_round}", flush=True)


def rows(out: Path, methods: list[str]) -> tuple[int, list[tuple[str, str, str, str, str]]]:
    """Return the rounds that all methods have, and a row for each method: title, printed, best, its round, last."""
    curves = {}
    for method in methods:
        try:
            view = "adapted" if method in ADAPTED else "personal"
            curves[method] = Run(out / method).curve(view, statistic="pooled")
        except CoterieError:
            continue
    common = min((int(c.index.max()) for c in curves.values()), default=0)
    found = []
    for method, curve in curves.items():
        here = 100 * curve[curve.index <= common]
        printed = f"{PRINTED[method]:.2f}" if method in PRINTED else "-"
        best = f"{here.max():.2f}"
        found.append((find(method).card.title, printed, best, str(int(here.idxmax())), f"{here.iloc[-1]:.2f}"))
    return common, found


def table(out: Path, methods: list[str]) -> str:
    common, found = rows(out, methods)
    lines = [
        f"| method | PFLlib, printed | best of {common} rounds | in round | round {common} |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default=",".join(DEFAULT))
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each method")
    parser.add_argument("--step", type=int, default=5, help="rounds of one method before the next one")
    parser.add_argument("--subset", type=int, help="number of pictures; default: all 70,000")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/pfllib"))
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    methods = args.methods.split(",")
    if not args.show:
        engine = Engine(workers=args.workers, data_dir=args.data_dir)
        data = load_dataset(PROTOCOL["data"], args.data_dir, args.subset)
        for until in range(args.step, args.rounds + args.step, args.step):
            for method in methods:
                advance(method, min(until, args.rounds), args.out, engine, args.subset, data)
    print(table(args.out, methods))


if __name__ == "__main__":
    main()
