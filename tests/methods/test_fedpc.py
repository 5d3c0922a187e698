"""FedPC: its properties, numbered (13 is in test_paper_metrics), and its settings."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_rand_score
from torch import nn

from coterie import testing
from coterie.core import tree as T
from coterie.core.edges import Edge
from coterie.core.method import Batch, Download, Moment, Trained, Upload
from coterie.core.states import typed
from coterie.errors import CoterieError
from coterie.methods.fedpc import prototypes as M
from coterie.methods.fedpc.contrast import contrast_loss, rehearsal, rehearsal_loss
from coterie.methods.fedpc.mended import FedPCMended
from coterie.methods.fedpc.text import FedPC
from coterie.methods.fedpc.variants import FedPCJ1, FedPCMean, FedPCNoMixing, FedPCNoProto, FedPCRandom
from coterie.methods.fedper import FedPer
from coterie.methods.stored import SERVERS
from coterie.models.registry import build_model as build_model
from coterie.parts.prototypes import Prototypes, class_means
from support.refusals import refuses
from support.toy import Toy, begin, bind, clients, events, near, open_toy, play, same

D, K = 6, 3  # of the toy's model
THETA = 4 * 6 + 6
BODY = ("0.weight", "0.bias")


def sets(groups, classes=K, seed=0, mask=None) -> Prototypes:
    value = torch.rand(groups, classes, D, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(groups, classes, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Prototypes(value * mask[..., None], mask)


def bodies(groups, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return {"0.weight": torch.randn(groups, 6, 4, generator=rng), "0.bias": torch.randn(groups, 6, generator=rng)}


def bare(tree):
    return T.drop(tree, lambda name: name.startswith("x:"))


def opened(method, data, order=None):
    """The server after round 0 with these clients, whose uploads come under their numbers in `order`."""
    order = order or list(range(len(data.parts)))
    ups = []
    for number, i in enumerate(order):
        client = data.data(i)
        params, extras = method.begin(method.init_client(client), method.ctx.w0, client, 0).model
        ups.append(
            Upload(method.end(method.init_client(client), Trained(params, extras), client, 0)[1].tree, sender=number)
        )
    return method.aggregate(method.setup(), ups, 0)


def blocks(n=8, seed=0) -> Toy:
    """Clients with classes 0-4 or 5-9, alternating; inputs depend on the class only a little."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        y = torch.randint(0, 5, (60,), generator=rng) + 5 * (i % 2)
        parts.append((torch.randn(60, 4, generator=rng) + 0.1 * y[:, None], y))
    return Toy(parts, 10)


def ten() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 10))


# ---- mixing ----------------------------------------------------------------------------------------------------------
def test_1_rho_is_row_stochastic_and_a_group_counts_most_to_itself(tmp_path: Path) -> None:
    trained = play(FedPC, tmp_path, {"J": 3}, rounds=2).server.rho
    for rho in (trained, FedPC().group_weights(sets(5))):
        assert (rho >= 0).all() and torch.allclose(rho.sum(1), torch.ones(len(rho)).double())
        assert (rho.diagonal() >= rho.max(1).values - 1e-12).all()
        assert not torch.allclose(rho, rho.diagonal().diag())


def test_2_one_group_averages_plainly(tmp_path: Path) -> None:
    loop = begin(open_toy(FedPCJ1, tmp_path))
    loop.step()
    seen = []
    merge = loop.method.merge

    def spy(edge, ups, round):
        seen.extend(ups)
        return merge(edge, ups, round)

    loop.method.merge = spy
    loop.step()
    loop.folder.close()
    assert len(seen) == 5 and loop.server.rho.tolist() == [[1.0]]
    plain = T.mean([T.keep(u.tree, BODY.__contains__) for u in seen])
    assert near(T.row(loop.server.body, 0), plain)
    for k in range(K):
        rows = [u.tree["x:prototypes"][u.tree["x:ids"] == k] for u in seen]
        assert torch.allclose(loop.server.value[0, k], torch.cat(rows).mean(0), atol=1e-6)


def test_2_one_group_without_pull_is_fedper_with_uniform_weights(tmp_path: Path) -> None:
    ours = play(FedPCJ1, tmp_path, {"alpha": 1.0, "gamma": 0.0}, rounds=3, join=0.6)
    other = play(FedPer, tmp_path, rounds=3, join=0.6, weighting="uniform")
    assert same(T.row(ours.server.body, 0), other.server["w"])
    for i in range(5):
        a, b = ours.runtime.states.get(i), other.runtime.states.get(i)
        assert a is None or b is None or same(a["own"], b["own"])


