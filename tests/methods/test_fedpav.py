"""Tests of FedPav."""

import torch

from coterie.core import tree as T
from coterie.core.method import Trained, Upload
from coterie.methods.fedpav import MODEL_DISTANCE
from support.short_runs import CLIENTS, HEAD, play, same, session, state, upload_tree, watch


def test_fedpav_is_fedper_with_one_personal_layer() -> None:
    pav, per = play("fedpav"), play("fedper", own={"layers": 1})
    assert same(pav.server["w"], per.server["w"])
    assert all(same(state(pav, i), state(per, i)) for i in CLIENTS if state(per, i))


def test_fedpav_keeps_the_classifier_on_the_client() -> None:
    _, seen = watch(session("fedpav", own={"cosine_weight": True}))
    for round in seen:
        for u in round:
            assert not HEAD & u.tree.keys() and 0 <= float(u.tree[MODEL_DISTANCE]) <= 2


def test_clients_count_by_the_change_of_their_outputs() -> None:
    method = session("fedpav", own={"cosine_weight": True}).method
    trees = [upload_tree(method, k) for k in (1, 2)]
    for far, share in (((0.3, 0.1), [3.0, 1.0]), ((0.0, 0.5), [0.0, 1.0]), ((0.0, 0.0), [10.0, 30.0])):
        ups = [
            Upload({**t, MODEL_DISTANCE: torch.tensor([d])}, {}, i, n)
            for i, (t, d, n) in enumerate(zip(trees, far, (10, 30), strict=True))
        ]
        assert same(method.aggregate(method.setup(), ups, 1)["w"], T.mean(trees, share))


def test_a_client_that_did_not_train_has_not_changed() -> None:
    s = session("fedpav", own={"cosine_weight": True})
    data = s.federation.data(0)
    start = s.method.begin(s.method.init_client(data), s.method.setup()["w"], data, 1)
    _, sent = s.method.end(s.method.init_client(data), Trained(start.params, start.extras), data, 1)
    assert float(sent.tree[MODEL_DISTANCE]) < 1e-6
