"""Worker processes: bit-identical results for any number of them, also when they die; errors in one are reported."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from coterie.engine import codec
from coterie.engine.messages import Job, TrainRequest
from coterie.errors import CoterieError
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.runtimes.workers import Arena, Workers
from coterie.testing import Bench, close_loop, decided
from support.toy import begin, clients, mlp, open_toy, play


class Mortal(Ditto):
    """Kills its worker once, while it serves client 3."""

    def begin(self, state, download, data, round):
        mark = Path(os.environ["MORTAL"])
        if data.client == 3 and round == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().begin(state, download, data, round)


def test_a_killed_worker_is_replaced_and_the_results_are_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("MORTAL", str(tmp_path / "died"))
    a = play(Mortal, tmp_path, workers=2, model=mlp(True))
    assert (tmp_path / "died").exists()
    b = play(Ditto, tmp_path, workers=1, model=mlp(True))
    assert codec.equal(decided(a), decided(b))
    assert (a.folder.path / "events.jsonl").read_bytes() == (b.folder.path / "events.jsonl").read_bytes()


def test_workers_that_keep_dying_are_given_up(tmp_path):
    class Doomed(FedAvg):
        def begin(self, state, download, data, round):
            os._exit(1)

    with pytest.raises(CoterieError, match=r"^worker processes keep dying; is there enough memory\?$"):
        play(Doomed, tmp_path, workers=2)


class Faulty(FedAvg):
    def end(self, state, trained, data, round):
        if data.client == 4 and round == 2:
            raise ZeroDivisionError("no number")
        return super().end(state, trained, data, round)


class Refusing(FedAvg):
    def begin(self, state, download, data, round):
        raise CoterieError("mu = 3 is not possible here")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_names_method_stage_client_and_round(workers, tmp_path):
    with pytest.raises(RuntimeError, match="Faulty, training of client 4 in round 2: ZeroDivisionError: no number"):
        play(Faulty, tmp_path, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_the_user_stays_one_sentence(workers, tmp_path):
    with pytest.raises(CoterieError, match=r"^mu = 3 is not possible here$"):
        play(Refusing, tmp_path, workers=workers)


def test_work_is_spread_longest_first_to_the_least_busy(tmp_path):
    loop = open_toy(FedAvg, tmp_path, data=clients(5, sizes=(9, 1, 5, 4, 3)))
    heaps = loop.runtime._balanced([Job(TrainRequest(i, 1), None) for i in range(5)], 2)
    assert [[j.request.client for j in heap] for heap in heaps] == [[0, 4], [2, 3, 1]]
    assert loop.runtime._balanced([], 2) == [] and len(loop.runtime._balanced([Job(TrainRequest(0, 1), None)], 4)) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_do_not_share_memory_with_what_was_asked_or_is_kept(workers, tmp_path):
    loop = begin(open_toy(Ditto, tmp_path, workers=workers))
    loop.step()
    asked = [TrainRequest(i, 2, loop.server["w"]) for i in range(5)]
    before = codec.deep_copy([asked, [loop.runtime.states.get(i) for i in range(5)]])
    answers, missing = loop.runtime.train(asked)
    assert sorted(answers) == [0, 1, 2, 3, 4] and missing == {}
    for answer in answers.values():
        for v in answer.upload.values():
            v.fill_(9.0)
    assert codec.equal(before, [asked, [loop.runtime.states.get(i) for i in range(5)]])
    close_loop(loop)


@pytest.mark.parametrize("workers", [1, 2])
def test_new_states_count_only_when_the_round_keeps_them(workers, tmp_path):
    loop = begin(open_toy(Ditto, tmp_path, workers=workers))
    loop.runtime.train([TrainRequest(i, 1, loop.server["w"]) for i in range(5)])
    assert all(loop.runtime.states.get(i) is None for i in range(5))
    loop.runtime.keep(1, [1, 4])
    assert [i for i in range(5) if loop.runtime.states.get(i) is not None] == [1, 4]
    loop.runtime.keep(1, [])  # what was not kept is gone
    assert loop.runtime._pending == {}
    close_loop(loop)


def test_an_arena_grows_with_what_is_written():
    arena = Arena()
    for n in (10, 100_000, 3, 1_000_000):
        value = {"x": torch.arange(n), "mask": torch.arange(n) % 3 == 0}
        assert codec.equal(arena.read(arena.write(value)), value)
    kept = arena.read(arena.write([torch.ones(4)]), copy=True)
    arena.write([torch.zeros(4)])
    assert torch.equal(kept[0], torch.ones(4))
    arena.close()


def test_a_daemonic_process_is_told_to_use_one_worker(tmp_path, monkeypatch):
    session = Bench(FedAvg, {}).session()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(CoterieError, match="a daemonic process cannot start workers; run with workers=1 in it"):
        Workers(session.clients(), session.states(tmp_path), 2)
