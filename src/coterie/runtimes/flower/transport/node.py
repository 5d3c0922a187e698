"""A node's end of the wire, for a device as for an edge: one process that answers messages with one function.

A stock SuperNode of Flower 1.41 asks for messages every 3 s, downloads the app (Python code) that the cloud names, and
runs it in a new process for every message. Here the node speaks Flower's Fleet interface itself, with Flower's own
client and node keys: it takes bytes and never code; it stays alive between messages, so data are loaded once; and it
asks at once after an answer, then less and less often. To a SuperLink it is a node like any other.
"""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from coterie.errors import CoterieError
from coterie.runtimes.flower.certs import load_key
from coterie.runtimes.flower.transport import flower_api as fl
from coterie.runtimes.flower.transport import wire
from coterie.runtimes.flower.transport.base import (
    LARGEST,
    Answering,
    Bell,
    RefusedError,
    UnreachableError,
    UntrustedError,
    lock_key,
)
from coterie.runtimes.flower.transport.http import Objects, call, client

HEARTBEAT = 10  # seconds, the least Flower allows; a node is taken for gone after two missed
log = logging.getLogger("coterie.device")


@dataclass
class FlowerNode:
    """Answers messages until stopped; survives restarts of the cloud and of the network."""

    address: str  # HOST:PORT of the SuperLink
    ca: Path
    key: Path
    handle: Answering
    largest: int = LARGEST  # bytes of one download
    patience: float = 30.0  # seconds a refused key is tried: not yet registered, or its last process died just now
    stopping: Bell = field(default_factory=Bell)
    connected: threading.Event = field(default_factory=threading.Event)
    quick: float = 0.1  # seconds between questions right after an answer,
    slow: float = 2.0  # and at most
    _node: int | None = None  # Flower's id of this node, once known
    _last: tuple[str, Any] = "", None  # ticket and content of the latest reply: no question is worked on twice

    def run(self) -> None:
        """Blocks until `stopping` is set; raises CoterieError if the SuperLink refuses the key.

        A server that is not trusted is tried again: its certificate may be renewed, or the file `ca` be replaced."""
        self._private = load_key(self.key)
        self._client = self._connect()
        memory = lock_key(
            self.key
        )  # it also remembers the node id; without it a restart after a crash takes up to 20 s
        refused_since: float | None = None
        once, pause, untrusted = False, 0.2, ""
        try:
            while not self.stopping.is_set():
                try:
                    node = self._activate(memory)
                    log.info("connected to %s as node %s", self.address, node.node_id)
                    refused_since, once, pause, untrusted = None, True, 0.2, ""
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
                except UntrustedError as e:
                    if str(e) != untrusted:
                        log.warning("%s; trying again, with what %s then holds", e, self.ca)
                    untrusted = str(e)
                    self._reconnect()
                except UnreachableError as e:
                    if not self.stopping.expected:
                        log.warning("%s; trying again", e)
                self.connected.clear()
                self.stopping.wait(pause)
                pause = min(3.0, 1.5 * pause)
        finally:
            self._client.close()
            if memory is not None:
                memory.close()

    def _connect(self) -> Any:
        key = self._private
        signed = fl.NodeAuthHttpInterceptor(key, key.public_key())
        return client(fl.FleetHttpClient, self.address, self.ca, "SuperNode", [signed])

    def _reconnect(self) -> None:
        """With the authority's certificate that is in the file now."""
        with contextlib.suppress(CoterieError):  # it is being replaced just now
            fresh = self._connect()
            self._client.close()
            self._client = fresh

    def _activate(self, memory: TextIO | None) -> Any:
        pem = fl.public_key_to_bytes(self._private.public_key())
        request = fl.fleet.ActivateNodeRequest(public_key=pem, heartbeat_interval=HEARTBEAT)
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
                call(self._client.DeactivateNode, fl.fleet.DeactivateNodeRequest(node_id=self._node))
            node = call(self._client.ActivateNode, request).node_id
        if node != self._node and memory is not None:
            memory.truncate(0)
            memory.write(str(node))
            memory.flush()
        self._node = node
        return fl.NodeId(node_id=node)

    def _answer(self, node: Any) -> None:
        """The loop of one connection: ask, work, reply; a second thread says every few seconds that we live."""
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(node, over), name="heartbeat", daemon=True)
        beat.start()
        pause = self.quick
        try:
            while not self.stopping.is_set():
                asked = self._client.meter.bytes
                # if this fails a message may be lost with it: we activate anew, the cloud sees that and sends it again
                found = call(self._client.PullMessages, fl.fleet.PullMessagesRequest(node=node))
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
                    call(self._client.DeactivateNode, fl.fleet.DeactivateNodeRequest(node_id=node.node_id))

    def _beat(self, node: Any, over: threading.Event) -> None:
        while not over.wait(0.6 * HEARTBEAT):
            try:
                request = fl.SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
                if not call(self._client.SendNodeHeartbeat, request).success:
                    over.set()
            except RefusedError:
                over.set()
            except CoterieError as e:
                log.debug("no heartbeat: %s", e)

    def _one(self, node: Any, proto: Any, tree: Any, asked: int) -> None:
        """One message: fetch it, work on it, send the reply (or the reason why there is none)."""
        question = fl.message_from_proto(proto)
        objects = Objects(self._client, node.node_id, question.metadata.run_id)
        head: wire.Head | None = None
        try:
            inflated = wire.pull(tree, objects.get, self.largest)
            objects.confirm(question.metadata.message_id)
            head, parts = wire.opened(inflated.content)
            del inflated
            if self._last[0] != head.ticket:
                taken = self._client.meter.bytes - asked
                self._last = "", None  # makes room before the next reply is made
                reply = self.handle(head.kind, head.round, parts.get("shared"), parts["own"])
                answered = wire.Head(head.kind, head.round, head.ticket, taken)
                self._last = head.ticket, wire.content(answered, {"own": wire.part(reply)})
                del reply
            del parts
            answer = fl.Message(self._last[1], reply_to=question)
        except (UnreachableError, RefusedError):
            raise
        except Exception as e:
            reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
            trace = None if isinstance(e, CoterieError) else e
            log.error("round %s not answered: %s", head.round if head else "?", reason, exc_info=trace)
            answer = fl.Message(fl.Error(fl.ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason[:2000]), reply_to=question)
        self._send(node, answer, objects, question.metadata.created_at + question.metadata.ttl)

    def _send(self, node: Any, answer: Any, objects: Objects, until: float) -> None:
        """Send the reply, through outages of the network, as long as the cloud waits for it."""
        pause = 0.2
        while not self.stopping.is_set():
            try:
                wire.push([answer], lambda p, t: self._announce(node, p, t), objects.put)
                return
            except UntrustedError:
                raise  # connected anew, we are asked again and have the answer ready
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

    def _announce(self, node: Any, protos: list[Any], trees: list[Any]) -> tuple[Any, str]:
        request = fl.fleet.PushMessagesRequest(
            node=node, messages_list=protos, message_object_trees=trees, clientapp_runtime_list=[0.0]
        )
        found = call(self._client.PushMessages, request)
        return found.objects_to_push, found.session_id
