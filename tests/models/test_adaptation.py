"""Frozen parts and low-rank adapters: what is a constant neither trains nor travels nor is stored per client."""

import copy

import pytest
import torch
from torch import nn

import coterie
from coterie import testing
from coterie.core import tree as T
from coterie.core.layers import layout
from coterie.core.net import Net
from coterie.errors import CoterieError
from coterie.export.personal_model import load_model
from coterie.models.adaptation import Adaptation, adapt
from coterie.models.registry import build_model
from support import families

FEW = {"rounds": 2, "clients": 3, "workers": 1, "epochs": 1, "join": 1.0, "eval_every": 2}
TEXT = "text transformer"


def adapted(family: str, **how: object) -> Net:
    module = families.model(family)
    example = families.data(families.FAMILIES[family][0]).ready(torch.arange(2))
    adapt(module, example, Adaptation(**how), seed=1)
    return Net(module, example)


# ---- frozen parts ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("freeze", ["stem,layer1", "stem, layer1,layer2.0.conv1", "body", "norm", "classifier.bias"])
def test_frozen_parts_are_constants(freeze):
    whole, net = adapted("ResNet, batch norm"), adapted("ResNet, batch norm", freeze=freeze)
    kept, frozen = set(net.state()), set(net.constants())
    assert frozen and kept | frozen == set(whole.state()) and not kept & frozen
    if freeze == "body":
        assert kept == {"classifier.weight", "classifier.bias"}
    if freeze.startswith("stem"):
        assert all(k.startswith(("stem.", "layer1.")) for k in frozen if k != "layer2.0.conv1.weight")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "scaffold", "local"])
def test_what_is_frozen_neither_trains_nor_travels_nor_is_stored(method, tmp_path):
    session = families.session(method, "ResNet, batch norm", freeze="stem,layer1")
    before = T.clone(session.method.ctx.net.constants())
    loop = testing.play(testing.open_loop(session, tmp_path))
    after = session.method.ctx.net.constants()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    stored = [loop.runtime.states.get(i) for i in session.method.ctx.clients]
    assert not any(k in before for state in stored for k in _names(state))
    if method == "fedavg":
        assert bytes_up(loop) == 3 * 2 * sum(v.numel() * 4 for v in session.method.ctx.w0.values())


def bytes_up(loop) -> int:
    return sum(n for page in loop.bytes.values() for n in page["up"].values())


def _names(state):
    if isinstance(state, dict):
        for k, v in state.items():
            yield T.plain(k)
            yield from _names(v)


def test_frozen_parts_stay_in_evaluation_mode():
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    adapt(module, x[:2], Adaptation(freeze="0"), seed=0)
    net = Net(module, x[:2])
    with net.train_mode():
        assert torch.equal(net(net.state(), x), net(net.state(), x))
        assert not module[0][1].training and module[1].training


# ---- adapters --------------------------------------------------------------------------------------------------------
CONV = {"lora_targets": "conv"}
CASES = [("text transformer", {}), ("ViT", {"lora_targets": "query,value"}), ("ViT", {"lora_targets": "linear,conv"}),
         ("ResNet, batch norm", CONV), ("ConvNet", CONV), ("1-D ResNet", CONV), ("TCN", CONV)]  # fmt: skip


@pytest.mark.parametrize(("family", "how"), CASES)
def test_an_adapter_adds_a_low_rank_matrix_to_the_weight_of_its_layer(family, how):
    """Merge the adapters into the weights of a plain model: the outputs are the same."""
    net, plain = adapted(family, lora_rank=2, lora_alpha=6.0, **how), families.model(family).eval()
    x = families.data(families.FAMILIES[family][0]).ready(torch.arange(6))
    w0 = net.state()
    assert torch.allclose(net(w0, x), plain(x), atol=1e-6)
    torch.manual_seed(0)
    w = {k: torch.randn_like(v) * 0.1 if k in net.layout.group("lora") else v for k, v in w0.items()}
    for name in net.layout.group("lora:A"):
        path = name.rpartition(".")[0]
        layer = plain.get_submodule(path)
        low, high = w[name], w[f"{path}.lora_B"]
        with torch.no_grad():
            layer.weight += 3 * (high.flatten(1) @ low.flatten(1)).view_as(layer.weight)
    assert torch.allclose(net(w, x), plain(x), atol=1e-4)


def test_groups_of_adapters_and_what_is_trained():
    net = adapted(TEXT, lora_rank=2)
    groups = net.layout.groups
    assert len(groups["lora:A"]) == len(groups["lora:B"]) == 6  # query, key, value, output and two of the MLP
    assert groups["lora"] == groups["lora:A"] | groups["lora:B"]
    assert net.trainable == groups["lora"] | groups["head"] and not groups["unused"]
    size = {k: v.numel() for k, v in net.state().items()}
    assert sum(size[k] for k in groups["lora"]) == 2 * (4 * (8 + 8) + 2 * (8 + 32))


