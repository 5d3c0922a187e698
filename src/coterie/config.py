"""The settings of a run: one typed class, from Python, TOML or the command line."""

import tomllib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from coterie.core.losses import check_class_weights, check_loss_path
from coterie.core.method import Method
from coterie.core.metrics import check_metrics
from coterie.core.schedules import check_schedule
from coterie.core.tasks import task_name
from coterie.core.views import Use, View
from coterie.data.dataset import SUBSET
from coterie.data.natural import NATURAL
from coterie.data.settings import PartitionSettings
from coterie.data.table import TableColumns
from coterie.data.timeline import read_timeline
from coterie.engine.attacks import check_attack
from coterie.engine.combining import check_weight_cap
from coterie.engine.robust import check_robust
from coterie.engine.server_optimiser import check_server_optimiser
from coterie.errors import CoterieError, unknown
from coterie.methods import build_method, find, resolve, validation_sentence
from coterie.models.adaptation import Rank
from coterie.privacy.secure_sum.setting import check_secure
from coterie.privacy.setting import check_privacy
from coterie.runtimes.registry import canonical_runtime
from coterie.train.augmentation import check_augment
from coterie.train.devices import check_device
from coterie.train.optimisers import check_optimiser

PUBLIC = 200  # default number of unlabelled items that are set aside for a method that needs them
LARGEST_RATE = 1e6  # largest rate or number of epochs; larger values are typing errors
LARGEST_NUMBER = 1e9  # largest number that only a method or a model interprets


