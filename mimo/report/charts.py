"""Charts of runs: figures over iterations, parts of a step as bars, and one step of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimo.observability.spans import Kind
from mimo.report.html import figure, label
from mimo.report.run_reader import Floats, Run, Table
from mimo.report.summary import PASSES, WAITS, WORDS, number, percent, seconds

LETTERS = "AB"
NUM_COLOURS = 6
# A line with more than twice as many points is drawn as this many means, with the range of the values behind them.
MAX_POINTS = 260
# More evaluations than these are a line without dots.
MAX_DOTS = 60
# A first iteration may take a hundred times as long as a later one: values above this multiple of most others are cut.
CUT_ABOVE = 2.0
# Rows of the chart of one step. Larger grids show some of their ranks.
MAX_ROWS = 32


# Figures over iterations.


@dataclass(frozen=True)
class Line:
    """Figures of one kind.

    Attributes:
        name: name in the legend.
        x: iterations, increasing, float64 `[n]`.
        y: float64 `[n]`; values that are not finite are left out.
        colour: its index, less than `NUM_COLOURS`.
        dashed: whether the line is dashed, as for the second of two runs.
        dots: whether points are marked, such as those of evaluations.
    """

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    dashed: bool = False
    dots: bool = False


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return at most `2 * MAX_POINTS` points as they are, and more as `MAX_POINTS` means of neighbouring ones.

    Returns:
        Middle of the iterations that each point stands for, and mean, minimum and maximum of their values.
    """
    if len(x) <= 2 * MAX_POINTS:
        return x, y, y, y
    starts = np.unique(np.linspace(0, len(x), MAX_POINTS, endpoint=False).astype(np.int64))
    counts = np.diff(np.append(starts, len(x)))
    return (np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts,
            np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def _digits(values: Floats) -> list[float]:
    """Return values with as many digits as a chart shows, which keeps pages small."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _traces(line: Line) -> list[dict[str, Any]]:
    """Return a line, with the shade of its range behind it if it is thinned."""
    (middles, mean, *ends), colour, found = thin(line.x, line.y), f"var(--s{line.colour})", []
    x = [round(at, 1) for at in middles.tolist()]
    main: dict[str, Any] = {
        "type": "scatter", "name": label(line.name), "legendgroup": label(line.name), "x": x, "y": _digits(mean),
        "mode": "lines+markers" if len(x) == 1 or (line.dots and len(x) <= MAX_DOTS) else "lines",
        "line": {"color": colour, "width": 1.8, "dash": "dash" if line.dashed else "solid"}, "marker": {"size": 6},
    }
    if len(x) < len(line.x):
        low, high = map(_digits, ends)
        shade = {"type": "scatter", "x": x, "mode": "lines", "line": {"color": colour, "width": 0},
                 "legendgroup": main["legendgroup"], "showlegend": False, "hoverinfo": "skip", "opacity": 0.25}
        found = [shade | {"y": low}, shade | {"y": high, "fill": "tonexty"}]
        main |= {"customdata": [list(pair) for pair in zip(low, high, strict=True)],
                 "hovertemplate": "%{y} (%{customdata[0]:,.5~g} to %{customdata[1]:,.5~g})"}
    return [*found, main]


def _cut(lines: Sequence[Line]) -> tuple[float, str]:
    """Return where the vertical axis ends and a sentence about it, if a few values tower above nearly all others."""
    usual = float(np.quantile(np.concatenate([line.y for line in lines]), 0.98))
    highest = max(lines, key=lambda line: float(line.y.max()))
    place = int(highest.y.argmax())
    if not 0 < 2 * CUT_ABOVE * usual < highest.y[place]:
        return 0.0, ""
    return CUT_ABOVE * usual, (f"Cut off: up to {number(float(highest.y[place]))} at iteration "
                               f"{number(highest.x[place])}; a double click shows all.")


def line_chart(title: str, lines: Sequence[Line], *, log: bool = False, zero: bool = False, note: str = "") -> str:
    """Return a chart of figures over iterations, or nothing if no line has a value to show.

    Args:
        title: title of the chart, with the unit.
        lines: lines on common axes.
        log: whether the vertical axis is logarithmic; values that are not above 0 are left out then.
        zero: whether the vertical axis includes 0.
        note: a sentence under the chart.
    """
    shown = []
    for line in lines:
        kept = np.isfinite(line.y) & ((line.y > 0) if log else True)
        if kept.any():
            shown.append(Line(line.name, line.x[kept], line.y[kept], line.colour, line.dashed, line.dots))
    if not shown:
        return ""
    traces = [trace for line in shown for trace in _traces(line)]
    low, high = min(float(line.y.min()) for line in shown), max(float(line.y.max()) for line in shown)
    values: dict[str, Any] = {"type": "log"} if log else {"rangemode": "tozero"} if zero else {}
    # Over one to three decades Plotly would label 20 as 2, beside the tick of 2, so the ticks get their full values.
    # Over more decades it labels powers of ten alone, and over a part of one it labels full values itself, where there
    # might be none of the ticks below.
    if log and 5 * low <= high <= 1000 * low:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values |= {"tickvals": [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)], "tickformat": "~g"}
    top, cut = _cut(shown) if zero and not log else (0.0, "")
    if cut:
        values["range"] = [min(0.0, low), top]
    thinned = any(len(line.x) > 2 * MAX_POINTS for line in shown)
    notes = [note, cut, "Line: mean of neighbouring iterations; shade: their range." * thinned]
    # Iterations are whole numbers, also where there are few of them.
    ticks = {"dtick": 1} if max(line.x.max() for line in shown) - min(line.x.min() for line in shown) <= 8 else {}
    named = len(shown) > 1 or shown[0].name.lower() not in title.lower()
    return figure(title, traces, {
        "hovermode": "x unified", "showlegend": named, "yaxis": values | {"hoverformat": ",.5~g"},
        "xaxis": ticks | {"title": {"text": "iteration"}, "showgrid": False, "hoverformat": ",.0f",
                  "unifiedhovertitle": {"text": "iteration %{x}"}},
    }, height=250, note=" ".join(filter(None, notes)))


def run_name(runs: Sequence[Run], index: int, name: str) -> str:
    """Return the name of a line, with the run's letter if there are two runs."""
    return name if len(runs) == 1 else f"{LETTERS[index]}: {name}"


def lines_of(runs: Sequence[Run], keys: Mapping[str, str], *, scale: float = 1.0) -> list[Line]:
    """Return a line for each figure and run.

    One figure of two runs has a colour for each run. Several figures have a colour each, and the second run's lines are
    dashed.
    """
    found = []
    for place, (key, name) in enumerate(keys.items()):
        for index, run in enumerate(runs):
            if key in run.steps.columns:
                colour = index if len(keys) == 1 else place
                found.append(Line(run_name(runs, index, name), _x(run.steps), scale * run.steps.get(key),
                                  colour % NUM_COLOURS, dashed=len(keys) > 1 and index == 1))
    return found


def evaluated(runs: Sequence[Run], key: str, name: str, colour: int = 1) -> list[Line]:
    """Return a line with dots for each run's evaluations."""
    return [Line(run_name(runs, index, name), _x(run.evaluations), run.evaluations.get(key),
                 index if len(runs) > 1 else colour, dots=True)
            for index, run in enumerate(runs) if key in run.evaluations.columns]


def _x(found: Table) -> Floats:
    return found.iterations.astype(np.float64)


def chart(title: str, runs: Sequence[Run], keys: Mapping[str, str], *, scale: float = 1.0, log: bool = False,
          zero: bool = False, note: str = "") -> str:
    """Return a chart of figures over iterations, or nothing if no run has them."""
    return line_chart(title, lines_of(runs, keys, scale=scale), log=log, zero=zero, note=note)


# Parts of a time, one bar a row.


@dataclass(frozen=True)
class Bar:
    """A row: its name, and seconds by part in order."""

    name: str
    parts: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def _fill(kind: str) -> dict[str, Any]:
    """Return the fill of a part of a step: work is solid, waits are hatched."""
    colour: dict[str, Any] = {"color": f"var(--{kind})", "line": {"width": 0}}
    if kind in WAITS:
        colour["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": "var(--card)", "fgopacity": 0.6,
                             "size": 6, "solidity": 0.3}
    return colour


def _time_axis(length_s: float) -> tuple[dict[str, Any], float]:
    """Return a horizontal axis of so many seconds, and the factor by which seconds become its values."""
    unit, per_s = ("s", 1.0) if length_s >= 1 else ("ms", 1e3) if length_s * 1e3 >= 1 else ("us", 1e6)
    return {"range": [0, length_s * per_s], "ticksuffix": f" {unit}", "rangemode": "tozero"}, per_s


def stacked_bars(title: str, bars: Sequence[Bar], kinds: Mapping[str, str], *, axis_s: float = 0.0,
                 marker: tuple[float, str] | None = None, note: str = "") -> str:
    """Return bars on one axis of seconds.

    Args:
        title: title of the chart.
        bars: rows, with the same parts or some of them.
        kinds: kind of each part, which decides its fill; the legend has them in this order.
        axis_s: least length of the axis, seconds: charts that are compared have the same.
        marker: seconds and words of a line across all bars.
        note: a sentence under the chart.
    """
    axis, per_s = _time_axis(1.02 * max([axis_s, *(bar.total_s for bar in bars), marker[0] if marker else 0.0]))
    traces = []
    for part, kind in kinds.items():
        found = {place: bar.parts[part] for place, bar in enumerate(bars) if bar.parts.get(part, 0.0) > 0}
        if found:
            shares = [percent(value / bars[place].total_s) for place, value in found.items()]
            traces.append({
                "type": "bar", "orientation": "h", "name": label(part), "marker": _fill(kind), "y": list(found),
                "x": [value * per_s for value in found.values()], "text": shares, "textposition": "inside",
                "insidetextanchor": "middle", "textangle": 0, "insidetextfont": {"color": "var(--inside)"},
                "hoverinfo": "text", "hovertext": [
                    f"{label(bars[place].name)}: {label(part)} {seconds(value)}, {share}"
                    for (place, value), share in zip(found.items(), shares, strict=True)],
            })
    layout: dict[str, Any] = {
        "barmode": "stack", "hovermode": "closest", "xaxis": axis, "uniformtext": {"mode": "hide", "minsize": 10},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "showgrid": False, "tickvals": list(range(len(bars))),
                  "ticktext": [f"<b>{label(bar.name)}</b><br>{seconds(bar.total_s)}" for bar in bars]},
        "legend": {"traceorder": "normal"},
    }
    if marker is not None:
        at, words = marker
        layout["shapes"] = [{"type": "line", "yref": "paper", "x0": at * per_s, "x1": at * per_s, "y0": 0, "y1": 1,
                             "line": {"color": "var(--ink)", "width": 2, "dash": "dash"}, "name": label(words),
                             "showlegend": True}]
    return figure(title, traces, layout, height=70 + 50 * len(bars), note=note, wide=True)


