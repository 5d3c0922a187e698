"""References: every registered method a second time, in plain PyTorch, for tests/test_parity.py.

A file NAME.py holds one method (variants of one class share a file). It is written from the paper's equations or from
what the authors' public code does, with nn.Module, autograd and torch.optim, and imports nothing of coterie.methods or
coterie.parts. It has:

    ABOUT = About(BOTH, departures=("...",))             # the row of docs/parity.md; {method: About} if they differ
    def reference(world, **settings) -> Result: ...      # all rounds, for everybody
    CASES = [Case("fedprox", reference, {"mu": 0.3})]    # registered name, function, settings, settings of the run

`world` holds data, first weights, participants and batch order, so that both sides see the same; the reference does the
rest: loss, steps, what is kept, what is averaged. It returns what it has: `clients` (the models that are scored, whose
logits are compared too), `whole` (the global model), and entries of the server's and the clients' states by name.
Everything is compared to 1e-5 after three rounds with half of the clients each, on an MLP and on a CNN with batch norm.
After a change of ABOUT write the page anew: `python tests/reference/table.py`.
"""

import copy
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.method import ClientData, Split
from coterie.core.rng import key, torch_rng

TOLERANCE = 1e-5
CODE, PAPER, BOTH = "authors' code", "paper's equations", "both"


@dataclass(frozen=True)
class About:
    """A row of docs/parity.md."""

    agrees: str  # with: CODE, PAPER or BOTH; or another source, named
    departures: Sequence[str] = ()  # that remain under the defaults, and the settings that undo them


@dataclass(frozen=True)
class Result:
    """What a reference ends with. Models are modules or trees {name: tensor}; what is left out is not compared."""

    clients: Mapping[int, Any] = field(default_factory=dict)  # what is scored
    whole: Any = None  # the global model
    server: Mapping[str, Any] = field(default_factory=dict)  # entries of the server's state
    states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # entries of the clients' states
    adapted: Mapping[int, Any] = field(default_factory=dict)  # after `adapt`
    logits: Mapping[int, Tensor] = field(default_factory=dict)  # on the client's test part; default: of `clients`


@dataclass(frozen=True)
class Case:
    method: str
    reference: Callable[..., Result]
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)  # epochs, momentum, weight_decay, join, bn_stats, ...
    models: Sequence[str] = ("mlp", "cnn")
    tag: str = ""  # tells cases of one method apart
    long: Sequence[str] = ()  # models that only the long tests compare

    @property
    def name(self) -> str:
        return self.method + (f"[{self.tag}]" if self.tag else "")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4))


def cnn() -> nn.Module:
    """Smooth, so that rounding stays rounding; with batch norm and two fully connected layers."""
    first = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Softplus(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Softplus()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 4))


MODELS = {"mlp": mlp, "cnn": cnn}
SIZES = (7, 13, 10, 6, 11, 9)  # with batches of 4 the last ones hold 3, 1, 2, 2, 3, 1