class RunSettings(BaseModel):
    """Everything that affects the results of a run. How it is computed is in Engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str = Field(description="name of the method")
    settings: dict[str, Any] = Field({}, description="the method's own settings")
    data: str = Field(
        "digits", description="a known name, a file (.npz, .csv, .parquet) or folder, hub:owner/name or module:function"
    )
    target: str | None = Field(
        None, description="column of a table to predict; several are separated by commas (survival: time,event)"
    )
    client: str | None = Field(None, description="column of a table that says whose row it is")
    features: str | None = Field(
        None,
        description="columns of a table that the model sees, separated by commas; NAME:category names a column's kind "
        "(number, boolean, date or category); empty: all other columns",
    )
    split_column: str | None = Field(None, description="column of a table that holds train, val or test")
    task: str | None = Field(
        None, description="classification, binary, regression, count, multilabel or survival; empty: as the data show"
    )
    subset: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=SUBSET)] | None = Field(
        None,
        description="use only this many samples of the data set; or N+M: N training and M official test samples, all "
        "drawn from the official training part",
    )
    federation: PartitionSettings = Field(PartitionSettings(), description="how the data are divided among clients")
    model: str | None = Field(None, description="a known name or package.module:factory; empty: chosen from the data")
    model_options: dict[str, Any] = Field({}, description="arguments for the model, such as {hidden = 128}")
    rounds: int = Field(50, ge=1, le=10**9, description="communication rounds")
    join: float = Field(0.5, gt=0, le=1, description="fraction of the clients that take part in a round")
    epochs: float = Field(5, gt=0, le=LARGEST_RATE, description="local epochs per round")
    batch: int = Field(32, ge=1, le=2**31, description="batch size of local training")
    lr: float = Field(0.05, gt=0, le=LARGEST_RATE, description="learning rate of local training")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor by which lr is multiplied after every round")
    lr_rounds: Annotated[str, AfterValidator(partial(check_schedule, "lr_rounds"))] | None = Field(
        None,
        description="schedule of lr over the rounds: step(every, factor), exponential(factor), cosine(end), "
        "linear(end), warmup(count, start), or several joined by +, whose factors are multiplied; empty: constant",
    )
    lr_steps: Annotated[str, AfterValidator(partial(check_schedule, "lr_steps"))] | None = Field(
        None, description="the same over the steps of each phase of local training; empty: constant"
    )
    local_steps: int | None = Field(
        None, ge=1, le=10**9, description="steps of local training per round, instead of epochs; empty: epochs"
    )
    optimizer: Annotated[str, AfterValidator(check_optimiser)] = Field(
        "sgd",
        description="optimiser of local training: a name of torch.optim in any spelling, with options, such as "
        "adamw(betas=(0.9, 0.99)), or package.module:function",
    )
    loss: Annotated[str, AfterValidator(check_loss_path)] | None = Field(
        None,
        description="package.module:function of outputs and targets that gives the loss of each training sample, or "
        "their mean; empty: the task's own",
    )
    class_weights: Annotated[str, BeforeValidator(check_class_weights)] | None = Field(
        None,
        description="weights of the classes in the training loss: balanced (by each client's own numbers of samples), "
        "numbers in the order of the classes (1, 5), or by class (healthy=1, ill=5; others 1); empty: all equal",
    )
    grad_clip: float | None = Field(
        None, gt=0, le=LARGEST_RATE, description="largest norm of a gradient in local training; empty: not clipped"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=LARGEST_RATE,
        description="weight decay, as the optimiser defines it: an L2 penalty (sgd, adam) or decoupled (adamw)",
    )
    augment: Annotated[str, AfterValidator(check_augment)] | None = Field(
        None,
        description="augmentation of training batches: crop(padding), flip(share), erase(share, size) and "
        "colour(strength) for pictures; jitter(sigma), scale(sigma) and mixup(alpha) for all numbers; several are "
        "joined by +; empty: none",
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description="type of the model's operations: float32, or bf16 where PyTorch's autocast chooses it (parameters, "
        "losses and what is sent stay float32)",
    )
    opt_state: Literal["reset", "keep"] = Field(
        "reset", description="keep: a client's momentum or Adam moments carry over to its next round"
    )
    server_optimizer: Annotated[str, AfterValidator(check_server_optimiser)] | None = Field(
        None,
        description="optimiser of the server for methods that average uploads: fedavgm(lr, momentum), fedadagrad(lr, "
        "tau), fedadam(lr, beta1, beta2, tau) or fedyogi(lr, beta1, beta2, tau); empty: the mean itself",
    )
    dp: Annotated[str, AfterValidator(check_privacy)] | None = Field(
        None,
        description="differential privacy: client(epsilon, delta, clip, sigma, adaptive, scores) of whole clients, "
        "example(epsilon, delta, clip, sigma, scores) of single training samples, or local(...) of uploads noised at "
        "the device; empty: none",
    )
    secure: Annotated[str, AfterValidator(check_secure)] | None = Field(
        None,
        description="secure aggregation for methods that average uploads: sum(t, clip, weight, share); the server sees "
        "only sums over at least t clients, in fixed point; empty: none",
    )
    robust: Annotated[str, AfterValidator(check_robust)] | None = Field(
        None,
        description="robust estimate in place of the mean of uploads, for methods that only average them: median, "
        "trimmed(share), krum(f), multi-krum(f, m), geometric-median, norm-clip(c) or centered-clip(tau, iterations); "
        "empty: the mean",
    )
    weight_cap: Annotated[float, AfterValidator(check_weight_cap)] | None = Field(
        None,
        description="a client's samples count as at most this multiple of the round's median (0: no cap); empty: 10 "
        "where nobody can check the numbers, in federations of devices with own data and with an attack, otherwise 0",
    )
    attack: Annotated[str, AfterValidator(check_attack)] | None = Field(
        None,
        description="attack of some clients, for simulations: sign-flip(share, scale), label-flip(share), "
        "scaled(share, factor), gaussian(share, sigma), little-is-enough(share, z), backdoor(share, target) or "
        "free-rider(share); these clients are excluded from scores; empty: none",
    )
    weighting: Literal["samples", "uniform"] | None = Field(
        None, description="weights of the clients in the average; empty: as in the method's paper"
    )
    bn_stats: Literal["shared", "local"] = Field(
        "shared", description="batch-norm statistics are averaged like weights, or stay on the client"
    )
    weights: str | None = Field(
        None,
        description="file of pretrained weights (.safetensors, or a state dict): tensors that fit by name and shape "
        "are the initial values; empty: drawn from the seed",
    )
    freeze: str | None = Field(
        None,
        description="parts of the model that are constants, separated by commas: names of layers such as stem,layer1, "
        "or groups (body, norm, lora:A); they neither train nor travel; empty: none",
    )
    frozen_features: Literal["once", "each"] = Field(
        "once",
        description="once: what the frozen beginning of a model gives for a sample is computed once, if `freeze` is "
        "set and nothing changes before it; each: in every batch",
    )
    lora_rank: Rank | None = Field(
        None,
        description="rank of low-rank adapters (LoRA); all other layers but the head are then constants; empty: none",
    )
    lora_alpha: float | None = Field(
        None, gt=0, le=LARGEST_RATE, description="scale of the adapters, which add alpha / rank B A; empty: the rank"
    )
    lora_targets: str | None = Field(
        None,
        description="layers with adapters, separated by commas: linear, conv, attention, or names of layers or their "
        "endings such as query,value; empty: linear,attention",
    )
    warm_start: str | None = Field(
        None, description="folder of a run whose global model (or mean of personal models) this one starts from"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of partition, initial model, sampling and training")
    dropout: float = Field(0.0, ge=0, lt=1, description="fraction of the sampled clients that fail in a round")
    stragglers: float = Field(0.0, ge=0, le=1, description="fraction of the sampled clients that train fewer epochs")
    newcomers: int = Field(0, ge=0, description="the last N clients never train and are only evaluated")
    eval_every: int = Field(10, ge=1, description="rounds between evaluations of all clients")
    eval_clients: int | None = Field(
        None, ge=1, description="evaluate only this many clients, always the same ones; empty: all"
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        description="end after this many evaluations without a better value on validation data; empty: never",
    )
    stop_at: float | None = Field(
        None, description="end when the value on validation data reaches this target, 0.9 for 90 %; empty: never"
    )
    use: Use | None = Field(
        None,
        description="model that clients use: received, trained (as their last training left it), best (of both and of "
        "earlier ones, by validation data) or guarded (best, unless a client's own continued local model is clearly "
        "better); empty: as the method says",
    )
    metrics: Annotated[str, BeforeValidator(check_metrics)] | None = Field(
        None,
        description="further metrics, separated by commas: macro_f1, balanced_accuracy, macro_auc, calibration_error, "
        "confusion (classification), or package.module:function of predictions and targets; empty: the task's own",
    )
    watch: bool = Field(True, description="evaluate participants before and after local training in every round")
    final_trained: bool = Field(
        True, description="after the last round, also evaluate all clients after local training"
    )
    headline: View = Field(
        "personal",
        description="the view that tables lead with, by default the model that a client of the method would use "
        "(adapted for methods that fine-tune, otherwise personal); received, trained and edge are then scored more "
        "often",
    )
    official: bool = Field(False, description="also evaluate every personal model on the whole official test part")
    gm_head: Literal["mean", "init"] = Field("mean", description="head of GM, the mean of the personal models")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    log_updates: bool = Field(
        False,
        description="log the norm of the participants' mean update (aun), the largest norm, and the mean loss of the "
        "participants' models on their training data (train_loss)",
    )

    @property
    def columns(self) -> TableColumns:
        """The columns of a table that have a meaning."""
        return TableColumns(target=self.target, client=self.client, features=self.features, split=self.split_column)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise unknown("setting", str(name), cls.model_fields)
        return given

    @field_validator("task")
    @classmethod
    def _task(cls, given: str | None) -> str | None:
        return given if given is None else task_name(given)

    @field_validator("model_options", "settings")
    @classmethod
    def _plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if not _is_plain(value):
                raise ValueError(f"{name} must be made of text, lists, tables and numbers within {LARGEST_NUMBER:g}")
        return given


class Engine(BaseModel):
    """How a run is computed; does not affect its results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int | None = Field(None, ge=1, description="worker processes; empty: number of CPU cores")
    runtime: str = Field(
        "local",
        description="local (processes on this machine), ray (a cluster) or federation (a device process per client)",
    )
    address: str | None = Field(None, description="address of the Ray cluster; empty: one is started on this machine")
    engine: Literal["loop", "stack", "auto"] | None = Field(
        None,
        description="loop, stack or auto: train clients one by one, many at once, or whichever is faster (equal up to "
        "rounding); empty: loop on cpu, otherwise stack where the method allows it",
    )
    device: Annotated[str, AfterValidator(check_device)] | None = Field(
        None,
        description="where clients train: cpu, cuda, cuda:1, mps, xpu, auto (the first of these that is there), or "
        "several joined by commas, which workers share; empty: cpu",
    )
    keep: int = Field(2, ge=2, description="checkpoints to keep, from each of which a run can be continued")
    state: Literal["memory", "disk"] = Field("memory", description="where client state is kept between rounds")
    data_dir: Path | None = Field(None, description="directory with the data files; empty: COTERIE_DATA")

    @field_validator("runtime")
    @classmethod
    def _runtime(cls, given: str) -> str:
        return canonical_runtime(given)


