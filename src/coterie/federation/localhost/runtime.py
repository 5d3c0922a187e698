"""`--runtime federation`: a run of this program whose clients are device processes on this machine.

All files of the federation are in the folder federation/ of the run: certificates, logs, and the devices' states.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.federation.cloud.admission import AdmissionRules
from coterie.federation.cloud.program import CloudSettings, check_possible, open_cloud, over_grpc
from coterie.federation.cloud.runtime import FederationRuntime
from coterie.federation.cloud.waiting import WaitingRules
from coterie.federation.localhost.nodes import SupervisedNodes
from coterie.storage.atomic import write_atomic

_PAUSE = 600.0  # longest pause, in seconds, of a run whose devices do not answer
_DEADLINE = 86_400.0  # seconds for the answers of a round; devices that end are started again


@contextmanager
def open_localhost(session: Session, folder: Path, stopped: Callable[[], bool]) -> Iterator[FederationRuntime]:
    """Start a device process for every client, and yield the runtime that reaches them."""
    s = session.settings
    check_possible(s)
    for what, origin in session.objects.described().items():
        raise CoterieError(
            f"runtime = federation: device processes must find the {what} by name; it is a Python object ({origin})"
        )
    if (folder / "cloud.json").is_file():
        raise CoterieError(f"{folder} is a federation between hosts; continue it with coterie serve --resume {folder}")
    clients = session.federation.clients
    home = localhost_folder(folder)
    home.mkdir(exist_ok=True, mode=0o700)
    nodes = SupervisedNodes(home, s.data, s.method, s.model, len(clients), 0, session.engine.data_dir)
    nodes.places = (session.engine.device or "cpu").split(",")
    nodes.certify()
    about = home / "run.json"
    if not about.is_file():
        write_atomic(about, json.dumps({"run": secrets.token_hex(16)}).encode())
    run = str(json.loads(about.read_text())["run"])
    cloud = CloudSettings(str(nodes.certs("cloud").root), "127.0.0.1", nodes.ports["cloud"], len(clients), run=run)

    def interrupted() -> bool:
        if nodes.broken:
            raise CoterieError(nodes.broken)
        return stopped()

    waiting = WaitingRules(1, _DEADLINE, interrupted, frozenset(clients), _PAUSE)
    admission = AdmissionRules(norm_bound=0.0, quarantine_after=0)  # the devices are this program's own
    with open_cloud(session, cloud, home, waiting, admission, over_grpc(cloud)) as runtime, nodes:
        yield runtime


def localhost_folder(run: Path) -> Path:
    """Return the folder of a run's device processes: federation/, or flower/ in runs of version 0.1."""
    old = run / "flower"
    return old if old.is_dir() else run / "federation"
