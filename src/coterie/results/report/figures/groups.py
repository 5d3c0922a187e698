"""Figures of groups of clients: layers that clients keep, sizes of clusters, similarity of clients."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from coterie.core.edges import EdgeMethod
from coterie.data.overview import partition_figure
from coterie.errors import CoterieError
from coterie.results.bootstrap import FloatArray
from coterie.results.report.figures import style
from coterie.results.run import Run
from coterie.storage.checkpoint import newest


def facts(run: Run, name: str) -> Any:
    """Return the newest value of a fact that the method logs, or None."""
    return next((e["facts"][name] for e in reversed(run.events) if name in e.get("facts", {})), None)


def layer_of(run: Run) -> dict[int, str]:
    """Return client -> the layer that it keeps."""
    layers = facts(run, "layer")
    if not isinstance(layers, Mapping):
        raise CoterieError(f"{run.title} does not let clients choose a layer, so {run.path} has no layer map")
    return {int(i): str(layer) for i, layer in layers.items()}


def agreement(choices: Sequence[Mapping[int, str]]) -> dict[int, int]:
    """Return client -> number of choices that are equal to the most frequent one."""
    clients = sorted(set.intersection(*(set(c) for c in choices)))
    return {i: max(Counter(c[i] for c in choices).values()) for i in clients}


def draw_layers(runs: Sequence[Run]) -> Figure:
    """Draw a cell per client, coloured by its layer; the last panel counts runs that agree, darker for more."""
    chosen = [r for r in runs if isinstance(facts(r, "layer"), Mapping)]
    if not chosen:
        layer_of(runs[0])
    groups = list(dict.fromkeys(r.group for r in chosen))
    names = list(dict.fromkeys(layer for r in chosen for layer in r.description.get("layers", ())))
    names = names or sorted({n for r in chosen for n in layer_of(r).values()}, key=_depth)
    per = {g: list({r.title: r for r in chosen if r.group == g}.values()) for g in groups}  # one seed of each
    seeds = len({r.settings["seed"] for r in chosen})
    most = max(len(v) for v in per.values())
    across = most + (most > 1)
    figure, axes = style.panels(across * len(groups), width=2.2, height=2.95, columns=across)
    for row, group in enumerate(groups):
        row_axes = axes[row * across : (row + 1) * across]
        for panel, run in zip(row_axes, per[group], strict=False):
            title = f"{run.title}, seed {run.settings['seed']}" if seeds > 1 else run.title
            _map(panel, layer_of(run), {n: i for i, n in enumerate(names)}, title, len(names))
        for panel in row_axes[len(per[group]) :]:
            panel.set_visible(False)
        if len(per[group]) > 1:
            row_axes[len(per[group])].set_visible(True)
            _agreement(row_axes[len(per[group])], per[group])
        row_axes[0].set_ylabel(group)
    handles = [Patch(color=style.COLOURS[i], label=f"{i + 1}: {n}") for i, n in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    return figure


def _depth(layer: str) -> tuple[bool, str]:
    """Return a key that sorts layers by name, with classifier and head last."""
    return "class" in layer or "head" in layer, layer


def _grid(n: int) -> tuple[int, int]:
    across = int(np.ceil(np.sqrt(n)))
    return -(-n // across), across


def _map(axes: Any, of: Mapping[int, str], code: Mapping[str, int], title: str, kinds: int) -> None:
    down, across = _grid(max(of) + 1)
    grid = np.full((down, across), np.nan)
    for client, layer in of.items():
        grid[client // across, client % across] = code[layer]
        axes.text(client % across, client // across, str(code[layer] + 1), ha="center", va="center", fontsize=5.5,
                  color="white")  # fmt: skip
    axes.imshow(grid, cmap=ListedColormap(style.COLOURS[:kinds]), vmin=-0.5, vmax=kinds - 0.5)
    _bare(axes, title, down, across)


def _agreement(axes: Any, runs: Sequence[Run]) -> None:
    same = agreement([layer_of(r) for r in runs])
    down, across = _grid(max(same) + 1)
    grid = np.full((down, across), np.nan)
    for client, n in same.items():
        grid[client // across, client % across] = n
        axes.text(client % across, client // across, str(n), ha="center", va="center", fontsize=5.5,
                  color="white" if n > 0.6 * len(runs) else "black")  # fmt: skip
    axes.imshow(grid, cmap="cividis_r", vmin=0, vmax=len(runs))
    _bare(axes, f"number of {len(runs)} runs that agree with each other", down, across)


def _bare(axes: Any, title: str, down: int, across: int) -> None:
    axes.set_title(textwrap.fill(title, 26), fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.set_xlabel(f"clients 0 to {down * across - 1}, row by row" if down > 1 else "clients", fontsize=7)


def cluster_sizes(run: Run) -> dict[str, int]:
    """Return cluster -> number of its clients, from the facts that the method logs, if any."""
    for name in ("clusters", "sizes", "picked"):
        fact = facts(run, name)
        if isinstance(fact, Mapping) and fact:
            if all(isinstance(k, str) and k.isdigit() for k in fact):  # client -> cluster
                return {str(k): n for k, n in sorted(Counter(fact.values()).items())}
            return {str(k): int(v) for k, v in fact.items()}
        if isinstance(fact, Sequence) and fact and not isinstance(fact, str):
            return {str(k): int(v) for k, v in enumerate(fact)}
    return {}


def draw_cluster_sizes(runs: Sequence[Run]) -> Figure:
    """Draw a bar per run, divided into its clusters."""
    sizes = sorted(((r, s) for r in runs if (s := cluster_sizes(r))), key=lambda pair: pair[0].group)
    if not sizes:
        raise CoterieError("none of these methods makes clusters")
    several = len({r.group for r, _ in sizes}) > 1
    figure, (axes,) = style.panels(1, height=max(1.8, 0.34 * len(sizes) + 1.2))
    names = sorted({n for _, s in sizes for n in s}, key=lambda n: (_depth(n), n.zfill(4)))
    for y, (_run, size) in enumerate(sizes):
        left = 0
        for n in names:
            if n not in size:
                continue
            i = names.index(n)
            axes.barh(y, size[n], left=left, color=style.COLOURS[i % 8], hatch=style.HATCHES[i % 8], height=0.7,
                      edgecolor="white", linewidth=0.6)  # fmt: skip
            text = f"{n}: {size[n]}" if not n.isdigit() else str(size[n])
            if size[n] > 0.04 * sum(size.values()):
                axes.text(left + size[n] / 2, y, text, ha="center", va="center", fontsize=7, color="black",
                          bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8})  # fmt: skip
            left += size[n]
    names_of = [_with_seed(r, [x for x, _ in sizes]) for r, _ in sizes]
    axes.set_yticks(
        range(len(sizes)), [f"{n}\n{r.group}" if several else n for n, (r, _) in zip(names_of, sizes, strict=True)]
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    style.whole_numbers(axes.xaxis)
    axes.set_xlabel("clients in each cluster")
    return figure


def _with_seed(run: Run, among: Sequence[Run]) -> str:
    """Return the run's name, with its seed if there are several."""
    several = len({r.settings["seed"] for r in among if (r.title, r.group) == (run.title, run.group)}) > 1
    return f"{run.title}, seed {run.settings['seed']}" if several else run.title


