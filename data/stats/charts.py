"""Charts as SVG elements; colours are CSS variables of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

# About as many pixels as on the page, so that text keeps its size.
WIDTH, HEIGHT = 280, 190
LEFT, RIGHT, TOP, BOTTOM = 40, 18, 26, 40
MAX_BARS = 24
MAX_BAR_WIDTH = 30
MAX_LABELS = 6
LYING_WIDTH = 480
# Edges of width over height, each 2 ** 0.25 from the next, from 1:6 to 6:1; what lies outside counts as the outermost.
ASPECT_STEP = 4
ASPECT_LABELS = {"1:4": 0.25, "1:2": 0.5, "1:1": 1.0, "2:1": 2.0, "4:1": 4.0}


@dataclass(frozen=True)
class Bars:
    """A histogram.

    Attributes:
        counts: of each bar.
        names: of each bar, for its tooltip.
        ticks: label by place on the axis, in bars: 0 is the left edge of the first bar, 0.5 its middle.
        marker: place and text of a line, such as the median; None without.
    """

    counts: list[int]
    names: list[str]
    ticks: dict[float, str]
    marker: tuple[float, str] | None = None


def number(value: float) -> str:
    """A number for people: thousands apart, three digits that count."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    scale = 10.0 ** math.floor(math.log10(least))
    return next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= least * 0.999)


def integer_bars(values: Sequence[int]) -> Bars:
    """Whole numbers: a bar for each where they are few, else equal intervals."""
    low, high = min(values), max(values)
    step = 1 if high - low < MAX_BARS else int(nice_step((high - low + 1) / (MAX_BARS - 2)))
    start = low if step == 1 else low // step * step
    count = (high - start) // step + 1
    counts = np.bincount([(value - start) // step for value in values], minlength=count).tolist()
    firsts = [start + index * step for index in range(count)]
    each = math.ceil(nice_step(count / MAX_LABELS)) if count > MAX_LABELS else 1
    middle = 0.5 if step == 1 else 0.0
    ticks = {index + middle: number(first) for index, first in enumerate(firsts) if first // step % each == 0}
    if len(ticks) < 2:
        ticks = {index + middle: number(firsts[index]) for index in sorted({0, count - 1})}
    names = [number(first) if step == 1 else f"{number(first)} to {number(first + step - 1)}" for first in firsts]
    median = float(np.median(values))
    place = (median - start) / step + (0.5 if step == 1 else 0.0)
    return Bars(counts, names, ticks, (place, f"median {number(median)}") if high > low else None)


def share_bars(values: Sequence[float]) -> Bars:
    """Shares from 0 to 1, in twentieths."""
    count = 20
    counts = np.bincount([min(int(value * count), count - 1) for value in values], minlength=count).tolist()
    names = [f"{100 * index // count} to {100 * (index + 1) // count} %" for index in range(count)]
    median = float(np.median(values))
    ticks = {float(count * place // 100): f"{place} %" for place in (0, 25, 50, 75, 100)}
    return Bars(counts, names, ticks, (median * count, f"median {100 * median:.0f} %"))


def aspect_bars(ratios: Sequence[float]) -> Bars:
    """Width over height on a logarithmic axis, a bar around 1:1 in its middle."""
    half = ASPECT_STEP * 2 + 3
    places = [min(max(round(math.log2(ratio) * ASPECT_STEP), -half), half) + half for ratio in ratios]
    counts = np.bincount(places, minlength=2 * half + 1).tolist()
    names = [f"width about {number(float(2 ** ((index - half) / ASPECT_STEP)))} times height"
             for index in range(2 * half + 1)]
    ticks = {half + math.log2(ratio) * ASPECT_STEP + 0.5: name for name, ratio in ASPECT_LABELS.items()}
    return Bars(counts, names, ticks)


def _bar(left: float, top: float, width: float, height: float) -> str:
    """A bar with a rounded top."""
    radius = min(3.0, width / 2, height)
    return (f"M{left:.1f},{top + height:.1f}v{-(height - radius):.1f}q0,{-radius:.1f} {radius:.1f},{-radius:.1f}"
            f"h{width - 2 * radius:.1f}q{radius:.1f},0 {radius:.1f},{radius:.1f}v{height - radius:.1f}z")


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
            + "".join(parts) + "</svg>")


def histogram(bars: Bars, axis: str, colour: str, unit: str) -> str:
    """A histogram.

    Args:
        bars: what it shows.
        axis: title of the horizontal axis.
        colour: CSS variable of the bars, such as `text`.
        unit: what is counted, such as samples.
    """
    count, top = len(bars.counts), max(bars.counts)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    band = min(width / count, MAX_BAR_WIDTH + 8)
    left = LEFT + (width - band * count) / 2
    bottom = TOP + height
    step = max(nice_step(top / 5), 1)
    parts = []
    for index in range(1, int(top / step) + 1):
        y = bottom - height * index * step / top
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "grid"), _text(LEFT - 6, y + 3.5, number(index * step), "end")]
    for index, (value, name) in enumerate(zip(bars.counts, bars.names, strict=True)):
        if value:
            tall = max(height * value / top, 1.5)
            shape = _bar(left + index * band + 1, bottom - tall, band - 2, tall)
            parts.append(f'<path d="{shape}" fill="var(--{colour})"><title>{escape(name)}: {value:,} {escape(unit)}'
                         "</title></path>")
    parts.append(_line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis"))
    parts += [_text(left + place * band, bottom + 15, name) for place, name in bars.ticks.items()]
    parts.append(_text(LEFT + width / 2, HEIGHT - 6, axis, css="name"))
    if bars.marker is not None:
        x = left + bars.marker[0] * band
        parts += [_line(x, TOP - 6, x, bottom, "marker"),
                  _text(min(max(x, LEFT + 30), WIDTH - RIGHT - 34), TOP - 11, bars.marker[1], css="note")]
    return _svg(WIDTH, HEIGHT, f"{axis}: {unit}", parts)


@dataclass(frozen=True)
class Group:
    """Bars of one line of a bar chart.

    Attributes:
        name: on the left.
        bars: CSS variable, value and text of each.
        strong: whether its name stands out.
    """

    name: str
    bars: list[tuple[str, float, str]]
    strong: bool = False


def lying_bars(groups: Sequence[Group], label: str, most: float, reference: tuple[float, str] | None = None) -> str:
    """Horizontal bars from 0 to `most`, one group below the other, with values at their ends.

    Args:
        groups: from top to bottom.
        label: what it shows, for screen readers.
        most: value of a bar of full length.
        reference: value and text of a line that bars are to be compared with; None without.
    """
    left, right, thick, gap = 112, 56, 14, 12
    width = LYING_WIDTH - left - right
    y = 24.0 if reference else 6.0
    parts = []
    for group in groups:
        tall = len(group.bars) * (thick + 2) - 2
        parts.append(_text(left - 8, y + tall / 2 + 4, group.name, "end", "strong" if group.strong else "label"))
        for colour, value, text in group.bars:
            long = max(width * value / most, 1.5)
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{long:.1f}" height="{thick}" rx="2" '
                         f'fill="var(--{colour})"><title>{escape(group.name)}: {escape(text)}</title></rect>')
            parts.append(_text(left + long + 6, y + thick - 3, text, "start", "value"))
            y += thick + 2
        y += gap - 2
    if reference is not None:
        x = left + width * reference[0] / most
        parts += [_line(x, 18, x, y - gap + 4, "marker"), _text(x, 12, reference[1], css="note")]
    parts.append(_line(left, 18 if reference else 0, left, y - gap + 4, "axis"))
    return _svg(LYING_WIDTH, y, label, parts)
