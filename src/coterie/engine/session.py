"""From settings to a run: data, model, method and loop put together, and everything checked before work starts."""

import copy
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from coterie.config import PUBLIC, Engine, RunSettings
from coterie.core.method import Context, Method
from coterie.core.net import Net
from coterie.core.rng import key
from coterie.core.tree import Tree
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, federate
from coterie.data.sources import load_dataset
from coterie.data.target_types import with_task
from coterie.engine import official_test as official
from coterie.engine.loop import Loop, Progress, Schedule
from coterie.engine.official_test import Official
from coterie.engine.provenance import code_digest, origin, plans_by_rounds, recalled
from coterie.engine.round import Rules
from coterie.errors import CoterieError
from coterie.methods import build as build_method
from coterie.methods import fields, restored, unusual_reading, written_out
from coterie.models.per_client import PerClient, assign_models, is_assignment
from coterie.models.registry import WITH_NORM, default_for, options_of
from coterie.models.registry import build as build_model
from coterie.runtimes.base import Interrupted, Runtime
from coterie.runtimes.inline import Inline
from coterie.runtimes.workers import Workers, can_fork
from coterie.storage import atomic as disk
from coterie.storage.client_states import ClientStates, StateLostError
from coterie.storage.run_folder import EVENTS, START, Folder, extend, read_log, read_settings
from coterie.train import native
from coterie.train.clients import Clients
from coterie.train.engine_choice import Choice, choose
from coterie.train.optimisers import Optimiser
from coterie.train.vmap.trainer import Stacker

Factory = Callable[..., nn.Module]
FEW = 10  # validation samples below which a choice by them is mostly chance


@dataclass(frozen=True)
class Objects:
    """Python objects that stand in for what settings name."""

    method: type[Method] | None = None
    dataset: Dataset | None = None
    model: nn.Module | Factory | PerClient | None = None
    data_from: str = ""  # module:name of the function that made the data set, if it was one

    def described(self) -> dict[str, str]:
        """Where each of them comes from: such a run can be continued only with the same objects."""
        found = {k: origin(_maker(v)) for k, v in self._given().items()}
        return {**found, "data": self.data_from} if self.data_from else found

    def digests(self) -> dict[str, str]:
        """Of the code of methods and models; the identity of a partition covers the data."""
        return {k: code_digest(_maker(v)) for k, v in self._given().items() if k != "data"}

    def _given(self) -> dict[str, object]:
        given = {"method": self.method, "data": self.dataset, "model": self.model}
        return {k: v for k, v in given.items() if v is not None}

    def recall(self, found: Mapping[str, Any], path: Path) -> "Objects":
        """With what a run was made with and nobody gives, imported by its name; a sentence where that is impossible."""
        out = self
        for name, where in found["objects"].items():
            if name in self._given():
                continue
            thing = recalled(where) if name not in found.get("built", ()) else None
            if name == "data" and thing is not None:
                thing = None if isinstance(thing, type) or not callable(thing) else thing()
            if name == "data" and isinstance(thing, Dataset):
                out = replace(out, dataset=thing, data_from=where)
            elif thing is not None and name == "method" and isinstance(thing, type) and issubclass(thing, Method):
                out = replace(out, method=thing)
            elif thing is not None and name == "model" and callable(thing):
                out = replace(out, model=thing)
            else:
                raise CoterieError(f"{path} was made with a {name} of your own ({where}); give the same one again")
        return out


def _maker(thing: object) -> object:
    """A choice of models by client is known by its function."""
    return thing.pick if isinstance(thing, PerClient) else thing


