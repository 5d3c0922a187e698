"""Devices of local training: their names, whether they are there, and moving values and methods to them.

The server's hooks, states of clients between rounds, files and messages stay on the processor. A client's data, its
state and what it receives are moved to the device before its hooks are called, and its answer is moved back.
"""

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from coterie.core.method import Method
from coterie.engine.codec import Value, moved
from coterie.errors import CoterieError

CPU = torch.device("cpu")
FIRST_FOUND = "auto"
PREFERRED = ("cuda", "xpu", "mps")  # order of `auto`
CLIENTS_AT_FIRST = 32  # clients that a device computes together at first
HELD_BYTES = 2**31  # clients' data that a process keeps on its device; further data are moved again in every round
log = logging.getLogger("coterie")
_BY_CUDA_WITHOUT_STARTING_IT = "PYTORCH_NVML_BASED_CUDA_CHECK"


# ---- names -----------------------------------------------------------------------------------------------------------
def check_device(text: str) -> str:
    """Return the setting `device` in its usual spelling; raise CoterieError if it names no device of PyTorch."""
    names = [name.strip() for name in text.split(",")]
    if names == [FIRST_FOUND]:
        return FIRST_FOUND
    for name in names:
        try:
            kind = torch.device(name).type
        except RuntimeError:
            kind = "meta"
        if kind == "meta":
            raise CoterieError(
                f"device = {text} is invalid: it must be cpu, cuda, cuda:1, mps, xpu, auto or several joined by commas"
            )
    if len(names) > 1 and "cpu" in names:
        raise CoterieError(f"device = {text} is invalid: cpu cannot be joined with other devices")
    return ",".join(names)


def find_devices(text: str | None) -> tuple[torch.device, ...]:
    """Return the devices that the setting names; raise CoterieError if one of them is not there.

    The question does not start a GPU, so that worker processes may be forked afterwards.
    """
    if text is None:
        return (CPU,)
    if text == FIRST_FOUND:
        kind = next((k for k in PREFERRED if _is_there(k)), "cpu")
        return find_devices(kind)
    return tuple(_find(name, text) for name in text.split(","))


def one_device(text: str) -> torch.device:
    """Return the device that the setting names, which is one; raise CoterieError if it is not there."""
    devices = find_devices(check_device(text))
    if len(devices) > 1:
        raise CoterieError(f"device = {text} is invalid: a client trains on one device")
    return devices[0]


def _find(name: str, text: str) -> torch.device:
    device = torch.device(name)
    if device == CPU:
        return CPU
    there = _is_there(device.type)
    count = _module(device).device_count() if there and hasattr(_module(device), "device_count") else int(there)
    if not there or (device.index or 0) >= count:
        has = f"{device.type} has {count} here" if there else f"this machine has no {device.type} that PyTorch can use"
        raise CoterieError(f"device = {text}: {has}; cpu is always there")
    return torch.device(device.type, device.index or 0)


def _is_there(kind: str) -> bool:
    before = os.environ.get(_BY_CUDA_WITHOUT_STARTING_IT)
    os.environ[_BY_CUDA_WITHOUT_STARTING_IT] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # drivers that are too old
            return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # PyTorch was built without it
        return False
    finally:
        if before is None:
            del os.environ[_BY_CUDA_WITHOUT_STARTING_IT]
        else:
            os.environ[_BY_CUDA_WITHOUT_STARTING_IT] = before


def _module(device: torch.device) -> Any:
    """Return the module of PyTorch for this kind of device, such as torch.cuda."""
    return torch.get_device_module(device.type)


def may_fork(devices: Sequence[torch.device]) -> bool:
    """True if processes that use these devices can be forked from this one, in which none has been started yet."""
    return all(
        d == CPU or (d.type != "mps" and not getattr(_module(d), "is_initialized", lambda: True)()) for d in devices
    )


def forks_can_train() -> bool:
    """True if a process that is forked from this one now can compute gradients.

    PyTorch refuses that on a machine with a GPU if this process has computed a gradient before.
    """
    accelerator = getattr(torch, "accelerator", None)  # from PyTorch 2.6
    if accelerator is not None and accelerator.current_accelerator() is None:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process may have threads; the child uses none of their locks
        child = os.fork()
    if child == 0:
        try:
            x = torch.ones(1, requires_grad=True)
            torch.autograd.grad(x.sum(), x)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def device_names(devices: Sequence[torch.device]) -> str:
    """Return the devices as text, as the setting names them."""
    return ",".join(map(str, devices))


