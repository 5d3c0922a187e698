"""The device's side of a federation: answers the cloud with its own data; its state stays here.

An answer never holds state: what leaves is the method's upload, its numbers, and counts of hits.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coterie.core.method import ClientId, State
from coterie.core.schema import NonFiniteError
from coterie.core.tree import value_bytes
from coterie.data.sources import load_dataset
from coterie.engine import codec
from coterie.engine.messages import Job, Remote, Score, TrainAnswer, TrainRequest, check
from coterie.engine.personal_models import model_in_use
from coterie.engine.session import Session
from coterie.errors import CoterieError
from coterie.export.personal_model import as_module, describe_model, write_model
from coterie.federation.device_states import KEEP_STATES, DeviceStates, lock_folder
from coterie.federation.payload_kinds import of_answer, of_request, total_bytes
from coterie.federation.policy.allow import Allow, Spent
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog
from coterie.federation.protocol.messages import Answer, Common, DeviceJob, Hello, PlanText, RunOver, with_common
from coterie.federation.protocol.plan import RUN_ID, FederationPlan
from coterie.federation.validation import check_request
from coterie.storage.atomic import write_atomic

NO_PLAN = "this node has no plan of this run"  # the cloud then says hello again
ROOM = 2**20  # bytes of a message beside its payload
log = logging.getLogger("coterie.device")


@dataclass
class DeviceHandler:
    """One client. `handle` is what the transport calls."""

    data: str  # a file, a folder, module:function; with `client` a name that every party can load
    state: Path
    client: ClientId | None = None
    data_dir: Path | None = None
    allow: Allow = field(default_factory=Allow)
    keep: int = KEEP  # versions of its state
    stay: bool = False  # wait for the next run when one has ended
    peer: str = "cloud"  # who asks: the address of the cloud or the edge
    ended: Callable[[], None] = lambda: None  # called when a run has ended and there is nothing to wait for
    _plan: FederationPlan | None = None
    _session: Session | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._lock = lock(self.state)
        self._spent = Spent(self.allow)
        self._audit = AuditLog(self.state / AUDIT_FILE)
        self._offered = self._refused = ""  # the latest plan, and why it was refused; it is offered again and again

    def close(self) -> None:
        """Let another process use the state."""
        self._lock.close()
        self._audit.close()

    def handle(self, kind: str, round: int, shared: memoryview | None, own: memoryview) -> memoryview:
        asked = codec.unpack_foreign(own)
        if kind == "hello":
            return codec.pack(self.hello(check(asked, PlanText).text))
        if kind == "over":
            return codec.pack(self.over(check(asked, RunOver)))
        common = Common() if shared is None else check(codec.unpack_foreign(shared), Common)
        return codec.pack(self.answer(kind, round, with_common(common, check(asked, DeviceJob))))

    @contextmanager
    def _noting_refusal(self, run: str, round: int, kind: str) -> Iterator[None]:
        """Whatever is raised inside is the answer, and the audit log says that nothing else left."""
        try:
            yield
        except Exception as e:
            reason = str(e) if isinstance(e, CoterieError) else f"{type(e).__name__}: {e}"
            if kind != "hello" or self._refused != run + reason:
                self._audit.write(AuditLine(run, round, kind, "out", self.peer, refused=reason))
            if kind == "hello":
                self._refused = run + reason
            raise

    def answer(self, kind: str, round: int, job: DeviceJob) -> Answer:
        with self._noting_refusal(job.run, round, kind):
            if kind != ("train" if isinstance(job.request, TrainRequest) else "score"):
                raise CoterieError(f'a device cannot answer "{kind}"')
            session = self.session(job.run)
            arrived = of_request(session.method, job.request)
            self._audit.write(AuditLine(job.run, round, kind, "in", self.peer, arrived))
            check_request(session.method, job.request, round)
            if not job.base < round <= session.method.ctx.planned_rounds + 1:
                raise CoterieError(f"round {round} is over or never comes (my state: {job.base})")
            samples = len(session.federation.data(job.request.client).train)
            self.allow.check_request(session.method, job.request, samples)
            self._spent.count("down", job.run, round, total(arrived))
            self._take_place(job.run, job.request.client)
            answer = self._work(session, job)
            self._let_leave(session, round, kind, job.run, answer)
            return answer

    def _let_leave(self, session: Session, round: int, kind: str, run: str, answer: Answer) -> None:
        """The last thing before an answer is sent: is it allowed, is there room in the round, and a line of it."""
        upload = answer.upload if isinstance(answer, TrainAnswer) else {}
        sizes = of_answer(session.method, answer)
        self.allow.check_leaving(session.method.schema("up"), upload, sizes)
        self._spent.count("up", run, round, total(sizes))
        entries = {name: value_bytes(v.numel(), v.dtype) for name, v in upload.items()}
        self._audit.write(AuditLine(run, round, kind, "out", self.peer, sizes, entries))

    def over(self, told: RunOver) -> RunOver:
        """The cloud says that the run has ended."""
        self.session(told.run)  # another one's end is none of ours
        self._audit.write(AuditLine(told.run, told.rounds, "over", "in", self.peer))
        model = self._folder(told.run) / "model.safetensors"
        where = f"; the personal model is {model}" if model.exists() else ""
        then = "waiting for the next run" if self.stay else "nothing more to do here"
        log.info("run %s has ended after %s rounds%s; %s", told.run[:8], told.rounds, where, then)
        if not self.stay:
            self.ended()
        return told

    # ---- what the run is ---------------------------------------------------------------------------------------------
    def hello(self, text: str) -> Hello:
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
            self._refused = ""
            write_atomic(self._folder(plan.run) / "plan.json", text.encode())
            place = self._place(plan.run)
            log.info("run %s: %s, %s rounds", plan.run[:8], session.method.card.title, session.settings.rounds)
            said = Hello(place, len(session.federation.data(place or 0).train))
            self._audit.write(AuditLine(plan.run, 0, "hello", "out", self.peer, about=vars(said)))
            return said

    def session(self, run: str) -> Session:
        """The run this message belongs to; after a restart its plan is read back and checked again."""
        if self._plan is None or self._plan.run != run or self._session is None:
            if not RUN_ID.fullmatch(run):
                raise CoterieError("the message names no run")
            path = self._folder(run) / "plan.json"
            if not path.is_file():
                raise CoterieError(NO_PLAN)
            return self._open(FederationPlan.read(path.read_text()))
        return self._session

    def _open(self, plan: FederationPlan) -> Session:
        if self._plan != plan or self._session is None:
            self._session, self._plan = plan.session(self.data, self.client, self.data_dir, self.allow), plan
        return self._session

    def _folder(self, run: str) -> Path:
        return self.state / run

    def _place(self, run: str) -> ClientId | None:
        """Which client it is in this run; None: no job has said so yet."""
        path = self._folder(run) / "client.json"
        if self.client is not None or not path.is_file():
            return self.client
        return int(json.loads(path.read_text())["client"])

    def _take_place(self, run: str, client: ClientId) -> None:
        """A device has one client slot per run; a job for another one is refused, so that states are never mixed up."""
        mine = self._place(run)
        if mine is None:
            write_atomic(self._folder(run) / "client.json", json.dumps({"client": client}).encode())
        elif mine != client:
            raise CoterieError(f"this device is client {mine} of the run, not {client}")

    # ---- work --------------------------------------------------------------------------------------------------------
    def _work(self, session: Session, job: DeviceJob) -> Answer:
        request = job.request
        states = States(self._folder(job.run) / str(request.client), self.keep)
        mine = Job(request, states.read(job.base))
        if isinstance(request, TrainRequest):
            done = session.clients().train([mine])[0]
            with suppress(NonFiniteError):  # its training diverged: the round says so and leaves it out
                session.method.schema("up").check(done.answer.upload, "the upload made here")
            states.write(request.round, _held(done.state), job.base)
            self._show(session, f"round {request.round} of {session.settings.rounds}: trained", done.answer.after)
            return done.answer
        answer = session.clients().score([mine])[0]
        self._keep_model(session, job.run, mine)
        scored = answer.scores.get("personal/test")
        self._show(session, f"after round {request.round - 1} of {session.settings.rounds}: personal model", scored)
        return answer

    def _show(self, session: Session, what: str, score: Score | None) -> None:
        """Progress, with the device's own score where there is one."""
        task = session.method.ctx.task
        if score is not None:
            found = task.measured({k: v[None].numpy() for k, v in score.counts.items()})
            value = float(found[task.metric.name][0])
            what = f"{what}, {task.metric.name} {task.metric.text(value)} on its own test data"
        log.info("%s", what)

    def _keep_model(self, session: Session, run: str, job: Job) -> None:
        """The personal model as a file of its own beside the state, for use on this device."""
        client, state = job.request.client, None if job.state is None else _held(job.state)
        method, data = session.method_of(client), session.federation.data(client)
        tree = model_in_use(method, session.clients().rule, state, job.request.download, data, job.request.round)
        module = as_module(method, *tree)
        about = describe_model(session, client, module, job.request.round - 1, run)
        write_model(self._folder(run) / "model.safetensors", module, about, durable=False)


def join(cloud: str, ca: Path, key: Path, handler: DeviceHandler) -> None:
    """Answer the cloud until the run has ended, or told to stop (SIGTERM, Ctrl-C)."""
    from coterie.federation.transport import MAX_PAYLOAD
    from coterie.federation.transport.node import Node

    load_dataset(handler.data, handler.data_dir)  # a wrong name is found now, not when the cloud first asks
    handler.peer = cloud
    largest = min(MAX_PAYLOAD, handler.allow.bytes_down + ROOM)  # what could not be allowed is not fetched
    node = Node(cloud, ca, key, handler.handle, int(largest))
    handler.ended = node.leave
    node.stop_on_signals().run()


def _held(state: State | Remote) -> State:
    """Here states are never elsewhere."""
    assert not isinstance(state, Remote)
    return state
