"""The common encoding of the devices' tables: asked for before a run starts, and made from their statistics."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.config import RunSettings
from coterie.core.tasks import MOST_SAMPLES
from coterie.data.table import MOST_CATEGORIES, Column, TableEncoding, agree_encoding
from coterie.engine import codec
from coterie.engine.messages import check_message
from coterie.errors import CoterieError, sentence
from coterie.federation.cloud.program import CloudSettings
from coterie.federation.identity.authority import Certs
from coterie.federation.policy.audit import AUDIT_FILE, AuditLine, AuditLog
from coterie.federation.protocol.messages import TableAnswer, TableQuestion
from coterie.federation.transport import listening
from coterie.runtimes.base import Interrupted

if TYPE_CHECKING:  # needs gRPC
    from coterie.federation.transport.server import GrpcServer

_SECONDS = 120.0  # time for a device to read its table
_RETRY = 30.0  # seconds after which a device that refused is asked again
_MAX_BYTES = 2**22  # length of an answer
_MAX_NAME = 200  # characters of the name of a column, a category or a class
log = logging.getLogger("coterie.cloud")


def agree_on_table(
    settings: RunSettings, cloud: CloudSettings, folder: Path, stopped: Callable[[], bool] = lambda: False
) -> tuple[RunSettings, CloudSettings]:
    """Wait for all devices of a run, and return the settings with task, classes and encoding of their tables."""
    certs = Certs(Path(cloud.certs))
    certs.check()
    if edges := sorted(name for name, role in certs.roles().items() if role.is_edge):
        raise CoterieError(f"devices with tables are connected to the cloud directly, and {edges[0]} is an edge")
    audit = AuditLog(folder / AUDIT_FILE)
    try:
        with listening(certs, cloud.host, cloud.port) as link:
            answers = ask_devices(link, settings, settings.federation.clients or cloud.min_clients, audit, stopped)
    finally:
        audit.close()
    return agreed_settings(settings, cloud, answers)


def agreed_settings(
    settings: RunSettings, cloud: CloudSettings, answers: Mapping[str, TableAnswer]
) -> tuple[RunSettings, CloudSettings]:
    """Return the settings of a run with what these devices have in common; the order of devices does not matter."""
    names = sorted(answers)
    first = answers[names[0]]
    for name in names[1:]:
        if odd := set(first.features) ^ set(answers[name].features):
            have, lack = (names[0], name) if min(odd) in first.features else (name, names[0])
            raise CoterieError(
                f'{have} has a column "{min(odd)}" and {lack} has not; name the common ones (--features)'
            )
        if answers[name].task != first.task:
            raise CoterieError(
                f"the targets are for {first.task} at {names[0]} and for {answers[name].task} at {name}; set --task"
            )
    named = {name: all(c.lstrip("-").isdecimal() for c in answers[name].classes) for name in names}
    if len(set(named.values())) > 1:
        a, b = (min(n for n in names if named[n] is kind) for kind in (True, False))
        raise CoterieError(f"classes are numbers at {a} and names at {b}; write them alike")
    classes = {c for a in answers.values() for c in a.classes}
    ordered = tuple(sorted(classes, key=int) if all(named.values()) else sorted(classes))
    columns = tuple(Column(name=c, kind="empty") for c in first.features)
    encoding = TableEncoding(columns=columns, target=tuple(settings.columns.target_names), client=settings.client)
    scaled = all(target in first.columns for target in encoding.target)
    encoding = agree_encoding(encoding, [answers[n].columns for n in names], scaled, names.__getitem__)
    targets = len(ordered) or len(encoding.target)
    return (
        settings.model_copy(update={"task": first.task}),
        replace(cloud, classes=targets, class_names=ordered, table=encoding.model_dump_json()),
    )


def ask_devices(
    link: "GrpcServer", settings: RunSettings, places: int, audit: AuditLog, stopped: Callable[[], bool]
) -> dict[str, TableAnswer]:
    """Return the answers of the first `places` devices."""
    answers: dict[str, TableAnswer] = {}
    ask_after: dict[str, float] = {}
    question = codec.pack(TableQuestion(settings.model_dump_json()))
    log.info("waiting for %s devices that describe their tables", places)
    while len(answers) < places:
        if stopped():
            raise Interrupted
        now = time.monotonic()
        nodes = [n for n in sorted(link.nodes()) if n not in answers and ask_after.get(n, now) <= now]
        if nodes:
            audit.write(*(AuditLine("", 0, "columns", "out", n) for n in nodes))
            replies = link.send(dict.fromkeys(nodes, question), "columns", 0, _SECONDS, None, _MAX_BYTES)
            failures = {n: failure.why for n, failure in replies.errors.items()}
            for name, reply in replies.answers.items():
                try:
                    answers[name] = _check(check_message(codec.unpack_foreign(reply), TableAnswer))
                    about = {c: asdict(s) for c, s in answers[name].columns.items()}
                    audit.write(AuditLine("", 0, "columns", "in", name, about=about))
                    log.info("%s described its table (%s of %s)", name, len(answers), places)
                except CoterieError as e:
                    failures[name] = str(e)
            for name, why in failures.items():
                ask_after[name] = time.monotonic() + _RETRY
                reason = sentence(why.removeprefix(f"{name}: "))
                log.warning("%s does not take part: %s", name, reason)
                audit.write(AuditLine("", 0, "columns", "in", name, refused=reason))
        time.sleep(0.2)
    return dict(sorted(answers.items())[:places])


def _check(answer: TableAnswer) -> TableAnswer:
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
