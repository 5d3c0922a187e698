"""ECS-FL: the properties that its page lists, on the method itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.core.edges import Edge, EdgeMethod
from coterie.core.method import Download, Method, Moment, Trained, Upload, replace
from coterie.core.tasks import Regression
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.engine.loop import Loop
from coterie.errors import CoterieError
from coterie.methods import build_method, find
from coterie.methods.ecsfl.devices import AGGREGATED, DISTANCE, WEIGHT
from coterie.methods.ecsfl.mended import PROJECTION, ECSFLMended
from coterie.methods.ecsfl.text import ECSFL
from coterie.testing import Bench
from support.refusals import refuses
from support.toy import Toy, begin, open_toy

RULES = ["mean", "invdist", "invdist_all"]
SCALE = [1.0, 0.2, 3.0, 0.5, 2.0]


def bound(cls: type[Method] = ECSFL, **own: Any) -> Any:
    if own.get("aggregation") == "invdist_all":
        own.pop("select_fraction", None)  # it has no effect there and is refused
    return Bench(cls, own).session(join=1.0).method


def play(folder: Path, cls: type[Method] = ECSFL, **own: Any) -> Loop:
    run = {"join": 1.0} | {k: own.pop(k) for k in ("rounds", "join", "dropout", "lr") if k in own}
    return Bench(cls, own).play(folder, **run)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def noise(w: Tree, seed: int, length: float) -> Tree:
    """A direction of this L2 length over the parameters; batch-norm statistics stand."""
    rng = torch.Generator().manual_seed(seed)
    step = {k: torch.zeros_like(v) if "running" in k else torch.randn(v.shape, generator=rng) for k, v in w.items()}
    return T.scaled(step, length / T.flatten(step).norm())


def uploads(w: Tree, scale: list[float] = SCALE) -> list[Upload]:
    return [Upload(T.add(w, noise(w, i, s)), {}, i, 10 + i) for i, s in enumerate(scale)]


def merged(method: EdgeMethod, w: Tree, sent: list[Upload], clients: int | None = None) -> tuple[Tree, set[int]]:
    edge = Edge(0, tuple(range(clients or len(sent))), {}, Download(shared=w))
    _, up = method.merge(edge, sent, 1)
    return T.drop(up.tree, lambda k: ":" in k), set(up.tree[AGGREGATED].tolist())


def close(a: Tree, b: Tree, atol: float = 1e-5) -> None:
    for k, v in a.items():
        torch.testing.assert_close(v, b[k], rtol=1e-4, atol=atol)


def test_p1_inverse_distance_weights_sum_to_one_and_equal_distances_give_the_plain_mean() -> None:
    m = bound(aggregation="invdist", select_fraction=1.0)
    w = m.ctx.w0
    sent = uploads(w, [0.7] * 5)
    close(merged(m, w, sent)[0], T.mean([u.tree for u in sent]))
    sent = uploads(w)
    a = torch.tensor([1 / s for s in SCALE])
    close(merged(m, w, sent)[0], T.mean([u.tree for u in sent], a / a.sum()))
    same = [Upload(T.add(w, noise(w, 3, 0.4)), {}, i, 9) for i in range(4)]
    close(merged(m, w, same)[0], same[0].tree)  # weights that do not sum to one would move it


@pytest.mark.parametrize("rule", ["invdist", "invdist_all"])
def test_p2_weights_do_not_change_when_all_distances_are_scaled(rule: str) -> None:
    m = bound(aggregation=rule, select_fraction=0.6)
    w = m.ctx.w0
    small, large = (merged(m, w, uploads(w, [c * s for s in SCALE]))[0] for c in (1.0, 4.0))
    close(T.scaled(T.sub(small, w), 4.0), T.sub(large, w))


def test_p3_select_all_with_mean_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    ours = play(tmp_path / "a", select_fraction=1.0, epsilon=0.0)
    fedavg = Bench(find("fedavg"), {}).play(tmp_path / "b", join=1.0, weighting="uniform")
    assert codec.equal(ours.server["w"], fedavg.server["w"])
    variant = Bench(find("ecs-fl-mean-all"), {"epsilon": 0.0}).play(tmp_path / "c", join=1.0)
    assert codec.equal(variant.server["w"], fedavg.server["w"])


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 1.0])
def test_p4_size_of_the_selection_and_nearest_inside(fraction: float) -> None:
    m = bound(select_fraction=fraction)
    w = m.ctx.w0
    _, chosen = merged(m, w, uploads(w))
    assert len(chosen) == max(1, math.ceil(fraction * 5))
    assert max(SCALE[i] for i in chosen) <= min([SCALE[i] for i in range(5) if i not in chosen], default=math.inf)
    _, few = merged(m, w, uploads(w)[:2], clients=5)  # K_e counts those asked, not those who answered
    assert len(few) == min(2, max(1, math.ceil(fraction * 5)))
    half = bound(select_fraction=0.5, train_fraction=0.4)
    assert len(merged(half, w, uploads(w)[:2], clients=5)[1]) == 1


def test_p5_selection_is_invariant_to_device_order_and_to_a_permutation_of_parameters() -> None:
    m = bound(select_fraction=0.4)
    w = m.ctx.w0
    ties = [Upload(T.add(w, noise(w, 7, s)), {}, i, 5) for i, s in enumerate([1.0, 0.5, 0.5, 0.5, 2.0])]
    assert merged(m, w, ties)[1] == merged(m, w, ties[::-1])[1] == {1, 2}
    sent, turn = uploads(w), torch.randperm(24, generator=torch.Generator().manual_seed(0))
    permuted = {k: v[turn] if k == "fc1.weight" else v for k, v in w.items()}
    again = [Upload({k: v[turn] if k == "fc1.weight" else v for k, v in u.tree.items()}, {}, u.sender, 5) for u in sent]
    assert merged(m, permuted, again)[1] == merged(m, w, sent)[1] == {1, 3}


@pytest.mark.parametrize("rule", RULES)
def test_p6_a_common_shift_changes_no_choice_and_shifts_the_result(rule: str) -> None:
    m = bound(aggregation=rule, select_fraction=0.6)
    w, sent = m.ctx.w0, uploads(m.ctx.w0)
    shift = noise(w, 99, 5.0)
    moved = [Upload(T.add(u.tree, shift), {}, u.sender, u.samples) for u in sent]
    (a, chosen), (b, again) = merged(m, w, sent), merged(m, T.add(w, shift), moved)
    assert chosen == again
    close(T.add(a, shift), b, 1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_p7_a_device_without_update_is_never_selected(rule: str) -> None:
    m = bound(aggregation=rule, select_fraction=1.0)
    w = m.ctx.w0
    result, chosen = merged(m, w, uploads(w, [0.0, 1.0, 0.5]))
    assert chosen == {1, 2} and T.finite(result)
    result, chosen = merged(m, w, uploads(w, [0.0, 0.0]))
    assert not chosen and codec.equal(result, w)


def test_p8_nobody_stops_in_round_1_nor_ever_without_epsilon(tmp_path: Path) -> None:
    play(tmp_path / "huge", epsilon=1e9, rounds=1)
    assert events(tmp_path / "huge")[0]["notes"]["stopped"] == 0
    play(tmp_path / "zero", epsilon=0.0, lr=1e-12)  # models that hardly move would stop under any epsilon
    assert [e["notes"]["stopped"] for e in events(tmp_path / "zero")] == [0, 0, 0]


@pytest.mark.parametrize("stop", ["round", "forever"])
def test_p9_with_a_huge_epsilon_nobody_trains_from_round_2_and_the_model_stands(tmp_path: Path, stop: str) -> None:
    one = play(tmp_path / "1", epsilon=1e9, rounds=1, stop=stop)
    three = play(tmp_path / "3", epsilon=1e9, rounds=3, stop=stop)
    assert codec.equal(one.server, three.server)
    assert [e["steps"] > 0 for e in events(tmp_path / "3")] == [True, False, False]
    assert [e["notes"]["stopped"] for e in events(tmp_path / "3")] == [0, 1, 1]
    assert "device-edge" not in events(tmp_path / "3")[1]["bytes"] or not sum(
        events(tmp_path / "3")[1]["bytes"]["device-edge"].get("up", {}).values()
    )


def test_stop_for_a_round_or_for_ever() -> None:
    for stop, expected in (("round", False), ("forever", True)):
        m = bound(stop=stop, epsilon=1e-3)
        data = Bench(ECSFL, {}).session().federation.data(0)
        near = {"last": T.keep(m.ctx.w0, m.ctx.net.trainable.__contains__)}
        params, extras = m.begin(near, m.ctx.w0, data, 2).model
        assert extras["idle"]
        state, upload = m.end(near, Trained(params, extras), data, 2)
        assert not upload.tree
        far = T.add(m.ctx.w0, noise(m.ctx.w0, 1, 1.0))
        assert m.begin(state, far, data, 3).model[1]["idle"] is expected


def test_p10_an_outlier_has_no_influence_under_mean_and_less_than_a_thousandth_under_invdist_all() -> None:
    near = [0.01, 0.012, 0.011, 0.013]
    m = bound(select_fraction=0.8)
    w = m.ctx.w0
    with_it, without = (merged(m, w, uploads(w, [*near, far]))[0] for far in (13.1, 50.0))
    assert codec.equal(with_it, without)
    m = bound(aggregation="invdist_all")
    pull = T.flatten(T.sub(merged(m, w, uploads(w, [*near, 100.0]))[0], w)).norm()
    assert float(pull) < 0.05  # 1/100 of the nearest's weight 1/0.01 times a distance of 100, over their sum


@pytest.mark.parametrize("rule", ["mean", "invdist"])
def test_p11_the_number_of_edges_does_not_matter_when_all_are_selected(tmp_path: Path, rule: str) -> None:
    loops = [
        play(tmp_path / str(n), n_edges=n, select_fraction=1.0, aggregation=rule, epsilon=0.0, rounds=2)
        for n in (1, 2, 5)
    ]
    for other in loops[1:]:
        close(other.server["w"], loops[0].server["w"], 1e-4)
        assert other.server["selected"] == loops[0].server["selected"] == [2] * 5
    assert loops[1].method.edges({}) == {0: [0, 2, 4], 1: [1, 3]}


@pytest.mark.parametrize("rule", RULES)
def test_p12_the_result_lies_in_the_hull_of_the_selected(rule: str) -> None:
    m = bound(aggregation=rule, select_fraction=0.6)
    w, sent = m.ctx.w0, uploads(m.ctx.w0)
    result, chosen = merged(m, w, sent)
    stacked = T.stack([u.tree for u in sent if u.sender in chosen])
    for k, v in result.items():
        assert bool((v <= stacked[k].amax(0) + 1e-6).all() and (v >= stacked[k].amin(0) - 1e-6).all())


def test_p13_bytes_are_those_of_the_page(tmp_path: Path) -> None:
    play(tmp_path / "one", rounds=1, n_edges=2, select_fraction=0.4)
    size = T.nbytes(bound().ctx.w0)
    book = events(tmp_path / "one")[0]["bytes"]
    assert book["device-edge"]["down"]["model"] == book["device-edge"]["up"]["model"] == 5 * size
    assert book["edge-cloud"]["down"]["model"] == 2 * size
    assert book["edge-cloud"]["up"] == {
        "model": 2 * size,
        "selection": 2 * 4 + 3 * 4,
    }  # two |T_e|, and 2 + 1 ids
    play(tmp_path / "two", rounds=1, two_stage=True, select_fraction=0.4)
    up = events(tmp_path / "two")[0]["bytes"]["device-edge"]["up"]
    assert up == {"selection": 4 * 5, "model": 2 * size}


def test_two_stage_gives_the_same_model_as_one(tmp_path: Path) -> None:
    a, b = (play(tmp_path / str(s), two_stage=s, select_fraction=0.4) for s in (False, True))
    assert codec.equal(a.server, b.server)


def test_two_stage_decides_by_the_announcement_alone() -> None:
    m = bound(two_stage=True, select_fraction=0.4)
    edge = Edge(0, (0, 1, 2, 3, 4), {}, Download(shared=m.ctx.w0))
    said = [Upload({DISTANCE: torch.tensor([s])}, {}, i, 9) for i, s in enumerate(SCALE)]
    assert m.calls(edge, said, 1) == {1, 3}
    assert m.calls(edge, [Upload({}, {}, 0, 9)], 1) == set()


def test_distance_leaves_out_batch_norm_statistics() -> None:
    m = bound()
    w = m.ctx.w0
    sent = uploads(w, [0.5, 0.2])
    far = [Upload({k: v + 9 if "running" in k else v for k, v in sent[1].tree.items()}, {}, 1, 9)]
    assert merged(m, w, [sent[0], *far])[1] == {1}


def test_distance_per_step_divides_by_local_steps() -> None:
    m = bound(distance_norm="per_step")
    w = m.ctx.w0
    sent = [Upload(T.add(w, noise(w, i, s)), {}, i, n) for i, (s, n) in enumerate([(1.0, 160), (0.5, 32)])]
    assert merged(m, w, sent)[1] == {0} and merged(bound(), w, sent)[1] == {1}


@pytest.mark.parametrize(("rule", "expected"), [("nearest", {1}), ("farthest", {2})])
def test_selection_rules(rule: str, expected: set[int]) -> None:
    m = bound(select=rule)
    assert merged(m, m.ctx.w0, uploads(m.ctx.w0))[1] == expected


def test_random_selection_has_the_same_size_and_varies_with_the_round() -> None:
    m = bound(select="random", select_fraction=0.4)
    edge = Edge(0, (0, 1, 2, 3, 4), {}, Download(shared=m.ctx.w0))
    sent = uploads(m.ctx.w0)
    picks = [frozenset(m.merge(edge, sent, t)[1].tree[AGGREGATED].tolist()) for t in range(8)]
    assert {len(p) for p in picks} == {2} and len(set(picks)) > 1


def test_selection_counts_add_up(tmp_path: Path) -> None:
    play(tmp_path, select_fraction=0.4, epsilon=0.0)
    assert [sum(e["facts"]["selected"]) for e in events(tmp_path)] == [2, 4, 6]


@pytest.mark.parametrize("cls", [ECSFL, ECSFLMended, *map(find, ("ecs-fl-invdist-all", "ecs-fl-random"))])
def test_the_runs_join_holds_and_train_fraction_stands_in_for_it(tmp_path: Path, cls: type[Method]) -> None:
    play(tmp_path / "a", cls, join=0.2)
    play(tmp_path / "b", cls, train_fraction=0.4)
    play(tmp_path / "c", cls, join=0.4, train_fraction=0.2)
    Bench(find("fedavg"), {}).play(tmp_path / "d", join=0.2)
    drawn = {k: [e["participants"] for e in events(tmp_path / k)] for k in "abcd"}
    assert [len(p) for p in drawn["a"]] == [1, 1, 1] and [len(p) for p in drawn["b"]] == [2, 2, 2]
    assert drawn["a"] == drawn["c"] == drawn["d"]


def test_a_participation_of_the_methods_own_is_said_at_the_start() -> None:
    said = Bench(ECSFL, {"train_fraction": 0.4}).session(join=1.0).automatic_choices()
    assert said == [
        "ECS-FL: train_fraction = 0.4 takes the place of join = 1; comparisons with other methods are not at equal "
        "training"
    ]
    for own in ({}, {"train_fraction": 1.0}):
        assert Bench(ECSFL, own).session(join=1.0).automatic_choices() == []
    assert Bench(ECSFL, {}).session(join=0.4).automatic_choices() == [
        "ECS-FL: Algorithm 2 trains all devices in every round; here 2 of 5 train (train_fraction = 1: all)"
    ]


def test_the_variants_are_the_text_with_one_change() -> None:
    text = build_method("ecs-fl", {}).hp.model_dump()
    changes = {
        "invdist": {"aggregation": "invdist"}, "invdist-all": {"aggregation": "invdist_all"},
        "random": {"select": "random"}, "farthest": {"select": "farthest"}, "mean-all": {"select_fraction": 1.0},
    }  # fmt: skip
    for name, change in changes.items():
        assert build_method(f"ecs-fl-{name}", {}).hp.model_dump() == {**text, **change}


def test_the_only_selected_device_has_the_new_model_and_sits_the_next_round_out(tmp_path: Path) -> None:
    play(tmp_path)
    assert [round(e["notes"]["stopped"] * 5) for e in events(tmp_path)] == [0, 1, 1]


def test_bad_settings_get_a_sentence() -> None:
    with pytest.raises(CoterieError, match="select_fraction"):
        build_method("ecs-fl", {"select_fraction": 0})
    with pytest.raises(CoterieError, match="n_edges = 9"):
        bound(n_edges=9)


IDLE = [
    ("ecs-fl", {"two_stage": True, "aggregation": "invdist_all"}, "two_stage = True .* aggregation = mean or invdist"),
    ("ecs-fl-invdist-all", {"select_fraction": 0.5}, "select_fraction = 0.5 .* aggregation = mean or invdist"),
    ("ecs-fl-mean-all", {"select": "random"}, "select = random .* a part of the devices is selected"),
    ("ecs-fl-random", {"distance_norm": "per_step"}, "distance_norm = per_step .* devices are ranked"),
    ("ecs-fl-mended", {"epsilon": 0, "stop": "forever"}, "stop = forever .* epsilon is above 0"),
]


@pytest.mark.parametrize(("name", "given", "words"), IDLE)
def test_a_setting_without_effect_is_refused(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words.replace(" .* ", " has no effect unless ")):
        build_method(name, given)


# ---- uploads that must not reach a mean ------------------------------------------------------------------------------
@pytest.mark.parametrize("two_stage", [False, True])
def test_a_wrong_upload_of_a_device_is_refused(two_stage: bool) -> None:
    m = bound(two_stage=two_stage)
    schema, good = m.schema("up", Moment(m.setup(), 0, 1)), dict(m.ctx.w0)
    if two_stage:
        good[DISTANCE] = torch.tensor([0.5])
        refuses(schema, good, ({DISTANCE: torch.tensor([-1.0])}, "-1 in announce:d, outside 0"))
    else:
        refuses(schema, good, ({DISTANCE: torch.tensor([0.5])}, "not declared"))
    schema.check({}, "a device that stops")
    alone = m.schema("up", Moment({**m.setup(), "alone": 0}, 0, 2))
    assert alone.nbytes() == 0
    with pytest.raises(CoterieError, match="not declared"):
        alone.check(good, "the upload")


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_upload_of_an_edge_is_refused(rule: str) -> None:
    m = bound(n_edges=2, aggregation=rule, select_fraction=1.0)
    edge = Edge(1, (1, 3), {}, Download(shared=m.ctx.w0))
    good = m.merge(edge, [u for u in uploads(m.ctx.w0) if u.sender in edge.clients], 1)[1].tree
    whole = good[WEIGHT].dtype
    refuses(
        m.schema("edge_up", Moment(m.setup(), 1, 1)),
        good,
        ({WEIGHT: torch.tensor([-1], dtype=whole)}, "-1 in x:weight, outside 0"),
        ({AGGREGATED: torch.tensor([1, 99], dtype=torch.int32)}, "99 in x:aggregated, outside 1 to 3"),
        ({AGGREGATED: torch.tensor([1, 1], dtype=torch.int32)}, "twice in x:aggregated"),
        ({AGGREGATED: torch.tensor([1, 2, 3], dtype=torch.int32)}, "x:aggregated of shape"),
    )


def test_ids_of_another_edge_and_weights_of_zero_decide_nothing() -> None:
    m = bound(n_edges=2)
    server, w = m.setup(), m.ctx.w0

    def said(edge: int, ids: list[int], weight: int) -> Upload:
        tree = {**T.scaled(w, 2.0), AGGREGATED: torch.tensor(ids, dtype=torch.int32)}
        return Upload({**tree, WEIGHT: torch.tensor([weight], dtype=torch.int32)}, {}, edge, 9)

    assert m.aggregate(server, [said(1, [2], 1)], 1) == server  # device 2 is at edge 0
    assert m.aggregate(server, [said(0, [2], 0)], 1) == server
    assert m.aggregate(server, [said(0, [2], 1), said(1, [], 0)], 1)["selected"] == [0, 0, 1, 0, 0]


# ---- herding ---------------------------------------------------------------------------------------------------------
def called(m: ECSFLMended, w: Tree, sent: list[Upload]) -> set[int]:
    """The devices that an edge calls, by what they announce."""
    data = Bench(ECSFLMended, {}).session().federation.data(0)
    ahead = [Upload(m.announcement(u.tree, w, data), {}, u.sender, u.samples) for u in sent]
    return set(m.calls(Edge(0, tuple(range(len(sent))), {}, Download(shared=w)), ahead, 1))


def test_mended_takes_the_mean_of_the_devices_it_called() -> None:
    m = bound(ECSFLMended, select_fraction=0.4, select_least=1)
    w, sent = m.ctx.w0, uploads(m.ctx.w0)
    chosen = called(m, w, sent)
    assert len(chosen) == 2
    answers = [u if u.sender in chosen else Upload({}, {}, u.sender, u.samples) for u in sent]
    mean, aggregated = merged(m, w, answers)
    assert aggregated == chosen
    close(mean, T.mean([u.tree for u in sent if u.sender in chosen]))


def test_mended_every_device_sends_a_projection_and_only_the_chosen_their_models(tmp_path: Path) -> None:
    loop = play(tmp_path, ECSFLMended, select_fraction=0.4, select_least=1, epsilon=0.0, projection=32)
    model = T.nbytes(loop.method.ctx.w0)
    for e in events(tmp_path):
        up = e["bytes"]["device-edge"]["up"]
        assert up == {"model": 2 * model, "selection": 5 * 4 * 32}


def test_mended_takes_from_both_sides_where_the_nearest_are_all_of_one() -> None:
    """Four devices that hold one class and moved little, two that hold another and moved far the other way."""
    w = bound().ctx.w0
    step = noise(w, 0, 1.0)
    near, far = (0.5, 0.51, 0.52, 0.53), (-1.0, -1.1)
    sent = [Upload(T.add(w, step, s), {}, i, 10) for i, s in enumerate([*near, *far])]
    assert merged(bound(select_fraction=0.5), w, sent)[1] == {0, 1, 2}
    herded = called(bound(ECSFLMended, select_fraction=0.5, select_least=1), w, sent)
    assert herded & {0, 1, 2, 3} and herded & {4, 5}


def test_a_wrong_announcement_of_a_device_is_refused() -> None:
    m = bound(ECSFLMended, projection=4)
    good = {**m.ctx.w0, PROJECTION: torch.zeros(4)}
    schema = m.schema("up", Moment(m.setup(), 0, 1))
    refuses(schema, good, ({PROJECTION: torch.zeros(5)}, "of shape"), ({DISTANCE: torch.ones(1)}, "not declared"))


# ---- convergence on a convex problem ---------------------------------------------------------------------------------
def descent(tmp: Path, optima: torch.Tensor, rounds: int = 160) -> tuple[torch.Tensor, Toy]:
    """The model after every round [rounds, 4]: least squares without noise, one full-batch step, equation (12)."""
    rng = torch.Generator().manual_seed(4)
    parts = []
    for w in optima:
        x = torch.randn(30, 4, generator=rng)
        parts.append((x, (x @ w)[:, None]))
    torch.manual_seed(0)
    run = {"rounds": rounds, "batch": 100, "lr": 0.05, "model": torch.nn.Linear(4, 1, bias=False)}
    loop = begin(open_toy(find("ecs-fl-invdist-all"), tmp, {"epsilon": 0.0}, data=Toy(parts, 1), **run))
    loop.method.ctx = replace(loop.method.ctx, task=Regression(1))
    path = []
    for _ in range(rounds):
        loop.step()
        path.append(loop.server["w"]["weight"][0].clone())
    return torch.stack(path), Toy(parts, 1)


def test_with_a_common_optimum_the_distance_to_it_falls_faster_than_the_papers_bound(tmp_path: Path) -> None:
    """The bound is C / sqrt(T) for smooth, strongly convex losses."""
    best = torch.tensor([1.0, -2.0, 0.5, 3.0])
    path, _ = descent(tmp_path, best.expand(5, 4))
    scaled = (path - best).norm(dim=1) * torch.arange(1, 161).sqrt()
    assert scaled[159] < 0.01 * scaled[9] and scaled.max() < 3 * scaled[0]


def test_without_a_common_optimum_the_model_ends_at_a_median_and_not_at_the_least_mean_loss(tmp_path: Path) -> None:
    """Weights 1/d count every gradient by its direction alone, so that four equal clients outvote the fifth."""
    optima = torch.zeros(5, 4)
    optima[4] = 8.0
    path, data = descent(tmp_path, optima)
    x, y = (torch.cat(v) for v in zip(*data.parts, strict=True))
    least = torch.linalg.lstsq(x, y).solution[:, 0]
    assert path[-1].norm() < 1e-3 and (path[-1] - least).norm() > 1
