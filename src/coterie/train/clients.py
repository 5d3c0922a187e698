"""The client's side of a run, equal in every runtime: it trains and scores with the client's own data and state."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.core import tree as T
from coterie.core.context import Batch, ClientData, ClientId, Extras, Split, State
from coterie.core.method import Client, Method, Model, Phase, Start, started
from coterie.core.states import typed
from coterie.core.tree import Tree
from coterie.core.views import ModelView, Use
from coterie.data.federation import Federation
from coterie.engine.attacks import ATTACKED, Attack
from coterie.engine.messages import (
    Job,
    Remote,
    Score,
    ScoreAnswer,
    ScoreRequest,
    TrainAnswer,
    TrainRequest,
    TrainResult,
)
from coterie.errors import CoterieError
from coterie.methods.stored import CLIENTS
from coterie.privacy.device_side import DeviceSide
from coterie.privacy.example_level import DeviceNoise, sealed
from coterie.train.chain.natives import Natives
from coterie.train.devices import CPU, Workplace, method_on, out_of_memory
from coterie.train.optimisers import Optimiser
from coterie.train.private_steps import PrivateSteps
from coterie.train.rule_of_use import UseMemory, after_training, local_phases, local_start, model_used
from coterie.train.scoring import TOGETHER, Case, Scorer, score_model
from coterie.train.trainer import Effort, steps_per_round, train
from coterie.train.vmap.phase import Member
from coterie.train.vmap.trainer import Stacker

R = TypeVar("R")
MEMORY = "engine:optimiser"  # key of the optimisers' memory in a client's state, with opt_state = keep
USED = "engine:use"  # key of the memory of the rule of use in a client's state
TYPED = "engine:state"  # key of the method's own state in such a state, if that is a dataclass


@dataclass(frozen=True)
class Opened:
    """The arguments of a client's hooks."""

    data: ClientData
    test: Split
    state: State
    download: Tree
    memory: Tree | None  # state of its optimisers; a separate dictionary, because training replaces its entries
    used: UseMemory  # memory of the rule of use
    fresh: bool  # it has never taken part


