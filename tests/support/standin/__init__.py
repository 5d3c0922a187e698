"""A stand-in for a GPU: a device of PyTorch that computes on the processor and refuses to mix with its tensors."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

NAME = "standin"
SOURCE = Path(__file__).with_name("standin.cpp")
COMPILER = os.environ.get("CXX", "g++")


class Copies(NamedTuple):
    to_device: int
    to_host: int


def _library() -> Path:
    """Return the compiled library; it is compiled once for a source, a compiler and a version of PyTorch."""
    packages = Path(torch.__file__).parent
    include = [packages / "include", packages / "include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{packages / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    words = [
        COMPILER, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi, *(f"-isystem{path}" for path in include),
        str(SOURCE), *libraries,
    ]  # fmt: skip
    key = hashlib.sha256(repr([words, torch.__version__, SOURCE.read_text(), sysconfig.get_platform()]).encode())
    folder = Path(tempfile.gettempdir()) / f"coterie-tests-{os.getuid()}"
    built = folder / f"standin-{key.hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        own = built.with_suffix(f".{os.getpid()}")
        subprocess.run([*words, "-o", str(own)], check=True)
        own.replace(built)
    return built


class _Device(types.ModuleType):
    """The module torch.standin."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self.built = ctypes.CDLL(str(_library()))
        for name in ("to_device", "to_host", "in_use", "allocations"):
            getattr(self.built, f"standin_{name}").restype = ctypes.c_int64
        self.built.standin_register()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(self.built.standin_allocations() > 0)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def load() -> _Device:
    """Compile the device, or find it compiled, and register it; only before the first gradient of a process."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = _Device()
    torch._register_device_module(NAME, module)
    return module


def missing() -> str:
    """Return why the device cannot be compiled; empty if it can."""
    found = shutil.which(COMPILER)
    return "" if found else f"the stand-in for a GPU needs a C++ compiler ({COMPILER} is not there)"


@contextmanager
def counted() -> Iterator[list[Copies]]:
    """Count the copies between host and device inside the block; the list holds the count after it."""
    built = load().built
    before = built.standin_to_device(), built.standin_to_host()
    out: list[Copies] = []
    yield out
    out.append(Copies(built.standin_to_device() - before[0], built.standin_to_host() - before[1]))


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Allow only so many bytes in addition to those in use inside the block."""
    built = load().built
    built.standin_limit(ctypes.c_int64(built.standin_in_use() + extra))
    try:
        yield
    finally:
        built.standin_limit(ctypes.c_int64(0))
