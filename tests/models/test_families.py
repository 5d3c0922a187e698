"""Networks of all families: sizes and values of published ones, invariants, and every method on every family."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core.layers import layout
from coterie.errors import CoterieError
from coterie.models.registry import build_model
from coterie.models.transformer import EncoderLayer
from coterie.models.zoo import ZOO
from support import families
from support.methods import METHODS

PICTURE, SIGNAL = (3, 224, 224), (3, 32)
TOTALS = [
    ("resnet18", PICTURE, 1000, {}, 11_689_512),  # torchvision's models
    ("resnet34", PICTURE, 1000, {}, 21_797_672),
    ("resnet18", (3, 32, 32), 10, {}, 11_173_962),  # the usual variant for CIFAR-10
    ("mobilenetv2", PICTURE, 1000, {}, 3_504_872),
    ("minilm", (64,), 4, {}, 22_713_216 - 147_840 + 4 * 385),  # without BERT's pooler, with a classifier
    ("convnet", (3, 32, 32), 10, {"width": 128}, 320_010),  # ConvNet-3 of data-set distillation
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "total"), TOTALS)
def test_published_networks_have_their_published_size(name, shape, classes, options, total):
    with torch.device("meta"):
        net = ZOO[name](shape, classes, **options)
    assert sum(p.numel() for p in net.parameters()) == total


def test_an_encoder_layer_computes_what_pytorchs_layer_computes():
    torch.manual_seed(0)
    for first in (False, True):
        theirs = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", 1e-6, batch_first=True, norm_first=first)
        ours = EncoderLayer(8, 2, 16, 0.0, 1e-6, first)
        weight, bias = theirs.self_attn.in_proj_weight.chunk(3), theirs.self_attn.in_proj_bias.chunk(3)
        inner = ours.attention.self
        for layer, w, b in zip((inner.query, inner.key, inner.value), weight, bias, strict=True):
            layer.load_state_dict({"weight": w, "bias": b})
        pairs = [
            (ours.attention.output.dense, theirs.self_attn.out_proj), (ours.attention.output.LayerNorm, theirs.norm1),
            (ours.intermediate.dense, theirs.linear1), (ours.output.dense, theirs.linear2),
            (ours.output.LayerNorm, theirs.norm2),
        ]  # fmt: skip
        for own, given in pairs:
            own.load_state_dict(given.state_dict())
        x, real = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
        x = x if first else x * real[..., None]
        real = real | first  # pictures have no padding
        expected = theirs.train()(x, src_key_padding_mask=~real)  # in training mode without its fast path
        assert torch.allclose(ours(x)[real], expected[real], atol=1e-5)
        assert (ours(x)[~real] == 0).all()


def test_padding_changes_no_score_of_a_text_transformer():
    net = build_model("transformer", (9,), 3, seed=1, vocab=20, options={"positions": 9, "width": 8}).eval()
    ids = torch.randint(1, 20, (2, 5))
    assert torch.allclose(net(ids), net(torch.cat([ids, torch.zeros(2, 4, dtype=torch.int64)], 1)), atol=1e-5)
    assert torch.isfinite(net(torch.zeros(2, 9, dtype=torch.int64))).all()


def test_a_tcn_sees_the_past_only():
    net = build_model("tcn", SIGNAL, 3, seed=1, options={"width": 8, "norm": "none"}).eval()
    seen = []
    net.block4.register_forward_hook(lambda _m, _i, out: seen.append(out))
    x = torch.randn(2, *SIGNAL)
    later = x.clone()
    later[..., 20:] += 1
    net(x), net(later)
    assert torch.allclose(seen[0][..., :20], seen[1][..., :20])
    assert not torch.allclose(seen[0][..., 20:], seen[1][..., 20:])


def test_features_of_a_table_have_vectors_of_their_own():
    net = build_model("tabular-mlp", (3,), 2, seed=1, options={"embedding": 4})
    out = net.embeddings(torch.tensor([[1.0, 2.0, 3.0], [1.0, 5.0, 3.0]]))
    expected = torch.relu(2.0 * net.embeddings.weight[1] + net.embeddings.bias[1])
    assert torch.equal(out[0, 4:8], expected) and torch.equal(out[0, :4], out[1, :4])


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", ["resnet8", "resnet18", "mobilenetv2", "convnet", "resnet1d", "tcn", "tabular-resnet"])
def test_the_option_norm_chooses_the_norm(name, norm):
    shape = {"resnet1d": SIGNAL, "tcn": SIGNAL, "tabular-resnet": (5,)}.get(name, (3, 16, 16))
    options = {"norm": norm, **({"width": 8} if name.startswith("resnet") else {})}
    net = build_model(name, shape, 3, options=options)
    groups = layout(net, torch.zeros(2, *shape)).groups
    assert bool(groups["bn"]) == (norm == "batch")
    assert bool(groups["norm"]) == (norm != "none")
    assert not groups["unused"]


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("resnet18", (64,), {}, "takes pictures"),
        ("vit", (3, 32, 32), {"patch": 5}, "patch = 5 of the model vit does not divide pictures of 3x32x32"),
        ("vit", (3, 32, 32), {"heads": 5}, "64 / 5 is not whole"),
        ("transformer", (3, 4), {}, "token numbers"),
        ("transformer", (30,), {"positions": 20}, "positions = 20, and items have 30 tokens"),
        ("tcn", (64,), {}, r"takes items \[channels, time\]"),
        ("resnet8", (3, 32, 32), {"norm": "layer"}, 'the option "norm" of the model resnet8'),
        ("convnet", (3, 4, 4), {}, "of 8x8 or more"),
    ],
)
def test_mistakes_with_these_models_raise_a_clear_error(name, shape, options, words):
    with pytest.raises(CoterieError, match=words):
        build_model(name, shape, 10, options=options)


def run_or_sentence(method: str, family: str, engine: str) -> str:
    """Return `runs`, or the message of a CoterieError that came before any work."""
    try:
        made = families.session(method, family, engine)
    except CoterieError as e:
        return str(e)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("error")
        testing.play(testing.open_loop(made, Path(folder)))
    return "runs"


@pytest.mark.parametrize("family", ["ViT", "text transformer", "tabular ResNet"])
def test_methods_run_on_the_families(family):
    for method in ("fedavg", "fedper"):
        assert run_or_sentence(method, family, "loop") == "runs"


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_every_family_or_says_why_not(method):
    for family in families.FAMILIES:
        for engine in ("loop", "stack"):
            said = run_or_sentence(method, family, engine)
            assert said == "runs" or (len(said) < 300 and "\n" not in said), f"{family}, {engine}: {said}"
