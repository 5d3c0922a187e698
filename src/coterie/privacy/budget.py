"""The budget of a run: epsilon so far, and a ledger of releases that survives crashes.

The noise of a simulation is keyed by the seed: a round that is computed again releases the same values, so the number
of rounds determines epsilon. A real federation draws new noise each time. Every release is therefore written to
privacy.jsonl before it is sent, lines are never removed, and each line counts.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.method import Method
from coterie.privacy.accountant import Releases, epsilon_of
from coterie.privacy.example_level import DeviceNoise
from coterie.privacy.noised_sum import sigma_of_clients
from coterie.privacy.setting import PrivacySetting

LEDGER = "privacy.jsonl"


def count_lines(path: Path) -> int:
    """Return the number of releases in a ledger; an incomplete last line counts too."""
    return len([line for line in path.read_bytes().split(b"\n") if line.strip()]) if path.exists() else 0


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """Append a line to a ledger and wait until it is on the disk."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("ab") as f:
        f.write((b"\n" if torn else b"") + json.dumps(fields).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


@dataclass
class ClientBudget:
    """The budget that a run with `dp = client(...)` has spent."""

    setting: PrivacySetting
    method: Method
    ledger: Path | None = None  # None: a simulation, whose rounds are releases
    spent: int = field(init=False)  # releases

    def __post_init__(self) -> None:
        self.spent = 0 if self.ledger is None else count_lines(self.ledger)

    @property
    def _sigma(self) -> float:
        return sigma_of_clients(self.setting, self.method)

    def epsilon(self, releases: int) -> float:
        """Return the epsilon of this many releases."""
        return epsilon_of([Releases(self._sigma, self.method.ctx.join, releases)], self.setting.delta)

    def go_to(self, round: int) -> None:
        """Continue a simulation after this round."""
        if self.ledger is None:
            self.spent = max(0, round)

    def spend(self, round: int) -> None:
        """Count the release of a round; it must be called before the result of the round is sent."""
        if round < 1:
            return
        if self.ledger is None:
            self.spent = round
            return
        append_line(self.ledger, {"round": round, "sigma": self._sigma, "rate": self.method.ctx.join})
        self.spent = count_lines(self.ledger)

    def over(self) -> str:
        """Return why a further round is not possible; empty if it is."""
        budget = self.setting.epsilon
        if budget is None or self.epsilon(self.spent + 1) <= budget:
            return ""
        return (
            f"the privacy budget epsilon = {budget:g} is spent: it is {self.epsilon(self.spent):.3g} after "
            f"{self.spent} releases, and a further one would exceed it"
        )

    def facts(self) -> dict[str, Any]:
        """Return what was spent, for the log."""
        return {
            "unit": self.setting.unit,
            "epsilon": round(self.epsilon(self.spent), 6),
            "delta": self.setting.delta,
            "sigma": round(self._sigma, 6),
            "releases": self.spent,
            **({} if self.setting.epsilon is None else {"budget": self.setting.epsilon}),
        }


@dataclass
class DeviceBudgets:
    """The largest budget that a client of a run with `dp = example(...)` or `dp = local(...)` has spent.

    Every client has its own budget, and adds its noise itself. Each device of a real federation keeps its own ledger.
    """

    setting: PrivacySetting
    noises: Sequence[DeviceNoise] = ()  # different noises of clients; empty in the cloud of a real federation
    spent: int = 0  # rounds

    def go_to(self, round: int) -> None:
        """Continue a run after this round."""
        self.spent = max(0, round)

    def spend(self, round: int) -> None:
        """Count a round."""
        self.spent = max(0, round)

    def over(self) -> str:
        """Return why a further round is not possible; empty if it is."""
        return next((why for noise in self.noises if (why := noise.over(self.spent))), "")

    def facts(self) -> dict[str, Any]:
        """Return what a client has spent at most, for the log: the one with the largest epsilon, in all rounds."""
        dp, known = self.setting, [noise.epsilon(self.spent) for noise in self.noises]
        sigmas = [noise.sigma for noise in self.noises]
        return {
            "unit": dp.unit,
            **({"epsilon": round(max(known), 6), "sigma": round(max(sigmas), 6)} if known else {}),
            "delta": dp.delta,
            "releases": self.spent,
            **({} if dp.epsilon is None else {"budget": dp.epsilon}),
        }
