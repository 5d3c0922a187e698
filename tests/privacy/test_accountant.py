"""The accountant beside an independent one, printed values and its own inverse."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.errors import CoterieError
from coterie.privacy import accountant
from coterie.privacy.accountant import Releases, epsilon_of, releases_within, sigma_for, tight_epsilon

pytest.importorskip("opacus")
# epsilon of 22 settings by dp-accounting 0.6.0 of Google: Rényi accountant, and privacy loss distributions
REFERENCE = list(csv.DictReader((Path(__file__).parent / "dp_accounting.csv").read_text().splitlines()))


@pytest.mark.parametrize("row", REFERENCE, ids=lambda r: f"{r['sigma']}-{r['rate'][:5]}-{r['count']}")
def test_epsilon_is_that_of_an_independent_accountant_within_a_percent(row: dict[str, str]) -> None:
    spent = [Releases(float(row["sigma"]), float(row["rate"]), int(row["count"]))]
    epsilon = epsilon_of(spent, float(row["delta"]))
    assert epsilon == pytest.approx(float(row["rdp"]), rel=0.01)
    assert epsilon > float(row["pld"])  # an upper bound


@pytest.mark.parametrize("row", REFERENCE[:2] + REFERENCE[9:11])
def test_the_tight_epsilon_is_that_of_privacy_loss_distributions(row: dict[str, str]) -> None:
    spent = [Releases(float(row["sigma"]), float(row["rate"]), int(row["count"]))]
    assert tight_epsilon(spent, float(row["delta"])) == pytest.approx(float(row["pld"]), rel=0.01)


@pytest.mark.parametrize(("sigma", "sampled", "full"), [(1.0, 7.97, 110.1), (2.0, 2.59, 35.1), (4.0, 1.08, 14.2)])
def test_printed_values_follow_with_whole_orders_and_are_never_exceeded(
    sigma: float, sampled: float, full: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [epsilon_of([Releases(sigma, rate, 100)], 1e-5) for rate in (0.1, 1.0)]
    assert ours[0] <= sampled + 0.005 and ours[1] <= full + 0.05
    monkeypatch.setattr(accountant, "ORDERS", tuple(map(float, range(2, 64))))
    accountant._divergences.cache_clear()
    theirs = [epsilon_of([Releases(sigma, rate, 100)], 1e-5) for rate in (0.1, 1.0)]
    accountant._divergences.cache_clear()
    assert theirs == pytest.approx([sampled, full], rel=0.005)


def test_releases_with_different_noise_add_up() -> None:
    parts = [Releases(2.0, 0.1, 30), Releases(2.0, 0.1, 70)]
    assert epsilon_of(parts, 1e-5) == pytest.approx(epsilon_of([Releases(2.0, 0.1, 100)], 1e-5))
    assert epsilon_of([*parts, Releases(4.0, 1.0, 1)], 1e-5) > epsilon_of(parts, 1e-5)
    assert epsilon_of([], 1e-5) == 0


@pytest.mark.parametrize(("epsilon", "rate", "count"), [(8.0, 0.5, 30), (0.25, 1.0, 40), (1.0, 0.05, 200)])
def test_calibrated_noise_spends_the_budget_and_no_more(epsilon: float, rate: float, count: int) -> None:
    sigma = sigma_for(epsilon, 1e-5, rate, count)
    assert 0.995 * epsilon < epsilon_of([Releases(sigma, rate, count)], 1e-5) <= epsilon
    assert releases_within(epsilon, 1e-5, sigma, rate) in (count, count + 1)


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(CoterieError, match="no amount of noise reaches epsilon = 1e-09"):
        sigma_for(1e-9, 1e-5, 1.0, 10**6)


@pytest.mark.long
def test_loading_the_accountant_leaves_the_log_of_the_program_alone() -> None:
    code = (
        "import logging; from coterie.privacy import accountant as a; a.check_installed(); print(logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
