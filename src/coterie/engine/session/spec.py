"""Describe a run that has been checked but not started, and write what settings.json says about it."""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.config import PUBLIC, Engine, RunSettings
from coterie.core.method import Method
from coterie.core.schedules import uses_length
from coterie.core.views import Use
from coterie.data.dataset import Dataset
from coterie.data.federation import Federation
from coterie.engine.attacks import Attack
from coterie.engine.provenance import code_digest, method_digest, model_digest, origin, recalled, source_digest
from coterie.errors import CoterieError
from coterie.methods import unusual_reading
from coterie.models.adaptation import Adaptation
from coterie.models.per_client import PerClient, assign_models, is_assignment
from coterie.models.registry import WITH_NORM, default_for, options_of
from coterie.privacy.device_side import DeviceSide
from coterie.privacy.setting import PrivacySetting, privacy_setting
from coterie.storage.client_states import ClientStates
from coterie.train import native
from coterie.train.chain.natives import Natives
from coterie.train.clients import Clients
from coterie.train.optimisers import Optimiser
from coterie.train.vmap.trainer import Stacker

Factory = Callable[..., nn.Module]
Function = Callable[..., Any]  # a function of the user that a setting names
_FEW = 10  # validation samples below which a choice made on them is mostly chance


@dataclass(frozen=True)
class Objects:
    """Python objects given by the user in place of names in the settings."""

    method: type[Method] | None = None
    dataset: Dataset | None = None
    model: nn.Module | Factory | PerClient | None = None
    data_from: str = ""  # module:name of the function that made the data set, if a function made it
    functions: Mapping[str, Function] = field(default_factory=dict)  # by the name of the setting, such as optimizer

    def described(self) -> dict[str, str]:
        """Return module:name of each object; the run can be resumed only with the same objects."""
        origins = {name: origin(_maker(thing)) for name, thing in self._given().items()}
        return {**origins, "data": self.data_from} if self.data_from else origins

    def digests(self) -> dict[str, str]:
        """Return digests of code as version 0.1 recorded them."""
        return {} if self.model is None else {"model": code_digest(_maker(self.model))}

    def _given(self) -> dict[str, object]:
        given = {"method": self.method, "data": self.dataset, "model": self.model, **self.functions}
        return {name: thing for name, thing in given.items() if thing is not None}

    def recall(self, recorded: Mapping[str, Any], path: Path) -> "Objects":
        """Import by name the objects that a run was made with and that are not given.

        Raise CoterieError if one of them cannot be imported.
        """
        objects = self
        for name, where in recorded["objects"].items():
            if name in self._given():
                continue
            thing = recalled(where) if name not in recorded.get("built", ()) else None
            if name == "data" and thing is not None:
                thing = None if isinstance(thing, type) or not callable(thing) else thing()
            if name == "data" and isinstance(thing, Dataset):
                objects = replace(objects, dataset=thing, data_from=where)
            elif thing is not None and name == "method" and isinstance(thing, type) and issubclass(thing, Method):
                objects = replace(objects, method=thing)
            elif thing is not None and name == "model" and callable(thing):
                objects = replace(objects, model=thing)
            elif thing is not None and name.split()[0] in RunSettings.model_fields and callable(thing):
                objects = replace(objects, functions={**objects.functions, name: thing})
            else:
                raise CoterieError(f"{path} was made with a {name} of your own ({where}); pass the same {name} again")
        return objects


