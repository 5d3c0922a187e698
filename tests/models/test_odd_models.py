"""Models that are not a plain chain: their layers, the order of these, and how methods use them."""

import pytest
import torch
from torch import nn

from coterie.core import tree as T
from coterie.core.layers import Layout, layout
from coterie.core.net import Net
from coterie.errors import CoterieError
from coterie.parts.layer_groups import last_layers
from support.odd_grid import PAGE, own_methods, page, play, read, row, session
from support.odd_models import ODD, SHAPE

X = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(4))


def layout_of(name: str) -> Layout:
    return layout(ODD[name](4), X)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_layers_that_do_not_affect_the_output_are_not_layers_of_the_model():
    layers = layout_of("unused layers")
    assert layers.layers == ("body", "norm", "hidden", "head") and layers.head == "head"
    unused = {"aux.weight", "aux.bias", "never.weight", "never.bias"}
    assert layers.group("unused") >= unused and not layers.group("unused") & layers.group("layer:hidden")
    assert layers.group("unused") <= layers.group("body") and layers.of_kind("bn") == ("norm",)
    assert last_layers(layers, 1) == {"head.weight", "head.bias"}
    assert last_layers(layers, 3) == layers.group("all")


def test_free_parameters_are_placed_at_their_first_use():
    layers = layout_of("free parameters")
    assert layers.layers[:3] == ("patch", "", "block.self_attn") and layers.head == "head"
    assert layers.group("layer:") == {"cls", "pos"} and layers.kinds[""] == "other"
    assert last_layers(layers, 1) == {"head.weight", "head.bias"}


def test_the_projection_inside_attention_is_part_of_it_and_not_a_candidate():
    layers = layout_of("attention")
    assert layers.layers == ("attention", "attention.out_proj", "mlp", "head")
    assert layers.of_kind("fc") == ("mlp", "head") and layers.weighted == ("attention", "mlp", "head")
    assert "attention.out_proj.weight" in layers.group("fc")
    assert last_layers(layers, 2) == layers.group("layer:mlp") | layers.group("layer:head")


def test_a_recurrent_layer_counts_as_a_layer():
    layers = layout_of("LSTM")
    assert last_layers(layers, 1) == {"head.weight", "head.bias"} and last_layers(layers, 2) == layers.group("all")


def test_a_tied_weight_belongs_to_its_first_layer():
    layers = layout_of("tied weights")
    assert layers.group("layer:there") == {"there.weight"} and layers.group("layer:back") == {"back.bias"}
    assert layers.kinds["back"] == "other" and layers.of_kind("fc") == ("inner", "there", "head")


def test_frozen_tensors_are_constants_of_the_module():
    net = Net(ODD["frozen stem"](4), X)
    assert net.layout.frozen >= {"stem.0.weight", "stem.1.bias", "stem.1.running_mean"}
    assert not any(k.startswith("stem") for k in net.state()) and net.layout.layers[0] == "conv"
    before = {k: v.clone() for k, v in net.module.stem.state_dict().items() if v is not None}
    params = {k: v.requires_grad_(k in net.trainable) for k, v in net.state().items()}
    with net.train_mode():
        net(params, X * 3 + 1).sum().backward()
    assert all(torch.equal(net.module.stem.state_dict()[k], v) for k, v in before.items())
    assert params["bn.running_mean"].any()  # statistics of trained layers change


def test_a_norm_without_weights_is_frozen_with_the_layer_before_it():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    net = Net(module, torch.randn(2, 5))
    assert net.layout.frozen == {"0.weight", "0.bias", "1.running_mean", "1.running_var"}
    with net.train_mode():
        net(net.state(), torch.randn(9, 5) + 4)
    assert not module[1].running_mean.any()


def test_a_layer_with_a_frozen_bias_is_not_a_head():
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    module[1].bias.requires_grad_(False)
    assert layout(module, torch.zeros(2, 5)).head is None


def test_a_part_that_runs_without_gradients_takes_part():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                z = self.features(x)
            return self.head(z)

    assert layout(Detached(), torch.randn(2, 5)).layers == ("features", "head")


def test_reading_a_shape_or_a_device_does_not_use_a_layer():
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.head = nn.Linear(3, 3), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(x.to(self.spare.weight.device, self.spare.weight.dtype)) + len(self.spare.weight.shape) * 0

    assert layout(Asks(), torch.randn(2, 5)).layers == ("head",)


@pytest.mark.parametrize("make", [nn.ReLU, lambda: nn.Linear(5, 2).requires_grad_(False)])
def test_a_model_without_trainable_parameters_raises_a_clear_error(make):
    with pytest.raises(CoterieError, match="nothing to train"):
        Net(make(), torch.zeros(2, 5))


# ---- methods ---------------------------------------------------------------------------------------------------------
def test_fedper_and_lg_fedavg_split_at_the_head_despite_unused_layers():
    fedper, lg = (session(name, "unused layers").method for name in ("fedper", "lg-fedavg"))
    head = {"head.weight", "head.bias"}
    assert {k for k in fedper.ctx.w0 if fedper.private(k)} == head
    assert {k for k in lg.ctx.w0 if not lg.private(k)} == head == lg.model_schema.entries.keys()


def test_lg_fedavg_sends_the_head_of_a_transformer_and_nothing_else():
    lg = session("lg-fedavg", "free parameters").method
    assert lg.model_schema.entries.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("method", ["fedala", "fedcpmd", "fedcmd", "fedbn", "fedap"])
def test_methods_run_with_an_unused_layer(method):
    loop = play(session(method, "unused layers", rounds=2))
    assert loop.done == 2


def test_fedcpmd_runs_with_attention():
    loop = play(session("fedcpmd", "attention", rounds=2))
    assert loop.method.layers == ("mlp", "head") and loop.server.layer


def test_fedcpmd_names_the_candidates_of_a_model():
    with pytest.raises(CoterieError, match=r"has 1: fc\); candidates may also be all .*, or classifier, or a list"):
        session("fedcpmd", "ResNet")
    assert session("fedcpmd", "ResNet", candidates="all").method.layers[-1] == "fc"


@pytest.mark.parametrize("method", ["fedavg", "ditto", "local"])
def test_frozen_parameters_are_neither_sent_nor_changed(method):
    made = session(method, "frozen stem", rounds=2)
    stem = T.clone(dict(made.method.ctx.net.module.stem.named_parameters()))
    for link in ("up", "down"):
        assert not any("stem" in k for k in made.method.schema(link).entries)
    play(made)
    now = dict(made.method.ctx.net.module.stem.named_parameters())
    assert all(torch.equal(now[k], v) for k, v in stem.items())


def test_operations_without_a_vmap_rule_run_in_the_loop_engine(recwarn):
    from coterie.train.engine_choice import choose_engine

    made = session("fedavg", "LSTM", "stack")
    assert "vmap has no rule for" in choose_engine(made.clients(), "stack").sentence
    assert choose_engine(made.clients(), "auto").engine == "loop"
    play(made)
    assert not [w for w in recwarn if "batching rule" in str(w.message)]


def test_the_page_of_odd_models_has_a_row_for_every_method():
    text = PAGE.read_text()
    rows = read(text)
    assert list(rows) == own_methods(), "run `python tests/support/odd_grid.py METHOD ...` for the missing methods"
    assert page(rows) == text


@pytest.mark.long
@pytest.mark.parametrize("method", own_methods())
def test_a_method_runs_with_odd_models_or_is_refused_as_the_page_says(method):
    assert row(method) == read(PAGE.read_text())[method]
