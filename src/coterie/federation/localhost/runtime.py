"""`--runtime federation`: a run of this program whose clients are device processes on this machine.

Everything of the federation lies in the run's folder under flower/: certificates, logs, and the devices' states.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings, check_possible, open_cloud
from coterie.federation.cloud.runtime import FederationRuntime, WaitingRules
from coterie.federation.localhost.nodes import SupervisedNodes
from coterie.storage.atomic import write_atomic

WAIT = 600.0  # seconds that rounds are repeated in which no device answers
DAY = 86_400.0  # seconds; devices of this machine that die are started again, so nobody waits for nothing


@contextmanager
def open_localhost(session: Session, folder: Path, stopped: Callable[[], bool]) -> Iterator[FederationRuntime]:
    s = session.settings
    check_possible(s)
    for what, origin in session.objects.described().items():
        raise CoterieError(
            f"runtime = federation needs a {what} that device processes can import by name, not an object ({origin})"
        )
    if (folder / "cloud.json").is_file():
        raise CoterieError(f"{folder} is a federation between hosts; continue it with coterie serve --resume {folder}")
    clients = session.federation.clients
    home = folder / "flower"
    home.mkdir(exist_ok=True, mode=0o700)
    parties = SupervisedNodes(home, s.data, s.method, s.model, len(clients), 0, session.engine.data_dir)
    parties.certify()
    about = home / "run.json"
    if not about.is_file():
        write_atomic(about, json.dumps({"run": secrets.token_hex(16)}).encode())
    run = str(json.loads(about.read_text())["run"])
    cloud = CloudSettings(str(parties.certs("cloud").root), "127.0.0.1", parties.ports["cloud"], len(clients), run=run)

    def over() -> bool:
        if parties.broken:
            raise CoterieError(parties.broken)
        return stopped()

    patience = WaitingRules(1, DAY, over, frozenset(clients), WAIT, norm_bound=0.0, quarantine_after=0)
    with open_cloud(session, cloud, home, patience) as runtime, parties:
        yield runtime


__all__ = ["open_localhost"]
