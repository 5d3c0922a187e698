"""A run goes back to an earlier checkpoint and is then, to the bit, the run that never went past it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.config import Engine, settings
from coterie.engine import codec
from coterie.engine.session import Callbacks, execute, prepare, rebuild
from coterie.errors import CoterieError
from coterie.storage import checkpoint
from coterie.storage.run_folder import checkpoints, evaluations, round_of

SMALL: dict[str, Any] = {
    "data": "digits", "subset": 200, "model": "mlp", "clients": 3, "join": 0.7, "epochs": 1, "eval_every": 1,
    "checkpoint_every": 1, "watch": False, "final_trained": False, "rounds": 6,
}  # fmt: skip


def run(folder: Path, until: int, state: str = "memory", keep: int = 4) -> Path:
    """Six rounds are planned; stop after `until`."""
    engine = Engine(workers=1, state=state, keep=keep)  # type: ignore[arg-type]
    done: list[int] = []
    callbacks = Callbacks(on_round=lambda p: done.append(p.round), should_stop=lambda: done[-1] >= until)
    execute(prepare(settings("fedrep", **SMALL), engine), folder, callbacks)
    return folder


def same(a: Path, b: Path) -> None:
    assert (a / "events.jsonl").read_bytes() == (b / "events.jsonl").read_bytes()
    assert [p.name for p in evaluations(a)] == [p.name for p in evaluations(b)]
    for one, two in zip(checkpoints(a)[::-1], checkpoints(b)[::-1], strict=False):
        left, right = checkpoint.load_checkpoint(one, "FedRep"), checkpoint.load_checkpoint(two, "FedRep")
        assert codec.equal(replace(left, timing=0), replace(right, timing=0))


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_run_that_went_back_is_the_run_that_never_went_past(tmp_path: Path, state: str) -> None:
    once, back = run(tmp_path / "once", 6, state), run(tmp_path / "back", 6, state)
    assert [round_of(p) for p in checkpoints(back)] == [3, 4, 5, 6]
    session = rebuild(back, Engine(workers=1))
    assert session.engine.keep == 4, "a run goes on with the history it was given"
    assert not execute(session, back, Callbacks(should_stop=lambda: True), resume=True, from_round=3)
    same(back, run(tmp_path / "never", 4, state))
    assert [round_of(p) for p in checkpoints(back)] == [3, 4]
    assert execute(session, back, resume=True)
    same(back, once)


def test_going_back_needs_a_checkpoint_that_is_kept(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 6, keep=3)
    before = (folder / "events.jsonl").read_bytes()
    with pytest.raises(CoterieError, match=r"no checkpoint of round 2; it has those of rounds 4, 5, 6"):
        execute(rebuild(folder, Engine(workers=1)), folder, resume=True, from_round=2)
    assert (folder / "events.jsonl").read_bytes() == before
    with pytest.raises(CoterieError, match="name the run with --resume"):
        execute(prepare(settings("fedrep", **SMALL), Engine(workers=1)), tmp_path / "new", from_round=2)


def test_client_states_are_kept_for_every_kept_checkpoint_and_no_longer(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 6, keep=3)
    wanted = set()
    for path in checkpoints(folder):
        versions = checkpoint.load_checkpoint(path, "FedRep").clients.version.tolist()
        wanted |= {f"{i}-{v:06d}.state" for i, v in enumerate(versions) if v >= 0}
    assert {p.name for p in (folder / "clients").glob("*/*.state")} == wanted
