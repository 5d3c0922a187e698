"""Attacks: closed forms of lies, poisoned data, who is scored, columns of tables, weights, workers and refusals."""

import pytest
import torch

import coterie
from coterie import config
from coterie.core.context import ClientData, Split
from coterie.engine import codec
from coterie.engine.attacks import Attack, check_attack
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.round import counted_samples
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.fedavg import FedAvg
from coterie.testing import Bench, decided, events
from support.toy import bind, mlp

METHOD = bind(FedAvg, model=mlp(norm=True))
SENT = METHOD.ctx.w0


def answers(changes: list[float]) -> dict[int, TrainAnswer]:
    return {i: TrainAnswer(i, {k: v + x for k, v in SENT.items()}, {}, 10 + i, 1, 0.5) for i, x in enumerate(changes)}


@pytest.mark.parametrize(("text", "lie"), [
    ("sign-flip(0.2)", -4.0), ("sign-flip(0.2, 5)", -20.0), ("Scaled(0.2, factor=3)", 12.0), ("free-rider(0.2)", 0.0),
    ("little-is-enough(0.2, 2)", 2.0 - 2 * (2 / 3) ** 0.5), ("label-flip(0.2)", 4.0), ("backdoor(0.2, 0, 2)", 8.0),
])  # fmt: skip
def test_lies_are_the_closed_forms_and_honest_answers_stay(text: str, lie: float) -> None:
    attack = Attack(check_attack(text), frozenset({3}), seed=0, classes=4)
    honest = answers([1.0, 2.0, 3.0, 4.0])
    requests = {i: TrainRequest(i, 1, shared=SENT) for i in honest}
    told = attack.falsified(METHOD, requests, honest)
    assert all(codec.equal(told[i], honest[i]) for i in (0, 1, 2))
    for k, v in told[3].upload.items():
        expected = lie if k in METHOD.ctx.net.trainable else 4.0  # statistics of batch norm are not changed
        assert torch.allclose(v, SENT[k] + expected, atol=1e-5), k
    opening = attack.falsified(METHOD, {i: TrainRequest(i, 0, shared=SENT) for i in honest}, honest)
    assert codec.equal(opening, honest)


def test_noise_is_drawn_by_seed_round_and_client() -> None:
    honest = answers([1.0, 2.0])

    def noise(seed: int, round: int, liar: int) -> torch.Tensor:
        attack = Attack("gaussian(0.5, 3)", frozenset({liar}), seed, classes=4)
        requests = {i: TrainRequest(i, round, shared=SENT) for i in honest}
        upload = attack.falsified(METHOD, requests, honest)[liar].upload
        return torch.cat([(upload[k] - SENT[k]).flatten() for k in METHOD.ctx.net.trainable])

    first = noise(0, 1, 0)
    assert 2 < float(first.std()) < 4
    assert torch.equal(first, noise(0, 1, 0))
    assert not any(torch.equal(first, noise(*other)) for other in ((1, 1, 0), (0, 2, 0), (0, 1, 1)))


def test_a_claimed_number_of_samples_is_capped_at_a_multiple_of_the_median() -> None:
    attack = Attack(check_attack("sign-flip(0.2, 1, 300)"), frozenset({3}), seed=0, classes=4)
    honest = answers([1.0, 2.0, 3.0, 4.0])
    told = attack.falsified(METHOD, {i: TrainRequest(i, 1, shared=SENT) for i in honest}, honest)
    assert told[3].samples == 3900
    claims = {i: a.samples for i, a in told.items()}
    assert counted_samples(claims, 10) == {0: 10, 1: 11, 2: 12, 3: 110}
    assert counted_samples(claims, None) == claims
    assert counted_samples({0: 1, 1: 5000}, 10) == {0: 1, 1: 5000}  # no median of two