@dataclass(frozen=True)
class Session:
    """A checked run that has not started: nothing is written yet."""

    settings: RunSettings
    engine: Engine
    federation: Federation
    method: Method
    objects: Objects = field(default_factory=Objects)
    others: Mapping[int, Method] = field(default_factory=dict)  # the method bound to other models, by client

    def method_of(self, client: int) -> Method:
        """The method with this client's own model."""
        return self.others.get(client, self.method)

    @property
    def newcomers(self) -> tuple[int, ...]:
        return self.federation.clients[len(self.federation.clients) - self.settings.newcomers :]

    def clients(self) -> Clients:
        s = self.settings
        rule = Optimiser(s.optimizer, s.momentum, s.weight_decay, s.opt_state == "keep")
        stacker = Stacker(self.method.ctx, rule) if self.engine.engine == "stack" else None
        return Clients(self.method, self.federation, rule, stacker, self.others)

    def extended(self) -> str:
        """What to know of a run that goes on beyond its plan; empty if nothing."""
        plan, rounds = self.method.ctx.rounds, self.settings.rounds
        if plan == rounds or not plans_by_rounds(type(self.method)):
            return ""
        return (
            f"{self.method.card.title} plans by the number of rounds: the plan for {plan} rounds stays, and the run is "
            f"not the one that {rounds} rounds from the start would be"
        )

    def chosen(self) -> list[str]:
        """A sentence for each thing that nobody named and that the method needs."""
        s, method, fed = self.settings, self.method, self.federation
        found = []
        if "bn" in method.needs and s.model is None and self.objects.model is None:
            name = default_for(fed.shape, fed.num_classes, fed.dataset.x.dtype, batch_norm=True)
            found.append(f"{method.card.title} needs a model with batch norm: {name} is used (--model names another)")
        if "public" in method.needs and s.federation.public == PUBLIC:
            found.append(
                f"{method.card.title} needs a public set: {PUBLIC} items are set aside for it, without labels "
                "(--set public=N takes another number)"
            )
        if "some_val" in method.needs and (few := int((fed.sizes("val") < FEW).sum())):
            found.append(
                f"{method.card.title} chooses by validation data: {few} of {len(fed.clients)} clients have fewer than "
                f"{FEW} such samples and lean on the choice of all (val_share = {s.federation.val_share:g})"
            )
        return found

    def options_for(self, source: object) -> dict[str, Any]:
        """The options that this model was built with; where clients have different models, those it has."""
        options = self.settings.model_options
        return _options_of(source, options) if self.others and isinstance(source, str) else options

    def model_of(self, client: int) -> str | nn.Module | Factory:
        """The client's model: a name, also where nobody named one, or the user's own."""
        own, name = self.objects.model, self.settings.model
        if isinstance(own, PerClient) or (own is None and is_assignment(name)):
            return assign_models(own or str(name), self.federation.clients)[client]
        return own or _source(self.settings, self.federation, "bn" in self.method.needs)

    def tensors(self) -> str:
        """Digest of the model's names and shapes, and of first values that are not drawn from the seed."""
        found, ctx = hashlib.blake2b(digest_size=16), self.method.ctx
        values = isinstance(self.objects.model, nn.Module) or self.settings.warm_start is not None
        for name, v in [*ctx.w0.items(), *ctx.net.constants().items()]:
            found.update(f"{name} {tuple(v.shape)}".encode())
            if values:
                found.update(v.contiguous().numpy().tobytes())
        return found.hexdigest()

    def cost(self, client: int) -> int:
        """Relative cost of a client, in any unit."""
        return int(self._costs[client])

    @cached_property
    def _costs(self) -> Any:
        return self.federation.sizes("train") * self.settings.epochs * 3 + self.federation.sizes("test") * 2

    def described(self) -> dict[str, Any]:
        """The content of settings.json."""
        named = self.objects.method or self.settings.method
        return {
            "settings": self.settings.model_dump(mode="json"),
            "method": {
                "name": type(self.method).__name__,
                "title": self.method.card.title or type(self.method).__name__,
                "settings": written_out(named, self.method),
                "reading": unusual_reading(named, self.method),
                "weighting": self.settings.weighting or self.method.weighting,
                "certainty": self.method.card.certainty,
            },
            "objects": self.objects.described(),
            "task": {"name": self.method.ctx.task.name, "outputs": self.method.ctx.task.outputs},
            "digests": self.objects.digests(),
            "built": ["model"] if isinstance(self.objects.model, nn.Module | PerClient) else [],
            "tensors": self.tensors(),
            "partition": self.federation.identity,
            "client_names": list(self.federation.names) if self.federation.named else None,
            "data_dir": str(self.engine.data_dir.resolve()) if self.engine.data_dir else None,
            "normalisation": {"mean": self.federation.dataset.mean, "std": self.federation.dataset.std},
            "parameters": sum(self.method.ctx.w0[k].numel() for k in self.method.ctx.net.trainable),
            "versions": {
                "coterie": version("coterie"),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "convolutions": native.status(),
            },
        }


