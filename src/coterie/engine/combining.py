"""The combiner between uploads and the method: a pipeline that makes one upload, which stands for all of a round.

A method with `combines = "mean"` may be handed one combined upload, because its next state depends on the mean of the
uploads only. A combiner has stages in a fixed order: one estimate makes one upload of all uploads (the method's
weighted mean unless another estimate is chosen), and moves then change its parameters (an optimiser of the server).
Every stage has a memory, which checkpoints store. A stage is a value that holds settings, so that a round stays a pure
step: it may be computed again without some of its uploads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from coterie.core import tree as T
from coterie.core.edges import EdgeMethod
from coterie.core.method import Method, Upload
from coterie.core.schema import Entry
from coterie.core.tree import Tree
from coterie.engine.ledger import Page
from coterie.errors import CoterieError
from coterie.privacy.secure_sum.messages import SummedWords

Memory = dict[str, Any]  # a stage's memory between rounds; the codec of checkpoints stores it


class CombinerStage(Protocol):
    """One stage of a combiner, made from a setting of the run."""

    @property
    def setting(self) -> str:
        """The name of the setting, which is also the key of the stage's memory."""

    @property
    def text(self) -> str:
        """The value of the setting, such as fedadam(lr=0.03)."""

    def check(self, method: Method) -> None:
        """Raise CoterieError if the stage cannot work with this method, one that may be handed a combined upload."""

    def facts(self, memory: Memory) -> dict[str, Any]:
        """Return facts about the last round for the log, as JSON values."""


class CombinerEstimate(CombinerStage, Protocol):
    """A stage that makes one upload of all uploads of a round."""

    def estimate(
        self, method: Method, sent: Tree, uploads: Sequence[Upload], round: int, memory: Memory
    ) -> tuple[Upload, Memory]:
        """Return the upload that stands for all, and the stage's memory after this round.

        `sent` is the part of the download that all clients got, to which changes are relative.
        """


@runtime_checkable
class SecureEstimate(CombinerEstimate, Protocol):
    """An estimate from the sum of uploads. The server of a federation receives only their sum."""

    @property
    def fewest(self) -> int:
        """The fewest clients in a sum; a round with fewer changes nothing."""

    def decoded(self, method: Method, sent: Tree, summed: SummedWords, samples: int) -> tuple[Upload, Memory]:
        """Return what `estimate` returns, from the sum."""

    def traffic(self, method: Method, clients: int) -> Page:
        """Return the declared bytes of a sum over this number of clients."""


class CombinerMove(CombinerStage, Protocol):
    """A stage that changes the parameters of the combined upload."""

    def move(self, method: Method, sent: Tree, upload: Upload, round: int, memory: Memory) -> tuple[Upload, Memory]:
        """Return the moved upload, and the stage's memory after this round."""


@dataclass(frozen=True)
class Combiner:
    """The stages of a run with their memories."""

    estimate: CombinerEstimate | None = None  # None: the weighted mean
    moves: tuple[CombinerMove, ...] = ()
    memory: Mapping[str, Memory] = field(default_factory=dict)  # by setting

    @property
    def stages(self) -> tuple[CombinerStage, ...]:
        """All stages in their order."""
        return (*(() if self.estimate is None else (self.estimate,)), *self.moves)

    @property
    def always(self) -> bool:
        """True if a round without uploads is combined too, because its result must not show that no upload arrived."""
        return bool(getattr(self.estimate, "always", False))

    @property
    def clip(self) -> float | None:
        """The largest change that devices are asked for in the next round, if it moves from round to round."""
        asked = getattr(self.estimate, "asked", None)
        return asked(self.memory.get(self.estimate.setting, {})) if asked and self.estimate else None

    @property
    def secure(self) -> "SecureEstimate | None":
        """The estimate, if it is a secure sum."""
        return self.estimate if isinstance(self.estimate, SecureEstimate) else None

    def combined(self, method: Method, sent: Tree, uploads: Sequence[Upload], round: int) -> tuple[Upload, "Combiner"]:
        """Return the upload that stands for all uploads of a round, and the combiner after the round."""
        memory = dict(self.memory)
        if (first := self.estimate) is None:
            upload = mean_upload(method, uploads)
        else:
            key = first.setting
            upload, memory[key] = first.estimate(method, sent, uploads, round, memory.get(key, {}))
        return self._moved(method, sent, upload, round, memory)

    def from_sum(
        self, method: Method, sent: Tree, summed: SummedWords, samples: int, round: int
    ) -> tuple[Upload, "Combiner"]:
        """Return the same as `combined` from the sum of uploads; this host has not seen the single uploads."""
        assert self.secure is not None
        upload, after = self.secure.decoded(method, sent, summed, samples)
        return self._moved(method, sent, upload, round, {**self.memory, self.secure.setting: after})

    def _moved(
        self, method: Method, sent: Tree, upload: Upload, round: int, memory: dict[str, Memory]
    ) -> tuple[Upload, "Combiner"]:
        for stage in self.moves:
            upload, memory[stage.setting] = stage.move(method, sent, upload, round, memory.get(stage.setting, {}))
        return upload, replace(self, memory=memory)

    def check(self, method: Method) -> None:
        """Raise CoterieError if a method cannot be handed one combined upload, or not one that these stages make."""
        for stage in self.stages:
            check_combines(method, stage)
            stage.check(method)

    def facts(self) -> dict[str, Any]:
        """Return facts of all stages about the last round, for the log."""
        return {k: v for s in self.stages for k, v in s.facts(self.memory.get(s.setting, {})).items()}


def mean_upload(method: Method, uploads: Sequence[Upload]) -> Upload:
    """Return one upload that stands for all: the mean with the method's weights, and the sum of their samples."""
    tree = T.mean([u.tree for u in uploads], method.weights(uploads))
    return Upload(tree, samples=sum(u.samples for u in uploads))


def moved_names(method: Method, entries: Mapping[str, object]) -> list[str]:
    """Return the entries that are trained parameters; others, such as statistics of batch norm, are averaged."""
    return [name for name in entries if T.plain(name) in method.ctx.net.trainable]


def check_weight_cap(value: float) -> float:
    """Return the setting `weight_cap`; raise CoterieError if it is neither 0 nor at least 1."""
    if not (value == 0 or 1 <= value <= 1e9):
        raise CoterieError(f"weight_cap = {value:g} is invalid: it must be 0 (no cap) or a number from 1")
    return value


def title_of(method: Method) -> str:
    """Return the name of a method for messages."""
    return method.card.title or type(method).__name__


def check_combines(method: Method, stage: CombinerStage) -> None:
    """Raise CoterieError if a method does not combine its uploads by a mean."""
    needs = f"{stage.setting} = {stage.text} needs a method that only averages uploads; {title_of(method)}"
    if isinstance(method, EdgeMethod):
        raise CoterieError(f"{needs} merges them at edges")
    if method.combines != "mean":
        raise CoterieError(f"{needs} needs single ones, of {shown(method.schema('up').entries)}")


def shown(entries: Mapping[str, Entry]) -> str:
    """Return the names of entries for a message; those of a model together."""
    others = [k for k, e in entries.items() if e.kind != "model"]
    names = [*(["the model"] if len(others) < len(entries) else []), *others]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