def test_poisoned_data_and_what_an_attack_wants() -> None:
    x, y = torch.rand(8, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    data = ClientData(3, Split(x, y), Split(x, y), 4)
    flip = Attack("label-flip(0.2)", frozenset({3}), 0, 4)
    assert flip.poisoned(data).train.y.tolist() == [3, 2, 1, 0, 3, 2, 1, 0]
    assert flip.poisoned(data).val is data.val
    other = ClientData(1, Split(x, y), Split(x, y), 4)
    assert flip.poisoned(other) is other
    assert flip.wanted(Split(x, y)).y.tolist() == [3, 2, 1, 0, 3, 2, 1, 0]
    odd = Attack("label-flip(0.2)", frozenset({3}), 0, 3)
    assert odd.wanted(Split(x[:3], y[:3])).y.tolist() == [2, 0]  # class 1 stays class 1
    back = Attack("backdoor(0.2, 2)", frozenset({3}), 0, 4, trigger=7.0)
    before = x.clone()
    poisoned = back.poisoned(data).train
    rows = (poisoned.x[:, 0, -2:, -2:] == 7).all(-1).all(-1)
    assert int(rows.sum()) == 4
    assert poisoned.y[rows].tolist() == [2, 2, 2, 2]
    assert torch.equal(poisoned.y[~rows], y[~rows])
    wanted = back.wanted(Split(x, y))
    assert wanted.y.tolist() == [2] * 6
    assert bool((wanted.x[:, 0, -2:, -2:] == 7).all())
    assert torch.equal(x, before), "the federation's own items were changed"
    assert Attack("sign-flip(0.2)", frozenset({3}), 0, 4).wanted(Split(x, y)) is None


def test_bits_do_not_depend_on_workers_and_liars_are_not_scored(tmp_path) -> None:
    bench, more = Bench(find("fedavg"), {}), {"attack": "backdoor(0.4, 1, 3)", "robust": "median", "join": 1.0}
    one = bench.play(tmp_path / "1", **more)
    two = bench.play(tmp_path / "2", workers=2, **more)
    assert events(tmp_path / "1") == events(tmp_path / "2")
    assert codec.equal(decided(one), decided(two))
    last, liars = events(tmp_path / "1")[-1], bench.session(**more).attack.liars
    assert len(liars) == 2
    assert last["liars"] == sorted(liars)
    assert last["eval"]["personal/test"]["clients"] == 3
    assert "personal/attack" in last["eval"]


def test_the_success_of_an_attack_is_a_column(tmp_path) -> None:
    given = {"data": "digits", "subset": 300, "model": "logistic", "clients": 4, "partition": "iid", "rounds": 2}
    compared = coterie.compare(["fedavg"], **given, join=1.0, attack="backdoor(0.25)", out=tmp_path / "c", workers=1)
    table = compared.table()
    run = next(r for r in compared.runs if r.title == "FedAvg")
    assert table.loc["FedAvg", "attack success"] == run.events[-1]["eval"]["personal/attack"]["mean"]
    assert "attack success" in compared.readable(brief=True)
    assert any("some clients lie" in sentence for sentence in compared.warnings())
    flip = coterie.run("fedavg", **given, join=1.0, attack="sign-flip(0.25)", out=tmp_path / "f", workers=1)
    assert flip.summary()["attack"]["last"] == pytest.approx(1 - flip.summary()["personal"]["last"])


def test_a_liar_behind_an_edge_lies_too(tmp_path) -> None:
    bench = Bench(find("ecs-fl-mean-all"), {})
    honest = bench.play(tmp_path / "1", join=1.0, rounds=1)
    liar = bench.play(tmp_path / "2", join=1.0, rounds=1, attack="scaled(0.2, 100)")
    assert not codec.equal(decided(honest)["server"], decided(liar)["server"])


def test_wrong_settings_are_refused() -> None:
    for text in ("sign-flip", "sign-flip(0)", "sign-flip(1)", "flip(0.2)", "gaussian(0.2, -1)", "backdoor(0.2, 0.5)",
                 "label-flip(0.2) + scaled(0.1)"):  # fmt: skip
        with pytest.raises(CoterieError, match="attack"):
            config.settings("fedavg", attack=text)
    with pytest.raises(CoterieError, match=r"weight_cap = 0\.5 is invalid"):
        config.settings("fedavg", weight_cap=0.5)
    small = {"subset": 200, "clients": 3, "partition": "iid"}
    for text, why in (("sign-flip(0.9)", "no honest client"), ("backdoor(0.3, 10)", "10 classes")):
        with pytest.raises(CoterieError, match=why):
            prepare(config.settings("fedavg", **small, attack=text))
