"""The common encoding of the devices' tables: asked for before a run starts, and made from their statistics."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from coterie.config import RunSettings
from coterie.data.table import Column, TableEncoding, agree_encoding
from coterie.errors import CoterieError
from coterie.federation.cloud.program import CloudSettings
from coterie.federation.identity.authority import Certs
from coterie.federation.policy.audit import AUDIT_FILE, AuditLog
from coterie.federation.protocol.messages import TableAnswer, TableQuestion
from coterie.federation.table_inquiry import TableInquiry
from coterie.federation.transport import NodeLink, listening
from coterie.runtimes.base import Interrupted

log = logging.getLogger("coterie.cloud")


def agree_on_table(
    settings: RunSettings, cloud: CloudSettings, folder: Path, stopped: Callable[[], bool] = lambda: False
) -> tuple[RunSettings, CloudSettings]:
    """Wait for all devices of a run, and return the settings with task, classes and encoding of their tables."""
    certs = Certs(Path(cloud.certs))
    certs.check()
    edges = {name for name, role in certs.roles().items() if role.is_edge}
    audit = AuditLog(folder / AUDIT_FILE)
    try:
        with listening(certs, cloud.host, cloud.port) as link:
            answers = ask_devices(
                link, settings, settings.federation.clients or cloud.min_clients, audit, stopped, edges
            )
    finally:
        audit.close()
    return agreed_settings(settings, cloud, answers)


def agreed_settings(
    settings: RunSettings, cloud: CloudSettings, answers: Mapping[str, TableAnswer]
) -> tuple[RunSettings, CloudSettings]:
    """Return the settings of a run that suit the tables of all these devices, whatever the order of devices."""
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
    link: NodeLink,
    settings: RunSettings,
    places: int,
    audit: AuditLog,
    stopped: Callable[[], bool],
    edges: Collection[str] = (),
) -> dict[str, TableAnswer]:
    """Return the answers of the first `places` devices."""
    inquiry = TableInquiry(link, TableQuestion(settings.model_dump_json()), audit, edges)
    log.info("waiting for %s devices that describe their tables", places)
    while len(inquiry.answers) < places:
        if stopped():
            raise Interrupted
        inquiry.ask()
        time.sleep(0.2)
    return dict(sorted(inquiry.answers.items())[:places])