def cluster_by_client(run: Run) -> dict[int, int]:
    """Return client -> cluster at the newest checkpoint; all in one cluster if the method has none."""
    session = run.session()
    method = session.method
    server = newest(run.path, type(method).__name__).server
    edges = method.edges(server) if isinstance(method, EdgeMethod) else None
    if edges:
        return {int(i): k for k, (_, ids) in enumerate(sorted(edges.items())) for i in ids}
    clusters = server.get("cluster") if isinstance(server, Mapping) else None
    if isinstance(clusters, Mapping) and clusters:
        return {int(i): int(k) for i, k in clusters.items()}
    return dict.fromkeys(map(int, session.method.ctx.clients), 0)


def cosines(run: Run) -> tuple[list[int], FloatArray]:
    """Return clients in the order of their clusters, and the cosines between the changes of their personal models."""
    of, saved = cluster_by_client(run), run.saved()
    session, trees = saved.session, saved.personal_trees()
    order = sorted(trees, key=lambda i: (of.get(i, len(of)), i))
    w0, names = session.method.ctx.w0, [k for k in session.method.ctx.w0 if k in session.method.ctx.net.trainable]
    names = [k for k in names if all(k in tree for tree in trees.values())]
    if not order or not names:
        raise CoterieError(f"the clients of {run.title} have no parameters in common to compare")
    rows = [torch.cat([(trees[i][k] - w0[k]).flatten() for k in names]) for i in order]
    V = torch.nn.functional.normalize(torch.stack(rows).double(), dim=1)  # [clients, P]
    return order, (V @ V.T).numpy()


def draw_similarity(runs: Sequence[Run]) -> Figure:
    """Draw cosines of the clients' models, sorted by cluster, with the clusters' borders; other runs are named."""
    panels, reasons = [], []
    for run in runs:
        try:
            panels.append((run, *cosines(run), cluster_by_client(run)))
        except CoterieError as e:
            reasons.append(str(e))
    if not panels:
        raise CoterieError("; ".join(dict.fromkeys(reasons)))
    figure, all_axes = style.panels(len(panels), width=4.2, height=3.9)
    for axes, (run, order, C, of) in zip(all_axes, panels, strict=True):
        image = axes.imshow(C, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")  # one scale for all figures
        figure.colorbar(image, ax=axes, label="cosine of the models' changes", shrink=0.85, ticks=[-1, -0.5, 0, 0.5, 1])
        starts = [k for k in range(len(order)) if k == 0 or of.get(order[k]) != of.get(order[k - 1])]
        for k in starts[1:]:
            axes.axhline(k - 0.5, color="black", linewidth=0.8)
            axes.axvline(k - 0.5, color="black", linewidth=0.8)
        name = _with_seed(run, [r for r, *_ in panels])
        axes.set_title(f"{name}: {len(starts)} cluster{'s' if len(starts) > 1 else ''}")
        axes.set_xlabel("clients, by cluster")
        axes.set_ylabel("clients, by cluster")
        axes.grid(False)
        if len(order) <= 24:
            names = [str(i) for i in order]
            axes.set_xticks(range(len(order)), names, fontsize=7 if len(order) <= 12 else 5)
            axes.set_yticks(range(len(order)), names, fontsize=7 if len(order) <= 12 else 5)
        else:  # too many clients to name: name the clusters
            ends = [*starts[1:], len(order)]
            at = [(a + b - 1) / 2 for a, b in zip(starts, ends, strict=True) if b - a >= len(order) / 20]
            texts = [str(of.get(order[int(x)], "")) for x in at] if len(starts) > 1 else []
            axes.set_xticks(at if texts else [], texts or None)
            axes.set_yticks(at if texts else [], texts or None)
            axes.set_xlabel("clients; ticks are clusters" if texts else "clients")
            axes.set_ylabel("clients; ticks are clusters" if texts else "clients")
    if reasons:
        left_out = textwrap.fill("left out: " + "; ".join(dict.fromkeys(reasons)), 75 * min(2, len(panels)))
        figure.supxlabel(left_out, fontsize=6)
    return figure


def draw_labels(runs: Sequence[Run]) -> Figure:
    """Draw the labels by client of the first run's partition."""
    return partition_figure(runs[0].session().federation)
