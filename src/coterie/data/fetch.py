"""Download a known data set from its official source (`coterie data get`), with checksums and resuming."""

import hashlib
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.data.catalogue import DATASETS, data_dir, locate
from coterie.errors import CoterieError, unknown

_BLOCK = 1 << 20
_MOST_BYTES = 2 * 10**9  # limit of one file; the largest known file has 0.3 GB
_TIMEOUT = 30.0  # seconds without a byte

FetchProgress = Callable[[str, int, int], None]  # file name, bytes received, bytes in total (0: unknown)


@dataclass(frozen=True)
class SourceFile:
    """A file on the network. Its MD5, as stated by its publisher or torchvision, detects damage, not forgery."""

    url: str
    md5: str
    unpack: bool = False

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2].partition("?")[0]


def _idx(base: str, *sums: str) -> tuple[SourceFile, ...]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(SourceFile(f"{base}/{part}-ubyte.gz", md5) for part, md5 in zip(parts, sums, strict=True))


# name -> subfolder of the data folder, and the files
SOURCES: dict[str, tuple[str, tuple[SourceFile, ...]]] = {
    "mnist": (
        "MNIST/raw",
        _idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fmnist": (
        "FashionMNIST/raw",
        _idx(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "emnist": (
        "",
        (
            SourceFile(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", unpack=True
            ),
        ),
    ),
    "cifar10": (
        "",
        (
            SourceFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                unpack=True,
            ),
        ),
    ),
    "cifar100": (
        "",
        (
            SourceFile(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "eb9058c3a382ffc7106e4002c42a8d85",
                unpack=True,
            ),
        ),
    ),
    "cinic10": (
        "CINIC-10",
        (
            SourceFile(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "6ee4d0c996905fe93221de577967a372",
                unpack=True,
            ),
        ),
    ),
    "svhn": (
        "SVHN",
        (
            SourceFile("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            SourceFile("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    "organamnist": (
        "",
        (
            SourceFile(
                "https://zenodo.org/record/6496656/files/organamnist.npz?download=1", "866b832ed4eeba67bfb9edee1d5544e6"
            ),
        ),
    ),
    "tinyimagenet": (
        "",
        (
            SourceFile(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", unpack=True
            ),
        ),
    ),
}


def fetch_dataset(
    name: str, folder: Path | None = None, progress: FetchProgress = lambda file, done, total: None
) -> list[Path]:
    """Return the files of a data set, downloading them unless they are on this machine already."""
    if name not in DATASETS:
        raise unknown("data", name, SOURCES)
    if name == "digits":
        raise CoterieError("digits come with scikit-learn and are always available")
    if name not in SOURCES:
        raise CoterieError(f"{name} cannot be downloaded by this command; `coterie list data` says how to get it")
    paths = locate(DATASETS[name], folder)
    if paths is not None:
        return paths
    root = folder or data_dir()
    below, sources = SOURCES[name]
    for source in sources:
        file = fetch_file(source, root / below, progress)
        if source.unpack:
            _unpack(file, root / below)
    paths = locate(DATASETS[name], folder)
    if paths is None:
        raise CoterieError(f"{name} was fetched into {root}, but files are missing: {', '.join(DATASETS[name].needs)}")
    return paths


def fetch_file(source: SourceFile, folder: Path, progress: FetchProgress = lambda file, done, total: None) -> Path:
    """Download one file; continue a partial download, and remove a file whose checksum is wrong."""
    target = folder / source.name
    if target.exists() and _md5(target) == source.md5:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    _receive(source, part, progress)
    if _md5(part) != source.md5:
        part.unlink()
        raise CoterieError(
            f"the file from {source.url} does not have the checksum {source.md5}; it was removed, try again"
        )
    part.replace(target)
    return target


def _receive(source: SourceFile, part: Path, progress: FetchProgress) -> None:
    received = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(source.url, headers={"Range": f"bytes={received}-"} if received else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if received and answer.status != 206:  # the server sends the file from its start
                received = 0
            length = int(answer.headers.get("Content-Length") or 0)
            total = received + length if length else 0
            with part.open("ab" if received else "wb") as f:
                while block := answer.read(_BLOCK):
                    if received + len(block) > _MOST_BYTES:
                        raise CoterieError(
                            f"{source.url} sends more than {_MOST_BYTES // 10**9} GB; nothing known is so large"
                        )
                    f.write(block)
                    received += len(block)
                    progress(source.name, received, total)
        if total and received < total:
            raise CoterieError(
                f"{source.url} ended after {received:,} of {total:,} bytes; run the command again to continue"
            )
    except urllib.error.HTTPError as e:
        if e.code == 416:  # the partial file is complete
            return
        raise CoterieError(f"{source.url} answered {e.code} ({e.reason})") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", None) or e
        raise CoterieError(
            f"{source.url} cannot be reached ({reason}); check the network, or put the file into {part.parent}"
        ) from None


def _unpack(file: Path, folder: Path) -> None:
    """Extract an archive below `folder`; raise CoterieError if it names a path outside of it."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as z:
                for name in z.namelist():
                    if not (folder / name).resolve().is_relative_to(folder.resolve()):
                        raise CoterieError(f"{file} names a path outside of its folder: {name}")
                z.extractall(folder)
        else:
            with tarfile.open(file) as t:
                t.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as e:
        raise CoterieError(f"{file} cannot be unpacked: {e}") from None


def _md5(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
