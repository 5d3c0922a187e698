"""Rebuild the session of a run folder, and refuse data, models and code that have changed since the run began."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from coterie.config import Engine, RunSettings
from coterie.core.method import Method
from coterie.engine.provenance import code_digest, method_digest, origin
from coterie.engine.session.build import prepare
from coterie.engine.session.spec import Objects, Session
from coterie.errors import CoterieError, sentence
from coterie.methods import build_method as build_method
from coterie.methods import fields
from coterie.methods.restore import restored
from coterie.methods.stored import names_today, run_settings_of_0_1
from coterie.models.registry import options_of_0_1
from coterie.runtimes.registry import canonical_runtime, runtime_kind
from coterie.storage.run_folder import START, read_settings
from coterie.train import native
from coterie.train.engine_choice import Choice
from coterie.train.trainer import FEWEST


def rebuild(
    path: Path, engine: Engine | None = None, objects: Objects | None = None, rounds: int | None = None
) -> Session:
    """Build the session of a run folder again; raise CoterieError if its data, model or method has changed since.

    Objects that are not given are imported by their names. If `rounds` is larger than the run's number of rounds, the
    run is extended and keeps the plan that it began with.
    """
    run = read_settings(path)
    had = run["settings"]["rounds"]
    if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int)):
        raise CoterieError(f"rounds = {rounds!r} is invalid: it must be a whole number")
    if rounds is not None and rounds < had:
        raise CoterieError(f"{path} has {had} rounds; rounds = {rounds} must be more to extend it")
    run = {**run, "settings": {**run["settings"], "rounds": rounds or had}, "plan": run.get("plan", had)}
    engine, objects = _engine_at_start(engine or Engine(), run), objects or Objects()
    for name, function in objects.functions.items():
        setting = name.split()[0]
        if name not in run["objects"] and origin(function) not in str(run["settings"].get(setting)):
            raise CoterieError(f"{path} was made without {origin(function)}; {setting} must be as when the run began")
    objects = objects.recall(run, path)
    given = objects.described()
    for name, where in run["objects"].items():
        if given.get(name) != where and name != "data":  # the partition's identity covers the data
            raise CoterieError(f"{path} was made with a {name} of your own ({where}); pass the same {name} again")
    try:
        start = load_file(path / START) if (path / START).exists() else None
    except (OSError, SafetensorError) as e:
        raise CoterieError(f"{path / START} cannot be read: {sentence(str(e))}") from None
    session = prepare(recorded(run, objects.method), engine, objects, start=start, planned_rounds=run["plan"])
    check_unchanged(session, path)
    return session


def short_batch_warning(session: Session, path: Path) -> str:
    """Return a warning if a run of version 0.1 goes on with other batches, "" if not: 0.1 kept short last batches."""
    ctx, sizes = session.method.ctx, session.federation.sizes("train")
    short = (sizes > ctx.batch) & (sizes % ctx.batch > 0) & (sizes % ctx.batch < FEWEST)
    of_0_1 = read_settings(path).get("versions", {}).get("coterie", "").startswith("0.1.")
    if not (of_0_1 and ctx.net.has_batch_norm and short.any()):
        return ""
    return (
        f"{path} was begun with version 0.1, which trained on last batches of fewer than {FEWEST} samples; "
        "with batch norm they now join the batch before them, so its further rounds differ from those of 0.1"
    )


_COMPILED_EARLIER = "compiled C"  # end of the status that earlier versions recorded


def earlier_kernels_warning(session: Session, path: Path) -> str:
    """Return a warning if a run began with convolutions that an earlier version compiled on its machine, "" if not."""
    versions = read_settings(path)["versions"]
    compiled = versions.get("convolutions", "").endswith(_COMPILED_EARLIER) and native.available()
    if "native" in versions or not (compiled and session.method.ctx.net.layout.of_kind("conv")):
        return ""
    return (
        f"{path} was begun with convolutions that were compiled on its machine; those of this version come with the "
        "package, so its further rounds may differ in the last bits"
    )


def check_unchanged(session: Session, path: Path) -> None:
    """Raise CoterieError if the code of method or model, the model's tensors or the data differ from those of a run.

    Runs of version 0.1 recorded the code of the user's own objects only.
    """
    run = read_settings(path)
    digests, cls = run.get("digests", {}), type(session.method)
    if "method" in digests and digests["method"] not in (method_digest(cls), code_digest(cls)):  # 0.1: code_digest
        raise CoterieError(f"the code of the method {origin(cls)} has changed since {path} was made")
    former = session.objects.digests().get("model")
    if "model" in digests and digests["model"] not in (session.model_digest(), former):
        default = session.settings.model or origin(session.method.ctx.net.module)
        name = session.objects.described().get("model", default)
        raise CoterieError(f"the code of the model {name} has changed since {path} was made")
    for name, digest in session.code_digests().items():
        if digests.get(name, digest) != digest:
            path_of = getattr(session.settings, name)
            raise CoterieError(f"the code of {name} = {path_of} has changed since {path} was made")
    if run.get("tensors", mark := session.tensors()) != mark:
        raise CoterieError(f"this is not the model of {path}: tensor names, shapes or initial values differ")
    now, then = session.federation.identity, run["partition"]
    if now != then:
        changed = sorted(k for k in {*now, *then} if now.get(k) != then.get(k))
        raise CoterieError(f"the data of {path} have changed since it ran ({', '.join(changed)})")


def _engine_at_start(engine: Engine, run: Mapping[str, Any]) -> Engine:
    """Fill in the options that are not given with those that the run began with."""
    began, given = run["engine"], engine.model_fields_set
    update: dict[str, Any] = {}
    if engine.data_dir is None and run["data_dir"]:
        update["data_dir"] = Path(run["data_dir"])
    if "state" not in given:
        update["state"] = began["state"]
    if engine.device is None and began.get("device"):
        update["device"] = began["device"]
    if "keep" not in given:
        update["keep"] = began.get("keep", engine.keep)
    runtime = canonical_runtime(began.get("runtime", "local"))
    if "runtime" not in given and runtime_kind(runtime).states_stay_on_devices:
        update["runtime"] = runtime
    return engine.model_copy(update=update)


def recorded(run: Mapping[str, Any], method: type[Method] | None = None) -> RunSettings:
    """Return the settings of a run, given the content of its settings.json.

    The values behind a reading or a name may change from version to version, so the run's recorded values are used.
    """
    settings = RunSettings(**run["settings"])
    if run.get("versions", {}).get("coterie", "").startswith("0.1."):
        options = options_of_0_1(settings.model, settings.model_options)
        settings = settings.model_copy(update={"model_options": options})
    if method is None and names_today(settings.method, None):
        stored = run.get("method", {}).get("settings", settings.settings)
        name, own = restored(settings.method, stored)
        settings = settings.model_copy(update={"method": name, "settings": own, **run_settings_of_0_1(stored)})
    return resolved(settings, method)


def resolved(settings: RunSettings, method: type[Method] | None = None) -> RunSettings:
    """Write out every value of a method whose readings or name may change; other settings stay as they are."""
    named = method or settings.method
    if "reading" not in fields(named) and (method or not names_today(settings.method, None)):
        return settings
    return settings.model_copy(update={"settings": build_method(named, settings.settings).hp.model_dump(mode="json")})


def device_notes(session: Session, path: Path, now: str) -> list[str]:
    """Return a warning if a run goes on with devices of another kind than it began with."""
    began = read_settings(path)["engine"].get("device") or "cpu"
    kinds = [{name.split(":")[0] for name in text.split(",")} for text in (began, now)]
    if kinds[0] == kinds[1]:
        return []
    return [f"{path} began on {began} and goes on on {now}: further rounds are the same up to rounding, not to the bit"]


def training_engine_at_start(session: Session, path: Path) -> Choice:
    """Return the training engine that a run began with.

    Raise CoterieError if models are computed differently now, or if the runtime cannot reach the client states.
    """
    run = read_settings(path)
    then, now = run["versions"].get("native"), native.native_status()
    on_cpu = {run["engine"].get("device") or "cpu", session.engine.device or "cpu"} == {"cpu"}
    convolves = on_cpu and bool(session.method.ctx.net.layout.of_kind("conv"))
    if then is None:  # the run was made by an earlier version, which had native convolutions only
        then = run["versions"]["convolutions"]
        differs = convolves and then.endswith(_COMPILED_EARLIER) != native.available()
    else:
        differs = then != now and (convolves or bool(run["engine"].get("native")))
    if differs:
        raise CoterieError(f'{path} began with "{then}" and cannot be continued bit-identically with "{now}"')
    began = canonical_runtime(run["engine"].get("runtime", "local"))
    stay, stay_now = (runtime_kind(name).states_stay_on_devices for name in (began, session.engine.runtime))
    if began != session.engine.runtime and (stay or stay_now):
        where = "on its devices" if stay else "in its folder"
        raise CoterieError(
            f"{path} began with runtime = {began}, and its client states are {where}; continue it with the same runtime"
        )
    choice = Choice(
        **{k: run["engine"][k] for k in ("engine", "why", "workers")}, native=run["engine"].get("native", "")
    )
    asked = session.engine.engine
    return choice if asked in ("auto", choice.engine) else replace(choice, why="as the run began")
