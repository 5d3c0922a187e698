"""Honest clients' accuracy under attack, with and without robust combining: 10 clients, digits, a small network.

    python benchmarks/robust.py --methods fedavg fedrep ditto --out runs/robust
    python benchmarks/robust.py --methods fedavg --attacks "sign-flip(0.1)" --combiners mean median

Every cell is the mean accuracy of the honest clients' personal models after the last round, in percent, and in brackets
the success of an attack that wants certain classes. Runs that the folder has already are not repeated.
"""

import argparse
import json
from pathlib import Path

import coterie
from coterie.errors import CoterieError

COMBINERS = (
    "mean", "median", "trimmed({share})", "krum({liars})", "multi-krum({liars})", "geometric-median", "norm-clip(1)",
    "centered-clip",
)  # fmt: skip
ATTACKS = (
    "none", "sign-flip({share})", "sign-flip({share}, 5)", "sign-flip({share}, 10)", "sign-flip({share}, 1, 300)",
    "scaled({share}, 10)", "gaussian({share}, 1)", "little-is-enough({share})", "label-flip({share})",
    "backdoor({share}, 0, 5)", "free-rider({share})",
)  # fmt: skip
SETTING = {"data": "digits", "model": "mlp", "clients": 10, "partition": "dirichlet(1.0)", "join": 1.0}


def cell(method: str, attack: str, combiner: str, rounds: int, seed: int, out: Path) -> str:
    """Return the text of one cell, from a run that is made unless the folder has it."""
    given = {"attack": None if attack == "none" else attack, "robust": None if combiner == "mean" else combiner}
    name = "-".join([method, attack, combiner, str(seed)]).replace(" ", "").replace(",", "_")
    folder = out / name
    try:
        if (folder / "settings.json").exists():
            run = coterie.open_run(folder)
            run = run if run.finished else coterie.resume(folder, workers=1)
        else:
            run = coterie.run(
                method, **SETTING, **given, rounds=rounds, seed=seed, eval_every=rounds, watch=False,
                final_trained=False, workers=1, out=folder,
            )  # fmt: skip
    except CoterieError as e:
        return str(e)
    summary = run.summary()
    value = summary["personal"]
    text = "diverged" if value["nonfinite"] == value["clients"] else f"{100 * value['last']:.1f}"
    wants = attack.startswith(("label-flip", "backdoor"))
    return text + (f" ({100 * summary['attack']['last']:.0f})" if wants else "")


def main() -> None:
    """Print one table per method and number of liars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedrep", "ditto"])
    parser.add_argument("--liars", nargs="+", type=int, default=[1, 2], help="liars of ten")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS))
    parser.add_argument("--combiners", nargs="+", default=list(COMBINERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table: dict[str, str] = {}
    for method in args.methods:
        for liars in args.liars:
            words = {"share": f"{liars / 10:g}", "liars": str(liars)}
            attacks = [a.format(**words) for a in args.attacks]
            print(f"\n{method}, {liars} of 10\n\n| combiner | {' | '.join(attacks)} |\n|{'---|' * (len(attacks) + 1)}")
            for combiner in (c.format(**words) for c in args.combiners):
                cells = [cell(method, a, combiner, args.rounds, args.seed, args.out) for a in attacks]
                table |= {f"{method} {combiner} {a}": text for a, text in zip(attacks, cells, strict=True)}
                print(f"| {combiner} | {' | '.join(cells)} |", flush=True)
    (args.out / "table.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
