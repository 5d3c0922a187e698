"""Downloading data sets; a local server replaces the official ones."""

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from coterie.data import fetch
from coterie.data.catalogue import DATASETS, locate
from coterie.data.fetch import SourceFile
from coterie.data.sources import load_dataset
from coterie.errors import CoterieError


class Server:
    """Serve `files` by path, with ranges, and optionally only the first `cut` bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.cut: int | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, wanted = self.path.lstrip("/").partition("?")[0], self.headers.get("Range")
                outer.asked.append((name, wanted))
                body = outer.files.get(name)
                if body is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                self.wfile.write(body[start:][: outer.cut])

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def source(self, name: str, body: bytes, **more: bool) -> SourceFile:
        self.files[name] = body
        return SourceFile(f"{self.url}/{name}", hashlib.md5(body).hexdigest(), **more)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


def mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.arange(20 * 28 * 28).reshape(20, 28, 28) % 256, np.arange(20) % 10
    parts = [idx(x), idx(y), idx(x[:5]), idx(y[:5])]
    names = [s.name for s in fetch.SOURCES["mnist"][1]]
    sources = tuple(server.source(n, b) for n, b in zip(names, parts, strict=True))
    monkeypatch.setitem(fetch.SOURCES, "mnist", ("MNIST/raw", sources))


def test_a_data_set_is_fetched_once_and_can_be_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mnist(server, monkeypatch)
    progress: list[tuple[str, int, int]] = []
    found = fetch.fetch_dataset("mnist", tmp_path, lambda *t: progress.append(t))
    assert len(found) == 4 and len(server.asked) == 4 and progress[-1][1] == progress[-1][2] > 0
    assert len(load_dataset("mnist", tmp_path).y) == 25
    assert fetch.fetch_dataset("mnist", tmp_path) == found and len(server.asked) == 4


def test_an_interrupted_file_is_continued(server: Server, tmp_path: Path) -> None:
    body = np.random.default_rng(0).bytes(3 << 20)
    source, server.cut = server.source("big.bin", body), 2 << 20
    with pytest.raises(CoterieError):
        fetch.fetch_file(source, tmp_path)
    received = (tmp_path / "big.bin.part").stat().st_size
    assert 0 < received < len(body) and not (tmp_path / "big.bin").exists()
    server.cut = None
    assert fetch.fetch_file(source, tmp_path).read_bytes() == body
    assert server.asked[-1] == ("big.bin", f"bytes={received}-") and not list(tmp_path.glob("*.part"))


def test_a_file_with_a_wrong_checksum_is_removed(server: Server, tmp_path: Path) -> None:
    source = server.source("a.bin", b"right")
    server.files["a.bin"] = b"wrong"
    with pytest.raises(CoterieError, match="does not have the checksum"):
        fetch.fetch_file(source, tmp_path)
    assert not list(tmp_path.iterdir())
    server.files["a.bin"] = b"right"
    assert fetch.fetch_file(source, tmp_path).read_bytes() == b"right"


def test_a_missing_network_and_a_missing_file_raise_a_clear_error(server: Server, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="cannot be reached"):
        fetch.fetch_file(SourceFile("http://127.0.0.1:1/a.bin", ""), tmp_path)
    with pytest.raises(CoterieError, match="answered 404"):
        fetch.fetch_file(SourceFile(f"{server.url}/none.bin", ""), tmp_path)
    for name, words in (("digits", "always available"), ("cifr10", 'did you mean "cifar10"')):
        with pytest.raises(CoterieError, match=words):
            fetch.fetch_dataset(name, tmp_path)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_cannot_write_outside_of_its_folder(kind: str, tmp_path: Path) -> None:
    blob, inside = io.BytesIO(), tmp_path / "inside"
    if kind == "zip":
        with zipfile.ZipFile(blob, "w") as z:
            z.writestr("../outside.txt", "x")
    else:
        with tarfile.open(fileobj=blob, mode="w") as t:
            t.addfile(tarfile.TarInfo("../outside.txt"))
    file = tmp_path / "archive"
    file.write_bytes(blob.getvalue())
    with pytest.raises(CoterieError, match="outside"):
        fetch._unpack(file, inside)
    assert not (tmp_path / "outside.txt").exists()


def test_every_source_belongs_to_a_known_data_set() -> None:
    assert fetch.SOURCES.keys() <= DATASETS.keys()
    for _, sources in fetch.SOURCES.values():
        assert all(len(s.md5) == 32 and s.name for s in sources)


def test_common_caches_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    for name in ("COTERIE_DATA", "KERAS_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert locate(DATASETS["mnist"], None) is None
    hub = tmp_path / "home/.cache/huggingface/hub/datasets--ylecun--mnist/snapshots/abc/mnist"
    hub.mkdir(parents=True)
    for part, n in (("train", 12), ("test", 6)):
        pictures = []
        for i in range(n):
            blob = io.BytesIO()
            Image.fromarray(np.full((28, 28), i, np.uint8)).save(blob, "PNG")
            pictures.append({"bytes": blob.getvalue(), "path": None})
        pq.write_table(pa.table({"image": pictures, "label": [i % 10 for i in range(n)]}), hub / f"{part}-0.parquet")
    got = load_dataset("mnist")
    assert len(got.y) == 18 and int(got.is_test.sum()) == 6 and int(got.x[3].float().mean()) in (3, 0)
    keras = tmp_path / "home/.keras/datasets"
    keras.mkdir(parents=True)
    x, y = np.zeros((9, 28, 28), np.uint8), np.arange(9)
    np.savez(keras / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert locate(DATASETS["mnist"], None) == [keras / "mnist.npz"]
    torchvision = Path("data/MNIST/raw")
    torchvision.mkdir(parents=True)
    for name in DATASETS["mnist"].needs:
        (torchvision / name).touch()
    assert [p.parent for p in locate(DATASETS["mnist"], None) or []] == [torchvision] * 4
