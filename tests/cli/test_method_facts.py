"""What `coterie list` and `coterie show` print is stored, so that they start without PyTorch; the store is current."""

import subprocess
import sys

import pytest

from coterie.cli import method_facts
from coterie.methods import BUILT_IN

WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from coterie.cli.app import app
done = CliRunner().invoke(app, sys.argv[1:])
assert done.exit_code == 0, done.output
assert "torch" not in sys.modules, "torch was imported"
"""


def test_the_stored_facts_are_those_of_the_code() -> None:
    assert method_facts.FACTS_FILE.read_text(encoding="utf-8") == method_facts.written_facts(), "run `make catalogue`"


def test_every_built_in_method_is_stored() -> None:
    assert list(method_facts.stored_facts()) == sorted(BUILT_IN)


@pytest.mark.parametrize("command", [["--help"], ["show", "fedcpmd"], ["show", "Fed_Rep", "--json"], ["run", "--help"]])
def test_a_command_that_computes_nothing_does_not_import_torch(command: list[str]) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], check=True, capture_output=True)
