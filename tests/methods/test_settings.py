"""Settings of all registered methods."""

from pathlib import Path
from typing import Any

import pytest

from coterie.config import Engine, RunSettings
from coterie.data.settings import PartitionSettings
from coterie.engine.codec import equal
from coterie.errors import CoterieError
from coterie.methods import build_method, find, method_names
from coterie.testing import Bench, decided, events


@pytest.mark.parametrize("name", method_names())
def test_no_setting_of_a_method_has_the_name_of_a_setting_of_run_or_federation(name: str) -> None:
    """Settings are assigned to run, federation or method by name, so a name may belong to one of them only."""
    taken = {*RunSettings.model_fields, *PartitionSettings.model_fields, *Engine.model_fields}
    assert not taken & find(name).Settings.model_fields.keys()


BAD: list[tuple[str, dict[str, float]]] = [("q-ffl", {"q": -1}), ("moon", {"tau": 0}), ("scaffold", {"server_lr": 0})]


@pytest.mark.parametrize(("method", "bad"), BAD)
def test_impossible_settings_are_refused(method: str, bad: dict[str, float]) -> None:
    with pytest.raises(CoterieError, match=next(iter(bad))):
        build_method(method, bad)


# Another value of every setting; a pair has further settings with which it acts.
DEVICES: dict[str, Any] = {
    "select_fraction": 0.9, "select_least": 3, "train_fraction": 0.2, "epsilon": 100.0,
    "stop": ("forever", {"epsilon": 0.35}), "d_min": 10.0, "n_edges": 2,
}  # fmt: skip
OTHER: dict[str, dict[str, Any]] = {
    "fedgmh": {
        "reading": "code", "init": "independent", "eta_h": 0.3, "server_steps": 2,
        "server_batch": 1, "head_weight_decay": 0.1, "feature_norm": "l2", "score": "received", "heads": "one",
        "download": "all", "write": "whole", "beta": 0.2, "criticality": "square", "mask_scope": "tensor",
        "written": "others", "first_psi": "ones", "received_share": (0.3, {"write": "average"}),
        "decay_on": "participation",
    },
    "fedgmh-mended": {
        "init": "independent", "eta_h": 0.3, "server_steps": 2, "server_batch": 1,
        "head_weight_decay": 0.1, "feature_norm": "l2", "received_share": 0.3,
    },
    "ecs-fl": {
        **DEVICES, "aggregation": ("invdist", {"select_fraction": 0.9}), "select": "farthest", "two_stage": True,
        "distance_norm": ("per_step", {"aggregation": "invdist", "select_fraction": 0.9}),
    },
    "ecs-fl-mended": {**DEVICES, "select_fraction": (0.9, {"select_least": 1}), "projection": 2},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", OTHER)
def test_every_setting_changes_something(name: str, tmp_path: Path) -> None:
    """A setting that changes neither states nor scores nor bytes would be a setting without effect."""
    cls = find(name)
    assert {*OTHER[name]} == {*cls.Settings.model_fields}, "list another value of every setting"

    def result(own: dict[str, Any], at: str) -> object:
        loop = Bench(cls, own).play(tmp_path / at, rounds=4, join=0.8, lr_decay=0.7)
        return decided(loop), [{k: e[k] for k in ("eval", "bytes", "participants")} for e in events(tmp_path / at)]

    idle = []
    for setting, other in OTHER[name].items():
        value, beside = other if isinstance(other, tuple) else (other, {})
        if equal(result(beside, f"{setting}-a"), result({**beside, setting: value}, f"{setting}-b")):
            idle.append(setting)
    assert not idle
