"""A report on one or several runs: one self-contained HTML file that opens offline, also on a phone.

The page is a list of sections. A section is a template in templates/sections and a function that returns its numbers;
a section without numbers is left out. To add a section, add a line to SECTIONS.
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
    """The subject of a report."""

    runs: Sequence[Run]
    items: Sequence[dict[str, Any]] = ()  # printed and measured tables of `coterie paper`
    view: str = ""  # the headline; empty: that of the runs
    also: Sequence[str] = ()  # columns that are shown on request only

    @cached_property
    def groups(self) -> dict[str, Comparison]:
        """The runs with the same clients, by the name of their group."""
        names = dict.fromkeys(r.group for r in self.runs)
        members = {g: [r for r in self.runs if r.group == g] for g in names}
        return {g: Comparison(runs, view=self.view, also=self.also) for g, runs in members.items()}

    def each(self, data: Callable[[Comparison], Any]) -> list[dict[str, Any]]:
        """Return the data of every group that has some, with the group's name."""
        groups = [{"name": content.group_name(g, c), "data": data(c)} for g, c in self.groups.items()]
        return [g for g in groups if g["data"]]


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    id: str  # also the name of its template
    heading: str
    data: Callable[[Subject], Any]  # returns the data of the template; the section is left out if they are empty


SECTIONS = (
    Section("items", "Printed and measured", lambda s: list(s.items)),
    Section("summary", "Summary", lambda s: s.each(content.summary_table)),
    Section("gains", "Gains and losses", lambda s: s.each(content.gain_table)),
    Section("arena", "Against controls", lambda s: s.each(content.control_rows)),
    Section("curves", "Curves", lambda s: s.each(content.curve_data)),
    Section("cost", "Scores against bytes", lambda s: s.each(content.cost_data)),
    Section("clients", "Clients", lambda s: s.each(content.client_data)),
    Section("confusion", "Confusion matrices", lambda s: s.each(content.confusion_tables)),
    Section("clusters", "Clusters and edges", lambda s: s.each(content.cluster_data)),
    Section("bytes", "Bytes", lambda s: s.each(content.byte_table)),
    Section("settings", "Settings", lambda s: origin.settings_table(s.runs)),
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
    """Write the report of all runs under `paths`, and of the papers' items there.

    Damaged runs are left out and named, on the page and to `complain`. `command` is the command line to show, `view`
    the headline, and `also` lists columns that are shown on request only.
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
    """Return the templates' environment, which escapes all values."""
    return Environment(
        loader=PackageLoader("coterie.results.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )


def as_json(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(disk.json_values(value), separators=(",", ":")).replace("<", "\\u003c")


def render(
    runs: Sequence[Run],
    title: str = "",
    items: Sequence[dict[str, Any]] = (),
    warnings: Sequence[str] = (),
    command: str = "",
    view: str = "",
    also: Sequence[str] = (),
) -> str:
    """Return the page, with a part per group of runs with the same clients; `items` are tables of papers."""
    subject = Subject(runs, items, view, also)
    sections = [(s, s.data(subject)) for s in SECTIONS]
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title or _title(runs, items),
            sections=[{"id": s.id, "heading": s.heading, "data": data} for s, data in sections if data],
            warnings=[*warnings, *_warnings(runs), *(w for c in subject.groups.values() for w in c.warnings())],
            data=as_json(
                {
                    "views": content.CURVE_TITLES,
                    "groups": [content.script_data(g, c) for g, c in subject.groups.items()],
                }
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
            out.append(f"{name}: {s['nonfinite']} uploads were not finite and were excluded.")
        if s["failed"]:
            out.append(f"{name}: sampled clients failed {s['failed']} times.")
        if r.description["method"].get("certainty") == "C":
            out.append(f"{r.title} is reconstructed from its published description only.")
    return list(dict.fromkeys(out))
