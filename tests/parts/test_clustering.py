"""Clusters of clients: those of FedPC and SC-FPFL, linkage and centres of the baselines."""

import math

import pytest
import torch

from coterie.errors import CoterieError
from coterie.methods.fedpc import clustering as G
from coterie.methods.scfpfl import spectral as Sp
from coterie.methods.scfpfl.settings import ClusterSettings
from coterie.parts import clustering as C
from coterie.parts.prototypes import Prototypes

RNG = torch.Generator().manual_seed(0)


def isodata(rows, k0, seed, n_min=None, mode="paper", **refine):
    return Sp.isodata(rows, k0, seed, ClusterSettings(n_min=n_min, isodata=mode, **refine))


def blobs(sizes=(4, 5, 6), spread=0.01, dims=3):
    centres = 10 * torch.eye(len(sizes), dims, dtype=torch.float64)
    truth = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return centres[truth] + spread * torch.randn(len(truth), dims, generator=RNG, dtype=torch.float64), truth


def label_blocks(n=12, noise=0.01):
    """Clients that hold classes 0-4 or 5-9, features of a class alike for all."""
    base = torch.rand(10, 6, generator=RNG, dtype=torch.float64)
    first = torch.arange(n) % 2 == 0
    mask = torch.where(first[:, None], torch.arange(10) < 5, torch.arange(10) >= 5)
    value = (base + noise * torch.randn(n, 10, 6, generator=RNG, dtype=torch.float64)) * mask[..., None]
    return Prototypes(value, mask), (~first).long()


def test_labels_are_numbered_by_first_appearance() -> None:
    assert C.canonical([7, 3, 7, 9]).tolist() == [0, 1, 0, 2]
    assert C.members(torch.tensor([0, 1, 0, 2])) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("groups", [None, 3])
def test_p7_fedpc_groups_do_not_depend_on_client_order(groups) -> None:
    x, truth = blobs()
    p = Prototypes(x.reshape(15, 1, 3), torch.ones(15, 1, dtype=torch.bool))
    assert torch.equal(G.prototype_groups(p, groups, seed=1), C.canonical(truth))
    for seed in range(5):
        order = torch.randperm(15, generator=torch.Generator().manual_seed(seed))
        shuffled = G.prototype_groups(Prototypes(p.value[order], p.mask[order]), groups, seed)
        assert torch.equal(shuffled, C.canonical(truth[order]))


@pytest.mark.parametrize("missing", ["zero", "mean", "masked"])
def test_p7_fedpc_identical_clients_land_together(missing) -> None:
    value = torch.rand(5, 4, 3, generator=RNG)
    mask = torch.rand(5, 4, generator=RNG) > 0.3
    who = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 2])
    p = Prototypes((value * mask[..., None])[who], mask[who])
    for groups in (2, 3, 5, 8):
        labels = G.prototype_groups(p, groups, seed=3, missing=missing)
        assert all(len(set(labels[who == i].tolist())) == 1 for i in range(5))


@pytest.mark.parametrize("groups", [2, None])
def test_p8_fedpc_two_label_blocks_are_separated_exactly(groups) -> None:
    p, truth = label_blocks()
    assert torch.equal(G.prototype_groups(p, groups, seed=0), truth)


def test_missing_classes_are_filled_as_named() -> None:
    value = torch.tensor([[[2.0], [0.0]], [[4.0], [7.0]]])
    mask = torch.tensor([[True, False], [True, True]])
    assert G.prototype_vectors(Prototypes(value, mask)).tolist() == [[2, 0], [4, 7]]
    assert G.prototype_vectors(Prototypes(value, mask), "mean").tolist() == [[2, 7], [4, 7]]
    assert G.masked_sqdist(Prototypes(value, mask)).tolist() == [[0, 8], [8, 0]]  # one common class of two: twice 4


def test_classical_scaling_gives_the_distances_back() -> None:
    x, _ = blobs()
    d = torch.cdist(x, x) ** 2
    y = C.coordinates(d)
    torch.testing.assert_close(torch.cdist(y, y) ** 2, d, rtol=1e-6, atol=1e-6)


def test_pca_keeps_the_fewest_components_with_the_asked_variance() -> None:
    x = torch.randn(40, 3, generator=RNG, dtype=torch.float64) * torch.tensor([10.0, 1.0, 0.1])
    assert G.reduce(x, 0.95).shape == (40, 1)
    assert G.reduce(x, 0.9995).shape == (40, 2)
    assert G.reduce(x, 2).shape == (40, 2)
    assert G.reduce(x, None).shape == (40, 3)
    assert G.reduce(x[:2], 1.0).shape == (2, 1)
    assert not G.reduce(torch.ones(4, 3)).any()


def test_silhouette_finds_the_number_of_groups_and_equal_clients_are_one() -> None:
    x, truth = blobs((5, 5, 5, 5), dims=4)
    assert torch.equal(G.choose_groups(x, 10, seed=0), truth)
    assert G.choose_groups(torch.ones(6, 2), 10, seed=0).tolist() == [0] * 6
    assert G.choose_groups(torch.tensor([[0.0], [5.0]]), 10, seed=0).tolist() == [0, 0]


