"""The command line, called inside the process of the test."""

import contextlib
import io
import sys

from coterie.cli import main


def coterie_command(*args: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command; any exception other than SystemExit passes through."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["coterie", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()
