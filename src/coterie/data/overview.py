"""Show a partition as a table and as a picture of labels by client."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from coterie.data.dataset import Ints
from coterie.data.federation import Federation
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 30  # clients in a table
_BUBBLES = 60  # largest number of clients and of classes for which bubbles are readable
_HEAT_ROWS = 300  # clients in a heat map
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")  # Okabe and Ito


def partition_table(fed: Federation) -> Table:
    """Return a table of sizes and labels per client; if there are many clients, of evenly spaced ones."""
    counts = fed.label_counts("all")
    total = counts.sum(axis=1)
    clients = _spread(len(total), _ROWS)
    title = f"{_title(fed)}: {len(total)} clients, {total.sum()} samples"
    out = Table(title=title, caption=_caption(fed, counts, len(clients)), caption_justify="left")
    out.add_column("client", justify="right")
    for part in ("train", "val", "test", "labels"):
        out.add_column(part, justify="right")
    out.add_column("largest labels")
    if fed.groups is not None:
        out.add_column("rotated", justify="right")
    sizes = [fed.sizes(p) for p in ("train", "val", "test")]
    for i in clients:
        rotated = [] if fed.groups is None else [f"{fed.rotation(i):g}°"]
        parts = [*(str(s[i]) for s in sizes), str((counts[i] > 0).sum())]
        out.add_row(fed.names[i], *parts, _largest(counts[i], fed.dataset.strata[1]), *rotated)
    return out


def partition_rows(fed: Federation) -> list[dict[str, Any]]:
    """Return sizes and labels of all clients as plain values."""
    counts, names = fed.label_counts("all"), fed.dataset.strata[1]
    sizes = {part: fed.sizes(part) for part in ("train", "val", "test")}
    return [
        {
            "client": int(i),
            **{part: int(n[i]) for part, n in sizes.items()},
            "labels": {str(names[k]): int(c) for k, c in enumerate(counts[i]) if c},
        }
        for i in range(len(counts))
    ]


def draw_partition(fed: Federation, path: Path) -> Path:
    """Write the picture of labels by client as PNG, SVG or PDF, by the suffix, and return the path."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CoterieError(f'a picture is written as .png, .svg or .pdf, not "{path.suffix}"')
    if not path.absolute().parent.is_dir():
        raise CoterieError(f"the folder {path.absolute().parent} for the picture does not exist")
    partition_figure(fed).savefig(path, dpi=150)
    return path


def partition_figure(fed: Federation) -> "Figure":
    """Plot labels by client as bubbles, or as a heat map if there are too many for bubbles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = fed.label_counts("all")
    few = max(counts.shape) <= _BUBBLES
    n, k = counts.shape
    width = min(max(6.0, 0.22 * min(n, _BUBBLES) + 2.5), 16.0)
    height = min(max(3.5, 0.24 * min(k, _BUBBLES) + 2.0), 12.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if few:
        _bubbles(axes, fed, counts)
    else:
        rows = np.array(_spread(n, _HEAT_ROWS))
        image = axes.imshow(
            np.log10(1 + counts[rows].T), aspect="auto", cmap="cividis", interpolation="nearest", origin="lower"
        )
        figure.colorbar(image, ax=axes, label="log10 (1 + samples)")
        axes.set_xlabel("client" if len(rows) == n else f"client ({len(rows)} of {n}, evenly picked)")
        ticks = np.unique(np.linspace(0, len(rows) - 1, 9).astype(int))
        axes.set_xticks(ticks, [str(rows[t]) for t in ticks])
    if k <= _BUBBLES:
        axes.set_yticks(range(k), [c[:24] for c in fed.dataset.strata[1]], fontsize=8 if k <= 30 else 6)
    axes.set_ylabel("label" if fed.num_classes else "target")
    axes.set_title(_title(fed), fontsize=11)
    return figure


def _bubbles(axes: Any, fed: Federation, counts: Ints) -> None:
    client, label = np.nonzero(counts)
    held = counts[client, label]
    groups = np.zeros(len(counts), int) if fed.groups is None else fed.groups
    colours = np.array(_COLOURS)[groups[client] % len(_COLOURS)]
    axes.scatter(client, label, s=220 * held / counts.max(), c=colours, alpha=0.8, linewidths=0)
    largest = int(counts.max())
    for n in sorted({largest, max(1, largest // 4)}):  # legend of the areas
        axes.scatter([], [], s=220 * n / largest, c=_COLOURS[0], alpha=0.8, linewidths=0, label=f"{n} samples")
    for g in np.unique(groups) if fed.groups is not None else ():
        degrees = fed.rotation(int(np.flatnonzero(groups == g)[0]))
        axes.scatter([], [], s=60, marker="s", c=_COLOURS[g % len(_COLOURS)], label=f"rotated {degrees:g}°")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelspacing=1.2, fontsize=8)
    axes.set_xlabel("client")
    ticks = _spread(len(counts), 21)
    axes.set_xticks(ticks, [fed.names[i] for i in ticks], rotation=45 if max(map(len, fed.names)) > 3 else 0)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.06)


def _title(fed: Federation) -> str:
    return f"{fed.settings.scheme} of {fed.dataset.name}, seed {fed.seed}"


def _caption(fed: Federation, counts: Ints, shown: int) -> str:
    total, labels = counts.sum(axis=1), (counts > 0).sum(axis=1)
    text = (
        f"samples per client: {total.min()} to {total.max()}, median {np.median(total):g}; "
        f"labels per client: {labels.min()} to {labels.max()}, median {np.median(labels):g}"
    )
    if shown < len(total):
        text += f"; {shown} of {len(total)} clients shown, evenly picked"
    if fed.settings.public:
        text += f"; {fed.settings.public} public items"
    return text


def _largest(counts: Ints, classes: tuple[str, ...]) -> str:
    top = [i for i in np.argsort(-counts, kind="stable")[:4] if counts[i] > 0]
    rest = int((counts > 0).sum()) - len(top)
    return ", ".join(f"{classes[i]}: {counts[i]}" for i in top) + (f", {rest} more" if rest else "")


def _spread(n: int, limit: int) -> list[int]:
    """Return at most `limit` client numbers, evenly spaced."""
    return list(range(n)) if n <= limit else sorted({int(i) for i in np.linspace(0, n - 1, limit)})
