"""The client's side of a run: answers requests with its own data and state. The same in every runtime.

Requests and replies are codec values, so a device may sit in this process, in a worker process or on another host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from coterie import official
from coterie import tree as T
from coterie.codec import Value
from coterie.data.federation import Federation
from coterie.errors import CoterieError
from coterie.method import ClientData, Extras, Method, Phase, Split, State
from coterie.train.optim import Optimiser
from coterie.train.score import TOGETHER, Case, Score, Scorer, score
from coterie.train.stack import Stacker
from coterie.train.stack_run import Member
from coterie.train.trainer import Effort, train
from coterie.tree import Tree

MEMORY = "engine:optimiser"  # beside the entries of a method's own in a client's state, with opt_state = keep


@dataclass(frozen=True)
class Work:
    """One client between the start and the end of its local training."""

    item: Value
    state: State
    test: Split
    own: tuple[Tree, Extras]  # the personal model before it
    member: Member
    answer: dict[str, Any]


@dataclass(frozen=True)
class Device:
    """Serves any client of the federation it can see; on a real device that is one."""

    method: Method
    federation: Federation
    rule: Optimiser
    stacker: Stacker | None = None  # None: client by client

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.method)

    def handle(self, request: Value) -> Value:
        """One batch of jobs for one operation, answered in order."""
        jobs, op = request["jobs"], request["op"]
        if op == "whole":
            return [self._named(request, jobs[:1], self._whole, request) for _ in jobs]
        job, size = (self._train, len(jobs)) if op == "train" else (self._score, TOGETHER)
        step = max(1, size) if self.stacker else 1
        parts = [jobs[a : a + step] for a in range(0, len(jobs), step)]
        return [answer for part in parts for answer in self._named(request, part, job, request, part)]

    def _named(self, request: Value, items: Sequence[Value], job: Callable[..., Any], *args: Any) -> Any:
        """Do the job; what goes wrong says where."""
        try:
            return job(*args)
        except CoterieError:
            raise
        except Exception as e:
            who = f"client {items[0]['client']}" if len(items) == 1 else f"clients {[i['client'] for i in items]}"
            where = f"{request['op']} of {who} in round {request['round']}"
            raise RuntimeError(f"{type(self.method).__name__}, {where}: {type(e).__name__}: {e}") from e

    # ---- one client, or many at once -----------------------------------------------------------------------------
    def _practise(self, phases: Sequence[Phase], members: Sequence[Member], round: int) -> list[Effort]:
        """Local training; members hold what came out."""
        if self.stacker is not None:
            self.stacker.train(phases, members, round)
            return [m.effort for m in members]
        out = []
        for m in members:
            trained = train(self.method.ctx, self.rule, phases, m.params, m.extras, m.data, round, m.share, m.memory)
            m.params, m.extras, effort = trained
            out.append(effort)
        return out

    def _scores(self, cases: Sequence[Case], shared: bool = False) -> list[dict[str, Any]]:
        if self.stacker is not None:
            return [_plain(s) for s in self._scorer(cases, shared)]
        return [_plain(score(self.method, *case, shared=shared)) for case in cases]

    def _open(self, request: Value, item: Value) -> tuple[ClientData, Split, State, Tree]:
        client = item["client"]
        data = self.federation.data(client)
        state = item["state"] if item["state"] is not None else self.method.init_client(data)
        if MEMORY in state:
            state = {k: v for k, v in state.items() if k != MEMORY}
        return data, self.federation.test(client), state, {**request["shared"], **item["each"]}

    def _memory(self, item: Value) -> Tree | None:
        """Of the client's optimisers; a dictionary of its own, because training renews it."""
        return dict((item["state"] or {}).get(MEMORY, {})) if self.rule.keep else None

    # ---- a round -------------------------------------------------------------------------------------------------
    def _train(self, request: Value, jobs: Sequence[Value]) -> Value:
        """These clients' part of a round; `watch` adds scores before and after local training."""
        method, round = self.method, request["round"]
        phases = method.phases(round)
        works = [self._begin(request, item) for item in jobs]
        if request["watch"]:
            for w, s in zip(works, self._scores([Case(*w.own, w.test) for w in works]), strict=True):
                w.answer["before"] = s
        efforts = self._practise(phases, [w.member for w in works], round)
        after = [self._end(request, w, effort) for w, effort in zip(works, efforts, strict=True)]
        if request["watch"] and phases:
            cases = [Case(*own, w.test) for own, w in zip(after, works, strict=True)]
            for w, s in zip(works, self._scores(cases), strict=True):
                w.answer["after"] = s
        return [w.answer for w in works]

    def _begin(self, request: Value, item: Value) -> Work:
        data, test, state, download = self._open(request, item)
        answer: dict[str, Any] = {"client": item["client"], "samples": len(data.train)}
        asked = request["watch"] or request.get("moves")
        own: tuple[Tree, Extras] = self.method.personal(state, download, data) if asked else ({}, {})
        params, extras = self.method.begin(state, download, data, request["round"])
        return Work(item, state, test, own, Member(params, extras, data, item["share"], self._memory(item)), answer)

    def _end(self, request: Value, work: Work, effort: Effort) -> tuple[Tree, Extras]:
        """Fills the answer in and returns the client's own model after local training."""
        method, m, answer = self.method, work.member, work.answer
        with torch.no_grad():
            state, upload = method.end(work.state, m.params, m.extras, m.data, request["round"])
        after: tuple[Tree, Extras] = ({}, {})
        if request["watch"] or request.get("moves"):
            after = method.trained(state, m.params, m.extras)
        if request.get("moves"):
            names = [k for k in work.own[0] if k in method.ctx.net.trainable]
            answer["move"] = T.flatten(after[0], names) - T.flatten(work.own[0], names)
        kept = state if m.memory is None else {**state, MEMORY: m.memory}
        answer |= {"state": kept, "tree": upload.tree, "note": dict(upload.note)}
        answer |= {"steps": effort.steps, "loss": effort.loss}
        return after

    # ---- evaluation ----------------------------------------------------------------------------------------------
    def _score(self, request: Value, jobs: Sequence[Value]) -> Value:
        """All views the request asks for, of these clients; nothing is kept."""
        method, round = self.method, request["round"]
        opened = [self._open(request, item) for item in jobs]
        own = [method.personal(state, download, data) for data, _, state, download in opened]
        answers: list[dict[str, Any]] = [{"client": item["client"]} for item in jobs]

        def put(view: str, models: Sequence[tuple[Tree, Extras]], who: Sequence[int], shared: bool = False) -> None:
            for part, splits in (("test", [test for _, test, _, _ in opened]), ("val", [d.val for d, *_ in opened])):
                at = [(m, i) for m, i in zip(models, who, strict=True) if part == "test" or len(splits[i])]
                scores = self._scores([Case(*m, splits[i]) for m, i in at], shared)
                for (_, i), s in zip(at, scores, strict=True):
                    answers[i][f"{view}/{part}"] = s

        everybody = range(len(jobs))
        put("personal", own, everybody)
        whole = request.get("global")
        if whole is not None:
            plain = type(method).predict_global is _PREDICT_GLOBAL
            same = [plain and not extras and _same(whole, params) for params, extras in own]
            for a in (a for a, known in zip(answers, same, strict=True) if known):
                a |= {f"global/{k.removeprefix('personal/')}": v for k, v in a.items() if k.startswith("personal/")}
            rest = [i for i in everybody if not same[i]]
            put("global", [(whole, {})] * len(rest), rest, shared=True)
        if request.get("official"):
            for a, (params, extras), (data, *_) in zip(answers, own, opened, strict=True):
                a |= self._official(request, params, extras, len(data.train))
        if phases := method.adapt():
            members = [Member(*m, data) for m, (data, *_) in zip(own, opened, strict=True)]
            self._practise(phases, members, round)
            put("adapted", [(m.params, m.extras) for m in members], everybody)
        if request["trained"]:
            members = [
                Member(*method.begin(s, download, d, round), d, memory=self._memory(item))
                for (d, _, s, download), item in zip(opened, jobs, strict=True)
            ]
            self._practise(method.phases(round), members, round)
            after = []
            for m, (data, _, state, _) in zip(members, opened, strict=True):
                with torch.no_grad():
                    state, _ = method.end(state, m.params, m.extras, data, round)
                after.append(method.trained(state, m.params, m.extras))
            put("trained", after, everybody)
        return answers

    def _official(self, request: Value, params: Tree, extras: Extras, samples: int) -> dict[str, Any]:
        """The personal model on the official test part, and the model itself where there is none for all."""
        known, same = request["official"]["global"], not extras and _same(request["global"] or {}, params)
        if known is not None and same and type(self.method).predict_global is _PREDICT_GLOBAL:
            return {"personal/official": known}
        answer: dict[str, Any] = {"personal/official": official.plain(self.method, self.federation, params, extras)}
        names = self.method.ctx.w0
        if known is None and not extras and not names.keys() - params.keys():
            answer |= {"model": {k: params[k] for k in names}, "samples": samples}
        return answer

    def _whole(self, request: Value) -> Value:
        """One model for all on the official test part."""
        return official.plain(self.method, self.federation, request["model"], {}, shared=True)


_PREDICT_GLOBAL = Method.predict_global


def _plain(s: Score) -> dict[str, Any]:
    return {"hits": s.hits, "total": s.total, "loss": float(s.loss)}


def _same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def clone_value(value: Value) -> Value:
    """A deep copy with tensors of its own: what is handed over is never shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: clone_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clone_value(v) for v in value]
    return value


__all__ = ["Device", "clone_value"]
