"""The life of a node, by its operator's commands: list, suspend, release, rotate its key, free its seat.

All of it is files that a running cloud (or edge) reads before every round, so nothing is restarted. Adding and removing
is in certs.py. A name stands for one participant: whatever happens to its key, its seat in a run is its own until it is
freed by command.
"""

import base64
import hashlib
import json
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.errors import CoterieError
from coterie.federation.identity.authority import Certs, check_unused, new_key
from coterie.federation.identity.roles import NodeRole, scoped
from coterie.storage.atomic import write_atomic

_KEY_OVERLAP = 7 * 86_400.0  # seconds for which the old key of a node holds, unless the new one is seen before
_ORDERS = "orders"  # folder in a run's folder: what the operator wants of the running cloud, a file each
SUSPENDED = "suspended by the operator"


@dataclass(frozen=True)
class NodeInfo:
    """One line of the list of nodes."""

    name: str
    role: str
    state: str
    key: str  # fingerprint, as ssh-keygen -l prints it
    devices: tuple[str, ...] = ()
    client: int | None = None  # its seat in the run
    connected: bool | None = None  # None: no run was given
    last_seen: float | None = None  # seconds since 1970


def list_nodes(root: Path, run: Path | None = None) -> list[NodeInfo]:
    """All registered nodes, and those that have a seat in the run."""
    certs = _directory(root)
    status = _status(run)
    numbers = _seats(run)
    found = []
    for name, role in certs.roles().items():
        about = status.get(name, {})
        found.append(
            NodeInfo(name, role.role, _state(certs, name, role), key_fingerprint(certs.public(name)), role.devices,
                     numbers.get(name), None if run is None else bool(about.get("connected")), about.get("last_seen"))
        )  # fmt: skip
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        if name in certs.roles():
            continue
        about, (via, _, device) = status.get(name, {}), name.partition("/")
        edge = certs.roles().get(via) if device else None
        state = "removed" if edge is None else "suspended" if edge.suspended or device in edge.without else "active"
        seen = about.get("last_seen")
        found.append(NodeInfo(name, "device", state, "", (), number, bool(about.get("connected")), seen))
    return found


def key_fingerprint(public: Path) -> str:
    """SHA256:..., of a public key in OpenSSH format."""
    try:
        raw = base64.b64decode(public.read_bytes().split()[1])
    except (OSError, IndexError, ValueError) as e:
        raise CoterieError(f"public key {public} is not in OpenSSH format") from e
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


def suspend(root: Path, name: str) -> None:
    """From the next round on the node is not asked; key, connection and seat stay. EDGE/DEVICE is possible too."""
    _change(root, name, True)


def end_suspension(root: Path, name: str) -> None:
    """End of suspension: from the next round on the node is asked again, with the state it had."""
    _change(root, name, False)


def rotate_key(root: Path, name: str, public: Path | None = None, overlap: float = _KEY_OVERLAP) -> Path:
    """Give a node a new key: made here (the private half is returned), or the `public` half of one made on the device.

    Either key is accepted until the new one was first seen, or for `overlap` seconds; then the old one is refused.
    """
    certs = _directory(root)
    role = _role(certs, name)
    if certs.next_public(name).exists():
        raise CoterieError(f'node "{name}" is changing its key already; it has not been seen with the new one yet')
    if public is not None:
        check_unused(certs, public)
    # the time first: a new key without it would let both keys in for ever
    write_atomic(certs.role_file(name), replace(role, old_key_until=time.time() + overlap).text().encode())
    certs.next_public(name).parent.mkdir(exist_ok=True, mode=0o700)
    if public is None:
        certs.next_key(name).unlink(missing_ok=True)
        return new_key(certs.next_key(name))
    write_atomic(certs.next_public(name), public.read_bytes())
    return certs.next_public(name)


# ---- seats -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SeatOrder:
    """The seat of `name` is free; with `to` it is that node's from now on."""

    name: str
    to: str | None


