"""The kinds of runtimes by name: what each can do, and the function that opens it.

The engine asks for capabilities and never compares names. Other packages add a RuntimeKind by the entry point group
`coterie.runtimes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from coterie.errors import CoterieError, unknown

RUNTIME_GROUP = "coterie.runtimes"


@dataclass(frozen=True)
class RuntimeKind:
    """Capabilities of a runtime, which are known before it is imported."""

    opener: str  # module:function (session, folder, should_stop) -> context manager of a Runtime
    checkpoint_every_round: bool = False  # clients keep states of their own, which must not be far ahead of the server
    supports_stacked_training: bool = True  # one process holds many clients
    supports_warm_start: bool = True  # clients can start from given values instead of values drawn from the seed
    supports_attacks: bool = True  # clients are simulated, so that some may be made to lie
    states_stay_on_devices: bool = False  # the run folder has no client states and no personal models
    worker_processes: bool = False  # the training engine may choose the number of processes
    uses_address: bool = False
    trains_here: bool = False  # clients train in processes of this machine, so that their device must be there

    def load(self) -> Callable[..., Any]:
        """Import the function that opens the runtime."""
        function: Callable[..., Any] = resolve_name(self.opener)
        return function


RUNTIMES = {
    "local": RuntimeKind("coterie.runtimes.workers:open_local", worker_processes=True, trains_here=True),
    "ray": RuntimeKind("coterie.runtimes.ray:open_ray", uses_address=True),
    "federation": RuntimeKind(
        "coterie.federation.localhost.runtime:open_localhost",
        checkpoint_every_round=True,
        supports_stacked_training=False,
        supports_warm_start=False,
        supports_attacks=False,
        states_stay_on_devices=True,
        trains_here=True,
    ),
}
ALIASES = {"flower": "federation"}  # names of version 0.1, in run folders and scripts


@cache
def _kinds() -> dict[str, RuntimeKind]:
    others = {point.name: point.load() for point in entry_points(group=RUNTIME_GROUP)}
    return {**others, **RUNTIMES}


def canonical_runtime(name: str) -> str:
    """Return the registered name of a runtime; raise CoterieError if it is unknown."""
    name = ALIASES.get(name, name)
    if name not in _kinds():
        raise unknown("runtime", name, _kinds())
    return name


def runtime_kind(name: str) -> RuntimeKind:
    """Return the runtime with this name; raise CoterieError if it is unknown."""
    return _kinds()[canonical_runtime(name)]


def check_address(name: str, address: str | None) -> None:
    """Raise CoterieError if an address is given and the runtime has no use for it."""
    if address is not None and not runtime_kind(name).uses_address:
        users = " or ".join(n for n, kind in _kinds().items() if kind.uses_address)
        raise CoterieError(f"address is used only with runtime = {users}")