def prepare(
    settings: RunSettings,
    engine: Engine | None = None,
    objects: Objects | None = None,
    loaded: Dataset | None = None,
    start: Tree | None = None,
    plan: int | None = None,
) -> Session:
    """Load and partition the data, build model and method, and check everything.

    `objects` replace what the settings name; `loaded` is the data set, if it was loaded already; `start` are initial
    values instead of drawn ones, `plan` is the number of rounds that a run began with.
    """
    objects = objects or Objects()
    torch.set_num_threads(1)
    engine = engine or Engine()
    bound = build_method(objects.method or settings.method, settings.settings)
    dataset = objects.dataset or loaded or load_dataset(settings.data, engine.data_dir, settings.subset)
    dataset = with_task(dataset, settings.task)
    federation = federate(dataset, settings.federation, settings.seed)
    if settings.warm_start is not None and start is None:
        start = _warm_start(Path(settings.warm_start))
    session = bind(settings, engine, bound, federation, objects.model, start, plan)
    return replace(session, objects=objects)


def _warm_start(path: Path) -> Tree:
    """The global model of another run, or the mean of its clients' models."""
    read: Callable[[Path], Tree] = resolve_name(
        "coterie.engine.personal_models:mean_model"
    )  # by name: runs are built on sessions
    return read(path)


def _started(drawn: Tree, start: Tree | None, where: str | None) -> Tree:
    """First values: those that were drawn, or those of another run if they fit."""
    if start is None:
        return drawn
    odd = [k for k in {**drawn, **start} if k not in drawn or k not in start or drawn[k].shape != start[k].shape]
    if odd:
        there, here = (tuple(t[odd[0]].shape) if odd[0] in t else "absent" for t in (start, drawn))
        raise CoterieError(f"the models of {where} do not fit this run's: {odd[0]} is {there} there and {here} here")
    return {k: start[k].clone() for k in drawn}


def bind(
    settings: RunSettings,
    engine: Engine,
    bound: Method,
    federation: Federation,
    model: nn.Module | Factory | PerClient | None = None,
    start: Tree | None = None,
    plan: int | None = None,
) -> Session:
    """A method with its model and context on partitioned data."""
    if isinstance(model, PerClient) or (model is None and is_assignment(settings.model)):
        if start is not None:
            raise CoterieError("warm_start needs one model for all clients")
        return _bind_each(settings, engine, bound, federation, model or str(settings.model), plan)
    n = len(federation.clients)
    if settings.newcomers >= n:
        raise CoterieError(f"newcomers = {settings.newcomers} leaves none of the {n} clients to train")
    net = _net(settings, federation, model, batch_norm="bn" in bound.needs)
    bound.ctx = Context(
        net=net,
        w0=_started(net.state(), start, settings.warm_start),
        clients=federation.clients[: n - settings.newcomers],
        task=federation.task,
        rounds=plan or settings.rounds,
        join=settings.join,
        epochs=settings.epochs,
        batch=settings.batch,
        lr=settings.lr,
        seed=settings.seed,
        weighting=settings.weighting,
        bn_stats=settings.bn_stats,
        lr_decay=settings.lr_decay,
        public=settings.federation.public,
        headline=settings.headline,
        momentum=settings.momentum if settings.optimizer == "sgd" else 0.0,
    )
    _check_needs(bound, federation)
    if settings.official:
        official.check(federation)
    if settings.stop_after is not None and not federation.sizes("val").any():
        raise CoterieError("stop_after needs a validation part, and no client has one (set val_share)")
    bound.check()
    return Session(settings, engine, federation, bound)


