"""Tests of Floco."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from coterie.methods.floco import on_simplex, placed, riesz
from coterie.testing import CHECKS, check
from support.short_runs import session, watch


def test_floco_projects_onto_the_simplex() -> None:
    points = np.array([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [-1.0, 0.4, 0.5]])
    found = on_simplex(points, 1.0)
    assert np.allclose(found, [[0.2, 0.3, 0.5], [1, 0, 0], [0, 0.45, 0.55]])


def test_floco_places_clients_in_the_simplex_as_evenly_as_it_can() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(2, 30))
    updates = np.stack([centres[i % 2] + 0.01 * rng.normal(size=30) for i in range(6)])
    at = placed(updates, 4)
    assert np.allclose(at.sum(1), 1) and (at >= 0).all()
    tried = [on_simplex(PCA(4).fit_transform(updates), z) / z for z in (0.001, 0.01, 0.1, 0.3, 1.0)]
    assert all(riesz(at) <= riesz(t) * 1.001 for t in tried)
    assert np.allclose(placed(updates[:1], 4), 0.25)


def test_floco_asks_all_clients_in_the_round_of_placement_and_trains_around_the_places_later() -> None:
    s = session("floco", own={"tau": 2, "endpoints": 3, "rho": 0.0}, rounds=3, join=0.4)
    loop, seen = watch(s)
    assert [len(u) for u in seen] == [2, 5, 2] and sorted(loop.server["places"]) == list(range(5))
    place = loop.server["places"][0]
    params, extras = s.method.personal({}, s.method.down(loop.server, [0], 4).to(0), s.federation.data(0))
    weight = sum(p * w for p, w in zip(place, loop.server["w"]["x:endpoints"], strict=True))
    assert not extras and torch.allclose(params["classifier.weight"], weight, atol=1e-6)
    assert float(place.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.long  # without the check of permuted ids: points are drawn by client id
@pytest.mark.parametrize("name", [n for n in CHECKS if n != "permuting_ids_permutes_results"])
def test_floco_passes_the_battery_after_its_placement(name: str) -> None:
    check("floco", name, tau=1, endpoints=3)
