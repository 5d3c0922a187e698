"""Freeze parts of a model and give its layers low-rank adapters, as the settings `freeze` and `lora_*` say."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from coterie.core.layers import Layout, layout, leaves_of
from coterie.core.lora import adapt_layer, can_adapt, disable_fast_path
from coterie.core.rng import torch_rng
from coterie.errors import CoterieError, unknown

TARGET_KINDS: dict[str, tuple[type[nn.Module], ...]] = {  # kinds of layers that lora_targets may name
    "linear": (nn.Linear,),
    "conv": (nn.Conv1d, nn.Conv2d),
    "attention": (nn.MultiheadAttention,),
}
USUAL_TARGETS = "linear,attention"
Rank = Annotated[int, Field(ge=1, le=4096)]


class Adaptation(BaseModel):
    """The parts of a model that are constants, and the adapters that it has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    freeze: str | None = None
    lora_rank: Rank | None = None
    lora_alpha: float | None = None  # None: the rank, so that the adapter is added as it is
    lora_targets: str | None = None  # None: USUAL_TARGETS

    @staticmethod
    def of(settings: object) -> "Adaptation":
        """Return the part of a run's settings that says how its model is adapted."""
        return Adaptation(**{name: getattr(settings, name) for name in Adaptation.model_fields})

    @property
    def changes(self) -> bool:
        """True if the model is changed at all."""
        return self.freeze is not None or self.lora_rank is not None


def adapt(module: nn.Module, example: Tensor, how: Adaptation, seed: int) -> None:
    """Give the module its adapters and freeze its parts, in place; `example` holds two items."""
    chosen = _parts(how.freeze or "")
    parts = {path for path, _ in module.named_modules() if path}
    named = set(chosen)
    for name in chosen:
        if name in parts:
            _freeze_part(module.get_submodule(name))
    if how.lora_rank is None:
        for name in ("lora_alpha", "lora_targets"):
            if (value := getattr(how, name)) is not None:
                raise CoterieError(f"{name} = {value} has no effect without lora_rank; set lora_rank, such as 8")
    else:
        _add_adapters(module, example, how, seed)
    if named - parts:
        _freeze_groups(module, layout(module, example), [n for n in chosen if n not in parts])


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _add_adapters(module: nn.Module, example: Tensor, how: Adaptation, seed: int) -> None:
    assert how.lora_rank is not None
    layers = layout(module, example)
    targets = _targets(module, layers, _parts(how.lora_targets or USUAL_TARGETS))
    head = layers.groups["head"]
    scale = (how.lora_rank if how.lora_alpha is None else how.lora_alpha) / how.lora_rank
    for name, parameter in module.named_parameters():
        if name not in head:
            parameter.requires_grad_(False)
    for name in targets:
        adapt_layer(module.get_submodule(name), how.lora_rank, scale, torch_rng(seed, "lora", name))
    disable_fast_path(module)
    module.keep_initial = True  # type: ignore[assignment]
    if (layer := _without_effect(module, example)) is not None:
        raise CoterieError(
            f'the adapter of the layer "{layer}" has no effect, because the model reads the weight of this layer '
            "instead of calling it; leave it out of lora_targets"
        )


def _without_effect(module: nn.Module, example: Tensor) -> str | None:
    """Return a layer whose adapter no gradient of the outputs reaches; None if gradients reach every adapter."""
    adapters = {k: p for k, p in module.named_parameters() if k.endswith(".lora_B")}
    module.eval()
    with torch.enable_grad():
        reached = leaves_of(module(example))
    return next((k.rpartition(".")[0] for k, p in adapters.items() if id(p) not in reached), None)


def _targets(module: nn.Module, layers: Layout, chosen: Sequence[str]) -> list[str]:
    """Return the layers that get an adapter: of these kinds, or of this name, or whose name ends so."""
    inside = [path for path, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    usable = [
        path
        for path, part in module.named_modules()
        if path
        and can_adapt(part)
        and path != layers.head
        and not getattr(part, "always_eval", False)
        and not any(path.startswith(f"{a}.") for a in inside)
    ]
    targets: list[str] = []
    for name in chosen:
        if name in TARGET_KINDS:
            targets += [path for path in usable if isinstance(module.get_submodule(path), TARGET_KINDS[name])]
            continue
        named = [path for path in usable if path == name or path.endswith(f".{name}") or path.startswith(f"{name}.")]
        if not named:
            raise unknown("layer in lora_targets", name, [*TARGET_KINDS, *usable])
        targets += named
    if not targets:
        kinds = " or ".join(chosen)
        raise CoterieError(
            f"lora_rank needs layers that can have adapters, and the model has no {kinds} layers besides its head "
            "(lora_targets = conv takes convolutions)"
        )
    return list(dict.fromkeys(targets))


def _freeze_part(part: nn.Module) -> None:
    """Make a submodule a constant; norms, dropout and other layers in it stay in evaluation mode."""
    for p in part.parameters():
        p.requires_grad_(False)
    for inner in part.modules():
        inner.always_eval = True  # type: ignore[assignment]  # Net keeps such parts in evaluation mode


def _freeze_groups(module: nn.Module, layers: Layout, chosen: Sequence[str]) -> None:
    """Make single parameters, or groups of entries such as body and lora:A, constants."""
    parameters = dict(module.named_parameters())
    groups = {k: v for k, v in layers.groups.items() if not k.startswith("layer:") and k not in ("all", "unused")}
    for name in chosen:
        if name not in groups and name not in parameters:
            known = [path for path, _ in module.named_modules() if path and path.count(".") < 2]
            raise unknown("layer in freeze", name, [*known, *groups])
        if not (entries := groups.get(name, (name,))):
            raise CoterieError(f"freeze = {name} names a group of layers, and the model has none of them")
        for entry in entries:
            if entry in parameters:
                parameters[entry].requires_grad_(False)
