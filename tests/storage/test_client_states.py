"""Client states of a simulation: versions that checkpoints need, files that are found damaged, states elsewhere."""

import pytest
import torch

from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.methods.fedavg import FedAvg
from coterie.storage.client_states import ClientStates, Remote
from support.toy import play, state


def one(c: float) -> dict:
    return {"own": {"w": torch.full((3,), c)}}


def files(states: ClientStates) -> set[str]:
    return {p.name.removesuffix(".state") for p in states.folder.glob("*/*")}


@pytest.mark.parametrize("disk", [False, True])
def test_the_versions_that_checkpoints_need_are_kept(disk, tmp_path):
    states = ClientStates(tmp_path, 3, disk)
    assert states.get(1) is None
    kept = []
    for round in (1, 2, 3):
        states.put(1, one(round), round)
        if round == 1:
            states.put(2, one(9), 1)
        assert codec.equal(states.get(1), one(round))
        kept.append(states.save())
        states.forget(max(1, round - 1))  # as if the last two checkpoints were kept
    assert [i.version.tolist() for i in kept] == [[-1, 1, 1], [-1, 2, 1], [-1, 3, 1]]
    assert files(states) == {"1-000002", "1-000003", "2-000001"}
    again = ClientStates(tmp_path, 3, disk)
    again.restore(kept[1])
    assert codec.equal(again.get(1), one(2)) and codec.equal(again.get(2), one(9)) and again.get(0) is None
    assert files(again) == {"1-000002", "2-000001"}
    with pytest.raises(CoterieError, match="client 1 is missing"):
        again.restore(kept[2])


def test_states_reach_the_disk_at_a_checkpoint_or_at_once(tmp_path):
    memory, disk = ClientStates(tmp_path / "m", 2, False), ClientStates(tmp_path / "d", 2, True)
    for states in (memory, disk):
        states.put(0, one(1), 1)
    assert files(memory) == set() and files(disk) == {"0-000001"}
    memory.save()
    assert files(memory) == {"0-000001"}
    assert disk.folder.stat().st_mode & 0o777 == 0o700 and disk.path(0, 1).stat().st_mode & 0o777 == 0o600


def test_a_method_without_client_state_writes_no_files(tmp_path):
    loop = play(FedAvg, tmp_path)
    assert files(loop.runtime.states) == set() and state(loop, 0) is None


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_state_is_found(how, tmp_path):
    states = ClientStates(tmp_path, 2, True)
    states.put(1, one(1), 4)
    index = states.save()
    path = states.path(1, 4)
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(blob if how == "flip" else blob[:-2])
    for look in (lambda: ClientStates(tmp_path, 2, True).restore(index), lambda: states.get(1)):
        with pytest.raises(CoterieError, match=r"client 1 is (damaged|missing)"):
            look()


def test_an_index_of_another_number_of_clients_is_refused(tmp_path):
    index = ClientStates(tmp_path, 2, True).save()
    with pytest.raises(CoterieError, match=r"^the checkpoint has 2 clients, the run has 3$"):
        ClientStates(tmp_path, 3, True).restore(index)


def test_after_a_crash_files_without_a_checkpoint_are_swept_away(tmp_path):
    states = ClientStates(tmp_path, 2, True)
    states.put(0, one(1), 1)
    old = states.save()
    states.put(0, one(2), 2)
    new = states.save()
    states.put(0, one(3), 3)
    (states.folder / "0000" / ".0-000003.state.half").write_bytes(b"x")
    again = ClientStates(tmp_path, 2, True)
    again.restore(new, [old])
    assert files(again) == {"0-000001", "0-000002"}
    again.forget(2)
    assert files(again) == {"0-000002"}
    again.restore(None)
    assert files(again) == set() and again.get(0) is None


def test_a_restored_state_is_the_one_of_the_index_and_not_a_newer_one(tmp_path):
    states = ClientStates(tmp_path, 2, False)
    states.put(0, one(1), 1)
    index = states.save()
    states.put(0, one(2), 2)
    states.restore(index)
    assert codec.equal(states.get(0), one(1)) and states.save().version.tolist() == [1, -1]


class Elsewhere(Remote):
    def __init__(self, held):
        self.held, self.fetched = held, 0

    def fetch(self):
        self.fetched += 1
        return self.held


def test_a_state_that_lies_elsewhere_is_fetched_only_for_files(tmp_path):
    states = ClientStates(tmp_path, 3, disk=False)
    there = Elsewhere(one(1))
    states.put(1, there, 4)
    assert states.handle(1) is there and there.fetched == 0
    index = states.save()
    states.save()
    assert there.fetched == 1 and states.handle(1) is there
    again = ClientStates(tmp_path, 3, disk=False)
    again.restore(index)
    assert codec.equal(again.get(1), there.held)
