"""Differential privacy of single training samples, and of uploads against the cloud: both are made at the device.

Everything that influences an upload must be noised, a private head too, because the body's gradient passes through it.
Therefore all phases of local training take steps of DP-SGD, and hooks that make an upload get no data: a method that
reads data outside of its losses is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from coterie.core.context import ClientData
from coterie.core.method import Method, Trained, started
from coterie.engine.combining import title_of
from coterie.errors import CoterieError
from coterie.privacy.accountant import Releases, epsilon_of, sigma_for
from coterie.privacy.setting import PrivacySetting


class _Sealed:
    """Stands for data that a hook must not read."""

    def __init__(self, reason: str):
        self.__dict__["reason"] = reason

    def _refuse(self, *args: object) -> NoReturn:
        raise CoterieError(self.__dict__["reason"])

    __getattr__ = __len__ = __iter__ = __getitem__ = _refuse


def sealed(method: Method, data: ClientData, text: str) -> ClientData:
    """Return a client's data with parts that raise CoterieError when they are read."""
    reason = f"dp = {text} is not possible: {title_of(method)} reads data of a client outside of its losses"
    parts: Any = _Sealed(reason)
    return ClientData(data.client, parts, parts, data.classes, data.public)


@dataclass(frozen=True)
class DeviceNoise:
    """The noise of one client: equal in all its rounds."""

    setting: PrivacySetting
    rate: float  # probability with which a sample is in a batch; 1 for local(...)
    per_round: int  # number of noised releases in a round: steps, or one upload
    rounds: int  # rounds that the budget is for

    @property
    def sigma(self) -> float:
        """The noise multiplier; the budget is spent if the client takes part in all rounds."""
        dp = self.setting
        if dp.sigma is not None:
            return dp.sigma
        assert dp.epsilon is not None
        return sigma_for(dp.epsilon, dp.delta, self.rate, self.per_round * self.rounds)

    def epsilon(self, rounds: int) -> float:
        """Return the epsilon after this many rounds."""
        return epsilon_of([Releases(self.sigma, self.rate, rounds * self.per_round)], self.setting.delta)

    def over(self, rounds: int) -> str:
        """Return why a round after this many is not possible; empty if it is."""
        budget = self.setting.epsilon
        if budget is None or self.epsilon(rounds + 1) <= budget:
            return ""
        return f"the privacy budget epsilon = {budget:g} is spent after {rounds} rounds"


def check_examples(method: Method, text: str, data: ClientData) -> None:
    """Raise CoterieError unless local training can be noised sample by sample, and nothing else reads the data."""
    title, ctx = title_of(method), method.ctx
    no = f"dp = {text} is not possible"
    if ctx.net.has_batch_norm:
        raise CoterieError(
            f"{no}: batch norm mixes the samples of a batch; use a model without it, such as mlp or lenet5, or one "
            "with group norm"
        )
    if ctx.augment is not None:
        raise CoterieError(f"{no} with augment = {ctx.augment}; leave it out")
    if ctx.changing:
        raise CoterieError(f"{no} with a timeline: new samples would need a budget of their own")
    if method.opening() and method.schema("up").entries and type(method).begin is not Method.begin:
        raise CoterieError(f"{no}: in round 0 of {title} clients send what no step of training has noised")
    for phase in _phases(method):
        if phase.update is not None or phase.loss is None or phase.every_epoch is not None:
            raise CoterieError(f"{no}: a phase of {title} has an update rule of its own")
        if phase.batches_per_step > 1:
            raise CoterieError(f"{no}: a phase of {title} uses several batches in a step")
    client = sealed(method, data, text)
    state, server = method.init_client(client), method.setup()
    start = started(method, state, method.down(server, [data.client], 1).to(data.client), client, 1)
    if start.per_sample is not None:
        raise CoterieError(f"{no}: {title} has a value for each single training sample")
    method.end(state, Trained(start.params, start.extras, (), 1), client, 1)


def _phases(method: Method) -> Iterator[Any]:
    for t in sorted({1, 2, method.ctx.planned_rounds}):
        yield from method.phases(t)


def check_local(method: Method, text: str) -> None:
    """Raise CoterieError unless every entry that clients upload can be clipped and noised at the device."""
    title = title_of(method)
    if method.opening():
        raise CoterieError(
            f"dp = {text} is not possible: in round 0 of {title} every client tells the server something that is not "
            "clipped; choose settings without this round"
        )
    for name, entry in method.schema("up").entries.items():
        fixed = all(isinstance(n, int) for n in entry.shape) and not entry.optional
        if entry.kind not in ("model", "update") or not entry.dtype.is_floating_point or not fixed:
            raise CoterieError(
                f"dp = {text} is not possible: {name}, which {title} uploads, is no value that noise can be added to"
            )
