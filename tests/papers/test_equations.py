"""The map from equations and algorithm lines of the five papers to functions, read from the code."""

import json
import tomllib
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import CoterieError
from coterie.papers import equations
from coterie.papers.equations import equation_map, paper_of, places
from coterie.papers.presets import PAPERS

COUNTS = {  # equations, and lines of each algorithm, as counted in the papers
    "fedcpmd": (13, {1: 6, 2: 14, 3: 14}),
    "fedpc": (8, {1: 20}),
    "fedgmh": (11, {1: 7, 2: 14}),
    "ecs-fl": (12, {1: 6, 2: 15}),
    "sc-fpfl": (19, {1: 16}),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_equation_and_algorithm_line_is_listed_once(paper: str) -> None:
    about = tomllib.loads(files("coterie.papers").joinpath(f"equations/{paper}.toml").read_text())
    found = (len(about["equations"]), {int(k): len(v) for k, v in about["algorithms"].items()})
    assert found == COUNTS[paper]
    lines = equation_map(paper)
    assert len({e.place for e in lines}) == len(lines) == found[0] + sum(found[1].values())
    assert not [e.name for e in lines if e.functions and e.reason], "a line with a function needs no reason"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_equation_and_line_has_a_function_or_a_reason(paper: str) -> None:
    assert not [e.name for e in equation_map(paper) if not e.functions and not e.reason]


def test_marks_are_read_as_sentences_write_them() -> None:
    assert places("see equation (5)", "") == [(0, 5)]
    assert places("Equations (5) and (6), then equations (6)\n    to (8)", "") == [(0, n) for n in (5, 6, 6, 7, 8)]
    assert places("Algorithm 2, line 4", "") == [(2, 4)]
    assert places("Algorithm 3, lines 5 to 8, and algorithm 1, lines 1, 3 and 5", "") == [
        (3, 5), (3, 6), (3, 7), (3, 8), (1, 1), (1, 3), (1, 5),
    ]  # fmt: skip
    assert places("FedCAC's equation (3)", "") == [] and places("FedCAC's equation (3)", "FedCAC") == [(0, 3)]
    assert places("an algorithm with 2 lines (5)", "") == []


def test_a_mark_belongs_to_the_innermost_function_around_it() -> None:
    source = '"""Module, equation (1)."""\n\n\nclass A:\n    """Equation (2)."""\n\n    def f(self) -> None:\n'
    source += "        x = 1  # equation (3)\n\n        # equations (4)\n        # to (6)\n        return x\n"
    found = {place: name for name, text in equations._texts(source) for place in places(text, "") if name}
    assert found == {(0, 2): "A", **{(0, n): "A.f" for n in (3, 4, 5, 6)}}


def test_a_number_that_the_paper_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equations, "_marks", lambda paper: {(0, 99): ["text.py: f"]})
    with pytest.raises(CoterieError, match=r"FedPC has no equation or line \(0, 99\).*text.py: f"):
        equation_map("fedpc")


def test_a_variant_has_its_papers_equations_and_other_methods_have_none() -> None:
    assert paper_of("fedcpmd-random") == "fedcpmd" and paper_of("ecs-fl-random") == "ecs-fl"
    with pytest.raises(CoterieError, match="fedavg is not a method of the papers"):
        paper_of("fedavg")


def test_show_prints_the_map() -> None:
    done = CliRunner().invoke(app, ["show", "fedcpmd", "--equations", "--json"])
    lines = {e["name"]: e for e in json.loads(done.output)}
    assert any(f.startswith("mixing.py: ") for f in lines["(13)"]["functions"]) and not lines["(13)"]["reason"]
    assert lines["(1)"]["functions"] == [] and lines["(1)"]["reason"]
    shown = CliRunner().invoke(app, ["show", "fedcpmd", "--equations"]).output
    assert "(13)" in shown and "mixing.py" in shown
