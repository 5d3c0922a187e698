"""The noised sum of clipped changes: closed forms, sensitivity, and what it refuses."""

from typing import Any

import pytest
import torch

from coterie.core import tree as T
from coterie.core.method import Method, Upload
from coterie.core.schema import Entry, Schema
from coterie.errors import CoterieError
from coterie.methods import find
from coterie.methods.fedavg import FedAvg
from coterie.privacy import noise, noised_sum
from coterie.privacy.clipping import clipped_upload, norm_of, reference
from coterie.privacy.device_side import DeviceSide
from coterie.privacy.noise import noised, secret_normals
from coterie.privacy.noised_sum import NoisedSum
from coterie.privacy.setting import check_privacy, privacy_setting
from support.toy import bind, mlp

pytest.importorskip("opacus")
SILENT = "client(sigma=1, clip=0.5)"


def moved(tree: T.Tree, by: float) -> T.Tree:
    return {k: v + by for k, v in tree.items()}


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "normals", lambda count, keys: torch.zeros(count, dtype=torch.float64))
    monkeypatch.setattr(noised_sum, "normals", lambda count, keys: torch.zeros(count, dtype=torch.float64))


def change(upload: Upload, at: T.Tree) -> T.Tree:
    return T.sub(upload.tree, at)


def test_without_noise_it_is_the_sum_of_clipped_changes_over_the_expected_participants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet(monkeypatch)
    method = bind(FedAvg, model=mlp())
    w, expected = method.ctx.w0, method.ctx.join * len(method.ctx.clients)
    values = sum(v.numel() for v in w.values())
    uploads = [Upload(moved(w, 0.01), samples=9), Upload(moved(w, 3.0), samples=1)]
    upload, _ = NoisedSum(SILENT).estimate(method, w, uploads, 1, {})
    each = (0.01 + 0.5 / values**0.5) / expected  # the second change is cut to the norm 0.5; samples do not count
    assert all(torch.allclose(v, w[k] + each, atol=1e-6) for k, v in upload.tree.items())
    assert upload.samples == 1


def test_one_client_moves_the_sum_by_at_most_the_bound_even_if_its_device_does_not_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet(monkeypatch)
    method = bind(FedAvg, model=mlp())
    w, expected = method.ctx.w0, method.ctx.join * len(method.ctx.clients)
    others = [Upload(moved(w, x)) for x in (0.1, -0.2, 0.05)]
    without, _ = NoisedSum(SILENT).estimate(method, w, others, 1, {})
    for by in (1e6, -3.0, 0.01):
        with_one, _ = NoisedSum(SILENT).estimate(method, w, [*others, Upload(moved(w, by))], 1, {})
        assert norm_of(T.sub(with_one.tree, without.tree)) * expected <= 0.5 * (1 + 1e-4)


