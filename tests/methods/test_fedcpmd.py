"""FedCPMD: its properties, numbered, its settings and its variants."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.config import Engine, settings
from coterie.core import tree as T
from coterie.core.edges import Edge
from coterie.core.method import Context, Download, Method, Moment, Upload
from coterie.core.net import Net
from coterie.core.tasks import Classification
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.engine.loop import Loop
from coterie.engine.session import Callbacks, Objects, prepare
from coterie.errors import CoterieError
from coterie.methods import build_method, find
from coterie.methods.fedcpmd import votes
from coterie.methods.fedcpmd.mixing import flat_layer, shared_bodies, similarity, weights_of
from coterie.methods.fedcpmd.settings import FedCPMDSettings
from coterie.models.registry import build_model as build_model
from coterie.parts import gaussian as G
from coterie.testing import Bench, open_loop, small_data
from support.refusals import refuses
from support.toy import handed

# the text before its corrections: what these tests work out by hand
TEXT = {"switch_init": "carry"}
OTHERS = ("fedcpmd-full", "fedcpmd-assigned", "fedcpmd-code", "fedcpmd-mended")  # have no switch_init
NAMES = ("fc1", "fc2", "classifier")
ALL = FedCPMDSettings(distance="auto")  # the four distances of the paper
RNG = torch.Generator().manual_seed(5)
PAIRS = [
    G.Gaussian(torch.rand(40, generator=RNG).double(), 0.01 + torch.rand(40, generator=RNG).double()) for _ in "pq"
]


def chosen(name: str, own: dict[str, Any]) -> tuple[type[Method], dict[str, Any]]:
    """The class and its settings; the text's are those that the tests work out by hand, unless `plain` is given."""
    given = {k: v for k, v in own.items() if k != "plain"}
    by_hand = not own.get("plain") and not name.startswith(OTHERS)
    return find(name), {**TEXT, **given} if by_hand else given


def bound(name: str = "fedcpmd", **own: Any) -> Method:
    return Bench(*chosen(name, own)).session().method


def play(folder: Path, name: str = "fedcpmd", **own: Any) -> Loop:
    run = {"rounds": 4, "join": 1.0}
    run |= {
        k: own.pop(k)
        for k in ("rounds", "join", "dropout", "newcomers", "weighting", "partition", "bn_stats")
        if k in own
    }
    return Bench(*chosen(name, own)).play(folder, **run)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def lenet(clients: int = 20, **own: Any) -> Method:
    """The card's model: LeNet5 with batch norm at 3x32x32, statistics local."""
    net = Net(build_model("lenet5", (3, 32, 32), 10, seed=1), torch.zeros(2, 3, 32, 32))
    method = build_method(*chosen("fedcpmd", own))
    method.ctx = Context(
        net, net.state(), tuple(range(clients)), Classification(10), 200, 0.1, 5, 32, 0.01, 1, bn_stats="local"
    )
    return method


