"""The cloud's program: runs a federation in a folder, and resumes it after a crash."""

import json
import logging
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coterie.config import Engine, RunSettings
from coterie.core.metrics import check_counts_suffice
from coterie.data.federation import Federation
from coterie.data.table import TableEncoding
from coterie.engine.loop import Progress
from coterie.engine.session import Callbacks, Session, bind, execute, prepare
from coterie.errors import CoterieError
from coterie.federation.cloud.admission import AdmissionRules, KnownSamples
from coterie.federation.cloud.liveness import Liveness
from coterie.federation.cloud.runtime import FederationRuntime
from coterie.federation.cloud.status_file import StatusFile
from coterie.federation.cloud.waiting import WaitingRules
from coterie.federation.device_data import DeviceFederation, example_dataset
from coterie.federation.device_sum import secure_sum_of
from coterie.federation.identity.authority import Certs
from coterie.federation.identity.roles import NodeRole
from coterie.federation.protocol.plan import FederationPlan
from coterie.federation.transport import NodeLink, listening
from coterie.methods import build_method
from coterie.runtimes.base import Runtime
from coterie.storage.atomic import write_atomic

# opens the connections to the nodes, and returns them with a function that reads the roles of all registered nodes
Connect = Callable[[Liveness], AbstractContextManager[tuple[NodeLink, Callable[[], Mapping[str, NodeRole]]]]]
log = logging.getLogger("coterie.cloud")


@dataclass(frozen=True)
class CloudSettings:
    """How the cloud is reached and how long it waits; cloud.json keeps them for a resumed run."""

    certs: str
    host: str = "0.0.0.0"
    port: int = 9092
    min_clients: int = 2
    deadline: float = 600.0  # seconds for the answers of a round
    shape: tuple[int, ...] = ()  # shape of the items that devices have; empty: named data
    classes: int = 0  # number of classes of the devices' data, or of numbers per target
    class_names: tuple[str, ...] = ()  # names of the classes; empty: they are numbered
    table: str = ""  # common encoding of the devices' tables, as JSON; empty: no tables
    data_dir: str | None = None
    run: str = ""
    keep: int = 10  # number of checkpoints
    patience: float | None = 3600.0  # longest pause of a run below its quorum, in seconds; None: no limit
    norm_bound: float = 50.0  # largest upload, as a multiple of the usual size; 0: no bound
    quarantine_after: int = 3  # refused answers of one sender; 0: never


def open_session(settings: RunSettings, cloud: CloudSettings) -> Session:
    """Build the method on named data, or on data that only the devices have."""
    check_possible(settings)
    engine = Engine(runtime="federation", data_dir=Path(cloud.data_dir) if cloud.data_dir else None, keep=cloud.keep)
    if not cloud.shape and not cloud.table:
        session = prepare(settings, engine)
        _check_quorum(cloud.min_clients, len(session.method.ctx.clients))
        return session
    task, n = settings.task or "classification", cloud.classes
    classes = cloud.class_names or tuple(map(str, range(n)))
    names = classes if task in ("classification", "binary", "multilabel") else ()
    targets = 2 if task == "survival" else max(1, n)
    table = TableEncoding.model_validate_json(cloud.table) if cloud.table else None
    shape, kind = (cloud.shape, "float32") if table is None else ((len(table.feature_names),), "float64")
    example = example_dataset(shape, names, kind, None, None, None, task, targets, table)
    places = settings.federation.clients or cloud.min_clients
    _check_quorum(cloud.min_clients, places)
    federation = DeviceFederation(example, settings.federation, settings.seed, places)
    settings = settings.model_copy(update={"data": example.name})
    return bind(settings, engine, build_method(settings.method, settings.settings), federation)


def _check_quorum(min_clients: int, places: int) -> None:
    if min_clients > places:
        raise CoterieError(
            f"min_clients = {min_clients} can never be reached: there are {places} places (clients = {places})"
        )


def check_possible(settings: RunSettings) -> None:
    """Raise CoterieError for settings that a federation does not have."""
    if settings.warm_start is not None:
        raise CoterieError("warm_start is for simulations: devices of a federation draw the first values from the seed")
    if settings.weights is not None:
        raise CoterieError(
            "weights names a file of this host, which devices of a federation do not have; take a model of a package "
            "that carries its weights (model = package.module:factory)"
        )
    for name, why in (
        ("official", "sends personal models to the cloud"), ("log_updates", "sends updates to the cloud"),
    ):  # fmt: skip
        if getattr(settings, name):
            raise CoterieError(f"{name} = true {why}; the devices of a federation do not send them")
    if settings.attack is not None:
        raise CoterieError("attack is for simulations: it makes some of the clients lie")
    check_counts_suffice(settings.metrics)


