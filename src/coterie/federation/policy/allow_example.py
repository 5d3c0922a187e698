"""An example of a policy file (`--allow`) that allows one method with its default settings."""

import json
import math
from collections.abc import Iterator
from typing import Any

from coterie import methods
from coterie.config import RunSettings, settings
from coterie.engine.session import prepare
from coterie.federation.policy.allow import GOVERNED_SETTINGS, count_epochs
from coterie.models.zoo import ZOO

_SAMPLES = 1000  # training samples of a device, by which steps are converted to epochs


def example_policy(name: str) -> str:
    """Return the text of a policy file for a method; operators edit it for their hosts."""
    key = methods.registered_name(name)
    given = {"partition": "iid", "clients": 10, "join": 1.0, "val_share": 0.2, "public": 100}
    session = prepare(settings(key, data="digits", **given))
    method = session.method
    up, down = method.schema("up"), method.schema("down")
    kinds = [*sorted({kind for e in up.entries.values() for kind in e.kinds}), "scores"]
    epochs = max(
        count_epochs(method, phases, _SAMPLES) for phases in (method.phases(1), method.phases(2), method.adapt())
    )
    usual = {n: RunSettings.model_fields[n].default for n in GOVERNED_SETTINGS} | {
        "headline": session.settings.headline
    }
    lines = [
        f"# What a cloud may ask of this host: {method.card.title} with its default settings.",
        "# Allow more with a list of values, or with {min = 1, max = 2}; delete what you do not allow.",
        f"methods = {json.dumps([key])}",
        f"models = {json.dumps(sorted(ZOO))}",
        "",
        "[settings]  # of the run; a setting that is not listed must have its default value",
        *_values(RunSettings.model_fields, usual),
        "",
    ]
    if fields := methods.fields(key):
        lines += [f"[settings.{key}]", *_values(fields, methods.build_method(key).hp.model_dump(mode="json")), ""]
    lines += [
        "[bounds]",
        f"rounds = {session.settings.rounds}",
        f"epochs = {max(session.settings.epochs, math.ceil(10 * epochs) / 10):g}  # in a round, all phases together",
        f"# with the default model on digits a round receives {down.nbytes()} bytes and sends {up.nbytes()};",
        "# allow more for evaluations, and for a round that is repeated after a failure",
        '# bytes_down = "20 MB"',
        '# bytes_up = "20 MB"',
        "",
        "[leave]",
        f"kinds = {json.dumps(kinds)}  # scores: counts of correct predictions per class",
        'entries = ["*"]  # names, with * and ?',
    ]
    return "\n".join(lines) + "\n"


def _values(fields: Any, chosen: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that is one TOML value; the others keep their defaults."""
    for name, value in chosen.items():
        if isinstance(value, bool | int | float | str):
            about = " ".join(str(fields[name].description or "").split())
            yield f"{name} = {json.dumps(value)}" + (f"  # {about}" if about else "")
