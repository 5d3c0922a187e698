"""Build models: by name, by import path, or from the user's own factory, class or nn.Module."""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from coterie.core.layers import layout
from coterie.engine.provenance import import_named
from coterie.errors import CoterieError, unknown
from coterie.models.blocks import ItemShape
from coterie.models.interface import with_plain_interface
from coterie.models.zoo import ZOO

ENTRY_POINT_GROUP = "coterie.models"  # entry points of other packages: factory(shape, classes, **options)

_FACTS = ("shape", "classes", "num_classes")  # parameters of a factory that Coterie fills in

_CLASS_TASKS = ("classification", "binary")  # tasks with one output per class

ModelFactory = Callable[..., nn.Module]
ModelSource = str | nn.Module | ModelFactory


@dataclass(frozen=True)
class ModelInfo:
    """A row of `coterie list models`."""

    name: str
    description: str
    options: Mapping[str, Any]  # default values by option name


def build_model(
    source: ModelSource,
    shape: tuple[int, ...],
    classes: int,
    *,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    vocab: int | None = None,
    options: Mapping[str, Any] | None = None,
    task: str = "classification",
) -> nn.Module:
    """Build a model for items of `shape`.

    The source is a name, 'package.module:factory', or a user's own factory, class or instance. `classes` is the number
    of outputs, for every task. If a seed is given, the initial values are a function of the seed alone, and `initial`
    does not change them; an instance keeps its values. `dtype` (type of an item) and `vocab` (number of tokens)
    describe the data, if known. A model that is called in another way gets a plain interface (interface.py).
    """
    shape, name, options = tuple(shape), _name(source), dict(options or {})
    if isinstance(source, str):
        source = _factory(source)
    with torch.random.fork_rng(devices=[]):  # building a model must not change the global random state
        torch.manual_seed(0 if seed is None else seed)
        if isinstance(source, nn.Module):
            if options:
                raise CoterieError(f'an nn.Module takes no options, got "{next(iter(options))}"')
            module = copy.deepcopy(source)
        elif callable(source):
            if vocab is not None and "vocab" in _parameters(source):
                options = {"vocab": vocab, **options}
            module = _call(name, source, shape, classes, _checked(name, source, options))
        else:
            raise CoterieError(f"a model is a name, a factory or an nn.Module, not {type(source).__name__}")
        module = with_plain_interface(module, shape, dtype)
        _fit(name, module, shape, classes, dtype, task)  # inside fork_rng: lazy layers draw their values here
    if seed is not None or isinstance(source, nn.Module):
        module.keep_initial = True  # type: ignore[assignment]
    return module


def count_parameters(
    name: str, shape: tuple[int, ...], classes: int, vocab: int | None, options: Mapping[str, Any]
) -> int:
    """Return the number of values of a model, which is built without memory for them (on PyTorch's meta device)."""
    factory = _factory(name)
    if not isinstance(factory, nn.Module):
        given = {"vocab": vocab} if vocab is not None and "vocab" in _parameters(factory) else {}
        with torch.device("meta"):
            factory = _call(name, factory, tuple(shape), classes, _checked(name, factory, {**given, **options}))
    return sum(value.numel() for value in (*factory.parameters(), *factory.buffers()))


WITH_NORM = "default-bn"  # a name for the default model with batch norm

_NORMED = {"mlp": "mlp-bn", "text": "text-bn"}  # the other default models have batch norm


def default_for(
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float32,
    batch_norm: bool = False,
    task: str = "classification",
) -> str:
    """Return the name of the default model for items of this shape."""
    if shape == (1,) and not dtype.is_floating_point and task == "regression":
        return "ratings"
    if len(shape) == 1:
        name = "mlp" if dtype.is_floating_point else "text"
    elif len(shape) == 2:
        name = "signal" if shape[1] >= 8 else "mlp"
    else:
        name = "lenet5" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"
    return _NORMED.get(name, name) if batch_norm else name


def list_models() -> list[ModelInfo]:
    """Return all models that have a name, sorted by name."""
    return [_info(name, _factory(name)) for name in sorted({*ZOO, *entry_points(group=ENTRY_POINT_GROUP).names})]


def options_of(name: str) -> set[str]:
    """Return the names of a model's options."""
    return {k for k in _parameters(_factory(name)) if k not in _FACTS}