@dataclass(frozen=True)
class Clients:
    """Does the work of any client of its federation; a real device has one client."""

    method: Method
    federation: Federation
    rule: Optimiser
    stacker: Stacker | None = None  # None: client by client
    others: Mapping[ClientId, Method] = field(default_factory=dict)  # bound to other models, for clients that have one
    use: Use = "received"  # rule for the model that a client uses
    guard: DeviceSide | None = None  # protects what leaves a client; None: it leaves as it is
    attack: Attack | None = None  # liars among the clients; a simulation only
    place: Workplace = field(default_factory=lambda: Workplace(CPU))  # where hooks are called
    natives: Natives | None = None  # None: PyTorch's operations compute everything

    def on(self, device: torch.device) -> "Clients":
        """Return these clients with their hooks on a device; requests and answers stay on the processor."""
        if device == self.place.device:
            return self
        method, stacker = method_on(self.method, device), self.stacker
        nets = {id(m): method_on(m, device) for m in self.others.values()}
        return replace(
            self,
            method=method,
            stacker=None if stacker is None else Stacker(method.ctx, self.rule),
            others={i: nets[id(m)] for i, m in self.others.items()},
            place=Workplace(device),
            natives=None,
        )

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.method)

    def train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        """Train these clients locally; results are in the order of the jobs."""
        step = max(1, len(jobs)) if self.stacker else 1
        return self._placed(jobs, step, lambda clients, part: clients._train(part))

    def score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]:
        return self._placed(jobs, TOGETHER if self.stacker else 1, lambda clients, part: clients._score(part))

    def _placed(self, jobs: Sequence[Job], step: int, work: Callable[["Clients", list[Job]], list[R]]) -> list[R]:
        """Do the work of jobs, `step` of them together, on the device, and return its results on the processor.

        A device takes fewer jobs together if its memory is not sufficient. Work changes nothing, so it can be repeated.
        """
        step = 1 if self.others else step
        if self.place.device == CPU:
            parts = [jobs[a : a + step] for a in range(0, len(jobs), step)]
            return [done for part in parts for done in work(self._of_all(part), list(part))]
        shared: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that all requests hold, which are moved once
        out: list[R] = []
        with self.place.working():
            while len(out) < len(jobs):
                part = list(jobs[len(out) : len(out) + min(step, self.place.together)])
                try:
                    for j in part:
                        self.place.moved([j.request.shared, getattr(j.request, "global_model", None)], shared)
                    done = work(self._of_all(part), self.place.moved(part, dict(shared)))
                    out += self.place.host(done)
                    continue
                except Exception as e:
                    if not out_of_memory(e):
                        raise
                    reason = str(e).splitlines()[0]
                shared.clear()  # the error and its tensors are gone here
                self.place.make_room(len(part), reason)
        return out

    def _of_all(self, part: Sequence[Job]) -> "Clients":
        """Return the clients of these jobs, which have one model."""
        return self._of(part[0].request.client) if self.others else self

    def _of(self, client: ClientId) -> "Clients":
        """Return these clients with the method that is bound to the client's own model."""
        return replace(self, method=self.method_of(client), others={})

    def method_of(self, client: ClientId) -> Method:
        """Return the method that is bound to this client's model."""
        return self.others.get(client, self.method)

    # ---- one client, or many at once -----------------------------------------------------------------------------
    @contextmanager
    def _named(self, what: str, jobs: Sequence[Job]) -> Iterator[None]:
        """Add method, clients and round to the message of an error."""
        try:
            yield
        except CoterieError:
            raise
        except Exception as e:
            if out_of_memory(e):
                raise
            ids = [j.request.client for j in jobs]
            who = f"client {ids[0]}" if len(ids) == 1 else f"clients {ids}"
            where = f"{what} of {who} in round {jobs[0].request.round}"
            raise RuntimeError(f"{type(self.method).__name__}, {where}: {type(e).__name__}: {e}") from e

    def _open(self, job: Job) -> Opened:
        request = job.request
        which = request.client, request.data_round
        data, test = self.place.data((self.federation.data(*which), self.federation.test(*which)))
        if self.attack is not None and isinstance(request, TrainRequest):
            data = self.attack.poisoned(data)
        assert not isinstance(job.state, Remote)
        stored = self.place.moved(client_state(self.method, job.state, self._for_hooks(data)))
        memory = stored.memory if self.rule.keep else None
        return Opened(data, test, stored.state, request.download, memory, stored.used, job.state is None)

    def _model(self, view: ModelView, o: Opened, round: int) -> Model:
        model = self.method.model(view, Client(o.state, o.download, o.data, round))
        assert model is not None
        model = Model(*self.place.moved(Model(*model)))
        if view in ("personal", "watched"):
            return model_used(self.method, self.use, o.used, model, o.data)
        return model

    def _for_hooks(self, data: ClientData) -> ClientData:
        """Return a client's data for hooks that make an upload; they may not read it if samples are protected."""
        if self.guard is None or self.guard.setting.unit != "example":
            return data
        return sealed(self.method, data, self.guard.setting.text)

    def noise_of(self, samples: int) -> DeviceNoise | None:
        """Return the noise that a client with this many samples adds itself; None if it adds none."""
        if self.guard is None or self.guard.setting.unit == "client":
            return None
        return self.guard.noise(self.method, samples, steps_per_round(self.method, samples))

    @cached_property
    def _private(self) -> dict[int, PrivateSteps]:
        """Private steps of clients by their numbers of samples."""
        return {}

    def _private_steps(self, data: ClientData) -> PrivateSteps | None:
        """Return how the steps of a client's training are noised; None if they are not."""
        if self.guard is None or self.guard.setting.unit != "example":
            return None
        n = len(data.train)
        if n not in self._private:
            noise = self.noise_of(n)
            assert noise is not None
            self._private[n] = PrivateSteps(noise.sigma, self.guard.setting.clip, self.guard.deployed)
        return self._private[n]

    def _practise(
        self, phases: Sequence[Phase], members: Sequence[Member], round: int, for_upload: bool = False
    ) -> list[Effort]:
        """Local training; members hold what came out. `for_upload`: it influences what leaves the client."""
        if self.stacker is not None:
            self.stacker.train(phases, members, round)
            return [m.effort for m in members]
        out = []
        for m in members:
            private = self._private_steps(m.data) if for_upload else None
            trained, effort = train(
                self.method.ctx, self.rule, phases, m.start, m.data, round, m.share, m.memory, self.natives, private
            )
            m.params, m.extras, m.aux, m.steps = trained.params, trained.extras, list(trained.aux), trained.steps
            out.append(effort)
        return out

    def _scores(self, cases: Sequence[Case], shared: bool = False) -> list[Score]:
        if self.stacker is not None:
            return self._scorer(cases, shared)
        return [score_model(self.method, *case, shared=shared, natives=self.natives) for case in cases]

    # ---- a round -------------------------------------------------------------------------------------------------
    def _train(self, jobs: Sequence[Job]) -> list[TrainResult]:
        with self._named("training", jobs):
            method = self.method
            requests = [_train_request(j) for j in jobs]
            round, watch = requests[0].round, requests[0].watch
            phases = method.phases(round)
            opened = [self._open(j) for j in jobs]
            own = [Model({})] * len(jobs)
            if watch or requests[0].log_update:
                own = [self._model("watched", o, round) for o in opened]
            before = self._watched(watch, own, opened)
            begun = time.process_time()
            members = [self._member(o, round, r.share) for o, r in zip(opened, requests, strict=True)]
            efforts = self._practise(phases, members, round, for_upload=True)
            local = self._continue_local(phases, opened, members, efforts, round)
            ended = [self._end(o, m, round, w) for o, m, w in zip(opened, members, local, strict=True)]
            cpu = (time.process_time() - begun) / len(jobs)
            after = self._watched(watch and bool(phases), [e[3] for e in ended], opened)
            out = []
            for i, (kept, upload, note, model) in enumerate(ended):
                update = None
                if requests[i].log_update:
                    update = self._update(own[i][0], model[0])
                    train = opened[i].data.train
                    note["train_loss"] = score_model(method, *model, train, natives=self.natives).loss / max(
                        1, len(train)
                    )
                answer = TrainAnswer(
                    requests[i].client, upload, note, len(opened[i].data.train), efforts[i].steps, efforts[i].loss,
                    before[i], after[i], update, efforts[i].samples,
                )  # fmt: skip
                if self.guard is not None:
                    sent, got = self.place.host((upload, opened[i].download))
                    upload = self.guard.upload(method, sent, got, round, requests[i].client, requests[i].clip)
                    answer = self.guard.trained(replace(answer, upload=upload))
                out.append(TrainResult(answer, kept, cpu))
            return out

    def _member(self, o: Opened, round: int, share: float = 1.0) -> Member:
        start = self.place.moved(started(self.method, o.state, o.download, self._for_hooks(o.data), round))
        return Member.of(start, o.data, share, o.memory)

    def _watched(self, watch: bool, models: Sequence[Model], opened: Sequence[Opened]) -> Sequence[Score | None]:
        if not watch:
            return [None] * len(models)
        scores = self._scores([Case(*m, o.test) for m, o in zip(models, opened, strict=True)])
        return [replace(s, samples=()) for s in scores]

    def _continue_local(
        self,
        phases: Sequence[Phase],
        opened: Sequence[Opened],
        members: Sequence[Member],
        efforts: list[Effort],
        round: int,
    ) -> list[Tree | None]:
        """Continue the clients' own local models if the rule of use is guarded; their work is added to `efforts`."""
        at = [i for i, m in enumerate(members) if self.use == "guarded" and phases and m.train]
        starts = [Start(local_start(self.method, opened[i].used)) for i in at]
        alone = [Member.of(s, opened[i].data, members[i].share) for s, i in zip(starts, at, strict=True)]
        local: list[Tree | None] = [None] * len(members)
        for i, m, more in zip(at, alone, self._practise(local_phases(self.method), alone, round), strict=True):
            local[i], own = m.params, efforts[i]
            efforts[i] = Effort(own.steps + more.steps, own.samples + more.samples, own.loss)
        return local

    def _end(
        self, o: Opened, m: Member, round: int, local: Tree | None = None
    ) -> tuple[State, Tree, dict[str, float], Model]:
        """The client's new state, what it sends, and its own model after local training."""
        with torch.no_grad():
            state, upload = self.method.end(o.state, m.trained, self._for_hooks(m.data), round)
        state = self.place.moved(state)
        model = self.method.model("trained", Client(state, o.download, o.data, round, m.trained))
        assert model is not None
        model = self.place.moved(Model(*model))
        used = o.used if local is None else {**o.used, "local": local}
        if self.use != "received" and m.steps:
            used = after_training(self.method, self.use, used, Model(*model), o.data)
        return stored_state(state, m.memory, used), upload.tree, dict(upload.note), Model(*model)

    def _update(self, before: Tree, after: Tree) -> torch.Tensor:
        names = [k for k in before if k in self.method.ctx.net.trainable]
        return T.flatten(after, names) - T.flatten(before, names)

    # ---- evaluation ----------------------------------------------------------------------------------------------
    def _score(self, jobs: Sequence[Job]) -> list[ScoreAnswer]:
        """All views the requests ask for; they differ in client and download only."""
        with self._named("scoring", jobs):
            method, request = self.method, _score_request(jobs[0])
            round, whole = request.round, request.global_model
            opened = [self._open(j) for j in jobs]
            own = [self._model("newcomer" if o.fresh else "personal", o, round) for o in opened]
            scores: list[dict[str, Score]] = [{} for _ in jobs]
            put = self._putter(opened, scores)
            everybody = range(len(jobs))
            put("personal", own, everybody)
            self._attacked(own, opened, scores)
            same = [self._is_global(whole, model) for model in own]
            if whole is not None:
                for score in (s for s, known in zip(scores, same, strict=True) if known):
                    score |= {k.replace("personal", "global"): v for k, v in score.items()}
                rest = [i for i in everybody if not same[i]]
                put("global", [Model(whole)] * len(rest), rest, shared=True)
            models: list[Tree | None] = [None] * len(jobs)
            if request.official:
                models = [self._official(m, s, known, whole) for m, s, known in zip(own, scores, same, strict=True)]
            tuning = [Effort(0, 0, 0.0)] * len(jobs)
            if phases := method.adapt():
                members = [_copy(m, o) for m, o in zip(own, opened, strict=True)]
                tuning = self._practise(phases, members, round)
                put("adapted", [Model(m.params, m.extras) for m in members], everybody)
            elif "trained" in request.more and (new := [i for i in everybody if self._is_newcomer(opened[i])]):
                members = [_copy(own[i], opened[i]) for i in new]
                self._practise(newcomer_phases(method), members, round)
                put("adapted", [Model(m.params, m.extras) for m in members], new)
            if "edge" in request.more:
                self._edge(opened, scores, put, round)
            if "received" in request.more:
                put("received", [self._model("received", o, round) for o in opened], everybody)
            if "trained" in request.more:
                after = self._after_training(opened, round)
                put("trained", after, everybody)
                if request.official:
                    split = self.place.data(self.federation.official())
                    assert split is not None
                    for score, model in zip(scores, after, strict=True):
                        score["trained/official"] = score_model(method, *model, split, natives=self.natives)
            answers = [
                ScoreAnswer(j.request.client, s, len(o.data.train), model, t.steps, t.samples)
                for j, o, s, model, t in zip(jobs, opened, scores, models, tuning, strict=True)
            ]
            return answers if self.guard is None else [self.guard.scored(a) for a in answers]

    def _is_newcomer(self, o: Opened) -> bool:
        return o.data.client not in self.method.ctx.clients and len(o.data.train) > 0

    def _putter(self, opened: Sequence[Opened], scores: list[dict[str, Score]]) -> Callable[..., None]:
        def put(view: str, models: Sequence[Model], who: Sequence[int], shared: bool = False) -> None:
            for part, splits in (("test", [o.test for o in opened]), ("val", [o.data.val for o in opened])):
                at = [(m, i) for m, i in zip(models, who, strict=True) if part == "test" or len(splits[i])]
                new_scores = self._scores([Case(*m, splits[i]) for m, i in at], shared)
                for (_, i), s in zip(at, new_scores, strict=True):
                    scores[i][f"{view}/{part}"] = s

        return put

    def _attacked(self, own: Sequence[Model], opened: Sequence[Opened], scores: list[dict[str, Score]]) -> None:
        """Score the personal models on test items as the attack wants them classified: its success."""
        for i, o in enumerate(opened if self.attack is not None else ()):
            assert self.attack is not None
            if (split := self.attack.wanted(o.test)) is not None:
                scores[i][ATTACKED] = replace(score_model(self.method, *own[i], split), samples=())

    def _edge(
        self, opened: Sequence[Opened], scores: list[dict[str, Score]], put: Callable[..., None], round: int
    ) -> None:
        """Score the model of each client's cluster or edge; clients without one get the global model's scores."""
        models = [self.method.model("edge", Client(o.state, o.download, o.data, round)) for o in opened]
        by_index = {i: Model(*m) for i, m in enumerate(models) if m is not None}
        put("edge", list(by_index.values()), list(by_index))
        for i, s in enumerate(scores):
            if i not in by_index:
                s |= {k.replace("global", "edge"): v for k, v in s.items() if k.startswith("global/")}

    def _after_training(self, opened: Sequence[Opened], round: int) -> list[Model]:
        """Return every client's own model after the local training of this round, which is not kept."""
        members = [self._member(o, round) for o in opened]
        self._practise(self.method.phases(round), members, round, for_upload=True)
        return [self._end(o, m, round)[3] for o, m in zip(opened, members, strict=True)]

    def _is_global(self, whole: Tree | None, model: Model) -> bool:
        """True if the personal model is the global one and predicts in the same way."""
        plain = type(self.method).predict_global is _PREDICT_GLOBAL
        return whole is not None and plain and not model[1] and _same(whole, model[0])

    def _official(self, model: Model, scores: dict[str, Score], same: bool, whole: Tree | None) -> Tree | None:
        """Add the personal model's score on the official test part, unless it is the global model (scored once).

        If the method has no global model, the personal model itself is returned, for the mean of all.
        """
        split = self.place.data(self.federation.official())
        assert split is not None
        if not same:
            scores["personal/official"] = score_model(self.method, *model, split, natives=self.natives)
        names = self.method.ctx.w0
        params, extras = model
        return (
            {k: params[k] for k in names} if whole is None and not extras and not names.keys() - params.keys() else None
        )


