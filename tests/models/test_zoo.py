"""Built-in models: parameter counts of the papers' tables, options, users' own models, clear errors."""

import sys
import warnings
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from coterie.core.net import Net, initial
from coterie.errors import CoterieError
from coterie.models import registry
from coterie.models.blocks import Conv, ConvBlock
from coterie.models.registry import build_model, default_for, list_models
from coterie.models.zoo import ZOO
from coterie.train import native

GREY, RGB, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)


def sizes(module: nn.Module) -> dict[str, int]:
    """Return the number of parameters per layer."""
    out: dict[str, int] = {}
    for name, p in module.named_parameters():
        layer = name.rpartition(".")[0]
        out[layer] = out.get(layer, 0) + p.numel()
    return out


TOTALS = [
    ("lenet5", GREY, 10, {}, 44_470),
    ("lenet5", GREY, 11, {}, 44_555),
    ("lenet5", GREY, 62, {}, 48_890),
    ("lenet5", RGB, 10, {}, 62_050),
    ("lenet5", RGB, 100, {}, 69_700),
    ("lenet5", TINY, 200, {}, 354_680),
    ("lenet5-nobn", GREY, 10, {}, 44_426),
    ("lenet5-nobn", GREY, 11, {}, 44_511),
    ("lenet5-nobn", GREY, 62, {}, 48_846),
    ("lenet5-nobn", RGB, 10, {}, 62_006),
    ("lenet5-nobn", RGB, 100, {}, 69_656),
    ("lenet5-nobn", TINY, 200, {}, 354_636),
    ("lenet5", GREY, 10, {"batch_norm": False}, 44_426),
    ("lenet5-2fc", GREY, 10, {}, 34_666),
    ("lenet5-2fc", GREY, 62, {}, 40_958),
    ("lenet5-2fc", RGB, 10, {}, 52_246),
    ("lenet5-2fc", RGB, 100, {}, 63_136),
    ("lenet5-2fc", TINY, 200, {}, 351_716),
    ("lenet5", RGB, 100, {"fc": 2}, 63_136),
    ("fedpc-cnn", RGB, 10, {}, 797_962),
    ("fedpc-cnn", RGB, 100, {}, 815_332),
    ("fedpc-cnn", GREY, 10, {}, 573_578),
    ("fedpc-cnn", RGB, 10, {"classifier_bias": False}, 797_952),
    ("fedpc-cnn", RGB, 100, {"classifier_bias": False}, 815_232),
    ("fedpc-cnn", GREY, 10, {"classifier_bias": False}, 573_568),
    ("fedgmh-cnn", GREY, 10, {}, 582_026),
    ("fedgmh-cnn", RGB, 10, {}, 878_538),
    ("fedgmh-cnn", RGB, 100, {}, 924_708),
    ("ecsfl-cnn", GREY, 10, {"fc_in": "flatten"}, 1_345_450),
    ("ecsfl-cnn", GREY, 10, {"fc_in": "flatten", "padding": 0}, 534_442),
    ("ecsfl-cnn", RGB, 10, {"fc_in": "flatten"}, 1_714_666),
    ("ecsfl-cnn", RGB, 10, {"fc_in": "flatten", "padding": 0}, 756_202),
    ("ecsfl-cnn", GREY, 10, {}, 140_842),
    ("ecsfl-cnn", RGB, 10, {}, 141_418),
    ("scfpfl-cnn", GREY, 62, {}, 18_506),
    ("mlp", (64,), 10, {}, 64 * 64 + 64 + 650),
    ("mlp", (1, 8, 8), 10, {"hidden": "128,32"}, 65 * 128 + 129 * 32 + 330),
    ("logistic", (1, 8, 8), 10, {}, 650),
    ("text", (40,), 4, {"vocab": 1000}, 64_000 + 65 * 64 + 65 * 4),
    ("text-bn", (40,), 4, {"vocab": 1000}, 64_000 + 65 * 64 + 65 * 4 + 128),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "total"), TOTALS)