def test_3_groups_with_identical_prototypes_get_the_same_model() -> None:
    method, one = bind(FedPC), sets(1)
    alike = Prototypes(one.value.expand(4, K, D), one.mask.expand(4, K))
    server = method.mixed(method.setup(), bodies(4), alike)
    assert torch.allclose(server.rho, torch.full((4, 4), 0.25).double())
    mean = T.mean([T.row(bodies(4), j) for j in range(4)])
    assert all(near(T.row(server.body, j), mean) for j in range(4))


def test_4_orthogonal_prototypes_or_no_common_class_mean_no_mixing() -> None:
    method = bind(FedPC)
    value = torch.zeros(2, K, D)
    value[0, :, 0] = value[1, :, 1] = 1
    for protos in (Prototypes(value, torch.ones(2, K) > 0), sets(2, mask=[[True, False, False], [False, True, True]])):
        server = method.mixed(method.setup(), bodies(2), protos)
        assert torch.equal(server.rho, torch.eye(2).double()) and same(server.body, bodies(2))
        assert torch.equal(server.mask, protos.mask) and torch.allclose(server.value, protos.value)


def test_5_scaling_the_prototypes_of_a_group_leaves_rho() -> None:
    protos = sets(4)
    scaled = Prototypes(protos.value * torch.tensor([1.0, 7.0, 1.0, 0.01])[:, None, None], protos.mask)
    weights = FedPC().group_weights
    assert torch.allclose(weights(protos), weights(scaled), atol=1e-6)


def test_12_mixtures_are_sums_by_rho_and_prototypes_over_the_groups_that_hold_the_class() -> None:
    body, protos = bodies(3), sets(3, mask=[[True, True, False], [True, False, True], [True, True, True]])
    method = bind(FedPC)
    server = method.mixed(method.setup(), body, protos)
    rho = server.rho.float()
    assert near(server.body, {k: torch.einsum("jq,q...->j...", rho, v) for k, v in body.items()})
    two = (rho[:, [0, 2]] @ protos.value[[0, 2], 1]) / rho[:, [0, 2]].sum(1, keepdim=True)  # class 1: groups 0 and 2
    assert torch.allclose(server.value[:, 1], two, atol=1e-6) and server.mask.all()


def test_12_mixing_uses_the_snapshot_so_that_order_does_not_matter() -> None:
    method, order = bind(FedPC), torch.tensor([2, 0, 3, 1])
    protos, body = sets(4), bodies(4)
    plain = method.mixed(method.setup(), body, protos)
    other = {k: v[order] for k, v in body.items()}
    turned = method.mixed(method.setup(), other, Prototypes(*(t[order] for t in protos)))
    assert near({k: v[order] for k, v in plain.body.items()}, turned.body)
    assert torch.allclose(plain.value[order], turned.value, atol=1e-6)


def test_a_group_without_participants_enters_with_what_it_has() -> None:
    method = bind(FedPCNoMixing)
    server = replace(method.mixed(method.setup(), bodies(3), sets(3)), groups={0: 0, 1: 1, 2: 2})
    new = T.row(bodies(1, seed=9), 0)
    one = Prototypes(*(t[0] for t in sets(1, seed=9)))
    up = Upload({**new, **M.to_payload(one)}, sender=1)
    after = method.aggregate(server, [up], 1)
    assert same(T.row(after.body, 1), new)
    assert all(same(T.row(after.body, j), T.row(server.body, j)) for j in (0, 2))
    assert not near(T.row(bind(FedPC).aggregate(server, [up], 1).body, 0), T.row(server.body, 0))


def test_mean_mixing_gives_all_groups_one_model(tmp_path: Path) -> None:
    body = play(FedPCMean, tmp_path, {"J": 3}, rounds=1).server.body
    assert all(near(T.row(body, 0), T.row(body, j)) for j in (1, 2))