def _bind_each(
    settings: RunSettings,
    engine: Engine,
    bound: Method,
    federation: Federation,
    models: PerClient | str,
    plan: int | None = None,
) -> Session:
    """The same where clients have different models: the method is bound once for each of them, on the server to the
    first client's; what it exchanges must not depend on which.
    """
    title = bound.card.title or type(bound).__name__
    if bound.agree == "model":
        raise CoterieError(
            f"{title} needs the same model at every client; models that differ work with methods that exchange "
            "prototypes, heads or predictions only (fedproto, fedtgp, fedgh, fedgmh, fedmd)"
        )
    for name in ("official", "log_updates"):
        if getattr(settings, name):
            raise CoterieError(f"{name} = true needs the same model at every client")
    made: dict[object, Session] = {}
    of = {}
    for i, source in assign_models(models, federation.clients).items():
        key = source if isinstance(source, str) else id(source)
        if key not in made:
            fits = _options_of(source, settings.model_options) if isinstance(source, str) else {}
            plain = settings.model_copy(
                update={"model": source if isinstance(source, str) else None, "model_options": fits}
            )
            one = copy.copy(bound)
            own = None if isinstance(source, str) else source
            made[key] = bind(plain, engine, one, federation, own, plan=plan)
        of[i] = made[key].method
    if unused := set(settings.model_options) - {k for s in made.values() for k in s.settings.model_options}:
        raise CoterieError(f'none of the models has an option "{min(unused)}"')
    first = of[federation.clients[0]]
    for i, method in of.items():
        a, b = first.ctx.net, method.ctx.net
        if bound.agree == "head" and (a.width, a.head_names) != (b.width, b.head_names):
            what = (
                f"{a.width} and {b.width} features before the head"
                if a.width != b.width
                else f"heads with other names ({a.head_names[0]}, {b.head_names[0]})"
            )
            raise CoterieError(
                f"the models of clients {federation.clients[0]} and {i} have {what}; {title} exchanges those, so they "
                "must agree"
            )
    others = {i: method for i, method in of.items() if method is not first}
    return Session(settings, engine, federation, first, others=others)


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this model knows; one that none of the models knows is refused after all are made."""
    known = options_of(name)
    return {k: v for k, v in options.items() if k in known}


def _net(
    settings: RunSettings, federation: Federation, model: nn.Module | Factory | None, batch_norm: bool = False
) -> Net:
    """The model with its first values drawn from the seed; an instance that the user built keeps its own.

    Without a name it is what fits the data, with batch norm if the method needs that.
    """
    data = federation.dataset
    example = data.ready(torch.arange(2), federation.settings.normalize)
    task = federation.task
    module = build_model(
        model or _source(settings, federation, batch_norm),
        federation.shape,
        task.outputs,
        seed=key(settings.seed, "init"),
        dtype=example.dtype,
        vocab=data.vocab,
        options=settings.model_options,
        task=task.name,
    )
    net = Net(module, example)
    if net.layout.of_kind("conv"):
        native.available()  # compiled or loaded here once, before any worker is forked
    return net


def _source(settings: RunSettings, federation: Federation, batch_norm: bool) -> str:
    """The name of the model: the one that was named, or what fits the data."""
    if settings.model is not None and settings.model != WITH_NORM:
        return settings.model
    example = federation.dataset.ready(torch.arange(2), federation.settings.normalize)
    norm = batch_norm or settings.model == WITH_NORM
    task = federation.task
    return default_for(federation.shape, task.outputs, example.dtype, norm, task.name)


_NEEDS: dict[str, tuple[Callable[[Method, Federation], bool], str]] = {
    "bn": (
        lambda m, f: bool(m.ctx.net.layout.of_kind("bn")),
        "a model with batch norm (such as mlp-bn, lenet5 or default-bn)",
    ),
    "head": (lambda m, f: m.ctx.net.layout.head is not None, "a model whose last layer is an nn.Linear (its head)"),
    "val": (lambda m, f: bool((f.sizes("val") > 0).all()), "a validation part at every client (set val_share)"),
    "some_val": (lambda m, f: f.settings.val_share > 0, "validation parts to choose by (set val_share)"),
    "public": (lambda m, f: f.public() is not None, "a public set (set public to a number of items)"),
    "classes": (lambda m, f: f.num_classes > 0, "class labels (task = classification or binary)"),
    "full": (lambda m, f: m.ctx.join == 1, "full participation (set join to 1)"),
}


def _check_needs(method: Method, federation: Federation) -> None:
    for need in method.needs:
        holds, words = _NEEDS[need]
        if not holds(method, federation):
            here = f", and the task here is {federation.task.name}" if need == "classes" else ""
            raise CoterieError(f"{method.card.title} needs {words}{here}")


def make_loop(session: Session, folder: Folder, runtime: Runtime) -> Loop:
    s = session.settings
    rules = Rules(s.seed, s.dropout, s.stragglers, s.watch, s.log_updates)
    return Loop(
        session.method,
        runtime,
        folder,
        Schedule(
            rounds=s.rounds,
            rules=rules,
            eval_every=s.eval_every,
            checkpoint_every=1 if session.engine.runtime == "flower" else s.checkpoint_every,
            final_trained=s.final_trained,
            headline=s.headline,
            newcomers=session.newcomers,
            eval_clients=s.eval_clients,
            stop_after=s.stop_after,
        ),
        Official(session.method, session.federation, s.gm_head) if s.official else None,
    )


def client_states(session: Session, folder: Path) -> ClientStates:
    return ClientStates(folder, len(session.federation.clients), session.engine.state == "disk")


Opener = Callable[[Session, Path, Callable[[], bool]], AbstractContextManager[Runtime]]
OPENERS = {"flower": "coterie.federation.localhost.runtime:open_here"}


def open_runtime(
    session: Session, folder: Path, stopped: Callable[[], bool] = lambda: False
) -> AbstractContextManager[Runtime]:
    """The runtime that computes a run's clients; the choice does not affect results."""
    e = session.engine
    if e.address is not None and e.runtime != "ray":
        raise CoterieError(f"address = {e.address} is of a Ray cluster and needs runtime = ray")
    if e.runtime in OPENERS:  # by name, because such a runtime is built on sessions
        opener: Opener = resolve_name(OPENERS[e.runtime])
        return opener(session, folder, stopped)
    return _open_simulation(session, folder)


