"""The ServerApp: the cloud of a federation, which reaches its devices through Flower's Grid."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp import ServerApp

from coterie.errors import CoterieError
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.program import earlier_run, open_session, run_cloud
from coterie.federation.identity.roles import NodeRole
from coterie.federation.line_log import log_lines, log_progress
from coterie.federation.localhost.processes import owner_only
from coterie.federation.transport import NodeLink
from coterie.flower.link import FlowerLink, NodeNames
from coterie.flower.run_config import read_config, run_folder

log = logging.getLogger("coterie.cloud")


def run_server(grid: Any, context: Any) -> None:
    """Run the federation, or continue the one in its folder."""
    log_lines("coterie")
    chosen, cloud = read_config(context.run_config)
    if chosen.secure is not None:
        raise CoterieError(
            f"secure = {chosen.secure} needs devices with certificates, which Flower's nodes do not have"
        )
    folder = run_folder(context.run_config)
    cloud, again = earlier_run(folder, chosen, cloud)
    owner_only(folder)

    @contextmanager
    def connect(liveness: Liveness) -> Iterator[tuple[NodeLink, Callable[[], Mapping[str, NodeRole]]]]:
        yield FlowerLink(grid, NodeNames(folder / "nodes.json"), liveness.observe_waiting), dict

    run_cloud(open_session(chosen, cloud), cloud, folder, resume=again, tell=log_progress, connect=connect)
    log.info("the run is in %s", folder.resolve())


server_app = ServerApp()
server_app.main()(run_server)
