"""Plans: from epsilon to noise and back, bad numbers, and the figure."""

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CoterieError
from coterie.privacy.planning import draw_plan, make_plan

pytest.importorskip("opacus")


def test_a_plan_goes_from_epsilon_to_noise_and_back(tmp_path: Path) -> None:
    there = make_plan(4.0, None, 1e-5, 20, 0.5, clients=100, values=400, clip=0.5)
    back = make_plan(None, there.sigma, 1e-5, 20, 0.5)
    assert back.facts["epsilon"] == there.facts["epsilon"] == pytest.approx(4.0, rel=0.005)
    assert there.facts["epsilon of a tighter accountant"] < there.facts["epsilon"]
    assert there.facts["rounds within the budget"] == 20
    assert there.facts["noise on each value of the mean"] == there.sigma * 0.5 / 50
    assert there.facts["noise on the mean / clip"] == pytest.approx(there.sigma * 20 / 50)
    same = next(row for row in there.rows if row["rounds"] == 20)
    assert same["join 0.5"] == there.facts["epsilon"] < same["join 1"]
    assert [f.suffix for f in draw_plan(there, tmp_path / "plan")] == [".png", ".svg", ".pdf"]


@pytest.mark.parametrize(("given", "words"), [
    ({"epsilon": None}, "a plan needs --epsilon or --sigma"),
    ({"epsilon": 0.0}, "epsilon = 0 is invalid"),
    ({"delta": 1.0}, "delta = 1 is invalid"),
    ({"join": 1.5}, "join = 1.5 is invalid"),
])  # fmt: skip
def test_bad_numbers_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        make_plan(**{"epsilon": 1.0, "sigma": None, "delta": 1e-5, "rounds": 10, "join": 0.5, **given})