# ---- clustering ------------------------------------------------------------------------------------------------------
def test_6_prototypes_are_class_means_whatever_batch_size_and_order() -> None:
    method, data = bind(FedPC), clients().data(3)
    protos, counts = M.own_prototypes(method.ctx, method.ctx.w0, data, "post_relu")
    z = method.ctx.features(method.ctx.w0, data.train.x)
    for k in data.train.y.unique().tolist():
        assert torch.allclose(protos.value[k], z[data.train.y == k].mean(0), atol=1e-6)
        assert int(counts[k]) == int((data.train.y == k).sum())
    turn = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    other = Toy([(data.train.x[turn], data.train.y[turn])], K).data(0)
    again, _ = M.own_prototypes(bind(FedPC, batch=1).ctx, method.ctx.w0, other, "post_relu")
    assert torch.allclose(again.value, protos.value, atol=1e-6) and torch.equal(again.mask, protos.mask)


def test_7_clustering_ignores_the_order_of_clients_and_keeps_identical_ones_together() -> None:
    data = blocks()
    twin = Toy([*data.parts, data.parts[3]], 10)
    method = bind(FedPC, model=ten(), data=twin)
    plain = opened(method, twin).groups
    order = [5, 0, 8, 3, 1, 7, 2, 6, 4]
    turned = opened(method, twin, order).groups
    assert adjusted_rand_score([turned[order.index(i)] for i in range(9)], [plain[i] for i in range(9)]) == 1
    for J in (2, 4, 7):
        groups = opened(bind(FedPC, {"J": J}, model=ten(), data=twin), twin).groups
        assert groups[3] == groups[8] and len(set(groups.values())) == J


def test_8_two_disjoint_label_blocks_are_separated_by_two_groups() -> None:
    for own in ({"J": 2}, {}):
        groups = opened(bind(FedPC, own, model=ten(), data=blocks()), blocks()).groups
        assert adjusted_rand_score([groups[i] for i in range(8)], [i % 2 for i in range(8)]) == 1


def test_more_groups_than_clients_get_a_sentence() -> None:
    bind(FedPC, {"J": 5})
    with pytest.raises(CoterieError, match="J = 6 groups cannot be made of 5 clients"):
        bind(FedPC, {"J": 6})


def test_random_groups_have_the_same_sizes_and_do_not_depend_on_numbers() -> None:
    data = blocks()
    cluster, chance = (opened(bind(c, {"J": 3}, model=ten(), data=data), data).groups for c in (FedPC, FedPCRandom))
    sizes = [sorted(list(g.values()).count(j) for j in range(3)) for g in (cluster, chance)]
    assert sizes[0] == sizes[1] and adjusted_rand_score(list(cluster.values()), list(chance.values())) < 1
    order = [3, 0, 7, 1, 2, 6, 5, 4]
    turned = opened(bind(FedPCRandom, {"J": 3}, model=ten(), data=data), data, order).groups
    assert adjusted_rand_score([turned[order.index(i)] for i in range(8)], [chance[i] for i in range(8)]) == 1


@pytest.mark.parametrize("missing", ["zero", "mean", "masked"])
def test_who_missed_round_0_sends_its_prototypes_and_joins_the_nearest_group(missing: str) -> None:
    data = blocks()
    method = bind(FedPC, {"J": 2, "missing": missing}, model=ten(), data=data)
    server = opened(method, Toy(data.parts[:5], 10))  # clients 0, 2, 4 have classes 0-4: the largest group
    assert set(server.groups) == set(range(5)) and server.largest == server.groups[0]
    for i in (5, 6, 7):
        assert same(method.down(server, [i], 1).to(i), method.ctx.w0)
        ups = answered(method, data, [i], server, 1)
        assert set(ups[0].tree) == {"x:prototypes", "x:ids"}
        server = method.aggregate(server, ups, 1)
        assert server.groups[i] == server.groups[i % 2] and i in method.edges(server)[server.groups[i % 2]]


def test_an_asked_client_does_not_train_and_keeps_its_state() -> None:
    method, data = bind(FedPCMended, {"J": 2}, model=ten(), data=blocks()), blocks()
    client = data.data(5)
    state = method.init_client(client)
    start = method.begin(state, method.ctx.w0, client, 3)
    assert not start.train and method.end(state, Trained(start.params, start.extras), client, 3)[0] is state


