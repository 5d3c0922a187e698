"""A device's end of the wire: a node of the federation in one process, answering messages with one function.

A stock SuperNode of Flower 1.41 asks for messages every 3 s, downloads the app (Python code) that the cloud names, and
runs it in a new process for every message. Here the device speaks Flower's Fleet interface itself, with Flower's own
client and node keys: it runs only the code installed on it, whatever a cloud sends; it stays alive between messages, so
data are loaded once; and it asks at once after an answer, then less and less often. To a SuperLink it is a node like
any other.
"""

import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from coterie.codec import Value
from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import load_key
from coterie.runtimes.flower.processes import die_with_parent, need_flower
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.http import RefusedError, UnreachableError, call, client

Handle = Callable[[str, int, Value], Value]  # (kind, round, payload) -> reply

HEARTBEAT = 10  # seconds, the least Flower allows; a node is taken for gone after two missed
log = logging.getLogger("coterie.device")


@dataclass
class Device:
    """Answers messages until stopped; survives restarts of the cloud and of the network."""

    address: str  # HOST:PORT of the SuperLink
    ca: Path
    key: Path
    handle: Handle
    quick: float = 0.1  # seconds between questions right after an answer,
    slow: float = 2.0  # and at most
    largest: int = wire.LARGEST  # bytes of one download
    patience: float = 30.0  # seconds a refused key is tried: not yet registered, or its last process died just now
    stopping: threading.Event = field(default_factory=threading.Event)
    connected: threading.Event = field(default_factory=threading.Event)
    _node: int | None = None  # Flower's id of this node, once known
    _last: tuple[str, Any] = (
        "",
        None,
    )  # ticket and content of the latest reply: a repeated question is not worked on twice

    def run(self) -> None:
        """Blocks until `stopping` is set; raises CoterieError if the SuperLink cannot be trusted or refuses the key."""
        need_flower()
        self._client = self._connect()
        memory = self._lock()
        refused_since: float | None = None
        once, pause = False, 0.2
        try:
            while not self.stopping.is_set():
                try:
                    node = self._activate(memory)
                    log.info("connected to %s as node %s", self.address, node.node_id)
                    refused_since, once, pause = None, True, 0.2
                    self.connected.set()
                    self._answer(node)
                except RefusedError as e:
                    # once known, a refusal means a SuperLink that lost its list: the cloud registers us again soon
                    now = time.monotonic()
                    if refused_since is None:
                        refused_since = now
                        log.warning("%s (the key is not registered, or its last process died just now)", e)
                    if not once and now - refused_since >= self.patience:
                        raise
                except UnreachableError as e:
                    log.warning("%s; trying again", e)
                self.connected.clear()
                self.stopping.wait(pause)
                pause = min(3.0, 1.5 * pause)
        finally:
            self._client.close()
            if memory is not None:
                memory.close()

    def _connect(self) -> Any:
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        key = load_key(self.key)
        signed = NodeAuthHttpInterceptor(key, key.public_key())
        return client(FleetHttpClient, self.address, self.ca, "SuperNode", [signed])

    def _lock(self) -> TextIO | None:
        """One process per key and host; the locked file beside the key remembers the node id."""
        try:
            memory = self.key.with_suffix(".node").open("a+")
        except OSError:
            return None  # a read-only key: a restart after a crash then takes up to 20 s
        try:
            fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            memory.close()
            raise CoterieError(f"another process is already connected with the key {self.key}") from e
        return memory

    def _activate(self, memory: TextIO | None) -> Any:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        pem = public_key_to_bytes(load_key(self.key).public_key())
        request = ActivateNodeRequest(public_key=pem, heartbeat_interval=HEARTBEAT)
        try:
            node = call(self._client.ActivateNode, request).node_id
        except RefusedError:
            # Flower does not activate a node it believes to be online; if our last process died, say goodbye for it
            if self._node is None and memory is not None:
                memory.seek(0)
                self._node = int("0" + memory.read(20).strip())
            if not self._node:
                raise
            with contextlib.suppress(RefusedError):
                call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self._node))
            node = call(self._client.ActivateNode, request).node_id
        if node != self._node and memory is not None:
            memory.truncate(0)
            memory.write(str(node))
            memory.flush()
        self._node = node
        return Node(node_id=node)

    def _answer(self, node: Any) -> None:
        """The loop of one connection: ask, work, reply; a second thread says every few seconds that we live."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest

        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(node, over), name="heartbeat", daemon=True)
        beat.start()
        pause = self.quick
        try:
            while not self.stopping.is_set():
                asked = self._client.meter.bytes
                # if this fails a message may be lost with it: we activate anew, the cloud sees that and sends it again
                found = call(self._client.PullMessages, PullMessagesRequest(node=node))
                if over.is_set():
                    raise RefusedError("the SuperLink no longer knows this node")
                if found.messages_list:
                    self._one(node, found.messages_list[0], found.message_object_trees[0], asked)
                    pause = self.quick
                else:
                    self.stopping.wait(pause)
                    pause = min(self.slow, 1.25 * pause)
        finally:
            over.set()
            if self.stopping.is_set():
                with contextlib.suppress(CoterieError):
                    call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=node.node_id))

    def _beat(self, node: Any, over: threading.Event) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not over.wait(0.6 * HEARTBEAT):
            try:
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                if not call(self._client.SendNodeHeartbeat, request).success:
                    over.set()
            except RefusedError:
                over.set()
            except CoterieError as e:
                log.debug("no heartbeat: %s", e)

    def _one(self, node: Any, proto: Any, tree: Any, asked: int) -> None:
        """One message: fetch it, work on it, send the reply (or the reason why there is none)."""
        from flwr.app import Error, Message
        from flwr.common.constant import ErrorCode
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        question = message_from_proto(proto)
        run, key = question.metadata.run_id, question.metadata.message_id
        head: wire.Head | None = None
        try:
            inflated = wire.pull(tree, lambda k: self._object(node, run, k), self.largest)
            call(
                self._client.ConfirmMessageReceived,
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=key),
            )
            head, value, _ = wire.opened(inflated.content)
            del inflated
            if self._last[0] != head.ticket:
                taken = self._client.meter.bytes - asked
                self._last = "", None  # makes room before the next reply is made
                reply = self.handle(head.kind, head.round, value)
                answered = wire.Head(head.kind, head.round, head.ticket, taken)
                self._last = head.ticket, wire.content(answered, {"value": wire.part(reply)})
                del reply
            del value
            answer = Message(self._last[1], reply_to=question)
        except (UnreachableError, RefusedError):
            raise
        except Exception as e:
            reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
            log.error("round %s not answered: %s", head.round if head else "?", reason, exc_info=e)
            answer = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason[:2000]), reply_to=question)
        self._send(node, answer, question.metadata.created_at + question.metadata.ttl)

    def _send(self, node: Any, answer: Any, until: float) -> None:
        """Send the reply, through outages of the network, as long as the cloud waits for it."""
        pause = 0.2
        while not self.stopping.is_set():
            try:
                wire.push([answer], lambda p, t: self._register(node, p, t), lambda *a: self._put(node, answer, *a))
                return
            except UnreachableError as e:
                if time.time() > until:
                    log.warning("reply dropped, its deadline passed: %s", e)
                    return
                self.stopping.wait(pause)
                pause = min(3.0, 2 * pause)
            except RefusedError:
                raise
            except CoterieError as e:
                log.warning("reply not taken: %s", e)
                return

    def _register(self, node: Any, protos: list[Any], trees: list[Any]) -> tuple[Any, str]:
        from flwr.proto.fleet_pb2 import PushMessagesRequest

        request = PushMessagesRequest(
            node=node, messages_list=protos, message_object_trees=trees, clientapp_runtime_list=[0.0]
        )
        found = call(self._client.PushMessages, request)
        return found.objects_to_push, found.session_id

    def _put(self, node: Any, answer: Any, session: str, key: str, raw: bytes) -> bool:
        from flwr.proto.message_pb2 import PushObjectRequest

        request = PushObjectRequest(
            node=node, run_id=answer.metadata.run_id, object_id=key, object_content=raw, session_id=session
        )
        return bool(call(self._client.PushObject, request).stored)

    def _object(self, node: Any, run: int, key: str) -> bytes | None:
        from flwr.proto.message_pb2 import PullObjectRequest

        found = call(self._client.PullObject, PullObjectRequest(node=node, run_id=run, object_id=key))
        if not found.object_found:
            raise CoterieError("a part of the message is gone")
        return found.object_content if found.object_available else None


def main() -> None:
    """A device whose answering function is made by `--handler module:function` from `--options` (JSON)."""
    import argparse
    import importlib
    import json
    import signal
    import sys

    parser = argparse.ArgumentParser(prog="coterie device")
    for name in ("superlink", "ca", "key", "handler"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--largest", type=int, default=wire.LARGEST)
    parser.add_argument("--patience", type=float, default=30.0)
    args = parser.parse_args()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    module, _, function = args.handler.partition(":")
    handle = getattr(importlib.import_module(module), function)(**json.loads(args.options))
    device = Device(args.superlink, Path(args.ca), Path(args.key), handle, largest=args.largest, patience=args.patience)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: device.stopping.set())
    try:
        device.run()
    except CoterieError as e:
        log.error("%s", e)
        sys.exit(2)


if __name__ == "__main__":
    main()
