"""Big federations: what a round, an evaluation and a checkpoint cost does not grow with the number of clients."""

import time

import numpy as np
import pytest
import torch

from coterie.config import Engine, settings
from coterie.data.dataset import Dataset
from coterie.data.federation import PartitionSettings, federate
from coterie.engine.session import Callbacks, Objects, execute, prepare
from coterie.errors import CoterieError


def _many(clients: int, samples: int) -> Dataset:
    g = torch.Generator().manual_seed(0)
    n = clients * samples
    y = torch.randint(4, (n,), generator=g)
    x = torch.randn(n, 6, generator=g) + y[:, None]
    return Dataset("many", x, y, tuple("abcd"), torch.zeros(n, dtype=torch.bool), torch.arange(n) // samples)


def _session(clients: int = 30, **more):
    base = {"partition": "natural", "min_size": 2, "epochs": 1, "model": "mlp", "join": 6 / clients} | more
    return prepare(
        settings(method="fedrep", data="many", clients=clients, **base),
        Engine(workers=1, state="disk"),
        Objects(dataset=_many(clients, 8)),
    )


def test_eval_clients_scores_the_same_few_every_time_and_changes_nothing_else(tmp_path) -> None:
    all_, few = tmp_path / "all", tmp_path / "few"
    execute(_session(rounds=4, eval_every=2), all_)
    execute(_session(rounds=4, eval_every=2, eval_clients=7), few)
    for name in ("000002.npz", "000004.npz"):
        whole, part = (dict(np.load(f / "eval" / name)) for f in (all_, few))
        assert len(whole["clients"]) == 30 and len(part["clients"]) == 7
        assert np.array_equal(part["clients"], np.sort(part["clients"]))
        rows = np.searchsorted(whole["clients"], part["clients"])
        for key in part:
            assert np.array_equal(part[key], whole[key][rows]), key
    first, last = (np.load(few / "eval" / n)["clients"] for n in ("000002.npz", "000004.npz"))
    assert np.array_equal(first, last)
    states = [sorted(p.name for p in (f / "clients").rglob("*.state")) for f in (all_, few)]
    assert states[0] == states[1]


def test_newcomers_are_picked_apart_so_that_some_are_always_scored(tmp_path) -> None:
    execute(_session(rounds=1, newcomers=10, eval_clients=4), tmp_path / "run")
    found = np.load(tmp_path / "run" / "eval" / "000001.npz")
    assert found["newcomer"].sum() == 4 and len(found["clients"]) == 8


def test_eval_clients_of_nobody_is_refused() -> None:
    with pytest.raises(CoterieError, match="eval_clients"):
        settings(method="fedavg", eval_clients=0)


def test_a_round_writes_only_the_states_of_its_participants(tmp_path) -> None:
    """A checkpoint is incremental: files of clients that did not take part since the last one are left alone."""
    run = tmp_path / "run"
    written: dict[str, int] = {}
    grown: list[int] = []

    def tell(progress) -> None:
        now = {str(p): p.stat().st_mtime_ns for p in (run / "clients").rglob("*.state")}
        grown.append(sum(written.get(k) != v for k, v in now.items()))
        written.update(now)

    execute(_session(rounds=5, checkpoint_every=2), run, Callbacks(on_round=tell))
    assert grown == [6] * 5


@pytest.mark.parametrize(
    "partition",
    [
        "dirichlet(0.5)",
        *(pytest.param(p, marks=pytest.mark.long) for p in ("iid", "shards(2)", "natural", "exdir(2, 1)")),
    ],
)
def test_a_hundred_thousand_clients_are_dealt_in_seconds(partition) -> None:
    more = {"short": "fill"} if partition.startswith("dir") else {}
    s = PartitionSettings(partition=partition, clients=100_000, min_size=2 if partition[0] != "e" else 1, **more)
    data = _many(100_000, 20)
    if partition.startswith("exdir"):
        s = s.model_copy(update={"test_share": 0.25, "clients": 10_000})  # its cap works client by client
    start = time.process_time()
    federation = federate(data, s, 0)
    assert time.process_time() - start < 20
    assert len(federation.clients) == s.clients
