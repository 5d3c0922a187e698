"""Tests of kNN-Per."""

import torch

from support.short_runs import play, same, session, watch


def test_knn_per_trains_as_fedavg_and_without_neighbours_predicts_as_it() -> None:
    s = session("knn-per", own={"share": 0.0})
    loop, _ = watch(s)
    assert same(loop.server["w"], play("fedavg").server["w"])
    data, x = s.federation.data(0), s.federation.test(0).x
    params, store = s.method.personal({}, loop.server["w"], data)
    assert torch.allclose(s.method.predict(params, x, store), s.method.ctx.forward(params, x).log_softmax(1), atol=1e-5)


def test_knn_per_with_one_neighbour_predicts_its_training_labels() -> None:
    s = session("knn-per", own={"share": 1.0, "k": 1})
    data = s.federation.data(1)
    params, store = s.method.personal({}, s.method.ctx.w0, data)
    assert torch.equal(s.method.predict(params, data.train.x, store).argmax(1), data.train.y)


def test_knn_per_chooses_the_first_share_that_is_best_on_validation_data() -> None:
    s = session("knn-per")
    data = s.federation.data(0)
    params, store = s.method.personal({}, s.method.ctx.w0, data)
    hits = [int((s.method.mixed(params, data.val.x, store, i / 10).argmax(1) == data.val.y).sum()) for i in range(11)]
    assert store["share"] == hits.index(max(hits)) / 10
