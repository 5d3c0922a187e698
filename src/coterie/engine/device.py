"""The client's side of a run: answers requests with its own data and state. The same in every runtime.

Requests and replies are codec values, so a device may sit in this process, in a worker process or on another host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coterie import tree as T
from coterie.codec import Value
from coterie.data.federation import Federation
from coterie.engine import official
from coterie.engine.evaluate import Score, score
from coterie.engine.optim import Optimiser
from coterie.engine.stack import Stacker
from coterie.engine.stack_run import Member
from coterie.engine.trainer import Effort, train
from coterie.errors import CoterieError
from coterie.method import ClientData, Extras, Method, Split, State
from coterie.tree import Tree


@dataclass(frozen=True)
class Work:
    """One client between the start and the end of its local training."""

    item: Value
    state: State
    test: Split
    own: Tree  # the personal model before it
    member: Member
    answer: dict[str, Any]


@dataclass(frozen=True)
class Device:
    """Serves any client of the federation it can see; on a real device that is one."""

    method: Method
    federation: Federation
    rule: Optimiser
    stacker: Stacker | None = None  # None: client by client

    def handle(self, request: Value) -> Value:
        """One batch of jobs for one operation, answered in order."""
        if request["op"] == "train":
            return self._train(request)
        job: Callable[..., Value] = {"score": self._score, "whole": self._whole}[request["op"]]
        return [self._named(request, item, job, request, item) for item in request["jobs"]]

    def _named(self, request: Value, item: Value, job: Callable[..., Any], *args: Any) -> Any:
        """Do the job; what goes wrong says where."""
        try:
            return job(*args)
        except CoterieError:
            raise
        except Exception as e:
            where = f"{request['op']} of client {item['client']} in round {request['round']}"
            raise RuntimeError(f"{type(self.method).__name__}, {where}: {type(e).__name__}: {e}") from e

    def _train(self, request: Value) -> Value:
        """These clients' part of a round, one after the other or all at once."""
        jobs = request["jobs"]
        if self.stacker is None:
            return [self._named(request, item, self._alone, request, item) for item in jobs]
        works = [self._named(request, item, self._begin, request, item) for item in jobs]
        phases = self.method.phases(request["round"])
        if works:
            self._named(request, jobs[0], self.stacker.train, phases, [w.member for w in works], request["round"])
        return [self._named(request, w.item, self._end, request, w, w.member.effort) for w in works]

    def _alone(self, request: Value, item: Value) -> Value:
        work = self._begin(request, item)
        m, round = work.member, request["round"]
        phases = self.method.phases(round)
        m.params, m.extras, effort = train(
            self.method.ctx, self.rule, phases, m.params, m.extras, m.data, round, m.share
        )
        return self._end(request, work, effort)

    def _open(self, request: Value, item: Value) -> tuple[ClientData, Split, State, Tree]:
        client = item["client"]
        data = self.federation.data(client)
        state = item["state"] if item["state"] is not None else self.method.init_client(data)
        return data, self.federation.test(client), state, {**request["shared"], **item["each"]}

    def _begin(self, request: Value, item: Value) -> Work:
        """Where one client starts; `watch` adds scores before and after local training."""
        method = self.method
        data, test, state, download = self._open(request, item)
        answer: dict[str, Any] = {"client": item["client"], "samples": len(data.train)}
        own, more = method.personal(state, download, data) if request["watch"] or request.get("moves") else ({}, {})
        if request["watch"]:
            answer["before"] = _plain(score(method, own, more, test))
        params, extras = method.begin(state, download, data, request["round"])
        return Work(item, state, test, own, Member(params, extras, data, item["share"]), answer)

    def _end(self, request: Value, work: Work, effort: Effort) -> Value:
        method, round, answer, own, test = self.method, request["round"], work.answer, work.own, work.test
        params, extras, data = work.member.params, work.member.extras, work.member.data
        with torch.no_grad():
            state, upload = method.end(work.state, params, extras, data, round)
        if request["watch"] and method.phases(round):
            answer["after"] = _plain(score(method, *method.trained(state, params, extras), test))
        if request.get("moves"):
            names = [k for k in own if k in method.ctx.net.trainable]
            new = method.trained(state, params, extras)[0]
            answer["move"] = T.flatten(new, names) - T.flatten(own, names)
        answer |= {"state": state, "tree": upload.tree, "note": dict(upload.note)}
        return answer | {"steps": effort.steps, "loss": effort.loss}

    def _score(self, request: Value, item: Value) -> Value:
        """All views the request asks for, of one client; nothing is kept."""
        method, round = self.method, request["round"]
        data, test, state, download = self._open(request, item)
        parts = {"test": test} | ({"val": data.val} if len(data.val) else {})
        params, extras = method.personal(state, download, data)
        answer: dict[str, Any] = {"client": item["client"]}

        def put(view: str, tree: Tree, more: Extras, shared: bool = False) -> None:
            for part, split in parts.items():
                answer[f"{view}/{part}"] = _plain(score(method, tree, more, split, shared))

        put("personal", params, extras)
        whole = request.get("global")
        if whole is not None:
            if not extras and _same(whole, params) and type(method).predict_global is _PREDICT_GLOBAL:
                for part in parts:
                    answer[f"global/{part}"] = answer[f"personal/{part}"]
            else:
                put("global", whole, {}, shared=True)
        if request.get("official"):
            answer |= self._official(request, params, extras, len(data.train))
        if phases := method.adapt():
            adapted, more, _ = train(method.ctx, self.rule, phases, params, extras, data, round)
            put("adapted", adapted, more)
        if request["trained"]:
            start, more = method.begin(state, download, data, round)
            after, more, _ = train(method.ctx, self.rule, method.phases(round), start, more, data, round)
            with torch.no_grad():
                state, _ = method.end(state, after, more, data, round)
            put("trained", *method.trained(state, after, more))
        return answer

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

    def _whole(self, request: Value, item: Value) -> Value:
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
