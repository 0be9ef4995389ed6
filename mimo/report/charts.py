"""Line charts as inline SVG: figures over iterations, thinned to means and ranges where there are many."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from mimo.report.run_folder import Floats
from mimo.report.summary import number, short

# Axes: where a value lies, and which values get a line.


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto pixels from `start` to `end`.

    Attributes:
        log: equal distances are equal ratios; both ends are above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value, pixels."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """Round values on the axis, about `most` at most."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, -(-(last - first + 1) // most))
            tens = [10.0**power for power in range(first, last + 1, every)]
            if len(tens) >= 2:
                return tens
        step = nice_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def fitting(low: float, high: float, start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale on which values from `low` to `high` have a little room, `zero` being on it if asked for."""
    if log:
        return Scale(low / 1.15, high * 1.15, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant
        room = abs(high) * 0.1 or 1.0
    else:
        room = (high - low) * 0.06
    return Scale(low if low == 0 or (zero and low >= 0) else low - room, high + room, start, end)


WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 36
# More than twice as many points become so many means, with the range of what they stand for.
MAX_POINTS = 260
# More than these are a line without dots.
MAX_DOTS = 60
# A first iteration may take a hundred times a later one: values above this multiple of most others are cut off.
CUT_ABOVE = 2.0
NUM_COLOURS = 6


@dataclass(frozen=True)
class Line:
    """Figures of one kind.

    Attributes:
        name: in the legend.
        x: float64 `[n]`, iterations, increasing.
        y: float64 `[n]`; what is not finite is left out.
        colour: index of it, less than `NUM_COLOURS`.
        dashed: for the second of two runs.
        dots: points are marked, such as those of evaluations.
    """

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Points:
    """A line, thinned.

    Attributes:
        x: middle of the iterations that a point stands for, float64 `[k]`.
        mean, low, high: of their values, float64 `[k]`.
        thinned: whether a point stands for several.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    thinned: bool


def thin(x: Floats, y: Floats, most: int = MAX_POINTS) -> Points:
    """At most twice `most` points, else `most`: of neighbouring ones the mean, the smallest and the largest."""
    if len(x) <= 2 * most:
        return Points(x, y, y, y, thinned=False)
    starts = np.unique(np.linspace(0, len(x), most, endpoint=False).astype(np.int64))
    counts = np.diff(np.append(starts, len(x)))
    return Points(np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts,
                  np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts), thinned=True)


def _finite(line: Line, *, log: bool) -> Line:
    kept = np.isfinite(line.y) & ((line.y > 0) if log else True)
    return Line(line.name, line.x[kept].astype(np.float64), line.y[kept], line.colour, line.dashed, line.dots)


def _merged(lines: Sequence[Line]) -> list[Line]:
    """Lines that would hide each other as one, under all their names."""
    found: list[Line] = []
    for line in lines:
        for place, other in enumerate(found):
            same = line.dots == other.dots and np.array_equal(line.x, other.x) and np.array_equal(line.y, other.y)
            if same and line.dashed == other.dashed:
                found[place] = replace(other, name=f"{other.name}, {line.name}")
                break
        else:
            found.append(line)
    return found


def _path(x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> str:
    return "L".join(f"{x(one):.1f},{y(two):.1f}" for one, two in zip(xs, ys, strict=True))


def _drawn(line: Line, points: Points, x: Scale, y: Scale) -> str:
    """A line, its range behind it, and its dots."""
    css, clipped = f"c{line.colour}", np.minimum
    mean, low, high = (clipped(values, y.high) for values in (points.mean, points.low, points.high))
    parts = []
    if points.thinned:
        there = _path(x, y, points.x.tolist(), high.tolist())
        back = _path(x, y, points.x[::-1].tolist(), low[::-1].tolist())
        parts.append(f'<path class="range {css}" d="M{there}L{back}z"/>')
    if len(points.x) > 1:
        parts.append(f'<path class="line {css}{" dashed" * line.dashed}" d="M'
                     f'{_path(x, y, points.x.tolist(), mean.tolist())}"/>')
    if (line.dots and len(points.x) <= MAX_DOTS) or len(points.x) == 1:
        parts += [f'<circle class="dot {css}{" dashed" * line.dashed}" cx="{x(one):.1f}" cy="{y(two):.1f}" r="3"/>'
                  for one, two in zip(points.x.tolist(), mean.tolist(), strict=True)]
    return "".join(parts)


def axes(x: Scale, y: Scale, x_title: str) -> str:
    """Grid lines with their values, and the title of the horizontal axis."""
    parts = []
    for tick in y.ticks(5):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{x.start:.1f}" y1="{at:.1f}" x2="{x.end:.1f}" y2="{at:.1f}"/>'
                     f'<text x="{x.start - 6:.1f}" y="{at + 4:.1f}" class="end">{short(tick)}</text>')
    for tick in x.ticks(7):
        parts.append(f'<text x="{x(tick):.1f}" y="{y.start + 15:.1f}" class="middle">{short(tick)}</text>')
    middle = (x.start + x.end) / 2
    parts.append(f'<line class="axis" x1="{x.start:.1f}" y1="{y.start:.1f}" x2="{x.end:.1f}" y2="{y.start:.1f}"/>'
                 f'<text x="{middle:.1f}" y="{y.start + 31:.1f}" class="middle">{escape(x_title)}</text>')
    return "".join(parts)