@dataclass(frozen=True)
class World:
    """Six unequal clients of two or three of four classes, and the keyed choices of a run with seed 0."""

    model: str = "mlp"
    rounds: int = 3
    join: float = 0.5
    epochs: float = 1
    batch: int = 4
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    public: int = 0
    classes: int = 4

    # ---- data: also what the engine's clients are given -----------------------------------------------------------
    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return [self._draw("train", i, n) for i, n in enumerate(SIZES)]

    def _draw(self, part: str, client: int, n: int) -> tuple[Tensor, Tensor]:
        rng = torch_rng(7, part, client)
        held = torch.tensor([[0, 1], [0, 1, 2], [1, 2, 3], [2, 3], [0, 2, 3], [1, 3]][client])
        y = held[torch.randint(len(held), (n,), generator=rng)]
        y[: len(held)] = held[:n]  # every class that it holds is there
        centres = torch.randn(4, 1, 6, 6, generator=torch_rng(7, "centres"))
        return centres[y] + 0.7 * torch.randn(n, 1, 6, 6, generator=rng) + 0.1 * client, y

    def train_part(self, client: int) -> tuple[Tensor, Tensor]:
        return self.parts[client]

    def val_part(self, client: int) -> tuple[Tensor, Tensor]:
        return self._draw("val", client, 5)

    def test_part(self, client: int) -> tuple[Tensor, Tensor]:
        return self._draw("test", client, 6)

    @cached_property
    def public_part(self) -> Tensor | None:
        return torch.randn(self.public, 1, 6, 6, generator=torch_rng(7, "public")) if self.public else None

    def data(self, client: int, round: int = 1) -> ClientData:
        train, val = Split(*self.train_part(client)), Split(*self.val_part(client))
        return ClientData(client, train, val, self.classes, self.public_part)

    def test(self, client: int, round: int = 1) -> Split:
        return Split(*self.test_part(client))

    # ---- what a reference starts from --------------------------------------------------------------------------------
    @property
    def clients(self) -> range:
        return range(len(SIZES))

    @property
    def sizes(self) -> Sequence[int]:
        return SIZES

    @cached_property
    def _first(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return MODELS[self.model]().train()

    def module(self) -> nn.Module:
        """A model with the first weights of the run, in training mode."""
        return copy.deepcopy(self._first)

    def sampled(self, round: int) -> list[int]:
        """The participants, drawn uniformly; everybody in round 0."""
        n = len(SIZES)
        m = n if round == 0 else max(1, int(self.join * n + 0.5))
        return sorted(torch.randperm(n, generator=torch_rng(0, "sample", round))[:m].tolist())

    def orders(self, round: int, client: int, epochs: int, stream: int = 0) -> Iterator[Tensor]:
        """The order of the client's samples, for each epoch."""
        for epoch in range(epochs):
            rng = torch_rng(0, "batches", round, client, stream, epoch)
            yield torch.randperm(SIZES[client], generator=rng)

    def batches(
        self, round: int, client: int, epochs: float | None = None, stream: int = 0, steps: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All batches of a local training, or the first `steps`."""
        for epoch in self.epochs_of(round, client, epochs if steps is None else steps, stream):
            yield from epoch if steps is None else epoch[:steps]
            steps = None if steps is None else steps - len(epoch[:steps])

    def epochs_of(
        self, round: int, client: int, epochs: float | None = None, stream: int = 0
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The same, epoch by epoch. With batch norm, fewer than four samples at the end join the batch before them."""
        x, y = self.train_part(client)
        for order in self.orders(round, client, int(self.epochs if epochs is None else epochs), stream):
            parts = list(order.split(self.batch))
            if self.model == "cnn" and len(parts) > 1 and len(parts[-1]) < min(4, self.batch):
                parts[-2:] = [torch.cat(parts[-2:])]
            yield [(x[p], y[p]) for p in parts]

    def start(self, number: int) -> nn.Module:
        """Another draw of the first weights; number 0 is the run's own."""
        model = self.module()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(0, "start", number))
            for layer in model.modules() if number else ():
                if hasattr(layer, "reset_parameters"):
                    layer.reset_parameters()
        return model

    def rng(self, purpose: str, *keys: int | str) -> torch.Generator:
        """The keyed draws of the run."""
        return torch_rng(0, purpose, *keys)

    def noise(self, round: int, client: int) -> None:
        """Noise inside a local training (dropout, Gumbel) starts here."""
        torch.manual_seed(key(0, "noise", round, client))

    def rate(self, round: int) -> float:
        return float(self.lr * self.lr_decay ** (round - 1))

    def optimiser(self, params: Iterable[nn.Parameter], round: int, lr: float | None = None) -> torch.optim.Optimizer:
        """A new one, as the run says."""
        rate = self.rate(round) if lr is None else lr
        if self.optimizer == "adam":
            return torch.optim.Adam(params, rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(params, rate, momentum=self.momentum, weight_decay=self.weight_decay)

    def fit(
        self,
        model: nn.Module,
        round: int,
        client: int,
        loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
        params: Iterable[nn.Parameter] | None = None,
        epochs: float | None = None,
        stream: int = 0,
    ) -> nn.Module:
        """Plain local training of `model` in place: one optimiser, one pass over the batches after the other."""
        opt = self.optimiser(list(model.parameters()) if params is None else list(params), round)
        for x, y in self.batches(round, client, epochs, stream):
            opt.zero_grad()
            (loss or ce)(model, x, y).backward()
            opt.step()
        return model


# ---- what references share: nothing that a method decides ------------------------------------------------------------
def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def body(model: nn.Module) -> nn.Module:
    """All but the last layer: maps x to features."""
    assert isinstance(model, nn.Sequential)
    return model[:-1]


def head(model: nn.Module) -> nn.Linear:
    assert isinstance(model, nn.Sequential) and isinstance(model[-1], nn.Linear)
    return model[-1]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and batch-norm statistics by name, the tensors themselves (no counters)."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return {k: v.data for k, v in found if v.is_floating_point()}


def head_names(model: nn.Module) -> list[str]:
    """Names of the last layer's weight and bias."""
    return [k for k, p in model.named_parameters() if any(p is q for q in head(model).parameters())]


def body_tree(model: nn.Module) -> dict[str, Tensor]:
    """Everything but the last layer."""
    names = head_names(model)
    return {k: v for k, v in tensors(model).items() if k not in names}


def head_tree(model: nn.Module) -> dict[str, Tensor]:
    return {k: tensors(model)[k] for k in head_names(model)}


def load(model: nn.Module, tree: Mapping[str, Tensor]) -> nn.Module:
    """Copy these entries into the model."""
    mine = tensors(model)
    for k, v in tree.items():
        mine[k].copy_(v)
    return model


def average(
    trees: Sequence[nn.Module | Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Weighted mean by name, in double precision; no weights: uniform."""
    parts = [tensors(t) if isinstance(t, nn.Module) else t for t in trees]
    share = torch.tensor(list(weights) if weights is not None else [1.0] * len(parts), dtype=torch.float64)
    share = share / share.sum()
    return {k: sum(w * p[k].double() for w, p in zip(share, parts, strict=True)).float() for k in parts[0]}  # type: ignore[union-attr]


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def vector(model: nn.Module) -> Tensor:
    """The parameters as one vector; batch-norm statistics are not parameters."""
    return torch.cat([p.data.reshape(-1) for p in model.parameters()])


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    """The output in evaluation mode; the model's mode is as before afterwards."""
    was = model.training
    model.eval()
    with torch.no_grad():
        out: Tensor = model(x)
    model.train(was)
    return out


def linear(rng: torch.Generator, inner: int, out: int) -> nn.Linear:
    """A linear layer with values drawn uniformly within 1 / sqrt(inner): first its weight, then its bias."""
    layer = nn.Linear(inner, out)
    for p in layer.parameters():
        p.data = (torch.rand(p.shape, generator=rng) * 2 - 1) * inner**-0.5
    return layer


def squares(model: nn.Module, anchor: Sequence[Tensor]) -> Tensor:
    """|w - anchor|^2 over the parameters, with a gradient."""
    return torch.stack([(p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True)]).sum()


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def two_means(points: Tensor) -> list[int]:
    """Labels of the best cut of rows into two groups (least squares), found by trying all; the first row has 0."""
    best, found = float("inf"), [0] * len(points)
    for bits in range(1, 2 ** (len(points) - 1)):
        labels = [0, *((bits >> k) & 1 for k in range(len(points) - 1))]
        parts = [points[[i for i, c in enumerate(labels) if c == g]].double() for g in (0, 1)]
        cost = sum(float((p - p.mean(0)).square().sum()) for p in parts)
        if cost < best:
            best, found = cost, labels
    return found


def class_means(features: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {int(k): features[y == k].mean(0) for k in y.unique()}


def features(model: nn.Module, x: Tensor) -> Tensor:
    """What enters the head, in evaluation mode."""
    return evaluated(body(model), x)


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


# ---- all of them -----------------------------------------------------------------------------------------------------
def modules() -> list[Any]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "table")
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def cases() -> list[Case]:
    return [case for module in modules() for case in module.CASES]


def abouts() -> dict[str, About]:
    """The row of every method that has a reference."""
    out: dict[str, About] = {}
    for module in modules():
        for case in module.CASES:
            out[case.method] = module.ABOUT[case.method] if isinstance(module.ABOUT, dict) else module.ABOUT
    return out
