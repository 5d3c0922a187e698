"""Models by name, by import path or as a user's own nn.Module; one sentence for what cannot work."""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from coterie.core.layers import layout
from coterie.errors import CoterieError, unknown
from coterie.models.blocks import Shape
from coterie.models.zoo import ZOO

ENTRY_POINT_GROUP = "coterie.models"  # entry points: name -> factory(shape, classes, **options)

_FACTS = ("shape", "classes", "num_classes")  # what a factory may ask for by name

_CLASS_TASKS = ("classification", "binary")  # tasks whose outputs are scores of classes

ModelFactory = Callable[..., nn.Module]
ModelSource = str | nn.Module | ModelFactory


@dataclass(frozen=True)
class ModelInfo:
    """A line of `coterie list models`."""

    name: str
    description: str
    options: Mapping[str, Any]  # with their default values


def build(
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
    """A model for items of `shape`: by name, by 'package.module:factory', or a user's own factory, class or instance.

    `classes` is the number of its outputs, whatever the task.

    With a seed its first values are a function of the seed alone and `initial` leaves them so; an instance keeps the
    values it has. `dtype` and `vocab` are facts of the data, if known: the type of an item, the number of tokens.
    """
    shape, name, options = tuple(shape), _name(source), dict(options or {})
    if isinstance(source, str):
        source = _factory(source)
    with torch.random.fork_rng(devices=[]):  # building a model must not change the global random state
        torch.manual_seed(0 if seed is None else seed)
        if isinstance(source, nn.Module):
            if options:
                raise CoterieError(f'a model that is built already takes no options, got "{next(iter(options))}"')
            module = copy.deepcopy(source)
        elif callable(source):
            if vocab is not None and "vocab" in _parameters(source):
                options = {"vocab": vocab, **options}
            module = _call(name, source, shape, classes, _checked(name, source, options))
        else:
            raise CoterieError(f"a model is a name, a factory or an nn.Module, not {type(source).__name__}")
        _fit(name, module, shape, classes, dtype, task)  # here, because layers that wait for their first input draw now
    if seed is not None or isinstance(source, nn.Module):
        module.keep_initial = True  # type: ignore[assignment]
    return module


WITH_NORM = "default-bn"  # stands for the default model with batch norm

_NORMED = {"mlp": "mlp-bn", "text": "text-bn"}  # the other default models have batch norm


def default_for(
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float32,
    batch_norm: bool = False,
    task: str = "classification",
) -> str:
    """The name of a sensible model for items of this shape."""
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
    """Every model there is a name for, by name."""
    return [_info(name, _factory(name)) for name in sorted({*ZOO, *entry_points(group=ENTRY_POINT_GROUP).names})]


def options_of(name: str) -> set[str]:
    """The options that a model takes."""
    return {k for k in _parameters(_factory(name)) if k not in _FACTS}


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
            found = plugins[name].load()
        elif ":" in name:
            found = _imported(name)
        else:
            raise unknown("model", name, [*ZOO, *plugins])
    except (ImportError, AttributeError, ValueError) as e:
        raise CoterieError(f'the model "{name}" cannot be imported: {e}') from e
    if not callable(found):
        raise CoterieError(f'the model "{name}" is neither a factory nor an nn.Module')
    return found  # type: ignore[no-any-return]


def _imported(path: str) -> Any:
    """What 'package.module:name' names."""
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a command does not look there by itself; last, so that it hides nothing
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # written in C, without a signature
        return {}


def _checked(name: str, factory: ModelFactory, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, known to the factory and, for the built-in ones, converted to the types it names."""
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


def _call(name: str, factory: ModelFactory, shape: Shape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """factory(shape, classes), factory(classes) or factory(): by the names of its parameters, else by their number."""
    parameters = [p for p in _parameters(factory).values() if p.name not in options]
    facts = dict(zip(_FACTS, (shape, classes, classes), strict=True))
    named = {p.name: facts[p.name] for p in parameters if p.name in facts and p.kind is not p.POSITIONAL_ONLY}
    args: tuple[Any, ...] = ()
    if not named:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
        if len(needed) > 2:
            raise CoterieError(f'the model factory "{name}" is given (shape, classes), but needs {", ".join(needed)}')
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


def _fit(name: str, module: nn.Module, shape: Shape, classes: int, dtype: torch.dtype | None, task: str) -> None:
    """Runs two items of zeros through: a model that does not fit the data is refused before any work."""
    taken = dtype or getattr(module, "takes", None)
    tries = [taken] if taken is not None else [torch.float32, torch.int64]  # int64: a model for tokens
    failures = []
    for kind in tries:
        try:
            width = _width(module, torch.zeros(2, *shape, dtype=kind))
        except CoterieError as e:
            failures.append(e)
            continue
        if width != classes:
            wanted = f"the data have {classes} classes" if task in _CLASS_TASKS else f"the task {task} takes {classes}"
            raise CoterieError(f"the model {name} gives {width} scores per item, but {wanted}")
        _keeps_input(name, module, torch.zeros(2, *shape, dtype=kind))
        return
    raise CoterieError(f"{name}: {failures[0]}") from failures[0]


def _keeps_input(name: str, module: nn.Module, example: torch.Tensor) -> None:
    """Refuses a model that writes to its input: items are shared by everything that is computed from them."""
    was, held = module.training, {k: v.clone() for k, v in module.state_dict().items()}
    version, before = example._version, example.clone()
    with torch.no_grad(), suppress(Exception):  # a model that cannot train on two items says so when it trains
        for training in (False, True):
            module.train(training)(example)
    module.load_state_dict(held)  # training moves running statistics
    module.train(was)
    if example._version != version or not torch.equal(example, before):
        raise CoterieError(f"the model {name} changes its input in place (such as x -= 1); it must not, take x = x - 1")


def _width(module: nn.Module, example: torch.Tensor) -> int:
    """How many scores the model gives."""
    found: list[int] = []

    def hook(_m: nn.Module, _i: object, out: Any) -> None:
        found.append(out.shape[-1] if isinstance(out, torch.Tensor) and out.ndim else 0)

    handle = module.register_forward_hook(hook)
    try:
        layout(module, example)
    finally:
        handle.remove()
    return found[-1]
