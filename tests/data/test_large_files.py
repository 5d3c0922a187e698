"""Arrays that stay on disk, and pictures of 16 bits."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from coterie.data import arrays, files, frames, on_disk
from coterie.data.arrays import from_torch
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, PartitionSettings, federate
from coterie.data.sources import load_dataset
from coterie.data.table import TableColumns
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


def test_a_large_torch_data_set_is_read_once_into_a_file_and_is_the_same_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, seed: int) -> None:
            self.x, self.read = np.random.default_rng(seed).normal(size=(40, 3, 5, 5)), list[int]()

        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            self.read.append(i)
            return torch.from_numpy(self.x[i]), i % 3

    plain = from_torch(Items(0), Items(1))
    monkeypatch.setattr(on_disk, "MAPPED_BYTES", 1000)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "cache"))
    made: list[np.ndarray] = []
    empty = on_disk.empty_on_disk
    monkeypatch.setattr(arrays, "empty_on_disk", lambda *a: made.append(empty(*a)) or made[-1])
    train = Items(0)
    large = from_torch(train, Items(1))
    assert len(made) == 1 and np.shares_memory(large.x.numpy(), made[0])
    assert large.digest == plain.digest and torch.equal(large.is_test, plain.is_test)
    assert sorted(train.read)[1:] == list(range(40)) and not list((tmp_path / "cache").iterdir())
    train.x = train.x[:, :2]
    with pytest.raises(CoterieError, match="differ in shape"):
        from_torch(Items(0), train)


def test_a_large_parquet_file_is_read_by_columns_and_is_the_same_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(50, 9, 200), "sex": rng.choice(["f", "m", None], 200), "wide": range(200)})
    frame["ill"], frame["ward"] = np.where(frame["age"] > 50, "yes", "no"), rng.choice(["a", "b"], 200)
    frame.loc[::9, "age"] = np.nan
    frame.loc[3, "sex"] = "x"
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=32)
    columns = TableColumns(target="ill", client="ward", features="age,sex")

    def read() -> tuple[Dataset, Federation]:
        data = load_dataset(str(tmp_path / "t.parquet"), columns=columns)
        return data, federate(data, PartitionSettings(partition="natural"), seed=0)

    plain, fed = read()
    monkeypatch.setattr(on_disk, "MAPPED_BYTES", 1000)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "cache"))
    asked: list[str] = []
    get = frames.ParquetColumns.__getitem__
    monkeypatch.setattr(frames.ParquetColumns, "__getitem__", lambda self, c: asked.append(c) or get(self, c))
    large, other = read()
    assert set(asked) == {"age", "sex", "ill", "ward"}  # a column that is not named is not read
    assert large.digest == plain.digest and other.choices == fed.choices and other.notes == fed.notes
    assert other.dataset.table == fed.dataset.table and other.identity == fed.identity
    for i in fed.clients:
        for one, two in zip(fed.data(i).train, other.data(i).train, strict=True):
            assert torch.equal(one, two)
