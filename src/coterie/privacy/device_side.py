"""What a device does before an answer leaves it: clip, add noise, and leave out numbers that no noise protects."""

from dataclasses import dataclass, replace

import torch

from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.engine.messages import Score, ScoreAnswer, TrainAnswer
from coterie.privacy.clipping import clipped_upload, reference
from coterie.privacy.setting import PrivacySetting


@dataclass(frozen=True)
class DeviceSide:
    """The protection of one run at its clients."""

    setting: PrivacySetting
    deployed: bool = False  # True on a device of a real federation

    def upload(self, method: Method, upload: Tree, download: Tree, round: int, clip: float | None = None) -> Tree:
        """Return the upload as it may leave the device; `clip` is the bound of this round if it changes."""
        if not upload or self.setting.unit == "example":
            return upload
        at = reference(method.schema("up"), download)
        return clipped_upload(upload, at, self.setting.clip if clip is None else clip)

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