def free_seat(run: Path, name: str, to: str | None = None) -> int:
    """Order that the client number of a node that was removed or suspended be free for another; its number."""
    numbers = _seats(run)
    if name not in numbers:
        raise CoterieError(f'"{name}" has no seat in {run}; seats: {", ".join(sorted(numbers)) or "none"}')
    if to is not None and to in numbers:
        raise CoterieError(f'"{to}" is client {numbers[to]} of this run already')
    try:
        certs = Certs(Path(json.loads((run / "cloud.json").read_text())["certs"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise CoterieError(f"{run} holds no federation (cloud.json is missing or damaged)") from None
    via, _, device = name.partition("/")
    role = certs.roles().get(via)
    attached = role is not None and (not device or role.speaks_for(device))
    if role is not None and attached and not role.suspended and device not in role.without:
        raise CoterieError(f'"{name}" may still take part; remove or suspend it first')
    text = json.dumps({"free": name, "to": to})
    write_atomic(run / _ORDERS / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json", text.encode())
    return numbers[name]


def seat_orders(run: Path) -> list[tuple[Path, SeatOrder | None]]:
    """What was ordered and not yet done, oldest first; None: a file that is no order."""
    found: list[tuple[Path, SeatOrder | None]] = []
    for path in sorted((run / _ORDERS).glob("*.json")):
        try:
            about = json.loads(path.read_text())
            name, to = about["free"], about["to"]
            good = isinstance(name, str) and (to is None or isinstance(to, str))
            found.append((path, SeatOrder(name, to) if good else None))
        except (OSError, ValueError, KeyError, TypeError):
            found.append((path, None))
    return found


# ---- files -----------------------------------------------------------------------------------------------------------
def _change(root: Path, name: str, suspended: bool) -> None:
    certs = _directory(root)
    via, _, device = name.partition("/")
    role = _role(certs, via)
    if device and not role.speaks_for(device):
        raise CoterieError(f'"{via}" is no edge with a device "{device}"')
    is_out = device in role.without if device else role.suspended
    if is_out == suspended:
        raise CoterieError(f'"{name}" is {"suspended already" if suspended else "not suspended"}')
    if not device:
        role = replace(role, suspended=suspended)
    else:
        rest = [d for d in role.without if d != device]
        role = replace(role, without=tuple(sorted([*rest, device] if suspended else rest)))
    write_atomic(certs.role_file(via), role.text().encode())


def _directory(root: Path) -> Certs:
    certs = Certs(root)
    if not certs.ca.is_file():
        raise CoterieError(f"{root} is not a certificate directory; create one with coterie certs init")
    return certs


def _role(certs: Certs, name: str) -> NodeRole:
    found = certs.roles()
    if name not in found:
        raise CoterieError(f'no node "{name}" in {certs.root}; known: {", ".join(found) or "none"}')
    return found[name]


def _state(certs: Certs, name: str, role: NodeRole) -> str:
    words = ["suspended" if role.suspended else "active"]
    if certs.next_public(name).exists() and role.old_key_until is not None:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(role.old_key_until))
        words.append(f"new key {key_fingerprint(certs.next_public(name))}, the old one until {until}")
    return "; ".join(words + [f"without {scoped(name, d)}" for d in role.without])


def _seats(run: Path | None) -> dict[str, int]:
    if run is None:
        return {}
    try:
        return {str(k): int(n) for k, n in json.loads((run / "roster.json").read_text()).items()}
    except FileNotFoundError:
        if not (run / "cloud.json").is_file():
            raise CoterieError(f"{run} holds no federation (cloud.json is missing)") from None
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise CoterieError(f"{run / 'roster.json'} is damaged: {e}") from e


def _status(run: Path | None) -> dict[str, dict[str, float | None]]:
    if run is None:
        return {}
    try:
        found = json.loads((run / "status.json").read_text())["nodes"]
        return {str(k): v for k, v in found.items() if isinstance(v.get("last_seen"), int | float | None)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
