"""The facts about methods that `coterie list` and `coterie show` print.

The facts of the built-in methods are stored in a file, one line each, so that these commands start without PyTorch.
`python -m coterie.cli.method_facts` (`make catalogue`) writes it; a test compares it with the code.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.words import NEEDS, bounds_words, families, parents, source, type_words

if TYPE_CHECKING:  # the command line starts without torch
    from coterie.cli.traffic import Traffic
    from coterie.core.method import Method, Settings

FACTS_FILE = Path(__file__).parent / "method_facts.jsonl"
_GROUP = "coterie.methods"  # entry points of other packages
_WEIGHTS = {"samples": "clients count by their samples", "uniform": "clients count alike"}
_PAYLOAD = ("link", "entry", "shape", "type", "kind", "bytes")

Facts = dict[str, Any]


@cache
def stored_facts() -> dict[str, Facts]:
    """Return the stored facts of the built-in methods by name."""
    lines = FACTS_FILE.read_text(encoding="utf-8").splitlines()
    return {facts["name"]: facts for facts in map(json.loads, lines)}


def all_facts() -> dict[str, Facts]:
    """Return the facts of all methods by name: stored ones, and without payloads those of other packages."""
    others = sorted({p.name for p in entry_points(group=_GROUP)} - stored_facts().keys())
    return dict(sorted({**stored_facts(), **_facts_of_others(others)}.items())) if others else stored_facts()


def show_facts(name: str) -> Facts:
    """Return the facts of one method; raise CoterieError if the name is unknown."""
    plain = name.lower().replace("_", "-")
    for key in (plain, plain.replace("-", "")):
        if key in stored_facts():
            return stored_facts()[key]
    from coterie.methods import find, registered_name

    key = registered_name(name)
    return {**facts_of(key, {key: find(name)}), "payloads": _payloads(key)}


def facts_of(name: str, found: Mapping[str, "type[Method]"]) -> Facts:
    """Return what the code says about a method, as values of JSON; its variants are among the classes found."""
    m, above = found[name], parents(found)
    facts = {
        "name": name,
        "title": m.card.title,
        "paper": m.card.paper,
        "year": m.card.year or None,
        "idea": (inspect.getdoc(inspect.getmodule(m)) or "").partition("\n\n")[2].strip(),
        "family": families(m.card.family),
        "personal": m.card.personal,
        "needs": [NEEDS.get(n, n) for n in m.needs],
        "weights": _WEIGHTS[m.weighting],
        "source": source(m),
        "parent": above[name],
        "variants": [v for v in found if above[v] == name],
        "settings": _settings(m.Settings),
        "readings": _readings(m.Settings),
    }
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def _facts_of_others(names: list[str]) -> dict[str, Facts]:
    """Return the facts of methods of other packages; a package that cannot be loaded must not hide the others."""
    from coterie.errors import CoterieError
    from coterie.methods import find

    found, made = dict[str, "type[Method]"](), dict[str, Facts]()
    for name in names:
        try:
            found[name] = find(name)
        except CoterieError as e:
            made[name] = {
                "name": name, "title": str(e), "year": None, "family": [], "personal": str(e), "needs": [],
                "source": "", "parent": None, "variants": [],
            }  # fmt: skip
    return made | {name: facts_of(name, found) for name in found}


def _payloads(name: str, traffic: "Traffic | None" = None) -> list[Facts]:
    """Return the entries that may cross a link, for the default model; nothing if the method does not fit it."""
    from coterie.cli.payload_table import payload_rows
    from coterie.cli.traffic import Traffic

    bound = (traffic or Traffic(None, "digits", None)).bound(name)
    return [] if bound is None else [{k: asdict(row)[k] for k in _PAYLOAD} for row in payload_rows(bound)]


def _settings(settings: "type[Settings]") -> list[Facts]:
    """Each setting with its default (of the default reading), possible values, bounds and meaning."""
    from coterie.parts.readings import ReadingSettings

    resolved = settings().model_dump() if issubclass(settings, ReadingSettings) else {}
    return [
        {
            "name": name,
            "default": resolved.get(name, f.default),
            "values": type_words(f.annotation),
            "bounds": bounds_words(f.metadata),
            "meaning": f.description or "",
        }
        for name, f in settings.model_fields.items()
    ]


def _readings(settings: "type[Settings]") -> dict[str, Facts]:
    """Return the settings of each reading; a variant's own defaults stand in all of them."""
    from coterie.parts.readings import ReadingSettings

    if not issubclass(settings, ReadingSettings):
        return {}
    presets = {name: settings(**{"reading": name}) for name in settings.readings}
    names = dict.fromkeys(name for reading in presets for name in settings.preset(reading))
    return {reading: {name: getattr(hp, name) for name in names} for reading, hp in presets.items()}


def written_facts() -> str:
    """Return the content of the file for the methods as they are."""
    from coterie.cli.traffic import Traffic
    from coterie.methods import BUILT_IN, find

    found = {name: find(name) for name in sorted(BUILT_IN)}
    traffic = Traffic(None, "digits", None)
    made = ({**facts_of(name, found), "payloads": _payloads(name, traffic)} for name in found)
    return "".join(f"{json.dumps(facts)}\n" for facts in made)


if __name__ == "__main__":
    FACTS_FILE.write_text(written_facts(), encoding="utf-8")