def _top(lines: Sequence[Line]) -> float:
    """Upper end of the values: the largest, unless a few tower above nearly all others."""
    values = np.concatenate([line.y for line in lines])
    usual = float(np.quantile(values, 0.98))
    largest = float(values.max())
    return CUT_ABOVE * usual if usual > 0 and largest > 2 * CUT_ABOVE * usual else largest


def _hover(lines: Sequence[Line], points: Sequence[Points], x: Scale) -> str:
    """Return the values that the page's script shows beside the pointer, as JSON."""
    def rounded(values: Floats) -> list[float]:
        return [float(f"{value:.5g}") for value in values.tolist()]

    shown = []
    for line, found in zip(lines, points, strict=True):
        entry: dict[str, object] = {"n": line.name, "c": line.colour, "x": [round(at, 1) for at in found.x.tolist()],
                                    "y": rounded(found.mean)}
        if found.thinned:
            entry |= {"l": rounded(found.low), "h": rounded(found.high)}
        shown.append(entry)
    scale = [round(x.low, 3), round(x.high, 3), x.start, x.end]
    return json.dumps({"x": scale, "s": shown}, separators=(",", ":")).replace("<", "\\u003c")


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Marks and names: CSS classes of a mark, and what it stands for."""
    marks = "".join(f'<span><i class="{css}"></i>{escape(name)}</span>' for css, name in entries)
    return f'<div class="legend">{marks}</div>'


def line_chart(title: str, lines: Sequence[Line], *, log: bool = False, zero: bool = False, x_title: str = "iteration",
               note: str = "") -> str:
    """A chart; nothing where no line has a value to show.

    Args:
        title: what is shown, with its unit.
        lines: on common axes.
        log: the vertical axis is logarithmic; values that are not above 0 are left out.
        zero: 0 is on the vertical axis.
        x_title: of the horizontal axis.
        note: a sentence under the chart.
    """
    shown = _merged([found for line in lines if len((found := _finite(line, log=log)).x)])
    if not shown:
        return ""
    points = [thin(line.x, line.y) for line in shown]
    top = max(float(line.y.max()) for line in shown) if log or not zero else _top(shown)
    first, last = min(float(line.x[0]) for line in shown), max(float(line.x[-1]) for line in shown)
    x = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    y = fitting(min(float(line.y.min()) for line in shown), top, HEIGHT - BOTTOM, TOP, log=log, zero=zero)
    drawn = "".join(_drawn(line, found, x, y) for line, found in zip(shown, points, strict=True))
    highest = max(shown, key=lambda line: float(line.y.max()))
    if float(highest.y.max()) > y.high:
        place = int(highest.y.argmax())
        note += f" Cut off: up to {number(float(highest.y[place]))} at iteration {number(highest.x[place])}."
    if any(found.thinned for found in points):
        note += " Line: mean of neighbouring iterations; shade: their range."
    names = [(f"c{line.colour}{' dashed' * line.dashed}{' round' * line.dots}", line.name) for line in shown]
    named = len(shown) > 1 or shown[0].name.lower() not in title.lower()
    return (f'<figure><h3>{escape(title)}</h3>{legend(names) if named else ""}'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="lines" role="img" aria-label="{escape(title)} over {x_title}">'
            f'{axes(x, y, x_title)}{drawn}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
            f'<script type="application/json">{_hover(shown, points, x)}</script>'
            f'{f"<figcaption>{escape(note.strip())}</figcaption>" if note else ""}</figure>')
