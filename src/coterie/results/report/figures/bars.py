"""Figures of one number per run: bars of ablations, lines over a setting, and the gain of each client."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.errors import CoterieError
from coterie.results.controls import gain_sign, gain_unit
from coterie.results.discovery import local_only_title, run_name, setting
from coterie.results.report.figures import style
from coterie.results.run import IN_USE, Run
from coterie.results.statistics import gain_counts

_Value = Callable[[Run], float]


def headline_score(run: Run) -> float:
    """Return the last score of the run's headline, or of participants before training if no client was scored."""
    summary = run.summary()
    for view in (run.headline, "personal"):
        if view in summary:
            return float(summary[view]["last"])
    if "participants_before_last10" not in summary:
        raise CoterieError(f"{run.title} has no accuracy yet in {run.path}")
    return float(summary["participants_before_last10"])


def heights(runs: Sequence[Run], value: _Value = headline_score) -> pd.DataFrame:
    """Return means over seeds (accuracies in percent), titles by groups, and standard deviations as `± GROUP`."""
    rows: dict[str, dict[str, float]] = {}
    for title in dict.fromkeys(r.title for r in runs):
        for group in dict.fromkeys(r.group for r in runs):
            values = [r.metric.scale * value(r) for r in runs if (r.title, r.group) == (title, group)]
            if values:
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
                rows.setdefault(title, {}).update({group: float(np.mean(values)), f"± {group}": spread})
    return pd.DataFrame(rows).T


def draw_bars(runs: Sequence[Run], value: _Value = headline_score, label: str = "") -> Figure:
    """Draw one group of bars per data set, one bar per method."""
    frame = heights(runs, value)
    groups = [c for c in frame.columns if not c.startswith("± ")]
    figure, (axes,) = style.panels(1, width=max(style.WIDE, 0.2 * len(groups) * len(frame) + 2))
    width = 0.82 / len(frame)
    for i, title in enumerate(frame.index):
        at = np.arange(len(groups)) + (i - (len(frame) - 1) / 2) * width
        y = frame.loc[title, groups].astype(float).to_numpy()
        spread = frame.loc[title, [f"± {g}" for g in groups]].astype(float).to_numpy()
        drawn = axes.bar(at, y, width * 0.92, yerr=np.nan_to_num(spread) if np.isfinite(spread).any() else None,
                         color=style.COLOURS[i % 8], hatch=style.HATCHES[i % 8], edgecolor="white", linewidth=0.4,
                         label=title, error_kw={"linewidth": 0.8})  # fmt: skip
        if len(groups) * len(frame) <= 24:
            crowded = len(groups) * len(frame) > 12
            digits = "%.1f" if runs[0].metric.percent else "%.3g"
            axes.bar_label(drawn, fmt=digits, fontsize=7, padding=2, rotation=90 if crowded else 0)
    axes.set_xticks(range(len(groups)), groups)
    label = label or runs[0].metric.label
    axes.set_ylabel(label)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))  # the length of a bar is its value
    axes.margins(y=0.08)
    axes.grid(axis="x", visible=False)
    style.legend(figure, axes)
    return figure


def position(run: Run, axis: str) -> float:
    """Return the value of a setting as a number; for a partition, the last number in its name: 4 for rotate(4)."""
    value: Any = setting(run, axis)
    if isinstance(value, str):
        numbers = re.findall(r"\d+(?:\.\d+)?", value)
        if not numbers:
            raise CoterieError(f'the setting "{axis}" of {run.title} is "{value}", which is not a number')
        value = numbers[-1]
    return float(value)


def over_axis(runs: Sequence[Run], axis: str, value: _Value = headline_score) -> dict[str, dict[str, pd.DataFrame]]:
    """Return data set -> method -> mean and std (accuracies in percent) by the setting's value."""
    out: dict[str, dict[str, pd.DataFrame]] = {}
    for panel in dict.fromkeys(r.data for r in runs):
        mine = [r for r in runs if r.data == panel]
        for name in dict.fromkeys(_method(r, axis) for r in mine):
            points = [(position(r, axis), r.metric.scale * value(r)) for r in mine if _method(r, axis) == name]
            frame = pd.DataFrame(points, columns=["at", "value"]).groupby("at")["value"].agg(["mean", "std"])
            out.setdefault(panel, {})[name] = frame
    return out


