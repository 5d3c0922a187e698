"""The device's side of a federation: answers the cloud with its own data, and keeps its state to itself.

Kinds of messages: `hello` (the plan of a run; answered with what a roster needs), `train` and `score` (one job). An
answer never holds state: what leaves is the method's upload, its numbers, and counts of hits.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from coterie import codec
from coterie import tree as T
from coterie.codec import Value
from coterie.data.sources import load
from coterie.errors import CoterieError
from coterie.method import Method
from coterie.runtimes.flower import validate as v
from coterie.runtimes.flower.plan import Plan
from coterie.runtimes.flower.states import States, lock
from coterie.session import Session

NO_PLAN = "no plan of this run is known here"  # the cloud then says hello again
log = logging.getLogger("coterie.device")


@dataclass
class Member:
    """One client. `handle` is what the transport calls."""

    data: str  # a file, a folder, module:function; with `client` a name that every party can load
    state: Path
    client: int | None = None
    data_dir: Path | None = None
    _plan: Plan | None = None
    _session: Session | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._lock = lock(self.state)

    def handle(self, kind: str, round: int, value: Value) -> Value:
        v.need(isinstance(value, dict), "the message is not a dictionary")
        if kind == "hello":
            return self.hello(str(value.get("plan")))
        if kind not in ("train", "score"):
            raise CoterieError(f'a device cannot answer "{kind}"')
        common, mine = value.get("common"), value.get("mine")
        v.need(isinstance(common, dict) and isinstance(mine, dict), "the message has no job")
        assert isinstance(common, dict) and isinstance(mine, dict)
        session = self.session(str(common.get("run")))
        client = self._seat(session, v.whole(mine.get("client"), "client"))
        return self._work(session, kind, v.whole(round, "round"), client, common, mine)

    # ---- what the run is ---------------------------------------------------------------------------------------------
    def hello(self, text: str) -> Value:
        plan = Plan.read(text)
        session = self._open(plan)
        codec.write_atomic(self._folder(plan.run) / "plan.json", text.encode())
        fed = session.federation
        at = self._seated(plan.run) if self.client is None else self.client
        here = 0 if at is None else at
        labels = int((fed.data(here).label_counts > 0).sum())
        log.info("run %s: %s, %s rounds", plan.run[:8], session.method.title, session.settings.rounds)
        return {"client": at, "labels": labels, "samples": len(fed.data(here).train)}

    def session(self, run: str) -> Session:
        """The run this message belongs to; after a restart its plan is read back and checked again."""
        if self._plan is None or self._plan.run != run or self._session is None:
            v.need(len(run) == 32 and run.isalnum(), "the message names no run")
            path = self._folder(run) / "plan.json"
            if not path.is_file():
                raise CoterieError(NO_PLAN)
            self._open(Plan.read(path.read_text()))
        assert self._session is not None
        return self._session

    def _open(self, plan: Plan) -> Session:
        if self._plan != plan or self._session is None:
            self._session, self._plan = plan.session(self.data, self.client, self.data_dir), plan
        return self._session

    def _folder(self, run: str) -> Path:
        return self.state / run

    def _seated(self, run: str) -> int | None:
        path = self._folder(run) / "client.json"
        return int(json.loads(path.read_text())["client"]) if path.is_file() else None

    def _seat(self, session: Session, client: int) -> int:
        """The cloud's roster gives a place once; a job for another place is refused, so states are never mixed up."""
        assert self._plan is not None
        mine = self.client if self.client is not None else self._seated(self._plan.run)
        if mine is None:
            codec.write_atomic(self._folder(self._plan.run) / "client.json", json.dumps({"client": client}).encode())
        elif mine != client:
            raise CoterieError(f"this device is client {mine} of the run, not {client}")
        return client

    # ---- work --------------------------------------------------------------------------------------------------------
    def _work(
        self, session: Session, kind: str, round: int, client: int, common: dict[str, Any], mine: dict[str, Any]
    ) -> Value:
        ctx, base = session.method.ctx, v.whole(mine.get("base"), "base", -1)
        v.need(round > base and round <= ctx.rounds + 1, f"round {round} is over or never comes (my state: {base})")
        largest = v.DOWNLOADS * T.nbytes(ctx.w0) + v.SLACK
        request: dict[str, Any] = {"op": kind, "round": round}
        request["shared"] = v.tree(common.get("shared"), ctx, "the download", largest)
        job: dict[str, Any] = {"client": client, "each": v.tree(mine.get("each"), ctx, "the download", largest)}
        states = States(self._folder(self._run) / str(client))
        job["state"] = states.read(base)
        if kind == "train":
            share = mine.get("share", 1.0)
            v.need(type(share) is float and 0 <= share <= 1, "share must lie between 0 and 1")
            request["watch"] = bool(common.get("watch"))
            answer = session.device().handle(request | {"jobs": [job | {"share": share}]})[0]
            states.write(round, answer.pop("state"), base)
            return answer
        whole = common.get("global")
        request["global"] = None if whole is None else v.tree(whole, ctx, "the global model", largest)
        request["trained"] = bool(common.get("trained"))
        answer = session.device().handle(request | {"jobs": [job]})[0]
        self._keep_model(session, request, job, round)
        return answer

    @property
    def _run(self) -> str:
        assert self._plan is not None
        return self._plan.run

    def _keep_model(self, session: Session, request: dict[str, Any], job: dict[str, Any], round: int) -> None:
        """The personal model as a file of its own beside the state, for whoever wants to use it on this device."""
        method, client = session.method, job["client"]
        data = session.federation.data(client)
        state = job["state"] if job["state"] is not None else method.init_client(data)
        with torch.no_grad():
            params, extras = method.personal(state, {**request["shared"], **job["each"]}, data)
        plain = not extras and type(method).predict is Method.predict
        about = {"method": method.title, "client": str(client), "round": str(round - 1), "plain": str(plain).lower()}
        blob = save_tensors({k: t.detach().clone().contiguous() for k, t in params.items()}, about)
        codec.write_atomic(self._folder(self._run) / "model.safetensors", blob, durable=False)


def join(cloud: str, ca: Path, key: Path, member: Member) -> None:
    """Answer the cloud until told to stop (SIGTERM, Ctrl-C)."""
    import signal

    from coterie.runtimes.flower.transport.node import Device

    for what, path in (("the authority's certificate", ca), ("the node key", key)):
        if not path.is_file():
            raise CoterieError(f"{what} {path} does not exist")
    load(member.data, member.data_dir)  # a wrong name is found now, not when the cloud first asks
    device = Device(cloud, ca, key, member.handle)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: device.stopping.set())
    device.run()
