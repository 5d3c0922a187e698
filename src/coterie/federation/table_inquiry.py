"""Ask the nodes of a server for the statistics of their tables. The cloud does this, and an edge for its devices."""

import logging
import math
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from coterie.core.tasks import MOST_SAMPLES
from coterie.data.table import MOST_CATEGORIES
from coterie.engine import codec
from coterie.engine.messages import check_message
from coterie.errors import CoterieError, sentence
from coterie.federation.policy.audit import AuditLine, AuditLog
from coterie.federation.protocol.messages import TableAnswer, TableAnswers, TableQuestion
from coterie.federation.transport import NodeLink

TABLE_SECONDS = 120.0  # time for a device to read its table
_RETRY = 30.0  # seconds after which a device that refused is asked again
_NEXT = 2.0  # seconds after which an edge is asked for devices that have come
_MAX_BYTES = 2**22  # length of the answer of a device
_MOST_DEVICES = 1024  # answers of one edge
_MAX_NAME = 200  # characters of the name of a column, a category, a class or a device
log = logging.getLogger("coterie.tables")


@dataclass
class TableInquiry:
    """The answers of a server's nodes about their tables; `ask` asks the nodes that have not answered."""

    link: NodeLink
    question: TableQuestion
    audit: AuditLog | None = None
    edges: Collection[str] = ()  # names of the nodes that are edges
    seconds: float = TABLE_SECONDS
    answers: dict[str, TableAnswer] = field(default_factory=dict)  # by device; EDGE/DEVICE behind an edge
    refused: dict[str, str] = field(default_factory=dict)  # reasons by device
    _ask_after: dict[str, float] = field(default_factory=dict)

    def ask(self, suspended: Collection[str] = ()) -> None:
        """Ask all connected nodes that are due, and keep their answers."""
        now = time.monotonic()
        nodes = [n for n in sorted(self.link.nodes()) if n not in self.answers and n not in suspended]
        nodes = [n for n in nodes if self._ask_after.get(n, now) <= now]
        if not nodes:
            return
        self._note(*(AuditLine("", 0, "columns", "out", n) for n in nodes))
        largest = _MAX_BYTES * (16 if self.edges else 1)
        payload = codec.pack(self.question)
        replies = self.link.send(dict.fromkeys(nodes, payload), "columns", 0, self.seconds, None, largest)
        failures = {n: failure.why for n, failure in replies.errors.items()}
        for name, reply in replies.answers.items():
            try:
                message = codec.unpack_foreign(reply)
                if name not in self.edges:
                    self._keep(name, check_message(message, TableAnswer))
                    continue
                self._ask_after[name] = time.monotonic() + _NEXT
                behind = check_message(message, TableAnswers)
                if len(behind.devices) + len(behind.refused) > _MOST_DEVICES:
                    raise CoterieError(f"its answer names more than {_MOST_DEVICES} devices")
                for device, answer in behind.devices.items():
                    if (full := _full_name(name, device)) not in self.answers:
                        self._keep(full, answer)
                for device, why in behind.refused.items():
                    self._refuse(_full_name(name, device), why)
            except CoterieError as e:
                failures[name] = str(e)
        for name, why in failures.items():
            self._ask_after[name] = time.monotonic() + _RETRY
            self._refuse(name, why.removeprefix(f"{name}: "))

    def _keep(self, name: str, answer: TableAnswer) -> None:
        self.answers[name] = checked_answer(answer)
        self.refused.pop(name, None)
        about = {c: asdict(s) for c, s in answer.columns.items()}
        self._note(AuditLine("", 0, "columns", "in", name, about=about))
        log.info("%s described its table", name)

    def _refuse(self, name: str, why: str) -> None:
        reason = sentence(why)
        if self.refused.get(name) != reason:  # an edge repeats it
            self.refused[name] = reason
            log.warning("%s does not take part: %s", name, reason)
            self._note(AuditLine("", 0, "columns", "in", name, refused=reason))

    def _note(self, *lines: AuditLine) -> None:
        if self.audit is not None:
            self.audit.write(*lines)


def checked_answer(answer: TableAnswer) -> TableAnswer:
    """Return the answer of a device; raise CoterieError if a number in it is impossible."""
    texts = [
        *answer.features,
        *answer.columns,
        *answer.classes,
        *(c for s in answer.columns.values() for c in s.categories),
    ]
    if not answer.features or not set(answer.features) <= answer.columns.keys() or max(map(len, texts)) > _MAX_NAME:
        raise CoterieError(f"its answer lacks columns, or has a name of more than {_MAX_NAME} characters")
    for name, s in answer.columns.items():
        whole = 0 <= s.count <= MOST_SAMPLES and len(s.categories) <= MOST_CATEGORIES
        if not (whole and math.isfinite(s.total) and math.isfinite(s.squares) and s.squares >= 0):
            raise CoterieError(f'its statistics of column "{sentence(name, 63)}" are impossible')
    return answer


def _full_name(edge: str, device: str) -> str:
    if not device or len(device) > _MAX_NAME:
        raise CoterieError(f"its answer names a device of more than {_MAX_NAME} characters, or of none")
    return f"{edge}/{device}"