class ClientState(NamedTuple):
    """The parts of a client's stored state."""

    state: State  # the state that the method's hooks take
    memory: Tree  # a copy of the optimisers' memory
    used: UseMemory  # memory of the rule of use


def stored_state(state: State, memory: Tree | None, used: UseMemory) -> State:
    """Return a client's state as it is stored, with the memories of its optimisers and of the rule of use."""
    more = {**({} if memory is None else {MEMORY: memory}), **({USED: dict(used)} if used else {})}
    return {**(state if isinstance(state, dict) else {TYPED: state}), **more} if more else state


def _kept_in_0_1(stored: State) -> UseMemory:
    """Return the best model that a client of version 0.1 has kept in its method's own state."""
    if not (isinstance(stored, dict) and {"best", "best_score"} <= stored.keys()):
        return {}
    return {"params": stored["best"], "extras": {}, "score": stored["best_score"]}


def client_state(method: Method, stored: State | None, data: ClientData) -> ClientState:
    """Return the parts of a client's state. A client without a stored state has the initial one."""
    if stored is None:
        return ClientState(method.init_client(data), {}, {})
    own, memory, used = stored, {}, _kept_in_0_1(stored)
    if isinstance(stored, dict) and (MEMORY in stored or USED in stored):
        own = {k: v for k, v in stored.items() if k not in (MEMORY, USED)}
        memory, used = dict(stored.get(MEMORY, {})), stored.get(USED, used)
        own = own.get(TYPED, own)
    return ClientState(typed(CLIENTS.get(type(method).__name__), own), memory, used)


def _copy(model: Model, o: Opened) -> Member:
    """A copy of a model to be fine-tuned on the client's data."""
    return Member.of(Start(model.params, dict(model.extras)), o.data)


def newcomer_phases(method: Method, epochs: float | None = None) -> list[Phase]:
    """How a newcomer's model is fine-tuned where the method has no adaptation: by the loss of its outputs."""

    def loss(params: Tree, batch: Batch, extras: Extras) -> torch.Tensor:
        return method.ctx.loss_of(method.predict(params, batch.x, extras), batch)

    return [Phase(loss, epochs=epochs)]


_PREDICT_GLOBAL = Method.predict_global


def _train_request(job: Job) -> TrainRequest:
    assert isinstance(job.request, TrainRequest)
    return job.request


def _score_request(job: Job) -> ScoreRequest:
    assert isinstance(job.request, ScoreRequest)
    return job.request


def _same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(v is b[k] or torch.equal(v, b[k]) for k, v in a.items())
