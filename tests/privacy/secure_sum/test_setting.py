"""The setting `secure`: the simulation has the bits of the protocol, and what cannot be summed is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import config
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method, Upload
from coterie.core.schema import NonFiniteError
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.engine.combining import mean_upload
from coterie.engine.session import Callbacks, prepare
from coterie.errors import CoterieError
from coterie.methods import find, method_names
from coterie.methods.fedavg import FedAvg
from coterie.privacy.secure_sum.client import offer_keys
from coterie.privacy.secure_sum.messages import SIGNATURE_BYTES, SummedWords
from coterie.privacy.secure_sum.rehearsal import SumRehearsal
from coterie.privacy.secure_sum.setting import SecureSum, check_secure
from coterie.privacy.secure_sum.uploads import weight_of
from coterie.testing import Bench, decided, events
from coterie.testing.fixtures import close_loop, open_loop
from support.toy import bind, mlp

SMALL: dict[str, Any] = {"subset": 200, "clients": 4, "partition": "iid", "rounds": 2, "join": 1}


def uploads(method: Method, n: int = 5, size: float = 1.0) -> list[Upload]:
    rng = torch.Generator().manual_seed(1)
    return [
        Upload(
            {k: v + size * torch.randn(v.shape, generator=rng) * (i + 1) / n for k, v in method.ctx.w0.items()},
            sender=i,
            samples=5 + 3 * i,
        )
        for i in range(n)
    ]


def estimate(stage: SecureSum, method: Method, given: list[Upload]) -> Tree:
    return stage.estimate(method, method.ctx.w0, given, 1, {})[0].tree


@pytest.mark.parametrize("gone", [{}, {"masked": {1}}, {"keys": {0}, "unmask": {4}}])
def test_the_simulation_has_the_bits_of_the_whole_protocol(gone: dict[str, set[int]]) -> None:
    method, stage = bind(FedAvg, model=mlp(norm=True)), SecureSum("sum(t=2, share=0.2, clip=2)", 17)
    given, words = uploads(method), stage.words(method)
    encoded = {u.sender: words.encode(method.ctx.w0, u.tree, weight_of(method, u)) for u in given}
    r = SumRehearsal(stage.terms("s"), encoded, dropping=gone)
    total = r.run()
    assert r.result is not None
    counted = [u for u in given if u.sender in r.result.clients]
    simulated, memory = stage.estimate(method, method.ctx.w0, counted, 1, {})
    upload, same = stage.decoded(method, method.ctx.w0, SummedWords(total, r.result.clients), simulated.samples)
    assert codec.equal(upload, simulated) and memory == same
    assert memory["clients"] == len(counted) and memory["clipped"] == 2


@pytest.mark.parametrize("weighting", [None, "uniform"])
def test_the_result_is_the_mean_within_the_unit_of_the_fixed_point(weighting: Any) -> None:
    method = bind(FedAvg, model=mlp(norm=True), weighting=weighting)
    stage, given = SecureSum("sum(clip=8)", 17), uploads(method)
    plain = mean_upload(method, given)
    found = estimate(stage, method, given)
    unit = stage.words(method).points.unit
    assert all(torch.allclose(found[k], v, atol=4 * unit + 1e-6) for k, v in plain.tree.items())
    assert unit < 5e-8


def test_weights_are_capped_and_changes_are_clipped() -> None:
    method = bind(FedAvg, model=mlp())
    given = uploads(method)
    capped = [Upload(u.tree, sender=u.sender, samples=min(u.samples, 8)) for u in given]
    assert codec.equal(
        estimate(SecureSum("sum(weight=8)"), method, given), estimate(SecureSum("sum(weight=8)"), method, capped)
    )
    w0 = method.ctx.w0
    far = [Upload({k: v + 100 for k, v in w0.items()}, sender=i, samples=9) for i in range(3)]
    found = estimate(SecureSum("sum(clip=0.5)", 9), method, far)
    assert all(torch.allclose(found[k], v + 0.5) for k, v in w0.items())
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        estimate(SecureSum("sum", 9), method, [Upload({k: v * np.nan for k, v in w0.items()}, samples=1)])


def test_the_ledger_counts_what_the_protocol_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    method, stage = bind(FedAvg, model=mlp()), SecureSum("sum", 17)
    zeros = {i: np.zeros(stage.words(method).count, np.uint32) for i in range(5)}
    r = SumRehearsal(stage.terms("s"), zeros)
    monkeypatch.setattr(
        "coterie.privacy.secure_sum.rehearsal.offer_keys",
        lambda terms, client: offer_keys(terms, client, sign=lambda text: bytes(SIGNATURE_BYTES)),
    )
    r.run()
    page = stage.traffic(method, 5)["device-cloud"]
    assert page["up"]["masked"] == r.up["masked"] == 5 * 4 * (51 + 2)
    assert sum(page["up"].values()) == r.up.total() and sum(page["down"].values()) == r.down.total()


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_bits_are_equal_for_any_number_of_workers_and_after_a_resume(name: str, tmp_path: Path) -> None:
    bench, more = Bench(find(name), {}), {"secure": "sum(t=2)", "server_optimizer": "fedavgm"}
    whole = bench.play(tmp_path / "1", **more)
    two = bench.play(tmp_path / "2", workers=2, **more)
    loop = open_loop(bench.session(**more), tmp_path / "3")
    assert not loop.run(Callbacks(should_stop=lambda: loop.done >= 1))
    close_loop(loop)
    again = open_loop(bench.session(**more), tmp_path / "3")
    assert again.resume() == []
    again.run()
    close_loop(again)
    for at, other in (("2", two), ("3", again)):
        assert events(tmp_path / "1") == events(tmp_path / at)
        assert codec.equal(decided(whole), decided(other))
    event = events(tmp_path / "1")[-1]
    assert event["combined"]["secure_sum"] == {"clients": 3, "clipped": 0}
    assert set(event["bytes"]["device-cloud"]["up"]) == {"masked", "keys"}


def test_a_round_with_too_few_clients_changes_nothing_and_says_why(tmp_path: Path) -> None:
    more = {"secure": "sum(t=3)", "dropout": 0.5, "eval_every": 9, "seed": 2, "rounds": 6}
    loop = open_loop(Bench(find("fedavg"), {}).session(**more), tmp_path)
    loop.start()
    rounds = []
    for _ in range(6):
        before = loop.server
        loop.step()
        failed = set(loop.event["failed"]) == set(loop.event["participants"])
        assert (loop.server is before) == failed
        assert all("there is no sum of" in why for why in loop.event.get("reasons", {}).values())
        rounds.append(failed and bool(loop.event.get("reasons")))
    close_loop(loop)
    assert True in rounds and False in rounds


@pytest.mark.parametrize(
    "text",
    ["sum(t=1)", "sum(t=2.5)", "sum(t=500)", "sum(clip=0)", "sum(share=1)", "sum(weight=0)", "mean", "sum + sum"],
)
def test_invalid_settings_are_one_sentence(text: str) -> None:
    with pytest.raises(CoterieError, match="secure"):
        check_secure(text)


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("fedproto", {}, "needs single ones"),
        ("fedfomo", {}, "needs single ones"),
        ("local", {}, "needs a method that only averages uploads"),
        ("ecs-fl", {}, "merges them at edges"),
        ("fedavg", {"secure": "sum(t=5)"}, "needs 5 clients in a round, and only 4 take part"),
        ("fedavg", {"secure": "sum(weight=1000000000)", "clients": 8}, "set weight to a smaller one"),
    ],
)
def test_runs_that_cannot_be_summed_are_refused_before_any_work(method: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        prepare(config.settings(method, **{**SMALL, "secure": "sum", **more}))


def test_weights_of_data_that_only_devices_have_must_be_capped_by_the_setting() -> None:
    method = bind(FedAvg, model=mlp())
    with pytest.raises(CoterieError, match="needs weight=N"):
        SecureSum("sum").check(method)
    SecureSum("sum(weight=100)").check(method)
    SecureSum("sum").check(bind(FedAvg, model=mlp(), weighting="uniform"))


@pytest.mark.long
def test_every_method_that_averages_uploads_gives_nearly_its_plain_result(tmp_path: Path) -> None:
    tested = 0
    for name in method_names():
        cls = find(name)
        if cls.combines != "mean" or issubclass(cls, EdgeMethod):
            continue
        bench, more = Bench(cls, {}), {"watch": False, "eval_every": 9, "rounds": 1}
        try:
            session = bench.session(**more)
        except CoterieError:
            continue  # it needs a different model or full participation
        plain = bench.play(tmp_path / name / "plain", session)
        secure = bench.play(tmp_path / name / "secure", secure="sum(t=2)", **more)
        pairs = zip(codec.tensors_of(plain.server), codec.tensors_of(secure.server), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs if a.is_floating_point()), name
        tested += 1
    assert tested > 15
