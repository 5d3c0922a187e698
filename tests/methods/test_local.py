"""Tests of Local-Only."""

from coterie.core.method import Start
from coterie.methods.local import Local
from coterie.train.optimisers import Optimiser
from coterie.train.trainer import train
from support.toy import clients, play, same


def test_local_sends_nothing_and_goes_on_from_its_own_model(tmp_path):
    loop = play(Local, tmp_path, rounds=3)
    assert loop.bytes.get("device-cloud", {}) in ({}, {"down": {}, "up": {}})
    data, ctx = clients(), loop.method.ctx
    for i in range(5):
        w = ctx.w0
        for t in (1, 2, 3):
            w = train(ctx, Optimiser(), loop.method.phases(t), Start(w), data.data(i), t)[0].params
        assert same(loop.runtime.states.get(i)["own"], w)
