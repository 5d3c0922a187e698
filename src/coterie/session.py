"""From settings to a run: data, model, method and loop put together, and everything checked before work starts."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import checkpoint, native, official
from coterie.config import Engine, RunSettings
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, federate
from coterie.data.sources import load
from coterie.errors import CoterieError
from coterie.folder import Folder
from coterie.loop import Loop, Progress, Schedule
from coterie.method import Context, Method
from coterie.methods import build as build_method
from coterie.models.net import Net
from coterie.models.registry import build as build_model
from coterie.models.registry import default_for
from coterie.rng import key
from coterie.runtimes.states import StateLostError, Store
from coterie.runtimes.workers import Runtime, start
from coterie.train import choose
from coterie.train.clients import Device
from coterie.train.optim import Optimiser
from coterie.train.stack import Stacker

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class Objects:
    """Python objects that stand in for what settings name."""

    method: type[Method] | None = None
    dataset: Dataset | None = None
    model: nn.Module | Factory | None = None


@dataclass(frozen=True)
class Session:
    """A checked run that has not started: nothing is written yet."""

    settings: RunSettings
    engine: Engine
    federation: Federation
    method: Method

    @property
    def newcomers(self) -> tuple[int, ...]:
        return self.federation.clients[len(self.federation.clients) - self.settings.newcomers :]

    def device(self) -> Device:
        s = self.settings
        rule = Optimiser(s.optimizer, s.momentum, s.weight_decay, s.opt_state == "keep")
        stacker = Stacker(self.method.ctx, rule) if self.engine.engine == "stack" else None
        return Device(self.method, self.federation, rule, stacker)

    def described(self) -> dict[str, Any]:
        """What settings.json holds."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "method": {
                "name": type(self.method).__name__,
                "title": self.method.title or type(self.method).__name__,
                "settings": self.method.hp.model_dump(mode="json"),
                "weighting": self.settings.weighting or self.method.weighting,
                "certainty": self.method.certainty,
            },
            "partition": self.federation.identity,
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
    *,
    method: type[Method] | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | Factory | None = None,
) -> Session:
    """Load, deal out, build and check; objects given here stand in for what the settings name."""
    torch.set_num_threads(1)
    engine = engine or Engine()
    bound = build_method(method or settings.method, settings.settings)
    dataset = dataset or load(settings.data, engine.data_dir, settings.subset)
    return bind(settings, engine, bound, federate(dataset, settings.federation, settings.seed), model)


def bind(
    settings: RunSettings,
    engine: Engine,
    bound: Method,
    federation: Federation,
    model: nn.Module | Factory | None = None,
) -> Session:
    """A method with its model and context on data that are dealt out already."""
    n = len(federation.clients)
    if settings.newcomers >= n:
        raise CoterieError(f"newcomers = {settings.newcomers} leaves none of the {n} clients to train")
    net = _net(settings, federation, model)
    bound.ctx = Context(
        net=net,
        w0=net.state(),
        clients=federation.clients[: n - settings.newcomers],
        classes=federation.num_classes,
        rounds=settings.rounds,
        join=settings.join,
        epochs=settings.epochs,
        batch=settings.batch,
        lr=settings.lr,
        seed=settings.seed,
        weighting=settings.weighting,
        bn_stats=settings.bn_stats,
        lr_decay=settings.lr_decay,
        public=settings.federation.public,
    )
    _check_needs(bound, federation)
    if settings.official:
        official.check(federation)
    bound.check()
    return Session(settings, engine, federation, bound)


def _net(settings: RunSettings, federation: Federation, model: nn.Module | Factory | None) -> Net:
    """The model with its first values drawn from the seed; an instance that the user built keeps its own."""
    data = federation.dataset
    example = data.ready(torch.arange(2), federation.settings.normalize)
    source = model or settings.model or default_for(federation.shape, federation.num_classes, example.dtype)
    module = build_model(
        source,
        federation.shape,
        federation.num_classes,
        seed=key(settings.seed, "init"),
        dtype=example.dtype,
        vocab=data.vocab,
        **settings.model_options,
    )
    net = Net(module, example)
    if net.layout.of_kind("conv"):
        native.available()  # compiled or loaded here once, before any worker is forked
    return net


