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
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.http import Header, UnreachableError, call, client
from coterie.runtimes.flower.transport.superlink import HEADER

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
serverapp = "coterie.runtimes.flower.transport.app:server"
clientapp = "coterie.runtimes.flower.transport.app:app"
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


class Run:
    """Made by connecting: the nodes are registered, older runs ended, a new one started and claimed."""

    def __init__(self, address: str, certs: Certs):
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.runtime import RuntimeHttpClient

        certs.check()
        self.certs = certs
        self.myself = Node(node_id=SUPERLINK_NODE_ID)
        key = Header(HEADER, certs.control_key.read_text().strip())
        self._control = client(ControlHttpClient, address, certs.ca, "coterie", [key])
        self._runtime = client(RuntimeHttpClient, address, certs.ca, "flwr-serverapp", [key])
        self._over = threading.Event()
        try:
            self.register()
            self.id, self.task = self._start()
        except BaseException:
            self.drop()
            raise
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        log.info("run %s on %s", self.id, address)

    def _start(self) -> tuple[int, int]:
        from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        # a SuperLink of Coterie serves one program: runs of programs that died are ended, their messages forgotten
        for run, about in call(self._control.ListRuns, ListRunsRequest()).run_dict.items():
            if about.status.status != "finished":
                with contextlib.suppress(CoterieError):
                    call(self._control.StopRun, StopRunRequest(run_id=run))
        started = call(self._control.StartRun, StartRunRequest(fab=Fab(content=bundle())))
        claimed = call(self._runtime.AcquireTask, AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        if not claimed.token or claimed.task.run_id != started.run_id:
            raise UnreachableError("another program is starting a run on the same SuperLink")
        self._runtime._interceptors += (RuntimeTokenHttpInterceptor(token=claimed.token),)
        call(self._runtime.PullTaskInput, PullTaskInputRequest())
        return int(started.run_id), int(claimed.task.task_id)

    def _beat(self) -> None:
        """Tell the SuperLink that the run's program lives; trouble is noticed by whoever sends next."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        while not self._over.wait(HEARTBEAT):
            with contextlib.suppress(CoterieError, RuntimeError):  # RuntimeError: closed meanwhile
                call(self._runtime.SendTaskHeartbeat, SendTaskHeartbeatRequest())

    def end(self, completed: bool = True) -> None:
        from flwr.common.constant import SubStatus
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        status = SubStatus.COMPLETED if completed else SubStatus.FAILED
        with contextlib.suppress(CoterieError):
            call(self._runtime.PushTaskOutput, PushTaskOutputRequest(sub_status=status, details=""))
        self.drop()

    def drop(self) -> None:
        """Let go of it without a word."""
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
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest

        wanted = self.certs.nodes()
        known = {
            (n.name, bytes(n.public_key)): n.node_id
            for n in call(self._control.ListNodes, ListNodesRequest()).nodes_info
            if n.status != "unregistered"
        }
        for name_key, node in known.items():
            if name_key not in wanted.items():
                call(self._control.UnregisterNode, UnregisterNodeRequest(node_id=node))
        for name, public in wanted.items():
            if (name, public) not in known:
                call(self._control.RegisterNode, RegisterNodeRequest(public_key=public, name=name))

    def online(self) -> dict[str, Any]:
        """Who is connected: name to Flower's NodeInfo."""
        from flwr.proto.runtime_pb2 import GetNodesRequest

        return {n.name: n for n in call(self._runtime.GetNodes, GetNodesRequest()).nodes}

    # ---- messages ------------------------------------------------------------------------------------------------
    def message(self, head: wire.Head, body: Any, node: int, seconds: float) -> Any:
        """A message that is void after `seconds`."""
        return wire.question(head, body, node, seconds, run=self.id, task=self.task)

    def push(self, messages: list[Any]) -> list[str]:
        """Send; Flower's ids are returned."""
        return wire.push(messages, self._announce, self._put)

    def replies(self, ids: list[str]) -> list[tuple[Any, Any]]:
        """The replies there are to the messages `ids`: (proto with metadata, object tree)."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found = call(self._runtime.PullMessages, PullAppMessagesRequest(message_ids=ids))
        return list(zip(found.messages_list, found.message_object_trees, strict=True))

    def fetch(self, tree: Any, largest: int) -> Any:
        """The whole message of an object tree."""
        return wire.pull(tree, self._object, largest)

    def confirm(self, proto: Any) -> None:
        """The SuperLink may forget the reply."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        key = proto.metadata.message_id
        request = ConfirmMessageReceivedRequest(node=self.myself, run_id=self.id, message_object_id=key)
        call(self._runtime.ConfirmMessageReceived, request)

    def _announce(self, protos: list[Any], trees: list[Any]) -> tuple[Any, str]:
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest

        request = PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)
        found = call(self._runtime.PushMessages, request)
        return found.objects_to_push, found.session_id

    def _put(self, session: str, key: str, raw: bytes) -> bool:
        from flwr.proto.message_pb2 import PushObjectRequest

        request = PushObjectRequest(
            node=self.myself, run_id=self.id, object_id=key, object_content=raw, session_id=session
        )
        return bool(call(self._runtime.PushObject, request).stored)

    def _object(self, key: str) -> bytes | None:
        from flwr.proto.message_pb2 import PullObjectRequest

        request = PullObjectRequest(node=self.myself, run_id=self.id, object_id=key)
        found = call(self._runtime.PullObject, request)
        if not found.object_found:
            raise CoterieError("a part of the reply is gone")
        return found.object_content if found.object_available else None