def over_grpc(cloud: CloudSettings) -> Connect:
    """Return a function that starts the gRPC server; raise CoterieError if its certificates cannot be used."""
    certs = Certs(Path(cloud.certs))
    certs.check()

    @contextmanager
    def connect(liveness: Liveness) -> Iterator[tuple[NodeLink, Callable[[], Mapping[str, NodeRole]]]]:
        with listening(certs, cloud.host, cloud.port, liveness.observe_waiting) as link:
            yield link, certs.roles

    return connect


def known_samples(federation: Federation) -> KnownSamples | None:
    """Return the numbers of training samples that the partition of named data gives; None for devices' own data."""
    if not federation.knows_all_clients:
        return None
    return lambda client, round: federation.size(client, "train", round)


@contextmanager
def open_cloud(
    session: Session,
    cloud: CloudSettings,
    folder: Path,
    waiting: WaitingRules,
    admission: AdmissionRules,
    connect: Connect,
    status: StatusFile | None = None,
) -> Iterator[FederationRuntime]:
    """Connect to the nodes and yield the runtime that reaches devices through them."""
    liveness = Liveness() if status is None else Liveness(status.publish)
    with connect(liveness) as (link, roles):
        plan = FederationPlan.of(session, cloud.run)
        secure, ca = secure_sum_of(session), Certs(Path(cloud.certs)).ca
        runtime = FederationRuntime(
            session.method,
            link,
            plan,
            roles,
            folder,
            waiting,
            admission,
            liveness,
            known_samples(session.federation),
            secure,
            ca if secure else None,
        )
        if status is not None:
            status.watch(runtime)
        try:
            yield runtime
        finally:
            runtime.close()


def run_cloud(
    session: Session,
    cloud: CloudSettings,
    out: Path,
    *,
    resume: bool = False,
    tell: Callable[[Progress], None] = lambda p: None,
    stopped: Callable[[], bool] = lambda: False,
    from_round: int | None = None,
    connect: Connect | None = None,  # None: over gRPC
) -> bool:
    """Run the federation in the folder `out`. Return True when it has finished, False when it was stopped."""
    connect = connect or over_grpc(cloud)
    if not resume:
        cloud = replace(cloud, run=secrets.token_hex(16))
        write_atomic(out / "cloud.json", json.dumps(asdict(cloud), indent=2).encode())
    status = StatusFile(out / "status.json", session)

    def opened(session: Session, folder: Path, stopped: Callable[[], bool]) -> AbstractContextManager[Runtime]:
        seconds = math.inf if cloud.patience is None else cloud.patience
        waiting = WaitingRules(cloud.min_clients, cloud.deadline, stopped, seconds=seconds)
        admission = AdmissionRules(cloud.norm_bound, cloud.quarantine_after)
        return open_cloud(session, cloud, folder, waiting, admission, connect, status)

    def show(progress: Progress) -> None:
        status.progress(progress)
        tell(progress)

    state, reason = "failed", "the cloud's program was ended"
    try:
        ended = execute(
            session,
            out,
            Callbacks(on_round=show, on_warning=log.warning, should_stop=stopped),
            resume=resume,
            from_round=from_round,
            opener=opened,
        )
        state, reason = "ended" if ended else "stopped", ""
    except CoterieError as e:
        reason = str(e)
        if e.__cause__ is not None:
            _log_traceback(out, e)
        raise
    except Exception as e:
        path = _log_traceback(out, e)
        reason = f"the run failed: {type(e).__name__}: {e}; the traceback is in {path}"
        raise CoterieError(reason) from e
    finally:
        with suppress(OSError):  # the last file that could be written stays
            status.end(state, reason)
    return ended


def _log_traceback(out: Path, error: Exception) -> Path:
    """Append the traceback to failure.log, so that the screen shows one sentence only."""
    path = out / "failure.log"
    with suppress(OSError), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as f:
        f.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + "".join(traceback.format_exception(error)) + "\n")
    return path


def earlier_run(out: Path, settings: RunSettings, cloud: CloudSettings) -> tuple[CloudSettings, bool]:
    """Return the settings of the cloud, and True if the folder has a federation with the same settings to continue.

    Raises CoterieError if the folder has a federation with different settings.
    """
    if not ((out / "cloud.json").exists() and (out / "settings.json").exists()):
        return cloud, False
    earlier_settings, earlier = reopen(out)
    if earlier_settings != settings:
        raise CoterieError(f"{out} contains a federation with different settings; choose a different folder")
    return replace(cloud, run=earlier.run), True


def reopen(out: Path) -> tuple[RunSettings, CloudSettings]:
    """Read the settings of a federation from its folder."""
    try:
        about = json.loads((out / "cloud.json").read_text())
        settings = json.loads((out / "settings.json").read_text())["settings"]
        return RunSettings(**settings), CloudSettings(
            **{**about, "shape": tuple(about["shape"]), "class_names": tuple(about.get("class_names", ()))}
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise CoterieError(f"{out} holds no federation (cloud.json or settings.json is missing or damaged)") from None
