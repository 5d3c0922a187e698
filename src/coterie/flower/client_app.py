"""The ClientApp: answers the messages of the cloud as one client, with the data and the state folder of its node.

The operator of a SuperNode sets these with `--node-config`:

    coterie-state="/var/lib/coterie" coterie-data="/data/own.npz" coterie-allow="/etc/coterie/allow.toml"

A node of Flower's simulation has only a partition-id. It is that client of the run's named data, and its state is in
the folder nodes/ of the run.
"""

import hashlib
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from coterie.data.timeline import parse_timeline, read_timeline
from coterie.errors import CoterieError, unknown
from coterie.federation.device import DeviceHandler
from coterie.federation.device_states import KEEP_STATES
from coterie.federation.line_log import log_lines
from coterie.federation.localhost.processes import owner_only
from coterie.federation.policy.allow import Allow
from coterie.federation.transport import NoPlanError
from coterie.flower.records import make_records, read_records
from coterie.flower.run_config import run_folder
from coterie.storage.atomic import write_atomic
from coterie.train.devices import one_device

NODE_KEYS = ("state", "data", "client", "name", "allow", "data-dir", "keep", "timeline", "device")
_PREFIX = "coterie-"
log = logging.getLogger("coterie.device")


def answer(message: Any, context: Any) -> Any:
    """Answer a message; an error becomes an answer with its reason."""
    log_lines("coterie")
    head: dict[str, Any] = {}
    try:
        head, payloads = read_records(message.content)
        node = node_settings(context.node_config, context.run_config)
        state = Path(node["state"])
        owner_only(state)
        if head["kind"] == "name":
            records = make_records({**head, **identify(state, node.get("name"))})
        else:
            handler = open_handler(node, message.metadata.ttl)
            try:
                made = handler.handle(head["kind"], head["round"], payloads.get("shared"), payloads["own"])
            finally:
                handler.close()
            records = make_records(head, answer=made)
    except Exception as e:
        if not isinstance(e, CoterieError):
            log.exception("the message was not answered")
        reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
        log.warning("%s", reason)
        records = make_records({**head, "error": reason, "no_plan": isinstance(e, NoPlanError)})
    return Message(records, reply_to=message)


def node_settings(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of this node; raise CoterieError if the folder of its state is not named."""
    node = {k.removeprefix(_PREFIX): v for k, v in node_config.items() if k.startswith(_PREFIX)}
    for key in node:
        if key not in NODE_KEYS:
            raise unknown("key of the node's configuration", _PREFIX + key, [_PREFIX + k for k in NODE_KEYS])
    if not node and "partition-id" in node_config:
        client = int(node_config["partition-id"])
        state = run_folder(run_config).resolve() / "nodes" / str(client)
        node = {"state": str(state), "client": client, "name": f"client-{client}"}
        if data_dir := run_config.get("cloud.data-dir"):
            node["data-dir"] = data_dir
    if "client" in node:
        node.setdefault("data", run_config.get("data", "digits"))
    for key, what in (("state", "a folder for the private state"), ("data", "the data of this node")):
        if key not in node:
            raise CoterieError(f"""the node's configuration must name {what}: --node-config '{_PREFIX}{key}="..."'""")
    return node


def identify(state: Path, name: str | None) -> dict[str, str]:
    """Return the name of this node and the secret in its state folder, which is made at the first call."""
    path = state / "node.secret"
    if not path.is_file():
        write_atomic(path, secrets.token_hex(16).encode(), mode=0o600)
    secret = path.read_text()
    return {"name": name or f"node-{hashlib.sha256(secret.encode()).hexdigest()[:8]}", "secret": secret}


def open_handler(node: Mapping[str, Any], seconds: float) -> DeviceHandler:
    """Return the handler of a node's messages; wait for an earlier message that is still being answered."""
    return DeviceHandler(
        str(node["data"]),
        Path(node["state"]),
        None if "client" not in node else int(node["client"]),
        Path(node["data-dir"]) if "data-dir" in node else None,
        Allow.read(Path(node["allow"])) if "allow" in node else Allow(),
        int(node.get("keep", KEEP_STATES)),
        stay=True,
        peer="SuperLink",
        timeline=parse_timeline(read_timeline(node.get("timeline"))),
        lock_seconds=seconds,
        device=one_device(str(node.get("device", "cpu"))),
    )


client_app = ClientApp()
for register in (client_app.query, client_app.train, client_app.evaluate):
    register()(answer)
