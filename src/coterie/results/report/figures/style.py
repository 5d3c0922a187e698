"""The common style of all figures: Okabe and Ito's colours, with markers and dashes for grey print."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from sklearn.isotonic import isotonic_regression

from coterie.errors import CoterieError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a7a7a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", "8", "H", "1")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")
FONTS: Any = {
    "font.size": 9, "axes.labelsize": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.3, "grid.linewidth": 0.5, "svg.fonttype": "path", "svg.hashsalt": "coterie",
    "pdf.fonttype": 42, "ps.fonttype": 42,
    "hatch.linewidth": 0.5,
}  # fmt: skip
WIDE, TALL = 6.3, 3.7  # inches; the text width of an A4 page


def panels(count: int, width: float = WIDE, height: float = TALL, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes, at most `columns` in a row."""
    across = min(columns, count)
    down = -(-count // across)
    with mpl.rc_context(FONTS):
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(down, across, i + 1) for i in range(count)]
    return figure, axes


def line_style(index: int) -> dict[str, Any]:
    """Return the style of the line with this index."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 1.4,
        "markersize": 6 if MARKERS[index % len(MARKERS)] in "*PX1" else 4.2,
        "markeredgewidth": 0.5,
        "markeredgecolor": "white" if MARKERS[index % len(MARKERS)] != "1" else None,
    }


def name_lines(axes: Axes, ends: Mapping[str, float], order: Sequence[str]) -> None:
    """Write names with a piece of each line right of the axes, at the height where it ends, without overlaps."""
    low, high = axes.get_ylim()
    heights = [(max(low, min(high, y)) - low) / (high - low) for y in ends.values()]
    placed = spread_apart(heights, 0.058 if len(ends) < 16 else 0.9 / len(ends))
    for (name, y), at in zip(ends.items(), placed, strict=True):
        look = line_style(list(order).index(name))
        axes.annotate(
            "", xy=(1.0, (y - low) / (high - low)), xytext=(1.045, at), xycoords="axes fraction",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look["color"], "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        piece = Line2D([1.045, 1.08, 1.115], [at] * 3, transform=axes.transAxes, clip_on=False, markevery=[1], **look)
        axes.add_artist(piece)  # add_line would change the limits of the axes
        axes.text(1.13, at, name, transform=axes.transAxes, va="center", fontsize=8, color=look["color"])


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights within 0..1 that are at least `gap` apart, moved as little as possible (least squares)."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    steps = np.arange(len(heights)) * gap
    room = max(0.0, 1.0 - gap * (len(heights) - 1))
    at = np.clip(isotonic_regression(np.array([heights[i] for i in order]) - steps), 0.0, room) + steps
    back = [0.0] * len(heights)
    for k, i in enumerate(order):
        back[i] = float(at[k])
    return back


def legend(figure: Figure, axes: Axes) -> None:
    """Put a legend below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        room = figure.get_figwidth() * 72 / (5 * max(map(len, names)) + 38)
        columns = max(1, min(len(names), int(room), 5))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def whole_numbers(axis: Axis) -> None:
    """Use whole numbers as ticks, for clients and rounds."""
    axis.set_major_locator(MaxNLocator(integer=True))


SUFFIXES = (".png", ".svg", ".pdf")
DATELESS: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None, "ModDate": None}}


def save_figure(figure: Figure, path: Path, dpi: int = 200) -> list[Path]:
    """Write PNG, SVG and PDF files with embedded fonts, whichever suffix the path has; return their paths."""
    if path.suffix.lower() not in ("", *SUFFIXES):
        raise CoterieError(f'a figure is written as .png, .svg and .pdf, not "{path.suffix}"')
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in SUFFIXES]
    with mpl.rc_context(FONTS):
        for file in files:
            figure.savefig(file, dpi=dpi, metadata=DATELESS.get(file.suffix))
    return files
