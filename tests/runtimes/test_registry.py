"""Runtimes are found by name, and the engine asks for their capabilities."""

from importlib.metadata import EntryPoint

import pytest

from coterie.config import Engine
from coterie.errors import CoterieError
from coterie.runtimes import registry
from coterie.runtimes.registry import RuntimeKind, canonical_runtime, check_address, runtime_kind

OTHER = RuntimeKind("coterie.runtimes.workers:open_local", uses_address=True)


@pytest.fixture
def with_other_package(monkeypatch):
    def points(group: str) -> list[EntryPoint]:
        assert group == "coterie.runtimes"
        return [EntryPoint(name, "test_registry:OTHER", group) for name in ("cluster", "local")]

    monkeypatch.setattr(registry, "entry_points", points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OTHER)
    registry._kinds.cache_clear()
    yield
    registry._kinds.cache_clear()


def test_the_runtime_flower_of_version_0_1_is_the_runtime_federation() -> None:
    assert canonical_runtime("flower") == "federation" == Engine(runtime="flower").runtime
    assert runtime_kind("flower").states_stay_on_devices


def test_an_unknown_runtime_gets_a_suggestion() -> None:
    with pytest.raises(CoterieError, match='unknown runtime "locl"; did you mean "local"'):
        Engine(runtime="locl")


def test_an_address_is_refused_by_runtimes_without_one() -> None:
    check_address("ray", "10.0.0.1:6379")
    check_address("local", None)
    with pytest.raises(CoterieError, match="address is used only with runtime = ray"):
        check_address("federation", "10.0.0.1:6379")


@pytest.mark.parametrize("name", ["local", "ray"])
def test_the_opener_of_a_simulation_can_be_imported(name: str) -> None:
    assert callable(runtime_kind(name).load())


def test_other_packages_add_runtimes_and_cannot_replace_a_built_in_one(with_other_package) -> None:
    assert runtime_kind("cluster") is OTHER and Engine(runtime="cluster").runtime == "cluster"
    assert runtime_kind("local") is registry.RUNTIMES["local"]
    with pytest.raises(CoterieError, match="runtime = cluster or ray"):
        check_address("local", "here")
