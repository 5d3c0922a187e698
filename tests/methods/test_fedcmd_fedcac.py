"""FedCMD and FedCAC: a layer, or entries, that are personal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.fedcac import FedCAC, collaborators, overlap
from coterie.methods.fedcmd import FedCMD
from coterie.methods.fedcmd.election import client_vote, most_voted, output_scores, round_winner
from coterie.parts.similarity import softmax_rows
from coterie.testing import open_loop
from support.short_runs import HEAD, bound, jittered, near, play, same, session, size, state, traffic, watch

CLIENTS = range(5)


# ---- FedCMD ----------------------------------------------------------------------------------------------------------
class OnlyHead(FedCMD):
    def _candidates(self) -> tuple[str, ...]:
        return ("classifier",)


def test_fedcmd_elects_the_only_candidate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    loop = play("fedcmd", model)
    assert loop.server["layer"] == "1"


def test_fedcmd_is_fedavg_while_it_votes_and_the_layer_stays_afterwards() -> None:
    s = session("fedcmd", own={"rho": 0.4}, rounds=5)
    loop, seen = watch(s)
    _, expected = watch(session("fedavg", rounds=2))
    for ours, theirs in zip(seen[:2], expected, strict=True):
        assert all(same(T.drop(a.tree, lambda k: ":" in k), b.tree) for a, b in zip(ours, theirs, strict=True))
    layers = [e["facts"]["layer"] for e in loop.events]  # type: ignore[attr-defined]
    assert layers[0] is None and len(set(layers[1:])) == 1 and layers[1] in ("fc1", "fc2", "classifier")
    assert sum(loop.server["votes"]) == 2


def test_fedcmd_with_the_head_elected_goes_on_as_fedper(tmp_path: Path) -> None:
    """Both from the model of round 1; the private head in both is the head of that model."""
    s = session(OnlyHead, own={"rho": 0.2}, rounds=4)
    cmd, _ = watch(s)
    start = play("fedavg", rounds=1).server["w"]
    per = open_loop(session("fedper", rounds=4), tmp_path)
    per.folder.open_logs()
    per.server, per.done = {"w": T.drop(start, HEAD.__contains__)}, 1
    for i in CLIENTS:
        per.runtime.states.put(i, {"own": T.keep(start, HEAD.__contains__)}, 1)
    for _ in (2, 3, 4):
        per.step()
    per.folder.close()
    assert same(T.drop(cmd.server["w"], HEAD.__contains__), per.server["w"])
    for i in (i for i in CLIENTS if i in cmd.server["answered"]):
        assert same(T.keep(state(cmd, i)["w"], HEAD.__contains__), state(per, i)["own"])


def after_election(layer: str) -> tuple[FedCMD, dict[str, Any]]:
    method = bound("fedcmd", own={"rho": 0.2}, rounds=5)
    assert isinstance(method, FedCMD)
    vote = {"x:vote": torch.tensor([method._candidates().index(layer)], dtype=torch.uint8)}
    return method, method.aggregate(method.setup(), [Upload({**jittered(method.ctx.w0, 1), **vote}, {}, 0, 10)], 1)


def test_fedcmd_averages_before_the_layer_by_samples_and_mixes_after_it_by_updates() -> None:
    method, server = after_election("fc2")
    models = {1: jittered(server["w"], 2), 3: jittered(server["w"], 3)}
    after = method.aggregate(server, [Upload(models[1], {}, 1, 30), Upload(models[3], {}, 3, 10)], 2)
    assert torch.allclose(after["w"]["fc1.weight"], 0.75 * models[1]["fc1.weight"] + 0.25 * models[3]["fc1.weight"])
    moved = [models[i]["fc2.weight"] - server["w"]["fc2.weight"] for i in (1, 3)]
    s = float(nn.functional.cosine_similarity(moved[0], moved[1], dim=1).mean())
    assert float(after["similarity"][1, 3]) == pytest.approx(float(after["similarity"][3, 1]), abs=1e-12)
    assert float(after["similarity"][1, 3]) == pytest.approx(s, abs=1e-4)
    assert torch.equal(after["similarity"][0], torch.zeros(5).double())
    X = softmax_rows(after["similarity"])
    e = torch.tensor([1.0, torch.e, 1.0, torch.e**s, 1.0]).double()
    assert torch.allclose(X[1], e / e.sum(), atol=1e-4) and torch.allclose(X.sum(1), torch.ones(5).double())
    mixed = method.down(after, [1, 2], 3)
    head = torch.stack(
        [models[i]["classifier.weight"] if i in models else server["w"]["classifier.weight"] for i in CLIENTS]
    )
    assert torch.allclose(mixed.to(1)["classifier.weight"], torch.einsum("j,jab->ab", X[1].float(), head), atol=1e-5)
    assert mixed.to(1).keys() == method.ctx.w0.keys() - {"fc2.weight", "fc2.bias"}
    assert torch.equal(mixed.to(2)["fc2.weight"], server["w"]["fc2.weight"])


def test_fedcmd_counts_the_layer_down_once_and_a_vote_up() -> None:
    s = session(OnlyHead, own={"rho": 0.25}, rounds=4, join=1.0)
    loop, _ = watch(s)
    w = size(s.method.ctx.w0)
    assert traffic(loop, "up") == [w + 1, w, w, w]
    assert traffic(loop, "down") == [w, w, w - size(s.method.ctx.w0, HEAD), w - size(s.method.ctx.w0, HEAD)]


def test_fedcmd_layer_score_compares_the_changes_of_both_distances() -> None:
    x, y = torch.tensor([0.0, 1.0]), torch.tensor([0, 0, 0, 1])  # means 1/2 and 1/4
    outputs = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 4.0]), torch.tensor([0.0, 5.0, 5.0, 5.0])]
    # means 1/2, 1/4, 3/4: to y 1/4, 0, 1/2; to x 0, 1/4, 1/4
    scores = output_scores(x, y, outputs, use_sigma=False)
    assert scores.tolist() == pytest.approx([0.5, 0.5])
    assert int(client_vote([torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.1]), torch.tensor([0.0, 0.4])], 2)) == 0
    assert int(client_vote([], 3)) == 3, "abstains"
    assert most_voted([2, 2, 1]) == 1
    ballots = [Upload({"x:vote": torch.tensor([v], dtype=torch.uint8)}) for v in (0, 0, 2, 3, 3, 3)]
    assert round_winner(ballots, [0, 1, 1]) == [1, 1, 1]


# ---- FedCAC ----------------------------------------------------------------------------------------------------------
def test_fedcac_with_tau_zero_is_fedavg() -> None:
    assert same(play("fedcac", own={"tau": 0.0}).server["w"], play("fedavg").server["w"])


@pytest.mark.parametrize("beta", [0.5, 100])
def test_fedcac_with_tau_one_is_uniform_fedavg(beta: float) -> None:
    cac = play("fedcac", own={"tau": 1.0, "beta": beta}, join=1.0, weighting="uniform")
    avg = play("fedavg", join=1.0, weighting="uniform")
    assert bool(cac.server["together"].all()) and near(cac.server["w"], avg.server["w"], 1e-4)


def test_fedcac_masks_have_density_tau_and_each_overlaps_itself() -> None:
    loop = play("fedcac", own={"tau": 0.3}, join=1.0)
    masks = state(loop, 0)["mask"]
    assert masks.keys() == loop.method.ctx.net.trainable
    assert all(int(m.sum()) == int(0.3 * m.numel() + 1e-9) for m in masks.values())
    overlaps = overlap(loop.server["masks"])
    assert torch.allclose(overlaps.diagonal(), torch.ones(5).double()) and bool((overlaps <= 1).all())
    assert torch.equal(loop.server["masks"][0], T.flatten(masks, [k for k in loop.method.ctx.w0 if k in masks]))


def test_fedcac_masks_the_entries_that_training_moved_to_most_effect() -> None:
    s = session("fedcac", own={"tau": 0.25})
    method, data = s.method, s.federation.data(0)
    start = T.clone(method.ctx.w0)
    params = T.clone(start)
    params["classifier.bias"] = torch.tensor([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, -2.0, 5.0])
    start["classifier.bias"] = torch.tensor([0.0, 0.9, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 5.0])
    kept, _ = method.end({}, params, {"start": start}, data, 1)
    assert kept["mask"]["classifier.bias"].nonzero().flatten().tolist() == [0, 8]
    assert int(kept["mask"]["fc1.bias"].sum()) == 6  # nothing moved there; the mask is not full for that


def test_fedcac_beyond_beta_nobody_shares_critical_entries() -> None:
    s = session("fedcac", own={"beta": 1.5}, join=1.0)
    loop, seen = watch(s)
    assert torch.equal(loop.server["together"], torch.eye(5, dtype=torch.bool))
    custom = T.strip("c:", s.method.down(loop.server, [2], 4).to(2))
    assert near(custom, {k: seen[-1][2].tree[k] for k in custom})


def test_fedcac_starts_from_the_customised_model_in_critical_places_only() -> None:
    s = session("fedcac", join=1.0)
    loop, seen = watch(s)
    assert isinstance(s.method, FedCAC)
    sent, kept = s.method.down(loop.server, [1], 4).to(1), state(loop, 1)
    start, _ = s.method.begin(kept, sent, s.federation.data(1), 4)
    friends = loop.server["together"][1].nonzero().flatten().tolist()
    assert 1 in friends
    mean = T.mean([{k: seen[-1][j].tree[k] for k in kept["mask"]} for j in friends])
    for k, mask in kept["mask"].items():
        assert torch.equal(start[k][~mask], loop.server["w"][k][~mask])
        assert torch.allclose(start[k][mask], mean[k][mask], atol=1e-6)
    assert same(start, s.method.personal(kept, sent, s.federation.data(1))[0])


def test_fedcac_keeps_masks_and_models_of_absent_clients() -> None:
    method = bound("fedcac")
    masks = {k: torch.rand(v.shape) > 0.5 for k, v in method.ctx.w0.items() if k in method.ctx.net.trainable}
    send = [Upload({**jittered(method.ctx.w0, i), **T.prefix("mask:", masks)}, {}, i, 10) for i in (4, 2)]
    one = method.aggregate(method.setup(), send[:1], 1)
    two = method.aggregate(one, send[1:], 2)
    assert two["bank"]["ids"] == [4, 2] and torch.equal(two["masks"][0], one["masks"][0])
    assert torch.equal(two["bank"]["flat"][0], one["bank"]["flat"][0])


def test_fedcac_overlap_is_one_with_itself_and_counts_common_entries() -> None:
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]).bool()
    assert overlap(masks).tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]
    assert torch.equal(overlap(torch.zeros(2, 3).bool()), torch.ones(2, 2, dtype=torch.float64))


def test_fedcac_collaborators_thin_out_and_nobody_is_left_after_beta_rounds() -> None:
    o = torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]], dtype=torch.float64)
    assert collaborators(o, 0, 100).tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert torch.equal(collaborators(o, 90, 100), torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool())
    assert torch.equal(collaborators(o, 101, 100), torch.eye(3).bool())
    for n in range(2, 30):  # some of these means round above the value
        assert collaborators(torch.full((n, n), 0.7, dtype=torch.float64), 500, 100).all()
    assert collaborators(torch.ones(1, 1), 1, 100).tolist() == [[True]]


def test_fedcac_counts_masks_as_bits_and_two_models_down() -> None:
    s = session("fedcac", join=1.0)
    loop, _ = watch(s)
    w, masked = size(s.method.ctx.w0), size(s.method.ctx.w0, set(s.method.ctx.net.trainable))
    bits = sum((s.method.ctx.w0[k].numel() + 7) // 8 for k in s.method.ctx.net.trainable)
    assert traffic(loop, "up") == [w + bits] * 3 and traffic(loop, "down") == [w, w + masked, w + masked]