def outputs(n: int = 60, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    widths = (30, 24, 16, 10)
    o = [torch.randn(n, d, generator=rng).relu() * (i + 1) ** 2 + 0.1 * i for i, d in enumerate(widths)]
    return o, torch.rand(n, 8, 8, generator=rng), torch.randint(0, 10, (n,), generator=rng)


def close(a: Tree, b: Tree, atol: float = 2e-5) -> None:
    for k, v in a.items():
        torch.testing.assert_close(v, b[k], rtol=1e-4, atol=atol)


# ---- 1-3: distances (their test vectors are in test_parts_gaussian.py) -----------------------------------------------
@pytest.mark.parametrize("name", votes.PAPER)
def test_p1_distances_are_zero_on_themselves_and_symmetric(name: str) -> None:
    d, (p, q) = G.distance(name), PAIRS
    assert float(d(p, p).abs().max()) < 1e-12
    assert torch.equal(d(p, q), d(q, p)) and float(d(p, q).min()) > 0
    one = {"js": 0.1114214821847362, "w2": 1.0, "hellinger": 0.3427872480349941, "bhattacharyya": 0.125}
    unit = [G.Gaussian(torch.tensor(float(m)).double(), torch.tensor(1.0).double()) for m in (0, 1)]
    assert float(d(*unit)) == pytest.approx(one[name], abs=1e-9)


def test_p2_bounds_of_the_distances() -> None:
    js, hellinger = G.js(*PAIRS), G.hellinger(*PAIRS)
    assert float(js.min()) >= 0 and float(js.max()) <= math.log(2)
    assert bool((js <= G.js_moment(*PAIRS) + 1e-12).all())
    assert float(hellinger.min()) >= 0 and float(hellinger.max()) <= 1
    torch.testing.assert_close(hellinger.square(), 1 - torch.exp(-G.bhattacharyya(*PAIRS)))


@pytest.mark.parametrize("name", votes.PAPER)
def test_p3_distances_do_not_change_with_a_common_shift_and_scale_as_stated(name: str) -> None:
    d, (p, q) = G.distance(name), PAIRS
    torch.testing.assert_close(d(G.Gaussian(p.mu + 3, p.sigma), G.Gaussian(q.mu + 3, q.sigma)), d(p, q))
    scaled = d(*(G.Gaussian(5 * g.mu, 5 * g.sigma) for g in (p, q)))
    torch.testing.assert_close(scaled, d(p, q) * (5 if name == "w2" else 1))


# ---- 4-7: scores and votes -------------------------------------------------------------------------------------------
def test_p4_choice_is_invariant_to_an_affine_map_of_any_output_and_of_the_inputs() -> None:
    o, x, y = outputs()
    base = votes.scores(ALL, o, x, y, 10)
    for at in range(4):
        moved = [t * 7 - 2 if i == at else t for i, t in enumerate(o)]
        torch.testing.assert_close(votes.scores(ALL, moved, x, y, 10), base)
    torch.testing.assert_close(votes.scores(ALL, o, 3 * x + 1, y, 10), base)
    raw = FedCPMDSettings(fit_normalize="none")
    moved = [o[0], 7 * o[1] - 2, *o[2:]]
    assert not torch.allclose(votes.scores(raw, moved, x, y, 10), votes.scores(raw, o, x, y, 10))


def test_p5_a_layer_that_changes_nothing_scores_zero_and_is_chosen() -> None:
    o, x, y = outputs()
    o[2] = 4 * o[1].flip(0)
    s = votes.scores(ALL, o, x, y, 10)
    assert float(s[:, 1].abs().max()) < 1e-12
    assert votes.cast(None, s[None])["votes"].tolist() == [[0, 1, 0]] * 4


def test_equation_6_is_the_distance_of_the_shift_by_a_layer_to_the_shift_of_the_data() -> None:
    layers = G.Gaussian(torch.tensor([0.0, 3, 3]).double(), torch.tensor([3.0, 4, 3]).double())
    data = [G.Gaussian(*torch.tensor(pair).double()) for pair in ([1.0, 5], [2.0, 12])]
    # shifts by the layers: N(3, 5^2) and N(0, 5^2); from inputs to labels: N(1, 13^2)
    assert G.shift_scores(layers, *data, G.w2).tolist() == pytest.approx([math.hypot(2, 8), math.hypot(1, 8)])
    assert G.shift_scores(layers, *data[::-1], G.w2).tolist() == pytest.approx([math.hypot(4, 8), math.hypot(1, 8)])
    o, x, y = outputs()
    fits = [G.fit(t) for t in o]
    ends = [G.fit(x), G.fit(y.double() / 9, "none")]
    each = G.Gaussian(torch.stack([f.mu for f in fits]), torch.stack([f.sigma for f in fits]))
    for score, pair in (("eq6", ends), ("eq6_reversed", ends[::-1])):
        s = votes.scores(FedCPMDSettings(distance="w2", score=score), o, x, y, 10)
        assert torch.equal(s[0], G.shift_scores(each, *pair, G.w2))
    assert find("fedcpmd-code").Settings().score == "eq6_reversed"  # type: ignore[attr-defined]


def test_labels_can_enter_as_class_numbers() -> None:
    o, x, y = outputs()
    raw = FedCPMDSettings(distance="w2", label_encoding="number", fit_normalize="none")
    mean, std = y.double().mean(), y.double().std(correction=0)
    to_y, to_x = ([math.hypot(t.double().mean() - m, t.double().std(correction=0) - s) for t in o]
                  for m, s in ((mean, std), (x.double().mean(), x.double().std(correction=0))))  # fmt: skip
    a = [dy - dx for dy, dx in zip(to_y, to_x, strict=True)]
    expected = [abs(a[i] - a[i - 1]) for i in (1, 2, 3)]
    assert votes.scores(raw, o, x, y, 10)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_p6_scores_do_not_depend_on_the_order_of_samples() -> None:
    o, x, y = outputs()
    turn = torch.randperm(60, generator=RNG)
    mixed = [t[torch.randperm(60, generator=RNG)] for t in o]
    torch.testing.assert_close(votes.scores(ALL, mixed, x[turn], y[turn], 10), votes.scores(ALL, o, x, y, 10))


def test_p7_votes_are_the_mode_with_a_deterministic_tie_rule() -> None:
    scores = torch.tensor([[[0.1, 0.5, 0.9]], [[0.8, 0.1, 0.9]], [[0.8, 0.2, 0.9]]])  # votes fc1, fc2, fc2
    ballot = None
    for s in scores:
        ballot = votes.cast(ballot, s[None])
    assert ballot is not None and ballot["votes"].tolist() == [[1, 2, 0]]
    assert votes.leading(ballot, "mean_score").tolist() == [1]
    tied = votes.cast(votes.cast(None, scores[:1]), scores[1:2])  # one each; means 0.45 and 0.30
    assert votes.leading(tied, "mean_score").tolist() == [1]
    other = votes.cast(votes.cast(None, torch.tensor([[[0.1, 0.9, 0.9]]])), torch.tensor([[[0.2, 0.1, 0.9]]]))
    assert votes.leading(other, "mean_score").tolist() == [0]
    assert votes.leading(other, "deepest").tolist() == [1]
    assert votes.leading(votes.cast(None, torch.zeros(1, 1, 3)), "mean_score").tolist() == [2]  # all alike: deepest


def test_p7_every_participation_of_phase_1_is_one_vote(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=6, join=0.6, preparation=4)
    asked = [i for e in events(tmp_path)[:4] for i in e["participants"]]
    for i in loop.method.ctx.clients:
        assert loop.runtime.states.get(i)["ballot"]["votes"].sum(1).tolist() == [asked.count(i)]


def test_vote_per_batch_counts_batches() -> None:
    m, session = bound(vote="batch"), Bench(find("fedcpmd"), {}).session()
    data = session.federation.data(0)
    scores = m.scores(m.ctx.w0, {}, data)
    assert scores.shape == (math.ceil(len(data.train) / 16), 1, 3)
    whole = bound().scores(m.ctx.w0, {}, data)
    assert whole.shape == (1, 1, 3)


def test_outputs_are_what_the_next_layer_is_given() -> None:
    m = bound()
    data = Bench(find("fedcpmd"), {}).session().federation.data(0)
    w, x = m.ctx.w0, data.train.x
    o = votes.layer_outputs(m.ctx.net, w, x, NAMES)
    hidden = torch.relu(nn.functional.batch_norm(
        x.flatten(1) @ w["fc1.weight"].T + w["fc1.bias"], w["bn1.running_mean"], w["bn1.running_var"],
        w["bn1.weight"], w["bn1.bias"],
    ))  # fmt: skip
    torch.testing.assert_close(o[0], x.flatten(1))
    torch.testing.assert_close(o[1], hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(o[3], m.ctx.forward(w, x))
    skip = votes.layer_outputs(m.ctx.net, w, x, ("fc1", "classifier"))
    assert torch.equal(skip[1], o[1]) and torch.equal(skip[2], o[3])


# ---- 8, 9: clusters and the coverage sampler -------------------------------------------------------------------------
def test_p8_clusters_partition_the_clients(tmp_path: Path) -> None:
    loop = play(tmp_path, join=0.4, rounds=5)
    members = [i for c in loop.method.edges(loop.server).values() for i in c]
    assert sorted(members) == list(loop.method.ctx.clients)
    assert len(loop.method.edges(loop.server)) <= 3
    facts = events(tmp_path)[-1]["facts"]
    assert sum(facts["clusters"].values()) == 5 and set(facts["layer"].values()) == set(facts["clusters"])
    assert not any("cluster" in k for k in loop.method.Settings.model_fields)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_p9_with_coverage_everybody_votes_when_there_are_rounds_enough(tmp_path: Path, dropout: float) -> None:
    prep = 3 if not dropout else 8
    loop = play(tmp_path, join=0.4, rounds=prep + 1, preparation=prep, dropout=dropout)
    assert sorted(loop.server.votes) == list(loop.method.ctx.clients)
    first = [i for e in events(tmp_path)[:2] for i in e["participants"]]
    assert dropout or len(set(first)) == len(first) == 4


def test_who_never_voted_is_probed_without_training_and_then_has_a_layer(tmp_path: Path) -> None:
    loop = play(tmp_path, join=0.4, rounds=3, preparation=1)
    one, two, _ = events(tmp_path)
    unseen = sorted(set(range(5)) - set(one["participants"]))
    assert set(unseen) <= set(two["participants"]) and set(loop.server.layer) == set(range(5))
    head = T.nbytes(T.keep(loop.method.ctx.w0, lambda k: k in loop.method.ctx.group("head")))
    body = T.nbytes(loop.method.ctx.w0) - head
    assert two["bytes"]["device-cloud"]["up"] == {"vote": 5 * len(unseen)}
    assert two["bytes"]["device-cloud"]["down"] == {"body": body * len(unseen)}
    for how, layer in (("classifier", {2}), ("random", {0, 1, 2})):
        m = bound(unseen=how)
        server = m.switch(replace(m.setup(), votes={0: [0]}))
        assert set(server.layer) == set(range(5)) and {server.layer[i] for i in range(1, 5)} <= layer


# ---- 10, 11: mixing --------------------------------------------------------------------------------------------------
def cluster(
    m: Method, phis: list[torch.Tensor], layer: int = 1, known: dict[int, torch.Tensor] | None = None, n: int = 9
):
    """One round of a cluster server whose members 0.. take part with these personal layers."""
    uploads = []
    for i, phi in enumerate(phis):
        params = {k: torch.full_like(v, float(i + 1)) for k, v in m.ctx.w0.items()}
        uploads.append(Upload({**T.drop(params, m.own(layer).__contains__), "x:phi": phi}, {}, i, 10 * (i + 1)))
    edge = Edge(layer, tuple(range(n)), {"phi": known} if known else {}, Download(edge={layer: {}}))
    state, up = m.merge(edge, uploads, 5)
    return Edge(layer, tuple(range(n)), state, Download()), up


def level(m: Method, edge: Edge, i: int) -> float:
    body = m.relay(edge, [i], 6).to(i)
    assert len({round(float(v.mean()), 4) for v in body.values()}) == 1
    return float(next(iter(body.values())).mean())


def test_p10_phi_is_symmetric_between_0_and_1_and_rows_sum_to_one() -> None:
    m = bound()
    phis = [torch.randn(4, 5, generator=RNG) for _ in range(6)]
    phi = similarity(torch.stack(phis), torch.stack(phis), False, "clip")
    torch.testing.assert_close(phi, phi.T)
    assert float(phi.min()) >= 0 and float(phi.max()) <= 1
    torch.testing.assert_close(phi.diagonal(), torch.ones(6).double(), rtol=0, atol=1e-6)
    ids = list(range(6))
    torch.testing.assert_close(weights_of(phi, ids, ids, torch.ones(6) / 6).sum(1), torch.ones(6).double())
    rows, note = m.rows(dict(enumerate(phis)), ids, [0, 1, 2], torch.ones(3) / 3)
    assert all(float(r.sum()) == pytest.approx(1, abs=1e-6) for r in rows.values())
    others = phi[:, :3][~torch.eye(6, 3, dtype=torch.bool)]
    assert note == {"mean": pytest.approx(float(others.mean())), "std": pytest.approx(float(others.std(correction=0)))}


def test_p11_identical_layers_give_the_plain_mean_and_one_participant_keeps_its_body() -> None:
    m, same = bound(), torch.ones(2, 3)
    edge, _ = cluster(m, [same, same, same])
    assert [level(m, edge, i) for i in range(3)] == pytest.approx([2.0] * 3, abs=1e-5)
    edge, _ = cluster(m, [same])
    assert level(m, edge, 0) == 1.0


def test_equation_12_by_hand_with_fallbacks() -> None:
    m = bound()
    a, b, minus = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[-1.0, -5.0]])
    edge, _ = cluster(m, [a, b, minus], known={5: torch.tensor([[0.0, 1.0]]), 6: torch.tensor([[-1.0, 0.4]])})
    r = 1 / math.sqrt(2)
    assert level(m, edge, 0) == pytest.approx((1 + 2 * r) / (1 + r), abs=1e-5)
    assert level(m, edge, 2) == pytest.approx(3.0)  # like nobody but itself
    assert level(m, edge, 5) == pytest.approx(2.0)  # last known layer: only b is like it
    mean = (10 * 1 + 20 * 2 + 30 * 3) / 60
    assert level(m, edge, 8) == pytest.approx(mean, abs=1e-5)  # unknown layer: equation (5)
    zero, _ = cluster(m, [a, torch.zeros(1, 2), b])
    assert level(m, zero, 1) == pytest.approx(2.0)  # took part and is like nobody, not even itself: its own body
    lonely, _ = cluster(m, [a], known={6: -a})
    assert level(m, lonely, 6) == pytest.approx(1.0)  # like nobody: the mean


