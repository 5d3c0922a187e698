"""A federation in one process: the real handlers of devices and edges, behind a link that calls them directly."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.config import settings
from coterie.engine import codec
from coterie.engine.loop import Loop
from coterie.engine.session import Session, make_loop
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, open_session
from coterie.federation.cloud.runtime import FederationRuntime
from coterie.federation.cloud.waiting import WaitingRules
from coterie.federation.device import DeviceHandler
from coterie.federation.edge import EdgeHandler
from coterie.federation.identity.roles import NodeRole
from coterie.federation.policy.allow import Allow
from coterie.federation.policy.audit import AUDIT_FILE, AuditLog
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import Cause, Failure, LinkBytes, NodeReplies, NoPlanError
from coterie.methods import method_names
from coterie.models.zoo import ZOO
from coterie.runtimes.inline import Inline
from coterie.storage.run_folder import Folder

RUN = "0123456789abcdef" * 2
NET = "coterie.testing:SmallNet"
SMALL: dict[str, Any] = {
    "data": "digits", "subset": 400, "model": NET, "rounds": 3, "join": 0.7, "epochs": 1, "batch": 16, "lr": 0.1,
    "eval_every": 2, "clients": 4, "partition": "dirichlet(0.5)", "val_share": 0.2, "public": 30, "seed": 3,
}  # fmt: skip

ALLOW = Allow(methods=tuple(method_names()), models=(NET, *ZOO))  # includes methods of other packages

Handle = Callable[[str, int, memoryview | None, memoryview], memoryview]
Spoil = Callable[[Any], Any]  # replaces an answer


def reasons(replies: NodeReplies) -> dict[str, str]:
    """Return the reasons why nodes gave no answer."""
    return {name: failed.why for name, failed in replies.errors.items()}


@dataclass
class HandExchange:
    waiting: set[str]
    replies: NodeReplies

    def poll(self) -> NodeReplies:
        found, self.replies = self.replies, NodeReplies({}, {}, {})
        return found


@dataclass
class HandLink:
    """A link to nodes of this process. An error that a node raises becomes its failure, as in the transport."""

    handlers: dict[str, Handle] = field(default_factory=dict)
    spoil: dict[str, Spoil] = field(default_factory=dict)  # changes the answers of a hostile node to jobs
    sizes: list[tuple[str, str, int, LinkBytes]] = field(default_factory=list)  # kind, node, round, bytes

    mute: set[str] = field(default_factory=set)  # nodes that take messages and never answer

    def nodes(self) -> list[str]:
        return sorted(self.handlers)

    def begin(self, payloads: Mapping[str, Any], kind: str, round: int, deadline: float, *more: Any) -> "HandExchange":
        now = {name: own for name, own in payloads.items() if name not in self.mute}
        return HandExchange(set(payloads) - now.keys(), self.send(now, kind, round, deadline, *more))

    def send(
        self,
        payloads: Mapping[str, Any],
        kind: str,
        round: int,
        deadline: float,
        shared: Any = None,
        largest: int = 2**30,
    ) -> NodeReplies:
        found = NodeReplies({}, {}, {})
        for name, own in sorted(payloads.items()):
            if name in self.mute:
                found.errors[name] = Failure(Cause.LATE, f"{name} did not answer within {deadline:g} s")
                continue
            if name not in self.handlers:
                found.errors[name] = Failure(Cause.ABSENT, f"{name} is not connected")
                continue
            common = None if shared is None else memoryview(bytearray(shared))
            try:
                answer = self.handlers[name](kind, round, common, memoryview(bytearray(own)))
                if name in self.spoil and kind != "hello":
                    answer = codec.pack(self.spoil[name](codec.unpack(answer)))
            except Exception as e:
                reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
                cause = Cause.NO_PLAN if isinstance(e, NoPlanError) else Cause.DECLINED
                found.errors[name] = Failure(cause, f"{name}: {reason}")
                continue
            if len(answer) > largest:
                why = f"{name}: the payload of {len(answer)} bytes is larger than the {largest} allowed"
                found.errors[name] = Failure(Cause.WRONG, why)
                continue
            found.answers[name] = memoryview(bytearray(answer))
            down = len(own) + (0 if shared is None else len(shared))
            found.traffic[name] = LinkBytes(down, len(answer), down, len(answer))
            self.sizes.append((kind, name, round, found.traffic[name]))
        return found


@dataclass
class Federation:
    """A cloud with its devices and edges; neighbouring devices share an edge."""

    session: Session
    link: HandLink
    links: dict[str, HandLink]  # links of the edges by name
    loop: Loop

    @property
    def runtime(self) -> FederationRuntime:
        assert isinstance(self.loop.runtime, FederationRuntime)
        return self.loop.runtime

    def device_link(self, i: int) -> HandLink:
        """Return the link of the server that a device is attached to."""
        name = f"device-{i}"
        return next(x for x in (self.link, *self.links.values()) if name in x.handlers)


@contextmanager
def federation(
    folder: Path,
    method: str,
    edges: int = 0,
    allow: Mapping[int, Allow] | None = None,
    files: Sequence[Path] = (),
    cloud: CloudSettings = CloudSettings("none"),  # noqa: B008  # immutable
    own_timeline: str | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
    **more: Any,
) -> Iterator[Federation]:
    """Open a federation on digits, or on `files`, one for each device, whose items and classes `cloud` announces.

    The data of `files` change by `own_timeline`.
    """
    given = {**SMALL, **more}
    session = open_session(settings(method=method, **given), cloud)
    devices = [
        DeviceHandler(
            str(files[i]),
            folder / "devices" / str(i),
            None,
            None,
            (allow or {}).get(i, ALLOW),
            timeline=own_timeline,
            device=device,
        )
        if files
        else DeviceHandler("digits", folder / "devices" / str(i), i, None, (allow or {}).get(i, ALLOW), device=device)
        for i in session.federation.clients
    ]
    links = {f"edge-{e}": HandLink() for e in range(edges)}
    link = HandLink()
    for i, device in enumerate(devices):
        above = links[f"edge-{i * edges // len(devices)}"] if edges else link
        above.handlers[f"device-{i}"] = device.handle
    roles = {}
    for name, below in links.items():
        link.handlers[name] = EdgeHandler(below, ALLOW, AuditLog(folder / name / AUDIT_FILE)).handle
        roles[name] = NodeRole.of("edge", below.nodes())
    (folder / "run").mkdir(parents=True, exist_ok=True)
    runtime = FederationRuntime(
        session.method,
        link,
        FederationPlan.of(session, RUN),
        lambda: roles,
        folder / "run",
        WaitingRules(1, 60.0, seconds=20.0),
    )
    loop = make_loop(session, Folder(folder / "run"), runtime)
    try:
        yield Federation(session, link, links, loop)
    finally:
        loop.folder.close()
        for device in devices:
            device.close()


def simulated(folder: Path, session: Session) -> Loop:
    """Run a session with the inline runtime."""
    folder.mkdir(exist_ok=True)
    loop = make_loop(session, Folder(folder), Inline(session.clients(), session.states(folder)))
    try:
        assert loop.run()
    finally:
        loop.folder.close()
    return loop
