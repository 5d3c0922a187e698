"""Execute a session: open its runtime and drive the loop, from the start or from a checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from safetensors.torch import save

from coterie.engine.evaluation import Official
from coterie.engine.loop import Callbacks, Loop, Schedule
from coterie.engine.round import Rules
from coterie.engine.session.combiner import combiner_of, weight_cap_of
from coterie.engine.session.resume import (
    check_unchanged,
    device_notes,
    earlier_kernels_warning,
    short_batch_warning,
    training_engine_at_start,
)
from coterie.engine.session.spec import Session
from coterie.errors import CoterieError
from coterie.privacy.budget import LEDGER, ClientBudget, DeviceBudgets
from coterie.runtimes.base import Interrupted, Runtime
from coterie.runtimes.registry import check_address, runtime_kind
from coterie.storage import atomic as disk
from coterie.storage.client_states import StateLostError
from coterie.storage.run_folder import EVENTS, START, Folder, extend, read_log, read_settings
from coterie.train.devices import device_names, find_devices
from coterie.train.engine_choice import Choice, choose_engine, with_native

Opener = Callable[[Session, Path, Callable[[], bool]], AbstractContextManager[Runtime]]


def open_runtime(
    session: Session, folder: Path, should_stop: Callable[[], bool] = lambda: False
) -> AbstractContextManager[Runtime]:
    """Open the runtime that computes a run's clients; the choice does not affect results."""
    e = session.engine
    check_address(e.runtime, e.address)
    opener: Opener = runtime_kind(e.runtime).load()
    return opener(session, folder, should_stop)


def make_loop(session: Session, folder: Folder, runtime: Runtime) -> Loop:
    """Return the loop over the rounds of a session."""
    s, dp, secret = session.settings, session.privacy, not runtime.trusted
    poisson = dp is not None and dp.unit == "client"
    cap = weight_cap_of(s, session.federation)
    schedule = Schedule(
        rounds=s.rounds,
        rules=Rules(s.seed, s.dropout, s.stragglers, s.watch, s.log_updates, poisson, secret, cap),
        eval_every=s.eval_every,
        checkpoint_every=1 if runtime_kind(session.engine.runtime).checkpoint_every_round else s.checkpoint_every,
        final_trained=s.final_trained,
        headline=s.headline,
        newcomers=session.newcomers,
        eval_clients=s.eval_clients,
        stop_after=s.stop_after,
        stop_at=s.stop_at,
        combiner=combiner_of(s, session.method, session.federation, secret),
        attack=session.attack,
    )
    official: Official | None = None
    if s.official:
        official = Official(session.method, session.federation, s.gm_head, getattr(runtime, "clients", None))
    return Loop(session.method, runtime, folder, schedule, official, budget_of(session, folder.path, secret))


def budget_of(session: Session, folder: Path, deployed: bool) -> ClientBudget | DeviceBudgets | None:
    """Return the privacy budget of a run; None without differential privacy."""
    dp, sends = session.privacy, bool(session.method.schema("up").entries)
    if dp is None or (dp.unit != "example" and not sends):
        return None
    if dp.unit == "client":
        return ClientBudget(dp, session.method, folder / LEDGER if deployed else None)
    sizes = [] if deployed else sorted({int(n) for n in session.federation.sizes("train")})
    noises = {noise: None for n in sizes if n and (noise := session.clients().noise_of(n)) is not None}
    return DeviceBudgets(dp, tuple(noises))


