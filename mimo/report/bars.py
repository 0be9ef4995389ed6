"""Stacked bars as inline SVG: parts of a time, one bar a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mimo.report.charts import Scale, legend
from mimo.report.summary import percent, seconds, time_ticks

WIDTH = 1180
LEFT, RIGHT, TOP = 150, 90, 22
BAR, GAP, AXIS = 30, 14, 40
# A part narrower than this, pixels, has no words in it.
LEAST_NAMED = 46


@dataclass(frozen=True)
class Bar:
    """A row.

    Attributes:
        name: beside it.
        parts: seconds by part, in order.
    """

    name: str
    parts: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Length of the bar."""
        return sum(self.parts.values())


def stacked_bars(title: str, bars: Sequence[Bar], css: Mapping[str, str], *, axis_s: float = 0.0,
                 marker: tuple[float, str] | None = None, note: str = "") -> str:
    """Bars on one axis of seconds.

    Args:
        title: what is shown.
        bars: rows, with the same parts or some of them.
        css: class of each part; the legend has them in this order.
        axis_s: length of the axis, seconds, at least: charts to compare have the same.
        marker: seconds and words of a line across all bars.
        note: a sentence under the chart.
    """
    longest = max([axis_s, *(bar.total_s for bar in bars), marker[0] if marker else 0.0])
    x = Scale(0.0, longest * 1.01, LEFT, WIDTH - RIGHT)
    bottom = TOP + len(bars) * (BAR + GAP)
    parts = []
    ticks = x.ticks(8)
    for at, words in zip(map(x, ticks), time_ticks(ticks), strict=True):
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>'
                     f'<text class="middle" x="{at:.1f}" y="{bottom + 16}">{words}</text>')
    for index, bar in enumerate(bars):
        top, done = TOP + GAP / 2 + index * (BAR + GAP), 0.0
        parts.append(f'<text class="end strong" x="{LEFT - 8}" y="{top + BAR / 2 + 4:.1f}">{escape(bar.name)}</text>')
        for part, value in bar.parts.items():
            if value <= 0:
                continue
            left, width = x(done), x(done + value) - x(done)
            share = percent(value / bar.total_s)
            parts.append(f'<rect class="{css[part]}" x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{BAR}">'
                         f"<title>{escape(bar.name)}: {escape(part)} {seconds(value)}, {share}</title></rect>")
            if width >= LEAST_NAMED:
                parts.append(f'<text class="inside middle" x="{left + width / 2:.1f}" y="{top + BAR / 2 + 4:.1f}">'
                             f"{share}</text>")
            done += value
        parts.append(f'<text x="{x(done) + 6:.1f}" y="{top + BAR / 2 + 4:.1f}" class="strong">{seconds(done)}</text>')
    if marker is not None:
        at = x(marker[0])
        side = "end" if at > WIDTH / 2 else "start"
        parts.append(f'<line class="marker" x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom}"/>'
                     f'<text class="{side} strong" x="{at:.1f}" y="{TOP - 10}">{escape(marker[1])}</text>')
    used = [part for part in css if any(bar.parts.get(part, 0) > 0 for bar in bars)]
    return (f'<figure class="wide"><h3>{escape(title)}</h3>{legend([(css[part], part) for part in used])}'
            f'<svg viewBox="0 0 {WIDTH} {bottom + AXIS - 16}" role="img" aria-label="{escape(title)}">{"".join(parts)}'
            f'</svg>{f"<figcaption>{escape(note)}</figcaption>" if note else ""}</figure>')
