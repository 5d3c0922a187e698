"""One self-contained HTML file about one or several runs: opens offline, on a phone too.

The page is a list of sections. A section is a template in templates/sections and a function that gives its numbers;
one without numbers is left out. To add a section, add a line to SECTIONS.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from coterie.errors import CoterieError
from coterie.results.comparison import Comparison
from coterie.results.discovery import find_items, find_runs
from coterie.results.report import content, origin
from coterie.results.run import Run
from coterie.storage import atomic as disk


@dataclass(frozen=True)
class Subject:
    """What a report is about."""

    runs: Sequence[Run]
    items: Sequence[dict[str, Any]] = ()  # printed and measured tables of `coterie paper`
    view: str = ""  # the headline; empty: as the runs say
    also: Sequence[str] = ()  # columns that are shown only when asked for

    @cached_property
    def groups(self) -> dict[str, Comparison]:
        """Runs that have the same clients, by the name of their group."""
        names = dict.fromkeys(r.group for r in self.runs)
        of = {g: [r for r in self.runs if r.group == g] for g in names}
        return {g: Comparison(runs, view=self.view, also=self.also) for g, runs in of.items()}

    def each(self, of: Callable[[Comparison], Any]) -> list[dict[str, Any]]:
        """Something of every group that has it, with the group's name."""
        found = [{"name": content.group_name(g, c), "data": of(c)} for g, c in self.groups.items()]
        return [f for f in found if f["data"]]


@dataclass(frozen=True)
class Section:
    id: str  # also its template's name
    heading: str
    data: Callable[[Subject], Any]  # what the template gets; the section is left out if there is nothing


SECTIONS = (
    Section("items", "Printed and measured", lambda s: list(s.items)),
    Section("summary", "Summary", lambda s: s.each(content.summary_table)),
    Section("gains", "Who gains, who loses", lambda s: s.each(content.gain_table)),
    Section("arena", "Against controls", lambda s: s.each(content.control_rows)),
    Section("curves", "Curves", lambda s: s.each(content.curve_data)),
    Section("cost", "Scores against bytes", lambda s: s.each(content.cost_data)),
    Section("clients", "Clients", lambda s: s.each(content.client_data)),
    Section("clusters", "Clusters and edges", lambda s: s.each(content.cluster_data)),
    Section("bytes", "Bytes", lambda s: s.each(content.byte_table)),
    Section("settings", "Settings", lambda s: origin.settings(s.runs)),
)


def write_report(
    paths: Sequence[Path],
    out: Path,
    title: str = "",
    complain: Callable[[str], None] = lambda sentence: None,
    command: str = "",
    view: str = "",
    also: Sequence[str] = (),
) -> Path:
    """The report of all runs found under `paths`, and of the papers' items written there.

    Damaged runs are left out and named, on the page and to `complain`. `command` is what a person typed for it, `view`
    the headline, and `also` columns that are shown only when asked for.
    """
    damaged: list[str] = []
    runs = [r for r in find_runs(paths, damaged.append) if r.events]
    if not runs:
        raise CoterieError("; ".join(damaged) or "none of these runs has finished a round yet")
    for sentence in damaged:
        complain(sentence)
    left_out = [f"Left out: {sentence}." for sentence in damaged]
    html = render(runs, title, find_items(paths), left_out, command, view, also)
    try:
        disk.write_atomic(out, html.encode())
    except OSError as e:
        raise CoterieError(f"{out} cannot be written ({e.strerror or e})") from None
    return out


def environment() -> Environment:
    """The templates; everything that is put into them is escaped."""
    return Environment(
        loader=PackageLoader("coterie.results.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )


def as_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(disk.finite(value), separators=(",", ":")).replace("<", "\\u003c")


def render(
    runs: Sequence[Run],
    title: str = "",
    items: Sequence[dict[str, Any]] = (),
    warnings: Sequence[str] = (),
    command: str = "",
    view: str = "",
    also: Sequence[str] = (),
) -> str:
    """One part per group of runs that have the same clients; `items` are printed and measured tables."""
    subject = Subject(runs, items, view, also)
    found = [(s, s.data(subject)) for s in SECTIONS]
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title or _title(runs, items),
            sections=[{"id": s.id, "heading": s.heading, "data": data} for s, data in found if data],
            warnings=[*warnings, *_warnings(runs), *(w for c in subject.groups.values() for w in c.warnings())],
            data=as_json(
                {"views": content.CURVES, "groups": [content.script_data(g, c) for g, c in subject.groups.items()]}
            ),
            seeds=sorted({r.settings["seed"] for r in runs}),
            methods=len({r.title for r in runs}),
            made=origin.dates(runs),
            written=f"{datetime.now():%Y-%m-%d %H:%M}",
            command=command,
        )
    )


def _title(runs: Sequence[Run], items: Sequence[dict[str, Any]] = ()) -> str:
    if len(items) == 1:
        return f"{items[0]['paper']} {items[0]['item']}: {items[0]['what']}"
    data, partitions = sorted({r.data for r in runs}), {r.partition for r in runs}
    partition = runs[0].partition if len(partitions) == 1 else f"{len(partitions)} partitions"
    methods = len({r.title for r in runs})
    return f"{', '.join(data)}: {partition}, {methods} method{'s' if methods > 1 else ''}"


def _warnings(runs: Sequence[Run]) -> list[str]:
    out = []
    for r in runs:
        s = r.summary()
        name = ", ".join(w for w in (r.title, r.group, f"seed {r.settings['seed']}") if w)
        if r.ended:
            out.append(f"{name}: ended after round {r.last_round} of {r.settings['rounds']}; {r.ended}.")
        elif not r.finished:
            out.append(f"{name}: incomplete, {r.last_round} of {r.settings['rounds']} rounds.")
        if s["nonfinite"]:
            out.append(f"{name}: {s['nonfinite']} uploads were not finite and were left out.")
        if s["failed"]:
            out.append(f"{name}: {s['failed']} times a sampled client failed.")
        if r.description["method"].get("certainty") == "C":
            out.append(f"{r.title} is reconstructed from its published description only.")
    return list(dict.fromkeys(out))
