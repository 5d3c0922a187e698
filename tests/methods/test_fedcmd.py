"""Tests of FedCMD."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.method import Upload
from coterie.methods.fedcmd.election import client_vote, most_voted, output_scores, round_winner
from coterie.methods.fedcmd.method import FedCMD
from coterie.parts.similarity import softmax_rows
from coterie.testing import open_loop
from support.short_runs import CLIENTS, HEAD, bound, jittered, play, same, session, size, state, traffic, watch


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
    """Both methods start from the model of round 1 and its head."""
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
