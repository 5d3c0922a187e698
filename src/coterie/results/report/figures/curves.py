"""Figures of lines over rounds: metric, loss, bytes, norms of updates; and of the metric over bytes."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from coterie.errors import CoterieError
from coterie.results.controls import headline_view
from coterie.results.paper_metrics import official_curves
from coterie.results.report.figures import style
from coterie.results.run import IN_USE, Run
from coterie.results.statistics import cumulative_bytes

WINDOW = 10  # rounds of a running mean, for curves of participants, which are few in each round
_VIEW_WORDS = {  # labels after the metric's name
    "participants/before/pooled": "of participants before training",
    "participants/after/pooled": "of participants after training",
    f"{IN_USE}/test/mean": "of the models in use (personal or adapted), mean over clients",
    "personal/test/mean": "of personal models, mean over clients",
    "personal/official/mean": "of personal models on the official test part",
    "global/official/pooled": "of the global model on the official test part",
    "global/test/mean": "of the global model, mean over clients",
    "received/test/mean": "of the models as received, mean over clients",
    "trained/test/mean": "after local training, mean over clients",
    "edge/test/mean": "of the clusters' or edges' models, mean over clients",
    "adapted/test/mean": "after fine-tuning, mean over clients",
}


def best_view(runs: Sequence[Run]) -> str:
    """Return the first curve that all of these runs have: the headline, then personal models, then participants."""
    order = (f"{headline_view(runs) or IN_USE}/test/mean", "personal/test/mean", "participants/before/pooled")
    for view in (*order, *_VIEW_WORDS):
        if all(r.column(view) in r.rounds for r in runs):
            return view
    raise CoterieError("these runs have no scores in common to draw")


def view_label(runs: Sequence[Run], view: str) -> str:
    """Return the label of the axis of a curve."""
    metric = runs[0].metric
    return f"{metric.name} {_VIEW_WORDS[view]}" + (" (%)" if metric.percent else "") if view in _VIEW_WORDS else view


def over_rounds(runs: Sequence[Run], column: str, scale: float = 1.0) -> pd.DataFrame:
    """Return one column per title, mean over seeds; curves of participants are running means of ten rounds."""
    out = {}
    for title in dict.fromkeys(r.title for r in runs):
        mine = [(r.rounds, r.column(column)) for r in runs if r.title == title]
        curves = [rounds[name].dropna() for rounds, name in mine if name in rounds]
        if any(len(c) for c in curves):
            mean = pd.concat(curves, axis=1).mean(axis=1) * scale
            out[title] = mean.rolling(WINDOW).mean().dropna() if _noisy(column, len(mean)) else mean
    if not out:
        raise CoterieError(f"none of these runs has {column}")
    return pd.DataFrame(out).sort_index()


def _noisy(column: str, rounds: int) -> bool:
    return column.startswith("participants/") and rounds >= 3 * WINDOW


def megabytes(runs: Sequence[Run]) -> pd.DataFrame:
    """Return cumulative MB of all links and directions by round, one column per title, mean over seeds."""
    out = {}
    for title in dict.fromkeys(r.title for r in runs):
        sent = [cumulative_bytes(r.rounds) / 1e6 for r in runs if r.title == title]
        out[title] = pd.concat(sent, axis=1).mean(axis=1)
    return pd.DataFrame(out).sort_index()


def draw_rounds(runs: Sequence[Run], view: str = "") -> Figure:
    """Draw the task's metric against round."""
    view = view or best_view(runs)
    label = view_label(runs, view)
    smooth = any(_noisy(view, len(r.rounds)) for r in runs)
    return _lines(
        runs, lambda g: over_rounds(g, view, runs[0].metric.scale), label + (", mean of ten rounds" if smooth else "")
    )


