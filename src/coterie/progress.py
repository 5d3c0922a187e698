"""Progress of a run, a comparison or a search on a terminal, in a notebook, or as lines of text."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.engine.loop import Callbacks
from coterie.engine.loop import Progress as RoundProgress

UpdateBar = Callable[..., None]  # (rounds done, text)


@contextmanager
def bar(what: str, total: int, quiet: bool) -> Iterator[UpdateBar]:
    """Yield update(done, text): a bar on a terminal or in a notebook; otherwise a line of text for every tenth."""
    if quiet:
        yield lambda done, text="": None
    elif _in_notebook():
        with _notebook_bar(what, total) as update:
            yield update
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total, text="")
            yield lambda done, text="": progress.update(task, completed=done, text=text)
    else:
        yield _lines(what, total)


def _lines(what: str, total: int) -> UpdateBar:
    reached = -1

    def line(done: int, text: str = "") -> None:
        nonlocal reached
        if (tenth := done * 10 // max(total, 1)) > reached and done:
            reached = tenth
            print(f"{what}: {done}/{total} {text}", file=sys.stderr, flush=True)

    return line


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def _notebook_bar(what: str, total: int) -> Iterator[UpdateBar]:
    """Yield the update of a bar below the cell, which is removed at the end."""
    ipython = import_module("IPython.display")  # only where it runs already
    show, html = ipython.display, ipython.HTML

    shown = show(html(""), display_id=True)

    def update(done: int, text: str = "") -> None:
        value = f'<progress value="{done}" max="{total}"></progress> {done}/{total}'
        shown.update(html(f"{escape(what)} {value} {escape(text)}"))

    update(0)
    try:
        yield update
    finally:
        shown.update(html(""))


class Bar:
    """A progress bar that appears when `start` gives its title and its total."""

    def __init__(self, quiet: bool):
        self.quiet, self._open = quiet, ExitStack()
        self._update: UpdateBar = lambda done, text="": None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *about: object) -> None:
        self._open.close()

    def start(self, title: str, total: int) -> None:
        self._update = self._open.enter_context(bar(title, total, self.quiet))

    def update(self, done: int, text: str = "") -> None:
        self._update(done, text)


def wanted(progress: bool | None, callbacks: Callbacks | None) -> bool:
    """True if a function of the Python interface shows a bar: by default on a terminal or in a notebook.

    A caller with callbacks of its own shows the progress itself.
    """
    if progress is not None:
        return bool(progress)
    return callbacks is None and (_in_notebook() or sys.stderr.isatty())


@contextmanager
def with_bar(callbacks: Callbacks, show: bool) -> Iterator[tuple[Callbacks, Bar]]:
    """Yield callbacks that also start the bar, and the bar."""
    with Bar(not show) as shown:

        def start(title: str, rounds: int) -> Any:
            shown.start(title, rounds)
            return callbacks.on_start(title, rounds)

        yield replace(callbacks, on_start=start) if show else callbacks, shown


def with_rounds(callbacks: Callbacks, shown: Bar) -> Callbacks:
    """Return callbacks that also move the bar after every round of a run."""

    def after(progress: RoundProgress) -> Any:
        shown.update(progress.round, progress.text)
        return callbacks.on_round(progress)

    return callbacks if shown.quiet else replace(callbacks, on_round=after)