def test_unsampled_bodies_by_similarity_by_mean_or_kept() -> None:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    got = {}
    for how in ("similarity", "cluster_mean", "keep"):
        m = bound(unsampled_body=how)
        edge, _ = cluster(m, [a, b, a, b])  # bodies 1..4
        again = [Upload({**T.scaled(T.drop(m.ctx.w0, m.own(1).__contains__), 0), "x:phi": a}, {}, 0, 10)]
        edge = Edge(1, edge.clients, m.merge(Edge(1, edge.clients, edge.state, Download()), again, 6)[0], Download())
        got[how] = [level(m, edge, i) for i in (0, 2, 3)]
    assert got["similarity"] == pytest.approx([0, 0, 0])
    assert got["cluster_mean"] == pytest.approx([0, 0, 0])
    assert got["keep"] == pytest.approx([0, 2, 3])  # those who took part in the first round had (1+3)/2 and (2+4)/2
    m = bound(unsampled_body="keep")
    first = {1: {"fc1.weight": torch.full((2, 2), 7.0)}}
    state, _ = m.merge(
        Edge(1, (0, 1), {}, Download(edge=first)), [Upload({"fc1.weight": torch.ones(2, 2), "x:phi": a}, {}, 0, 1)], 5
    )
    kept = m.relay(Edge(1, (0, 1), state, Download()), [1], 6).to(1)
    assert kept["fc1.weight"].tolist() == [[7.0, 7.0], [7.0, 7.0]]