@contextmanager
def _open_simulation(session: Session, folder: Path) -> Iterator[Runtime]:
    e = session.engine
    states = client_states(session, folder)
    workers = e.workers or os.cpu_count() or 1
    torch.set_num_threads(1)
    runtime: Runtime
    if e.runtime == "ray":
        from coterie.runtimes.ray import RayRuntime

        runtime = RayRuntime(session.clients(), states, e.workers, e.address, session.cost)
    elif workers > 1 and can_fork():
        runtime = Workers(session.clients(), states, workers, session.cost)
    else:
        runtime = Inline(session.clients(), states, session.cost)
    try:
        yield runtime
    finally:
        runtime.close()


def execute(
    session: Session,
    out: Path,
    *,
    resume: bool = False,
    tell: Callable[[Progress], None] = lambda p: None,
    say: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    opened: Opener = open_runtime,
    from_round: int | None = None,
) -> bool:
    """Run in the folder `out`. Returns True when it finished, False when `stopped` asked for a pause.

    With `from_round` a resumed run goes back to its checkpoint of that round, and later rounds are forgotten.
    """
    if from_round is not None and not resume:
        raise CoterieError("--from-round rolls a run back; name the run with --resume")
    if session.engine.runtime == "flower" and session.engine.engine != "loop":
        raise CoterieError(f"engine = {session.engine.engine} needs many clients in one process; devices have one each")
    if session.engine.runtime == "flower" and session.settings.warm_start is not None:
        raise CoterieError("warm_start needs runtime = local or ray: devices draw the first values from the seed")
    if not resume and (out / "settings.json").exists():
        raise CoterieError(f"{out} already holds a run; continue it with --resume {out} or choose another folder")
    if sentence := session.extended():
        say(sentence)
    choice = _kept(session, out) if resume else choose(session.clients(), session.engine.engine)
    if session.engine.engine != "loop" or choice.engine != "loop":
        say(choice.sentence)
    local = session.engine.runtime == "local"
    workers = session.engine.workers or (choice.workers if local else None)
    session = replace(session, engine=session.engine.model_copy(update={"engine": choice.engine, "workers": workers}))
    with Folder(out, session.engine.keep) as folder:
        try:
            with opened(session, out, stopped) as runtime:
                if resume and session.settings.rounds != read_settings(out)["settings"]["rounds"]:
                    if (rows := read_log(out / EVENTS).rows) and rows[-1].get("ended"):
                        raise CoterieError(f"{out} ended early, as stop_after asks; it cannot be given more rounds")
                    extend(out, session.settings.rounds)
                if not resume:
                    if session.settings.warm_start is not None:
                        w0 = {k: v.contiguous() for k, v in session.method.ctx.w0.items()}
                        disk.write_atomic(out / START, save(w0))
                    how = session.engine
                    engine = {**asdict(choice), "state": how.state, "runtime": how.runtime, "keep": how.keep}
                    folder.write_settings({**session.described(), "engine": engine})
                return _drive(session, folder, runtime, resume, tell, say, stopped, from_round)
        except Interrupted:
            return False
        except OSError as e:
            raise CoterieError(f"writing to {out} failed ({e.strerror or e}); what was written before is kept") from e


