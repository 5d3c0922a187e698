"""Screen output: progress, tables, and the handling of Ctrl-C."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from coterie.errors import printable

if TYPE_CHECKING:
    import pandas as pd

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=120)  # a file or a pipe has no width of its own
errors = Console(stderr=True)
NAME_WIDTH = 24  # columns that the first column of a table may always take


class Stop:
    """Ctrl-C once: finish the round, save and say how to resume; twice: end at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        errors.print("stopping after this round (press Ctrl-C again to stop now) ...")

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        old = {n: signal.signal(n, self._hear) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for n, handler in old.items():
                signal.signal(n, handler)


@contextmanager
def download_bar(quiet: bool) -> Iterator[Any]:
    """Yield a function tell(file, bytes done, bytes in total) that shows the progress of downloads on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda file, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def tell(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total or None)
            progress.update(tasks[file], completed=done)

        yield tell


def say(text: str) -> None:
    """Print text without markup or highlighting; the terminal wraps long lines."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def frame_table(frame: "pd.DataFrame", title: str = "") -> Table:
    """A table whose numbers are never cut: long names are folded, and the last columns left out if they do not fit."""
    table = Table(title=escape(printable(title)) or None, title_justify="left")
    rows = [[printable(str(v)) for v in (label, *row)] for label, row in zip(frame.index, frame.values, strict=True)]
    heads = [printable(str(v)) for v in (frame.index.name or "", *frame.columns)]
    widths = [max(map(len, column)) + 3 for column in zip(heads, *rows, strict=True)]
    room, shown = console.width - 1 - min(widths[0], NAME_WIDTH), 1
    while shown < len(heads) and widths[shown] <= room:
        room, shown = room - widths[shown], shown + 1
    table.add_column(escape(heads[0]), overflow="fold")
    for name in heads[1:shown]:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row[:shown]))
    if shown < len(heads):
        table.caption = f"not shown on this narrow screen: {', '.join(heads[shown:])}"
    return table
