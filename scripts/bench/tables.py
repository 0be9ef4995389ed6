"""What benchmarks print above their JSON: results as a Markdown table, and what they ran on."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any


def shown(value: Any) -> str:
    """A figure as a cell of a table; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def markdown(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], error_cell: int) -> str:
    """Rows as a table.

    Args:
        columns: title of each column, and the key of its figures.
        rows: figures by key; `error` is why a row has none, or empty.
        error_cell: the column that says so.
    """
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        cells = [shown(row[key]) for key in columns.values()]
        if row["error"]:
            cells[error_cell] = row["error"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def device_name(device: str) -> str:
    """The GPU, or the processor."""
    import torch  # for its name alone, after the runs

    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()
