"""Imports between packages go one way only, and only the transport imports gRPC."""

import ast
import graphlib
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import coterie

SRC = Path(coterie.__file__).parent

# From the ground up: a room imports only rooms of earlier lines. The longest prefix of a module's name is its room.
ROOMS = [
    ["errors", "core.rng", "core.tree", "core.views", "train.native", "engine.provenance"],
    ["core.schema", "core.states", "core.calls", "core.metrics", "core.losses", "storage.atomic", "engine.ledger"],
    ["core.schedules", "train.optimisers", "train.augmentation"],
    ["engine.codec", "core.tasks"],
    ["core.layers", "core.lora"],
    ["core.frozen_prefix"],
    ["core.net"],
    ["models", "core.context"],
    ["core.method"],
    ["core.edges", "train.devices"],
    ["parts", "privacy.secure_sum"],
    ["methods"],
    ["engine.messages", "data"],
    ["engine.combining"],
    ["privacy"],
    ["engine.server_optimiser", "engine.robust", "engine.attacks", "privacy.secure_sum.setting"],
    ["engine.round", "runtimes.registry"],
    ["engine.edge_steps"],
    ["config"],
    ["train"],
    ["storage.client_states"],
    ["engine.evaluation", "runtimes", "storage.run_folder", "engine.fault_isolation"],
    ["storage.checkpoint"],
    ["engine.loop"],
    ["engine.session"],
    ["engine.personal_models"],
    ["export.personal_model"],
    ["testing", "federation"],
    ["export", "flower"],
    ["results"],
    ["results.report"],
    ["papers", "board"],
    ["progress"],
    ["api"],
    ["estimators"],
    ["coterie"],  # __init__.py, the public names
    ["cli"],
    ["__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    words = module.split(".")[1:]
    for n in range(len(words), 0, -1):
        if (name := ".".join(words[:n])) in RANK:
            return name
    return words[0] if words else "coterie"


def imported(module: str, everywhere: bool) -> set[str]:
    """Modules it imports: when it is loaded, or `everywhere`, functions included."""
    tree = ast.parse(modules()[module].read_text())
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    found = set()
    for node in ast.walk(tree):
        if not everywhere and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are written in full"
            full = {f"{node.module}.{a.name}" for a in node.names}
            found |= {name if name in modules() else node.module for name in full}
    return found


def test_loading_the_package_meets_no_cycle() -> None:
    graph = {m: imported(m, everywhere=False) & modules().keys() for m in modules()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises with the cycle


@pytest.mark.parametrize("module", [m for m in modules() if m != "coterie.__main__"])
def test_every_module_can_be_loaded(module: str) -> None:
    if "federation" in module:
        pytest.importorskip("grpc")
    if module.startswith("coterie.flower.") and module not in ("coterie.flower.project", "coterie.flower.run_config"):
        pytest.importorskip("flwr")
    importlib.import_module(module)


def test_every_room_has_its_place() -> None:
    empty = {m for m, path in modules().items() if path.name == "__init__.py" and not path.read_text().strip()}
    unknown = sorted({room(m) for m in modules() if m not in empty} - RANK.keys())
    assert not unknown, f"say in ROOMS where these stand: {unknown}"


def test_arrows_point_one_way() -> None:
    """Imports inside functions count too."""
    wrong = [
        f"{m} imports {other}"
        for m in modules()
        for other in sorted(imported(m, everywhere=True) & modules().keys())
        if room(other) != room(m) and RANK.get(room(other), 99) >= RANK.get(room(m), -1)
    ]
    assert not wrong, "\n".join(wrong)


def test_methods_and_their_parts_know_no_engine() -> None:
    wrong = [
        f"{m} imports {other}"
        for m in modules()
        if m.split(".")[1:2] in (["methods"], ["parts"], ["core"])
        for other in imported(m, everywhere=True) & modules().keys()
        if other.split(".")[1] in ("engine", "train", "runtimes", "federation", "storage")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_no_method_by_name() -> None:
    wrong = [
        f"{m} imports {other}"
        for m in modules()
        if room(m) not in ("methods", "papers")
        for other in imported(m, everywhere=True) & modules().keys()
        if other.startswith("coterie.methods.") and other.split(".")[2] not in ("stored", "restore")  # files of 0.1
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_transport_imports_grpc_and_only_one_module_ray() -> None:
    users = {
        name: {m for m in modules() for i in imported(m, everywhere=True) if i.split(".")[0] == name}
        for name in ("flwr", "grpc", "ray")
    }
    generated = "coterie.federation.protocol.coterie_pb2_grpc"
    assert all(m.startswith("coterie.federation.transport.") for m in users["grpc"] - {generated})
    assert all(m.startswith("coterie.flower.") for m in users["flwr"])
    assert users["ray"] <= {"coterie.runtimes.ray"}


def test_a_run_loads_neither_grpc_nor_ray() -> None:
    code = "import sys, coterie, coterie.cli.app, coterie.engine.session; print(*{'grpc', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# Public names that several modules define: loggers, type variables, and commands named like the function they call.
SHARED_NAMES = {"log", "M", "T", "compare", "join", "run", "tune"}


def public_names(module: str) -> set[str]:
    """Names of classes, functions and constants that a module defines at its top level."""
    names = set()
    for node in ast.parse(modules()[module].read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_no_public_name_is_defined_in_two_modules() -> None:
    homes: dict[str, list[str]] = {}
    for module in modules():
        for name in public_names(module) - SHARED_NAMES:
            homes.setdefault(name, []).append(module)
    assert not {name: where for name, where in homes.items() if len(where) > 1}
