"""What a cloud can read out of uploads, and what a device refuses by default: two reconstructions, and their bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import torch

from coterie.config import settings
from coterie.core import tree as T
from coterie.core.tree import Tree
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.session import prepare
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.device import DeviceHandler
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.reveal import ANYTHING, Reveal, copied_rows
from coterie.federation.protocol.messages import DeviceJob
from coterie.federation.protocol.plan import FederationPlan
from coterie.methods import method_names
from support.in_process_link import federation

RUN = "0123456789abcdef" * 2
OWN = CloudSettings("certs", shape=(1, 8, 8), classes=4)


def cloud_session(method: str = "fedavg", **more: Any) -> Any:
    given = {"clients": 2, "rounds": 4, "epochs": 1, "batch": 64, "model": "mlp", **more}
    return open_session(settings(method=method, **given), OWN)


@contextmanager
def joined(folder: Path, cloud: Any, allow: Allow) -> Iterator[DeviceHandler]:
    """Join with a device that has 50 pictures of 8 x 8."""
    rng = np.random.default_rng(0)
    x = (255 * rng.random((50, 8, 8)) * rng.random((50, 1, 1))).astype(np.uint8)
    np.savez(folder / "mine.npz", x_train=x, y_train=rng.integers(0, 4, 50))
    handler = DeviceHandler(str(folder / "mine.npz"), folder / "state", allow=allow)
    try:
        handler.hello(FederationPlan.of(cloud, RUN).model_dump_json())
        yield handler
    finally:
        handler.close()


def upload(device: DeviceHandler, sent: Tree, round: int = 1, base: int = -1, share: float = 1.0) -> Tree:
    answer = device.answer("train", round, DeviceJob(RUN, base, TrainRequest(1, round, sent, share=share)))
    assert isinstance(answer, TrainAnswer)
    return answer.upload


def items_in(device: DeviceHandler, rows: torch.Tensor) -> int:
    """Return how many training items of the device are among these rows, to three digits."""
    x = device.session(RUN).federation.data(1).train.x.flatten(1)
    rows = rows[torch.isfinite(rows).all(1)]
    return int((torch.cdist(x, rows) < 1e-2).any(1).sum()) if len(rows) else 0


def first_layer(model: Tree) -> tuple[str, str]:
    """Return the names of the first layer's weights and bias."""
    return next(k for k in model if model[k].ndim == 2), next(k for k in model if model[k].ndim == 1)


def by_settings(device: DeviceHandler, cloud: Any) -> int:
    """Read the item of a single step on a single item: the first layer's change of weights by its change of bias."""
    sent = T.clone(cloud.method.setup()["w"])
    made = upload(device, sent)
    weight, bias = first_layer(sent)
    return items_in(device, (made[weight] - sent[weight]) / (made[bias] - sent[bias])[:, None])


def crafted(cloud: Any, device: DeviceHandler) -> Tree:
    """Return a model whose first layer sorts items by brightness into neurons (Fowl et al., ICLR 2022).

    The cloud is given the range of brightness, which it would know from similar data.
    """
    brightness = device.session(RUN).federation.data(1).train.x.flatten(1).mean(1)
    sent = T.clone(cloud.method.setup()["w"])
    (w1, w2), (b1, _) = [k for k in sent if sent[k].ndim == 2], [k for k in sent if sent[k].ndim == 1]
    neurons, d = sent[w1].shape
    sent[w1] = torch.full((neurons, d), 1 / d)
    sent[b1] = -torch.linspace(float(brightness.min()) - 0.01, float(brightness.max()), neurons)
    sent[w2] = torch.linspace(-0.1, 0.1, len(sent[w2]))[:, None].repeat(1, neurons)
    return sent


def by_model(device: DeviceHandler, cloud: Any, round: int = 1) -> int:
    """Read the items that are alone between the thresholds of two neighbouring neurons."""
    sent = crafted(cloud, device)
    made = upload(device, sent, round)
    weight, bias = first_layer(sent)
    dw, db = (made[weight] - sent[weight]).double(), (made[bias] - sent[bias]).double()
    return items_in(device, ((dw[:-1] - dw[1:]) / (db[:-1] - db[1:])[:, None]).float())


# ---- the reconstructions -----------------------------------------------------------------------------------------
def test_a_plan_of_one_step_on_one_item_gives_the_item_and_is_refused(tmp_path: Path) -> None:
    cloud = cloud_session(batch=1, epochs=0.001, lr=1.0)
    with joined(tmp_path, cloud, Allow(reveal=ANYTHING)) as device:
        assert by_settings(device, cloud) == 1
    with pytest.raises(CoterieError, match=r"batch = 1, with which an upload can reveal .* allows at least 8"):  # noqa: SIM117
        with joined(tmp_path, cloud, Allow()):
            pass
    large = cloud_session(batch=10, epochs=0.001, lr=1.0)  # one step on ten items
    with pytest.raises(CoterieError, match="made from 10 training items and can reveal them"):  # noqa: SIM117
        with joined(tmp_path, large, Allow()):
            pass


