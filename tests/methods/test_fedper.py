"""Tests of FedPer."""

import pytest

from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import FedPer
from coterie.methods.local import Local
from support.toy import NORMS, mlp, models, play, same


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("layers", "twin"), [(0, FedAvg), (2, Local)])
def test_fedper_with_no_personal_layer_is_fedavg_and_with_all_is_local(layers, twin, norm, tmp_path):
    a = play(FedPer, tmp_path, {"layers": layers}, model=mlp(norm), join=0.6)
    b = play(twin, tmp_path, model=mlp(norm), join=0.6)
    assert same(models(a), models(b))
