"""Tables as text."""

import pandas as pd


def markdown_table(frame: pd.DataFrame) -> str:
    """Return a data frame as a Markdown table; the index is the first column."""
    columns = [str(frame.index.name), *map(str, frame.columns)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, row in zip(frame.index, frame.values, strict=True):
        lines.append("| " + " | ".join([str(name), *map(str, row)]) + " |")
    return "\n".join(lines) + "\n"
