"""Protect the answers of a device: clip, add noise, and leave out numbers that no noise protects."""

from dataclasses import dataclass, replace

import torch

from coterie.core.context import ClientId
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.engine.messages import Score, ScoreAnswer, TrainAnswer
from coterie.privacy.clipping import clipped_upload, reference
from coterie.privacy.example_level import DeviceNoise
from coterie.privacy.noise import noised
from coterie.privacy.setting import PrivacySetting


@dataclass(frozen=True)
class DeviceSide:
    """The protection of one run at its clients."""

    setting: PrivacySetting
    deployed: bool = False  # True on a device of a real federation

    def upload(
        self, method: Method, upload: Tree, download: Tree, round: int, client: ClientId, clip: float | None = None
    ) -> Tree:
        """Return the upload as it may leave the device; `clip` is the bound of this round if it changes."""
        if not upload or self.setting.unit == "example":
            return upload
        schema = method.schema("up")
        at = reference(schema, download)
        clipped = clipped_upload(upload, at, self.setting.clip if clip is None else clip)
        if self.setting.unit == "client":
            return clipped
        # the values of two clients are up to twice the bound apart
        deviation = 2 * self.setting.clip * self.noise(method, 0).sigma
        tree = noised(clipped, deviation, None if self.deployed else (method.ctx.seed, "dp local", round, client))
        return {k: v.clamp(schema.entries[k].low, schema.entries[k].high) for k, v in tree.items()}

    def noise(self, method: Method, samples: int, per_round: int = 1) -> DeviceNoise:
        """Return the noise of a client with this many samples, whose training takes `per_round` steps."""
        example = self.setting.unit == "example"
        rate = min(1.0, method.ctx.batch / max(1, samples)) if example else 1.0
        return DeviceNoise(self.setting, rate, per_round if example else 1, method.ctx.planned_rounds)

    @property
    def silent(self) -> bool:
        """True if counts of predictions, losses and notes stay on the device."""
        return self.deployed and not self.setting.scores

    def trained(self, answer: TrainAnswer) -> TrainAnswer:
        """Return the answer without numbers that no noise protects."""
        return replace(answer, note={}, loss=float("nan"), before=None, after=None) if self.silent else answer

    def scored(self, answer: ScoreAnswer) -> ScoreAnswer:
        """Return the answer with counts of no samples, unless they may leave."""
        if not self.silent:
            return answer
        return replace(answer, scores={k: _empty(s) for k, s in answer.scores.items()}, steps=0, seen=0)


def _empty(score: Score) -> Score:
    return Score({k: torch.zeros_like(v) for k, v in score.counts.items()}, 0.0)