def test_adapters_of_frozen_layers_are_left_out():
    module = build_model("transformer", (6,), 3, seed=1, vocab=20, options={"width": 8})
    adapt(module, torch.zeros(2, 6, dtype=torch.int64), Adaptation(lora_rank=2, freeze="encoder.layer.0"), seed=0)
    names = layout(module, torch.zeros(2, 6, dtype=torch.int64)).groups["lora"]
    assert names and all(k.startswith("encoder.layer.1.") for k in names)


class PlainAttention(nn.Module):
    """PyTorch's own transformer layer, which has a shortcut past its parts in evaluation mode."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_adapters_of_pytorchs_transformer_count_in_training_and_evaluation():
    torch.manual_seed(0)
    module, x = PlainAttention(), torch.randn(4, 5, 8)
    with pytest.raises(CoterieError, match='unknown layer in lora_targets "out_proj"'):
        adapt(copy.deepcopy(module), x[:2], Adaptation(lora_rank=2, lora_targets="out_proj"), seed=0)
    plain = copy.deepcopy(module).eval()
    adapt(module, x[:2], Adaptation(lora_rank=2), seed=0)
    net = Net(module, x[:2])
    w = {k: torch.randn_like(v) * 0.3 if "lora" in k else v for k, v in net.state().items()}
    with torch.no_grad():
        attention = plain.encoder.layers[0].self_attn
        at = "encoder.layers.0.self_attn"
        attention.in_proj_weight += w[f"{at}.lora_B"] @ w[f"{at}.lora_A"]
        for name in ("linear1", "linear2"):
            at = f"encoder.layers.0.{name}"
            plain.get_submodule(at).weight.add_(w[f"{at}.lora_B"] @ w[f"{at}.lora_A"])
        expected = plain(x)
        assert torch.allclose(net(w, x), expected, atol=1e-5)
    with net.train_mode():
        out = net({k: v.requires_grad_() for k, v in w.items()}, x)
    assert torch.allclose(out, expected, atol=1e-5)
    assert all(g is not None for g in torch.autograd.grad(out.sum(), list(w.values()), allow_unused=True))


class ReadsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(nn.functional.linear(x.flatten(1), self.inner.weight, self.inner.bias))


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            {"lora_rank": 2},
            "no linear or attention layers besides",
        ),
        (testing.SmallNet, {"lora_rank": 2, "lora_targets": "conv"}, "the model has no conv layers"),
        (
            testing.SmallNet,
            {"lora_rank": 2, "lora_targets": "fc3"},
            'unknown layer in lora_targets "fc3"; did you mean',
        ),
        (testing.SmallNet, {"lora_alpha": 2.0}, "lora_alpha = 2.0 has no effect without lora_rank"),
        (testing.SmallNet, {"freeze": "fc9"}, 'unknown layer in freeze "fc9"; did you mean'),
        (testing.SmallNet, {"freeze": "conv"}, "freeze = conv names a group of layers, and the model has none"),
        (testing.SmallNet, {"freeze": "body,head"}, "nothing to train"),
        (ReadsWeights, {"lora_rank": 2}, 'the adapter of the layer "inner" has no effect'),
    ],
)
def test_mistakes_raise_a_clear_error(model, given, words, tmp_path):
    with pytest.raises(CoterieError, match=words) as caught:
        coterie.run("fedavg", "digits", model(), out=tmp_path / "r", **FEW, **given)
    assert "\n" not in str(caught.value) and not (tmp_path / "r").exists()


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_only_adapters_and_head_are_sent_and_ffa_lora_is_a_setting(tmp_path):
    def sent(name: str, **more: object) -> tuple[int, int]:
        session = families.session("fedavg", TEXT, lora_rank=2, **more)
        loop = testing.play(testing.open_loop(session, tmp_path / name))
        return bytes_up(loop), sum(v.numel() for v in session.method.ctx.w0.values())

    fedit, both = sent("fedit")
    ffa, half = sent("ffa", freeze="lora:A")
    head = 9 * families.CLASSES
    assert both == 2 * (4 * 16 + 2 * 40) + head and half == 2 * (4 * 8 + 8 + 32) + head
    assert fedit == both * 4 * 3 * 2 and ffa == half * 4 * 3 * 2


def test_stacked_training_with_adapters_gives_the_results_of_the_loop(tmp_path):
    for family, how in ((TEXT, {}), ("ViT", {"lora_targets": "linear,conv"})):
        loops = [
            testing.play(
                testing.open_loop(families.session("fedavg", family, e, lora_rank=2, **how), tmp_path / f"{family}{e}")
            )
            for e in ("loop", "stack")
        ]
        a, b = (loop.server["w"] for loop in loops)
        assert all(torch.allclose(a[k], b[k], atol=1e-4) for k in a)


@pytest.mark.parametrize("method", ["fedper", "apfl"])
def test_a_model_with_adapters_is_exported_and_read(method, tmp_path):
    run = coterie.run(method, "digits", "mlp", lora_rank=2, freeze="lora:A", out=tmp_path / "r", **FEW)
    run.export(1, tmp_path / "m.safetensors")
    predictor = load_model(tmp_path / "m.safetensors")
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(predictor(x), run.personal(1)(x))


# ---- features of frozen beginnings -----------------------------------------------------------------------------------
PREFIXES = [
    ("text transformer", "embeddings,encoder", "pool"),
    ("text transformer", "embeddings", "embeddings"),  # vectors of zeros mark the padding
    ("ResNet, batch norm", "stem,layer1", "layer1"),
    ("ResNet, batch norm", "stem,layer1,layer2.0.conv1,layer2.0.norm1", "layer1"),
    ("ResNet, batch norm", "layer1", None),  # the stem before it trains
    ("ResNet, batch norm", "body", "pool"),
    ("ViT", "embeddings,encoder", "encoder"),
    ("tabular ResNet", "embeddings,stem", "stem"),
    ("TCN", "block1", "block1"),
]


@pytest.mark.parametrize(("family", "freeze", "last"), PREFIXES)
def test_the_longest_frozen_beginning_is_found_and_the_rest_computes_the_same(family, freeze, last):
    net = adapted(family, freeze=freeze)
    x = families.data(families.FAMILIES[family][0]).ready(torch.arange(8))
    assert net.cut_prefix(x) == (last is not None)
    if last is not None:
        assert net.prefix.last == last
        w = net.state()
        z = net.prefix_features(x)
        assert tuple(z.shape[1:]) == net.prefix.shape
        assert torch.equal(net(w, z), net(w, x))
        assert torch.equal(net.features(w, z), net.features(w, x))
        assert not any("forward" in part.__dict__ for part in net.module.modules())


class Dropping(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.stem, self.drop, self.head = nn.Linear(64, 8), nn.Dropout(dropout), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.stem(x.flatten(1)))))


def test_random_layers_end_the_beginning():
    x = torch.randn(4, 1, 8, 8)
    for dropout, freeze, last in ((0.0, "stem", "drop"), (0.5, "stem", "stem"), (0.5, "stem,drop", "drop")):
        module = Dropping(dropout)
        adapt(module, x[:2], Adaptation(freeze=freeze), seed=0)
        net = Net(module, x[:2])
        assert net.cut_prefix(x) and net.prefix.last == last


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedproto", "fedmd"])
@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_features_computed_once_give_the_results_of_each_batch(method, engine, tmp_path):
    loops, made = [], []
    for way in ("once", "each"):
        session = families.session(method, TEXT, engine, freeze="embeddings,encoder", frozen_features=way)
        made.append(session)
        loops.append(testing.play(testing.open_loop(session, tmp_path / way)))
    assert made[0].federation.features is not None and made[1].federation.features is None
    assert made[0].federation.data(0).train.x.shape[1:] == (8,)
    a, b = (testing.decided(loop) for loop in loops)
    assert _close(a["server"], b["server"]) and _close(a["clients"], b["clients"])


def _close(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, atol=1e-4)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_close(v, b[k]) for k, v in a.items())
    return True


def test_features_are_the_same_for_any_number_of_workers_and_after_a_resume(tmp_path):
    how = {"freeze": "fc1", "clients": 4, "rounds": 2, "epochs": 1, "eval_every": 1, "checkpoint_every": 1}
    runs = [
        coterie.run(
            "fedper", "digits", "mlp", out=tmp_path / f"{n}", workers=n, model_options={"hidden": [16, 8]}, **how
        )
        for n in (1, 2)
    ]
    coterie.run(
        "fedper",
        "digits",
        "mlp",
        out=tmp_path / "half",
        workers=1,
        model_options={"hidden": [16, 8]},
        **{**how, "rounds": 1},
    )
    runs.append(coterie.resume(tmp_path / "half", rounds=2))
    x = torch.rand(3, 1, 8, 8)
    first = runs[0].personal(2)(x)
    assert all(torch.equal(run.personal(2)(x), first) for run in runs)


def test_augmented_items_are_not_replaced_by_features():
    session = families.session("fedavg", "ResNet, batch norm", freeze="stem", augment="flip")
    assert session.federation.features is None and session.method.ctx.net.prefix is None
