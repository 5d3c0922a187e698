"""Compare autopilot with fixed methods: its distance to the best one, and clients that are worse than Local-Only.

    python benchmarks/autopilot.py --data-dir DIR --out DIR [--only NAME] [--methods a,b] [--seeds 0,1,2] [--show]

NAME is a federation: fmnist-0.01, fmnist-0.1, fmnist-0.5, fmnist-5, cifar10-0.1, cifar10-5, hapt or agnews. Each has 20
clients of at least 40 samples (HAPT: its thirty people), half of them take part in each of 20 rounds of two local
epochs (HAPT: 30 of five, with its net of nets.py); evaluation is every ten rounds. One process, one core. Runs are
kept in DIR and continue where they stopped; `--show` prints finished runs only. The first seed of every federation
comes first, and cheap runs come before expensive ones.

The table of a federation has the mean accuracy over clients of each method in its intended view (fedavg-ft after
fine-tuning), the number of clients below Local-Only on their test parts, bytes and processor time relative to FedAvg,
and the headroom of autopilot: the gain of the best candidate of each client, chosen on its test part. The last table
has all federations. `time` is of whole runs, evaluation included; methods.py has the time of a round.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.config import Engine, settings
from coterie.data.sources import load_dataset
from coterie.engine.edge_steps import preview
from coterie.engine.session import Callbacks, execute, prepare, rebuild
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.autopilot.method import Autopilot
from coterie.results.run import Run

FIXED = (
    "local", "fedavg", "fedavg-ft", "fedper", "fedrep", "ditto", "apfl", "pfedsim", "fedala", "fedcpmd-mended",
    "fedpc-mended", "fedgmh-mended", "ecs-fl-mended", "sc-fpfl-mended",
)  # fmt: skip
PILOT = "autopilot"
ADAPTED = {"fedavg-ft"}  # used after fine-tuning
CPU = "cpu.json"
RATE = 1.7  # mean time of a method relative to FedAvg


@dataclass(frozen=True)
class Federation:
    name: str
    seeds: int
    seconds: float  # seconds of a FedAvg run on one core
    given: dict[str, Any]


COMMON: dict[str, Any] = {
    "rounds": 20, "epochs": 2, "join": 0.5, "batch": 32, "lr": 0.05, "eval_every": 10, "checkpoint_every": 10,
    "watch": False, "final_trained": False, "public": 100, "val_share": 0.2,
}  # fmt: skip
PICTURES: dict[str, Any] = {"model": "lenet5", "clients": 20, "test_share": 0.5, "short": "fill", "min_size": 40}


def _pictures(data: str, subset: int, alpha: float, seeds: int, seconds: float) -> Federation:
    given = {"data": data, "subset": subset, "partition": f"dirichlet({alpha:g})", **PICTURES}
    return Federation(f"{data}-{alpha:g}", seeds, seconds, given)


FEDERATIONS = (
    Federation(
        "agnews",
        3,
        4,
        {
            "data": "agnews_small", "subset": 6000, "partition": "dirichlet(0.3)", "clients": 20, "test_share": 0.5,
            "short": "fill", "min_size": 40, "lr": 0.1,
        },
    ),
    *(_pictures("fmnist", 6000, alpha, 3, 5) for alpha in (0.1, 5, 0.01, 0.5)),
    *(_pictures("cifar10", 10000, alpha, 1, 12) for alpha in (0.1, 5)),
    Federation(
        "hapt",
        3,
        20,
        {
            "data": "hapt", "partition": "natural", "pool": "train", "test_from": "official", "model": "nets:for_hapt",
            "rounds": 30, "epochs": 5,
        },
    ),
)  # fmt: skip


def place(out: Path, federation: Federation, seed: int, method: str) -> Path:
    return out / federation.name / str(seed) / method


def done(folder: Path) -> bool:
    return (folder / CPU).exists()


def advance(federation: Federation, seed: int, method: str, out: Path, engine: Engine, data: Any) -> None:
    """Run or continue one run to its end."""
    folder = place(out, federation, seed, method)
    resume = (folder / "settings.json").exists()
    begun = time.process_time()
    chosen = settings(method=method, seed=seed, **{**COMMON, **federation.given})
    session = rebuild(folder, engine) if resume else prepare(chosen, engine, loaded=data)
    execute(session, folder, Callbacks(on_warning=print), resume=resume)
    spent = time.process_time() - begun
    (folder / CPU).write_text(json.dumps({"seconds": spent, "whole": not resume}))
    print(f"{federation.name}, seed {seed}, {method}: {spent:.1f} s", flush=True)


# ---- tables ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    accuracy: np.ndarray  # accuracy in the method's view [clients]
    bytes: float
    seconds: float  # NaN for an interrupted run


def outcome(folder: Path, method: str) -> Outcome:
    run = Run(folder)
    view = "adapted/test" if method in ADAPTED else "personal/test"
    sent = sum(run.rounds[c].fillna(0).sum() for c in run.rounds if c.startswith("bytes/"))
    cpu = json.loads((folder / CPU).read_text())
    return Outcome(run.clients()[view].to_numpy(), float(sent), float(cpu["seconds"]) if cpu["whole"] else float("nan"))


def table(out: Path, federation: Federation, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the table of a federation, over the seeds that all methods have."""
    ready = [s for s in seeds if all(done(place(out, federation, s, m)) for m in methods)]
    if not ready or "local" not in methods or "fedavg" not in methods:
        return []
    found = {m: [outcome(place(out, federation, s, m), m) for s in ready] for m in methods}
    mean = {m: float(np.mean([o.accuracy.mean() for o in runs])) for m, runs in found.items()}
    lines = [
        f"{federation.name}, {len(ready)} seed{'s' * (len(ready) > 1)}",
        "",
        "| method | mean | below Local-Only | bytes | time |",
        "|---|---:|---:|---:|---:|",
    ]
    clients = sum(len(o.accuracy) for o in found["local"])
    for m in sorted(methods, key=lambda m: -mean[m]):
        below = sum(int((o.accuracy < a.accuracy).sum()) for o, a in zip(found[m], found["local"], strict=True))
        size, cost = (
            np.nanmean([getattr(o, part) / getattr(f, part) for o, f in zip(found[m], found["fedavg"], strict=True)])
            for part in ("bytes", "seconds")
        )
        title = find(m).card.title
        lines.append(f"| {title} | {100 * mean[m]:.1f} | {below} of {clients} | {size:.2f} | {cost:.2f} |")
    if PILOT in methods:
        best = max((m for m in methods if m != PILOT), key=mean.__getitem__)
        gap = 100 * (mean[PILOT] - mean[best])
        lines += ["", f"autopilot minus the best fixed method ({find(best).card.title}): {gap:+.1f} points"]
        room = [headroom(place(out, federation, s, PILOT)) for s in ready]
        lines += [f"headroom of the best candidate per client by its test part: {100 * float(np.mean(room)):+.1f}"]
    return [*lines, ""]