def test_parameter_count_is_that_of_the_paper(name, shape, classes, options, total):
    assert sum(sizes(build_model(name, shape, classes, options=options)).values()) == total


VGG = [
    (RGB, 10, None, 28_144_010),
    (GREY, 62, None, 28_357_054),
    (RGB, 100, None, 28_512_740),
    (RGB, 10, 512, 28_144_010),
    (TINY, 200, None, 35_213_896),
    (TINY, 200, 2048, 35_213_896),
    (RGB, 10, 25088, 128_807_306),
    (GREY, 62, 25088, 129_020_350),
    (RGB, 100, 25088, 129_176_036),
    (TINY, 200, 25088, 129_585_736),
]


@pytest.mark.parametrize(("shape", "classes", "head_input", "total"), VGG)
def test_vgg11_parameter_count_is_that_of_the_paper(shape, classes, head_input, total):
    with torch.device("meta"):  # sizes only: half a gigabyte of weights is not needed to count them
        counts = sizes(ZOO["vgg11"](shape, classes, head_input=head_input))
    assert sum(counts.values()) == total
    assert sum(n for layer, n in counts.items() if layer.startswith("block")) == 9_220_480


LAYERS = [
    ("lenet5", GREY, 10, {}, [156, 12, 2416, 32, 30_840, 10_164, 850]),
    ("lenet5", RGB, 10, {}, [456, 12, 2416, 32, 48_120, 10_164, 850]),
    ("lenet5", TINY, 200, {}, [456, 12, 2416, 32, 324_600, 10_164, 17_000]),
    ("lenet5-2fc", GREY, 10, {}, [156, 12, 2416, 32, 30_840, 1210]),
    ("fedpc-cnn", RGB, 100, {}, [4864, 102_464, 614_784, 73_920, 19_300]),
    ("fedpc-cnn", GREY, 10, {}, [1664, 102_464, 393_600, 73_920, 1930]),
    ("fedgmh-cnn", GREY, 10, {}, [832, 51_264, 524_800, 5130]),
    ("fedgmh-cnn", RGB, 100, {}, [2432, 51_264, 819_712, 51_300]),
    ("ecsfl-cnn", GREY, 10, {"fc_in": "flatten"}, [320, 9248, 18_496, 36_928, 1_204_608, 73_920, 1930]),
    ("ecsfl-cnn", GREY, 10, {"fc_in": "flatten", "padding": 0}, [320, 9248, 18_496, 36_928, 393_600, 73_920, 1930]),
    ("ecsfl-cnn", RGB, 10, {"fc_in": "flatten"}, [896, 9248, 18_496, 36_928, 1_573_248, 73_920, 1930]),
    ("ecsfl-cnn", RGB, 10, {"fc_in": "flatten", "padding": 0}, [896, 9248, 18_496, 36_928, 614_784, 73_920, 1930]),
    ("ecsfl-cnn", RGB, 10, {}, [896, 9248, 18_496, 36_928, 73_920, 1930]),
    ("scfpfl-cnn", GREY, 62, {}, [156, 2416, 15_934]),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "each"), LAYERS)
def test_every_layer_has_the_papers_count(name, shape, classes, options, each):
    assert list(sizes(build_model(name, shape, classes, options=options)).values()) == each


def test_layers_have_the_names_of_the_papers_and_the_classifier_is_the_head():
    net = Net(build_model("lenet5", GREY, 10), torch.zeros(2, *GREY))
    names = ("block1.conv", "block1.bn", "block2.conv", "block2.bn", "fc1", "fc2", "classifier")
    assert net.layout.layers == names
    assert net.layout.head == "classifier" and net.width == 84
    assert net.layout.of_kind("fc") == ("fc1", "fc2", "classifier")


