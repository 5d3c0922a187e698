"""Build a session: load the data, build the model and the method, and check everything before any work starts."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coterie.config import Engine, RunSettings
from coterie.core.context import ClientData, Context, Split
from coterie.core.losses import LossFunction, check_loss, weight_notes, weights_of_classes
from coterie.core.method import Method
from coterie.core.metrics import PredictionMetric, check_function, metric_key, metric_paths
from coterie.core.net import Net
from coterie.core.rng import key
from coterie.core.tasks import with_metrics
from coterie.core.tree import Tree
from coterie.data.catalogue import DATASETS
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation, as_given, federate
from coterie.data.sources import load_dataset
from coterie.data.target_types import with_task
from coterie.engine.attacks import Attack
from coterie.engine.provenance import import_named
from coterie.engine.session.combiner import combiner_of
from coterie.engine.session.spec import Factory, Function, Objects, Session, fitting_options, model_name
from coterie.errors import CoterieError
from coterie.methods import build_method as build_method
from coterie.models.adaptation import Adaptation, adapt
from coterie.models.per_client import PerClient, assign_models, is_assignment
from coterie.models.registry import build_model as build_model
from coterie.models.weights import load_weights
from coterie.privacy.accountant import check_installed
from coterie.privacy.example_level import check_examples, check_local
from coterie.privacy.noised_sum import NoisedSum
from coterie.privacy.setting import PrivacySetting, privacy_setting
from coterie.train import native
from coterie.train.augmentation import check_items
from coterie.train.optimisers import Optimiser, check_fit, optimiser
from coterie.train.rule_of_use import NEED_VALIDATION


def prepare(
    settings: RunSettings,
    engine: Engine | None = None,
    objects: Objects | None = None,
    loaded: Dataset | None = None,
    start: Tree | None = None,
    planned_rounds: int | None = None,
) -> Session:
    """Load and partition the data, build model and method, and check everything.

    `objects` replace names in the settings; `loaded` is the data set if it is in memory already; `start` holds initial
    values that replace the drawn ones and is required with the setting `warm_start` (engine/personal_models.py,
    `initial_values`); `planned_rounds` is the number of rounds that the run began with.
    """
    objects = objects or Objects()
    torch.set_num_threads(1)
    engine = engine or Engine()
    method = build_method(objects.method or settings.method, settings.settings)
    dataset = objects.dataset or loaded or load_dataset(
        settings.data, engine.data_dir, settings.subset, settings.task, settings.columns
    )  # fmt: skip
    if objects.dataset is not None and (given := settings.columns.model_dump(exclude_defaults=True)):
        raise CoterieError(f"{next(iter(given))} names a column of a file; name the columns in from_frame instead")
    dataset = with_task(dataset, settings.task)
    settings = follow_data(settings, dataset, objects)
    federation = federate(dataset, settings.federation, settings.seed)
    if settings.warm_start is not None and start is None:
        raise CoterieError(f"warm_start = {settings.warm_start} is set, but no initial values are given")
    session = bind(settings, engine, method, federation, objects.model, start, planned_rounds, objects.functions)
    return replace(session, objects=objects)


def follow_data(settings: RunSettings, dataset: Dataset, objects: Objects) -> RunSettings:
    """Fill the settings that the user left open from the data; raise CoterieError if these settings cannot train.

    A known data set is divided as a whole by default; other data keep their official test part.
    """
    if dataset.task.classes == 1:
        raise CoterieError(
            f"all items of {dataset.name} have the same class ({dataset.classes[0]}); every model would be right"
        )
    keep_test = objects.dataset is not None or settings.data not in DATASETS
    return settings.model_copy(update={"federation": as_given(settings.federation, dataset, keep_test)})


def bind(
    settings: RunSettings,
    engine: Engine,
    method: Method,
    federation: Federation,
    model: nn.Module | Factory | PerClient | None = None,
    start: Tree | None = None,
    planned_rounds: int | None = None,
    functions: Mapping[str, Function] | None = None,
) -> Session:
    """Give the method its model and its context on partitioned data, check both, and return the session."""
    if isinstance(model, PerClient) or (model is None and is_assignment(settings.model)):
        if start is not None:
            raise CoterieError("warm_start needs one model for all clients")
        models = model or str(settings.model)
        return _bind_each(settings, engine, method, federation, models, planned_rounds, functions)
    functions = _functions(settings, functions or {})
    metric_functions = {path: functions[metric_key(path)] for path in metric_paths(settings.metrics)}
    n = len(federation.clients)
    if settings.newcomers >= n:
        raise CoterieError(f"newcomers = {settings.newcomers} leaves none of the {n} clients for training")
    net, loaded = _net(settings, federation, model, batch_norm="bn" in method.needs)
    net.half = torch.bfloat16 if settings.precision == "bf16" else None
    if settings.freeze is not None and settings.frozen_features == "once" and settings.augment is None:
        federation, said = _with_features(net, federation)
        loaded += said
    method.ctx = Context(
        net=net,
        w0=_started(net.state(), start, settings.warm_start),
        clients=federation.clients[: n - settings.newcomers],
        task=with_metrics(federation.task, settings.metrics, metric_functions),
        planned_rounds=planned_rounds or settings.rounds,
        join=settings.join,
        epochs=settings.epochs,
        batch=settings.batch,
        lr=settings.lr,
        seed=settings.seed,
        weighting=settings.weighting,
        bn_stats=settings.bn_stats,
        lr_decay=settings.lr_decay,
        public=settings.federation.public,
        public_items=federation.public() if "public" in method.needs else None,
        headline=settings.headline,
        momentum=settings.momentum,
        lr_rounds=settings.lr_rounds,
        lr_steps=settings.lr_steps,
        local_steps=settings.local_steps,
        augment=settings.augment,
        class_weights=settings.class_weights,
        fixed_weights=_fixed_weights(settings, federation),
        own_loss=functions.get("loss"),
        changing=settings.federation.timeline is not None,
    )
    _check_needs(method, federation)
    if settings.use in NEED_VALIDATION and not (federation.sizes("val") > 0).any():
        raise CoterieError(f"use = {settings.use} needs {_NEEDS['some_val'][1]}")
    if settings.use == "guarded" and type(method).predict is not Method.predict:
        raise CoterieError(f"use = guarded is not possible: a model of {method.card.title} is more than its network")
    if settings.official and federation.official() is None:
        raise CoterieError(
            "official = true needs an official test part that is not dealt out: data that have one, and pool = train"
        )
    if settings.official and settings.federation.timeline is not None:
        raise CoterieError("official = true scores all clients on one test part, and a timeline changes their data")
    for name in ("stop_after", "stop_at"):
        if getattr(settings, name) is not None and not federation.sizes("val").any():
            raise CoterieError(f"{name} needs a validation part, and no client has one (set val_share)")
    if settings.stop_at is not None and federation.task.metric.percent and not 0 < settings.stop_at <= 1:
        metric = federation.task.metric.name
        raise CoterieError(f"stop_at = {settings.stop_at:g} is not a share between 0 and 1; 0.9 is {metric} 90 %")
    if net.has_batch_norm and settings.batch == 1:
        raise CoterieError("batch = 1 is too small: batch norm needs at least two samples in a batch")
    method.check()
    if settings.augment is not None:
        example = federation.dataset.ready(torch.arange(2), federation.settings.normalize)
        check_items(settings.augment, example, federation.task.name)
    if (combiner := combiner_of(settings, method, federation)) is not None:
        combiner.check(method)
    _check_metrics(settings, method.ctx, federation)
    if settings.loss is not None and method.ctx.own_loss is not None:
        _check_loss(settings, settings.loss, method.ctx.own_loss, federation)
    rule = _rule(settings, functions)
    check_fit(rule, [method.ctx.w0[k] for k in net.trainable])
    weights = weight_notes(method.ctx.fixed_weights, federation.dataset.classes)
    notes = (*_output_notes(method.ctx, federation), *_unused_notes(settings, method), *weights)
    if settings.dp is not None and (dp := privacy_setting(settings.dp)).unit != "client":
        _check_device_privacy(dp, method, federation)
    if combiner is not None and isinstance(combiner.estimate, NoisedSum):
        notes = (*notes, *combiner.estimate.warnings(method))
    attack = _attack(settings, method, federation)
    return Session(
        settings, engine, federation, method, notes=notes, loaded=loaded, rule=rule, functions=functions, attack=attack
    )


def _attack(settings: RunSettings, method: Method, federation: Federation) -> Attack | None:
    """Return the attack of a simulation; raise CoterieError if it is not possible with this method and data."""
    if settings.attack is None:
        return None
    rows = torch.arange(0, len(federation.dataset), max(1, len(federation.dataset) // 256))
    examples = federation.dataset.ready(rows, federation.settings.normalize)
    return Attack.of(settings.attack, method, examples)


def _check_device_privacy(dp: PrivacySetting, method: Method, federation: Federation) -> None:
    """Raise CoterieError unless devices can protect all that they upload."""
    check_installed()
    if dp.unit == "local":
        check_local(method, dp.text)
        return
    if method.ctx.class_weights is not None:
        raise CoterieError(f"dp = {dp.text} is not possible with class_weights; leave it out")
    two = Split(federation.dataset.ready(torch.arange(2), federation.settings.normalize), federation.dataset.y[:2])
    check_examples(
        method, dp.text, ClientData(method.ctx.clients[0], two, two, method.ctx.classes, federation.public())
    )


def _functions(settings: RunSettings, given: Mapping[str, Function]) -> dict[str, Function]:
    """Return the functions that settings name as module:name, imported unless they are given."""
    named = {"optimizer": settings.optimizer} if ":" in settings.optimizer else {}
    named |= {} if settings.loss is None else {"loss": settings.loss}
    named |= {metric_key(path): path for path in metric_paths(settings.metrics)}
    return {k: given.get(k) or imported(k.split()[0], path) for k, path in named.items()}


def _check_metrics(settings: RunSettings, ctx: Context, federation: Federation) -> None:
    """Raise CoterieError if a metric of the user fails for the initial model on some of the data."""
    own = dict(zip((settings.metrics or "").split(","), ctx.task.added, strict=False))
    own = {path: metric for path, metric in own.items() if ":" in path}
    if own:
        rows = torch.arange(0, len(federation.dataset), max(1, len(federation.dataset) // 256))
        outputs = ctx.outputs(ctx.w0, federation.dataset.ready(rows, federation.settings.normalize))
        predictions, y = ctx.task.predictions(outputs).numpy(), federation.dataset.y[rows].numpy()
        for path, metric in own.items():
            assert isinstance(metric, PredictionMetric)
            check_function(metric, path, predictions, y)


def _fixed_weights(settings: RunSettings, federation: Federation) -> tuple[float, ...] | None:
    """Return the weights of the classes that the settings list; raise CoterieError if they do not fit the data."""
    if settings.class_weights is not None and not federation.task.classes:
        raise CoterieError(f"class_weights needs classes, and the task is {federation.task.name}")
    return weights_of_classes(settings.class_weights, federation.dataset.classes)


def _check_loss(settings: RunSettings, path: str, function: LossFunction, federation: Federation) -> None:
    """Raise CoterieError if the loss of the user cannot be computed for outputs of this task.

    A device knows no data of others, and an edge none at all, so outputs and targets are made up.
    """
    task, n = federation.task, 4
    y = torch.arange(n) % task.classes if task.classes else torch.ones(n, *federation.dataset.y.shape[1:])
    outputs = torch.linspace(-1, 1, n * task.outputs).view(n, task.outputs)
    check_loss(path, function, outputs, y, settings.class_weights is not None)


def _rule(settings: RunSettings, functions: Mapping[str, Function]) -> Optimiser:
    """Return the optimiser of local training."""
    s, make = settings, functions.get("optimizer")
    keep, more = s.opt_state == "keep", {"momentum": s.momentum, "weight_decay": s.weight_decay, "clip": s.grad_clip}
    return optimiser(s.optimizer, make, keep=keep, **more)


def imported(setting: str, path: str) -> Any:
    """Import the function that a setting names; raise CoterieError if it cannot be imported."""
    try:
        function = import_named(path)
    except Exception as e:  # whatever a user's module raises
        raise CoterieError(f"{setting} = {path} cannot be imported: {type(e).__name__}: {e}") from None
    if not callable(function):
        raise CoterieError(f"{setting} = {path} is invalid: it must name a function")
    return function


# settings of the optimiser, with the values at which they do nothing
_OF_THE_OPTIMISER: dict[str, Any] = {
    "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "opt_state": "reset", "grad_clip": None, "lr_steps": None,
}  # fmt: skip


def _unused_notes(settings: RunSettings, method: Method) -> tuple[str, ...]:
    """Return a warning if phases of the method have update rules of their own, which ignore settings that are given."""
    given = [f"{k} = {v}" for k, off in _OF_THE_OPTIMISER.items() if (v := getattr(settings, k)) != off]
    phases = [*method.phases(1), *method.phases(2)]
    own = [p for p in phases if p.update is not None]
    if not given or not own:
        return ()
    part = "its local training has" if len(own) == len(phases) else "a phase of its local training has"
    return (f"{method.card.title} does not follow {', '.join(given)}: {part} an update rule of its own",)


def _started(drawn: Tree, start: Tree | None, where: str | None) -> Tree:
    """Return the initial values: `start` if it is given and fits, otherwise the drawn ones."""
    if start is None:
        return drawn
    unfit = [k for k in {**drawn, **start} if k not in drawn or k not in start or drawn[k].shape != start[k].shape]
    if unfit:
        name = unfit[0]
        there, here = (tuple(t[name].shape) if name in t else "absent" for t in (start, drawn))
        raise CoterieError(f"the models of {where} do not fit this run: {name} is {there} there and {here} here")
    return {k: start[k].clone() for k in drawn}


def _bind_each(
    settings: RunSettings,
    engine: Engine,
    method: Method,
    federation: Federation,
    models: PerClient | str,
    planned_rounds: int | None = None,
    functions: Mapping[str, Function] | None = None,
) -> Session:
    """Bind the method once for each distinct model; the server uses the model of the first client.

    Raise CoterieError if the exchanged entries depend on which model a client has.
    """
    title = method.card.title or type(method).__name__
    if method.agree == "model":
        raise CoterieError(
            f"{title} needs the same model at every client; different models work with methods that exchange only "
            "prototypes, heads or predictions (fedproto, fedtgp, fedgh, fedgmh, fedmd)"
        )
    for option in ("official", "log_updates"):
        if getattr(settings, option):
            raise CoterieError(f"{option} = true needs the same model at every client")
    sessions: dict[object, Session] = {}  # by model
    method_of = {}
    for i, source in assign_models(models, federation.clients).items():
        key = source if isinstance(source, str) else id(source)
        if key not in sessions:
            name = source if isinstance(source, str) else None
            options = fitting_options(source, settings.model_options) if isinstance(source, str) else {}
            one = settings.model_copy(update={"model": name, "model_options": options})
            own = None if isinstance(source, str) else source
            sessions[key] = bind(one, engine, copy.copy(method), federation, own, None, planned_rounds, functions)
        method_of[i] = sessions[key].method
    used = {name for s in sessions.values() for name in s.settings.model_options}
    if unused := set(settings.model_options) - used:
        raise CoterieError(f'none of the models has an option "{min(unused)}"')
    first = method_of[federation.clients[0]]
    for i, other in method_of.items():
        a, b = first.ctx.net, other.ctx.net
        if method.agree == "head" and (a.width, a.head_names) != (b.width, b.head_names):
            what = (
                f"{a.width} and {b.width} features before the head"
                if a.width != b.width
                else f"heads with different names ({a.head_names[0]}, {b.head_names[0]})"
            )
            raise CoterieError(
                f"the models of clients {federation.clients[0]} and {i} have {what}; {title} exchanges those, so they "
                "must agree"
            )
    others = {i: other for i, other in method_of.items() if other is not first}
    one_session = next(iter(sessions.values()))
    notes = tuple(dict.fromkeys(n for s in sessions.values() for n in s.notes))
    return Session(
        settings,
        engine,
        federation,
        first,
        others=others,
        notes=notes,
        loaded=tuple(dict.fromkeys(n for s in sessions.values() for n in s.loaded)),
        rule=one_session.rule,
        functions=one_session.functions,
    )


def _net(
    settings: RunSettings, federation: Federation, model: nn.Module | Factory | None, batch_norm: bool = False
) -> tuple[Net, tuple[str, ...]]:
    """Build the model with initial values drawn from the seed; a module instance of the user keeps its own values.

    Weights of a file replace them, and parts are frozen or get adapters. The sentences say what was loaded and frozen.

    If the model has no name, the default for the data is built, with batch norm if the method needs it.
    """
    data = federation.dataset
    example = data.ready(torch.arange(2), federation.settings.normalize)
    task = federation.task
    module = build_model(
        model_name(settings, federation, batch_norm) if model is None else model,  # an empty Sequential is false
        federation.shape,
        task.outputs,
        seed=key(settings.seed, "init"),
        dtype=example.dtype,
        vocab=data.vocab,
        options=settings.model_options,
        task=task.name,
    )
    loaded = [] if settings.weights is None else [load_weights(module, settings.weights)]
    how = Adaptation.of(settings)
    adapt(module, example, how, settings.seed)
    net = Net(module, example)
    if how.changes:
        frozen, trained = (sum(t[k].numel() for k in t) for t in (net.constants(), net.state()))
        loaded.append(f"{frozen:,} values of the model are constants, {trained:,} are trained or exchanged")
    if net.layout.of_kind("conv"):
        native.available()  # loads and checks the library once, before workers are forked
    return net, tuple(loaded)


def _with_features(net: Net, federation: Federation) -> tuple[Federation, tuple[str, ...]]:
    """Return the federation with the outputs of the model's frozen beginning in place of items, if that is possible."""
    items = federation.dataset.ready(torch.arange(min(8, len(federation.dataset))), federation.settings.normalize)
    if not net.cut_prefix(items):
        return federation, ()
    assert net.prefix is not None
    other = federation.with_features(net.prefix_features, net.prefix.shape)
    if other is None:
        net.prefix = None
        return federation, ()
    shape = "x".join(map(str, net.prefix.shape))
    return other, (f"outputs of {net.prefix.last} ({shape} per sample) are constants and are computed once per sample",)