def summary(out: Path, federations: Sequence[Federation], methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return one table of all federations: means over clients and seeds, and the number of clients below Local-Only."""
    columns = []
    for f in federations:
        ready = [s for s in seeds[: f.seeds] if all(done(place(out, f, s, m)) for m in methods)]
        if ready:
            columns.append((f.name, {m: [outcome(place(out, f, s, m), m) for s in ready] for m in methods}))
    if len(columns) < 2 or not {"local", "fedavg"} <= set(methods):
        return []
    mean = {m: [100 * float(np.mean([o.accuracy.mean() for o in runs[m]])) for _, runs in columns] for m in methods}
    best = [max(mean[m][i] for m in methods if m != PILOT) for i in range(len(columns))]
    names = [f"{name} ({len(runs['local'])})" for name, runs in columns]
    lines = [
        f"| method | {' | '.join(names)} | worst gap to the best fixed | below Local-Only |",
        f"|---|{'---:|' * (len(names) + 2)}",
    ]
    clients = sum(len(o.accuracy) for _, runs in columns for o in runs["local"])
    for m in sorted(methods, key=lambda m: -min(a - b for a, b in zip(mean[m], best, strict=True))):
        below = sum(
            int((o.accuracy < a.accuracy).sum())
            for _, runs in columns
            for o, a in zip(runs[m], runs["local"], strict=True)
        )
        gap = min(a - b for a, b in zip(mean[m], best, strict=True))
        cells = " | ".join(f"{v:.1f}" for v in mean[m])
        lines.append(f"| {find(m).card.title} | {cells} | {gap:+.1f} | {below} of {clients} |")
    return [*lines, ""]


def headroom(folder: Path) -> float:
    """Return the gain in mean accuracy of the best candidate of each client, chosen on its test part."""
    saved = Run(folder).saved()
    method, federation = saved.method, saved.session.federation
    assert isinstance(method, Autopilot)
    gains = []
    for client in federation.clients:
        data, test, state = federation.data(client), federation.test(client), saved.states.get(client)
        if state is None:
            continue
        sent, _ = preview(
            method, saved.checkpoint.server, saved.checkpoint.edges, [client], saved.checkpoint.round + 1
        )[client]
        w = {k: sent[k] for k in method.ctx.w0}
        store = method.stored(w, data, method.names)
        outputs = method.outputs(method.members(state, w, method.names, store), store, test.x)
        warm = dict.fromkeys(outputs, 1.0)
        hits = [float((method.candidate(n, outputs, warm).argmax(1) == test.y).float().mean()) for n in method.names]
        params, extras = method.personal(state, sent, data)
        used = method.predict(params, test.x, extras)
        gains.append(max(hits) - float((used.argmax(1) == test.y).float().mean()))
    return float(np.mean(gains))


def estimate(federations: Sequence[Federation], methods: Sequence[str], seeds: Sequence[int], out: Path) -> float:
    """Return the seconds of one core for the missing runs."""
    return sum(
        RATE * f.seconds
        for f in federations
        for s in seeds[: f.seeds]
        for m in methods
        if not done(place(out, f, s, m))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/autopilot"))
    parser.add_argument("--only", help="one federation")
    parser.add_argument("--methods", help="comma-separated list; default: all fixed methods and autopilot")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    federations = [f for f in FEDERATIONS if args.only in (None, f.name)]
    if not federations:
        raise SystemExit(f"{args.only} is not one of {', '.join(f.name for f in FEDERATIONS)}")
    methods = args.methods.split(",") if args.methods else [*FIXED, PILOT]
    seeds = [int(s) for s in args.seeds.split(",")]
    if not args.show:
        print(f"about {estimate(federations, methods, seeds, args.out) / 60:.0f} minutes of one core", flush=True)
        engine = Engine(workers=1, data_dir=args.data_dir)
        for at, seed in enumerate(seeds):
            for f in federations:
                left = [m for m in methods if not done(place(args.out, f, seed, m))]
                if at >= f.seeds or not left:
                    continue
                data = load_dataset(f.given["data"], args.data_dir, f.given.get("subset"))
                for method in left:
                    try:
                        advance(f, seed, method, args.out, engine, data)
                    except CoterieError as e:
                        print(f"{f.name}, seed {seed}, {method}: {e}", flush=True)
    for f in federations:
        print("\n".join(table(args.out, f, methods, seeds[: f.seeds])))
    print("\n".join(summary(args.out, federations, methods, seeds)))


if __name__ == "__main__":
    main()