def draw_official(runs: Sequence[Run]) -> Figure:
    """Draw FedPC's statistics on the official test part against round: a row of panels GM, PM(V), PM(L) per group."""
    curves = {r.path: 100 * official_curves(r) for r in runs}
    if all(c.empty for c in curves.values()):
        raise CoterieError("none of these runs was evaluated on the official test part (official = true)")
    groups, order = (list(dict.fromkeys(getattr(r, k) for r in runs)) for k in ("group", "title"))
    names = ("GM", "PM(V)", "PM(L)")
    figure, all_axes = style.panels(len(groups) * len(names), columns=len(names))
    for at, axes in enumerate(all_axes):
        group, name = groups[at // len(names)], names[at % len(names)]
        for i, title in enumerate(order):
            mine = [curves[r.path] for r in runs if (r.group, r.title) == (group, title)]
            values = [c[name].dropna() for c in mine if name in c]
            if values:
                mean = pd.concat(values, axis=1).mean(axis=1)
                axes.plot(mean.index, mean, label=title, markevery=_every(len(mean)), **style.line_style(i))
        style.whole_numbers(axes.xaxis)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{name} (%)")
        axes.set_title(group)
    style.legend(figure, max(all_axes, key=lambda a: len(a.get_legend_handles_labels()[1])))
    return figure


def draw_loss(runs: Sequence[Run]) -> Figure:
    """Draw the training loss of the participants against round.

    That is the loss of their models after training on all training samples, if all runs logged it (log_updates);
    otherwise the mean over the steps of training.
    """
    if all("note/train_loss" in r.rounds for r in runs):
        return _lines(runs, lambda g: over_rounds(g, "note/train_loss"), "loss of the participants on training data")
    return _lines(runs, lambda g: over_rounds(g, "loss"), "training loss of the participants")


def draw_update_norms(runs: Sequence[Run]) -> Figure:
    """Draw the norm of the mean update (AUN) against round; needs runs with log_updates."""
    if not any("note/aun" in r.rounds for r in runs):
        raise CoterieError("these runs did not log their updates; run them with --set log_updates=true")
    return _lines(runs, lambda g: over_rounds(g, "note/aun"), "norm of the mean update, AUN")


def draw_bytes(runs: Sequence[Run]) -> Figure:
    """Draw cumulative bytes against round."""
    return _lines(runs, megabytes, "sent so far, all links, up and down (MB)", zero=True)


def draw_cost(runs: Sequence[Run], view: str = "") -> Figure:
    """Draw the task's metric against bytes."""
    view = view or best_view(runs)
    groups = list(dict.fromkeys(r.group for r in runs))
    figure, all_axes = style.panels(len(groups))
    for axes, group in zip(all_axes, groups, strict=True):
        mine = [r for r in runs if r.group == group]
        values, spent = over_rounds(mine, view, runs[0].metric.scale), megabytes(mine)
        order = list(values.columns)
        shown = [t for t in order if spent[t].max() > 0]
        for title in shown:
            y = values[title].dropna()
            axes.plot(spent[title].reindex(y.index), y, label=title, markevery=_every(len(y)),
                      **style.line_style(order.index(title)))  # fmt: skip
        silent = [t for t in order if t not in shown]
        for title in silent:  # sends nothing: a horizontal line
            axes.axhline(values[title].dropna().iloc[-1], color=style.line_style(order.index(title))["color"],
                         linewidth=1.2, linestyle=":", label=f"{title} (sends nothing)")  # fmt: skip
        if shown:
            axes.set_xscale("log")
        axes.set_xlabel("sent so far, all links, up and down (MB, logarithmic)")
        axes.set_ylabel(_broken(view_label(runs, view)))
        axes.set_title(group)
    style.legend(figure, max(all_axes, key=lambda a: len(a.get_legend_handles_labels()[1])))
    return figure


def _lines(runs: Sequence[Run], data: object, label: str, zero: bool = False) -> Figure:
    groups = list(dict.fromkeys(r.group for r in runs))
    order = list(dict.fromkeys(r.title for r in runs))
    figure, all_axes = style.panels(len(groups), height=max(style.TALL, 0.24 * len(order)))
    for axes, group in zip(all_axes, groups, strict=True):
        mine = [r for r in runs if r.group == group]
        frame = data(mine)  # type: ignore[operator]  # a function of runs
        for title in frame.columns:
            y = frame[title].dropna()
            i = order.index(title)
            every = _every(len(y))
            start = (i * every) // max(len(order), 1)  # so that markers of close lines do not overlap
            for one in _by_seed(mine, title):  # thin lines for single seeds, a thick one for their mean
                y1 = data([one])[title].dropna()  # type: ignore[operator]
                axes.plot(y1.index, y1, color=style.line_style(i)["color"], linewidth=0.6, alpha=0.45)
            axes.plot(y.index, y, label=title, markevery=(start, every), **style.line_style(i))
        if zero:
            axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        style.whole_numbers(axes.xaxis)
        axes.set_xlabel("round")
        axes.set_ylabel(_broken(label))
        axes.set_title(group)
        style.name_lines(axes, {t: float(frame[t].dropna().iloc[-1]) for t in frame.columns}, order)
    return figure


def _by_seed(runs: Sequence[Run], title: str) -> list[Run]:
    """Return the runs of a mean; empty if there is only one."""
    mine = [r for r in runs if r.title == title]
    return mine if len(mine) > 1 else []


def _every(points: int) -> int:
    return max(1, points // 9)


def _broken(label: str) -> str:
    """Break a long label into two lines."""
    return label.replace(", ", ",\n", 1) if len(label) > 45 else label