@pytest.mark.parametrize("name", [n for n in ZOO if n not in ("vgg11", "resnet34", "minilm")])
def test_every_model_has_a_head_and_gives_one_score_per_class(name):
    words = ((12,), torch.int64)
    own = dict.fromkeys(("text", "text-bn", "transformer", "minilm"), words) | {"ratings": ((1,), torch.int64)}
    own |= dict.fromkeys(("signal", "resnet1d", "tcn"), ((6, 32), torch.float32))
    shape, dtype = own.get(name, (GREY, torch.float32))
    net = Net(build_model(name, shape, 7), torch.zeros(2, *shape, dtype=dtype))
    assert net(net.state(), torch.ones(3, *shape, dtype=dtype)).shape == (3, 7)
    assert net.layout.head == "classifier"


@pytest.mark.parametrize(
    ("dims", "batch_norm", "pool"), [(2, True, True), (2, False, True), (1, True, True), (2, True, False)]
)
@pytest.mark.parametrize("fast", [False, True])
def test_a_block_is_conv_norm_relu_pool_in_values_and_gradients(dims, batch_norm, pool, fast, request):
    """The results are equal bit by bit in PyTorch's own operations, and up to rounding in native code."""
    native.enable(fast)
    request.addfinalizer(lambda: native.enable(None))
    same = partial(torch.allclose, rtol=1e-4, atol=1e-5) if fast else torch.equal
    torch.manual_seed(0)
    block = ConvBlock(2, Conv(3, 3, pool=pool, batch_norm=batch_norm), dims)
    x = torch.randn(4, 2, *[9] * dims, requires_grad=True)
    plain = F.relu(block.bn(block.conv(x)) if block.bn is not None else block.conv(x))
    if pool:
        plain = F.max_pool2d(plain, 2) if dims == 2 else F.max_pool1d(plain, 2)
    mark = torch.randn_like(plain)
    of = [x, *block.parameters()]
    expected = torch.autograd.grad(plain, of, mark)  # first, because the block changes the running statistics
    out = block(x)
    assert same(out, plain)
    for a, b in zip(torch.autograd.grad(out, of, mark), expected, strict=True):
        assert same(a, b)


def small_vgg(monkeypatch) -> None:
    """Make the layers of VGG11 narrow, so that tests can run it."""
    monkeypatch.setattr("coterie.models.vgg.WIDTHS", (4, 4, 4, 4, 4, 4, 4, 4))


def test_vgg11_pads_grey_pictures_with_zeros_to_three_channels_of_32(monkeypatch):
    small_vgg(monkeypatch)
    net = build_model("vgg11", GREY, 10)
    x = torch.randn(2, *GREY)
    seen = []
    net.block1.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    net(x)
    assert seen[0].shape == (2, 3, 32, 32)
    assert torch.equal(seen[0], F.pad(x, (2, 2, 2, 2)).repeat(1, 3, 1, 1))
    assert build_model("vgg11", GREY, 10, options={"resize": "bilinear"})(x).shape == (2, 10)


def test_pretrained_weights_are_loaded_by_either_name_and_survive_initial(monkeypatch, tmp_path):
    small_vgg(monkeypatch)
    donor = build_model("vgg11", RGB, 100, seed=1)
    positions = (0, 3, 6, 8, 11, 13, 16, 18)
    torchvision_names = {
        f"features.{n}.{k}": v
        for i, n in enumerate(positions, 1)
        for k, v in donor.get_submodule(f"block{i}.conv").state_dict().items()
    }
    torchvision_names |= {
        f"classifier.{n}.{k}": v
        for n, m in [(0, donor.fc1), (3, donor.fc2), (6, donor.classifier)]
        for k, v in m.state_dict().items()
    }
    save_file(torchvision_names, tmp_path / "vision.safetensors")
    save_file(donor.state_dict(), tmp_path / "own.safetensors")
    for file in ("vision", "own"):
        net = build_model("vgg11", RGB, 10, options={"pretrained_path": str(tmp_path / f"{file}.safetensors")})
        before = net.classifier.weight.clone()
        initial(net, 5)
        assert torch.equal(net.block8.conv.weight, donor.block8.conv.weight)
        assert torch.equal(net.fc2.weight, donor.fc2.weight)
        assert not torch.equal(net.classifier.weight, before)  # a different number of classes: drawn from the seed