def test_more_groups_than_clients_is_refused() -> None:
    with pytest.raises(CoterieError, match="cannot make 4 groups of 3 clients"):
        C.kmeans(torch.eye(3), 4, seed=0)
    assert C.kmeans(torch.eye(3), 3, seed=2**62).tolist() == [0, 1, 2]


# ---- SC-FPFL ---------------------------------------------------------------------------------------------------------
def block_similarity(blocks: int, size: int = 3) -> torch.Tensor:
    label = torch.arange(blocks * size) // size
    s = torch.where(label[:, None] == label[None], 0.9, 0.2).double()
    return s.fill_diagonal_(1.0)


@pytest.mark.parametrize("predict", ["softmax", "logits"])
def test_p1_similarity_and_laplacian_bounds(predict) -> None:
    raw = torch.randn(7, 300, 5, generator=RNG)
    outputs = raw.softmax(-1) if predict == "softmax" else raw
    s = Sp.prediction_similarity(outputs, predict)
    assert torch.equal(s, s.T) and bool((s.diagonal() == 300).all())
    assert float(s.min()) >= 0 and float(s.max()) <= 300
    cos = torch.nn.functional.cosine_similarity(outputs[0].double(), outputs[1].double(), dim=-1)
    assert float(s[0, 1]) == pytest.approx(float(cos.clamp(min=0).sum()))
    values = torch.linalg.eigvalsh(Sp.laplacian(s))
    assert float(values[0]) == pytest.approx(0, abs=1e-12) and float(values[-1]) <= 2
    assert not Sp.prediction_similarity(outputs, predict, self_similarity=False).diagonal().any()


def test_p2_scaling_the_similarity_leaves_the_laplacian_unchanged() -> None:
    s = block_similarity(2)
    torch.testing.assert_close(Sp.laplacian(s * 12.5), Sp.laplacian(s), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("blocks", "eigenvalues"), [(2, [0, 0.352941] + [0.970588] * 4), (3, [0, 0.45, 0.45] + [0.975] * 6)]
)
def test_p3_block_similarity(blocks, eigenvalues) -> None:
    h, values = Sp.spectral_embedding(block_similarity(blocks), blocks)
    torch.testing.assert_close(values, torch.tensor(eigenvalues, dtype=torch.float64), rtol=0, atol=5e-7)
    torch.testing.assert_close(h.norm(dim=1), torch.ones(3 * blocks, dtype=torch.float64))
    truth = torch.arange(3 * blocks) // 3
    want = torch.where(truth[:, None] == truth[None], 0.0, math.sqrt(2)).double()
    torch.testing.assert_close(torch.cdist(h, h), want, rtol=0, atol=1e-6)
    assert Sp.eigengap(values) == blocks
    for mode in ("paper", "off"):
        assert torch.equal(isodata(h, blocks, seed=0, mode=mode).labels, truth)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("split", ["axis", "all"])
