"""Compilation of the C sources, once per machine; the library is cached by source, compiler and processor."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path

HERE = Path(__file__).parent
MAIN = HERE / "block.c"
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-w")
TUNING = ("-fno-tree-loop-distribute-patterns", "-fno-predictive-commoning")  # they would move sums out of registers
NATIVE = (("-march=native",), ("-mcpu=native",), ())  # the first option that the compiler accepts is used
TIMEOUT = 300


class Call(ctypes.Structure):
    """Arguments of one forward or backward call, with the fields of `call` in block.c."""

    _fields_ = (
        *((name, c_int64) for name in ("n", "ic", "h", "w", "oc", "k", "pad", "mode", "keep")),
        ("eps", c_double),
        ("momentum", c_double),
        *((name, c_void_p) for name in ("x", "weight", "bias", "gamma", "beta", "running_mean", "running_var")),
        *((name, c_void_p) for name in ("y", "save", "scratch")),
        *((name, c_void_p) for name in ("dy", "dx", "dw", "db", "dgamma", "dbeta")),
    )


class BuildError(Exception):
    """The native code cannot be built; the message says why in a few words."""


def library() -> ctypes.CDLL:
    """Return the compiled code, from the cache if possible."""
    compiler = find_compiler()
    cache = cache_dir()
    try:
        _own(cache)
        path = cache / f"block-{build_digest(compiler)}.so"
        if path.exists():
            with suppress(OSError, AttributeError):  # a damaged file is built again
                return _open(path)
        handle, name = tempfile.mkstemp(suffix=".so", dir=cache)
    except OSError:  # no writable home: build for this process only
        handle, name = tempfile.mkstemp(suffix=".so")
        path = Path(name)
    os.close(handle)
    made = Path(name)
    try:
        _compile(compiler, made)
        made.replace(path)  # atomic: other processes see the complete file or none
        try:
            return _open(path)
        except (OSError, AttributeError) as e:
            raise BuildError(f"the library that {compiler} made cannot be loaded ({e})") from None
    finally:
        if made != path:
            made.unlink(missing_ok=True)
        elif path.parent != cache:
            path.unlink(missing_ok=True)


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if path := shutil.which(name):
            return path
    raise BuildError("no C compiler (cc, gcc or clang) was found")


def cache_dir() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home
        base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return Path(base) / "coterie" / "native"


def _own(folder: Path) -> None:
    """Create the folder; refuse one that a different user owns or may write to, because code is loaded from it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ours = all(part.lstat().st_uid in (os.getuid(), 0) for part in (folder, folder.parent, folder.parent.parent))
    if not ours or folder.lstat().st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user")


def build_digest(compiler: str) -> str:
    """Return a digest of the sources, the flags, the compiler and the processor's features."""
    digest = hashlib.sha256(repr((FLAGS, TUNING, NATIVE, platform.machine(), platform.system())).encode())
    for source in sorted(HERE.glob("*.c")):
        digest.update(source.read_bytes())
    real = Path(compiler).resolve()
    digest.update(repr((str(real), real.stat().st_size, real.stat().st_mtime_ns)).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "features", "model", "model name", "cpu part")
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip().lower() in wanted}))


def _compile(compiler: str, target: Path) -> None:
    problem = ""
    for native in NATIVE:
        command = [compiler, *FLAGS, *TUNING, *native, "-o", str(target), str(MAIN), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise BuildError(f"{compiler} cannot be run ({type(e).__name__})") from None
        if done.returncode == 0:
            return
        problem = problem or next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
    raise BuildError(f"{compiler} does not compile it ({problem.strip()})")


def _open(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    pointer = ctypes.POINTER(Call)
    lib.coterie_sizes.argtypes, lib.coterie_sizes.restype = [pointer, ctypes.POINTER(c_int64)], None
    for function in (lib.coterie_forward, lib.coterie_backward):
        function.argtypes, function.restype = [pointer], None
    return lib
