"""Bytes that methods declare, worked out by hand."""

import pytest

from coterie.core.method import Upload
from coterie.methods.apfl import APFL
from coterie.methods.cd2pfed.method import CD2pFed
from coterie.methods.cfl import CFL
from coterie.methods.cgpfl import CGPFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedcp import FedCP
from coterie.methods.fedgh import FedGH
from coterie.methods.fedgroup import FedGroup
from coterie.methods.fednh import CLASS_COUNTS, FedNH
from coterie.methods.fedper import FedPer
from coterie.methods.fedproto import FedProto
from coterie.methods.fedprox import FedProx
from coterie.methods.fedrep import FedRep
from coterie.methods.fedrod import FedRoD
from coterie.methods.fesem import FeSEM
from coterie.methods.flhc import FLHC
from coterie.methods.gpfl import GPFL
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.perfedavg import PerFedAvg, PerFedAvgHF
from coterie.methods.pfedme import PFedMe
from coterie.methods.prrfl import PRRFL
from support.head_methods import D, K, bound, declared, round_of, scalars
from support.toy import W, events, play


@pytest.mark.parametrize(
    ("cls", "up", "down"),
    [
        (Local, 0, 0),
        *((cls, W, W) for cls in (FedAvg, FedProx, Ditto, FedAMP, CFL)),
        *((cls, W - 21, W - 21) for cls in (FedPer, FedRep)),
    ],
)
def test_bytes_by_hand(cls, up, down, tmp_path):
    for e in events(play(cls, tmp_path, join=0.6)):
        m, book = len(e["participants"]), e["bytes"].get("device-cloud", {})
        assert sum(book.get("up", {}).values()) == 4 * up * m and sum(book.get("down", {}).values()) == 4 * down * m


def test_declared_bytes_of_methods_with_a_second_head_or_model_by_hand() -> None:
    for cls, size in (
        (FedCP, lambda m: scalars(m, "all") + 2 * D * D + 6 * D),
        (FedRoD, lambda m: scalars(m, "all")),
        (GPFL, lambda m: scalars(m, "body") + K * D + 2 * (D * D + 3 * D)),
        (APFL, lambda m: scalars(m, "all")),
    ):
        method, _ = bound(cls)
        assert declared(method, 4) == (4 * size(method), 4 * size(method)), cls


def test_declared_bytes_of_prototype_methods_by_hand() -> None:
    labels = 4
    for cls, up, down in (
        (FedProto, lambda m: labels * D + labels, lambda m: K * D),
        (FedGH, lambda m: labels * D + labels, lambda m: scalars(m, "head")),
        (FedNH, lambda m: scalars(m, "body") + K * D + K, lambda m: scalars(m, "body") + K * D),
    ):
        method, clients = bound(cls)
        assert declared(method, labels) == (4 * up(method), 4 * down(method)), cls
    assert isinstance(round_of(method, clients[0])[2], Upload) and CLASS_COUNTS in round_of(method, clients[0])[2].tree


@pytest.mark.parametrize(
    ("cls", "own", "up", "down"),
    [
        (IFCA, {"groups": 3}, W + 1, 3 * W),
        (FeSEM, {}, W, W),
        (FedGroup, {}, W, W),
        (FLHC, {"warmup": 1}, W, W),
    ],
)
def test_bytes_of_methods_with_clusters_by_hand(cls, own, up, down, tmp_path):
    """Each participant sends and receives four bytes for each scalar."""
    for e in events(play(cls, tmp_path, own, join=0.6))[1:]:
        m = len(e["participants"])
        assert sum(e["bytes"]["device-cloud"]["up"].values()) == 4 * up * m
        assert sum(e["bytes"]["device-cloud"]["down"].values()) == 4 * down * m


@pytest.mark.parametrize("cls", [PFedMe, PerFedAvg, PerFedAvgHF, CGPFL])
def test_bytes_of_methods_with_an_update_of_their_own_by_hand(cls, tmp_path):
    for e in events(play(cls, tmp_path, join=0.6)):
        each = {"model": 4 * W * len(e["participants"])}
        assert e["bytes"]["device-cloud"] == {"up": each, "down": each}


def test_declared_bytes_of_prrfl_and_cd2_by_hand() -> None:
    method, _ = bound(PRRFL)
    assert declared(method, 4) == (4 * (scalars(method, "all") - scalars(method, "bn")),) * 2
    method, _ = bound(CD2pFed, ramp=0.0)
    W, bias = scalars(method, "all"), 10
    assert declared(method, 4) == (4 * ((W - bias) // 2 + bias),) * 2
    assert CD2pFed.card.certainty == "C"
