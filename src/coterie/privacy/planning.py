"""Plans of differential privacy: noise, rounds and participation for a budget, as numbers and as a figure."""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from coterie.errors import CoterieError
from coterie.privacy.accountant import Releases, epsilon_of, releases_within, sigma_for, tight_epsilon
from coterie.privacy.setting import LARGEST_SIGMA

_SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of the number of planned rounds


@dataclass(frozen=True)
class PrivacyPlan:
    """The facts of a plan, and epsilon for other numbers of rounds and participants."""

    facts: dict[str, float]
    rows: list[dict[str, float]]
    sigma: float
    delta: float
    join: float
    rounds: int
    epsilon: float | None


def make_plan(
    epsilon: float | None,
    sigma: float | None,
    delta: float,
    rounds: int,
    join: float,
    clients: int | None = None,
    values: int | None = None,
    clip: float = 1.0,
) -> PrivacyPlan:
    """Return the plan of a budget, or of an amount of noise; raise CoterieError if a number is out of its range."""
    if epsilon is None and sigma is None:
        raise CoterieError("a plan needs --epsilon or --sigma")
    given = {"epsilon": epsilon, "sigma": sigma, "delta": delta, "join": join, "clip": clip}
    for name, value in given.items():
        top = 1.0 if name in ("delta", "join") else LARGEST_SIGMA
        if value is not None and not (0 < value < top or (name == "join" and value == 1)):
            raise CoterieError(f"{name} = {value:g} is invalid: it must be above 0 and below {top:g}")
    if sigma is None:
        assert epsilon is not None
        sigma = sigma_for(epsilon, delta, join, rounds)
    spent = [Releases(sigma, join, rounds)]
    facts: dict[str, float] = {"sigma": sigma, "epsilon": epsilon_of(spent, delta)}
    if (tight := tight_epsilon(spent, delta)) is not None:
        facts["epsilon of a tighter accountant"] = tight
    facts["epsilon if all clients take part"] = epsilon_of([Releases(sigma, 1.0, rounds)], delta)
    if epsilon is not None:
        facts["rounds within the budget"] = releases_within(epsilon, delta, sigma, join)
    if clients is not None:
        deviation = sigma * clip / (join * clients)
        facts["participants of a round (expected)"] = join * clients
        facts["noise on each value of the mean"] = deviation
        if values is not None:
            facts["noise on the mean / clip"] = deviation * sqrt(values) / clip
    rows = [
        {
            "rounds": max(1, round(share * rounds)),
            **{
                f"join {rate:g}": epsilon_of([Releases(sigma, rate, max(1, round(share * rounds)))], delta)
                for rate in sorted({join / 4, join / 2, join, min(1.0, 2 * join), 1.0})
            },
        }
        for share in _SHARES
    ]
    return PrivacyPlan(facts, rows, sigma, delta, join, rounds, epsilon)


def draw_plan(plan: PrivacyPlan, path: Path) -> list[Path]:
    """Draw epsilon by rounds for several rates of participation; return the files."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.3, 3.7), layout="constrained")
    axes = figure.add_subplot()
    rounds = [row["rounds"] for row in plan.rows]
    for name in [n for n in plan.rows[0] if n != "rounds"]:
        axes.plot(rounds, [row[name] for row in plan.rows], marker="o", label=name)
    if plan.epsilon is not None:
        axes.axhline(plan.epsilon, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel=f"epsilon (sigma {plan.sigma:.3g})")
    axes.legend(frameon=False)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg", ".pdf")]
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=200)
    return files
