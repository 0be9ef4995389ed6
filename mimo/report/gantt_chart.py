"""One step of all ranks as inline SVG: a row for each rank, what it did from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mimo.observability.spans import Kind
from mimo.report.charts import Scale, legend
from mimo.report.summary import CSS_OF_PART, PASSES, WORDS, number, seconds, time_ticks

WIDTH, LEFT, RIGHT, TOP = 1180, 190, 14, 8
GRID_GAP, AXIS = 12, 30
# Height of a row, of several, and of few.
ROW, TALL_ROW, FEW_ROWS = 20, 30, 10
# Rows of one chart.
MAX_ROWS = 32
# Less is not drawn, pixels.
LEAST_WIDTH = 0.25
# A pass this wide, pixels, has the number of its microbatch in it.
LEAST_NUMBERED = 16


@dataclass(frozen=True)
class Row:
    """Row of the chart: one rank's work for one module.

    Attributes:
        module: the grid.
        rank: global.
        name: of the row: rank and coordinates that are not 0 everywhere.
        intervals: of the file.
    """

    module: str
    rank: int
    name: str
    intervals: Sequence[Mapping[str, Any]]

    @property
    def busy_s(self) -> float:
        """Seconds of passes."""
        return sum(one["end_s"] - one["begin_s"] for one in self.intervals if one["kind"] in PASSES)


def rows_of(timeline: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows by module, ranks in order. A rank with several modules has a row for each, with what it did for that one."""
    ranks = sorted(timeline["ranks"], key=lambda rank: rank["rank"])
    sizes: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for module, place in rank["modules"].items():
            most = sizes.setdefault(module, {})
            for axis, index in place.items():
                most[axis] = max(most.get(axis, 0), index)
    found: dict[str, list[Row]] = {}
    for rank in ranks:
        for module, place in rank["modules"].items():
            words = [f"rank {rank['rank']}"] + [f"{axis} {index}" for axis, index in place.items()
                                                if sizes[module][axis]]
            own = rank["intervals"]
            if len(rank["modules"]) > 1:
                own = [one for one in own if one["module"] == module]
            found.setdefault(module, []).append(Row(module, rank["rank"], " ".join(words), own))
    return found