# ---- 12: what is private ---------------------------------------------------------------------------------------------
def test_p12_personal_layers_survive_the_download_and_bodies_are_overwritten(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=4)
    m = loop.method
    for i in m.ctx.clients:
        state, got = loop.runtime.states.get(i), handed(loop, i)
        params, _ = m.personal(state, got, None)
        layer = loop.server.layer[i]
        for k, v in params.items():
            assert torch.equal(v, state["w"][k] if k in m.own(layer) else got[k])
        assert not set(m.own(layer)) & set(got) and set(got) | set(m.own(layer)) == set(m.ctx.w0)


def test_before_the_first_aggregation_of_a_cluster_the_classifier_is_not_sent(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=2, preparation=1, join=1.0)
    m, head = loop.method, loop.method.ctx.group("head")
    server = replace(loop.server, trained=[])
    for layer, body in m.down(server, m.ctx.clients, 2).edge.items():
        assert not head & set(body) and not set(m.own(layer)) & set(body)
    client = {"w": T.scaled(m.ctx.w0, 2.0), "layer": None, "ballot": None}
    byte = {"x:layer": torch.tensor([0], dtype=torch.uint8)}
    for how, factor in (("carry", 2.0), ("reset", 1.0)):
        params, extras = bound(switch_init=how).personal(client, byte, None)
        assert torch.equal(params["classifier.weight"], factor * m.ctx.w0["classifier.weight"])
        assert torch.equal(params["fc1.weight"], client["w"]["fc1.weight"]) and extras["layer"] == 0


def test_switch_init_mean_uploads_the_classifier_once(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=4, preparation=2, switch_init="mean")
    size = [e["bytes"]["device-cloud"]["up"]["body"] for e in events(tmp_path)[:2]]
    head = T.nbytes(T.keep(loop.method.ctx.w0, lambda k: k in loop.method.ctx.group("head")))
    assert size[1] - size[0] == 5 * head


# ---- readings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bn_stats", ["shared", "local"])
def test_mended_the_model_right_after_the_switch_is_the_one_right_before(bn_stats: str, tmp_path: Path) -> None:
    bench = Bench(find("fedcpmd-mended"), {"preparation": 2})
    session = bench.session(rounds=3, join=0.6, bn_stats=bn_stats)
    loop = open_loop(session, tmp_path / "again")
    loop.run(Callbacks(should_stop=lambda: loop.done >= 2))
    m, after = loop.method, loop.server
    assert after.layer and not after.trained
    before = replace(after, layer=None)
    for i in m.ctx.clients:
        data = session.federation.data(i)
        state = loop.runtime.states.get(i) or m.init_client(data)
        one, two = (m.personal(state, m.down(server, [i], 3).to(i), data)[0] for server in (before, after))
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    loop.folder.close()


def test_mended_nothing_private_becomes_shared(tmp_path: Path) -> None:
    loop = play(tmp_path, "fedcpmd-mended", preparation=1, rounds=4)
    m, server = loop.method, loop.server
    for i, tree in server.sent.items():
        private = m.ctx.group(f"layer:{m.layers[server.layer[i]]}")
        assert tree.keys() == m.body(server.layer[i]).keys() and private and not private & tree.keys()


def test_mended_a_layer_is_mixed_over_the_participants_that_share_it() -> None:
    w = {"a": torch.tensor([0.0]), "b": torch.tensor([7.0]), "c": torch.tensor([9.0])}
    sent = {1: {"a": torch.tensor([1.0])}, 2: {"a": torch.tensor([4.0]), "b": torch.tensor([3.0])}}
    rows = {1: torch.tensor([0.75, 0.25]), 5: torch.tensor([1.0, 0.0])}
    got = shared_bodies(w, sent, rows, [1, 5, 8])
    assert got[1] == {"a": torch.tensor([1.75]), "b": torch.tensor([3.0]), "c": torch.tensor([9.0])}
    assert got[5] == {"a": torch.tensor([1.0]), "b": torch.tensor([7.0]), "c": torch.tensor([9.0])}
    assert got[8] == w


def test_mended_weights_are_those_of_pfedsim_on_changes() -> None:
    m = bound("fedcpmd-mended")
    moved = {k: v + (k.startswith("classifier") and torch.ones_like(v)) for k, v in m.ctx.w0.items()}
    phi = m.similarity(moved, 0)["x:phi"]
    assert phi.shape == (10, 17) and torch.allclose(phi, torch.ones(10, 17), atol=1e-6)
    turned = phi.clone()
    turned[5:] = -1
    rows, _ = m.rows({0: phi, 1: turned, 2: -phi}, [0, 1, 2], [0, 1, 2], torch.ones(3) / 3)
    same, half = -math.log(1e-4), 0.0
    assert torch.allclose(rows[0], torch.tensor([1.0, 0.0, 0.0]), atol=1e-6)  # the cosine of five rows in ten is 0
    assert same > half and torch.allclose(rows[2], torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)
    half_way = phi.clone()
    half_way[:2] = -1  # eight rows alike, two opposed: 0.6
    rows, _ = m.rows({0: phi, 1: half_way}, [0, 1], [0, 1], torch.ones(2) / 2)
    other = -math.log(1 - 0.6)
    assert torch.allclose(rows[0], torch.tensor([same, other]) / (same + other), atol=1e-4)


