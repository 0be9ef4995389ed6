"""Numbers for people."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Four digits that count: `12,345`, `123.5`, `0.04321`, `4.3e-13`; whole numbers whole."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.3g}"


def short(value: float) -> str:
    """For an axis: `250`, `12k`, `1.5M`, `0.02`, `1e-13`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and size > 1e3):
            return f"{value / size:.4g}{unit}"
    if value and abs(value) < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """A time: `3.2 ms`, `0.243 s`, `121 s`, `2 h 5 min`."""
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if value >= 0.1:
        return f"{value:.3g} s"
    if value >= 1e-4:
        return f"{1000 * value:.3g} ms"
    return f"{1e6 * value:.3g} us"


def time_ticks(ticks: list[float]) -> list[str]:
    """Times on an axis, all in the unit of the last: `0`, `50 ms`, `100 ms`."""
    unit, length_s = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if ticks[-1] >= pair[1]), ("us", 1e-6))
    return [f"{tick / length_s:.6g} {unit}" if tick else "0" for tick in ticks]


def percent(share: float) -> str:
    """A share: `7.3 %`, `93 %`."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def size(num_bytes: float) -> str:
    """Memory: `1.5 GiB`."""
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def joined(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rounded(value: float) -> str:
    """Three digits that count: `2.81`, `0.156`, `12,300`."""
    return number(float(f"{value:.3g}")) if math.isfinite(value) else number(value)
