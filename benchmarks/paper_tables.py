"""Repeat the tables of docs/methods/: the methods of the five papers with their readings and controls.

    python benchmarks/paper_tables.py --data-dir DIR [--only hapt,fedcpmd-fmnist] [--seeds 0,1] [--out DIR]
    python benchmarks/paper_tables.py --show [--only NAMES] [--out DIR]

Every run has its own folder under --out. Finished runs are skipped and interrupted ones continue, so the command
can be stopped and started again, and several processes can share the work. The first seed of every experiment comes
first. `--show` prints a table per experiment of the runs that have finished: mean and standard deviation over seeds of
the mean accuracy over clients, the paired difference of the default to every row with a 95 % interval over seeds and
clients, and the clients that gain and lose by the default.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nets import for_hapt

import coterie
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.results.controls import ControlTable, Pair, Row
from coterie.results.paper_metrics import official
from coterie.results.run import Run

Settings = dict[str, Any]
FIVE: dict[str, Settings] = {f"{name}-mended": {} for name in ("fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl")}
BEST: dict[str, Settings] = {f"{name}-best": {"method": name, "use": "best"} for name in ("local", "fedavg")}
USUAL: dict[str, Settings] = {"local": {}, "fedavg-ft": {}, "fedper": {}, **BEST}


@dataclass(frozen=True)
class Experiment:
    """Rows (label or name of a method, and its settings) with the same data, model and budget."""

    data: str
    settings: Settings
    rows: dict[str, Settings]
    seeds: tuple[int, ...] = (0, 1, 2)
    model: Any = None
    default: str = ""  # row that the others are compared with; empty: each of the five
    view: str = "personal"  # view that is scored
    scores: bool = False  # PM(V), PM(L) and GM on the official test images too

    def of(self, row: str) -> tuple[str, Settings]:
        given = dict(self.rows[row])
        return given.pop("method", row), given


ALPHA: Settings = {  # FedCPMD's setting with fewer clients
    "partition": "dirichlet(0.1)", "epochs": 5, "batch": 32, "lr": 0.01, "bn_stats": "local",
}  # fmt: skip
FEDCPMD: dict[str, Settings] = {
    "fedcpmd": {"watch": True}, "fedcpmd-mended": {"watch": True},
    "received": {"method": "fedcpmd-mended", "use": "received"}, "fedper": {}, "pfedsim": {},
    "fedcpmd-mended-random": {}, "fedcpmd-mended-classifier": {}, "fedavg-ft": {}, "local": {}, **BEST,
}  # fmt: skip
FEDPC: dict[str, Settings] = {
    "fedpc": {}, "text": {"method": "fedpc", "reading": "text"}, "fedpc-mended": {}, "fedpc-mended-no-proto": {},
    "fedpc-mended-random": {}, "fedper": {}, "fedavg-ft": {}, "local": {},
}  # fmt: skip
FEDGMH: dict[str, Settings] = {
    "fedgmh": {}, "code": {"method": "fedgmh", "reading": "code"}, "fedgmh-mended": {}, "fedgmh-o": {}, "fedgmh-a": {},
    "fedgmh-oa": {}, "lg-fedavg": {}, "fedper": {}, "fedavg-ft": {}, "local": {},
}  # fmt: skip
ALL_TRAIN: Settings = {"train_fraction": 1.0}
ECSFL: dict[str, Settings] = {
    "ecs-fl": ALL_TRAIN, "ecs-fl-invdist-all": ALL_TRAIN, "ecs-fl-mended": ALL_TRAIN,
    "ecs-fl-mended-mean-all": ALL_TRAIN, "ecs-fl-mended-random": ALL_TRAIN, "fedavg": {"final_trained": True},
}  # fmt: skip
SCFPFL: dict[str, Settings] = {
    "sc-fpfl": {}, "sc-fpfl-mended": {}, "sc-fpfl-mended-cluster-only": {}, "sc-fpfl-mended-no-agent": {},
    "fedavg-ft": {}, "local": {},
}  # fmt: skip
PC: Settings = {
    "partition": "dirichlet(0.3)", "pool": "train", "official": True, "val_share": 0, "clients": 20, "join": 1.0,
    "rounds": 20, "epochs": 2, "lr": 0.02, "momentum": 0.9, "final_trained": True,
}  # fmt: skip
GMH: Settings = {
    "clients": 40, "join": 0.5, "rounds": 30, "epochs": 2, "batch": 50, "lr": 0.05, "subset": 6000,
    "exdir_cap": True, "exdir_min_holders": None,
}  # fmt: skip
ECS: Settings = {"clients": 100, "join": 0.1, "rounds": 25, "epochs": 2, "lr": 0.05, "val_share": 0, "subset": 5000}
SC: Settings = {
    "subset": 2400, "clients": 12, "join": 1.0, "rounds": 20, "epochs": 5, "lr": 0.05, "public": 200, "val_share": 0.2,
}  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {
    "hapt": Experiment(
        "hapt", {"partition": "natural", "pool": "train", "test_from": "official", "rounds": 30}, {**FIVE, **USUAL},
        model=for_hapt,
    ),
    "agnews": Experiment("agnews_small", {"partition": "dirichlet(0.3)", "rounds": 30}, {**FIVE, **USUAL}),
    "fedpc-fmnist": Experiment(
        "fmnist", {**PC, "subset": 6000}, FEDPC, (1, 2, 3), "lenet5-nobn", "fedpc", scores=True
    ),
    "fedpc-tenth": Experiment(
        "fmnist", {**PC, "subset": 6000, "join": 0.1, "rounds": 100}, FEDPC, (1,), "lenet5-nobn", "fedpc", scores=True
    ),
    **{
        f"fedgmh-{alpha}": Experiment(
            "mnist", {**GMH, "partition": f"exdir(2,{alpha})"}, FEDGMH, (0, 1, 2), "lenet5-nobn", "fedgmh-mended"
        )
        for alpha in ("0.5", "5")
    },
    "ecs-fl-shards": Experiment(
        "fmnist", {**ECS, "partition": "shards(2)"}, ECSFL, (0, 1, 2), "lenet5-nobn", "ecs-fl-mended", "global"
    ),
    "ecs-fl-iid": Experiment(
        "fmnist", {**ECS, "partition": "iid"}, ECSFL, (0,), "lenet5-nobn", "ecs-fl-mended", "global"
    ),
    **{
        f"sc-fpfl-{k}": Experiment(
            "fmnist", {**SC, "partition": f"rotate({k})"}, SCFPFL, (1, 2, 3), "lenet5-nobn", "sc-fpfl-mended"
        )
        for k in (1, 2, 4)
    },
    "fedcpmd-fmnist": Experiment(
        "fmnist", {**ALPHA, "subset": 6000, "clients": 30, "join": 0.2, "rounds": 200},
        # one participant per round: the same number of participations in six times the rounds
        {**FEDCPMD, "code": {"method": "fedcpmd-code", "rounds": 1200, "eval_every": 100}},
        (1, 2, 3, 4, 5), "lenet5", "fedcpmd-mended",
    ),
    "fedcpmd-cifar10": Experiment(
        "cifar10", {**ALPHA, "subset": 25_000, "clients": 50, "join": 0.1, "rounds": 100}, FEDCPMD, (1, 2, 3),
        "lenet5", "fedcpmd-mended",
    ),
    "fedpc-cifar10": Experiment(
        "cifar10", {**PC, "subset": 10_000, "rounds": 30}, FEDPC, (1,), "lenet5-nobn", "fedpc", scores=True
    ),
    "fedgmh-cifar10": Experiment(
        "cifar10", {**GMH, "partition": "exdir(2,0.5)", "subset": 10_000}, FEDGMH, (0,), "lenet5-nobn", "fedgmh-mended"
    ),
}  # fmt: skip


# ---- runs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """One run."""

    name: str
    row: str
    seed: int
    out: Path = field(compare=False)

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name]

    @property
    def folder(self) -> Path:
        return self.out / self.name / f"{self.row}-{self.seed}"

    @property
    def run(self) -> Run | None:
        """The run, if it has finished."""
        try:
            run = Run(self.folder)
            return run if run.finished else None
        except CoterieError:
            return None

    def make(self, data_dir: Path | None) -> None:
        found = self.experiment
        name, own = found.of(self.row)
        if (self.folder / "settings.json").exists():
            mine = None if isinstance(found.model, str | None) else found.model
            coterie.resume(self.folder, model=mine, workers=1)
            return
        rounds = found.settings["rounds"]
        given = {"eval_every": min(10, rounds), "watch": False, **found.settings, **own, "seed": self.seed}
        coterie.run(name, found.data, found.model, out=self.folder, workers=1, data_dir=data_dir, **given)


def cells(names: list[str], rows: list[str] | None, seeds: list[int] | None, out: Path) -> Iterator[Cell]:
    """Yield the cells, the first seed of every experiment first."""
    most = max(len(EXPERIMENTS[n].seeds) for n in names)
    for at in range(most):
        for name in names:
            own = EXPERIMENTS[name].seeds
            if at < len(own) and (seeds is None or own[at] in seeds):
                chosen = [row for row in EXPERIMENTS[name].rows if rows is None or row in rows]
                yield from (Cell(name, row, own[at], out) for row in chosen)


def work(todo: list[Cell], data_dir: Path | None) -> None:
    """Run the cells one by one; a lock file with the process id keeps other processes from the same cell."""
    for cell in todo:
        lock = cell.out / ".locks" / f"{cell.name}-{cell.row}-{cell.seed}"
        lock.parent.mkdir(parents=True, exist_ok=True)
        if lock.exists() and not Path(f"/proc/{lock.read_text() or 0}").exists():
            lock.unlink(missing_ok=True)
        try:
            with lock.open("x") as f:
                f.write(str(os.getpid()))
        except FileExistsError:
            continue
        try:
            if cell.run is None:
                began = time.process_time()
                cell.make(data_dir)
                print(f"{cell.name} {cell.row} seed {cell.seed}: {time.process_time() - began:.0f} s", flush=True)
        except CoterieError as e:
            print(f"{cell.name} {cell.row} seed {cell.seed}: {e}", flush=True)
        finally:
            lock.unlink(missing_ok=True)


# ---- tables ----------------------------------------------------------------------------------------------------------
VIEWS = {"fedavg-ft": ("global", "trained", "adapted")}
CALLED = {
    ("fedavg-ft", "global"): "FedAvg", ("fedavg-ft", "trained"): "FedAvg, after local training",
    ("fedavg-ft", "adapted"): "FedAvg + fine-tuning", ("text", "personal"): "`reading=text`",
    ("code", "personal"): "`reading=code`", ("received", "personal"): "mended with `use=received`",
    ("local-best", "personal"): "Local-Only, best on validation data",
    ("fedavg-best", "personal"): "FedAvg, best on validation data",
}  # fmt: skip


def table(name: str, out: Path) -> str:
    """Return the finished runs of one experiment."""
    found = EXPERIMENTS[name]
    made = {
        row: {cell.seed: run for seed in found.seeds if (run := (cell := Cell(name, row, seed, out)).run)}
        for row in found.rows
    }
    rows = [
        Row(row, found.of(row)[0], view, runs)
        for row, runs in made.items()
        if runs
        for view in VIEWS.get(row, (found.view, "trained") if row in (*FIVE, found.default) else (found.view,))
        if all(f"{view}/test" in run.events[-1]["eval"] for run in runs.values())
    ]
    parts = []
    for default in [found.default] if found.default else FIVE:
        mine = [r for r in rows if r.title == default and r.view == found.view][:1]
        others = [r for r in rows if found.default or r.title not in FIVE or r.title == default]
        if mine:
            parts.append(_table(mine[0], others, found.scores))
    return f"## {name}\n\n" + "\n\n".join(parts)


def _table(default: Row, rows: list[Row], scores: bool) -> str:
    arena = ControlTable(list(default.runs.values()))
    head = ["method", "seeds", "mean", "sd", f"{default.title} minus it", "95 % interval", "gain / lose"]
    lines = ["| " + " | ".join(head + ["PM(V)", "PM(L)", "GM"] * scores) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    for row in rows:
        pair = pair_of(arena, default, row)
        if pair is None:
            continue
        made = find(row.method)
        title = CALLED.get((row.title, row.view)) or made.card.title + ", after local training" * (
            row.view == "trained"
        )
        d = pair.difference
        text = [title, str(d.seeds), f"{100 * pair.against_mean:.1f}"]
        text.append("" if d.seeds == 1 else f"{100 * pair.against_std:.1f}")
        if (row.title, row.view) == (default.title, default.view):
            text += ["", "", ""]
        else:
            text += [
                f"{100 * d.mean:+.1f}", f"{100 * d.low:+.1f} to {100 * d.high:+.1f}",
                f"{d.gain} / {d.lose} of {d.clients}",
            ]  # fmt: skip
        if scores:
            text += official_scores(row)
        lines.append("| " + " | ".join(text) + " |")
    return "\n".join(lines)


def pair_of(arena: ControlTable, default: Row, row: Row) -> Pair | None:
    arena.opponents = lambda: [(default, [row])]  # type: ignore[method-assign]
    arena.__dict__.pop("pairs", None)
    return next(iter(arena.pairs), None)


def official_scores(row: Row) -> list[str]:
    """Return PM(V), PM(L) and GM, mean over seeds."""
    view = "trained" if row.view == "trained" else "personal"
    try:
        found = [official(run, view=view) for run in row.runs.values()]
    except CoterieError:
        return ["", "", ""]
    names = ("PM(V)", "PM(L)", "GM")
    return [f"{100 * sum(f[n] for f in found) / len(found):.1f}" if n in found[0] else "" for n in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="comma-separated list of experiments")
    parser.add_argument("--rows", help="comma-separated list of rows")
    parser.add_argument("--seeds", help="comma-separated list of seeds")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/five"))
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    names = [n for n in args.only.split(",") if n in EXPERIMENTS]
    seeds = None if args.seeds is None else [int(s) for s in args.seeds.split(",")]
    torch.set_num_threads(1)
    if not args.show:
        rows = None if args.rows is None else args.rows.split(",")
        work(list(cells(names, rows, seeds, args.out)), args.data_dir)
    print("\n\n".join(table(n, args.out) for n in names))


if __name__ == "__main__":
    main()
