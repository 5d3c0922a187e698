"""The combiner: order of stages, their memories, and facts for the log."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from coterie.core.method import Method, Upload
from coterie.engine.combining import Combiner, Memory
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.methods.ifca import IFCA
from support.toy import bind, mlp


@dataclass(frozen=True)
class First:
    """An estimate that takes the first upload and counts rounds."""

    setting: str = "first"
    text: str = "yes"

    def estimate(self, method: Method, sent: Any, uploads: Any, round: int, memory: Memory) -> tuple[Upload, Memory]:
        return uploads[0], {"rounds": memory.get("rounds", 0) + 1}

    def check(self, method: Method) -> None:
        pass

    def facts(self, memory: Memory) -> dict[str, Any]:
        return {"rounds": memory["rounds"]}


@dataclass(frozen=True)
class Double:
    """A move that doubles the change of every entry."""

    setting: str = "double"
    text: str = "2"

    def move(self, method: Method, sent: Any, upload: Upload, round: int, memory: Memory) -> tuple[Upload, Memory]:
        return replace(upload, tree={k: 2 * v - sent[k] for k, v in upload.tree.items()}), memory

    def check(self, method: Method) -> None:
        raise CoterieError("never")

    def facts(self, memory: Memory) -> dict[str, Any]:
        return {}


def test_the_estimate_comes_before_the_moves_and_memories_are_kept_apart() -> None:
    method = bind(FedAvg, model=mlp())
    w = method.ctx.w0
    uploads = [Upload({k: v + x for k, v in w.items()}, sender=i, samples=1) for i, x in enumerate((1.0, 5.0))]
    combiner = Combiner(First(), (Double(), replace(Double(), setting="again")))
    for t in (1, 2):
        before = combiner
        upload, combiner = combiner.combined(method, w, uploads, t)
        assert all(torch.allclose(v, w[k] + 4.0) for k, v in upload.tree.items())
        assert combiner.memory == {"first": {"rounds": t}, "double": {}, "again": {}}
        assert combiner.facts() == {"rounds": t}
        assert before.combined(method, w, uploads, t)[1] == combiner  # a pure step


def test_without_an_estimate_the_upload_is_the_weighted_mean() -> None:
    method = bind(FedAvg, model=mlp())
    w = method.ctx.w0
    uploads = [Upload({k: v + x for k, v in w.items()}, samples=n) for x, n in ((1.0, 1), (5.0, 3))]
    upload, _ = Combiner().combined(method, w, uploads, 1)
    assert upload.samples == 4
    assert all(torch.allclose(v, w[k] + 4.0) for k, v in upload.tree.items())


def test_a_method_that_needs_single_uploads_is_refused_with_its_entries() -> None:
    with pytest.raises(CoterieError, match="first = yes needs a method that only averages uploads; IFCA needs single"):
        Combiner(First()).check(bind(IFCA, model=mlp()))
    with pytest.raises(CoterieError, match="never"):
        Combiner(First(), (Double(),)).check(bind(FedAvg, model=mlp()))