def _drive(
    session: Session,
    folder: Folder,
    runtime: Runtime,
    resume: bool,
    tell: Callable[[Progress], None],
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    from_round: int | None,
) -> bool:
    while True:
        loop = make_loop(session, folder, runtime)
        for complaint in loop.resume(from_round) if resume else []:
            say(complaint)
        from_round = None
        try:
            return loop.run(tell, stopped)
        except StateLostError as e:  # only a cluster's; what is repeated comes out the same
            say(f"{e}; continuing from the newest checkpoint")
            resume = True


def _kept(session: Session, out: Path) -> Choice:
    """The engine a run began with, and a refusal if what computes convolutions has changed since."""
    found = read_settings(out)
    then, here = found["versions"]["convolutions"], native.status()
    if session.method.ctx.net.layout.of_kind("conv") and then != here:
        raise CoterieError(f'{out} began with "{then}" and cannot be continued bit-identically with "{here}"')
    began = found["engine"].get("runtime", "local")
    if "flower" in (began, session.engine.runtime) and began != session.engine.runtime:
        where = "on its devices" if began == "flower" else "in its folder"
        raise CoterieError(
            f"{out} began with runtime = {began} and its clients' states are {where}; continue it with the same runtime"
        )
    kept = {k: found["engine"][k] for k in ("engine", "why", "workers")}
    asked = session.engine.engine
    return Choice(**kept | ({"why": "as the run began"} if asked not in ("auto", kept["engine"]) else {}))


def resolved(settings: RunSettings, method: type[Method] | None = None) -> RunSettings:
    """With everything that a reading sets written out; other methods' settings as they are."""
    named = method or settings.method
    if "reading" not in fields(named):
        return settings
    return settings.model_copy(update={"settings": written_out(named, build_method(named, settings.settings))})


def recorded(found: Mapping[str, Any], method: type[Method] | None = None) -> RunSettings:
    """The settings of a run's settings.json. What a reading sets may change from version to version: the run's own
    values stand, and those of a run from before there were readings are of the text.
    """
    settings = RunSettings(**found["settings"])
    if "reading" not in fields(method or settings.method):
        return settings
    own = found.get("method", {}).get("settings", settings.settings)
    own = restored(method or settings.method, {"reading": "paper", **own})
    return resolved(settings.model_copy(update={"settings": own}), method)


def rebuild(
    path: Path, engine: Engine | None = None, objects: Objects | None = None, rounds: int | None = None
) -> Session:
    """The session of a run's folder; refuses data, models and methods that changed since. Objects that are not given
    are imported by their names. More `rounds` than the run has let it go on, with the plan it began with.
    """
    found = read_settings(path)
    had = found["settings"]["rounds"]
    if rounds is not None and rounds < had:
        raise CoterieError(f"{path} has {had} rounds; rounds = {rounds} must be more to extend it")
    found = {**found, "settings": {**found["settings"], "rounds": rounds or had}, "plan": found.get("plan", had)}
    engine, objects = engine or Engine(), objects or Objects()
    if engine.data_dir is None and found["data_dir"]:
        engine = engine.model_copy(update={"data_dir": Path(found["data_dir"])})
    if "state" not in engine.model_fields_set:
        engine = engine.model_copy(update={"state": found["engine"]["state"]})
    if "keep" not in engine.model_fields_set:
        engine = engine.model_copy(update={"keep": found["engine"].get("keep", engine.keep)})
    if "runtime" not in engine.model_fields_set and found["engine"].get("runtime") == "flower":
        engine = engine.model_copy(update={"runtime": "flower"})
    objects = objects.recall(found, path)
    given = objects.described()
    for name, where in found["objects"].items():
        if given.get(name) != where and name != "data":  # the partition's identity tells other data
            raise CoterieError(f"{path} was made with a {name} of your own ({where}); give the same one again")
    for name, digest in objects.digests().items():
        if found.get("digests", {}).get(name, digest) != digest:
            raise CoterieError(
                f"the code of the {name} {given[name]} has changed since {path} was made, so it is another {name}"
            )
    start = load_file(path / START) if (path / START).exists() else None
    session = prepare(recorded(found, objects.method), engine, objects, start=start, plan=found["plan"])
    if found.get("tensors", mark := session.tensors()) != mark:
        raise CoterieError(f"the model of {path} was another: names, shapes or first values of its tensors differ")
    here, then = session.federation.identity, found["partition"]
    if here != then:
        changed = sorted(k for k in {*here, *then} if here.get(k) != then.get(k))
        raise CoterieError(f"the data of {path} have changed since it ran ({', '.join(changed)})")
    return session