def test_switch_init_global_hands_both_parts_to_who_has_not_trained_since(tmp_path: Path) -> None:
    loop = play(tmp_path, plain=True, preparation=1, rounds=2, join=1.0)
    m, server = loop.method, loop.server
    assert set(server.w) == set(m.ctx.w0)  # the last round of phase 1 sent the classifiers too
    assert all(not set(m.own(server.layer[i])) & handed(loop, i).keys() for i in m.ctx.clients)
    fresh = replace(server, trained=[])
    sent = m.down(fresh, m.ctx.clients, 2)
    for i in m.ctx.clients:
        got = {**sent.edge[server.layer[i]], **sent.each[i]}
        params, _ = m.personal({"w": T.scaled(m.ctx.w0, 3.0), "layer": None, "ballot": None}, got, None)
        assert all(torch.equal(params[k], server.w[k]) for k in params)
        m.schema("down", Moment(fresh, i, 2)).check(got, "the download")


def test_a_cluster_has_at_least_so_many_participants() -> None:
    server = replace(bound().setup(), layer={0: 0, 1: 0, 2: 0, 3: 1, 4: 1})
    five = bound(min_participants=5).sample(server, 5, torch.Generator())
    assert sorted(five) == [0, 1, 2, 3, 4]  # five of each, or all of the cluster
    least = bound(min_participants=2).sample(server, 5, torch.Generator())
    assert len(set(least) & {0, 1, 2}) == 2 and {3, 4} <= set(least)


def test_in_a_relay_one_client_of_each_cluster_trains_and_hands_its_model_on(tmp_path: Path) -> None:
    m = bound("fedcpmd-code")
    assert len(m.sample(m.setup(), 1, torch.Generator())) == 1
    server = replace(m.setup(), layer={0: 0, 1: 0, 2: 0, 3: 1, 4: 1})
    picked = m.sample(server, 5, torch.Generator())
    assert len(picked) == 2 and len(set(picked) & {0, 1, 2}) == 1
    loop = play(tmp_path, "fedcpmd-code", preparation=7, rounds=9)
    rounds = [e["participants"] for e in events(tmp_path) if "participants" in e]
    assert [len(ids) for ids in rounds[:7]] == [1] * 7
    for i in rounds[8]:  # what a cluster's next participant starts from is what the last one ended with
        body = loop.edges[loop.server.layer[i]]["bodies"]
        own = loop.runtime.states.get(i)["w"]  # type: ignore[attr-defined]
        assert body and all(torch.equal(body[k][0], own[k]) for k in body)


# ---- 13, 15: equalities ----------------------------------------------------------------------------------------------
def test_p13_with_the_classifier_alone_and_phi_one_it_is_fedper(tmp_path: Path) -> None:
    run = {"rounds": 4, "join": 1.0, "weighting": "uniform"}
    ours = play(tmp_path / "a", "fedcpmd-classifier", similarity_payload="none", **run)
    fedper = Bench(find("fedper"), {}).play(tmp_path / "b", **run)
    assert set(ours.server.layer.values()) == {0} and list(ours.edges) == [0]
    for i in ours.method.ctx.clients:
        close(handed(ours, i), handed(fedper, i))
        close(
            T.keep(ours.runtime.states.get(i)["w"], lambda k: k.startswith("classifier")),
            fedper.runtime.states.get(i)["own"],
        )


def test_p15_only_cluster_with_a_single_cluster_is_fedavg(tmp_path: Path) -> None:
    one = play(tmp_path / "a", "fedcpmd-only-cluster", candidates=["classifier"])
    fedavg = Bench(find("fedavg"), {}).play(tmp_path / "b", rounds=4, join=1.0)
    for i in one.method.ctx.clients:
        close(handed(one, i), fedavg.server["w"])
        close(one.runtime.states.get(i)["w"], fedavg.runtime.states.get(i) or one.runtime.states.get(i)["w"])


# ---- 14: bytes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("layer", "body"), [(0, 13_930), (1, 51_886), (2, 61_200)])
def test_p14_bytes_are_those_of_the_page(layer: int, body: int) -> None:
    def size(m: Method, link: Any, server: dict[str, Any], round: int) -> int:
        return m.schema(link, Moment(server, 3, round)).nbytes()

    m = lenet()
    assert T.flatten(m.ctx.w0, m.ctx.net.trainable).numel() == 62_050
    assert size(m, "down", m.setup(), 1) == 4 * 61_200
    assert size(m, "up", m.setup(), 1) == 4 * 61_200 + 4 + 1
    assert size(lenet(distance="auto"), "up", m.setup(), 1) == 4 * 61_200 + 4 + 4
    server = replace(m.setup(), layer={3: layer, 4: layer}, trained=[4])
    assert size(m, "down", server, 70) == 4 * body + 1  # with the byte of the switch
    text = lenet(plain=True)  # by default the first download of phase 2 is a whole model
    assert size(text, "up", text.setup(), text.prep) == 4 * 62_050 + 4 + 1
    begun = replace(text.setup(), w=T.drop(text.ctx.w0, text.stays), layer={3: layer, 4: layer}, trained=[4])
    assert size(text, "down", begun, 70) == 4 * 62_050 + 1
    server = replace(server, trained=[3, 4])
    assert size(m, "down", server, 70) == 4 * body and size(m, "up", server, 70) == 4 * 62_050
    assert size(lenet(similarity_payload="sketch"), "up", server, 70) == 4 * body + 4 * 64
    assert size(lenet(similarity_payload="none"), "up", server, 70) == 4 * body


def test_p14_the_ledger_separates_body_similarity_votes_and_switch(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=3, preparation=1)
    one, two, three = (e["bytes"] for e in events(tmp_path))
    m, whole = loop.method, T.nbytes(loop.method.ctx.w0)
    own = [T.nbytes({k: m.ctx.w0[k] for k in m.own(loop.server.layer[i])}) for i in range(5)]
    assert one["device-cloud"]["up"]["vote"] == 5 * 5
    for book in (two, three):
        assert book["device-edge"]["up"] == {"body": 5 * whole - sum(own), "similarity": sum(own)}
    assert two["device-edge"]["down"]["switch"] == 5 and "switch" not in three["device-edge"]["down"]
    assert three["device-edge"]["down"]["body"] == 5 * whole - sum(own)


