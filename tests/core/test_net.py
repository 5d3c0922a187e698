"""A module called with the tensors of a tree."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core.net import Net, initial
from coterie.core.tree import clone
from coterie.errors import CoterieError


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


def bn_net(**options) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, **options), nn.ReLU(), nn.Linear(4, 3))


def picture_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


FLAT = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)) * 3 + 1


def models():
    words = torch.arange(16).reshape(4, 4) % 11
    picture = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    return [(bn_net(), FLAT), (picture_net(), picture), (Words(), words)]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("training", [False, True])
def test_forward_is_the_plain_module_in_values_gradients_and_statistics(which, training):
    plain, x = models()[which]
    initial(plain, 7)
    net = Net(copy.deepcopy(plain), x[:2])
    params = {k: v.requires_grad_(k in net.trainable) for k, v in net.state().items()}
    plain.train(training)
    expected = plain(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
    if training:
        with net.train_mode():
            out = net(params, x)
    else:
        out = net(params, x)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out.square().sum(), [params[k] for k, _ in plain.named_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert all(torch.equal(params[k], v) for k, v in plain.named_buffers() if v.is_floating_point())


def test_a_recurrent_model_follows_the_tree_it_is_given():
    x = torch.arange(8).reshape(2, 4)
    net, other = Net(Words(), x), Words()
    a, b = net.state(), {k: v.detach().clone() for k, v in other.state_dict().items()}
    first = net(a, x)
    assert torch.equal(net(b, x), other(x))
    assert torch.equal(net(a, x), first)


def test_the_module_holds_nothing_of_its_own():
    net = Net(bn_net(), FLAT)
    params = {k: torch.full_like(v, 0.5) for k, v in net.state().items()}
    net.load(params)
    assert all(torch.equal(v, params[k]) for k, v in net.state().items())
    assert net.module[0].weight is params["0.weight"]  # pointed at, not copied


def test_a_tree_that_lacks_an_entry_gets_a_sentence():
    net = Net(bn_net(), FLAT)
    with pytest.raises(CoterieError, match=r"lacks '3\.weight'"):
        net({k: v for k, v in net.state().items() if k != "3.weight"}, FLAT)


# ---- batch norm -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("picture", [False, True])
def test_batch_norm_in_training_moves_statistics_in_the_tree_itself(picture):
    module, x = models()[1 if picture else 0]
    net = Net(module, x)
    params = {k: v.requires_grad_(k in net.trainable) for k, v in net.state().items()}
    mean, var = params["1.running_mean"], params["1.running_var"]
    with net.train_mode():
        net(params, x)
    inner = net.module[0](x)
    axes = [0, 2, 3] if picture else [0]
    assert params["1.running_mean"] is mean and params["1.running_var"] is var
    assert torch.allclose(mean, 0.1 * inner.mean(axes), atol=1e-6)
    assert torch.allclose(var, 0.9 + 0.1 * inner.var(axes), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"affine": False}])
def test_frozen_batch_norm_neither_moves_nor_uses_batch_statistics(options):
    net = Net(bn_net(**options), FLAT)
    params = net.state()
    params["1.running_mean"] += 0.3
    before, calm = clone(params), net(params, FLAT)
    params["3.weight"].requires_grad_()  # only the head is being trained
    with net.train_mode():
        out = net(params, FLAT)
    assert torch.equal(out, calm)
    assert all(torch.equal(params[k], v) for k, v in before.items())


def test_batch_norm_without_weights_learns_together_with_the_layer_before_it():
    net = Net(bn_net(affine=False), FLAT)
    params = net.state()
    params["0.weight"].requires_grad_()
    with net.train_mode():
        net(params, FLAT)
    assert params["1.running_mean"].abs().sum() > 0


def test_statistics_stand_still_outside_training_even_when_weights_need_gradients():
    net = Net(bn_net(), FLAT)
    params = {k: v.requires_grad_(k in net.trainable) for k, v in net.state().items()}
    with net.train_mode():
        pass
    net(params, FLAT)
    assert not net.training and not params["1.running_mean"].any()


def test_freezing_is_decided_at_every_call():
    net = Net(bn_net(), FLAT)
    frozen, live = net.state(), net.state()
    live["1.weight"].requires_grad_()
    with net.train_mode():
        net(frozen, FLAT)
        net(live, FLAT)
        net(frozen, FLAT)
    assert not frozen["1.running_mean"].any() and live["1.running_mean"].any()


def test_only_batch_norm_says_that_a_batch_of_one_cannot_be_learnt_from():
    assert Net(bn_net(), FLAT).has_batch_norm
    other = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    assert not Net(other, torch.zeros(2, 1, 6, 6)).has_batch_norm


def test_a_norm_with_a_growing_average_is_refused():
    with pytest.raises(CoterieError, match='the norm layer "1" has momentum=None'):
        Net(bn_net(momentum=None), FLAT)


# ---- what is trained ------------------------------------------------------------------------------------------------
def test_buffers_and_frozen_parameters_are_not_trainable():
    module = bn_net()
    module.register_buffer("scale", torch.ones(3))
    module[0].bias.requires_grad_(False)
    net = Net(module, FLAT)
    assert net.fixed == {"scale", "1.running_mean", "1.running_var"}
    assert net.layout.frozen == {"0.bias"} and "0.bias" not in net.state()
    assert net.trainable == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert set(net.names) == net.fixed | net.trainable == set(net.state())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(5, 4, bias=False), nn.Linear(4, 5, bias=False)
        self.again = nn.Linear(5, 4, bias=False)
        self.again.weight = self.there.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.again(torch.tanh(self.back(torch.tanh(self.there(x))))))


def test_tied_weights_are_one_entry_and_stay_tied():
    plain = Tied()
    net = Net(copy.deepcopy(plain), FLAT)
    assert net.names == ["there.weight", "back.weight", "out.weight", "out.bias"]
    params = {k: v.requires_grad_() for k, v in net.state().items()}
    wanted = torch.autograd.grad(plain(FLAT).sum(), list(plain.parameters()))
    got = torch.autograd.grad(net(params, FLAT).sum(), list(params.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# ---- features and head ----------------------------------------------------------------------------------------------
def test_the_head_on_the_features_gives_the_logits():
    for module, x in models():
        net = Net(module, x[:2])
        params = net.state()
        logits, z = net.both(params, x)
        assert z.shape == (len(x), net.width)
        assert torch.equal(logits, net(params, x)) and torch.allclose(net.logits(params, z), logits, atol=1e-6)


def test_a_bare_linear_layer_has_features_equal_to_its_input():
    net = Net(nn.Linear(5, 3), FLAT)
    params = net.state()
    assert net.head_names == ("weight", "bias") and torch.equal(net.features(params, FLAT), FLAT)
    assert torch.allclose(net.logits(params, FLAT), net(params, FLAT))


def test_a_head_may_lack_a_bias():
    net = Net(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False)), FLAT)
    assert net.head_names == ("1.weight", None)
    assert torch.allclose(net.logits(net.state(), net.features(net.state(), FLAT)), net(net.state(), FLAT))


def test_inputs_are_what_enters_each_layer():
    net = Net(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), FLAT)
    p = net.state()
    logits, (a, b) = net.inputs(p, FLAT, ["0", "2"])
    assert torch.equal(a, FLAT) and torch.equal(b, F.relu(F.linear(FLAT, p["0.weight"], p["0.bias"])))
    assert torch.equal(logits, net(p, FLAT))


def test_a_model_without_a_head_works_and_says_so_when_asked_for_one():
    net = Net(nn.Sequential(nn.Linear(5, 3), nn.Softplus()), FLAT)
    assert net(net.state(), FLAT).shape == (8, 3)
    for ask in (lambda: net.width, lambda: net.head_names, lambda: net.features(net.state(), FLAT)):
        with pytest.raises(CoterieError, match="this model has no head"):
            ask()


# ---- first values ---------------------------------------------------------------------------------------------------
def test_initial_is_a_function_of_the_seed_only():
    def drawn(start: int, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(start)
        encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        module = nn.ModuleList([Words(), bn_net(), picture_net(), encoder])
        for p in module.parameters():
            p.data.add_(start)
        initial(module, seed)
        return module.state_dict()

    a, b, c = drawn(1, 5), drawn(2, 5), drawn(1, 6)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["0.out.weight"], c["0.out.weight"])


def test_initial_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initial(bn_net_without_draws, 9)
    assert torch.equal(torch.rand(3), expected)


bn_net_without_draws = bn_net()


def test_initial_leaves_marked_parts_as_they_are():
    module = bn_net()
    module[0].keep_initial = True
    before = clone(dict(module.named_parameters()))
    initial(module, 3)
    assert torch.equal(module[0].weight, before["0.weight"]) and not torch.equal(module[3].weight, before["3.weight"])
