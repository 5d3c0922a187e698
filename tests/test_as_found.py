"""What a run leaves behind, and what it says when it goes wrong."""

import pytest
import torch

import coterie
from coterie.cli.words import parents, source
from coterie.config import settings
from coterie.errors import CoterieError
from coterie.methods import find, method_names

SMALL = {"clients": 4, "rounds": 1, "epochs": 1, "model": "mlp", "workers": 1, "subset": 200}


def test_a_run_leaves_threads_and_random_state_as_they_were(tmp_path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        coterie.run("fedavg", out=tmp_path / "a", **SMALL)
        assert torch.get_num_threads() == before + 1 and torch.equal(torch.rand(3), expected)
    finally:
        torch.set_num_threads(before)


def test_momentum_without_effect_is_refused() -> None:
    with pytest.raises(CoterieError, match=r"momentum = 0\.9 has no effect with optimizer = adam"):
        settings("fedavg", optimizer="adam", momentum=0.9)
    assert settings("fedavg", momentum=0.9).momentum == 0.9


def test_a_diverged_run_is_said_and_has_an_exit_code_of_its_own(cli) -> None:
    options = ["--clients", "4", "--rounds", "2", "--epochs", "1", "--model", "mlp", "--set", "subset=200"]
    code, _, err = cli("run", "fedavg", *options, "--lr", "1e6", "--out", "wild")
    assert code == 4 and "training diverged" in err
    assert any("uploads held NaN or infinity" in w for w in coterie.open_run("wild").warnings())
    assert cli("run", "fedavg", *options, "--out", "calm")[0] == 0


def test_a_method_of_another_package_is_not_called_checked() -> None:
    class Mine(coterie.Method):
        pass

    assert source(Mine) == f"the module {__name__}" and source(find("apfl")) == "checked against the authors' code"
    assert source(find("fedpc-mended")) == source(find("autopilot")) == "Coterie's own method"


def test_mended_methods_are_listed_and_have_variants_of_their_own() -> None:
    above = parents({name: find(name) for name in method_names()})
    assert above["fedpc-mended"] is None and above["fedpc-mended-mean"] == "fedpc-mended"
    assert above["fedpc-mean"] == "fedpc" and above["fedcpmd-code"] == "fedcpmd"
