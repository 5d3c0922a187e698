"""The same answering function behind a stock SuperNode of Flower, for hosts that already run one.

    flower-supernode --superlink HOST:PORT --root-certificates ca.crt --auth-supernode-private-key node.key \\
        --node-config 'handler="package.module:function" options="{...}"'

Everything works as with our own devices, but slower: Flower starts a Python process for every message, and a stock
SuperNode runs whatever app the cloud names. A payload is held about four times.
"""

import importlib
import json
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.errors import CoterieError
from coterie.runtimes.flower.transport import wire

app = ClientApp()
server = ServerApp()


def answering(about: Any) -> Any:
    """The function a node's configuration names, made with its options."""
    module, _, function = str(about.get("handler", "")).partition(":")
    if not function:
        raise CoterieError('node-config must name a handler, as in handler="package.module:function"')
    return getattr(importlib.import_module(module), function)(**json.loads(str(about.get("options", "{}"))))


@app.query()
def answer(message: Message, context: Context) -> Message:
    head, value, _ = wire.opened(message.content)
    reply = answering(context.node_config)(head.kind, head.round, value)
    answered = wire.Head(head.kind, head.round, head.ticket, 0)  # what went over the link is not seen from here
    return Message(wire.content(answered, {"value": wire.part(reply)}), reply_to=message)


@server.main()
def refuse(grid: Grid, context: Context) -> None:
    raise CoterieError("a Coterie run is driven by `coterie serve`, not by `flwr run`")