def test_noise_has_the_stated_deviation_and_is_keyed_by_the_round() -> None:
    method = bind(FedAvg, model=torch.nn.Sequential(torch.nn.Linear(4, 900), torch.nn.Linear(900, 3)))
    w, expected = method.ctx.w0, method.ctx.join * len(method.ctx.clients)
    first, again, later = (
        T.flatten(change(NoisedSum("client(sigma=2, clip=0.5)").estimate(method, w, [], t, {})[0], w))
        for t in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert float(first.std()) == pytest.approx(2 * 0.5 / expected, rel=0.03)
    secret = [T.flatten(NoisedSum(SILENT, secret=True).estimate(method, w, [], 1, {})[0].tree) for _ in range(2)]
    assert not torch.equal(*secret)


def test_secret_noise_is_standard_normal() -> None:
    from scipy.stats import kstest

    numbers = secret_normals(20_000)
    assert kstest(numbers.numpy(), "norm").pvalue > 1e-6
    tree = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    assert noised(tree, 0.0, None)["a"].equal(tree["a"])


def test_an_adaptive_bound_moves_to_the_quantile_of_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    method = bind(FedAvg, model=mlp())
    w, stage = method.ctx.w0, NoisedSum("client(sigma=0.1, clip=0.01, adaptive=0.5)")
    values, memory = sum(v.numel() for v in w.values()), {}
    expected = int(method.ctx.join * len(method.ctx.clients))
    norms = [0.1 * (i + 1) for i in range(expected)]
    for t in range(1, 120):
        bound = stage.bound(memory)
        raw = [moved(w, n / values**0.5) for n in norms]
        uploads = [Upload(clipped_upload(tree, w, bound)) for tree in raw]
        _, memory = stage.estimate(method, w, uploads, t, memory)
    middle = sorted(norms)[expected // 2]
    assert stage.bound(memory) == pytest.approx(middle, abs=0.11)
    assert stage.asked(memory) == stage.facts(memory)["clip"] == stage.bound(memory)
    assert NoisedSum(SILENT).asked({}) is None


def test_statistics_of_batch_norm_are_clipped_with_the_model_and_stay_in_their_range() -> None:
    method = bind(FedAvg, model=mlp(norm=True))
    upload, _ = NoisedSum("client(sigma=50)").estimate(method, method.ctx.w0, [], 1, {})
    method.schema("up").check(upload.tree, "the noised mean")
    assert upload.tree.keys() == method.schema("up").entries.keys()
    assert float(upload.tree["1.running_var"].min()) >= 0


def test_devices_clip_their_changes_and_send_a_diverged_upload_as_it_is() -> None:
    method = bind(FedAvg, model=mlp())
    w, device = method.ctx.w0, DeviceSide(privacy_setting(SILENT))
    out = device.upload(method, moved(w, 2.0), w, 1, 0)
    assert norm_of(T.sub(out, w)) == pytest.approx(0.5, rel=1e-4)
    small = moved(w, 0.001)
    assert all(torch.allclose(v, small[k], atol=1e-7) for k, v in device.upload(method, small, w, 1, 0).items())
    assert norm_of(T.sub(device.upload(method, moved(w, 2.0), w, 1, 0, clip=0.1), w)) == pytest.approx(0.1, rel=1e-4)
    assert not T.finite(device.upload(method, moved(w, float("nan")), w, 1, 0))


def test_entries_that_are_changes_themselves_are_clipped_at_zero() -> None:
    schema = Schema({"w": Entry((2,), summable=True), "c": Entry((2,), kind="update", summable=True)})
    at = reference(schema, {"w": torch.ones(2), "c": torch.ones(2)})
    assert at["w"].tolist() == [1, 1] and at["c"].tolist() == [0, 0]


class Counting(FedAvg):
    """FedAvg that also uploads a number that no clipping bounds."""

    combines = "mean"

    def schema(self, link: Any, now: Any = None) -> Schema:
        more = {"x:n": Entry((1,), torch.int32, "label information", counted=True)}
        return super().schema(link, now) | Schema(more if link == "up" else {})


@pytest.mark.parametrize(("method", "own", "words"), [
    (Counting, {}, "x:n, which FedAvg uploads, is not a clipped sum"),
    (find("ditto"), {"draw": "samples"}, "in round 0 of Ditto every client tells the server something"),
])  # fmt: skip
def test_what_is_not_a_clipped_sum_is_refused_by_name(method: type[Method], own: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        NoisedSum(SILENT).check(bind(method, model=mlp(), own=own))


def test_settings_are_checked_and_spelled_in_one_way() -> None:
    assert check_privacy("Client(8, clip=0.5)") == "client(8, clip=0.5)"
    given = privacy_setting("client(epsilon=8, delta=1e-6, clip=0.5, adaptive=0.4)")
    assert (given.unit, given.epsilon, given.delta, given.clip, given.sigma, given.adaptive) == (
        "client", 8, 1e-6, 0.5, None, 0.4,
    )  # fmt: skip
    for bad, why in [
        ("client(epsilon=0)", "epsilon must be a number above 0"),
        ("client(epsilon=8, delta=1)", "delta must be a number above 0 and below 1"),
        ("client(sigma=-1)", "sigma must be"),
        ("client(epsilon=8, clip=0)", "clip must be"),
        ("client(epsilon=8, adaptive=1)", "adaptive must be"),
        ("client(epsilon=8, scores=2)", "scores must be True or False"),
        ("client()", "it needs epsilon or sigma"),
        ("client(epsilon=True)", "epsilon must be"),
        ("central(epsilon=8)", "central"),
        ("example(epsilon=8, adaptive=0.5)", "adaptive"),
        ("client(epsilon=1) + local(epsilon=1)", "it must be one of"),
    ]:
        with pytest.raises(CoterieError, match=why):
            check_privacy(bad)
