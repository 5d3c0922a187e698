"""Figures of runs: functions from runs to a matplotlib Figure; `save_figure` writes PNG, SVG and PDF."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from coterie.errors import CoterieError, unknown
from coterie.results.report.figures import bars, curves, forest, groups
from coterie.results.report.figures.style import FONTS, save_figure
from coterie.results.run import Run

KINDS: dict[str, tuple[Callable[..., Figure], tuple[str, ...], str]] = {  # name -> function, its options, description
    "rounds": (curves.draw_rounds, ("view",), "accuracy (or the metric of the task) against round"),
    "official": (curves.draw_official, (), "GM, PM(V) and PM(L) on the official test part against round"),
    "loss": (curves.draw_loss, (), "training loss against round"),
    "bytes": (curves.draw_bytes, (), "cumulative bytes against round"),
    "cost": (curves.draw_cost, ("view",), "accuracy against bytes"),
    "aun": (curves.draw_update_norms, (), "norm of the mean update against round"),
    "bars": (bars.draw_bars, ("value", "label"), "one bar per method and data set"),
    "axis": (bars.draw_axis, ("axis", "value", "label", "axis_label"), "accuracy against a setting"),
    "clients": (bars.draw_clients, (), "every client's accuracy, and its gain over Local-Only"),
    "arena": (forest.draw_controls, ("score", "against"), "paired differences to controls, with intervals"),
    "layers": (groups.draw_layers, (), "the layer each client keeps, and where runs agree"),
    "sizes": (groups.draw_cluster_sizes, (), "sizes of the clusters"),
    "similarity": (groups.draw_similarity, (), "similarity of the clients' models, by cluster"),
    "labels": (groups.draw_labels, (), "labels by client"),
}


def draw(kind: str, runs: Sequence[Run], **options: Any) -> Figure:
    """Return a figure of one kind; options that the kind does not have are ignored."""
    if kind not in KINDS:
        raise unknown("kind of figure", kind, KINDS)
    ready = [r for r in runs if r.events]
    if not ready:
        raise CoterieError("none of these runs has finished a round yet")
    function, takes, _ = KINDS[kind]
    if kind == "axis" and not options.get("axis"):
        raise CoterieError("name the setting to draw against, for example --axis join")
    with mpl.rc_context(FONTS):
        return function(ready, **{k: v for k, v in options.items() if k in takes and v})


__all__ = ["KINDS", "draw", "save_figure"]
