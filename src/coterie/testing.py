"""The common battery: checks that every method must pass, here or in a package of your own.

import pytest
from coterie.testing import CHECKS, check

@pytest.mark.parametrize("name", CHECKS)
def test_my_method(name): check(MyMethod, name)
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from coterie import checkpoint, codec
from coterie.config import Engine, RunSettings, settings
from coterie.data.dataset import Dataset
from coterie.errors import CoterieError
from coterie.folder import Folder
from coterie.loop import Loop
from coterie.method import Method, Upload
from coterie.methods import build, find
from coterie.runtimes.workers import start
from coterie.session import Session, make_loop, prepare
from coterie.train.clients import clone_value


class SmallNet(nn.Module):
    """Two hidden layers with batch norm: has everything a method may ask a model for.

    The head is registered before what it follows, so that a method which trusts the order of names is found out."""

    def __init__(self, features: int = 64, classes: int = 10, norm: bool = True):
        super().__init__()
        self.classifier = nn.Linear(16, classes)
        self.fc1 = nn.Linear(features, 24)
        self.bn1: nn.Module = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.fc2 = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.fc1(x.flatten(1))))
        return self.classifier(torch.relu(self.fc2(x)))  # type: ignore[no-any-return]


@cache
def small_data(n: int = 600) -> Dataset:
    """Real handwritten digits, the first n."""
    x, y = load_digits(return_X_y=True)
    images = torch.from_numpy(x[:n]).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(y[:n]).long()
    return Dataset("small-digits", images, labels, tuple("0123456789"), torch.zeros(n, dtype=torch.bool))


@dataclass(frozen=True)
class Bench:
    """A small federation to try a method on."""

    method: type[Method]
    own: dict[str, Any]

    def session(self, **changes: Any) -> Session:
        base: dict[str, Any] = {
            "rounds": 3, "join": 0.6, "epochs": 1, "batch": 16, "lr": 0.1, "eval_every": 1, "checkpoint_every": 1,
            "clients": 5, "partition": "dirichlet(0.5)", "val_share": 0.2, "public": 30, "seed": 3,
        }  # fmt: skip
        run: RunSettings = settings(**{"method": "fedavg", **base, **changes}).model_copy(
            update={"method": self.method.__name__, "settings": self.own}
        )
        torch.manual_seed(0)
        return prepare(run, Engine(workers=1), method=self.method, dataset=small_data(), model=SmallNet())

    def play(self, folder: Path, session: Session | None = None, workers: int = 1, **changes: Any) -> Loop:
        """Run to the end; the loop that did it, with its server, edges, store and ledger."""
        loop = open_loop(session or self.session(**changes), folder, workers)
        try:
            loop.run()
        finally:
            loop.runtime.close()
            loop.folder.close()
        return loop


def open_loop(session: Session, folder: Path, workers: int = 1) -> Loop:
    return make_loop(session, Folder(folder), start(session.device(), workers))


def _frozen_parts(loop: Loop) -> codec.Value:
    """Everything a run decides, for comparisons to the bit."""
    return clone_value(
        {
            "server": loop.server,
            "edges": loop.edges,
            "clients": {i: loop.store.get(i) for i in loop.method.ctx.clients},
            "bytes": loop.ledger.totals,
        }
    )


def _events(folder: Path) -> bytes:
    return (folder / "events.jsonl").read_bytes()


# ---- the checks ------------------------------------------------------------------------------------------------------
def same_bits_for_any_number_of_workers(bench: Bench, tmp: Path) -> None:
    one, two = bench.play(tmp / "1"), bench.play(tmp / "2", workers=2)
    assert _events(tmp / "1") == _events(tmp / "2"), "events differ between 1 and 2 workers"
    assert codec.equal(_frozen_parts(one), _frozen_parts(two)), "state differs between 1 and 2 workers"


def same_bits_after_a_resume(bench: Bench, tmp: Path) -> None:
    whole = bench.play(tmp / "whole")
    loop = open_loop(bench.session(), tmp / "cut")
    assert not loop.run(stopped=lambda: loop.done >= 1)
    loop.folder.close()
    again = open_loop(bench.session(), tmp / "cut")
    assert checkpoint.resume(again) == []
    assert again.done == 1
    again.run()
    again.folder.close()
    assert _events(tmp / "whole") == _events(tmp / "cut"), "events differ after a resume"
    assert codec.equal(_frozen_parts(whole), _frozen_parts(again)), "state differs after a resume"


def an_unsampled_client_keeps_its_state(bench: Bench, tmp: Path) -> None:
    loop = open_loop(bench.session(rounds=4), tmp)
    loop.server = loop.method.setup()
    loop.folder.open_logs()
    for t in range(0 if loop.method.opening() else 1, 5):
        before = clone_value({i: loop.store.get(i) for i in loop.method.ctx.clients})
        loop._round(t)
        asked = json.loads(_events(tmp).splitlines()[-1])["participants"]
        for i in set(before) - set(asked):
            assert codec.equal(before[i], loop.store.get(i)), f"client {i} changed in round {t} without being sampled"
    loop.folder.close()


def permuting_ids_permutes_results(bench: Bench, tmp: Path) -> None:
    """With whole batches and everybody in every round, a client's result depends on its data, not on its number."""
    order = [3, 0, 4, 1, 2]
    scores = []
    for name, permutation in (("plain", None), ("mixed", order)):
        session = bench.session(join=1.0, batch=1000, lr=0.05)
        if permutation is not None:
            session = replace(session, federation=_Renamed(session.federation, permutation))  # type: ignore[arg-type]
        bench.play(tmp / name, session)
        with np.load(tmp / name / "eval" / "000003.npz") as z:
            scores.append(z["personal/test/loss"])
    plain, mixed = scores
    expected = plain[order]
    assert np.allclose(mixed, expected, rtol=2e-3, atol=1e-2), f"{mixed} is not {plain} permuted by {order}"


