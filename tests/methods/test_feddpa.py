"""FedDPA: adapters are mixed in their layers with a share for each item; its limits are the single adapters."""

import pytest
import torch
import torch.nn.functional as F

from coterie import testing
from coterie.core import tree as T
from coterie.methods.feddpa import FedDPA
from support import families

TEXT = "text transformer"


def method(family: str = TEXT, **own: object) -> FedDPA:
    return families.session("feddpa", family, lora_rank=2, settings=own).method


def two_trees(m: FedDPA) -> tuple[dict, dict]:
    torch.manual_seed(0)
    return tuple({k: v + 0.3 * torch.randn_like(v) for k, v in m.ctx.w0.items()} for _ in range(2))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_0_or_1_is_one_of_the_adapters(share):
    m, x = method(), families.data("tokens").ready(torch.arange(5))
    received, local = two_trees(m)
    assert m._inside
    expected = m.ctx.forward(local if share else received, x)
    assert torch.allclose(m._mixed(received, local, x, torch.full((1,), share)), expected, atol=1e-5)


def test_every_item_has_a_mixture_of_its_own_in_every_layer():
    """An item's mixture is that of a model with the matrices (1 - s) B A of one adapter and s B A of the other."""
    m, x = method(), families.data("tokens").ready(torch.arange(4))
    received, local = two_trees(m)
    shares = torch.tensor([0.1, 0.4, 0.7, 0.9])
    out = m._mixed(received, local, x, shares)
    for i, s in enumerate(shares.tolist()):
        joint = dict(received)
        for k in m.ctx.group("lora:A"):
            joint[k] = torch.cat([received[k], local[k]])
        for k in m.ctx.group("lora:B"):
            joint[k] = torch.cat([(1 - s) * received[k], s * local[k]], 1)
        outputs, z = m.ctx.net.both(joint, x[i : i + 1])
        expected = (1 - s) * outputs + s * F.linear(z, local["classifier.weight"], local["classifier.bias"])
        assert torch.allclose(out[i], expected[0], atol=1e-4)
    assert all(part.gate is None for part in m.ctx.net.module.modules() if hasattr(part, "gate"))


def test_only_adapters_and_head_travel_and_the_local_adapter_stays(tmp_path):
    loop = testing.play(testing.open_loop(families.session("feddpa", TEXT, lora_rank=2), tmp_path))
    m = loop.method
    assert set(loop.server["w"]) == m.ctx.group("lora") | m.ctx.group("head")
    for i in m.ctx.clients:
        assert loop.runtime.states.get(i)["local"].keys() == loop.server["w"].keys()


def test_with_most_zero_all_clients_use_the_global_adapter():
    m = method(most=0.0)
    received, local = two_trees(m)
    data = families.session("feddpa", TEXT, lora_rank=2).federation.data(0)
    model = m.personal({"local": local}, received, data)
    x = data.train.x[:3]
    assert torch.allclose(m.predict(*model[:1], x, model.extras), m.ctx.forward(received, x), atol=1e-5)


def test_convolutions_are_mixed_inside_too():
    m = families.session("feddpa", "ConvNet", lora_rank=2, lora_targets="conv").method
    x = families.data("pictures").ready(torch.arange(4))
    received, local = two_trees(m)
    assert m._inside
    ones = m._mixed(received, local, x, torch.ones(4))
    assert torch.allclose(ones, m.ctx.forward(local, x), atol=1e-4)
    assert T.tag("p", local).keys() & T.tag("g", received).keys() == set()
