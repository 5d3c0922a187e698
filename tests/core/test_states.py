"""Tests of typed states: declared by a method, stored by the codec, read from files of version 0.1."""

from dataclasses import replace

import pytest
import torch

from coterie.core.method import ClientData, Method, Model, Start
from coterie.core.states import register, state
from coterie.core.tree import Tree
from coterie.engine import codec
from coterie.errors import CoterieError
from coterie.storage.checkpoint import newest
from coterie.storage.run_folder import checkpoints, read_checkpoint
from coterie.testing import Bench, check, decided
from support.short_runs import same


@state
class CountingClient:
    rounds: int
    last: Tree


class Counting(Method):
    """FedAvg whose clients count their rounds and keep their last model, in a typed state."""

    def init_client(self, data: ClientData) -> CountingClient:
        return CountingClient(0, {})

    def begin(self, state: CountingClient, download: Tree, data: ClientData, round: int) -> Start:
        return Start(download, {"rounds": state.rounds})

    def end(self, state, trained, data, round):
        _, upload = super().end({}, trained, data, round)
        return replace(state, rounds=state.rounds + 1, last=trained.params), upload

    def personal(self, state: CountingClient, download: Tree, data: ClientData) -> Model:
        return Model(state.last or download)


def test_a_typed_state_survives_the_codec():
    value = CountingClient(3, {"a": torch.arange(4.0)})
    again = codec.unpack(codec.pack(value))
    assert type(again) is CountingClient and again.rounds == 3 and torch.equal(again.last["a"], value.last["a"])


def test_a_second_class_of_one_name_is_refused():
    def made(name: str) -> type:
        cls = type("CountingClient", (), {"__annotations__": {"x": int}, "__module__": name})
        return register(cls)

    with pytest.raises(CoterieError, match=r"^elsewhere\.CountingClient cannot be stored: .*test_states has the same"):
        made("elsewhere")


@pytest.mark.parametrize("name", ["same_bits_after_a_resume", "same_bits_for_any_number_of_workers"])
@pytest.mark.parametrize("run", ["fresh", "keep"])
def test_a_method_with_typed_client_states_passes_the_battery(name, run, tmp_path):
    if run == "fresh":
        check(Counting, name)
        return
    many = {"optimizer": "adam", "opt_state": "keep", "lr": 0.01}  # the optimisers' memory is stored with the state
    one, two = (Bench(Counting, {}).play(tmp_path / str(n), workers=n, **many) for n in (1, 2))
    assert codec.equal(decided(one), decided(two))


def test_a_checkpoint_of_version_0_1_has_a_dictionary_where_a_dataclass_is_now(tmp_path):
    from coterie.methods.pfedhn import PFedHN, PFedHNServer

    server = Bench(PFedHN, {}).play(tmp_path).server
    path = checkpoints(tmp_path)[-1]
    saved = codec.unpack(read_checkpoint(path))
    old = {"net": server.net, "momentum": server.momentum, "stats": server.stats}
    _rewrite(path, replace(saved, server=old))
    again = newest(tmp_path, "PFedHN").server
    assert type(again) is PFedHNServer and same(again.net, server.net)


def _rewrite(path, saved):
    from coterie.storage.run_folder import Folder

    folder = Folder(path.parent.parent)
    folder.write_checkpoint(saved.round, codec.pack(saved))
    folder.close()