class _Renamed:
    """The same clients under other numbers: client i has the data of order[i]."""

    def __init__(self, federation: Any, order: Sequence[int]):
        self._federation, self._order = federation, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def data(self, client: int) -> Any:
        return replace(self._federation.data(self._order[client]), client=client)

    def test(self, client: int) -> Any:
        return self._federation.test(self._order[client])

    def sizes(self, part: str) -> Any:
        return self._federation.sizes(part)[list(self._order)]

    def label_counts(self, part: str = "train") -> Any:
        return self._federation.label_counts(part)[list(self._order)]


def any_subset_of_answers_is_aggregated(bench: Bench, tmp: Path) -> None:
    loop = bench.play(tmp, dropout=0.6, stragglers=0.5, rounds=5, join=1.0)
    assert loop.done == 5
    for value in (loop.server, loop.edges):
        _, tensors = codec.split(value)
        assert all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point()), "not finite"


def payload_is_what_is_declared(bench: Bench, tmp: Path) -> None:
    session = bench.session()
    loop = open_loop(session, tmp)
    loop.server = loop.method.setup()
    loop.folder.open_logs()
    counts = (session.federation.label_counts("train") > 0).sum(1)
    for t in range(0 if loop.method.opening() else 1, 4):
        before = clone_value(loop.server)
        loop._round(t)
        event = json.loads(_events(tmp).splitlines()[-1])
        if t == 0:
            continue
        declared = [session.method.payload_of(before, i, int(counts[i]), t) for i in event["participants"]]
        books = [event["bytes"].get(link, {}) for link in ("device-edge", "device-cloud")]
        for direction in ("up", "down"):
            counted = sum(sum(book.get(direction, {}).values()) for book in books)
            promised = sum(getattr(p, direction) for p in declared)
            assert counted == promised, f"round {t}, {direction}: {counted} bytes sent, {promised} declared"
    loop.folder.close()


