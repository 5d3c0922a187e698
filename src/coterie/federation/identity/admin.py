"""The operator's commands for nodes: list, suspend, end a suspension, rotate a certificate, free a seat.

They write files that a running cloud or edge reads every second, so that no process is restarted. Nodes are added
and removed in authority.py. A node keeps its seat in a run until the seat is freed, whatever its certificate.
"""

import base64
import json
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from coterie.errors import CoterieError
from coterie.federation.identity.authority import SOON, Certs, read_node, replace_key
from coterie.federation.identity.roles import NodeRole, reserved_seats, scoped
from coterie.storage.atomic import write_atomic

_KEY_OVERLAP = 7 * 86_400.0  # seconds for which the old key stays valid, unless the new one is used earlier
_ORDERS = "orders"  # folder of the operator's orders to the running cloud, in the run's folder
SUSPENDED = "suspended by the operator"


@dataclass(frozen=True)
class NodeInfo:
    """A node in the list of nodes."""

    name: str
    role: str
    state: str
    key: str  # SHA-256 of the public key, as in a pin of HTTP; empty for devices behind an edge
    devices: tuple[str, ...] = ()
    client: int | None = None  # seat in the run
    connected: bool | None = None  # None without a run
    last_seen: float | None = None  # seconds since 1970


def list_nodes(root: Path, run: Path | None = None) -> list[NodeInfo]:
    """Return all registered nodes, and other nodes with a seat in the run."""
    certs, status, seats = _directory(root), _status(run), _seats(run)
    roles = certs.roles()
    nodes = []
    for name, role in roles.items():
        about = status.get(name, {})
        nodes.append(
            NodeInfo(name, role.role, _state(certs, name, role), key_fingerprint(certs.certificate(name)), role.devices,
                     seats.get(name), None if run is None else bool(about.get("connected")), about.get("last_seen"))
        )  # fmt: skip
    for name, number in sorted(seats.items(), key=lambda item: item[1]):
        if name in roles:
            continue
        about, (via, _, device) = status.get(name, {}), name.partition("/")
        edge = roles.get(via) if device else None
        state = "removed" if edge is None else "suspended" if edge.suspended or device in edge.without else "active"
        connected, last_seen = bool(about.get("connected")), about.get("last_seen")
        nodes.append(NodeInfo(name, "device", state, "", (), number, connected, last_seen))
    return nodes


def key_fingerprint(certificate: Path) -> str:
    """Return the fingerprint (SHA256:...) of the public key of a node's certificate."""
    return "SHA256:" + base64.b64encode(read_node(certificate).key).decode().rstrip("=")


def suspend(root: Path, name: str) -> None:
    """Send a node, or a device EDGE/DEVICE, no requests from the next round on; it keeps its key and seat."""
    _set_suspended(root, name, True)


def end_suspension(root: Path, name: str) -> None:
    """Send a suspended node requests again from the next round on; it continues with the state it had."""
    _set_suspended(root, name, False)


def reserve_seat(root: Path, name: str, client: int) -> None:
    """Bind a client number to a node, or to a device EDGE/DEVICE: in every run, no other node gets this seat."""
    certs = _directory(root)
    via, _, device = name.partition("/")
    role = _role(certs, via)
    if role.is_edge != bool(device) or (device and not role.speaks_for(device)):
        raise CoterieError(f'"{name}" is not a device; a seat is for one device')
    taken = {seat: other for other, seat in reserved_seats(certs.roles()).items()}
    if taken.get(client, name) != name:
        raise CoterieError(f'client {client} is reserved for "{taken[client]}"')
    write_atomic(certs.role_file(via), replace(role, seats={**role.seats, device: client}).text().encode())


def rotate_key(root: Path, name: str, request: Path | None = None, overlap: float = _KEY_OVERLAP) -> Path:
    """Give a node a new certificate and return the file for it: its new key, or with a `request` the certificate.

    The old certificate is valid until the node first connects with the new one, at most for `overlap` seconds.
    """
    certs = _directory(root)
    _role(certs, name)
    if certs.next_certificate(name).exists():
        raise CoterieError(f'node "{name}" is changing its key already; it has not yet connected with the new one')
    return replace_key(certs, name, request, time.time() + overlap)


# ---- seats -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SeatOrder:
    """The order to take a seat from `name` and give it to `to`, or to the next new device."""

    name: str
    to: str | None


def free_seat(run: Path, name: str, to: str | None = None) -> int:
    """Order the cloud to free the seat of a removed or suspended node; return its client number."""
    seats = _seats(run)
    if name not in seats:
        raise CoterieError(f'"{name}" has no seat in {run}; seats: {", ".join(sorted(seats)) or "none"}')
    if to is not None and to in seats:
        raise CoterieError(f'"{to}" is client {seats[to]} of this run already')
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
    return seats[name]


def seat_orders(run: Path) -> list[tuple[Path, SeatOrder | None]]:
    """Return the orders that the cloud has not carried out, oldest first; None stands for a damaged file."""
    orders: list[tuple[Path, SeatOrder | None]] = []
    for path in sorted((run / _ORDERS).glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            name, to = fields["free"], fields["to"]
            valid = isinstance(name, str) and (to is None or isinstance(to, str))
            orders.append((path, SeatOrder(name, to) if valid else None))
        except (OSError, ValueError, KeyError, TypeError):
            orders.append((path, None))
    return orders


# ---- files -----------------------------------------------------------------------------------------------------------
def _set_suspended(root: Path, name: str, suspended: bool) -> None:
    certs = _directory(root)
    via, _, device = name.partition("/")
    role = _role(certs, via)
    if device and not role.speaks_for(device):
        raise CoterieError(f'"{via}" is not an edge with a device "{device}"')
    is_suspended = device in role.without if device else role.suspended
    if is_suspended == suspended:
        raise CoterieError(f'"{name}" is {"suspended already" if suspended else "not suspended"}')
    if not device:
        role = replace(role, suspended=suspended)
    else:
        others = [d for d in role.without if d != device]
        role = replace(role, without=tuple(sorted([*others, device] if suspended else others)))
    write_atomic(certs.role_file(via), role.text().encode())


def _directory(root: Path) -> Certs:
    certs = Certs(root)
    if not certs.ca.is_file():
        raise CoterieError(f"{root} is not a certificate directory; create one with coterie certs init")
    return certs


def _role(certs: Certs, name: str) -> NodeRole:
    roles = certs.roles()
    if name not in roles:
        raise CoterieError(f'no node "{name}" in {certs.root}; known: {", ".join(roles) or "none"}')
    return roles[name]


def _state(certs: Certs, name: str, role: NodeRole) -> str:
    words = ["suspended" if role.suspended else "active"]
    certificate = read_node(certs.certificate(name))
    if certs.next_certificate(name).exists() and role.old_key_until is not None:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(role.old_key_until))
        key = key_fingerprint(certs.next_certificate(name))
        words.append(f"new certificate with key {key}, the old one is valid until {until}")
    elif certificate.ends < datetime.now(UTC) + SOON:
        words.append(f"its certificate expires on {certificate.ends:%Y-%m-%d %H:%M} UTC")
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
        nodes = json.loads((run / "status.json").read_text())["nodes"]
        return {str(k): v for k, v in nodes.items() if isinstance(v.get("last_seen"), int | float | None)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