def test_unusable_pretrained_files_raise_a_clear_error(monkeypatch, tmp_path):
    small_vgg(monkeypatch)
    save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x00\x01")
    for file, words in [("other", "no fitting tensor for block1"), ("torn", "damaged"), ("gone", "does not exist")]:
        with pytest.raises(CoterieError, match=words):
            build_model("vgg11", RGB, 10, options={"pretrained_path": str(tmp_path / f"{file}.safetensors")})
    with pytest.raises(CoterieError, match=r"must name a \.safetensors file"):
        build_model("vgg11", RGB, 10, options={"pretrained_path": str(tmp_path / "weights.pth")})


def test_padding_tokens_do_not_change_the_scores():
    net = build_model("text", (6,), 3, vocab=20, seed=0)
    with torch.no_grad():
        net.embedding.weight[0] = 9.0  # must not matter
    a = net(torch.tensor([[5, 7, 0, 0, 0, 0]]))
    assert torch.allclose(a, net(torch.tensor([[5, 7]])))
    assert torch.isfinite(net(torch.zeros(1, 6, dtype=torch.int64))).all()


def test_models_with_the_option_vocab_get_the_vocabulary_of_the_data():
    assert build_model("text", (6,), 3, vocab=77).embedding.num_embeddings == 77
    assert build_model("mlp", (6,), 3, vocab=77).classifier.out_features == 3


# ---- initial values --------------------------------------------------------------------------------------------------
def test_initial_values_are_a_function_of_the_seed_and_the_global_generator_is_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    a, b, c = (build_model("lenet5", GREY, 10, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])


def test_an_instance_keeps_its_values_and_is_not_touched():
    mine = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = {k: v.clone() for k, v in mine.state_dict().items()}
    built = build_model(mine, (1, 8, 8), 10)
    initial(built, 1)
    assert built is not mine
    assert all(torch.equal(built.state_dict()[k], v) for k, v in before.items())


# ---- a user's own ---------------------------------------------------------------------------------------------------
class Own(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.body, self.out = nn.LazyLinear(width), nn.LazyLinear(classes)

    def forward(self, x):
        return self.out(torch.relu(self.body(x.flatten(1))))


@pytest.mark.parametrize(
    "factory",
    [
        lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes)),
        lambda a, b: nn.Sequential(nn.Flatten(), nn.Linear(a[1] * a[2], b)),
        lambda k: nn.Sequential(nn.Flatten(), nn.Linear(64, k)),
        lambda classes, wide=64: nn.Sequential(nn.Flatten(), nn.Linear(wide, classes)),
        lambda num_classes=1000: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        Own,
    ],
)
def test_a_users_factory_gets_the_arguments_that_it_names(factory, monkeypatch):
    module = ModuleType("my_models")
    module.factory = factory
    monkeypatch.setitem(sys.modules, "my_models", module)
    for source in (factory, "my_models:factory"):
        net = build_model(source, (1, 8, 8), 10, seed=1)
        assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_lazy_layers_are_drawn_from_the_seed():
    a, b = (build_model(Own, (1, 8, 8), 10, seed=4, options={"width": 8}) for _ in range(2))
    assert a.body.weight.shape == (8, 64) and torch.equal(a.body.weight, b.body.weight)


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_local_models.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(build_model("my_local_models:net", (1, 8, 8), 10), nn.Sequential)


class Point:
    name = "theirs"

    def load(self):
        return theirs


def theirs(shape, classes, *, depth: int = 1):
    """A model of an installed package."""
    return nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(depth)], nn.Linear(64, classes))


class Points(list):
    names = frozenset({"theirs"})


def test_a_model_of_an_installed_package_is_built_listed_and_suggested(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: Points([Point()]) if group == "coterie.models" else [])
    assert len(build_model("theirs", (1, 8, 8), 10, options={"depth": 3})) == 5
    info = {m.name: m for m in list_models()}["theirs"]
    assert (info.description, dict(info.options)) == ("A model of an installed package.", {"depth": 1})
    with pytest.raises(CoterieError, match='did you mean "theirs"'):
        build_model("theirz", (1, 8, 8), 10)
    with pytest.raises(CoterieError, match='did you mean "depth"'):
        build_model("theirs", (1, 8, 8), 10, options={"dept": 3})


