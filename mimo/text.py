"""Numbers, sizes, ranges and tables as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns as wide as their widest cell, the first column flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def format_bytes(count: int) -> str:
    """Format a number of bytes, with binary units from 1 KiB up."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count:,} B ({count / 1024**power:.1f} {unit})"
    return f"{count} B"


def parse_bytes(text: str, flag: str) -> int:
    """Parse a size such as `5GB` (of 10^9 bytes each), `512MiB` (of 2^20 each) or `1000`.

    Raises:
        ValueError: the text is not a size, or the size is below one byte. The message names the flag.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{flag} {text}: not a size such as 5GB, 512MiB or 1000000")
    unit = (match[2] or "B").upper()
    size = int(float(match[1]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))
    if size < 1:
        raise ValueError(f"{flag} {text}: must be above 0")
    return size


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers with runs shortened: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def span(numbers: range) -> str:
    """Format a range: `none`, `3` or `3-7`."""
    if len(numbers) == 0:
        return "none"
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"
