"""Autopilot: the rule of the choice on constructed tables, and what it makes of a run."""

from pathlib import Path

import pytest
import torch

import coterie
from coterie.core import tree as T
from coterie.core.method import Batch, Client, ClientData, Split, Trained
from coterie.errors import CoterieError
from coterie.methods.autopilot.candidates import CANDIDATES, UNTRAINED
from coterie.methods.autopilot.heads import fitted
from coterie.methods.autopilot.method import PRIOR, Autopilot
from coterie.parts.candidate_choice import TEMPERATURES, choose_candidate, is_behind, shrunk, temperatures
from support import toy
from support.short_runs import play, same, session, state, watch

NONE = torch.zeros(3, 0)


def flat(*hits: list[int]) -> torch.Tensor:
    """Errors [candidates, samples] from hits."""
    return 1 - torch.tensor(hits).float()


# ---- the rule --------------------------------------------------------------------------------------------------------
def test_with_little_data_the_federation_decides_and_with_much_the_client() -> None:
    prior = torch.tensor([-0.5, -0.9, -0.9])
    for samples, expected in ((2, 0), (200, 1)):
        sums = samples * torch.tensor([-0.7, -0.6, -0.8])
        assert choose_candidate(sums, prior, 20, NONE, None, 1.0) == (expected, False)
    assert torch.equal(shrunk(torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -0.25]), 4), torch.tensor([-3.0, -3.0]))


def test_the_first_of_equals_is_chosen() -> None:
    assert choose_candidate(torch.zeros(3), torch.zeros(3), 20, NONE, None, 1.0) == (0, False)


def test_a_choice_that_misses_more_than_the_own_model_beyond_noise_is_replaced_by_it() -> None:
    sums = torch.tensor([-1.0, -5.0])
    one_worse = flat([1, 1, 1, 0], [1, 1, 1, 1])
    two_worse = flat([1, 1, 0, 0], [1, 1, 1, 1])
    mixed = flat([1, 1, 0, 0], [0, 1, 1, 1])  # two lost, one won: within one standard error
    assert choose_candidate(sums, torch.zeros(2), 0, one_worse, 1, 1.0) == (0, False)
    assert choose_candidate(sums, torch.zeros(2), 0, two_worse, 1, 1.0) == (1, True)
    assert choose_candidate(sums, torch.zeros(2), 0, mixed, 1, 1.0) == (0, False)
    assert choose_candidate(sums, torch.zeros(2), 0, one_worse, 1, 0.0) == (1, True)
    assert not is_behind(two_worse[1], two_worse[0], 0.0)


def test_whatever_the_scores_nobody_is_behind_the_own_model_beyond_the_margin() -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(200):
        errors = (torch.rand(5, 12, generator=rng) < 0.4).float()
        best, _ = choose_candidate(torch.randn(5, generator=rng), torch.randn(5, generator=rng), 10, errors, 2, 1.0)
        assert not is_behind(errors[best], errors[2], 1.0)


def test_a_temperature_undoes_overconfidence_and_needs_evidence() -> None:
    y = torch.tensor([0, 0, 0, 1] * 10)
    logits = torch.tensor([[20.0, 0.0]]).expand(40, 2)  # sure of class 0, which is right three times in four
    assert temperatures([logits, logits / 20], y) == [TEMPERATURES[-1], 1.0]
    assert temperatures([logits[:0]], y[:0]) == [1.0]


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_the_shared_model_is_that_of_fedavg() -> None:
    assert same(play("autopilot").server["w"], play("fedavg").server["w"])


def test_trained_in_every_round_the_own_model_is_that_of_local_only() -> None:
    ours, theirs = play("autopilot", own={"own_every": 1, "patience": 100}), play("local")
    for i in range(5):
        if (mine := state(ours, i)) is not None:
            kept = _flat(state(theirs, i))
            assert all(torch.equal(v, kept[k]) for k, v in mine["alone"].items())


def _flat(kept: dict) -> dict[str, torch.Tensor]:  # type: ignore[type-arg]
    return next(v for v in kept.values() if isinstance(v, dict) and len(v) > 4)


def test_an_upload_is_fedavgs_and_a_few_numbers() -> None:
    s = session("autopilot")
    plain, n = s.method.model_schema.nbytes(), len(s.method.names)
    assert s.method.schema("up").nbytes() == plain + 4 * n + 8
    assert s.method.schema("down").nbytes() == plain + 4 * n


def test_facts_say_who_chose_what_and_a_candidate_that_is_left_out_is_chosen_by_nobody() -> None:
    loop, _ = watch(session("autopilot", own={"first": 1}))
    facts = loop.method.facts(loop.server)
    assert set(facts["chosen"].values()) <= set(CANDIDATES) and len(facts["chosen"]) == len(loop.server["choice"])
    assert {loop.method._scores_now(t) for t in (1, 2, 4, 8)} == {True} and not loop.method._scores_now(3)
    assert facts["chosen"].keys() == facts["validated"].keys() == facts["ahead_of_own"].keys()
    picked = set(facts["chosen"].values()) - {"global"}
    fewer, _ = watch(session("autopilot", own={"first": 1, "without": ",".join(sorted(picked))}))
    assert not picked & set(fewer.method.facts(fewer.server)["chosen"].values())