def _maker(thing: object) -> object:
    """Return the function that a PerClient chooses models with; any other object as it is."""
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
    notes: tuple[str, ...] = ()  # warnings about the model, one sentence each
    loaded: tuple[str, ...] = ()  # loaded files and frozen layers of the model, one sentence each
    rule: Optimiser = field(default_factory=Optimiser)  # optimiser of local training
    functions: Mapping[str, Function] = field(default_factory=dict)  # functions of the user, by setting
    attack: Attack | None = None  # liars among the clients
    native: bool = True  # False: PyTorch's operations train and score, as in runs that began so

    def method_of(self, client: int) -> Method:
        """Return the method bound to this client's model."""
        return self.others.get(client, self.method)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Clients that never train."""
        return self.federation.clients[len(self.federation.clients) - self.settings.newcomers :]

    def clients(self, deployed: bool = False) -> Clients:
        """Return the client side of the run, which trains and scores; `deployed`: on a device of a real federation."""
        stacker = Stacker(self.method.ctx, self.rule) if self.engine.engine == "stack" else None
        guard = None if self.privacy is None else DeviceSide(self.privacy, deployed)
        noised = guard is not None and guard.setting.unit == "example"  # kernels cannot add noise to each step
        natives = self._natives if self.native and stacker is None and not noised else None
        return Clients(
            self.method, self.federation, self.rule, stacker, self.others, self.use, guard, self.attack, natives=natives
        )

    @property
    def privacy(self) -> PrivacySetting | None:
        """The setting `dp` as a typed value; None without it."""
        return None if self.settings.dp is None else privacy_setting(self.settings.dp)

    def example(self) -> Tensor:
        """Return two items as the model takes them."""
        return self.federation.dataset.ready(torch.arange(2), self.federation.settings.normalize)

    @cached_property
    def _natives(self) -> Natives:
        return Natives(self.rule)

    @property
    def use(self) -> Use:
        """The rule for the model that a client uses."""
        return self.settings.use or self.method.use

    def states(self, folder: Path) -> ClientStates:
        """Return the store of the clients' private states in a run folder."""
        return ClientStates(folder, len(self.federation.clients), self.engine.state == "disk")

    def extension_warning(self) -> str:
        """Return a warning if the run is extended and depends on its number of rounds; otherwise an empty string."""
        planned, rounds = self.method.ctx.planned_rounds, self.settings.rounds
        scheduled = uses_length(self.settings.lr_rounds)
        if planned == rounds or not (self.method.plans_ahead or scheduled):
            return ""
        what = f"lr_rounds = {self.settings.lr_rounds}" if scheduled else self.method.card.title
        return (
            f"{what} plans by the number of rounds: it keeps its plan for {planned} rounds, so the result differs from "
            f"a run that was started with {rounds} rounds"
        )

    def automatic_choices(self) -> list[str]:
        """Return one message for each choice that was made without the user, or departs from the method's paper."""
        s, method, federation = self.settings, self.method, self.federation
        departures = [f"{method.card.title}: {sentence}" for sentence in method.departures()]
        sentences = [*federation.choices, *self.loaded, *departures]
        if "bn" in method.needs and s.model is None and self.objects.model is None:
            name = default_for(federation.shape, federation.num_classes, federation.dataset.x.dtype, batch_norm=True)
            sentences.append(
                f"{method.card.title} needs a model with batch norm: {name} is used (--model names a different one)"
            )
        if "public" in method.needs and s.federation.public == PUBLIC:
            sentences.append(
                f"{method.card.title} needs a public set: {PUBLIC} items are set aside for it, without labels "
                "(--set public=N changes the number)"
            )
        if (own := getattr(method.hp, "train_fraction", None)) is not None and own != s.join:
            sentences.append(
                f"{method.card.title}: train_fraction = {own:g} takes the place of join = {s.join:g}; comparisons with "
                "other methods are not at equal training"
            )
        if "some_val" in method.required() and (few := int((federation.sizes("val") < _FEW).sum())):
            sentences.append(
                f"{method.card.title} chooses by validation data: {few} of {len(federation.clients)} clients have "
                f"fewer than {_FEW} such samples and follow the choice of all (val_share = {s.federation.val_share:g})"
            )
        if self.attack is not None:
            liars = ", ".join(map(str, sorted(self.attack.liars)))
            sentences.append(f"attack = {self.attack.text}: clients {liars} lie, and scores are those of the others")
        return sentences

    def warnings(self) -> list[str]:
        """Return what is probably not meant about data and model, one sentence each."""
        rounds = self.settings.rounds
        late = [f"the timeline has a change in round {t}, after the last round ({rounds})"
                for t in self.federation.timeline.rounds if t > rounds]  # fmt: skip
        return [*self.federation.notes, *self.notes, *late[:1]]

    def options_for(self, source: object) -> dict[str, Any]:
        """Return the model options that apply to this model; if clients have different models, those it knows."""
        options = self.settings.model_options
        return fitting_options(source, options) if self.others and isinstance(source, str) else options

    def model_of(self, client: int) -> str | nn.Module | Factory:
        """Return the client's model: a name (also of a model chosen from the data) or the user's object."""
        own, name = self.objects.model, self.settings.model
        if isinstance(own, PerClient) or (own is None and is_assignment(name)):
            return assign_models(own or str(name), self.federation.clients)[client]
        return own or model_name(self.settings, self.federation, "bn" in self.method.needs)

    def tensors(self) -> str:
        """Return a digest of the model's tensor names and shapes, and of initial values not drawn from the seed."""
        digest, ctx = hashlib.blake2b(digest_size=16), self.method.ctx
        s = self.settings
        from_file = s.warm_start is not None or s.weights is not None or Adaptation.of(s).changes
        values = isinstance(self.objects.model, nn.Module) or from_file
        for name, v in [*ctx.w0.items(), *ctx.net.constants().items()]:
            digest.update(f"{name} {tuple(v.shape)}".encode())
            if values:
                digest.update(v.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def model_digest(self) -> str:
        """Return a digest of the source code of the model; if clients have different models, of all of them."""
        nets = {id(m.ctx.net): m.ctx.net for m in (self.method, *self.others.values())}
        name = self.settings.model or ""
        made_by = _maker(self.objects.model) if self.objects.model else recalled(name) if ":" in name else None
        return "-".join(model_digest(net.module, made_by) for net in nets.values())

    def code_digests(self) -> dict[str, str]:
        """Return digests of the source code of the user's functions, by setting."""
        return {name: source_digest([function]) for name, function in self.functions.items()}

    def cost(self, client: int) -> int:
        """Return the relative cost of computing a client, in any unit."""
        return int(self._costs[client])

    @cached_property
    def _costs(self) -> Any:
        return self.federation.sizes("train") * self.settings.epochs * 3 + self.federation.sizes("test") * 2

    def described(self) -> dict[str, Any]:
        """Return the content of settings.json."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "method": {
                "name": type(self.method).__name__,
                "title": self.method.card.title or type(self.method).__name__,
                "settings": self.method.hp.model_dump(mode="json"),
                "reading": unusual_reading(self.method),
                "weighting": self.settings.weighting or self.method.weighting,
                "certainty": self.method.card.certainty,
            },
            "objects": self.objects.described(),
            "task": {"name": self.method.ctx.task.name, "outputs": self.method.ctx.task.outputs},
            "digests": {
                "method": method_digest(type(self.method)),
                "model": self.model_digest(),
                **self.code_digests(),
            },
            "built": ["model"] if isinstance(self.objects.model, nn.Module | PerClient) else [],
            "tensors": self.tensors(),
            "partition": self.federation.identity,
            "client_names": list(self.federation.names) if self.federation.named else None,
            "data_dir": str(self.engine.data_dir.resolve()) if self.engine.data_dir else None,
            "normalisation": {"mean": self.federation.dataset.mean, "std": self.federation.dataset.std},
            "table": None if (table := self.federation.dataset.table) is None else table.model_dump(mode="json"),
            "warnings": self.warnings(),
            "parameters": sum(self.method.ctx.w0[k].numel() for k in self.method.ctx.net.trainable),
            "versions": {
                "coterie": version("coterie"),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "native": native.native_status(),
            },
        }


def fitting_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that this model knows."""
    known = options_of(name)
    return {k: v for k, v in options.items() if k in known}


def model_name(settings: RunSettings, federation: Federation, batch_norm: bool) -> str:
    """Return the model named in the settings, or the default model for the data."""
    if settings.model is not None and settings.model != WITH_NORM:
        return settings.model
    example = federation.dataset.ready(torch.arange(2), federation.settings.normalize)
    norm = batch_norm or settings.model == WITH_NORM
    task = federation.task
    return default_for(federation.shape, task.outputs, example.dtype, norm, task.name)