def nothing_private_is_uploaded(bench: Bench, tmp: Path) -> None:
    session = bench.session()
    method, seen = session.method, []
    end = method.end

    def spy(*args: Any) -> Any:
        state, upload = end(*args)
        seen.append(upload)
        return state, upload

    setattr(method, "end", spy)  # noqa: B010
    bench.play(tmp, session)
    assert seen
    for upload in seen:
        assert isinstance(upload, Upload)
        for name in upload.tree:
            plain = name.rsplit(":", 1)[-1]
            if ":" not in name and plain in method.ctx.w0:
                assert not method.private(plain), f"{name} is private and was uploaded"


def hooks_do_not_change_what_they_are_given(bench: Bench, tmp: Path) -> None:
    session = bench.session()
    method = session.method
    changed: list[str] = []

    def guard(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            held = [a for a in args if isinstance(a, dict)]
            before = clone_value(held)
            out = hook(*args)
            if not codec.equal(before, held):
                changed.append(name)
            return out

        return guarded

    for name in ("down", "aggregate", "begin", "personal", "global_model", "facts"):
        setattr(method, name, guard(name, getattr(method, name)))
    bench.play(tmp, session)
    assert not changed, f"{changed[0]} changed a tree or state it was given"


def state_survives_the_codec(bench: Bench, tmp: Path) -> None:
    loop = bench.play(tmp)
    parts = _frozen_parts(loop)
    assert codec.equal(codec.loads(codec.dumps(parts)), parts)


def learns_a_small_task(bench: Bench, tmp: Path) -> None:
    bench = Bench(bench.method, {**bench.method.trial, **bench.own})
    session = bench.session(rounds=12, join=1.0, epochs=2, eval_every=12, partition="dirichlet(0.3)")
    loop = open_loop(session, tmp)
    loop.server = loop.method.setup()
    loop.folder.open_logs()
    start_loss = loop.evaluate(0).summary()["personal/test"]
    for t in range(0 if loop.method.opening() else 1, 13):
        loop._round(t)
        loop.done = t
    result = loop.evaluate(12).summary()
    loop.folder.close()
    best = max(result[v]["mean"] for v in ("personal/test", "adapted/test", "trained/test") if v in result)
    assert best > 0.5, f"only {best:.2f} after 12 rounds on ten classes (started at {start_loss['mean']:.2f})"


def bad_settings_get_a_sentence(bench: Bench, tmp: Path) -> None:
    for bad in ({"no_such_setting": 1}, {"no_such_setting": "x"}):
        try:
            build(bench.method, bad)
        except CoterieError as e:
            assert "no_such_setting" in str(e) and "\n" not in str(e)
        else:
            raise AssertionError(f"{bad} was accepted")
    for name, info in bench.method.Settings.model_fields.items():
        if info.annotation in (int, float):
            try:
                build(bench.method, {name: "many"})
            except CoterieError as e:
                assert name in str(e) and "\n" not in str(e)
            else:
                raise AssertionError(f"{name} = 'many' was accepted")


def a_newcomer_gets_a_model(bench: Bench, tmp: Path) -> None:
    bench.play(tmp, newcomers=1)
    with np.load(tmp / "eval" / "000003.npz") as z:
        assert z["newcomer"].sum() == 1
        assert np.isfinite(z["personal/test/loss"][z["newcomer"]]).all()


CHECKS: dict[str, Callable[[Bench, Path], None]] = {
    f.__name__: f
    for f in (
        same_bits_for_any_number_of_workers,
        same_bits_after_a_resume,
        an_unsampled_client_keeps_its_state,
        permuting_ids_permutes_results,
        any_subset_of_answers_is_aggregated,
        payload_is_what_is_declared,
        nothing_private_is_uploaded,
        hooks_do_not_change_what_they_are_given,
        state_survives_the_codec,
        learns_a_small_task,
        bad_settings_get_a_sentence,
        a_newcomer_gets_a_model,
    )
}


def check(method: str | type[Method], name: str, **own: Any) -> None:
    """One check of the battery, with settings of the method's own if given."""
    cls = find(method) if isinstance(method, str) else method
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[name](Bench(cls, own), Path(folder))


__all__ = ["CHECKS", "Bench", "SmallNet", "check", "open_loop", "small_data"]
