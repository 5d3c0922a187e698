"""What a device's operator allows: files with mistakes, plans and jobs beyond them, each refused in one sentence."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="a federation needs the extra federation")

import numpy as np
from typer.testing import CliRunner

from coterie.config import RunSettings
from coterie.core.method import Phase
from coterie.core.schema import Entry, Schema
from coterie.engine.messages import ScoreRequest, TrainRequest
from coterie.errors import CoterieError
from coterie.federation.device import DeviceHandler
from coterie.federation.edge import EdgeHandler
from coterie.federation.policy.allow import ALLOWED_KINDS, GOVERNED_SETTINGS, Allow, ByteBudget
from coterie.federation.policy.allow_example import example_policy
from coterie.federation.policy.reveal import ANYTHING
from coterie.federation.protocol.version import PROTOCOL
from coterie.methods import method_names
from support.methods import METHODS

RUN = "0123456789abcdef" * 2


def chosen(**more: Any) -> RunSettings:
    return RunSettings(**{"method": "fedrep", "model": "mlp", **more})


def refused(allow: Allow, words: str, **more: Any) -> None:
    with pytest.raises(CoterieError, match=words) as e:
        allow.check_plan(chosen(**more))
    assert "\n" not in str(e.value)


# ---- methods and models --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [None, "mlp", "lenet5", "default-bn"])
def test_own_names_are_allowed_by_default(model: str | None) -> None:
    options = {"width": 8, "widths": [8, 8.5, None, True], "act": "relu"}
    Allow().check_plan(chosen(model=model, model_options=options))


@pytest.mark.parametrize("model", ["subprocess:check_output", "torch.hub:load", "os:system", "mine.models:Net"])
def test_code_is_refused_unless_it_was_allowed(model: str) -> None:
    module = model.partition(":")[0]
    for models in (None, (), ("mine:Net",), (f"{module}:other",), (f"{module}.more:*",), (f"x{model}",), ("mlp",)):
        refused(Allow(models=models), f'the code "{model}" as its model, which this host does not allow', model=model)
    Allow(models=(model,)).check_plan(chosen(model=model))
    Allow(models=(f"{module}:*",)).check_plan(chosen(model=model))


@pytest.mark.parametrize("model", ["", "a b", "../x", ":load", "torch.hub:", "a:b:c", "x" * 300, "torch.hub:*"])
def test_other_models_are_refused_even_if_somebody_allowed_much(model: str) -> None:
    refused(Allow(models=("torch.hub:*",)), "neither a name nor", model=model)


@pytest.mark.parametrize("method", ["subprocess:check_output", "coterie.methods.fedrep:FedRep", "a.b", "", "x" * 300])
def test_a_method_is_a_name(method: str) -> None:
    refused(Allow(models=("subprocess:*",)), "is not the name of an installed method", method=method)


@pytest.mark.parametrize("options", [{"a": {}}, {"a": [[1]]}, {"a": "x" * 999}, {"a": [1] * 999}, {"a b": 1}, {"": 1}])
def test_options_of_a_model_are_plain(options: dict[str, Any]) -> None:
    refused(Allow(), "is not a plain value", model_options=options)


def test_only_listed_methods_and_models_are_allowed() -> None:
    allow = Allow.of({"methods": ["FedAvg", "sc_fpfl"], "models": ["mlp"]})
    allow.check_plan(chosen(method="fedavg"))
    allow.check_plan(chosen(method="sc-fpfl"))
    refused(allow, 'this host does not allow the method "fedrep"')
    refused(allow, 'this host does not allow the model "lenet5"', method="fedavg", model="lenet5")
    refused(allow, 'this host does not allow the model "lenet5"', method="fedavg", model="0=mlp,1-3=lenet5")


def test_installed_code_of_others_must_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie import methods
    from coterie.federation.policy import allow as module

    monkeypatch.setattr(methods, "_points", lambda: {"theirs": None})
    monkeypatch.setattr(module, "_code_of_names", lambda group: {"theirs": "their.code:Thing"})
    refused(Allow(), 'the method "theirs" is not one of Coterie\'s own', method="theirs")
    refused(
        Allow(methods=("theirs",)), 'the model "theirs" is not one of Coterie\'s own', method="theirs", model="theirs"
    )
    Allow(methods=("theirs",), models=("theirs",)).check_plan(chosen(method="theirs", model="theirs"))


@pytest.mark.parametrize("name", ["warm_start", "weights", "official", "log_updates"])
def test_what_no_device_allows(name: str) -> None:
    value: Any = "/etc" if name in ("warm_start", "weights") else True
    refused(Allow(), f"the plan sets {name}, which no host of a federation allows", **{name: value})


# ---- settings ------------------------------------------------------------------------------------------------------
def test_settings_are_held_against_their_rules() -> None:
    rules = {"lr": {"max": 0.1}, "batch": [16, 32], "watch": False, "fedrep": {"head_epochs": {"min": 1, "max": 3}}}
    allow = Allow.of({"settings": rules})
    good = {"lr": 0.1, "batch": 16, "watch": False, "settings": {"head_epochs": 3}}
    allow.check_plan(chosen(**good))
    refused(allow, "the plan sets lr = 0.2, this host allows at most 0.1", **good | {"lr": 0.2})
    refused(allow, "the plan sets batch = 64, this host allows 16 or 32", **good | {"batch": 64})
    refused(allow, "the plan sets watch = true, this host allows false", **good | {"watch": True})
    refused(
        allow, "the plan sets head_epochs = 9.0, this host allows 1 to 3", **good | {"settings": {"head_epochs": 9}}
    )
    refused(allow, "sets momentum = 0.9, which this host allows only at its default, 0.0", **good | {"momentum": 0.9})
    allow.check_plan(chosen(**good | {"method": "fedprox", "settings": {"mu": 5.0}}))  # has no table of its own
    allow.check_plan(chosen(**good | {"seed": 5, "join": 1.0, "checkpoint_every": 3}))  # the cloud's own affair


def test_every_governed_setting_and_no_method_has_such_a_name() -> None:
    assert set(GOVERNED_SETTINGS) <= set(RunSettings.model_fields) and not set(GOVERNED_SETTINGS) & set(method_names())


# ---- bounds --------------------------------------------------------------------------------------------------------
def test_rounds_and_epochs_of_a_plan() -> None:
    allow = Allow.of({"bounds": {"rounds": 20, "epochs": 2.5}})
    allow.check_plan(chosen(rounds=20, epochs=2.5))
    refused(allow, "the plan asks for 21 rounds, this host allows 20", rounds=21, epochs=1)
    refused(allow, "the plan asks for 3 epochs in a round, this host allows 2.5", rounds=1, epochs=3)


class Training:
    """A method that trains as told."""

    def __init__(self, *phases: Phase, adapt: tuple[Phase, ...] = ()):
        self._phases, self._adapt, self.ctx = list(phases), list(adapt), self
        self.batch, self.epochs, self.local_steps = 10, 2.0, None

    def phases(self, round: int) -> list[Phase]:
        return self._phases

    def adapt(self) -> list[Phase]:
        return self._adapt


@pytest.mark.parametrize(
    ("phases", "epochs"),
    [
        ((Phase(),), 2),
        ((Phase(epochs=3), Phase()), 5),
        ((Phase(steps=8),), 2),
        ((Phase(steps=4, batches_per_step=2),), 2),
    ],
)
def test_epochs_of_a_round_are_those_of_all_phases(phases: tuple[Phase, ...], epochs: float) -> None:
    method: Any = Training(*phases)  # 40 samples are four batches
    Allow(epochs=epochs, reveal=ANYTHING).check_request(method, TrainRequest(0, 1), 40)
    with pytest.raises(
        CoterieError, match=rf"round 1 would train for {epochs} epochs, this host allows {epochs - 0.5:g}"
    ):
        Allow(epochs=epochs - 0.5, reveal=ANYTHING).check_request(method, TrainRequest(0, 1), 40)


def test_training_for_evaluation_is_bounded_too() -> None:
    allow = Allow(epochs=2, rounds=5)
    allow.check_request(Training(adapt=(Phase(),)), ScoreRequest(0, 6), 40)  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match="would train for 9 epochs"):
        allow.check_request(Training(adapt=(Phase(epochs=9),)), ScoreRequest(0, 1), 40)  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match="would train for 9 epochs"):
        request = ScoreRequest(0, 1, more=("trained",))
        allow.check_request(Training(Phase(epochs=9)), request, 40)  # type: ignore[arg-type]
    for request in (TrainRequest(0, 6), ScoreRequest(0, 7)):
        with pytest.raises(CoterieError, match="is beyond the 5 rounds that this host allows"):
            allow.check_request(Training(), request, 40)  # type: ignore[arg-type]


def test_bytes_are_counted_by_round_and_run_before_they_leave(tmp_path: Path) -> None:
    spent = ByteBudget(Allow(bytes_up=100, bytes_down=50), tmp_path / "bytes.json")
    spent.count("up", "a", 1, 60)
    spent.count("down", "a", 1, 50)
    with pytest.raises(CoterieError, match="round 1 would send 120 bytes, this host allows 100 in a round"):
        spent.count("up", "a", 1, 60)  # the same question again
    with pytest.raises(CoterieError, match="round 1 would receive 51 bytes, this host allows 50 in a round"):
        spent.count("down", "a", 1, 1)
    spent = ByteBudget(spent.allow, spent.path)  # a new process
    spent.count("up", "a", 1, 40)  # what was refused does not count
    with pytest.raises(CoterieError, match="round 1 would send 101 bytes"):
        spent.count("up", "a", 1, 1)
    spent.count("up", "a", 2, 100)
    spent.count("up", "b", 1, 100)


# ---- what leaves ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ALLOWED_KINDS[:-1])
def test_a_kind_leaves_only_if_it_may(kind: Any) -> None:
    schema = Schema({"x": Entry((3,), kind=kind)})
    sizes = {kind: 12, "numbers": 24}
    Allow.of({"leave": {"kinds": [kind]}}).check_leaving(schema, ["x"], sizes)
    others = Allow.of({"leave": {"kinds": [k for k in ALLOWED_KINDS if k != kind]}})
    with pytest.raises(CoterieError, match=f'this host does not let "{kind}" leave, which the method sends .x.'):
        others.check_leaving(schema, ["x"], sizes)
    others.check_leaving(schema, [], {"numbers": 24})


def test_entries_leave_by_name_and_scores_by_kind() -> None:
    schema = Schema({"body.a": Entry((1,)), "head.b": Entry((1,))})
    allow = Allow.of({"leave": {"kinds": ["model"], "entries": ["body.*"]}})
    allow.check_leaving(schema, ["body.a"], {"model": 4})
    with pytest.raises(CoterieError, match=r'does not let the entry "head\.b" leave'):
        allow.check_leaving(schema, ["body.a", "head.b"], {"model": 8})
    with pytest.raises(CoterieError, match='does not let "unknown" leave'):
        allow.check_leaving(schema, ["more"], {"model": 8})
    with pytest.raises(CoterieError, match='does not let "scores" leave'):
        allow.check_leaving(schema, ["body.a"], {"model": 4, "scores": 8})
    refused(allow, 'does not let "scores" leave, so the plan must set watch = false')


# ---- files ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method = []", 'unknown key "method"; did you mean "methods"'),
        ('methods = "fedrep"', "methods = 'fedrep' is invalid: it must be a list of names"),
        ("methods = [1]", "must be a list of names"),
        ('methods = ["fedrp"]', 'unknown method "fedrp"; did you mean "fedrep"'),
        ('models = ["mpl"]', 'unknown model "mpl"; did you mean "mlp"'),
        ('models = ["*:*"]', "must be a name, package.module:name or package.module"),
        ('models = ["torch:"]', "must be a name, package.module:name or package.module"),
        ("settings = 1", r"settings = 1 is invalid: it must be a table, \[settings\]"),
        ("[settings]\nlrr = 1", 'unknown setting "lrr"; did you mean "lr"'),
        ("[settings]\nseed = 1", 'unknown setting "seed"'),
        ('[settings]\nlr = "fast"', "lr = 'fast' is invalid: it must be a valid number"),
        ("[settings]\nlr = -1.0", "lr = -1.0 is invalid: it must be greater than 0"),
        ('[settings]\noptimizer = ["sgd", "x"]', 'unknown optimizer "x"; known: '),
        ("[settings]\noptimizer = {max = 1}", "min and max are numbers, of a setting that is a number"),
        ("[settings]\nlr = {max = true}", "min and max are numbers"),
        ("[settings]\nlr = {min = 2, max = 1}", "min and max are numbers"),
        ("[settings]\nlr = {most = 1}", "it must be a value, a list of values or"),
        ("[settings]\nfedrep = 1", "settings.fedrep = 1 is invalid: it must be a table"),
        ("[settings.fedrep]\nheads = 1", 'unknown setting of fedrep "heads"'),
        ("[bounds]\nround = 1", 'unknown bound "round"; did you mean "rounds"'),
        ("[bounds]\nrounds = 0", "rounds = 0 is invalid: it must be a whole number, at least 1"),
        ("[bounds]\nrounds = true", "rounds = True is invalid"),
        ("[bounds]\nepochs = -1", "epochs = -1 is invalid: it must be a number above 0"),
        ("[bounds]\nepochs = inf", "epochs = inf is invalid"),
        ('[bounds]\nbytes_up = "2 TB"', "bytes_up = '2 TB' is invalid: it must be bytes"),
        ("[bounds]\nbytes_up = 1.5", "bytes_up = 1.5 is invalid"),
        ('[leave]\nkinds = ["models"]', 'unknown kind "models"; did you mean "model"'),
        ("[leave]\nkind = []", 'unknown key of .leave. "kind"; did you mean "kinds"'),
        ("leave = []", "leave = .. is invalid: it must be a table"),
        ("a = ", "is not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "allow.toml"
    path.write_text(text)
    with pytest.raises(CoterieError, match=words) as e:
        Allow.read(path)
    assert str(e.value).startswith(str(path)) and (text == "a = " or "\n" not in str(e.value))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"nothing\.toml cannot be read: No such file"):
        Allow.read(tmp_path / "nothing.toml")
    assert Allow.read(None) == Allow()


def test_sizes_are_numbers_or_have_units() -> None:
    for text, size in (("500 kB", 500_000), ("1.5MB", 1_500_000), ("2 GB", 2 * 10**9), (7, 7)):
        assert Allow.of({"bounds": {"bytes_up": text}}).bytes_up == size


@pytest.mark.parametrize(
    "name",
    ["fedrep", "fedpc", *(pytest.param(n, marks=pytest.mark.long) for n in METHODS if n not in ("fedrep", "fedpc"))],
)
def test_the_example_for_a_method_allows_it_as_it_is_and_nothing_more(name: str) -> None:
    from coterie.config import settings
    from coterie.engine.session import prepare

    allow = Allow.of(tomllib.loads(example_policy(name)))
    usual = {"data": "digits", "partition": "iid", "clients": 10, "join": 1.0, "val_share": 0.2, "public": 100}
    session = prepare(settings(name, **usual))
    allow.check_plan(session.settings)
    allow.check_session(session, 1000)
    for more, words in (({"rounds": 51}, "51 rounds"), ({"lr": 0.3}, "sets lr = 0.3"), ({"model": "x:y"}, "the code")):
        with pytest.raises(CoterieError, match=words):
            allow.check_plan(session.settings.model_copy(update=more))
    other = "fedavg" if name != "fedavg" else "fedrep"
    with pytest.raises(CoterieError, match=f'does not allow the method "{other}"'):
        allow.check_plan(settings(other))


def test_show_prints_it() -> None:
    from coterie.cli.app import app

    shown = CliRunner().invoke(app, ["show", "FedRep", "--allow"])
    assert shown.exit_code == 0 and shown.stdout == example_policy("fedrep")


# ---- a real plan, on a device and on an edge -----------------------------------------------------------------------
def hostile(tmp_path: Path, model: str) -> str:
    """What a hostile cloud sends: a valid plan whose model would leave a file behind."""
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "hubconf.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\ndef m(**more): pass\n")
    options: dict[str, Any] = {"args": ["touch", str(tmp_path / "marker")]}
    if model == "torch.hub:load":
        options = {"repo_or_dir": str(hub), "model": "m", "source": "local", "trust_repo": True}
    settings = chosen(model=model, model_options=options).model_dump(mode="json")
    about = {
        "protocol": PROTOCOL,
        "run": RUN,
        "coterie": "0",
        "source": "x",
        "settings": settings,
        "places": 2,
        "w0": "x",
    }
    data = {"partition": None, "shape": [1, 4, 4], "task": "classes", "targets": 1, "classes": ["0", "1", "2"],
            "kind": "float32"}  # fmt: skip
    return json.dumps({**about, **data, "vocab": None, "mean": None, "std": None})


@pytest.mark.parametrize("model", ["subprocess:check_output", "torch.hub:load"])
def test_a_cloud_cannot_run_code_on_a_device_or_an_edge(tmp_path: Path, model: str) -> None:
    plan = hostile(tmp_path, model)
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((9, 4, 4), np.uint8), y_train=np.arange(9) % 3)
    device = DeviceHandler(str(tmp_path / "mine.npz"), tmp_path / "state")
    for hello in (device.hello, EdgeHandler(None).hello):  # type: ignore[arg-type]  # it is not asked for its nodes
        with pytest.raises(CoterieError, match=f'the code "{model}" as its model, which this host does not allow'):
            hello(plan)
    device.close()
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "state" / RUN).exists()  # nor is the plan kept