def execute(
    session: Session,
    out: Path,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  # immutable
    *,
    resume: bool = False,
    from_round: int | None = None,
    opener: Opener = open_runtime,
) -> bool:
    """Run in the folder `out`; return True if the run finished, False if `callbacks.should_stop` paused it.

    With `from_round`, a resumed run goes back to its checkpoint of that round, and later rounds are deleted.
    """
    if from_round is not None and not resume:
        raise CoterieError("--from-round rolls a run back; name the run with --resume")
    kind, wanted = runtime_kind(session.engine.runtime), session.engine.engine
    device = session.engine.device or "cpu"
    devices = device_names(find_devices(device)) if kind.trains_here else device
    if wanted not in (None, "loop") and not kind.supports_stacked_training:
        raise CoterieError(f"engine = {wanted} needs many clients in one process; a device has one")
    if session.settings.warm_start is not None and not kind.supports_warm_start:
        raise CoterieError("warm_start needs runtime = local or ray: devices draw initial values from the seed")
    if session.settings.weights is not None and not kind.supports_warm_start:
        raise CoterieError("weights needs runtime = local or ray: devices do not have the file")
    if session.attack is not None and not kind.supports_attacks:
        raise CoterieError("attack is for simulations (runtime = local or ray): it makes some of the clients lie")
    if not resume and (out / "settings.json").exists():
        raise CoterieError(f"{out} already holds a run; continue it with --resume {out} or choose a different folder")
    if warning := session.extension_warning():
        callbacks.on_warning(warning)
    if resume:
        check_unchanged(session, out)
        if warning := short_batch_warning(session, out):
            callbacks.on_warning(warning)
        if warning := earlier_kernels_warning(session, out):
            callbacks.on_warning(warning)
    choice = (
        training_engine_at_start(session, out)
        if resume
        else choose_engine(session.clients(), wanted if kind.supports_stacked_training else "loop", devices)
    )
    if not resume and devices == "cpu":
        choice = with_native(choice, session.clients(), session.example())
    if wanted not in (None, "loop") or choice.engine != "loop":
        callbacks.on_warning(choice.sentence)
    workers = session.engine.workers or (choice.workers if kind.worker_processes else None)
    for sentence in device_notes(session, out, devices) if resume else ():
        callbacks.on_warning(sentence)
    known = {"engine": choice.engine, "workers": workers, "device": devices}
    session = replace(session, engine=session.engine.model_copy(update=known), native=bool(choice.native))
    if not kind.states_stay_on_devices:
        session.federation.compute_features()
    with Folder(out, session.engine.keep) as folder:
        try:
            with opener(session, out, callbacks.should_stop) as runtime:
                if resume:
                    _extend(session, out)
                else:
                    _write_start(session, folder, choice)
                return _drive(session, folder, runtime, callbacks, resume, from_round)
        except Interrupted:
            return False
        except OSError as e:
            raise CoterieError(f"writing to {out} failed ({e.strerror or e}); earlier files are kept") from e


def _extend(session: Session, out: Path) -> None:
    """Record that a resumed run gets more rounds; raise CoterieError if it ended early."""
    if session.settings.rounds == read_settings(out)["settings"]["rounds"]:
        return
    if (rows := read_log(out / EVENTS).rows) and rows[-1].get("ended"):
        raise CoterieError(f"{out} ended early ({rows[-1]['ended']}); it cannot get more rounds")
    extend(out, session.settings.rounds)


def _write_start(session: Session, folder: Folder, choice: Choice) -> None:
    """Write settings.json, and the initial values if they are not drawn from the seed."""
    if session.settings.warm_start is not None:
        w0 = {k: v.contiguous() for k, v in session.method.ctx.w0.items()}
        disk.write_atomic(folder.path / START, save(w0))
    e = session.engine
    engine = {**asdict(choice), "state": e.state, "runtime": e.runtime, "keep": e.keep, "device": e.device}
    folder.write_settings({**session.described(), "engine": engine})


def _drive(
    session: Session,
    folder: Folder,
    runtime: Runtime,
    callbacks: Callbacks,
    resume: bool,
    from_round: int | None,
) -> bool:
    """Run the loop; start again from the newest checkpoint if a cluster loses client states."""
    while True:
        loop = make_loop(session, folder, runtime)
        for warning in loop.resume(from_round) if resume else []:
            callbacks.on_warning(warning)
        from_round = None
        try:
            return loop.run(callbacks)
        except StateLostError as e:  # only on a cluster; repeated rounds give the same result
            callbacks.on_warning(f"{e}; continuing from the newest checkpoint")
            resume = True
