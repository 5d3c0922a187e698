"""A device of a federation: answers the cloud with its own data; its private state stays here.

An answer never holds state. It holds the method's upload, its numbers, and counts of predictions.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from coterie.core import tree as T
from coterie.core.context import ClientId, State
from coterie.core.edges import is_announced
from coterie.core.schema import NonFiniteError
from coterie.core.tree import Tree, value_bytes
from coterie.data.frames import TABLE_SUFFIXES, read_table
from coterie.data.sources import load_dataset
from coterie.data.table import ColumnStatistics
from coterie.data.target_types import with_task
from coterie.data.timeline import Change
from coterie.engine import codec
from coterie.engine.edge_steps import announces
from coterie.engine.messages import (
    Job,
    Remote,
    Score,
    ScoreRequest,
    SendAnswer,
    SendRequest,
    TrainAnswer,
    TrainRequest,
    check_message,
)
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.export.personal_model import as_module, describe_model, write_model
from coterie.federation.device_data import describe_table
from coterie.federation.device_states import KEEP_STATES, DeviceStates, lock_folder
from coterie.federation.device_sum import SumMember, secure_sum_of
from coterie.federation.identity.signatures import NodeFiles
from coterie.federation.payload_kinds import of_answer, of_request
from coterie.federation.policy.allow import Allow, ByteBudget
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog
from coterie.federation.protocol.messages import (
    Answer,
    Common,
    DeviceJob,
    Hello,
    PlanText,
    RunOver,
    SumAnswer,
    SumRequest,
    TableAnswer,
    TableQuestion,
    with_common,
)
from coterie.federation.protocol.plan import RUN_ID, FederationPlan, settings_of_cloud
from coterie.federation.transport import MAX_PAYLOAD, NoPlanError
from coterie.federation.validation import check_request
from coterie.privacy.budget import LEDGER, append_line, count_lines
from coterie.privacy.secure_sum.messages import MaskedWords
from coterie.storage.atomic import write_atomic
from coterie.train.clients import Clients
from coterie.train.devices import CPU

_HEADER_BYTES = 2**20  # bytes of a message in addition to its payload
_MAX_RUNS = 100  # runs whose states a device keeps
_KINDS: dict[type, str] = {TrainRequest: "train", ScoreRequest: "score", SendRequest: "send", SumRequest: "sum"}
log = logging.getLogger("coterie.device")


@dataclass(frozen=True)
class HeldUpload:
    """The part of an upload that a device keeps until it is called; a new round replaces it."""

    run: str
    client: ClientId
    round: int
    tree: Tree
    samples: int


@dataclass
class DeviceHandler:
    """Answers messages as one client; the transport calls `handle`."""

    data: str  # a file, a folder or module:function; with `client` also the name of data that all hosts can load
    state: Path  # folder of the private states
    client: ClientId | None = None  # client number to ask for; None: any
    data_dir: Path | None = None
    allow: Allow = field(default_factory=Allow)
    keep: int = KEEP_STATES  # number of versions of the state
    stay: bool = False  # wait for the next run when one has ended
    peer: str = "cloud"  # address of the cloud or the edge
    timeline: str | tuple[Change, ...] | None = None  # changes of the device's own data during a run
    files: NodeFiles | None = None  # the device's certificate, which secure sums need
    ended: Callable[[], None] = lambda: None  # called when a run has ended, unless `stay` is set
    lock_seconds: float = 0.0  # time to wait for a different process that uses the folder
    device: torch.device = CPU  # where the client trains
    _plan: FederationPlan | None = None
    _session: Session | None = field(default=None, repr=False)
    _clients: Clients | None = field(default=None, repr=False)
    _held: HeldUpload | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._lock = lock_folder(self.state, self.lock_seconds)
        self._spent = ByteBudget(self.allow, self.state / "bytes.json")
        self._audit = AuditLog(self.state / AUDIT_FILE)
        self._sums = SumMember(self.state, self.files)
        self._offered = ""  # text of the last plan
        self._refusal = ""  # run and reason of the last refused plan, which the cloud offers again and again

    def close(self) -> None:
        """Release the folder of states for other processes."""
        self._lock.close()
        self._audit.close()

    def use_certificate(self, files: NodeFiles) -> None:
        """Sign with the key of this certificate in secure sums."""
        self.files = self._sums.files = files

    def handle(self, kind: str, round: int, shared: memoryview | None, own: memoryview) -> memoryview:
        """Answer a message of the cloud; the transport calls this."""
        message = codec.unpack_foreign(own)
        if kind == "columns":
            return codec.pack(self.columns(check_message(message, TableQuestion)))
        if kind == "hello":
            return codec.pack(self.hello(check_message(message, PlanText).text))
        if kind == "over":
            return codec.pack(self.over(check_message(message, RunOver)))
        common = Common() if shared is None else check_message(codec.unpack_foreign(shared), Common)
        return codec.pack(self.answer(kind, round, with_common(common, check_message(message, DeviceJob))))

    @contextmanager
    def _noting_refusal(self, run: str, round: int, kind: str) -> Iterator[None]:
        """Write an error that is raised inside to the audit log: it is all that leaves the device."""
        try:
            yield
        except Exception as e:
            reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
            if kind != "hello" or self._refusal != run + reason:
                self._audit.write(AuditLine(run, round, kind, "out", self.peer, refused=reason))
            if kind == "hello":
                self._refusal = run + reason
            raise

    def answer(self, kind: str, round: int, job: DeviceJob) -> Answer:
        """Train or score as a job asks; raises CoterieError if the job or the answer is not allowed."""
        with self._noting_refusal(job.run, round, kind):
            if kind != _KINDS[type(job.request)]:
                raise CoterieError(f'a device cannot answer "{kind}"')
            session = self.session(job.run)
            arrived = of_request(session.method, job.request)
            self._audit.write(AuditLine(job.run, round, kind, "in", self.peer, arrived))
            check_request(session.method, job.request, round)
            if not job.base < round <= session.method.ctx.planned_rounds + 1:
                raise CoterieError(f"round {round} is over or never comes (my state: {job.base})")
            samples = len(session.federation.data(job.request.client, job.request.data_round).train)
            self.allow.check_request(session.method, job.request, samples)
            if isinstance(job.request, TrainRequest):
                self.allow.reveal.check_download(session.method, job.request)
            self._spent.count("down", job.run, round, sum(arrived.values()))
            self._take_seat(job.run, job.request.client)
            if isinstance(job.request, SumRequest):
                answer: Answer = self._sums.answer(session, job)
            else:
                answer = self._held_part(job) if isinstance(job.request, SendRequest) else self._compute(session, job)
            self._release(session, round, kind, job.run, answer)
            return answer

    def _release(self, session: Session, round: int, kind: str, run: str, answer: Answer) -> None:
        """Check that an answer may leave the device, count its bytes, and write it to the audit log."""
        upload = answer.upload if isinstance(answer, TrainAnswer | SendAnswer) else {}
        masked = isinstance(answer, SumAnswer) and isinstance(answer.give, MaskedWords)
        sizes = of_answer(session.method, answer)
        up = session.method.schema("up")
        self.allow.check_leaving(up, up.entries if masked else upload, sizes)
        self._spent.count("up", run, round, sum(sizes.values()))
        entries = {name: value_bytes(v.numel(), v.dtype) for name, v in upload.items()}
        self._audit.write(AuditLine(run, round, kind, "out", self.peer, sizes, entries))

    # ---- columns of a table ------------------------------------------------------------------------------------------
    def columns(self, question: TableQuestion) -> TableAnswer:
        """Return statistics of this device's table, which must be allowed to leave."""
        with self._noting_refusal("", 0, "columns"):
            settings = settings_of_cloud(question.settings)
            self._audit.write(AuditLine("", 0, "columns", "in", self.peer, about=settings.columns.model_dump()))
            columns = settings.columns.model_copy(update={"one_client": True})
            data = with_task(load_dataset(self.data, self.data_dir, None, settings.task, columns), settings.task)
            answer = describe_table(data, settings.federation, settings.seed)
            self.allow.check_statistics([*answer.columns, *settings.columns.target_names])
            sizes = {f"column.{name}": _statistics_bytes(s) for name, s in answer.columns.items()}
            self._spent.count("up", "", 0, sum(sizes.values()))
            left = {name: asdict(s) for name, s in answer.columns.items()} | {"classes": answer.classes}
            self._audit.write(
                AuditLine("", 0, "columns", "out", self.peer, {"columns": sum(sizes.values())}, sizes, left)
            )
            return answer

    # ---- runs --------------------------------------------------------------------------------------------------------
    def hello(self, text: str) -> Hello:
        """Accept the plan of a run, and return this device's client number and number of samples."""
        with self._noting_refusal("", 0, "hello"):
            plan = FederationPlan.read(text)
        with self._noting_refusal(plan.run, 0, "hello"):
            if self._offered != text:
                self._audit.write(AuditLine(plan.run, 0, "hello", "in", self.peer, about=plan.summary))
                self._offered = text
            before = self._plan
            session = self._open(plan)
            if before is not None and before.run != plan.run:
                log.info("run %s was replaced by run %s", before.run[:8], plan.run[:8])
            self._refusal = ""
            self._make_room(plan.run)
            write_atomic(self.state / plan.run / "plan.json", text.encode())
            seat = self._seat(plan.run)
            log.info("run %s: %s, %s rounds", plan.run[:8], session.method.card.title, session.settings.rounds)
            sizes = {t: len(session.federation.data(seat or 0, t).train) for t in session.federation.timeline.rounds}
            answer = Hello(seat, sizes.pop(1), sizes)
            self._audit.write(AuditLine(plan.run, 0, "hello", "out", self.peer, about=vars(answer)))
            return answer

    def _make_room(self, run: str) -> None:
        """Delete plans of other runs in which this device never took part; raise CoterieError if too many are left."""
        others = [p.parent for p in self.state.glob("*/plan.json") if p.parent.name != run]
        for folder in [f for f in others if not (f / "client.json").exists() and not any(f.glob("[0-9]*"))]:
            (folder / "plan.json").unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                folder.rmdir()
            others.remove(folder)
        if len(others) >= _MAX_RUNS:
            raise CoterieError(f"{self.state} has the states of {len(others)} runs; remove those of old runs")

    def over(self, message: RunOver) -> RunOver:
        """Note that the run has ended, as the cloud says."""
        self.session(message.run)  # raises an error for a run that is not this device's
        self._audit.write(AuditLine(message.run, message.rounds, "over", "in", self.peer))
        model = self.state / message.run / "model.safetensors"
        where = f"; the personal model is {model}" if model.exists() else ""
        then = "waiting for the next run" if self.stay else "nothing more to do here"
        log.info("run %s has ended after %s rounds%s; %s", message.run[:8], message.rounds, where, then)
        if not self.stay:
            self.ended()
        return message

    def session(self, run: str) -> Session:
        """Return the session of a run; after a restart its stored plan is read and checked again."""
        if self._plan is None or self._plan.run != run or self._session is None:
            if not RUN_ID.fullmatch(run):
                raise CoterieError("the message names no run")
            path = self.state / run / "plan.json"
            if not path.is_file():
                raise NoPlanError
            return self._open(FederationPlan.read(path.read_text()))
        return self._session

    def _open(self, plan: FederationPlan) -> Session:
        if self._plan != plan or self._session is None:
            self._session, self._plan = (
                plan.session(self.data, self.client, self.data_dir, self.allow, self.timeline),
                plan,
            )
            self._clients = self._session.clients(deployed=True).on(self.device)
            for sentence in self._session.warnings():
                log.warning(sentence)
        return self._session

    def _seat(self, run: str) -> ClientId | None:
        """Return this device's client number in a run; None if no job has named it yet."""
        path = self.state / run / "client.json"
        if self.client is not None or not path.is_file():
            return self.client
        return int(json.loads(path.read_text())["client"])

    def _take_seat(self, run: str, client: ClientId) -> None:
        """Take the client number of the first job; refuse jobs for others, so that states are never mixed up."""
        seat = self._seat(run)
        if seat is None:
            write_atomic(self.state / run / "client.json", json.dumps({"client": client}).encode())
        elif seat != client:
            raise CoterieError(f"this device is client {seat} of the run, not {client}")

    # ---- work --------------------------------------------------------------------------------------------------------
    def _compute(self, session: Session, job: DeviceJob) -> Answer:
        request, clients = job.request, self._clients
        assert clients is not None
        states = DeviceStates(self.state / job.run / str(request.client), self.keep)
        assert not isinstance(request, SendRequest | SumRequest)
        local_job = Job(request, states.read(job.base))
        if isinstance(request, TrainRequest):
            self._spend_privacy(session, clients, states.folder, request)
            done = clients.train([local_job])[0]
            in_two_steps = announces(session.method)
            secure = request.round > 0 and secure_sum_of(session) is not None
            # otherwise the round excludes the client and says why
            with suppress(*() if in_two_steps or secure else (NonFiniteError,)):
                session.method.schema("up").check(done.answer.upload, "the upload made here")
            states.write(request.round, _in_memory(done.state), job.base)
            self._log_progress(
                session, f"round {request.round} of {session.settings.rounds}: trained", done.answer.after
            )
            if secure:
                return self._sums.hold(job.run, request, done.answer)
            return self._announced(job.run, done.answer, request.round) if in_two_steps else done.answer
        answer = clients.score([local_job])[0]
        self._write_model(session, job.run, local_job)
        what = f"after round {request.round - 1} of {session.settings.rounds}: personal model"
        self._log_progress(session, what, answer.scores.get("personal/test"))
        return answer

    def _spend_privacy(self, session: Session, clients: Clients, folder: Path, request: TrainRequest) -> None:
        """Write down what a round spends of this device's own budget; raise CoterieError if nothing is left."""
        samples = len(session.federation.data(request.client, request.data_round).train)
        noise = clients.noise_of(samples)
        if noise is None:
            return
        ledger = folder / LEDGER
        if why := noise.over(count_lines(ledger)):
            raise CoterieError(why)
        folder.mkdir(parents=True, exist_ok=True)
        append_line(ledger, {"round": request.round, "sigma": noise.sigma, "rate": noise.rate})

    def _announced(self, run: str, answer: TrainAnswer, round: int) -> TrainAnswer:
        """Return the answer with the announced entries; the rest of the upload stays here until it is called for."""
        rest = T.drop(answer.upload, is_announced)
        self._held = HeldUpload(run, answer.client, round, rest, answer.samples)
        return replace(answer, upload=T.keep(answer.upload, is_announced))

    def _held_part(self, job: DeviceJob) -> SendAnswer:
        """Return the part of the upload of this round that was not sent with the announcement."""
        held, request = self._held, job.request
        if held is None or (held.run, held.client, held.round) != (job.run, request.client, request.round):
            raise CoterieError(f"nothing was announced in round {request.round}, or the device was started again since")
        return SendAnswer(held.client, held.tree, held.samples)

    def _log_progress(self, session: Session, what: str, score: Score | None) -> None:
        """Log what was done, with the device's own score if there is one."""
        task = session.method.ctx.task
        if score is not None:
            measured = task.measured({k: v[None].numpy() for k, v in score.counts.items()})
            value = float(measured[task.metric.name][0])
            what = f"{what}, {task.metric.name} {task.metric.text(value)} on its own test data"
        log.info("%s", what)

    def _write_model(self, session: Session, run: str, job: Job) -> None:
        """Write the personal model to a file next to the state, for use on this device."""
        client, state = job.request.client, None if job.state is None else _in_memory(job.state)
        request, clients = job.request, self._clients
        assert clients is not None
        place, method = clients.place, clients.method_of(client)
        data = place.data(session.federation.data(client, request.data_round))
        received, own = place.moved((request.download, state))
        with place.working():
            used = model_in_use(method, clients.rule, own, received, data, request.round, use=session.use)
        tree = place.host(used)
        module = as_module(session.method_of(client), *tree)
        about = describe_model(session, client, module, job.request.round - 1, run)
        write_model(self.state / run / "model.safetensors", module, about, durable=False)


def join(cloud: str, ca: Path, key: Path, handler: DeviceHandler, certificate: Path | None = None) -> None:
    """Answer the cloud until the run has ended, or until SIGTERM or Ctrl-C."""
    from coterie.federation.transport.node import Node  # needs gRPC

    # an error in the name is found now, not when the cloud first asks; the columns of a table are known only then
    if Path(handler.data).suffix.lower() in TABLE_SUFFIXES:
        read_table(Path(handler.data))
    else:
        load_dataset(handler.data, handler.data_dir)
    handler.peer = cloud
    handler.use_certificate(NodeFiles(key, certificate or key.with_suffix(".crt"), ca))
    largest = min(MAX_PAYLOAD, handler.allow.bytes_down + _HEADER_BYTES)  # more is not allowed, so it is not fetched
    node = Node(cloud, ca, key, handler.handle, int(largest), certificate=certificate)
    handler.ended = node.leave
    node.stop_on_signals().run()


def _statistics_bytes(s: ColumnStatistics) -> int:
    return 25 + sum(len(c.encode()) for c in s.categories)  # three numbers and a flag


def _in_memory(state: State | Remote) -> State:
    """Return the state, which is never remote on a device."""
    assert not isinstance(state, Remote)
    return state