# One step of all ranks.


@dataclass(frozen=True)
class Row:
    """Row of the chart: one rank's work for one module.

    Attributes:
        rank: global rank.
        name: name of the row: the rank, and its coordinates on axes with more than one rank.
        intervals: intervals in the file.
    """

    rank: int
    name: str
    intervals: Sequence[Mapping[str, Any]]

    @property
    def busy_s(self) -> float:
        """Seconds that the rank spends in passes."""
        return sum(one["end_s"] - one["begin_s"] for one in self.intervals if one["kind"] in PASSES)


def rows_of(timeline: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return rows by module, ranks in order. A rank with several modules has a row for its work for each of them."""
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
            own = [one for one in rank["intervals"] if one["kind"] != Kind.OTHER]
            if len(rank["modules"]) > 1:
                own = [one for one in own if one["module"] == module]
            found.setdefault(module, []).append(Row(rank["rank"], " ".join(words), own))
    return found


def chosen_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """Return `most` rows: those that compute longest and least, and others spread evenly over the grid."""
    if len(rows) <= most:
        return list(rows)
    by_work = sorted(rows, key=lambda row: row.busy_s)
    ranks = {by_work[0].rank, by_work[-1].rank}
    for index in (0, most - 1, *range(1, most - 1)):
        if len(ranks) < most:
            ranks.add(rows[index * (len(rows) - 1) // (most - 1)].rank)
    return [row for row in rows if row.rank in ranks]


def _shown(modules: Mapping[str, Sequence[Row]], most: int) -> dict[str, list[Row]]:
    return {name: chosen_rows(rows, max(2, most // len(modules))) for name, rows in modules.items()}


def num_intervals(timeline: Mapping[str, Any]) -> int:
    """Return how many intervals a chart of as many rows as possible has."""
    return sum(len(row.intervals) for rows in _shown(rows_of(timeline), MAX_ROWS).values() for row in rows)


def _hover_text(one: Mapping[str, Any]) -> str:
    words = WORDS.get(one["kind"], one["kind"])
    words += "" if one["microbatch"] is None else f", microbatch {one['microbatch']}"
    words += "" if one["name"] in (one["kind"], "step") else f" ({one['name']})"
    return label(f"{words}: {seconds(one['end_s'] - one['begin_s'])}, from {seconds(one['begin_s'])}")


def gantt_chart(timeline: Mapping[str, Any], most: int) -> str:
    """Return the chart of one `timeline/step-N.json`, with about `most` intervals: of fewer ranks if there are more."""
    modules = rows_of(timeline)
    longest = max(len(row.intervals) for rows in modules.values() for row in rows)
    shown = _shown(modules, min(MAX_ROWS, most // max(longest, 1)))
    note = ("Solid bars are work, hatched bars are waits, the numbers are microbatches. If a row begins with a gap, "
            "its rank had not started the step yet: the rank that writes the run's records starts late. Small gaps are "
            "other work of the host. Drag over a part to enlarge it; a double click shows all.")
    left_out = [f"{len(shown[name])} of the {number(len(rows))} ranks of {name}"
                for name, rows in modules.items() if len(shown[name]) < len(rows)]
    if left_out:
        note += f" Shown: {' and '.join(left_out)}, the ones that compute longest and least among them."
    length_s = max(one["end_s"] for rank in timeline["ranks"] for one in rank["intervals"])
    axis, per_s = _time_axis(length_s)

    # From top to bottom: the name of each grid, and below it a row for each of its ranks.
    names: list[str] = []
    intervals: list[tuple[int, Mapping[str, Any]]] = []
    for module, rows in shown.items():
        names.append(f"<b>{label(module)} grid</b>")
        for row in rows:
            intervals += [(len(names), one) for one in row.intervals]
            names.append(label(row.name))
    # Every grid shows at least two ranks, which may have more intervals than the page has room for.
    if len(intervals) > most:
        note += f" The {len(intervals) - most:,} shortest intervals are left out."
        intervals = sorted(intervals, key=lambda each: each[1]["begin_s"] - each[1]["end_s"])[:most]
    traces = []
    for kind, words in WORDS.items():
        found = [(row, one) for row, one in intervals if one["kind"] == kind]
        if found:
            traces.append({
                "type": "bar", "orientation": "h", "name": words, "marker": _fill(kind), "width": 0.84,
                "y": [row for row, _ in found], "base": [round(one["begin_s"] * per_s, 5) for _, one in found],
                "x": [round((one["end_s"] - one["begin_s"]) * per_s, 5) for _, one in found],
                "text": ["" if kind not in PASSES or one["microbatch"] is None else str(one["microbatch"])
                         for _, one in found],
                "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
                "insidetextfont": {"color": "var(--inside)"}, "hoverinfo": "text",
                "hovertext": [_hover_text(one) for _, one in found],
            })
    title = f"Iteration {timeline['iteration']:,}: {seconds(length_s)} from the first start to the last end"
    labels = {"range": [len(names) - 0.5, -0.5], "fixedrange": True, "showgrid": False, "zeroline": False,
              "tickvals": list(range(len(names))), "ticktext": names}
    return figure(title, traces, {"barmode": "overlay", "hovermode": "closest", "xaxis": axis, "yaxis": labels,
                                  "uniformtext": {"mode": "hide", "minsize": 9}},
                  height=60 + (34 if len(names) <= 12 else 22) * len(names), wide=True, note=note)