# ---- knobs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", [
    {"phase1_personal": "voted"}, {"phase1_personal": "none"}, {"switch_init": "mean"}, {"unsampled_body": "keep"},
    {"similarity_payload": "sketch", "sketch_dims": 3}, {"candidates": ["fc2", "fc1"]}, {"gaussian": "diag_mean"},
    {"distance": "auto", "unseen": "random"}, {}, {"reading": "code"}, {"reading": "mended"},
    {"personal_part": "layer_and_classifier"}, {"switch_init": "carry"},
    {"reading": "mended", "personal_part": "layer_and_classifier"},
    {"reading": "mended", "similarity_payload": "sketch", "sketch_dims": 3},
], ids=str)  # fmt: skip
def test_declared_bytes_are_counted_bytes_for_every_knob(own: dict[str, Any], tmp_path: Path) -> None:
    from coterie.testing import check

    name = {"code": "fedcpmd-code", "mended": "fedcpmd-mended"}.get(own.get("reading", ""), "fedcpmd")
    cls, own = find(name), {k: v for k, v in own.items() if k != "reading"}
    check(cls, "payload_is_what_is_declared", **own)
    check(cls, "any_subset_of_answers_is_aggregated", **own)


@pytest.mark.parametrize("own", [
    {"phi_map": "shift01"}, {"phi_map": "abs"}, {"phi_of": "rows"}, {"phi_input": "delta"}, {"fit_normalize": "zscore"},
    {"label_encoding": "onehot"}, {"score": "absdiff"}, {"score": "eq6"}, {"js_sqrt": True},
    {"distance": "w2", "w2_sigma": False},
    {"distance": "js_moment"}, {"sampler": "uniform"}, {"tie": "fc2"}, {"candidates": "all"}, {"vote": "batch"},
], ids=str)  # fmt: skip
def test_every_knob_runs(own: dict[str, Any], tmp_path: Path) -> None:
    assert play(tmp_path, rounds=3, **own).done == 3


def test_settings_without_effect_are_refused() -> None:
    for own, words in (
        ({"distance": "w2", "js_sqrt": True}, "js_sqrt = True has no effect unless the distance is js"),
        ({"w2_sigma": False}, "w2_sigma = False has no effect unless the distance is w2"),
        ({"sketch_dims": 8}, "sketch_dims = 8 has no effect unless similarity_payload = sketch"),
        ({"similarity_payload": "none", "phi_of": "rows"}, "phi_of = rows has no effect unless similarity_payload is"),
    ):
        with pytest.raises(CoterieError, match=words):
            build_method("fedcpmd", own)
        build_method("fedcpmd", {k: v for k, v in own.items() if k in ("distance", "similarity_payload")})
    build_method("fedcpmd", {"distance": "auto", "js_sqrt": True, "w2_sigma": False})


def test_phi_input_delta_compares_changes() -> None:
    m = bound(phi_input="delta")
    assert not m.similarity(m.ctx.w0, 0)["x:phi"].any()
    assert torch.equal(bound().similarity(m.ctx.w0, 0)["x:phi"], flat_layer(m.ctx.w0, ["fc1.weight", "fc1.bias"]))


def test_preparation_is_a_share_or_a_number_of_rounds() -> None:
    assert lenet().prep == 60 and lenet(preparation=40).prep == 40 and bound().prep == 1
    with pytest.raises(CoterieError, match="preparation = 60"):
        bound(preparation=60)


# ---- the choice of the distance --------------------------------------------------------------------------------------
def test_auto_takes_the_distance_that_agrees_most_with_the_others(tmp_path: Path) -> None:
    said = torch.tensor([[0, 1, 0, 2], [1, 1, 0, 2], [2, 0, 2, 2], [0, 1, 1, 1]])
    agree = [sum(int(v[d] == v[e]) for v in said for e in range(4)) for d in range(4)]
    assert votes.most_agreed(said) == agree.index(max(agree)) == 2
    assert votes.most_agreed(torch.zeros(3, 4)) == 0  # all alike: js
    m = bound(distance="auto")
    server = m.switch(replace(m.setup(), votes={i: v.tolist() for i, v in enumerate(said)}))
    assert server.distance == 2 and [server.layer[i] for i in range(4)] == said[:, 2].tolist()
    assert m.facts(server)["distance"] == "hellinger"


def test_auto_ends_like_the_distance_it_picked(tmp_path: Path) -> None:
    auto = play(tmp_path / "auto", "fedcpmd-auto")
    picked = events(tmp_path / "auto")[-1]["facts"]["distance"]
    fixed = play(tmp_path / "fixed", distance=picked)
    assert auto.server.layer == fixed.server.layer and codec.equal(auto.server.w, fixed.server.w)
    assert codec.equal(auto.edges, fixed.edges)


# ---- variants --------------------------------------------------------------------------------------------------------
def test_random_control_has_the_same_counts_and_another_assignment() -> None:
    m, plain = bound("fedcpmd-random"), bound()
    said = {i: [int(i > 1)] for i in range(5)}
    server = replace(m.setup(), votes=said, samples={i: 10 + i for i in said})
    want, got = plain.switch(server).layer, m.switch(server).layer
    assert sorted(want.values()) == sorted(got.values()) and want.keys() == got.keys() and want != got


def test_oracle_takes_the_layer_that_helps_most_on_validation_data() -> None:
    m, session = bound("fedcpmd-oracle"), Bench(find("fedcpmd-oracle"), {}).session()
    data = session.federation.data(0)
    common = int(data.val.y.mode().values)
    start = {k: torch.zeros_like(v) for k, v in m.ctx.w0.items()}
    start["classifier.bias"][int((common + 1) % 10)] = 1.0
    trained = {**start, "classifier.bias": nn.functional.one_hot(torch.tensor(common), 10).float()}
    s = m.scores(trained, {"start": start}, data)
    share = [float((data.val.y == c).float().mean()) for c in ((common + 1) % 10, common)]
    assert s.flatten().tolist() == pytest.approx([1 - share[0], 1 - share[0], 1 - share[1]])
    assert m.leading(votes.cast(None, s)).tolist() == [2]
    rounds = torch.tensor([[[0.4, 0.5, 0.9]], [[0.4, 0.5, 0.9]], [[0.9, 0.1, 0.9]]])  # fc1 wins twice, fc2 on average
    assert m.leading(votes.cast(None, rounds)).tolist() == [1] and bound().leading(
        votes.cast(None, rounds)
    ).tolist() == [0]


