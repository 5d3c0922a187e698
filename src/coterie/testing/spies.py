"""One run per method that the checks share, and spies that record it."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.context import ClientId, Context
from coterie.core.method import Client, Method, Trained
from coterie.engine import codec
from coterie.engine.loop import Loop
from coterie.engine.messages import TrainAnswer, TrainRequest
from coterie.engine.round import RoundAnswers, RoundPlan
from coterie.engine.session import Session, make_loop
from coterie.errors import CoterieError
from coterie.runtimes.base import Replies
from coterie.runtimes.inline import Inline
from coterie.storage.run_folder import Folder
from coterie.testing.fixtures import Bench, close_loop
from coterie.train.devices import find_devices


@dataclass
class Standard:
    """A run of three rounds with all its messages, and the hooks that broke a rule in it."""

    session: Session
    folder: Path
    loop: Loop
    rounds: list["Watched"] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # hooks that changed their arguments
    plan_used: list[str] = field(default_factory=list)  # hooks that read ctx.planned_rounds


@dataclass(frozen=True)
class Watched:
    """One round: the states before it, the plan, and the answers."""

    server: Any
    edges: Any
    plan: RoundPlan
    requests: Mapping[ClientId, TrainRequest]  # requests after relaying
    answers: RoundAnswers
    states: Mapping[ClientId, Any]  # clients' states before the round
    bytes: Any


class _Spy(Inline):
    """A runtime that keeps the requests of the last round."""

    requests: dict[ClientId, TrainRequest]

    def train(self, requests: Sequence[TrainRequest]) -> Replies[TrainAnswer]:
        self.requests = {r.client: codec.deep_copy(r) for r in requests}
        return super().train(requests)


_standards: dict[Any, Standard] = {}


def standard(bench: Bench) -> Standard:
    """Return the run that all checks of a method share in this process."""
    own = json.dumps(bench.own, sort_keys=True, default=str)
    name = (type(bench), bench.method, bench.model, bench.engine.model_dump_json(), own)
    if name not in _standards:
        for old in _standards.values():
            shutil.rmtree(old.folder, ignore_errors=True)
        _standards.clear()
        _standards[name] = _standard(bench)
    return _standards[name]


def _standard(bench: Bench) -> Standard:
    session = bench.session()
    folder = Path(tempfile.mkdtemp(prefix="coterie-battery-"))
    device = find_devices(session.engine.device)[0]
    runtime = _Spy(session.clients(), session.states(folder), session.cost, device)
    loop = make_loop(session, Folder(folder), runtime)
    made = Standard(session, folder, loop)
    with _guarded(session.method, made.changed, made.plan_used):
        loop.start()
        while loop.done < session.settings.rounds:
            server, edges = codec.deep_copy(loop.server), codec.deep_copy(loop.edges)
            states = codec.deep_copy({i: runtime.states.get(i) for i in session.method.ctx.clients})
            seen: list[tuple[RoundPlan, RoundAnswers]] = []
            run, before = runtime.run, loop.bytes

            def spy(planned: RoundPlan, run: Any = run, seen: Any = seen) -> RoundAnswers:
                answers = run(planned)
                seen.append((planned, codec.deep_copy(answers)))
                return answers  # type: ignore[no-any-return]

            runtime.run = spy  # type: ignore[method-assign, assignment]
            loop.step()
            runtime.run = run  # type: ignore[method-assign]
            loop.folder.timing(round=loop.done, seconds=0.0)
            loop.checkpoint()
            planned, answers = seen[0]
            made.rounds.append(
                Watched(server, edges, planned, dict(runtime.requests), answers, states, _minus(loop.bytes, before))
            )
    close_loop(loop)
    return made


def _minus(after: Any, before: Any) -> Any:
    """Return the bytes of one round, by link and direction."""
    return {
        (link, way): sum(parts.values()) - sum(before.get(link, {}).get(way, {}).values())
        for link, ways in after.items()
        for way, parts in ways.items()
    }


GUARDED = (
    "down", "deliver", "aggregate", "begin", "end", "model", "personal", "global_model", "facts", "relay", "calls",
    "merge",
)  # fmt: skip


@contextmanager
def _guarded(method: Method, changed: list[str], plan_used: list[str]) -> Iterator[None]:
    """Record the hooks that change their arguments, and those that read `ctx.planned_rounds`.

    `deliver` may read it: it decides what is scored, not how clients are trained.
    """
    running: list[str] = []

    class RecordingContext(Context):
        def __getattribute__(self, name: str) -> Any:
            if name == "planned_rounds" and "deliver" not in running:
                plan_used.append(running[-1] if running else "a hook")
            return super().__getattribute__(name)

    def guard(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            held = [v for a in args for v in _values(a)]
            before = codec.deep_copy(held)
            running.append(name)
            try:
                out = hook(*args)
            finally:
                running.pop()
            if not codec.equal(before, held):
                changed.append(name)
            return out

        return guarded

    names = [n for n in GUARDED if hasattr(method, n)]
    for name in names:
        setattr(method, name, guard(name, getattr(method, name)))
    ctx, method.ctx = method.ctx, RecordingContext(**vars(method.ctx))
    try:
        yield
    finally:
        method.ctx = ctx
        for name in names:
            delattr(method, name)


def _values(argument: Any) -> list[codec.Value]:
    """Return the parts of a hook's argument that can be compared: all of it, or trees and states in it."""
    if isinstance(argument, Client):
        return [v for part in argument for v in _values(part)]
    if isinstance(argument, Trained):
        return [v for part in (argument.params, argument.extras, argument.aux) for v in _values(part)]
    try:
        codec.tensors_of(argument)
    except CoterieError:
        return []
    return [argument]