def bound(**own: object) -> Autopilot:
    found = toy.bind(Autopilot, own)
    assert isinstance(found, Autopilot)
    return found


def test_a_mean_of_members_is_predicted_as_it_was_scored() -> None:
    method, data = bound(), toy.clients().data(1)
    w = method.ctx.w0
    tuned = {k: v + 0.1 for k, v in w.items()}
    base = {**method.init_client(data), "tuned": tuned}
    store = method.stored(w, data, method.names)
    members = method.members(base, w, method.names, store)
    outputs = method.outputs(members, store, data.val.x)
    warm = {m: {"head": 2.0, "tuned": 0.5}.get(m, 1.0) for m in outputs}
    for name in method.names:
        params, extras = method.made(name, members, store, warm, w)
        want, found = method.candidate(name, outputs, warm), method.predict(params, data.val.x, extras)
        scale = warm.get(name, 1.0)
        assert torch.allclose(found / scale, want, atol=1e-5), name


def test_a_private_head_lowers_the_loss_and_leaves_the_body() -> None:
    method, data = bound(), toy.clients().data(3)
    w = method.ctx.w0
    store = method.stored(w, data, ["head"])
    losses = [method.ctx.loss_of(method.ctx.logits(w, store["keys"]), Batch(*data.train))]
    for head in fitted(method.ctx, w, store).values():
        assert head.keys() == set(method.ctx.group("head"))
        losses.append(method.ctx.loss_of(method.ctx.logits({**w, **head}, store["keys"]), Batch(*data.train)))
    assert losses[0] > losses[1] > losses[2]


def test_without_validation_data_the_federations_best_is_taken() -> None:
    method, data = bound(first=1), toy.clients().data(1)
    empty = ClientData(1, data.train, Split(data.val.x[:0], data.val.y[:0]), data.classes)
    prior = torch.full((len(method.names),), -1.0)
    prior[method.names.index("halfway")] = -0.1
    w = method.ctx.w0
    for told, expected in ((prior, "halfway"), (torch.zeros_like(prior), "head")):
        params, extras = method.begin(method.init_client(empty), {**w, PRIOR: told}, empty, 1).model
        kept, upload = method.end(method.init_client(empty), Trained(params, extras), empty, 1)
        assert method.names[kept["choice"]] == expected and int(upload.tree["x:validated"]) == 0


def test_a_client_that_never_trained_gets_nothing_that_needs_training() -> None:
    method, data = bound(), toy.clients().data(2)
    prior = torch.full((len(method.names),), -5.0)
    prior[method.names.index("own")] = 0
    w = {k: v + 0.3 for k, v in method.ctx.w0.items()}
    params, _ = method.model("newcomer", Client(method.init_client(data), {**w, PRIOR: prior}, data, 1))
    plain = {T.plain(k): v for k, v in params.items()}
    body = T.drop(w, method.ctx.group("head").__contains__)
    assert all(torch.equal(plain[k], v) for k, v in body.items())
    assert {"own", "tuned", "halfway"}.isdisjoint(UNTRAINED)


def test_the_own_model_is_no_longer_trained_after_its_patience() -> None:
    method, data = bound(patience=2), toy.clients().data(0)
    kept = {**method.init_client(data), "waits": 2}
    told = {**method.ctx.w0, PRIOR: torch.zeros(len(method.names))}
    assert not any(k.startswith("p:") for k in method.begin(kept, told, data, 1).model[0])
    for turns, there in ((0, True), (1, False), (6, True)):
        tree, _ = method.begin({**kept, "waits": 1, "turns": turns}, told, data, 1).model
        assert any(k.startswith("p:") for k in tree) == there


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(CoterieError, match='did you mean "tuned"'):
        bound(without="tunned")
    with pytest.raises(CoterieError, match="keep global"):
        bound(without=",".join(UNTRAINED))
    with pytest.raises(CoterieError, match="needs validation parts to choose by"):
        session("autopilot", val_share=0.0)
    few = session("autopilot", val_share=0.02).automatic_choices()
    assert few and "fewer than 10 such samples" in few[0]


def test_an_exported_choice_predicts_as_the_run_does(tmp_path: Path) -> None:
    run = coterie.run("autopilot", clients=4, rounds=2, epochs=1, out=tmp_path / "run", workers=1, eval_every=2)
    test = run.session().federation.test(1)
    run.export(1, tmp_path / "one.safetensors")
    found = coterie.load_model(tmp_path / "one.safetensors")(test.x).argmax(1)
    hits = float((found == test.y).float().mean())
    assert hits == pytest.approx(float(run.clients().loc[1, "personal/test"]))