def test_only_decoupling_averages_each_layer_over_those_who_share_it() -> None:
    m = bound("fedcpmd-only-decoupling")
    layer = {0: 0, 1: 2, 2: 2}
    server = replace(m.setup(), layer=layer)
    params = [{k: torch.full_like(v, float(i)) for k, v in m.ctx.w0.items()} for i in range(3)]
    sent = [Upload(T.drop(p, m.own(layer[i]).__contains__), {}, i, 10 * (i + 1)) for i, p in enumerate(params)]
    w = m.aggregate(server, sent, 5).w
    assert float(w["fc1.weight"].mean()) == pytest.approx((20 * 1 + 30 * 2) / 50)
    assert float(w["fc2.weight"].mean()) == pytest.approx((20 * 1 + 30 * 2) / 60)
    assert float(w["classifier.weight"].mean()) == 0.0
    alone = m.aggregate(replace(server, layer=dict.fromkeys(range(3), 0)), [sent[0]], 5).w
    assert torch.equal(alone["fc1.weight"], m.ctx.w0["fc1.weight"])  # nobody sent it
    got = m.down(replace(server, w=w, trained=[0]), [0, 1], 6)
    assert "fc1.weight" not in got.to(0) and "classifier.weight" in got.to(0) and "x:layer" in got.to(1)


@pytest.mark.parametrize("layer", NAMES)
def test_full_keeps_the_named_layer(layer: str, tmp_path: Path) -> None:
    loop = play(tmp_path, "fedcpmd-full", layer=layer, rounds=2)
    assert set(loop.runtime.states.get(0)["own"]) == {f"{layer}.weight", f"{layer}.bias"}
    if layer == "classifier":
        fedper = Bench(find("fedper"), {}).play(tmp_path / "b", rounds=2, join=1.0)
        assert codec.equal(loop.server, fedper.server)


# ---- mistakes --------------------------------------------------------------------------------------------------------
def test_a_model_with_one_candidate_layer_gets_a_sentence() -> None:
    def logistic(name: str, **own: Any) -> Method:
        run = settings(method="fedavg", clients=3, rounds=9).model_copy(update={"method": name, "settings": own})
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        return prepare(run, Engine(workers=1), Objects(find(name), small_data(200), model)).method

    with pytest.raises(CoterieError, match=r"at least two candidate layers \(it has 1: 1\)"):
        logistic("fedcpmd")
    assert logistic("fedcpmd-classifier").layers == ("1",)
    assert logistic("fedcpmd", candidates=["1"]).layers == ("1",)
    assert logistic("fedcpmd-full").private("1.weight")
    with pytest.raises(CoterieError, match='unknown candidate layer "fc9"'):
        bound(candidates=["fc9"])
    with pytest.raises(CoterieError, match='unknown layer "fc9"'):
        bound("fedcpmd-full", layer="fc9")


@pytest.mark.parametrize("name", ["fedcpmd", "fedcpmd-auto", "fedcpmd-only-cluster", "fedcpmd-only-decoupling"])
def test_a_newcomer_gets_a_layer_by_its_own_vote_and_the_body_of_that_cluster(name: str, tmp_path: Path) -> None:
    session = Bench(find(name), {}).session(newcomers=1, rounds=4)
    loop = open_loop(session, tmp_path)
    loop.run()
    loop.folder.close()
    m, server, data = loop.method, loop.server, session.federation.data(4)
    got = handed(loop, 4)
    shared = {**m.ctx.w0, **server.w}  # before training: the model that it votes with
    ballot = votes.cast(None, m.scores(shared, {}, data))
    layer = int(m.leading(ballot)[server.distance])
    m.schema("down").check(got, "the download")
    for chosen_layer in range(3):  # also for clusters that this newcomer did not vote for
        body = T.tagged(str(chosen_layer), got)
        assert body == server.bodies.get(chosen_layer, {}) and body.keys() <= m.body(chosen_layer).keys()
    params, extras = m.personal(m.init_client(data), got, data)
    assert extras["layer"] == layer
    want = {**shared, **server.bodies.get(layer, {})}
    assert params.keys() == want.keys() and all(torch.equal(params[k], want[k]) for k in want)


def test_the_cloud_knows_the_mean_body_of_each_cluster(tmp_path: Path) -> None:
    loop = play(tmp_path, rounds=4)
    m, server = loop.method, loop.server
    assert server.bodies.keys() == m.edges(server).keys()
    for layer, members in m.edges(server).items():
        states = [loop.runtime.states.get(i)["w"] for i in members]  # all took part in the last round
        sizes = [server.samples[i] for i in members]
        mean = T.mean([{k: w[k] for k in m.body(layer)} for w in states], sizes)
        assert all(torch.equal(server.bodies[layer][k], mean[k]) for k in mean)


# ---- the motivation: X-full and given layers -------------------------------------------------------------------------
def test_with_one_layer_for_all_mean_cluster_is_x_full(tmp_path: Path) -> None:
    run = {"rounds": 3, "join": 0.6}
    full = play(tmp_path / "a", "fedcpmd-full", layer="fc2", **run)
    given = Bench(find("fedcpmd-assigned"), {"assignment": ["fc2"] * 5}).play(tmp_path / "b", **run)
    picked = [[e["participants"] for e in events(tmp_path / k)] for k in "ab"]
    assert [len(ids) for ids in picked[0]] == [len(ids) for ids in picked[1]] == [3] * 3
    assert list(given.server["w"]) == [2] and given.server["w"][2].keys() == full.server["w"].keys()
    assert set(given.runtime.states.get(picked[1][0][0])["own"]) == {"fc2.weight", "fc2.bias"}


def test_clusters_of_given_layers_train_apart(tmp_path: Path) -> None:
    layers = ["fc1", "fc1", "classifier", "fc1", "classifier"]
    loop = Bench(find("fedcpmd-assigned"), {"assignment": layers}).play(tmp_path, rounds=3, join=1.0)
    facts = events(tmp_path)[-1]["facts"]
    assert facts["clusters"] == {"fc1": 3, "classifier": 2} and list(facts["layer"].values()) == layers
    m = loop.method
    for edge, members in m.edges(loop.server).items():
        trees = [loop.runtime.states.get(i)["own"] for i in members]
        layer = m.ctx.net.layout.layers[edge]
        assert all(set(t) == {f"{layer}.weight", f"{layer}.bias"} for t in trees)
        assert not set(trees[0]) & loop.server["w"][edge].keys()
    one, two = loop.server["w"].values()
    assert not torch.equal(one["bn1.weight"], two["bn1.weight"])
    assert events(tmp_path)[-1]["eval"]["personal/test"]["cluster_count"] == 2


