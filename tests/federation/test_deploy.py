"""The files under deploy/: every command line in them is one that coterie accepts."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from coterie.cli.app import app
from support import ROOT

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def accepted(arguments: list[str]) -> str:
    """Parse as the command line would, without running anything; the name of the command."""
    command: click.Command = typer.main.get_command(app)
    context: click.Context | None = None
    names = []
    while isinstance(command, click.Group):
        name, found, arguments = command.resolve_command(context or click.Context(command), arguments)
        assert found is not None and name is not None
        command = found
        names.append(name)
        context = click.Context(command, info_name=name)
    command.make_context(names[-1], list(arguments))
    return " ".join(names)


def test_a_wrong_command_line_is_found() -> None:
    with pytest.raises(click.UsageError):
        accepted(["join", "--cloud", "x:1"])
    with pytest.raises(click.UsageError):
        accepted(["serve", "--no-such-option"])


def test_the_services_of_the_compose_file_are_commands_of_coterie() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    commands = {name: accepted(shlex.split(service["command"])) for name, service in found["services"].items()}
    assert commands == {"cloud": "serve", "edge": "edge", "alice": "join", "bob": "join"}
    named = {v.partition(":")[0] for s in found["services"].values() for v in s["volumes"]}
    assert {v for v in named if not v.startswith(".")} == set(found["volumes"])
    for service in found["services"].values():
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    comments = re.findall(r"^#\s+docker compose .* cloud (.*)$", (DEPLOY / "compose.yaml").read_text(), re.M)
    assert [accepted(shlex.split(line)) for line in comments] == ["certs init", "nodes add"]


def test_the_image_starts_coterie_and_copies_what_exists() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    found = {name: json.loads(rest) for name, rest in steps if name in ("ENTRYPOINT", "CMD")}
    assert found["ENTRYPOINT"] == ["coterie"] and found["CMD"] == ["serve", "--help"]
    for name, rest in steps:
        if name == "COPY":
            assert all((DEPLOY.parent / source).exists() for source in rest.split()[:-1]), rest
    assert dict(steps)["USER"] == "coterie"


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.stem)
def test_the_units_start_commands_of_coterie(path: Path) -> None:
    found = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    program, *arguments = shlex.split(found["ExecStart"])
    assert program.endswith("/coterie")
    assert accepted(arguments) == {"cloud": "serve", "edge": "edge", "device": "join"}[path.stem.partition("-")[2]]
    assert found["Restart"] == ("on-failure" if "cloud" in path.stem else "always")


def test_there_is_a_unit_for_every_role() -> None:
    assert [p.stem for p in UNITS] == ["coterie-cloud", "coterie-device", "coterie-edge"]