def chosen_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows: the one that computes longest, the one that computes least, others spread over the grid."""
    if len(rows) <= most:
        return list(rows)
    by_work = sorted(rows, key=lambda row: row.busy_s)
    ranks = {by_work[0].rank, by_work[-1].rank}
    for index in (0, most - 1, *range(1, most - 1)):
        if len(ranks) < most:
            ranks.add(rows[index * (len(rows) - 1) // (most - 1)].rank)
    return [row for row in rows if row.rank in ranks]


def _rects(row: Row, x: Scale, top: float, height: float, least: float) -> list[str]:
    parts = []
    for one in row.intervals:
        if one["kind"] == Kind.OTHER:
            continue
        left, width = x(one["begin_s"]), x(one["end_s"]) - x(one["begin_s"])
        if width < least:
            continue
        batch = one["microbatch"]
        words = WORDS.get(one["kind"], one["kind"])
        words += "" if batch is None else f", microbatch {batch}"
        words += "" if one["name"] in (one["kind"], "step") else f" ({one['name']})"
        css = CSS_OF_PART.get(WORDS.get(one["kind"], ""), "k-other")
        words += f": {seconds(one['end_s'] - one['begin_s'])}, from {seconds(one['begin_s'])}"
        parts.append(f'<rect class="{css}" x="{left:.2f}" y="{top:.0f}" width="{width:.2f}" height="{height - 4}">'
                     f"<title>{escape(words)}</title></rect>")
        if batch is not None and one["kind"] in PASSES and width >= LEAST_NUMBERED:
            parts.append(f'<text class="inside middle" x="{left + width / 2:.1f}" y="{top + height / 2 + 2:.0f}">'
                         f"{batch}</text>")
    return parts


def _least_width(rows: Sequence[Row], x: Scale, most: int) -> float:
    """Pixels below which intervals are left out, so that a chart does not grow without bound."""
    widths = sorted((x(one["end_s"]) - x(one["begin_s"]) for row in rows for one in row.intervals
                     if one["kind"] != Kind.OTHER), reverse=True)
    return max(LEAST_WIDTH, widths[most]) if len(widths) > most else LEAST_WIDTH


def _axis(x: Scale, bottom: float) -> list[str]:
    parts, ticks = [], x.ticks(9)
    for at, words in zip(map(x, ticks), time_ticks(ticks), strict=True):
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom:.0f}"/>'
                     f'<text class="middle" x="{at:.1f}" y="{bottom + 16:.0f}">{words}</text>')
    return parts


def num_shapes(timeline: Mapping[str, Any]) -> int:
    """Rectangles of the whole chart, at most."""
    return sum(_num_shapes(row) for rows in _shown(rows_of(timeline), MAX_ROWS).values() for row in rows)


def _num_shapes(row: Row) -> int:
    return sum(one["kind"] != Kind.OTHER for one in row.intervals)


def _shown(modules: Mapping[str, Sequence[Row]], most: int) -> dict[str, list[Row]]:
    return {name: chosen_rows(rows, max(2, most // len(modules))) for name, rows in modules.items()}


def gantt_chart(timeline: Mapping[str, Any], most: int) -> str:
    """The chart of one `timeline/step-N.json`, of about `most` intervals: of fewer ranks where there are more."""
    modules = rows_of(timeline)
    longest = max(_num_shapes(row) for rows in modules.values() for row in rows)
    shown = _shown(modules, min(MAX_ROWS, most // max(longest, 1)))
    ranks = timeline["ranks"]
    length_s = max(one["end_s"] for rank in ranks for one in rank["intervals"])
    x = Scale(0.0, length_s, LEFT, WIDTH - RIGHT)
    every = [row for rows in shown.values() for row in rows]
    least, top, parts = _least_width(every, x, most), TOP + GRID_GAP, []
    height = TALL_ROW if len(every) <= FEW_ROWS else ROW
    bottom = top + sum(ROW + height * len(rows) + GRID_GAP for rows in shown.values()) - GRID_GAP
    parts += _axis(x, bottom)
    for module, rows in shown.items():
        parts.append(f'<text class="strong" x="6" y="{top + 12}">{escape(module)} grid</text>')
        top += ROW
        for row in rows:
            parts.append(f'<rect class="row" x="{LEFT}" y="{top}" width="{x.end - LEFT}" height="{height - 4}"/>'
                         f'<text class="end" x="{LEFT - 8}" y="{top + height / 2 + 2:.0f}">{escape(row.name)}</text>')
            parts += _rects(row, x, top, height, least)
            top += height
        top += GRID_GAP
    kinds = {one["kind"] for row in every for one in row.intervals}
    used = [(css, words) for words, css in CSS_OF_PART.items()
            if css.removeprefix("k-") in kinds and words != WORDS[Kind.OTHER]]
    title = f"Iteration {timeline['iteration']:,}: {seconds(length_s)} from the first begin to the last end"
    return (f'<figure class="wide"><h3>{escape(title)}</h3>{legend(used)}'
            f'<svg viewBox="0 0 {WIDTH} {bottom + AXIS - 6:.0f}" class="gantt" role="img" aria-label="{escape(title)}">'
            f"{''.join(parts)}</svg><figcaption>{_note(modules, shown, least)}</figcaption></figure>")


def _note(modules: Mapping[str, Sequence[Row]], shown: Mapping[str, Sequence[Row]], least: float) -> str:
    note = ("Solid is work, hatched is waiting, numbers are microbatches. A row that is empty at its left: the rank "
            "had not begun the step yet; ranks begin it one after the other, the one that writes the run's records "
            "late. Small gaps are other work of the host.")
    left_out = [f"{len(shown[name])} of the {number(len(rows))} ranks of {escape(name)}"
                for name, rows in modules.items() if len(shown[name]) < len(rows)]
    if left_out:
        note += (f" Shown: {' and '.join(left_out)}, the ones that compute longest and least among them.")
    if least > LEAST_WIDTH:
        note += " The shortest intervals are left out."
    return note