def engine(**given: Any) -> Engine:
    """Check the given options; None means the default."""
    try:
        return Engine(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as e:
        raise CoterieError(validation_sentence("options", e)) from None


def settings(method: str | type[Method], **given: Any) -> RunSettings:
    """Check settings; each name may belong to the run, the federation or the method."""
    own, fed = (table(name, given.pop(name, None)) for name in ("settings", "federation"))
    own |= {"reading": given.pop("reading")} if "reading" in given else {}
    method_class(method)  # raises CoterieError for an unknown method
    method, own = resolve(method, own)
    cls = method_class(method)
    run: dict[str, Any] = {}
    has = cls.Settings.model_fields
    for name, value in given.items():
        {"run": run, "federation": fed, "method": own}[owner(name, has)][name] = value
    if twice := shared_names(cls):
        raise CoterieError(f'{cls.__name__} calls a setting "{twice[0]}", which runs have already; it must rename it')
    run.setdefault("headline", build_method(method, own).in_use)
    if run.get("data") in NATURAL:
        fed.setdefault("partition", "natural")
    if "public" in cls.needs:
        fed.setdefault("public", PUBLIC)
    if "timeline" in fed:
        fed["timeline"] = read_timeline(fed["timeline"])
    try:
        name = method if isinstance(method, str) else method.__name__
        chosen = RunSettings(method=name, settings=own, federation=PartitionSettings(**fed), **run)
    except ValidationError as e:
        raise CoterieError(validation_sentence("settings", e)) from None
    if chosen.momentum and chosen.optimizer.partition("(")[0] != "sgd":
        raise CoterieError(
            f"momentum = {chosen.momentum} has no effect with optimizer = {chosen.optimizer}; leave it out"
        )
    if chosen.local_steps is not None and "epochs" in run:
        raise CoterieError(f"local_steps = {chosen.local_steps} takes the place of epochs; leave one of them out")
    return chosen


def method_class(method: str | type[Method]) -> type[Method]:
    if isinstance(method, str):
        return find(method)
    if isinstance(method, type) and issubclass(method, Method):
        return method
    raise CoterieError(f"method = {method!r} is invalid: it must be the name of a method or a Method class")


def owner(name: str, *methods: Collection[str]) -> Literal["run", "federation", "method"]:
    """Say whether a setting belongs to the run, the federation or one of these methods' settings."""
    if name in RunSettings.model_fields:
        return "run"
    if name in PartitionSettings.model_fields:
        return "federation"
    own = [field for names in methods for field in names]
    if name in own:
        return "method"
    raise unknown("setting", name, [*RunSettings.model_fields, *PartitionSettings.model_fields, *own])


def given_reading(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the setting `NAME.reading` of the first of these names that has one, or else `reading`, as a table."""
    keys = [key for key in (*(f"{name}.reading" for name in names if name), "reading") if key in given]
    return {"reading": given[keys[0]]} if keys else {}


def shared_names(method: type[Method]) -> list[str]:
    """Settings of the method that have the name of a run or federation setting."""
    return [
        n for n in method.Settings.model_fields if n in RunSettings.model_fields or n in PartitionSettings.model_fields
    ]


def table(name: str, given: Any) -> dict[str, Any]:
    """The settings of a table; None means an empty table."""
    if isinstance(given, BaseModel):
        return given.model_dump(exclude_unset=True)
    if given is None or isinstance(given, dict):
        return dict(given or {})
    raise CoterieError(f"{name} = {given!r} is invalid: it must be a table, such as {name} = {{name = value}}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER)


def from_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, flat: tables `settings` and `federation` stay tables."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise CoterieError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # no TOML, no UTF-8, numbers without end
        raise CoterieError(f"{path} is not TOML: {e}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """'mu=0.1' to ("mu", 0.1); a value that is not TOML is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CoterieError(f'"{text}" is not key=value')
    try:
        return name.strip(), tomllib.loads(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        return name.strip(), value.strip()
