"""Weights of files: what fits by name and shape is loaded, the rest is reported, and other files are refused."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import coterie
from coterie.errors import CoterieError
from coterie.models.registry import build_model
from coterie.models.weights import load_weights

PICTURE = (3, 16, 16)
FEW = {"rounds": 1, "clients": 3, "workers": 1, "epochs": 1, "join": 1.0}


def resnet(classes: int, seed: int) -> nn.Module:
    return build_model("resnet18", PICTURE, classes, seed=seed, options={"width": 4})


def saved(tensors, path) -> str:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    return str(path)


def test_tensors_that_fit_are_loaded_and_others_keep_their_values(tmp_path):
    donor, net = resnet(7, 1), resnet(3, 2)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    said = load_weights(net, saved(donor.state_dict(), tmp_path / "w.safetensors"))
    for name, value in net.state_dict().items():
        if name.startswith("classifier"):
            assert torch.equal(value, before[name])
        else:
            assert torch.equal(value, donor.state_dict()[name])
    assert "from w.safetensors" in said and "of different shape: classifier.weight (7x32, here 3x32)" in said


def as_torchvision(name: str) -> str:
    first = {"stem.conv": "conv1", "stem.norm": "bn1", "classifier": "fc"}
    layer, _, local = name.rpartition(".")
    return f"{first.get(layer, layer.replace('.norm', '.bn'))}.{local}"


@pytest.mark.parametrize(
    "rename", [as_torchvision, lambda name: f"model.{name}", lambda name: f"module.{as_torchvision(name)}"]
)
def test_names_of_torchvision_and_common_prefixes_are_understood(rename, tmp_path):
    donor, net = resnet(3, 1), resnet(3, 2)
    path = saved({rename(k): v for k, v in donor.state_dict().items()}, tmp_path / "w.safetensors")
    assert "not in" not in load_weights(net, path)
    assert all(torch.equal(v, donor.state_dict()[k]) for k, v in net.state_dict().items() if v.is_floating_point())


def test_an_encoder_is_loaded_into_a_part_of_a_model(tmp_path):
    donor = build_model("transformer", (6,), 3, seed=1, vocab=20, options={"width": 8}).encoder
    whole = build_model("transformer", (6,), 3, seed=2, vocab=20, options={"width": 8})
    assert "not in the file: embeddings" in load_weights(whole, saved(donor.state_dict(), tmp_path / "w.safetensors"))
    assert torch.equal(whole.encoder.layer[1].output.dense.weight, donor.layer[1].output.dense.weight)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: {"state_dict": d, "epoch": 3}])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_is_read_without_running_code(wrap, legacy, tmp_path):
    donor, net = resnet(3, 1), resnet(3, 2)
    torch.save(wrap(donor.state_dict()), tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy)
    load_weights(net, str(tmp_path / "w.pth"))
    assert torch.equal(net.classifier.weight, donor.classifier.weight)


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


def test_files_that_cannot_be_used_are_refused_with_one_sentence(tmp_path, capsys):
    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "broken.safetensors").write_bytes(b"123")
    saved({"a": torch.ones(3)}, tmp_path / "other.safetensors")
    for name, words in [
        ("evil.pth", "holds more than tensors"), ("list.pth", "no tensors by name"), ("broken.safetensors", "damaged"),
        ("other.safetensors", "does not fit this model: no tensor has the same name and shape; it has a, the model"),
        ("none.safetensors", "does not exist"), ("w.txt", "must be a .safetensors file"),
    ]:  # fmt: skip
        with pytest.raises(CoterieError, match=words) as caught:
            load_weights(nn.Linear(64, 10), str(tmp_path / name))
        assert "\n" not in str(caught.value)
    assert "printed" not in capsys.readouterr().out


def test_a_run_starts_from_the_weights_and_is_resumed_with_the_same_ones_only(tmp_path):
    donor = build_model("mlp", (1, 8, 8), 10, seed=5)
    path = saved(donor.state_dict(), tmp_path / "w.safetensors")
    run = coterie.run("local", "digits", "mlp", weights=path, out=tmp_path / "run", lr=1e-9, **FEW)
    assert torch.allclose(run.personal(0).fc1.weight, donor.fc1.weight, atol=1e-6)
    coterie.resume(tmp_path / "run", rounds=2)
    saved(resnet(3, 1).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(CoterieError, match="does not fit"):
        coterie.resume(tmp_path / "run", rounds=3)
    saved({k: v + 1 for k, v in donor.state_dict().items()}, tmp_path / "w.safetensors")
    with pytest.raises(CoterieError, match="initial values differ"):
        coterie.resume(tmp_path / "run", rounds=3)
    with pytest.raises(CoterieError, match="weights needs runtime"):
        coterie.run("fedavg", "digits", "mlp", weights=path, runtime="federation", out=tmp_path / "f", **FEW)
