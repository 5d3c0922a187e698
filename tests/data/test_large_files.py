"""Arrays that stay on disk, and pictures of 16 bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.data import files
from coterie.data.federation import PartitionSettings, federate
from coterie.data.sources import load_dataset
from coterie.errors import CoterieError


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_a_large_uncompressed_array_stays_on_disk_and_is_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    x = np.random.default_rng(0).integers(0, 255, (50, 3, 8, 8)).astype(kind) / (
        1 if kind == "uint8" else np.float32(255)
    )
    x = x.astype(kind)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(50) % 2, split=np.repeat(["train", "test"], 25))
    read = load_dataset(str(tmp_path / "a.npz"))
    monkeypatch.setattr(files, "MAPPED_BYTES", 1000)
    mapped = files._arrays(tmp_path / "a.npz")["x"]
    assert isinstance(mapped, np.memmap)
    data = load_dataset(str(tmp_path / "a.npz"))
    assert data.digest == read.digest and data.mean == read.mean and torch.equal(data.x, read.x)
    before = (tmp_path / "a.npz").read_bytes()
    data.x[0] = 0
    assert (tmp_path / "a.npz").read_bytes() == before


def test_an_array_of_objects_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}] * 300, object), y=np.zeros(300))
    monkeypatch.setattr(files, "MAPPED_BYTES", 10)
    with pytest.raises(CoterieError, match="Python objects"):
        load_dataset(str(tmp_path / "a.npz"))


def test_pictures_of_16_bits_are_standardised_with_the_training_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        for i in range(20):
            picture = rng.integers(900, 4000, (8, 8)).astype(np.uint16)
            Image.fromarray(picture).save(tmp_path / name / f"{i}.png")
    fed = federate(load_dataset(str(tmp_path)), PartitionSettings(partition="iid", clients=2), seed=0)
    x = torch.cat([fed.data(i).train.x for i in fed.clients])
    torch.testing.assert_close(x.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(unbiased=False), torch.tensor(1.0))
    assert len(x.unique()) > 500
    assert any("standardised" in sentence for sentence in fed.choices)
