"""Charts of what samples give the model, as figures for Plotly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimo.report.html import figure, label
from mimo.report.summary import number

MAX_BARS = 24
# Bars of width over height are 2 ** 0.25 apart, from 1:6 to 6:1. Values outside count as the outermost.
ASPECT_STEP = 4
ASPECT_LABELS = {"1:4": 0.25, "1:2": 0.5, "1:1": 1.0, "2:1": 2.0, "4:1": 4.0}


@dataclass(frozen=True)
class Bars:
    """A histogram.

    Attributes:
        places: middle of each bar.
        width: width of a bar.
        counts: count of each bar.
        names: name of each bar, shown beside the pointer.
        axis: Plotly settings that differ from the usual horizontal axis.
        median: position and text of the median; None without it.
    """

    places: list[float]
    width: float
    counts: list[int]
    names: list[str]
    axis: Mapping[str, Any]
    median: tuple[float, str] | None = None


def nice_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is at least `least`."""
    power = 10 ** max(math.floor(math.log10(least)), 0)
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def integer_bars(values: Sequence[int]) -> Bars:
    """Return a bar for each whole number if there are few, and for equal intervals if there are many."""
    low, high = min(values), max(values)
    step = 1 if high - low < MAX_BARS else nice_step((high - low + 1) / (MAX_BARS - 2))
    start = low // step * step
    counts = np.bincount([(value - start) // step for value in values]).tolist()
    firsts = [start + index * step for index in range(len(counts))]
    names = [number(first) if step == 1 else f"{number(first)} to {number(first + step - 1)}" for first in firsts]
    median = float(np.median(values))
    # A few bars are not as wide as the chart.
    axis = {"tickvals": firsts, "range": [start - 2.5, high + 2.5]} if len(firsts) <= 5 else {}
    return Bars([first + (step - 1) / 2 for first in firsts], step, counts, names, axis,
                (median, f"median {number(median)}") if high > low else None)


def share_bars(values: Sequence[float]) -> Bars:
    """Return bars for shares from 0 to 1, in twentieths."""
    width = 5
    counts = np.bincount([min(int(value * 20), 19) for value in values], minlength=20).tolist()
    median = 100 * float(np.median(values))
    return Bars([width * (index + 0.5) for index in range(20)], width, counts,
                [f"{width * index} to {width * (index + 1)} %" for index in range(20)],
                {"range": [0, 100], "ticksuffix": " %", "dtick": 25}, (median, f"median {median:.0f} %"))


def aspect_bars(ratios: Sequence[float]) -> Bars:
    """Return bars for width over height on a logarithmic axis, with one around 1:1 in its middle."""
    half = ASPECT_STEP * 2 + 3
    steps = [min(max(round(math.log2(ratio) * ASPECT_STEP), -half), half) for ratio in ratios]
    counts = np.bincount([step + half for step in steps], minlength=2 * half + 1).tolist()
    places = [step / ASPECT_STEP for step in range(-half, half + 1)]
    return Bars(places, 1 / ASPECT_STEP, counts, [f"width about {2**place:.3g} times height" for place in places],
                {"tickvals": [math.log2(ratio) for ratio in ASPECT_LABELS.values()], "ticktext": list(ASPECT_LABELS)})


def _line_at(place: float) -> dict[str, Any]:
    """Return a dashed line across the chart at a value of the horizontal axis."""
    return {"type": "line", "yref": "paper", "x0": place, "x1": place, "y0": 0, "y1": 1,
            "line": {"color": "var(--ink)", "width": 1.5, "dash": "dash"}}


def histogram(title: str, bars: Bars, axis: str, colour: str, unit: str) -> str:
    """Return a histogram.

    Args:
        title: title of the chart.
        bars: its values.
        axis: title of the horizontal axis.
        colour: variable of the style sheet, such as `text`.
        unit: what the bars count, such as samples.
    """
    trace = {"type": "bar", "x": bars.places, "y": bars.counts, "width": 0.92 * bars.width, "hoverinfo": "text",
             "marker": {"color": f"var(--{colour})"},
             "hovertext": [f"{name}: {count:,} {label(unit)}"
                           for name, count in zip(bars.names, bars.counts, strict=True)]}
    layout = {"hovermode": "closest", "showlegend": False, "shapes": [_line_at(bars.median[0])] if bars.median else [],
              "xaxis": {"title": {"text": label(axis), "font": {"size": 12}}, "showgrid": False, **bars.axis},
              "yaxis": {"rangemode": "tozero", "tickformat": ",d", "nticks": 6}}
    return figure(title, [trace], layout, height=210, note=f"Dashed: {bars.median[1]}." if bars.median else "")


@dataclass(frozen=True)
class Series:
    """Bars of one colour: their name in the legend, a variable of the style sheet, values and their texts."""

    name: str
    colour: str
    values: list[float]
    texts: list[str]


def lying_bars(title: str, names: Sequence[str], series: Sequence[Series], most: float,
               reference: tuple[float, str] | None = None) -> str:
    """Return horizontal bars with their values at the ends.

    Args:
        title: title of the chart.
        names: names of the rows, from top to bottom, as HTML.
        series: bars of each row.
        most: value of a bar of full length.
        reference: value and text of a line to compare bars with.
    """
    traces = [{"type": "bar", "orientation": "h", "name": label(each.name), "y": list(range(len(names))),
               "x": each.values, "text": each.texts, "textposition": "outside", "cliponaxis": False,
               "hoverinfo": "text", "hovertext": [f"{name}: {text}" for name, text in
                                                  zip(names, each.texts, strict=True)],
               "marker": {"color": f"var(--{each.colour})"}} for each in series]
    layout: dict[str, Any] = {
        "barmode": "group", "hovermode": "closest", "showlegend": len(series) > 1,
        "xaxis": {"range": [0, 1.18 * most], "showticklabels": False, "showgrid": False, "fixedrange": True},
        "yaxis": {"autorange": "reversed", "tickvals": list(range(len(names))), "ticktext": list(names),
                  "showgrid": False, "fixedrange": True},
    }
    if reference is not None:
        layout["shapes"] = [{**_line_at(reference[0]), "name": label(reference[1]), "showlegend": True}]
    return figure(title, traces, layout, height=40 + (20 + 18 * len(series)) * len(names))