def _output_notes(ctx: Context, federation: Federation) -> tuple[str, ...]:
    """Return a warning if the model's outputs are probabilities, to which the loss applies softmax or sigmoid again."""
    task, last = federation.task, list(ctx.net.module.modules())[-1]
    example = federation.dataset.ready(torch.arange(2), federation.settings.normalize)
    with torch.no_grad():
        out = ctx.net(ctx.w0, example)
    sums_to_one = bool((out >= 0).all()) and bool(((out.sum(-1) - 1).abs() < 1e-4).all())
    if task.classes > 1 and sums_to_one:
        return ("the model ends in a softmax, and the loss applies one too: remove it from the model (give logits)",)
    if (task.classes > 1 or task.name == "multilabel") and isinstance(last, nn.Sigmoid):
        return ("the model ends in a sigmoid, and the loss takes logits: remove it from the model",)
    return ()


_NEEDS: dict[str, tuple[Callable[[Method, Federation], bool], str]] = {
    "bn": (
        lambda m, f: bool(m.ctx.net.layout.of_kind("bn")),
        "a model with batch norm (such as mlp-bn, lenet5 or default-bn)",
    ),
    "head": (lambda m, f: m.ctx.net.layout.head is not None, "a model whose last layer is an nn.Linear (its head)"),
    "val": (
        lambda m, f: all((f.sizes("val", t) > 0).all() for t in f.timeline.rounds),
        "a validation part at every client (set val_share)",
    ),
    "some_val": (lambda m, f: f.settings.val_share > 0, "validation parts to choose by (set val_share)"),
    "public": (lambda m, f: f.public() is not None, "a public set (set public to a number of items)"),
    "classes": (lambda m, f: f.num_classes > 0, "class labels (task = classification or binary)"),
    "full": (lambda m, f: m.ctx.join == 1, "full participation (set join to 1)"),
    "constant_lr": (lambda m, f: m.ctx.lr_steps is None, "one learning rate for all steps of a round (no lr_steps)"),
    "unweighted": (lambda m, f: m.ctx.class_weights is None, "all classes to weigh alike (no class_weights)"),
    "epochs": (lambda m, f: m.ctx.local_steps is None, "local work in epochs (no local_steps)"),
}


def _check_needs(method: Method, federation: Federation) -> None:
    for need in method.required():
        holds, words = _NEEDS[need]
        if not holds(method, federation):
            task = f", and the task is {federation.task.name}" if need == "classes" else ""
            raise CoterieError(f"{method.card.title} needs {words}{task}")