@pytest.mark.parametrize("mode", ["paper", "classic"])
def test_p4_clusters_cover_all_clients_and_none_is_too_small(seed, split, mode) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.randn(23, 4, generator=rng, dtype=torch.float64), dim=1)
    for k0, n_min in ((1, None), (4, None), (6, 4), (8, 6), (5, 23)):
        merge = {"m_min": 0.9} if mode == "classic" else {}
        labels = isodata(rows, k0, seed, n_min, mode, delta_max=0.02, split=split, **merge).labels
        sizes = torch.bincount(labels)
        least = n_min if n_min is not None else max(1, 23 // (4 * k0))
        assert len(labels) == 23 and int(sizes.min()) >= 1
        assert len(sizes) == 1 or int(sizes.min()) >= least


def test_p5_clustering_is_equivariant_under_client_permutation() -> None:
    s, truth = block_similarity(3, 4), torch.arange(12) // 4
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        h, _ = Sp.spectral_embedding(s[order][:, order], 3)
        assert torch.equal(isodata(h, 3, seed).labels, C.canonical(truth[order]))


def test_isodata_removes_small_clusters() -> None:
    x, _ = blobs((6, 6, 1))
    out = isodata(x, 3, seed=0, n_min=2)
    assert out.removed == 1 and int(out.labels.max()) == 1


def test_isodata_splits_when_too_few_clusters_are_left() -> None:
    # four far points each alone and two near groups of eight: removing the loners leaves K <= k0/2, wide ones split
    wide = torch.tensor([[0.0, 0.0], [0.0, 4.0]]).repeat_interleave(8, 0)
    loners = torch.tensor([[50.0, 0.0], [-50.0, 0.0], [0.0, 60.0], [0.0, -60.0]])
    x = torch.cat([wide + 0.01 * torch.randn(16, 2, generator=RNG), loners]).double()
    counts = [isodata(x, 5, seed, n_min=2, delta_max=0.5) for seed in range(5)]
    assert any(c.splits > 0 for c in counts)
    assert all(c.splits == 0 for c in (isodata(x, 5, s, n_min=2, delta_max=1e9) for s in range(5)))


def test_isodata_merge_joins_near_centres_by_size() -> None:
    centres = torch.tensor([[0.0], [1.0], [10.0]], dtype=torch.float64)
    merged = Sp._merge(torch.tensor([0, 0, 0, 1, 2]), centres, 2.0)
    assert sorted(merged.flatten().tolist()) == [0.25, 10.0]
    assert torch.equal(Sp._merge(torch.tensor([0, 1, 2]), centres, 1.0), centres)


def test_isodata_split_moves_along_the_widest_axis_by_its_deviation() -> None:
    x = torch.tensor([[0.0, -2.0], [0.0, 2.0]], dtype=torch.float64)
    labels, centre = torch.tensor([0, 0]), torch.zeros(1, 2, dtype=torch.float64)
    assert Sp._split(x, labels, centre, 1, 0.1, "axis").tolist() == [[0, 2], [0, -2]]
    assert Sp._split(x, labels, centre, 1, 0.1, "all").tolist() == [[4, 4], [-4, -4]]
    assert torch.equal(Sp._split(x, labels, centre, 2, 0.1, "axis"), centre)


def test_impossible_k0_and_embedding_are_refused() -> None:
    with pytest.raises(CoterieError, match="k0"):
        isodata(torch.eye(3), 4, 0)
    with pytest.raises(CoterieError, match="embed_dim"):
        Sp.spectral_embedding(torch.eye(3), 0)


# ---- baselines -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["single", "complete", "average", "ward"])
def test_hierarchy_threshold_inf_is_one_cluster_zero_is_everybody_alone(method) -> None:
    x, truth = blobs()
    x[1] = x[0]  # equal rows, too, stay alone at 0
    assert C.agglomerate(x, method=method, threshold=math.inf).labels.tolist() == [0] * 15
    assert C.agglomerate(x, method=method, threshold=0.0).labels.tolist() == list(range(15))
    assert torch.equal(C.agglomerate(x, method=method, groups=3).labels, truth)
    assert torch.equal(C.agglomerate(x, method=method, quantile=0.9).labels, truth)


@pytest.mark.parametrize("metric", ["l1", "l2", "cosine"])
def test_hierarchy_separates_planted_opposite_groups(metric) -> None:
    x = torch.randn(1, 20, generator=RNG) * torch.tensor([1.0, -1, -1, 1, 1])[:, None]
    x = x + 0.01 * torch.randn(5, 20, generator=RNG)
    assert C.agglomerate(x, metric, "complete", groups=2).labels.tolist() == [0, 1, 1, 0, 0]


def test_hierarchy_wants_one_rule_and_ward_wants_l2() -> None:
    with pytest.raises(CoterieError, match="exactly one"):
        C.agglomerate(torch.eye(3))
    with pytest.raises(CoterieError, match="ward"):
        C.agglomerate(torch.eye(3), "l1", "ward", groups=2)


def test_assignment_step_never_raises_the_sum_of_squares_and_empty_centres_stay() -> None:
    x, _ = blobs(spread=3.0)
    centres = torch.cat([x[:3], torch.full((1, 3), 1e4, dtype=torch.float64)])
    cost = math.inf
    for _ in range(5):
        labels = C.assign(x, centres)
        now = float((x - centres[labels]).square().sum())
        assert now <= cost
        cost = now
        centres = C.recentre(x, labels, centres)
    assert centres[3].tolist() == [1e4] * 3


def test_warm_start_keeps_the_numbers_of_the_centres() -> None:
    x, truth = blobs()
    start = 10 * torch.eye(3, dtype=torch.float64)[[2, 0, 1]]
    labels, centres = C.warm_kmeans(x, start)
    assert torch.equal(labels, torch.tensor([1, 2, 0])[truth])
    torch.testing.assert_close(centres[1], x[truth == 0].mean(0))
    one, mean = C.warm_kmeans(x, x[:1])
    assert not one.any()
    torch.testing.assert_close(mean[0], x.mean(0))


def test_recentre_by_samples() -> None:
    x = torch.tensor([[0.0], [4.0]])
    assert C.recentre(x, torch.tensor([0, 0]), torch.zeros(1, 1), torch.tensor([3.0, 1.0])).item() == 1


def test_assignment_ties_go_to_the_lower_index() -> None:
    assert C.assign(torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])).tolist() == [0]


def test_svd_features_are_cosines_with_singular_directions() -> None:
    d = torch.randn(8, 50, generator=RNG, dtype=torch.float64)
    _, _, vt = torch.linalg.svd(d, full_matrices=False)
    want = (d @ vt[:3].T) / d.norm(dim=1, keepdim=True)
    torch.testing.assert_close(C.svd_features(d, 3).abs(), want.abs(), rtol=0, atol=1e-10)


def test_fedgroup_recovers_planted_orthogonal_directions() -> None:
    planted = torch.arange(12) % 3
    updates = torch.eye(3, 30)[planted] * (1 + torch.rand(12, 1, generator=RNG))
    updates = updates + 0.01 * torch.randn(12, 30, generator=RNG)
    assert torch.equal(C.kmeans(C.svd_features(updates, 3), 3, seed=0), planted)