def test_a_wrong_assignment_is_refused() -> None:
    for wrong, words in (
        (["fc1"] * 4, "the layers of 4 clients, but the run has 5"),
        (["fc1", "fc9"] * 2, "4 clients"),
    ):
        with pytest.raises(CoterieError, match=words):
            bound("fedcpmd-assigned", assignment=wrong)
    with pytest.raises(CoterieError, match='unknown layer "fc9"'):
        bound("fedcpmd-assigned", assignment=["fc9"] * 5)


# ---- the distance that is best on validation data --------------------------------------------------------------------
def test_best_takes_the_distance_whose_layers_are_best_on_validation_data() -> None:
    m = bound(distance="best")
    server = replace(
        m.setup(), votes={0: [0, 1, 2, 0], 1: [1, 1, 0, 2]}, samples={0: 10, 1: 90},
        accuracy={0: [0.9, 0.1, 0.1, 0.1], 1: [0.2, 0.3, 0.4, 0.4]},
    )  # fmt: skip
    found = m.switch(server)  # by samples: 27, 28, 37, 37; a tie goes to the first
    assert found.distance == 2 and found.layer == {0: 2, 1: 0} and m.facts(found)["distance"] == "hellinger"


def test_best_sends_the_accuracy_of_the_layers_in_the_lead(tmp_path: Path) -> None:
    loop = play(tmp_path, distance="best", rounds=3, preparation=1)
    first, m = events(tmp_path)[0], loop.method
    assert first["bytes"]["device-cloud"]["up"]["vote"] == 5 * (4 + 4 + 16)
    for i in m.ctx.clients:
        lead, found = loop.server.votes[i], loop.server.accuracy[i]
        assert all(0 <= a <= 1 for a in found)
        assert all(found[d] == found[e] for d in range(4) for e in range(4) if lead[d] == lead[e])
    data = Bench(find("fedcpmd"), {}).session().federation.data(0)
    start = T.scaled(m.ctx.w0, 0.0)
    trained = {**start, "classifier.bias": nn.functional.one_hot(data.val.y.mode().values, 10).float()}
    share = float((data.val.y == data.val.y.mode().values).double().mean())
    zero = float((data.val.y == 0).double().mean())  # all outputs are equal: class 0
    assert m.accuracies(trained, start, data).tolist() == pytest.approx([zero, zero, share])


def test_best_needs_validation_data() -> None:
    with pytest.raises(CoterieError, match="FedCPMD needs validation parts to choose by"):
        Bench(find("fedcpmd"), {"distance": "best"}).session(val_share=0)


# ---- who did not answer, and who answers wrongly ---------------------------------------------------------------------
@pytest.mark.parametrize("silent", [{1}, {1, 2}, {2}, {2, 3}])
@pytest.mark.parametrize("own", [{}, {"switch_init": "mean"}, {"unsampled_body": "keep"}], ids=str)
def test_rounds_that_nobody_answers_do_not_stop_it(silent: set[int], own: dict[str, Any], tmp_path: Path) -> None:
    session = Bench(find("fedcpmd"), {"preparation": 2, **own}).session(rounds=6)
    loop = open_loop(session, tmp_path)
    train = loop.runtime.train

    def some(requests: Any) -> Any:
        return train([r for r in requests if r.round not in silent])

    loop.runtime.train = some  # type: ignore[method-assign]
    loop.run()
    loop.folder.close()
    assert set(loop.server.layer) == set(range(5))


def told(*values: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_a_wrong_upload_of_phase_1_is_refused() -> None:
    m = bound(distance="auto")
    good = {**m.setup().w, "x:vote": told(0, 1, 2, 1), "x:samples": told(9, dtype=torch.int32)}
    refuses(
        m.schema("up", Moment(m.setup(), 0, 1)),
        good,
        ({"x:vote": told(0, 1, 2, 99)}, "99 in x:vote, outside 0 to 2"),
        ({"x:vote": told(0, 1)}, "x:vote of shape"),
        ({"x:vote": told(0, 1, 2, -1, dtype=torch.int64)}, "x:vote of type int64"),
        ({"x:samples": told(-1, dtype=torch.int32)}, "-1 in x:samples"),
        ({"x:ids": told(0, dtype=torch.int32)}, "x:ids' that is not declared"),
        ({"classifier.bias": torch.zeros(10)}, "classifier.bias' that is not declared"),
    )


def test_a_wrong_upload_of_phase_2_is_refused() -> None:
    m = bound()
    server = replace(m.setup(), layer={0: 1, 1: 1, 2: 0}, trained=[0])
    good = {**m.body(1), **m.similarity(m.ctx.w0, 1)}
    wrong = m.similarity(m.ctx.w0, 0)
    refuses(
        m.schema("up", Moment(server, 0, 3)), good, (wrong, "x:phi of shape"), ({"x:vote": told(0)}, "not declared")
    )
    asked = {"x:vote": told(2), "x:samples": told(9, dtype=torch.int32)}  # a client without a layer is only asked
    refuses(m.schema("up", Moment(server, 4, 3)), asked, ({"x:vote": told(3)}, "outside 0 to 2"))


def test_a_wrong_upload_of_a_cluster_server_is_refused_and_ids_of_others_are_not_counted() -> None:
    m = bound()
    server = replace(m.setup(), layer={0: 1, 1: 0, 2: 1}, trained=[])
    schema = m.schema("edge_up", Moment(server, 1, 3))

    def ids(*values: int) -> dict[str, torch.Tensor]:
        return {"x:ids": told(*values, dtype=torch.int32), **T.tag("mean", m.body(1))}

    refuses(
        schema, ids(0, 2), (ids(0, 99), "outside 0 to 2"), (ids(0, 0), "twice"), (ids(), "shape"), (ids(0, 1, 2), "s")
    )
    assert m.aggregate(server, [Upload(ids(0, 1), {}, 1, 20)], 3).trained == [0]