def test_a_newcomer_uses_the_nearest_group_and_without_samples_the_largest() -> None:
    data = blocks()
    method = bind(FedPC, {"J": 2, "inter": "none"}, model=ten(), data=data)
    server = opened(method, Toy(data.parts[:5], 10))
    apart = {k: (v + 1) * torch.tensor([1.0, 2.0]).view(2, *[1] * (v.ndim - 1)) for k, v in server.body.items()}
    server = replace(server, body=apart)
    sent = method.deliver(server, [0, 99], 4)
    assert 0 not in sent.each
    method.schema("down").check(sent.each[99], "the download")
    for i in (5, 6):
        client = data.data(i)
        model = method.personal(method.init_client(client), sent.each[99], client)
        start = method.begin(method.init_client(client), sent.each[99], client, 4)
        j = server.groups[i % 2]
        assert same(T.keep(model.params, BODY.__contains__), T.row(server.body, j)) and start.train
        assert torch.equal(start.extras["received"].value, server.value[j])
    empty = Toy([(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))], 10).data(0)
    model = method.personal(method.init_client(empty), sent.each[99], empty)
    assert same(T.keep(model.params, BODY.__contains__), T.row(server.body, server.largest))


# ---- the client ------------------------------------------------------------------------------------------------------
def pull(protos: Prototypes, batch: Batch, **own):
    method = bind(FedPC, {"reading": "text", "alpha": 0.0, "gamma": 1.0, **own})
    params = {k: v.clone().requires_grad_() for k, v in method.ctx.w0.items()}
    loss = method.loss(params, batch, {"received": protos})
    slope = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return float(loss.detach()), [g for g in slope if g is not None]


def test_9_the_pull_is_zero_exactly_at_the_prototypes_with_a_finite_gradient() -> None:
    data, method = clients().data(3), bind(FedPC)
    batch = Batch(*data.train)
    here, _ = M.own_prototypes(method.ctx, method.ctx.w0, data, "post_relu")
    loss, slope = pull(here, batch)
    assert 0 <= loss < 1e-5 and all(torch.isfinite(g).all() for g in slope)
    away = Prototypes(here.value + torch.eye(K, D)[[0]] * 0.5, here.mask)
    assert pull(away, batch)[0] == pytest.approx(0.5 * int(here.mask.sum()), rel=1e-4)  # Euclidean, not squared


def test_10_absent_classes_add_nothing_to_loss_group_or_cosine() -> None:
    batch = Batch(*clients().data(3).train)
    held, junk = sets(1, mask=[[True, False, True]]), 100 * torch.rand(K, D)
    dirty = Prototypes(torch.where(held.mask[0][:, None], held.value[0], junk), held.mask[0])
    assert pull(dirty, batch)[0] == pull(Prototypes(held.value[0], held.mask[0]), batch)[0]
    assert pull(Prototypes(junk, torch.zeros(K) > 0), batch)[0] == 0
    only = Batch(batch.x[batch.y == batch.y[0]], batch.y[batch.y == batch.y[0]])
    moved = torch.where(torch.arange(K)[:, None] == only.y[0], sets(1).value[0], junk)
    assert pull(Prototypes(moved, torch.ones(K) > 0), only)[0] == pull(Prototypes(*(t[0] for t in sets(1))), only)[0]
    two = sets(2, mask=[[True, True, False], [False, True, False]])
    trees = [M.to_payload(Prototypes(v, m)) for v, m in zip(*two, strict=True)]
    mean = M.group_mean(trees, K, D)
    assert mean.mask.tolist() == [True, True, False] and torch.equal(mean.value[0], trees[0]["x:prototypes"][0])
    partly = sets(2, mask=[[True, True, False], [True, True, True]])
    noise = torch.zeros(2, K, D)
    noise[0, 2] = 50
    loud = Prototypes(partly.value + noise, partly.mask)
    assert torch.equal(FedPC().group_weights(partly), FedPC().group_weights(loud))