# ---- work on a device ------------------------------------------------------------------------------------------------
def method_on(method: Method, device: torch.device) -> Method:
    """Return the method with a context whose trees are on this device, for the hooks of clients."""
    if device == method.ctx.device:
        return method
    placed = copy.copy(method)
    for name in [k for k in vars(placed) if isinstance(getattr(type(method), k, None), cached_property)]:
        del vars(placed)[name]
    placed.ctx = method.ctx.on(device)
    return placed


class Workplace:
    """A device with the clients' data that it holds."""

    def __init__(self, device: torch.device):
        self.device = device
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # data and their copies, by id, oldest first
        self._bytes = 0
        self.together = CLIENTS_AT_FIRST  # most clients that are computed together
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products of matrices

    def make_room(self, tried: int, reason: str) -> None:
        """Release memory after it was not sufficient for this many clients; raise CoterieError if that was one."""
        self.forget()
        if tried == 1:
            raise CoterieError(
                f"{self.device} is out of memory with one client at a time ({reason.rstrip('.')}); lower batch, take a "
                "smaller model, fewer workers or device = cpu"
            )
        self.together = 1 << (tried.bit_length() - 1 - (tried.bit_count() == 1))  # the power of two below
        log.warning(
            "%s is out of memory with %d clients at a time; going on with %d", self.device, tried, self.together
        )

    def moved(self, value: Value, done: dict[int, tuple[Tensor, Tensor]] | None = None) -> Value:
        """Return the value with its tensors on the device."""
        return value if self.device == CPU else moved(value, self.device, {} if done is None else done)

    def data(self, value: Value) -> Value:
        """Return data of a client on the device, where they stay for later rounds if there is room."""
        if self.device == CPU:
            return value
        before = len(self._held)
        out = moved(value, self.device, self._held)
        self._bytes += sum(_size(new) for _, new in islice(reversed(self._held.values()), len(self._held) - before))
        while self._bytes > HELD_BYTES and self._held:
            self._bytes -= _size(self._held.pop(next(iter(self._held)))[1])
        return out

    def forget(self) -> None:
        """Release the data that are held, and the memory that PyTorch keeps for later."""
        self._held.clear()
        self._bytes = 0
        if self.device != CPU:
            getattr(_module(self.device), "empty_cache", lambda: None)()

    def host(self, value: Value) -> Value:
        """Return the value with its tensors on the processor."""
        return value if self.device == CPU else moved(value, CPU, {})

    @contextmanager
    def working(self) -> Iterator[None]:
        """Make the device the current one, and choose deterministic algorithms where PyTorch has them.

        PyTorch warns of an operation that has none.
        """
        if self.device == CPU:
            yield
            return
        was = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        filling: Any = torch.utils.deterministic  # would fill new tensors to find errors
        fill, filling.fill_uninitialized_memory = filling.fill_uninitialized_memory, False
        with ExitStack() as stack:
            stack.enter_context(_current(self.device))
            if self.device.type == "cuda":
                stack.enter_context(torch.backends.cudnn.flags(benchmark=False, deterministic=True, allow_tf32=False))
            if not was:
                torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(was, warn_only=warn_only)
                filling.fill_uninitialized_memory = fill


def _current(device: torch.device) -> AbstractContextManager[Any]:
    chosen = getattr(_module(device), "device", None)
    return nullcontext() if chosen is None else chosen(device)


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


# ---- noise inside models ---------------------------------------------------------------------------------------------
def start_noise(device: torch.device, key: int) -> None:
    """Seed the generators that a model's own noise, such as dropout, is drawn from."""
    torch.default_generator.manual_seed(key)  # torch.manual_seed would also format a stack trace for absent GPUs
    if device != CPU:
        _module(device).manual_seed(key)


def first_noise(device: torch.device, key: int) -> list[Tensor]:
    """Return the states of these generators after seeding them; that of the processor is not changed."""
    if device != CPU:
        _module(device).manual_seed(key)
    return [torch.Generator().manual_seed(key).get_state(), *noise_state(device)[1:]]


def noise_state(device: torch.device) -> list[Tensor]:
    """Return the states of these generators."""
    own = [] if device == CPU or not _has_state(device) else [_module(device).get_rng_state(*_named(device))]
    return [torch.default_generator.get_state(), *own]


def restore_noise(device: torch.device, states: Sequence[Tensor]) -> None:
    """Continue from these states."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        _module(device).set_rng_state(states[1], *_named(device))


def _has_state(device: torch.device) -> bool:
    return hasattr(_module(device), "get_rng_state")


def _named(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


# ---- memory ----------------------------------------------------------------------------------------------------------
def out_of_memory(error: BaseException) -> bool:
    """True if a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
