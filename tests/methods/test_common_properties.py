"""Properties that several methods have in common."""

from pathlib import Path

import pytest
import torch

from coterie.cli.words import parents
from coterie.engine import codec
from coterie.methods import find, method_names
from coterie.methods.cfl import CFL
from coterie.methods.cgpfl import CGPFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.methods.fedprox import FedProx
from coterie.methods.fedrep import FedRep
from coterie.methods.fesem import FeSEM
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.pfedme import PFedMe
from coterie.testing import Bench
from support.toy import NORMS, Toy, clients, mlp, models, near, play, same, trainable

EIGHT = [Local, FedAvg, FedProx, FedPer, FedRep, Ditto, FedAMP, CFL]


@pytest.mark.parametrize("cls", [Local, FedPer, FedRep, Ditto])
def test_a_personal_model_does_not_depend_on_other_clients_of_the_same_worker(cls, tmp_path):
    """After one round, a client's state depends on its own data only."""
    data = clients()
    other = Toy([p if i == 2 else (p[0] * -3, p[1].flip(0)) for i, p in enumerate(data.parts)], 3)
    a, b = (play(cls, tmp_path, data=d, rounds=1, model=mlp(True)) for d in (data, other))
    assert codec.equal(a.runtime.states.get(2), b.runtime.states.get(2)) and not codec.equal(
        a.runtime.states.get(1), b.runtime.states.get(1)
    )


@pytest.mark.parametrize("cls", [FedPer, FedRep])
def test_split_methods_share_the_body_and_keep_the_head(cls, tmp_path):
    loop = play(cls, tmp_path, model=mlp(True))
    head = loop.method.ctx.group("head")
    assert head == {"3.weight", "3.bias"} and not head & loop.server["w"].keys()
    assert loop.method.global_model(loop.server) is None
    one, two = models(loop)[0], models(loop)[1]
    assert {k for k in one if not torch.equal(one[k], two[k])} == head


@pytest.mark.parametrize("cls", EIGHT)
def test_nothing_handed_over_is_shared(cls, tmp_path):
    """No tensor of the server, a client or the context shares memory with one of another owner."""
    loop = play(cls, tmp_path, model=mlp(True))
    owners = {"server": loop.server, "context": {"w0": loop.method.ctx.w0}}
    owners |= {f"client {i}": loop.runtime.states.get(i) or {} for i in range(5)}
    seen: dict[int, str] = {}
    for owner, value in owners.items():
        for t in codec.tensors_of(value):
            assert seen.setdefault(t.untyped_storage().data_ptr(), owner) == owner


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("join", [1.0, 0.6])
@pytest.mark.parametrize(
    ("cls", "own", "get"),
    [
        (IFCA, {"groups": 1}, lambda s: s["models"][0]),
        (FeSEM, {"groups": 1}, lambda s: s["centres"][0]),
    ],
)
def test_one_group_is_uniform_fedavg_to_the_bit(cls, own, get, join, norm, tmp_path):
    a = play(cls, tmp_path, own, model=mlp(norm), join=join)
    b = play(FedAvg, tmp_path, model=mlp(norm), join=join, weighting="uniform")
    assert same(get(a.server), b.server["w"])
    assert same(models(a), models(b))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("cls", "get"), [(PFedMe, lambda s: s["w"]), (CGPFL, lambda s: s["contexts"][0])])
def test_without_a_pull_the_shared_model_never_moves(cls, get, norm, tmp_path):
    loop = play(cls, tmp_path, {"lam": 0.0, "steps": 3}, model=mlp(norm))
    ctx = loop.method.ctx
    assert near(trainable(ctx, get(loop.server)), trainable(ctx, ctx.w0))  # near: the mean of equal models is rounded
    assert not near(loop.runtime.states.get(0)["theta"], ctx.w0)


@pytest.mark.long
@pytest.mark.parametrize("timeline", ["new_labels(2)", "move_data(2)"])
def test_every_method_goes_on_when_the_data_change(timeline: str, tmp_path: Path) -> None:
    above = parents({name: find(name) for name in method_names()})
    for name in (n for n in above if not above[n]):
        loop = Bench(find(name), {}).play(tmp_path / name, timeline=timeline)
        assert loop.done == 3, name