def test_a_crafted_first_model_gives_many_items_and_is_refused(tmp_path: Path) -> None:
    cloud = cloud_session(lr=0.5)
    with joined(tmp_path, cloud, Allow(reveal=Reveal(first_model="any"))) as device:
        assert by_model(device, cloud) > 10
    with joined(tmp_path, cloud, Allow()) as device:
        with pytest.raises(CoterieError, match="the first model is not the one that the plan's seed gives"):
            by_model(device, cloud)
        with pytest.raises(CoterieError, match=r"most neurons of .* are copies of each other"):
            by_model(device, cloud, round=3)  # a device that is asked late has no first model to compare
        upload(device, T.clone(cloud.method.setup()["w"]))  # the agreed one
        assert "refused" in (device.state / "audit.jsonl").read_text()


# ---- the bounds --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("given", "why"), [
    ({"lr": 1.5}, "lr = 1.5, with which"), ({"weight_decay": 5.0}, "weight_decay = 5, with which"),
    ({"local_steps": 1, "batch": 12}, "made from 12 training items"), ({"batch": 7}, "batch = 7"),
])  # fmt: skip
def test_plans_that_reveal_items_are_refused_unless_the_operator_allows_them(
    tmp_path: Path, given: dict[str, Any], why: str
) -> None:
    cloud = open_session(settings(method="fedavg", clients=2, rounds=4, model="mlp", **given), OWN)
    with pytest.raises(CoterieError, match=why):  # noqa: SIM117
        with joined(tmp_path, cloud, Allow()):
            pass
    with joined(tmp_path, cloud, Allow(reveal=ANYTHING)):
        pass


def test_a_share_of_the_work_cannot_go_below_the_bound(tmp_path: Path) -> None:
    cloud = open_session(settings(method="fedavg", clients=2, model="mlp", batch=8, local_steps=10), OWN)
    with joined(tmp_path, cloud, Allow()) as device, pytest.raises(CoterieError, match="made from 8 training items"):
        upload(device, T.clone(cloud.method.setup()["w"]), share=0.01)


def test_a_setting_with_a_rule_of_its_own_has_no_other_bound() -> None:
    plan = settings(method="fedavg", batch=2, lr=3.0)
    Allow.of({"settings": {"batch": {"min": 1, "max": 64}, "lr": {"max": 5.0}}}).check_plan(plan)
    with pytest.raises(CoterieError, match="batch = 2, with which"):
        Allow.of({"methods": ["fedavg"]}).check_plan(plan)


def test_a_policy_file_states_what_may_be_revealed() -> None:
    assert Allow.of({"reveal": {"batch": 4, "first_model": "any"}}).reveal == Reveal(batch=4, first_model="any")
    assert Allow.of({"reveal": "anything"}).reveal is ANYTHING
    for wrong in ("all", {"bach": 4}, {"batch": "4"}, {"first_model": "mine"}, {"lr": -1}, {"items": True}):
        with pytest.raises(CoterieError, match=r"reveal|first_model|batch|lr|items"):
            Allow.of({"reveal": wrong})


FEW = ["fedavg", "fedrep", "per-fedavg", "fedcpmd"]
ALL: list[Any] = [pytest.param(n, marks=pytest.mark.long) for n in method_names() if n not in FEW]


@pytest.mark.parametrize("name", [*FEW, *ALL])
def test_no_method_with_its_defaults_is_refused_on_items(name: str) -> None:
    public = {"public": 100} if name in ("fedmd", "fedgkd", "divfl", "fedbe") else {}
    given = {"data": "digits", "clients": 10, "partition": "iid", "val_share": 0.2, **public}
    session = prepare(settings(name, **given))
    for t in (1, 2):
        Reveal().check_items(session.method, session.method.phases(t), 100)
    Reveal().check_plan(session.settings, ())
    assert not copied_rows(session.method, session.method.ctx.w0)


@pytest.mark.parametrize("name", ["fedavg", *(pytest.param(n, marks=pytest.mark.long) for n in FEW[1:]), *ALL])
def test_the_agreed_first_model_of_every_method_is_accepted(tmp_path: Path, name: str) -> None:
    """A device computes from the plan what it downloads first; no honest download is refused."""
    with federation(
        tmp_path, name, 2 if name.startswith(("fedpc", "sc-fpfl")) else 0, rounds=2, join=1.0, watch=False
    ) as f:
        f.loop.run()
        seen = [line for line in f.runtime.liveness.errors if "first model" in line or "copies" in line]
    assert not seen


def test_rows_that_are_alike_by_design_are_no_trap() -> None:
    cloud = cloud_session()
    w0 = cloud.method.ctx.w0
    weight = next(k for k in w0 if w0[k].ndim == 2)
    same = w0[weight][:1].repeat(len(w0[weight]), 1)
    assert copied_rows(cloud.method, {weight: same}) == weight
    assert copied_rows(cloud.method, {weight: torch.zeros_like(same)}) == ""
    assert copied_rows(cloud.method, {weight: w0[weight]}) == ""
    assert copied_rows(cloud.method, {"other": same}) == ""
