"""Load weights of a file into a model: what fits by name and shape, with a report of the rest.

A file is safetensors, or a state dict written by torch.save, which is read with weights_only=True: it cannot run code.
"""

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie.errors import CoterieError

_TORCH_FILES = (".pt", ".pth", ".bin")
_INSIDE = ("state_dict", "model_state_dict", "model")  # keys under which training programs keep a state dict
_SHOWN = 3  # names in a report


def load_weights(module: nn.Module, path: str) -> str:
    """Copy the tensors of a file that fit into the module; return a sentence about what was loaded and what was not.

    Names of layers may have a common prefix in the file or in the model, and may be those of torchvision if the model
    knows them (`layer_alias`). Raise CoterieError if nothing fits.
    """
    weights = read_weights(path)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {k: v for k, v in own.items() if v.is_floating_point()}
    given = _renamed(module, weights, own)
    fits = {k: given[k] for k, v in own.items() if k in given and given[k].shape == v.shape}
    if not fits:
        names = f"it has {_listed(sorted(weights))}, the model has {_listed(sorted(own))}"
        raise CoterieError(f"weights = {path} does not fit this model: no tensor has the same name and shape; {names}")
    with torch.no_grad():
        for name, value in fits.items():
            own[name].copy_(value)
    shapes = [f"{k} ({_shape(given[k])}, here {_shape(own[k])})" for k in own if k in given and k not in fits]
    parts = [
        f"{len(fits)} of {len(own)} tensors of the model are from {Path(path).name}",
        f"not in the file: {_listed([k for k in own if k not in given])}" if own.keys() - given.keys() else "",
        f"of different shape: {_listed(shapes)}" if shapes else "",
        f"not in the model: {_listed([k for k in given if k not in own])}" if given.keys() - own.keys() else "",
    ]
    return "; ".join(filter(None, parts))


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the floating-point tensors of a file; raise CoterieError if it cannot be read without running code."""
    suffix = Path(path).suffix
    if suffix not in (".safetensors", *_TORCH_FILES):
        raise CoterieError(f"weights = {path} must be a .safetensors file, or a state dict (.pt, .pth, .bin)")
    try:
        found: Any = load_file(path) if suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise CoterieError(f"weights = {path} does not exist") from None
    except pickle.UnpicklingError:
        raise CoterieError(f"weights = {path} holds more than tensors; save its state_dict() as safetensors") from None
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as e:
        raise CoterieError(f"weights = {path} is damaged: {(str(e).splitlines() or [''])[0][:200]}") from e
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else {}
    floats = {str(k): v.float() for k, v in tensors.items() if v.is_floating_point()}
    if not floats:
        raise CoterieError(f"weights = {path} holds no tensors by name; save the state_dict() of a model")
    return floats


def _renamed(module: nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names that fit most tensors of the model."""
    alias: Callable[[str], str] = getattr(type(module), "layer_alias", lambda layer: layer)
    starts = ["", *dict.fromkeys(k.partition(".")[0] + "." for k in weights)]
    inner = ["", *(f"{path}." for path, _ in module.named_modules() if path and path.count(".") < 2)]
    best: dict[str, Tensor] = {}
    most = -1
    for rename in (str, partial(_aliased, alias=alias)):
        for start in starts:
            cut = {rename(k.removeprefix(start)): v for k, v in weights.items() if k.startswith(start)}
            for prefix in inner:
                fitting = sum(
                    1 for k, v in cut.items() if (mine := own.get(prefix + k)) is not None and mine.shape == v.shape
                )
                if fitting > most:
                    most, best = fitting, {prefix + k: v for k, v in cut.items()}
    return best


def _aliased(name: str, *, alias: Callable[[str], str]) -> str:
    layer, _, local = name.rpartition(".")
    return f"{alias(layer)}.{local}"


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "one number"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
