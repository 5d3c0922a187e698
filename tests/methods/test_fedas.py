"""Tests of FedAS."""

import torch

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.fedas import FISHER
from support.short_runs import bound, jittered, near, same, session, watch


def test_fedas_without_alignment_trains_as_fedper() -> None:
    _, aligned = watch(session("fedas", own={"align_epochs": 0}, rounds=1))
    _, per = watch(session("fedper", rounds=1))
    for a, b in zip(aligned[0], per[0], strict=True):
        assert same(T.drop(a.tree, FISHER.__eq__), b.tree)


def test_fedas_averages_bodies_by_fisher_traces() -> None:
    method = bound("fedas")
    server = method.setup()
    bodies = [jittered(server["w"], i) for i in (1, 2)]
    uploads = [Upload({**b, FISHER: torch.tensor([1.0 + 2 * i])}, {}, i, 10) for i, b in enumerate(bodies)]
    assert near(method.aggregate(server, uploads, 1)["w"], T.mean(bodies, [1, 3]))
    none = [Upload({**b, FISHER: torch.zeros(1)}, {}, i, 10) for i, b in enumerate(bodies)]
    assert near(method.aggregate(server, none, 1)["w"], T.mean(bodies))
