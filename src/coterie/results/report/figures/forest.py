"""A forest plot of methods and their controls: paired differences with intervals."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from coterie.errors import CoterieError
from coterie.results.controls import control_tables, gain_unit, heading
from coterie.results.report.figures import style
from coterie.results.run import Run


def draw_controls(runs: Sequence[Run], score: str = "", against: Sequence[str] = ()) -> Figure:
    """Draw a panel for each method and group of clients, with one line per control.

    A line shows the difference in points and its 95 % interval.
    """
    panels = [
        (a.group, label, [p for p in a.pairs if p.row.label == label])
        for a in control_tables(runs, against, score)
        for label in dict.fromkeys(p.row.label for p in a.pairs)
    ]
    if not panels:
        raise CoterieError("these runs hold no method together with a control of it")
    most = max(len(pairs) for _, _, pairs in panels)
    figure, all_axes = style.panels(len(panels), width=style.WIDE, height=0.9 + 0.3 * most)
    for axes, (group, label, pairs) in zip(all_axes, panels, strict=True):
        y = np.arange(len(pairs))[::-1]
        metric = next(iter(pairs[0].row.runs.values())).metric
        ends = [np.array([getattr(p.difference, k) for p in pairs]) for k in ("mean", "low", "high")]
        middle, low, high = (metric.scale * v for v in ends)
        for at, m, a, b in zip(y, middle, low, high, strict=True):
            # blue: the whole interval above 0, red: below, grey: neither
            colour = style.COLOURS[0] if a > 0 else style.COLOURS[1] if b < 0 else style.COLOURS[7]
            axes.errorbar(m, at, xerr=[[m - a], [b - m]], fmt="o", color=colour, capsize=3, markersize=5)
        axes.axvline(0, color="black", linewidth=0.8)
        counts = [f"{p.difference.gain} gain, {p.difference.lose} lose" for p in pairs]
        axes.set_yticks(y, [p.against.label for p in pairs])
        axes.set_ylim(-0.6, len(pairs) - 0.4)
        right = axes.secondary_yaxis("right")
        right.set_yticks(y, counts)
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"difference in {gain_unit(metric)}, 95 % interval over {pairs[0].difference.covers}")
        axes.set_title(f"{label} against controls; {group + '; ' if group else ''}{heading(pairs[0])}")
    return figure
