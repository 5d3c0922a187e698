"""Layers and groups of any module, by type and in order of execution."""

import pytest
import torch
from torch import nn

from coterie.core.layers import layout, tensor_names
from coterie.errors import CoterieError


class Residual(nn.Module):
    """Registered in another order than it runs; its second batch norm is called downsample.1, not bn."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4))
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        y = self.norm(self.first(x)) + self.downsample(x)
        return self.last(y.mean((2, 3)))


PICTURES = torch.zeros(2, 1, 6, 6)


def test_layers_are_in_order_of_execution_not_of_registration():
    assert layout(Residual(), PICTURES).layers == ("first", "norm", "downsample.0", "downsample.1", "last")


def test_groups_are_found_by_type():
    found = layout(Residual(), PICTURES)
    norm = "downsample.1."
    assert found.group("bn") == {norm + k for k in ("weight", "bias", "running_mean", "running_var")}
    assert found.group("bn_stats") == {norm + "running_mean", norm + "running_var"}
    assert found.group("conv") == {"first.weight", "first.bias", "downsample.0.weight", "downsample.0.bias"}
    assert found.group("fc") == found.group("head") == found.group("layer:last") == {"last.weight", "last.bias"}
    assert found.kinds["norm"] == "other"  # group norm has no statistics to keep


def test_head_and_body_are_all_there_is_and_disjoint():
    found = layout(Residual(), PICTURES)
    assert found.group("head") | found.group("body") == found.group("all") == set(tensor_names(Residual()))
    assert not found.group("head") & found.group("body")
    layers = [found.group(f"layer:{name}") for name in found.layers]
    assert sum(map(len, layers)) == len(found.group("all")) and frozenset().union(*layers) == found.group("all")


def test_counters_of_batch_norm_are_in_no_group():
    assert not any("num_batches_tracked" in name for name in layout(Residual(), PICTURES).group("all"))


def test_an_unknown_group_names_the_nearest():
    with pytest.raises(CoterieError, match='did you mean "layer:first"'):
        layout(Residual(), PICTURES).group("layer:frist")


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4)])
def test_every_kind_of_batch_norm_counts(norm):
    found = layout(nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 2)), torch.zeros(2, 5))
    assert found.of_kind("bn") == ("1",) and found.head == "2"


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.Identity()])
def test_other_norms_do_not_count(norm):
    found = layout(nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 2)), torch.zeros(2, 5))
    assert not found.group("bn")


class Tied(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=bias)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


@pytest.mark.parametrize("bias", [True, False])
def test_a_last_layer_that_shares_its_weight_is_no_head(bias):
    found = layout(Tied(bias), torch.zeros(2, 5, dtype=torch.int64))
    assert found.head is None and not found.group("head")
    assert (
        found.group("body")
        == found.group("all")
        == {"embedding.weight", "out.bias"} - (set() if bias else {"out.bias"})
    )


def test_a_layer_registered_under_two_names_is_one_layer_and_may_be_the_head():
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    net.alias = net[1]
    net.forward = lambda x: net[1](net[0](x))
    assert layout(net, torch.zeros(2, 5)).head == "1"


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.LogSoftmax(1)),
        nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(36, 3))),
    ],
)
def test_without_a_plain_linear_layer_at_the_end_there_is_no_head(net):
    assert layout(net, PICTURES).head is None


def test_a_bare_linear_layer_is_its_own_head():
    found = layout(nn.Linear(5, 2), torch.zeros(2, 5))
    assert found.head == "" and found.group("head") == {"weight", "bias"}


def test_a_layer_that_attention_never_calls_stands_beside_it():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.attention(x, x, x)[0].mean(1))

    found = layout(Attention(), torch.zeros(2, 3, 4))
    assert found.layers == ("attention", "attention.out_proj", "out") and found.head == "out"


def test_looking_at_a_model_changes_nothing():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32, 3)).train()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.random.get_rng_state()
    layout(net, torch.randn(2, 1, 6, 6))
    state_after_example = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    torch.randn(2, 1, 6, 6)
    assert torch.equal(state_after_example, torch.random.get_rng_state())
    assert net.training and all(m.training for m in net.modules())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


def test_a_model_that_does_not_fit_gets_one_sentence():
    with pytest.raises(CoterieError, match="does not fit the data: one item has shape 1x6x6") as caught:
        layout(nn.Linear(7, 3), PICTURES)
    assert "\n" not in str(caught.value)
    with pytest.raises(CoterieError, match="must return a tensor of shape"):
        layout(nn.Conv2d(1, 2, 3), PICTURES)
