"""The rounds of a run, one after the other: plan, answers, aggregation, evaluation, events, checkpoints."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coterie.core.context import ClientId, EdgeId, State
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method
from coterie.core.metrics import Metric
from coterie.core.rng import torch_rng
from coterie.core.tasks import Classification
from coterie.core.views import ON_REQUEST, View
from coterie.engine import ledger
from coterie.engine.attacks import Attack
from coterie.engine.combining import Combiner
from coterie.engine.edge_steps import preview
from coterie.engine.evaluation import Evaluation, Official, Watch, notes
from coterie.engine.fault_isolation import close_contained
from coterie.engine.messages import ScoreAnswer, ScoreRequest, TrainAnswer
from coterie.engine.round import RoundAnswers, RoundPlan, RoundResult, Rules, close, plan
from coterie.errors import CoterieError
from coterie.privacy.budget import ClientBudget, DeviceBudgets
from coterie.runtimes.base import Conclusion, Runtime
from coterie.storage import checkpoint
from coterie.storage.checkpoint import Checkpoint
from coterie.storage.client_states import Index
from coterie.storage.run_folder import EVENTS, Folder, checkpoints, read_log, round_of

CLIENTS_PER_REQUEST = 256  # bounds memory when every client is scored


@dataclass(frozen=True)
class Schedule:
    """The number of rounds, and when the loop evaluates, checkpoints and stops."""

    rounds: int
    rules: Rules
    eval_every: int = 10
    checkpoint_every: int = 10
    final_trained: bool = True  # score the views received, trained and edge after the last round
    headline: View = "personal"  # the view that tables lead with: scored in every evaluation
    newcomers: tuple[ClientId, ...] = ()  # clients that are scored but never sampled
    eval_clients: int | None = None  # number of clients, and of newcomers, that are scored; None: all
    stop_after: int | None = None  # evaluations without a better value on validation data, after which the run ends
    stop_at: float | None = None  # value on validation data at which the run ends
    attack: Attack | None = None  # some clients lie, and are not scored
    combiner: Combiner | None = None  # makes one upload of all (combining.py); None: the method gets them all


@dataclass(frozen=True)
class Progress:
    """Progress information after each round."""

    round: int
    rounds: int
    value: float | None  # value of the metric; None if no client was scored
    seconds: float
    nonfinite: int = 0  # clients whose personal models give NaN or infinity, where they were scored
    bytes: ledger.Page = field(default_factory=dict)  # since the start of the run
    metric: Metric = Classification.metrics[0]
    event: Mapping[str, Any] = field(default_factory=dict)  # the round's line of events.jsonl
    run: str = ""  # name of the run in a comparison, such as fedrep-s0

    @property
    def text(self) -> str:
        """The metric's name and value as text."""
        return "" if self.value is None else f"{self.metric.name} {self.metric.text(self.value)}"


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called while a run is executed."""

    on_start: Callable[[str, int], object] = lambda title, rounds: None  # before the first round
    on_round: Callable[[Progress], object] = lambda progress: None  # after every round
    on_info: Callable[[str], object] = lambda sentence: None  # choices that were made for the user
    on_warning: Callable[[str], object] = lambda sentence: None
    should_stop: Callable[[], bool] = lambda: False  # asked after every round; True pauses the run


class Loop:
    def __init__(
        self,
        method: Method,
        runtime: Runtime,
        folder: Folder,
        schedule: Schedule,
        official: Official | None = None,
        budget: ClientBudget | DeviceBudgets | None = None,
    ):
        self.method, self.runtime, self.folder, self.schedule = method, runtime, folder, schedule
        self.official, self.budget = official, budget
        self.server: State = {}
        self.edges: dict[EdgeId, State] = {}
        self.combiner = schedule.combiner
        self.liars = frozenset[ClientId]() if schedule.attack is None else schedule.attack.liars
        runtime.attack = schedule.attack
        self.bytes: ledger.Page = {}  # since the start of the run
        self.done = -1  # last finished round
        self.validation: dict[int, float] = {}  # value on validation data by round, where clients were scored
        self.ended = ""  # why the run ended before its last round
        self.event: dict[str, Any] = {}  # the last line of the log
        self._setbacks = 0  # rounds in a row that showed that the model diverged
        self._back_to: int | None = None  # round whose state counts after such a round
        self._unsaid: list[str] = []  # warnings about the last round
        self._known_caps: set[ClientId] = set()  # clients whose capped weight was reported
        self._plans: list[tuple[State, RoundPlan]] = []  # plans of the next round by server state

    @property
    def first(self) -> int:
        return 0 if self.method.opening() else 1

    def start(self) -> None:
        """Prepare the first round."""
        self.server = self.method.setup()
        self.folder.open_logs()
        self.done = self.first - 1

    def resume(self, from_round: int | None = None) -> list[str]:
        """Continue from the newest intact checkpoint, or from that of a round; return messages about damaged ones."""
        saved, complaints = checkpoint.restore_checkpoint(
            self.folder, self.runtime, type(self.method).__name__, from_round
        )
        if saved is not None:
            self.server, self.edges, self.bytes, self.done = saved.server, saved.edges, saved.bytes, saved.round
            if self.combiner is not None:
                self.combiner = replace(self.combiner, memory=saved.combiner)
            stops = self.schedule.stop_after is not None or self.schedule.stop_at is not None or self.budget is not None
            if self.budget is not None:
                self.budget.go_to(self.done)
            for row in read_log(self.folder.path / EVENTS).rows if stops else []:
                if (value := self._validated(row["eval"])) is not None:
                    self.validation[row["round"]] = value
                self.ended = row.get("ended", "")
        return complaints

    def run(self, callbacks: Callbacks = Callbacks()) -> bool:  # noqa: B008  # immutable
        """Run to the last round; return False if the run was stopped before, after writing a checkpoint."""
        if self.done < 0:
            self.start()
        for t in range(self.done + 1, self.schedule.rounds + 1):
            if self.ended:
                break
            begun = time.perf_counter()
            value, nonfinite = self.step()
            for sentence in self._unsaid:
                callbacks.on_warning(sentence)
            self._unsaid = []
            seconds = time.perf_counter() - begun
            cpu = {} if self.runtime.cpu is None else {"cpu": round(self.runtime.cpu, 6)}
            self.folder.timing(round=t, seconds=round(seconds, 6), **cpu)
            metric, rounds = self.method.ctx.task.metric, self.schedule.rounds
            callbacks.on_round(Progress(t, rounds, value, seconds, nonfinite, self.bytes, metric, self.event))
            halt = callbacks.should_stop()
            if halt or self.ended or t == self.schedule.rounds or t % self.schedule.checkpoint_every == 0:
                self.checkpoint()
            if halt and not self.ended and t < self.schedule.rounds:
                return False
        self.runtime.over()
        return True

    def step(self) -> tuple[float | None, int]:
        """Run the next round; return the value of the metric to show, if any, and the number of diverged models."""
        t, schedule = self.done + 1, self.schedule
        planned = self._planned(self.server, self.edges, t)
        answers, result = self._settled(planned)
        if self.budget is not None:
            self.budget.spend(t)
        self.runtime.keep(t, result.accepted)
        self.server, self.edges, self.combiner = result.server, result.edges, result.combiner
        self.bytes = ledger.total([self.bytes, result.bytes])
        self.done = t
        excluded = {*result.refused, *self.liars}
        trained = [answers.trained[i] for i in sorted(answers.trained) if i not in excluded]
        watch = Watch.of(self.method.ctx.task, trained) if schedule.rules.watch else None
        self._plans = [(s, p) for s, p in self._plans if s is self.server and p.round > t]
        last = t == schedule.rounds
        evaluation = self.evaluate(last) if self._evaluates(t) else None
        if evaluation is not None and not last and self._stops(evaluation):
            evaluation = self.evaluate(True)
        if self.budget is not None and not last and not self.ended and (why := self.budget.over()):
            self.ended, evaluation = why, self.evaluate(True)
        for i in sorted(result.capped.keys() - self._known_caps):
            claim = f"client {i} claims {answers.trained[i].samples} samples, which count as {result.capped[i]}"
            cap = f"weight_cap = {schedule.rules.weight_cap:g} times the median"
            self._unsaid.append(f"round {t}: {self.runtime.named(i, claim)} ({cap})")
            self._known_caps.add(i)
        self._record(result, planned.participants, trained, watch, evaluation)
        if evaluation is not None:
            return evaluation.headline(self.schedule.headline), evaluation.nonfinite()
        return (watch.headline() if watch else None), 0

    def _validated(self, summary: Mapping[str, Mapping[str, float | None]]) -> float | None:
        """Return the value for early stopping: the headline view's, or else the personal one's; NaN if undefined."""
        for view in (self.schedule.headline, "personal"):
            if (scores := summary.get(f"{view}/val")) is not None:
                return math.nan if (value := scores["mean"]) is None else value
        return None

    def _stops(self, found: Evaluation) -> bool:
        """True if the value on validation data reached its target, or did not improve for as long as is allowed."""
        patience, target = self.schedule.stop_after, self.schedule.stop_at
        metric, value = self.method.ctx.task.metric, self._validated(found.summary())
        if value is None:
            return False
        self.validation[self.done] = value
        if target is not None and (value == target or metric.better(value, target)):
            reached = f"{metric.text(value)} in round {self.done}"
            self.ended = f"{metric.name} on validation data reached {metric.text(target)}: it was {reached}"
        if self.ended or patience is None:
            return bool(self.ended)
        best = min(self.validation)
        for t, v in sorted(self.validation.items()):
            best = t if metric.better(v, self.validation[best]) or math.isnan(self.validation[best]) else best
        since = sum(t > best for t in self.validation)
        if since >= patience:
            since_when = "the last evaluation" if since == 1 else f"the last {since} evaluations"
            self.ended = f"{metric.name} on validation data was best in round {best} and no better in {since_when}"
        return bool(self.ended)

    def _settled(self, planned: RoundPlan) -> tuple[RoundAnswers, RoundResult]:
        """Run the round until enough clients count; exclude the senders whose uploads cause errors."""
        while True:
            answers = self.runtime.run(planned)
            if self.runtime.trusted:
                result = close(self.method, self.server, self.edges, planned, answers, self.combiner)
                if result.refused:
                    client, why = min(result.refused.items())
                    raise CoterieError(
                        f"{type(self.method).__name__} does not send what its schema declares: {why} ({client=})"
                    )
                return answers, result
            result = close_contained(self.method, self.server, self.edges, planned, answers, self._probe, self.combiner)
            result = replace(result, reasons={i: self.runtime.named(i, why) for i, why in result.reasons.items()})
            conclusion = self.runtime.conclude(planned, answers, result)
            if conclusion is Conclusion.SET_BACK:
                return answers, self._set_back(result)
            if conclusion is Conclusion.ACCEPT:
                self._setbacks, self._back_to = 0, None
                return answers, result

    def _set_back(self, result: RoundResult) -> RoundResult:
        """Return the result of a round that shows that the model diverged: an earlier state of server and clients.

        Rounds go on with the next number, so that other participants are drawn. A further such round goes back by one
        state more, the next by two, four and so on, as far as there are checkpoints; then the present state stays.
        """
        now = self.done if self._back_to is None else self._back_to
        back = now - max(1, 2 ** (self._setbacks - 1))
        self._setbacks += 1
        combiner, paths = self.schedule.combiner, [p for p in checkpoints(self.folder.path) if round_of(p) <= back]
        if paths:
            saved = checkpoint.load_checkpoint(paths[-1], type(self.method).__name__)
            self._back_to, server, edges = saved.round, saved.server, saved.edges
            combiner = None if combiner is None else replace(combiner, memory=saved.combiner)
            self.runtime.restore(saved.clients)
        elif back < self.first and not self.method.opening():
            self._back_to, server, edges = self.first - 1, self.method.setup(), {}
            self.runtime.restore(None)
        else:
            self._back_to, server, edges, combiner = now, self.server, self.edges, self.combiner
        return replace(result, server=server, edges=edges, accepted=[], combiner=combiner)

    def _planned(self, server: State, edges: Mapping[EdgeId, State], t: int) -> RoundPlan:
        for known, planned in self._plans:
            if known is server and planned.round == t:
                return planned
        return plan(self.method, server, edges, t, self.schedule.rules, self.combiner)

    def _probe(self, result: RoundResult) -> None:
        """Dry-run the uses of the new server state, while an error can still be traced to this round's uploads."""
        t, method = self.done + 1, self.method
        method.facts(result.server)
        method.cluster_of(result.server)
        method.global_model(result.server)
        if t < self.schedule.rounds:
            planned = plan(method, result.server, result.edges, t + 1, self.schedule.rules, result.combiner)
            self._plans = [*self._plans, (result.server, planned)]
        if self._evaluates(t):
            clients = method.ctx.clients
            for a in range(0, len(clients), CLIENTS_PER_REQUEST):
                self._usable(result.server, result.edges, clients[a : a + CLIENTS_PER_REQUEST])
            return
        layout = method.edges(result.server) if isinstance(method, EdgeMethod) else None
        for e, members in (layout or {}).items():  # including edges without requests before the next evaluation
            if e not in result.edges or result.edges[e] is self.edges.get(e):
                continue
            try:
                self._usable(result.server, result.edges, members)
            except Exception:
                try:
                    self._usable(result.server, {**result.edges, e: self.edges.get(e, {})}, members)
                except Exception:
                    continue  # it fails with the previous edge state too, so this merge is not the cause
                raise

    def _usable(self, server: State, edges: Mapping[EdgeId, State], clients: Sequence[ClientId]) -> None:
        """Raise an error if no download could be made for these clients before the next round."""
        schema = self.method.schema("down")
        for shared, own in preview(self.method, server, edges, clients, self.done + 2).values():
            schema.parts({**shared, **own})

    def _evaluates(self, t: int) -> bool:
        return t > 0 and (t == self.schedule.rounds or t % self.schedule.eval_every == 0)

    def _record(
        self,
        result: RoundResult,
        participants: Sequence[ClientId],
        trained: Sequence[TrainAnswer],
        watch: Watch | None,
        found: Evaluation | None,
    ) -> None:
        if found is not None:
            self.folder.evaluation(self.done, found.arrays())
        losses = [a.loss for a in trained if a.steps and math.isfinite(a.loss)]
        self.event = dict(
            round=self.done,
            participants=list(participants),
            failed=result.failed,
            nonfinite=result.nonfinite,
            steps=sum(a.steps for a in trained),
            samples=sum(a.seen for a in trained),
            loss=sum(losses) / len(losses) if losses else None,
            bytes=result.bytes,
            notes=notes(trained),
            facts=self.method.facts(self.server),
            watch=watch.summary() if watch else {},
            eval=found.summary() if found else {},
            **({"adapting": found.adapting} if found and found.adapting else {}),
            **({"combined": facts} if (facts := self.combiner.facts() if self.combiner else {}) else {}),
            **({"privacy": self.budget.facts()} if self.budget else {}),
            **({"liars": liars} if (liars := sorted(self.liars & set(participants))) else {}),
            **({} if self._back_to is None else {"set_back_to": self._back_to}),
            **({"capped": dict(result.capped)} if result.capped else {}),
            **({"reasons": result.reasons} if result.reasons else {}),
            **({"ended": self.ended} if self.ended else {}),
        )
        self.folder.event(**self.event)

    def checkpoint(self) -> None:
        events, timing = self.folder.offsets()
        name = type(self.method).__name__

        def made(index: Index) -> Checkpoint:
            memory = {} if self.combiner is None else dict(self.combiner.memory)
            return Checkpoint(self.done, name, self.server, self.edges, index, self.bytes, events, timing, memory)

        checkpoint.save_checkpoint(self.folder, self.runtime, made)

    # ---- evaluation --------------------------------------------------------------------------------------------------
    def evaluate(self, last: bool = False) -> Evaluation | None:
        """Score all clients, newcomers included, after the last finished round; return None if no client answered.

        No bytes are counted and no state changes. With `last`, the views of the end of a run are scored too.
        """
        newcomers = tuple(sorted({*self.schedule.newcomers, *self.runtime.newcomers()}))
        scored = sorted({*self._scored(self.method.ctx.clients), *self._scored(newcomers)})
        whole = self.method.global_model(self.server)
        last = (last or self.done == self.schedule.rounds) and self.schedule.final_trained
        more = tuple(v for v in ON_REQUEST if last or v == self.schedule.headline)
        answers: list[ScoreAnswer] = []
        for a in range(0, len(scored), CLIENTS_PER_REQUEST):
            sent = preview(self.method, self.server, self.edges, scored[a : a + CLIENTS_PER_REQUEST], self.done + 1)
            found, _ = self.runtime.score(
                [
                    ScoreRequest(i, self.done + 1, shared, own, whole, more, self.official is not None)
                    for i, (shared, own) in sent.items()
                ]
            )
            answers += [found[i] for i in sorted(found)]
        if self.official is not None:
            answers = self.official.added(answers, whole, set(newcomers))
        of = self.method.cluster_of(self.server)
        return Evaluation.of(self.method.ctx.task, answers, set(newcomers), of) if answers else None

    def _scored(self, ids: Sequence[ClientId]) -> Sequence[ClientId]:
        """Return all clients, or as many as the run asks for: the same ones in every evaluation."""
        n, ids = self.schedule.eval_clients, [i for i in ids if i not in self.liars]
        if n is None or n >= len(ids):
            return ids
        order = torch.randperm(len(ids), generator=torch_rng(self.schedule.rules.seed, "scored"))
        return [ids[int(i)] for i in order[:n]]