def collapsed(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One feature for everybody, four samples of each class."""
    return torch.rand(1, D, generator=rng).expand(4 * K, D), torch.arange(K).repeat(4)


def test_contrast_is_the_cross_entropy_of_cosines() -> None:
    z, y, protos = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([0, 1]), torch.eye(2)
    here = Prototypes(protos, torch.ones(2) > 0)
    cosines = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    assert contrast_loss(z, y, here, 0.5).item() == pytest.approx(F.cross_entropy(cosines / 0.5, y).item(), rel=1e-5)
    doubled = Prototypes(7 * protos, here.mask)
    assert contrast_loss(3 * z, y, doubled, 0.5).item() == pytest.approx(
        contrast_loss(z, y, here, 0.5).item(), rel=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_collapsed_network_has_the_largest_possible_contrast(seed: int) -> None:
    """At one point it is at least log K for any prototypes; with prototypes of its own no other network reaches it."""
    rng = torch.Generator().manual_seed(seed)
    z, y = collapsed(rng)
    everything = torch.ones(K) > 0
    for protos in (torch.rand(K, D, generator=rng), z[:K]):
        assert contrast_loss(z, y, Prototypes(protos, everything), 0.5) >= math.log(K) - 1e-6
    assert contrast_loss(z, y, Prototypes(z[:K], everything), 0.5).item() == pytest.approx(math.log(K), rel=1e-5)
    spread = torch.rand(4 * K, D, generator=rng) + torch.eye(K, D)[y]
    assert contrast_loss(spread, y, class_means(spread, y, K), 0.5) < math.log(K)


def test_rehearsal_is_the_cross_entropy_of_the_classifier_on_the_prototypes_that_are_there() -> None:
    rng = torch.Generator().manual_seed(2)
    value, w, b = (torch.rand(*shape, generator=rng) for shape in ((K, D), (K, D), (K,)))
    w.requires_grad_()
    two = Prototypes(value, torch.arange(K) < 2)
    want = F.cross_entropy(value[:2] @ w.T + b, torch.tensor([0, 1]))
    assert rehearsal_loss(w, b, rehearsal(two)).item() == pytest.approx(want.item(), rel=1e-5)
    assert rehearsal_loss(w, b, rehearsal(Prototypes(value, torch.zeros(K) > 0))).item() == 0.0
    (grad,) = torch.autograd.grad(rehearsal_loss(w, None, rehearsal(two)), w)
    assert (grad[2] > 0).all()  # a class without prototype is only pushed down, by positive features


def test_mended_a_classifier_keeps_a_class_that_its_client_lacks() -> None:
    """One step on samples of class 0 lowers the logit of class 1 at its prototype; rehearsal raises it."""
    protos = Prototypes(torch.eye(K, D), torch.ones(K) > 0)
    for share, rises in ((FedPCMended.Settings().rehearsal, True), (0.0, False)):
        w = torch.zeros(K, D, requires_grad=True)
        z = torch.eye(K, D)[:1] + 0.3
        loss = F.cross_entropy(z @ w.T, torch.zeros(1, dtype=torch.int64))
        loss = loss + (20 * share) * rehearsal_loss(w, None, rehearsal(protos))
        (grad,) = torch.autograd.grad(loss, w)
        assert bool(-(grad @ protos.value[1])[1] > 0) == rises


def test_contrast_leaves_out_absent_classes_and_padding_with_finite_gradients() -> None:
    rng = torch.Generator().manual_seed(0)
    z, y = torch.rand(6, D, generator=rng), torch.tensor([0, 1, 2, 0, 1, 2])
    value, mask = torch.rand(K, D, generator=rng), torch.tensor([True, True, False])
    here = y != 2
    whole = contrast_loss(z, y, Prototypes(value, mask), 0.5)
    assert whole.item() == pytest.approx(
        contrast_loss(z[here], y[here] * 1, Prototypes(value[:2], mask[:2]), 0.5).item()
    )
    assert contrast_loss(z, y, Prototypes(value, mask), 0.5, here.float()).item() == pytest.approx(whole.item())
    nothing = torch.zeros(2, D, requires_grad=True)
    loss = contrast_loss(nothing, y[:2], Prototypes(value, torch.zeros(K) > 0), 0.5)
    assert loss.item() == 0 and torch.isfinite(torch.autograd.grad(loss, nothing)[0]).all()


def test_the_squared_error_and_the_contrast_learn_where_the_printed_pull_collapses(tmp_path: Path) -> None:
    def accuracy(cls: type[FedPC], **own: str) -> float:
        quiet = {"watch": False, "final_trained": False, "eval_every": 6, "checkpoint_every": 6}
        at = tmp_path / f"{cls.__name__}{len(own)}"
        testing.Bench(cls, own).play(at, rounds=6, join=1.0, epochs=2, partition="dirichlet(0.3)", **quiet)
        return float(testing.events(at)[-1]["eval"]["personal/test"]["mean"])

    assert accuracy(FedPC, reading="text") < 0.5 < 0.6 < min(accuracy(FedPCMended), accuracy(FedPC))


def test_11_classifiers_travel_in_the_set_up_only_and_no_download_changes_them(tmp_path: Path) -> None:
    loop = play(FedPC, tmp_path, {"J": 2}, rounds=3)
    for e in events(loop)[1:]:
        for directions in e["bytes"].values():
            assert all(set(parts) == {"body", "prototypes"} for parts in directions.values())
    data, state = clients().data(0), loop.runtime.states.get(0)
    for download in (loop.method.ctx.w0, T.row(loop.server.body, 0)):
        for params in (
            loop.method.begin(state, download, data, 1).model[0],
            loop.method.personal(state, download, data)[0],
        ):
            assert all(torch.equal(params[k], state["own"][k]) for k in ("2.weight", "2.bias"))
            assert all(torch.equal(params[k], download[k]) for k in BODY)
    assert not torch.equal(state["own"]["2.weight"], loop.method.ctx.w0["2.weight"])


@pytest.mark.parametrize(("weighting", "count"), [("uniform", 0), ("samples", 4)])
def test_14_bytes_are_those_of_the_table(tmp_path: Path, weighting: str, count: int) -> None:
    """Counts of samples travel from clients whose prototypes are weighed by them, and never further."""
    loop = begin(open_toy(FedPC, tmp_path, {"J": 2}, weighting=weighting))
    own = [len(y.unique()) for _, y in clients().parts]
    loop.step()
    opening = events(loop)[-1]["bytes"]
    assert {d: sum(p.values()) for d, p in opening["device-cloud"].items()} == {
        "down": 5 * 4 * (THETA + 21), "up": sum(k * (4 * D + 4) for k in own),
    }  # fmt: skip
    groups = loop.method.edges(loop.server)
    received = {j: int(loop.server.mask[j].sum()) for j in groups}
    held = {j: len(torch.cat([clients().parts[i][1] for i in m]).unique()) for j, m in groups.items()}
    loop.step()
    counted = {link: {d: sum(p.values()) for d, p in both.items()} for link, both in events(loop)[-1]["bytes"].items()}
    loop.folder.close()
    assert counted == {
        "edge-cloud": {
            "down": sum(4 * THETA + received[j] * (4 * D + 4) for j in groups),
            "up": sum(4 * THETA + held[j] * (4 * D + 4) for j in groups),
        },
        "device-edge": {
            "down": sum(4 * THETA + received[j] * (4 * D + 4) for j, m in groups.items() for _ in m),
            "up": sum(4 * THETA + k * (4 * D + 4 + count) for k in own),
        },
    }


@pytest.mark.parametrize(("shape", "theta"), [((1, 28, 28), 571_648), ((3, 32, 32), 796_032)])
def test_14_the_papers_extractor_has_the_tabled_size(shape, theta) -> None:
    images = Toy([(torch.rand(4, *shape), torch.tensor([0, 1, 2, 9]))], 10)
    method = bind(FedPC, data=images, model=build_model("fedpc-cnn", shape, 10))
    server = replace(method.setup(), mask=torch.ones(1, 10, dtype=torch.bool))
    now = Moment(server, 0, 1)
    assert method.schema("up", now).nbytes(labels=3) == 4 * theta + 3 * (768 + 4)
    assert method.schema("down", now).nbytes() == 4 * theta + 10 * (768 + 4)


# ---- settings --------------------------------------------------------------------------------------------------------
def test_readings_are_the_squared_error_and_the_printed_loss() -> None:
    names = ("proto_loss", "proto_reduce", "init_protos", "alpha", "gamma")
    assert [getattr(FedPC().hp, k) for k in names] == ["mse", "mean", "none", 0.5, 0.5]
    assert [getattr(FedPC(reading="text").hp, k) for k in names] == ["batch_mean", "sum", "clustering", 0.5, 0.5]


@pytest.mark.parametrize(("cls", "own", "idle"), [
    (FedPC, {"gamma": 0.0, "proto_repulsion": 1.0}, "proto_repulsion"), (FedPC, {"J": 3, "J_max": 5}, "J_max"),
    (FedPC, {"J": 1, "grouping": "random"}, "grouping"), (FedPC, {"inter": "mean", "sim_map": "shift01"}, "sim_map"),
    (FedPCNoProto, {"proto_loss": "per_sample"}, "proto_loss"), (FedPCMended, {"gamma": 0.0, "tau": 0.1}, "tau"),
], ids=str)  # fmt: skip
def test_a_setting_without_effect_is_refused(cls, own, idle) -> None:
    with pytest.raises(CoterieError, match=f"{idle} = .* has no effect unless"):
        cls(**own)
    cls(**{k: v for k, v in own.items() if k != idle})
    FedPC(reading="text", gamma=0.0)  # values of a reading are not the user's


def test_samples_weigh_members_and_their_classes_if_the_run_says_so() -> None:
    method = bind(FedPC, weighting="samples")
    counts = torch.tensor([[1, 3, 0], [2, 3, 1]])
    trees = [
        {**T.row(bodies(2), i), **M.to_payload(Prototypes(*(t[i] for t in sets(2))), counts[i])}
        for i in range(len(counts))
    ]
    ups = [Upload(t, sender=i, samples=[1, 3][i]) for i, t in enumerate(trees)]
    got = method.merge(Edge(0, (0, 1), {}, Download()), ups, 1)[1].tree
    assert near(bare(got), T.mean([bare(t) for t in trees], [1, 3]))
    first = torch.stack([sets(2).value[i, 0] for i in (0, 1)])
    assert torch.allclose(got["x:prototypes"][0], (first * torch.tensor([[1.0], [2.0]])).sum(0) / 3, atol=1e-6)


def test_warm_up_changes_the_clustering_prototypes_only(tmp_path: Path) -> None:
    cold, warm = (begin(open_toy(FedPC, tmp_path, {"J": 1, "warmup_epochs": w})) for w in (0, 2))
    for loop in (cold, warm):
        loop.step()
        loop.folder.close()
    assert not torch.allclose(cold.server.value, warm.server.value)
    assert same(cold.server.body, warm.server.body)
    assert all(same(cold.runtime.states.get(i), warm.runtime.states.get(i)) for i in range(5))


def test_without_first_prototypes_the_first_round_has_no_pull(tmp_path: Path) -> None:
    plain = {"alpha": 1.0, "J": 1}
    none = play(FedPC, tmp_path, plain, rounds=1)
    free = play(FedPCNoProto, tmp_path, plain, rounds=1)
    assert near(T.row(none.server.body, 0), T.row(free.server.body, 0))
    assert events(none)[1]["bytes"]["device-edge"]["down"] == {"body": 5 * 4 * THETA, "prototypes": 0}
    full = play(FedPC, tmp_path, {**plain, "init_protos": "clustering"}, rounds=1)
    assert not near(T.row(full.server.body, 0), T.row(free.server.body, 0))


def test_pre_relu_prototypes_are_those_before_the_last_activation() -> None:
    method, data = bind(FedPC, {"feature": "pre_relu"}), clients().data(3)
    w = method.ctx.w0
    z = F.linear(data.train.x, w["0.weight"], w["0.bias"])
    logits, got = M.logits_and_features(method.ctx, w, data.train.x, "pre_relu")
    assert torch.allclose(got, z, atol=1e-6) and (got < 0).any()
    assert torch.equal(logits, method.ctx.forward(w, data.train.x))
    with pytest.raises(CoterieError, match="pre_relu needs a model with a linear layer"):
        convolution = (nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 6, 4), nn.Flatten())
        bind(FedPC, {"feature": "pre_relu"}, model=nn.Sequential(*convolution, nn.Linear(6, 3)))


def test_facts_tell_groups_sizes_and_weights(tmp_path: Path) -> None:
    loop = play(FedPC, tmp_path, {"J": 2}, rounds=1)
    facts = events(loop)[-1]["facts"]
    assert facts["J"] == 2 and sum(facts["sizes"]) == 5 and len(facts["rho"]) == 2
    assert [len(m) for m in loop.method.edges(loop.server).values()] == facts["sizes"]


# ---- who did not answer, and who answers wrongly ---------------------------------------------------------------------
def answered(method, data, ids, server, t):
    """Uploads of these clients in round t, and their new states; everything that crosses is as declared."""
    sent, ups = method.down(server, ids, t), []
    for i in ids:
        got, client = {**sent.to(i), **sent.edge.get(server.groups.get(i, -1), {})}, data.data(i)
        method.schema("down", Moment(server, i, t)).check(got, "the download")
        params, extras = method.begin(method.init_client(client), got, client, t).model
        tree = method.end(method.init_client(client), Trained(params, extras), client, t)[1].tree
        method.schema("up", Moment(server, i, t)).check(tree, "the upload")
        ups.append(Upload(tree, sender=i, samples=len(client.train)))
    return ups


def test_if_nobody_answers_round_0_all_are_one_group_at_the_cloud(tmp_path: Path) -> None:
    method, data = bind(FedPC, {"J": 2}), clients()
    server = method.setup()
    assert method.edges(server) is None
    for t in (1, 2):
        ups = answered(method, data, [1, 3, 4], server, t)
        server = method.aggregate(server, ups, t)
        assert near(T.row(server.body, 0), T.mean([bare(u.tree) for u in ups]))
        assert method.edges(server) is None and server.mask.shape == (1, K)
    whole = play(FedPCJ1, tmp_path, {"init_protos": "none"}, rounds=2)
    loop = begin(open_toy(FedPC, tmp_path, rounds=2))
    loop.done = 0  # as if nobody had answered
    for _ in (1, 2):
        loop.step()
    loop.folder.close()
    assert near(loop.server.body, whole.server.body)


@pytest.mark.parametrize("who", [[0], [2, 4], [0, 1, 2]])
def test_any_subset_may_answer_round_0(who) -> None:
    method, data = bind(FedPC), clients()
    server = method.aggregate(method.setup(), answered(method, data, who, method.setup(), 0), 0)
    assert set(server.groups) == set(who)
    late = [u for u in answered(method, data, range(5), server, 1) if u.sender not in who]
    assert set(method.aggregate(server, late, 1).groups) == set(range(5))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_wrong_upload_is_refused() -> None:
    good = {**T.row(bodies(1), 0), "x:prototypes": torch.rand(2, D), "x:ids": ids(0, 2)}
    wrong = [
        ({"x:ids": ids(0, 99)}, "99 in x:ids, outside 0 to 2"),
        ({"x:ids": ids(-1, 1)}, "-1 in x:ids"),
        ({"x:ids": ids(1, 1)}, "the same value twice in x:ids"),
        ({"x:ids": ids(0)}, "of shape"),
        ({"x:prototypes": torch.rand(0, D), "x:ids": ids()}, "of shape"),
        ({"2.weight": torch.zeros(K, D)}, "2.weight' that is not declared"),
    ]
    more = ({"x:counts": ids(4, 5)}, "x:counts' that is not declared")
    for weighting in ("uniform", "samples"):
        method = bind(FedPC, weighting=weighting)
        now = Moment(method.setup(), 0, 1)
        refuses(method.schema("edge_up", now), good, *wrong, more)
        if weighting == "uniform":
            refuses(method.schema("up", now), good, *wrong, more)
        else:
            few = [({"x:counts": ids(-4, 5)}, "-4 in x:counts"), ({"x:counts": ids(0, 5)}, "0 in x:counts, outside 1")]
            refuses(method.schema("up", now), {**good, **more[0]}, *wrong[:4], *few)
        first = {k: good[k] for k in ("x:prototypes", "x:ids")}
        refuses(method.schema("up", Moment(method.setup(), 0, 0)), first, *wrong[:4], more)


def test_counts_are_declared_as_label_information_and_only_where_a_mean_needs_them() -> None:
    for weighting in ("uniform", "samples"):
        method = bind(FedPC, weighting=weighting)
        assert ("x:counts" in method.schema("up").entries) == (weighting == "samples")
        assert "x:counts" not in method.schema("edge_up").entries
    assert bind(FedPC, weighting="samples").schema("up").entries["x:counts"].kind == "label information"


def test_a_model_that_is_only_a_head_gets_a_sentence() -> None:
    with pytest.raises(CoterieError, match="FedPC needs a model with layers before its head"):
        bind(FedPC, model=nn.Sequential(nn.Linear(4, 3)))


def test_a_server_of_version_0_1_has_the_prototypes_of_its_groups_as_centres() -> None:
    method, data = bind(FedPC, {"J": 2}, model=ten(), data=blocks()), blocks()
    server = opened(method, Toy(data.parts[:5], 10))
    old = {k: getattr(server, k) for k in ("groups", "largest", "body", "value", "mask", "rho")}
    read = typed(SERVERS["FedPC"], old)
    assert torch.equal(read.first_sets.value, server.value) and read.groups == server.groups
    late = answered(method, data, [5], read, 1)
    assert set(method.aggregate(read, late, 1).groups) == set(range(6))


def test_a_run_says_that_its_loss_departs_from_the_printed_one() -> None:
    (said,) = testing.Bench(FedPC, {}).session().automatic_choices()
    assert said.startswith("FedPC: the pull is a squared error, and begins in the second round, because the printed")
    (said,) = testing.Bench(FedPC, {"init_protos": "clustering"}).session().automatic_choices()
    assert said.startswith("FedPC: the pull is a squared error, because the printed loss (3)")
    for cls, own in ((FedPC, {"reading": "text"}), (FedPCNoProto, {}), (FedPCMended, {})):
        assert testing.Bench(cls, own).session().automatic_choices() == []
