"""Log lines of the cloud, edges and devices on the screen, one line per message."""

import logging
from typing import Any

from coterie.engine.loop import Progress
from coterie.errors import printable


class OneLine(logging.Formatter):
    """Formats each message as one printable line, even with text of other hosts in it; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def log_lines(name: str | None = None) -> None:
    """Write messages of level INFO and above of this logger (None: all) to stderr, unless it already has a handler."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def log_progress(p: Progress) -> None:
    """Log the progress of the cloud's run after a round."""
    score = f", {p.text}" if p.text else ""
    logging.getLogger("coterie.cloud").info("round %s of %s, %.1f s%s", p.round, p.rounds, p.seconds, score)
