"""A run on a SuperLink, held by this process: the calls the cloud's end of the wire needs, and nothing else.

A server program needs a run, and in Flower 1.41 a run needs an app bundle (FAB). Ours holds a pyproject.toml and no
code. With `--isolation process` a SuperLink starts nothing itself; this process claims the run's task and so is the
ServerApp: no code is bundled, installed or started by Flower. A run ends with its program; a new program starts a new
run on the same SuperLink, with the same nodes.
"""

import contextlib
import hashlib
import io
import logging
import threading
import zipfile
from typing import Any

from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import Certs
from coterie.runtimes.flower.transport import flower_api as fl
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.base import RefusedError, UnreachableError
from coterie.runtimes.flower.transport.http import HEADER, Header, Objects, call, client
from coterie.runtimes.flower.transport.limits import ALLOWED

HEARTBEAT = 5.0
PYPROJECT = """[project]
name = "coterie"
version = "1.0.0"
description = "Marks a Coterie run; holds no code"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "none:none"
clientapp = "none:none"
[tool.flwr.app.config]
"""
log = logging.getLogger("coterie.cloud")


def bundle() -> bytes:
    """The app bundle of a run: always the same bytes."""
    buffer, digest = io.BytesIO(), hashlib.sha256(PYPROJECT.encode()).hexdigest()
    with zipfile.ZipFile(buffer, "w") as z:
        z.writestr(zipfile.ZipInfo("pyproject.toml"), PYPROJECT)
        z.writestr(zipfile.ZipInfo(".info/CONTENT"), f"pyproject.toml,{digest},{8 * len(PYPROJECT)}")
    return buffer.getvalue()


class ServerRun:
    """Made by connecting: the nodes are registered, older runs ended, a new one started and claimed."""

    def __init__(self, address: str, certs: Certs):
        certs.check()
        self.certs = certs
        key = Header(HEADER, certs.control_key.read_text().strip())
        self._token, self._allowed = Header(fl.TASK_TOKEN_HEADER), Header(ALLOWED)
        self._control = client(fl.ControlHttpClient, address, certs.ca, "coterie", [key])
        self._runtime = client(
            fl.RuntimeHttpClient, address, certs.ca, "flwr-serverapp", [key, self._token, self._allowed]
        )
        self._over = threading.Event()
        self._rejected: set[tuple[str, bytes]] = set()
        try:
            self.register()
            self.id, self.task = self._start()
        except BaseException:
            self.drop()
            raise
        self.objects = Objects(self._runtime, fl.SUPERLINK_NODE_ID, self.id)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        log.info("run %s on %s", self.id, address)

    def _start(self) -> tuple[int, int]:
        # a SuperLink of Coterie serves one program: runs of programs that died are ended, their messages forgotten
        for run, about in call(self._control.ListRuns, fl.control.ListRunsRequest()).run_dict.items():
            if about.status.status != "finished":
                with contextlib.suppress(CoterieError):
                    call(self._control.StopRun, fl.control.StopRunRequest(run_id=run))
        started = call(self._control.StartRun, fl.control.StartRunRequest(fab=fl.Fab(content=bundle())))
        request = fl.runtime.AcquireTaskRequest(supported_task_types=[fl.TaskType.SERVER_APP])
        claimed = call(self._runtime.AcquireTask, request)
        if not claimed.token or claimed.task.run_id != started.run_id:
            raise UnreachableError("another program is starting a run on the same SuperLink")
        self._token.value = claimed.token
        call(self._runtime.PullTaskInput, fl.runtime.PullTaskInputRequest())
        return int(started.run_id), int(claimed.task.task_id)

    def _beat(self) -> None:
        """Tell the SuperLink that the run's program lives; trouble is noticed by whoever sends next."""
        while not self._over.wait(HEARTBEAT):
            with contextlib.suppress(CoterieError, RuntimeError):  # RuntimeError: closed meanwhile
                call(self._runtime.SendTaskHeartbeat, fl.runtime.SendTaskHeartbeatRequest())

    def trust(self) -> None:
        """Trust the authority whose certificate lies in the directory now, too."""
        for tls in (self._control.tls, self._runtime.tls):
            with contextlib.suppress(OSError):
                tls.load_verify_locations(cafile=str(self.certs.ca))

    def end(self, completed: bool = True) -> None:
        status = fl.SubStatus.COMPLETED if completed else fl.SubStatus.FAILED
        with contextlib.suppress(CoterieError):
            call(self._runtime.PushTaskOutput, fl.runtime.PushTaskOutputRequest(sub_status=status, details=""))
        self.drop()

    def drop(self) -> None:
        """Close without notifying the SuperLink."""
        self._over.set()
        self._control.close()
        self._runtime.close()

    @property
    def traffic(self) -> int:
        """Bytes that have gone between this process and the SuperLink, both ways."""
        return int(self._runtime.meter.bytes)

    # ---- nodes ---------------------------------------------------------------------------------------------------
    def register(self) -> None:
        """Make the SuperLink's list of nodes that of the certificate directory."""
        wanted = self.certs.accepted()
        known = {
            bytes(n.public_key): (n.name, n.node_id)
            for n in call(self._control.ListNodes, fl.control.ListNodesRequest()).nodes_info
            if n.status != "unregistered"
        }
        for public, (name, node) in known.items():
            if wanted.get(public) != name:
                call(self._control.UnregisterNode, fl.control.UnregisterNodeRequest(node_id=node))
        for public, name in wanted.items():
            if (name, public) in self._rejected or (public in known and known[public][0] == name):
                continue
            try:
                call(self._control.RegisterNode, fl.control.RegisterNodeRequest(public_key=public, name=name))
            except (UnreachableError, RefusedError):
                raise
            except CoterieError as e:
                self._rejected.add((name, public))
                log.warning("%s cannot join: %s", name, e)

    def online(self) -> dict[str, Any]:
        """Who is connected: name to Flower's NodeInfo. A node that is seen with its new key loses the old one."""
        found: dict[str, Any] = {}
        for n in call(self._runtime.GetNodes, fl.runtime.GetNodesRequest()).nodes:
            with contextlib.suppress(OSError):  # without write access the old key ends with the overlap
                if self.certs.seen(n.name, bytes(n.public_key)):
                    log.info("%s has changed its key; the old one is refused from now on", n.name)
            if n.name not in found or found[n.name].last_activated_at < n.last_activated_at:
                found[n.name] = n
        return found

    # ---- messages ------------------------------------------------------------------------------------------------
    def message(self, head: wire.Head, body: Any, node: int, seconds: float) -> Any:
        """A message that is void after `seconds`."""
        return wire.question(head, body, node, seconds, run=self.id, task=self.task)

    def push(self, messages: list[Any], largest: int) -> list[str]:
        """Send; Flower's ids are returned. Answers may have `largest` bytes, which the guard holds nodes to."""
        self._allowed.value = str(largest)
        return wire.push(messages, self._announce, self.objects.put)

    def replies(self, ids: list[str]) -> list[tuple[Any, Any]]:
        """The replies there are to the messages `ids`: (proto with metadata, object tree)."""
        found = call(self._runtime.PullMessages, fl.runtime.PullAppMessagesRequest(message_ids=ids))
        return list(zip(found.messages_list, found.message_object_trees, strict=True))

    def _announce(self, protos: list[Any], trees: list[Any]) -> tuple[Any, str]:
        request = fl.runtime.PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)
        found = call(self._runtime.PushMessages, request)
        return found.objects_to_push, found.session_id