def _method(run: Run, axis: str) -> str:
    """Return the name of the run's line: the method, if titles differ by the value of the setting only."""
    if run.apart:
        return run_name(run, without=axis)
    own = str(run.description["method"]["title"])
    return own if axis in run.description["method"]["settings"] or re.search(r"[_=]\d", run.title) else run.title


def draw_axis(
    runs: Sequence[Run], axis: str, value: _Value = headline_score, label: str = "", axis_label: str = ""
) -> Figure:
    """Draw the task's metric against a setting."""
    data = over_axis(runs, axis, value)
    figure, all_axes = style.panels(len(data), width=4.6)
    order = list(dict.fromkeys(n for lines in data.values() for n in lines))
    for axes, (panel, lines) in zip(all_axes, data.items(), strict=True):
        for name, frame in lines.items():
            axes.errorbar(frame.index, frame["mean"], yerr=frame["std"] if frame["std"].notna().any() else None,
                          label=name, capsize=2, **style.line_style(order.index(name)))  # fmt: skip
        ticks = sorted({float(x) for frame in lines.values() for x in frame.index})
        if min(ticks) > 0 and max(ticks) / min(ticks) > 20:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_xlabel(axis_label or axis)
        axes.set_ylabel(label or runs[0].metric.label)
        axes.set_title(panel)
    style.legend(figure, all_axes[0])
    return figure


def client_scores(runs: Sequence[Run], view: str = f"{IN_USE}/test") -> pd.DataFrame:
    """Return each client's metric (accuracies in percent) by seed and client, one column per title.

    A seed has its own partition, so clients of different seeds are different clients.
    """
    columns = {}
    for title in dict.fromkeys(r.title for r in runs):
        mine = {int(r.settings["seed"]): (r.column(view), r.clients()) for r in runs if r.title == title}
        if scores := {seed: frame[name] for seed, (name, frame) in mine.items() if name in frame}:
            columns[title] = runs[0].metric.scale * pd.concat(scores, names=["seed", "client"])
    if not columns:
        raise CoterieError(f"none of these runs has scored {view} for every client")
    return pd.DataFrame(columns)


def draw_clients(runs: Sequence[Run], view: str = f"{IN_USE}/test") -> Figure:
    """Draw every client's metric, sorted (left), and its gain over Local-Only, sorted (right), over all seeds."""
    groups = list(dict.fromkeys(r.group for r in runs))
    order = list(dict.fromkeys(r.title for r in runs))
    figure, all_axes = style.panels(2 * len(groups), width=4.8, height=max(3.8, 0.2 * len(order) + 0.8))
    for k, group in enumerate(groups):
        mine = [r for r in runs if r.group == group]
        frame, base = client_scores(mine, view), local_only_title(mine)
        left, right = all_axes[2 * k : 2 * k + 2]
        metric = mine[0].metric
        _sorted(left, frame, order, metric.label, {}, metric.lower)
        left.set_title(f"{group}: {metric.name}")
        if base is None or base not in frame or len(frame.columns) == 1:
            right.set_visible(False)
            left.legend(frameon=False, fontsize=8, loc="lower right")
            continue
        gained = frame.drop(columns=base).sub(frame[base], axis=0) * gain_sign(metric)
        words = {n: f"{n}: {up} gain, {down} lose" for n in gained for up, down in [gain_counts(gained[n])]}
        _sorted(right, gained, order, f"gain over {base} ({gain_unit(metric)})", words)
        right.axhline(0, color="black", linewidth=0.8)
        right.set_title(f"{group}: against {base}")
        shown = left.get_lines()[list(frame.columns).index(base)]
        handles, names = right.get_legend_handles_labels()
        right.legend([shown, *handles], [base, *names], frameon=False, fontsize=8, loc="upper left",
                     bbox_to_anchor=(1.01, 1.0))  # fmt: skip
    return figure


def _sorted(
    axes: Any, frame: pd.DataFrame, order: list[str], label: str, words: dict[str, str], down: bool = False
) -> None:
    for name in frame.columns:
        y = np.sort(frame[name].dropna().to_numpy())
        y = y[::-1] if down else y
        i = order.index(name)
        every = max(1, len(y) // 8)
        axes.plot(np.arange(1, len(y) + 1), y, markevery=((i * every) // len(order), every),
                  label=words.get(str(name), str(name)), **style.line_style(i))  # fmt: skip
    axes.margins(x=0.01)
    style.whole_numbers(axes.xaxis)
    axes.set_xlabel("clients, from worst to best")
    axes.set_ylabel(label)