def options_of_0_1(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's options in a file of version 0.1, with the defaults that were different in that version."""
    return {**({"fc_in": "flatten"} if name == "ecsfl-cnn" else {}), **options}


def _info(name: str, factory: nn.Module | ModelFactory) -> ModelInfo:
    options = {k: p.default for k, p in _parameters(factory).items() if p.default is not p.empty}
    return ModelInfo(name, (inspect.getdoc(factory) or "").partition("\n")[0], options)


def _name(source: ModelSource) -> str:
    if isinstance(source, str):
        return source
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", repr(source))


def _factory(name: str) -> nn.Module | ModelFactory:
    if name in ZOO:
        return ZOO[name]
    plugins = {ep.name: ep for ep in entry_points(group=ENTRY_POINT_GROUP)}
    try:
        if name in plugins:
            factory = plugins[name].load()
        elif ":" in name:
            factory = import_named(name)
        else:
            raise unknown("model", name, [*ZOO, *plugins])
    except (ImportError, AttributeError, ValueError) as e:
        raise CoterieError(f'the model "{name}" cannot be imported: {e}') from e
    if not callable(factory):
        raise CoterieError(f'the model "{name}" is neither a factory nor an nn.Module')
    return factory  # type: ignore[no-any-return]


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        return {}


def _checked(name: str, factory: ModelFactory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check that the factory has these options; convert those of built-in models to their declared types."""
    parameters = _parameters(factory)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(options)
    allowed = [k for k in parameters if k not in _FACTS]
    checked = dict(options)
    hints = get_type_hints(factory, include_extras=True) if name in ZOO else {}
    for key, value in options.items():
        if not allowed:
            raise CoterieError(f'the model {name} takes no options, got "{key}"')
        if key not in allowed:
            raise unknown(f"option of the model {name}", key, allowed)
        if key in hints:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[key])
            try:
                checked[key] = adapter.validate_python(value)
            except ValidationError as e:
                reason = e.errors()[0]["msg"].removeprefix("Input ")
                raise CoterieError(f'the option "{key}" of the model {name} {reason}, got {value!r}') from None
    return checked


def _call(name: str, factory: ModelFactory, shape: ItemShape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Call factory(shape, classes), factory(classes) or factory(), by names or number of its parameters."""
    parameters = [p for p in _parameters(factory).values() if p.name not in options]
    facts = dict(zip(_FACTS, (shape, classes, classes), strict=True))
    named = {p.name: facts[p.name] for p in parameters if p.name in facts and p.kind is not p.POSITIONAL_ONLY}
    args: tuple[Any, ...] = ()
    if not named:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
        if len(needed) > 2:
            raise CoterieError(
                f'the model factory "{name}" is called with (shape, classes), but needs {", ".join(needed)}'
            )
        args = ((), (classes,), (shape, classes))[len(needed)]
    try:
        module = factory(*args, **named, **options)
    except CoterieError:
        raise
    except Exception as e:  # a user's code may raise anything
        raise CoterieError(f'the model factory "{name}" failed: {type(e).__name__}: {e}') from e
    if not isinstance(module, nn.Module):
        raise CoterieError(f'the model factory "{name}" must return an nn.Module, not {type(module).__name__}')
    return module


def _fit(name: str, module: nn.Module, shape: ItemShape, classes: int, dtype: torch.dtype | None, task: str) -> None:
    """Run two items of zeros through the model; raise CoterieError if it does not fit the data."""
    if isinstance(module, torch.jit.ScriptModule):
        raise CoterieError(f"the model {name} is compiled by TorchScript; give the nn.Module that it was made from")
    declared = dtype or getattr(module, "takes", None)
    candidates = [declared] if declared is not None else [torch.float32, torch.int64]  # int64: a model for tokens
    failures = []
    for kind in candidates:
        try:
            width = _width(module, torch.zeros(2, *shape, dtype=kind))
        except CoterieError as e:
            failures.append(e)
            continue
        if width != classes:
            needed = f"the data have {classes} classes" if task in _CLASS_TASKS else f"the task {task} needs {classes}"
            raise CoterieError(f"the model {name} gives {width} scores per item, but {needed}")
        _check_keeps_input(name, module, torch.zeros(2, *shape, dtype=kind))
        return
    raise CoterieError(f"{name}: {failures[0]}") from failures[0]


def _check_keeps_input(name: str, module: nn.Module, example: torch.Tensor) -> None:
    """Raise CoterieError if the model writes to its input, because items are shared by all computations."""
    mode, values = module.training, {k: v.clone() for k, v in module.state_dict().items()}
    version, before = example._version, example.clone()
    with torch.no_grad(), suppress(Exception):  # an error in training mode is reported when the model trains
        for training in (False, True):
            module.train(training)(example)
    module.load_state_dict(values)  # the call in training mode has changed running statistics
    module.train(mode)
    if example._version != version or not torch.equal(example, before):
        raise CoterieError(f"the model {name} changes its input in place (such as x -= 1); write x = x - 1 instead")


def _width(module: nn.Module, example: torch.Tensor) -> int:
    """Return the number of scores that the model gives per item; raise CoterieError if it cannot be trained."""
    widths: list[int] = []
    trains: list[bool] = [torch.is_inference_mode_enabled()]

    def hook(_m: nn.Module, _i: object, out: Any) -> None:
        widths.append(out.shape[-1] if isinstance(out, torch.Tensor) and out.ndim else 0)
        trains.append(isinstance(out, torch.Tensor) and out.requires_grad)

    handle = module.register_forward_hook(hook)
    try:
        layout(module, example)
    finally:
        handle.remove()
    if not any(trains) and any(p.requires_grad for p in module.parameters()):
        raise CoterieError("no gradient reaches the parameters, as after detach() or in no_grad(); nothing would train")
    return widths[-1]