_NEEDS: dict[str, tuple[Callable[[Method, Federation], bool], str]] = {
    "bn": (lambda m, f: m.ctx.net.has_batch_norm, "a model with batch norm (for example lenet5)"),
    "head": (lambda m, f: m.ctx.net.layout.head is not None, "a model whose last layer is an nn.Linear (its head)"),
    "val": (lambda m, f: bool((f.sizes("val") > 0).all()), "a validation part at every client (set val_share)"),
    "public": (lambda m, f: f.public() is not None, "a public set (set public to a number of items)"),
    "full": (lambda m, f: m.ctx.join == 1, "full participation (set join to 1)"),
}


def _check_needs(method: Method, federation: Federation) -> None:
    for need in method.needs:
        holds, words = _NEEDS[need]
        if not holds(method, federation):
            raise CoterieError(f"{method.title} needs {words}")


def make_loop(session: Session, folder: Folder, runtime: Any) -> Loop:
    s, f = session.settings, session.federation
    work = f.sizes("train") * s.epochs * 3 + f.sizes("test") * 2
    return Loop(
        session.method,
        runtime,
        Store(folder.path, len(f.clients), session.engine.state == "disk"),
        folder,
        lambda client: int(work[client]),
        Schedule(
            rounds=s.rounds,
            seed=s.seed,
            eval_every=s.eval_every,
            eval_clients=s.eval_clients,
            checkpoint_every=s.checkpoint_every,
            watch=s.watch,
            final_trained=s.final_trained,
            log_updates=s.log_updates,
            official=s.official,
            gm_head=s.gm_head,
            dropout=s.dropout,
            stragglers=s.stragglers,
            newcomers=session.newcomers,
        ),
    )


def open_runtime(session: Session) -> Runtime:
    """The processes a run's clients are computed in; the choice changes no result."""
    e = session.engine
    if e.runtime == "ray":
        from coterie.runtimes.ray_runtime import RayRuntime

        return RayRuntime(session.device(), e.workers, e.address)
    if e.address is not None:
        raise CoterieError(f"address = {e.address} is of a Ray cluster and needs runtime = ray")
    return start(session.device(), e.workers or os.cpu_count() or 1)


def execute(
    session: Session,
    out: Path,
    *,
    resume: bool = False,
    tell: Callable[[Progress], None] = lambda p: None,
    say: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Run in the folder `out`; True when it came to its end, False when `stopped` asked for a pause."""
    if not resume and (out / "settings.json").exists():
        raise CoterieError(f"{out} already holds a run; continue it with --resume {out} or choose another folder")
    folder = Folder(out)
    try:
        if not resume:
            folder.write_settings(session.described())
        choice = choose.settle(out, session.device(), session.engine.engine, resume)
        if session.engine.engine != "loop" or choice.engine != "loop":
            say(choice.sentence)
        kind = session.engine
        workers = kind.workers or (choice.workers if kind.runtime == "local" else None)
        session = replace(session, engine=kind.model_copy(update={"engine": choice.engine, "workers": workers}))
        runtime = open_runtime(session)
        try:
            while True:
                loop = make_loop(session, folder, runtime)
                if resume:
                    for complaint in checkpoint.resume(loop):
                        say(complaint)
                try:
                    return loop.run(tell, stopped)
                except StateLostError as e:  # only a cluster's; what is repeated comes out the same
                    say(f"{e}; going on from the newest checkpoint")
                    resume = True
        finally:
            runtime.close()
    except OSError as e:
        raise CoterieError(f"writing to {out} failed ({e.strerror or e}); what was written before is kept") from e
    finally:
        folder.close()


def rebuild(path: Path, engine: Engine | None = None) -> Session:
    """The session of a run's folder, if its settings name everything it used; refuses data that changed since."""
    found = stored(path)
    engine = engine or Engine()
    if engine.data_dir is None and found["data_dir"]:
        engine = engine.model_copy(update={"data_dir": Path(found["data_dir"])})
    session = prepare(RunSettings(**found["settings"]), engine)
    here, then = session.federation.identity, found["partition"]
    if here != then:
        changed = sorted(k for k in {*here, *then} if here.get(k) != then.get(k))
        raise CoterieError(f"the data of {path} have changed since it ran ({', '.join(changed)})")
    return session


def stored(path: Path) -> dict[str, Any]:
    """settings.json of a run's folder."""
    try:
        found: dict[str, Any] = json.loads((path / "settings.json").read_text())
        return found
    except FileNotFoundError:
        raise CoterieError(f"{path} holds no run (settings.json is missing)") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CoterieError(f"{path}/settings.json is damaged") from None
