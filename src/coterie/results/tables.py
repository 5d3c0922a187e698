"""Tables as text: Markdown and LaTeX."""

import re
from collections.abc import Collection, Iterable

import pandas as pd

FORMATS = {"csv": "csv", "markdown": "md", "latex": "tex"}  # formats of tables as text, and their files' suffixes
_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
          **{c: f"\\{c}" for c in "&%$#_{}"}}  # fmt: skip


def markdown_table(frame: pd.DataFrame) -> str:
    """Return a data frame as a Markdown table; the index is the first column."""
    columns = [str(frame.index.name), *map(str, frame.columns)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, row in zip(frame.index, frame.values, strict=True):
        lines.append("| " + " | ".join([str(name), *map(str, row)]) + " |")
    return "\n".join(lines) + "\n"


def latex_table(frame: pd.DataFrame, bold: Collection[tuple[str, str]] = ()) -> str:
    """Return a data frame as a LaTeX table that needs the package booktabs; the index is the first column.

    `bold` has the cells to highlight, as row and column.
    """
    columns = [str(frame.index.name), *map(str, frame.columns)]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(frame.columns)}}}", r"\toprule", _latex_row(map(latex_text, columns))]
    lines.append(r"\midrule")
    for name, row in zip(frame.index, frame.values, strict=True):
        cells = [latex_text(str(v)) for v in row]
        marked = [rf"\textbf{{{v}}}" if (name, c) in bold else v for c, v in zip(frame.columns, cells, strict=True)]
        lines.append(_latex_row([latex_text(str(name)), *marked]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def latex_text(text: str) -> str:
    """Return text with LaTeX's special characters escaped and minus signs of numbers set as such."""
    escaped = "".join(_LATEX.get(c, c) for c in text)
    return re.sub(r"(?<![\w.)\]-])-(?=\d)", "$-$", escaped)


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
