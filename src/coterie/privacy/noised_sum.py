"""Differential privacy of whole clients: the combiner that adds up clipped changes and adds noise to the sum.

McMahan, Ramage, Talwar, Zhang, ICLR 2018 (arXiv 1710.06963): every client takes part in a round with probability
`join`, independently of all others. The changes of the participants are clipped, added up, noised, and divided by the
expected number of participants, so that nothing depends on the actual one. A round without participants is noise alone.
`adaptive` moves the clipping bound towards a quantile of the clients' norms: Andrew, Thakkar, McMahan, Ramaswamy,
NeurIPS 2021 (arXiv 1905.03871), with their constants.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coterie.core import tree as T
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method, Upload
from coterie.core.tree import Tree
from coterie.engine.combining import Memory, title_of
from coterie.errors import CoterieError
from coterie.privacy.accountant import Releases, check_installed, epsilon_of, sigma_for
from coterie.privacy.clipping import clipped_change, norm_of, reference
from coterie.privacy.noise import noised, normals
from coterie.privacy.setting import PrivacySetting, privacy_setting

_RATE = 0.2  # step of the logarithm of an adaptive bound
_SHARE = 20  # the expected participants divided by it are the noise of the number of clipped changes
_FEWEST = 2  # clients of a run


def sigma_of_clients(setting: PrivacySetting, method: Method) -> float:
    """Return the noise multiplier of every round; the budget is spent in the rounds that the run began with."""
    if setting.sigma is not None:
        return setting.sigma
    assert setting.epsilon is not None
    return sigma_for(setting.epsilon, setting.delta, method.ctx.join, method.ctx.planned_rounds)


def expected_participants(method: Method) -> float:
    """Return the expected number of participants of a round."""
    return method.ctx.join * len(method.ctx.clients)


@dataclass(frozen=True)
class NoisedSum:
    """The estimate of a run with `dp = client(...)`."""

    text: str
    secret: bool = False  # True: noise comes from the operating system, as in a real federation
    setting = "dp"
    always = True  # a round without uploads releases noise too

    @property
    def parsed(self) -> PrivacySetting:
        """The setting as a typed value."""
        return privacy_setting(self.text)

    def estimate(
        self, method: Method, sent: Tree, uploads: Sequence[Upload], round: int, memory: Memory
    ) -> tuple[Upload, Memory]:
        """Return the noised mean of the clipped changes, and the clipping bound of the next round."""
        dp, clip = self.parsed, self.bound(memory)
        at = reference(method.schema("up"), sent)
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in at.items()}
        within = 0
        for u in uploads:  # clipped again, because a device may not have done it
            change = T.sub(u.tree, at)
            within += norm_of(change) <= clip * (1 - 1e-4)
            for k, v in clipped_change(u.tree, at, clip).items():
                total[k] += v
        sigma, expected = sigma_of_clients(dp, method), expected_participants(method)
        seed = method.ctx.seed
        of_counts = max(expected / _SHARE, sigma)
        of_sums = sigma if dp.adaptive is None else (sigma**-2 - (2 * of_counts) ** -2) ** -0.5
        total = noised(total, of_sums * clip, None if self.secret else (seed, "dp", round, 0))
        entries = method.schema("up").entries
        tree = {k: (v + total[k] / expected).clamp(entries[k].low, entries[k].high).to(v.dtype) for k, v in at.items()}
        if dp.adaptive is not None:
            draw = normals(1, None if self.secret else (seed, "dp count", round, 0))
            share = 0.5 + (within - len(uploads) / 2 + of_counts * float(draw)) / expected
            clip *= math.exp(-_RATE * (share - dp.adaptive))
        return Upload(tree, samples=1), {"clip": clip}

    def bound(self, memory: Memory) -> float:
        """Return the clipping bound of the next round."""
        return float(memory.get("clip", self.parsed.clip))

    def asked(self, memory: Memory) -> float | None:
        """Return the clipping bound to send to devices in the next round; None if it is the bound of the setting."""
        return None if self.parsed.adaptive is None else self.bound(memory)

    def facts(self, memory: Memory) -> dict[str, Any]:
        """Return the clipping bound of the next round, if it moves."""
        return {} if self.parsed.adaptive is None else {"clip": self.bound(memory)}

    # ---- what can be protected ---------------------------------------------------------------------------------------
    def check(self, method: Method) -> None:
        """Raise CoterieError if an entry of the uploads is not a clipped sum, or if no noise can be chosen."""
        check_installed()
        check_protected(method, self.text)
        dp, ctx = self.parsed, method.ctx
        if len(ctx.clients) < _FEWEST:
            raise CoterieError(f"dp = {self.text} needs at least {_FEWEST} clients; this run has {len(ctx.clients)}")
        if ctx.weighting == "samples":
            raise CoterieError(
                f"dp = {self.text} counts all clients alike; weighting = samples would make one client count more: "
                "leave it out"
            )
        sigma = sigma_of_clients(dp, method)
        if dp.epsilon is not None and epsilon_of([Releases(sigma, ctx.join, 1)], dp.delta) > dp.epsilon:
            raise CoterieError(f"dp = {self.text}: one round with sigma = {sigma:g} costs more than epsilon")

    def warnings(self, method: Method) -> list[str]:
        """Return a warning if the noise is larger than the largest sum of the clients' changes."""
        sizes = [math.prod(n for n in e.shape if isinstance(n, int)) for e in method.schema("up").entries.values()]
        ratio = sigma_of_clients(self.parsed, method) * math.sqrt(sum(sizes)) / expected_participants(method)
        if ratio <= 1:
            return []
        return [
            f"dp = {self.text}: the noise on the {sum(sizes):,} values that clients upload is {ratio:.1f} times as "
            f"long as the largest change that {expected_participants(method):g} clients can agree on; more clients, a "
            "smaller shared part or a larger epsilon give a better model (`coterie privacy plan` computes them)"
        ]


def check_protected(method: Method, text: str) -> None:
    """Raise CoterieError unless all that clients upload, in every round, is a sum of clipped changes."""
    title = title_of(method)
    if isinstance(method, EdgeMethod) or method.combines != "mean":
        return  # the combiner raises the error
    if method.opening():
        raise CoterieError(
            f"dp = {text} is not possible: in round 0 of {title} every client tells the server something that is not a "
            "clipped sum; choose settings without this round"
        )
    up, down, shared = method.schema("up"), method.schema("down").entries, method.down(method.setup(), (), 1).shared
    for name, entry in up.entries.items():
        fixed = all(isinstance(n, int) for n in entry.shape)
        if not (entry.summable and entry.dtype.is_floating_point and fixed):
            raise CoterieError(f"dp = {text} is not possible: {name}, which {title} uploads, is not a clipped sum")
        if entry.kind == "model" and name in down and name not in shared:
            raise CoterieError(f"dp = {text} is not possible: {title} sends each client its own {name}")