def test_list_models_has_a_description_and_options_of_every_model():
    listed = list_models()
    assert [m.name for m in listed] == sorted(m.name for m in listed) and {m.name for m in listed} >= set(ZOO)
    assert all(m.description for m in listed)
    assert dict({m.name: m for m in listed}["lenet5"].options) == {"batch_norm": True, "fc": 3}


# ---- defaults -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [
        ((64,), torch.float32, "mlp"),
        ((1, 8, 8), torch.float32, "mlp"),
        (GREY, torch.float32, "lenet5"),
        (RGB, torch.uint8, "lenet5"),
        (TINY, torch.float32, "lenet5"),
        ((40,), torch.int64, "text"),
        ((6, 128), torch.float32, "signal"),
    ],
)
def test_the_default_model_suits_and_fits_the_data(shape, dtype, name):
    assert default_for(shape, 5, dtype) == name
    build_model(name, shape, 5)
    normed = build_model(default_for(shape, 5, dtype, batch_norm=True), shape, 5)
    assert any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in normed.modules())


# ---- mistakes -------------------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def scripted(classes):
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        return torch.jit.script(nn.Linear(64, classes))


@pytest.mark.parametrize(
    ("source", "shape", "options", "words"),
    [
        ("lenet", GREY, {}, 'unknown model "lenet"; did you mean "lenet5"'),
        ("lenet5", GREY, {"batchnorm": True}, 'did you mean "batch_norm"'),
        ("lenet5", GREY, {"fc": 4}, 'the option "fc" of the model lenet5 should be 3 or 2, got 4'),
        ("mlp", (64,), {"hidden": [0]}, 'the option "hidden" of the model mlp'),
        ("logistic", (64,), {"hidden": 3}, "takes no options"),
        ("lenet5", (1, 8, 8), {}, "the model lenet5 takes pictures .* of 16x16 or more; .* shape 1x8x8"),
        ("vgg11", (64,), {}, "the model vgg11 takes pictures"),
        ("vgg11", (2, 32, 32), {}, "1 or 3 channels"),
        ("signal", (64,), {}, r"takes items \[channels, time\]"),
        ("text", (3, 4), {}, "token numbers"),
        ("no.such:thing", GREY, {}, "cannot be imported"),
        ("torch.nn:NoSuch", GREY, {}, "cannot be imported"),
        ("torch.nn:__doc__", GREY, {}, "neither a factory nor"),
        (7, GREY, {}, "not int"),
        (nn.Linear(64, 10), (64,), {"fc": 2}, "takes no options"),
        (nn.Linear(63, 10), (64,), {}, "Linear: the model does not fit the data: one item has shape 64"),
        (nn.Sequential(nn.Linear(64, 10), Odd(torch.Tensor.detach)), (64,), {}, "no gradient reaches the parameters"),
        (
            nn.Sequential(nn.Linear(64, 10), Odd(lambda x: {}["key"])),
            (64,),
            {},
            r"does not fit the data.*\(KeyError: 'key'\)",
        ),
        (scripted, (64,), {}, "is compiled by TorchScript; give the nn.Module"),
        (nn.Linear(64, 3), (64,), {}, "gives 3 scores per item, but the data have 10 classes"),
        (lambda classes: 3, (64,), {}, "must return an nn.Module, not int"),
        (lambda classes: 1 / 0, (64,), {}, "failed: ZeroDivisionError"),
        (lambda a, b, c: None, (64,), {}, "but needs a, b, c"),
    ],
)
def test_mistakes_raise_a_clear_error(source, shape, options, words):
    with pytest.raises(CoterieError, match=words) as caught:
        build_model(source, shape, 10, options=options)
    assert "\n" not in str(caught.value)
