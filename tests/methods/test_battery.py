"""Every registered method passes the common battery; its variants and the dearest checks run in `make test-all`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coterie.core import tree as T
from coterie.core.context import ClientData, State
from coterie.core.method import Method, Moment, Trained, Upload
from coterie.core.schema import Entry, Link, Schema
from coterie.methods import method_names
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedrod import FedRoD
from coterie.testing import CHECKS, check
from support.methods import METHODS

# these checks train for longer; the quick tests run them for the five papers' methods and a method of each kind
DEAR = (
    "learns_a_small_task",
    "permuting_ids_permutes_results",
    "numbers_are_learned_or_refused",
    "a_newcomer_gets_a_model",
    "label_information_is_declared",
)
TRAINED = (
    "fedavg", "fedrep", "ditto", "ifca", "fedproto", "apfl", "scaffold", "autopilot",
    "fedcpmd", "fedpc", "fedgmh", "ecs-fl", "sc-fpfl",
)  # fmt: skip


def marks(method, name):
    """Return the marks of a check: the checks of a method run in one process, where they share a run."""
    quick = method in METHODS and (name not in DEAR or method in TRAINED)
    return [pytest.mark.xdist_group(method), *([] if quick else [pytest.mark.long])]


CASES = [pytest.param(m, name, marks=marks(m, name), id=f"{m}-{name}") for m in method_names() for name in CHECKS]


OWN: dict[tuple[str, str], dict[str, Any]] = {
    # its assignment names layers in the order of clients
    ("fedcpmd-assigned", "permuting_ids_permutes_results"): {"assignment": ["fc1"] * 5},
    # it trains one client of each cluster in a round, which is more if the clusters begin early
    ("fedcpmd-code", "learns_a_small_task"): {"preparation": 0.1},
}


@pytest.mark.parametrize(("method", "name"), CASES)
def test_battery(method: str, name: str) -> None:
    check(method, name, **OWN.get((method, name), {}))


class _Undeclared(FedRoD):
    """FedRoD, which sends the rows of absent classes back unchanged, with the schema of a plain model."""

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self.model_schema


class _Counts(FedAvg):
    """FedAvg that also sends numbers of samples per class, declared as a statistic."""

    def schema(self, link: Link, now: Moment | None = None) -> Schema:
        return self.model_schema | Schema({"x:n": Entry((10,), kind="statistic", part="n")} if link == "up" else {})

    def end(self, state: State, trained: Trained, data: ClientData, round: int) -> tuple[State, Upload]:
        state, upload = super().end(state, trained, data, round)
        return state, Upload({**upload.tree, "x:n": data.label_counts.float()})

    def aggregate(self, server: State, uploads: Sequence[Upload], round: int) -> State:
        return super().aggregate(server, [replace(u, tree=T.drop(u.tree, "x:n".__eq__)) for u in uploads], round)


@pytest.mark.parametrize(("method", "way"), [(_Undeclared, "rows that came back unchanged"), (_Counts, "counts")])
def test_label_information_under_another_name_is_found(method: type[Method], way: str) -> None:
    with pytest.raises(AssertionError, match=f"shows which classes a client has .*{way}"):
        check(method, "label_information_is_declared")
