"""The command line: `coterie run`, `compare`, `list`, `show`, `runs`, `export`, `data`, `report`."""

import sys


def main() -> None:
    """Print one sentence for a user's mistake (exit code 2), a traceback for a bug."""
    from coterie.cli.app import app
    from coterie.errors import CoterieError, printable

    try:
        app(prog_name="coterie")
    except CoterieError as e:
        print("coterie: " + "\n".join(map(printable, str(e).split("\n"))), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as e:
        if e.filename is None:
            raise
        where = e.filename if e.filename2 is None else e.filename2  # the target of a file that is moved
        print(f"coterie: {printable(str(where))} cannot be used ({e.strerror})", file=sys.stderr)
        sys.exit(2)


__all__ = ["main"]
