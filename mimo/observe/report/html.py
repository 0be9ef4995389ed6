"""Pieces of the page that sections are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from mimo.observe.report.lines import NUM_COLOURS, Line, line_chart
from mimo.observe.report.run import Run, Table

LETTERS = "AB"


def section(title: str, blocks: Iterable[str], intro: str = "") -> str:
    """A section with its charts; nothing where none of them shows anything."""
    shown = [block for block in blocks if block]
    if not shown:
        return ""
    lead = f"<p>{intro}</p>" if intro else ""
    return f'<section><h2>{escape(title)}</h2>{lead}<div class="charts">{"".join(shown)}</div></section>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, numeric_from: int = 1,
          wide: bool = True) -> str:
    """A table whose cells are HTML; columns from `numeric_from` on are of numbers. It is as wide as a chart, or two."""
    body = list(rows)
    if not body:
        return ""
    css = ['' if index < numeric_from else ' class="num"' for index in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(css, heads, strict=True))
    cells = "".join("<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(css, row, strict=True)) + "</tr>"
                    for row in body)
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return (f'<figure{' class="wide"' * wide}>{heading}<div class="scroll"><table><tr>{head}</tr>{cells}</table></div>'
            "</figure>")


def run_name(runs: Sequence[Run], index: int, name: str) -> str:
    """Name of a line: with the run's letter where there are two."""
    return name if len(runs) == 1 else f"{LETTERS[index]}: {name}"


def lines_of(runs: Sequence[Run], keys: Mapping[str, str], *, scale: float = 1.0, first_colour: int = 0) -> list[Line]:
    """A line for each figure and run.

    One figure of two runs has a colour for each run; several have a colour each, and the second run's are dashed.

    Args:
        runs: one or two.
        keys: names by key.
        scale: what the figures are multiplied by.
        first_colour: of the first figure.
    """
    found = []
    for place, (key, name) in enumerate(keys.items()):
        for index, run in enumerate(runs):
            if key in run.steps.columns:
                colour = index if len(keys) == 1 else place
                found.append(Line(run_name(runs, index, name), _x(run.steps), scale * run.steps.get(key),
                                  (first_colour + colour) % NUM_COLOURS, dashed=len(keys) > 1 and index == 1))
    return found


def evaluated(runs: Sequence[Run], key: str, name: str, colour: int = 1) -> list[Line]:
    """A line of dots for each run's evaluations."""
    return [Line(run_name(runs, index, name), _x(run.evaluations), run.evaluations.get(key),
                 index if len(runs) > 1 else colour, dots=True)
            for index, run in enumerate(runs) if key in run.evaluations.columns]


def _x(found: Table) -> np.ndarray:
    return found.iterations.astype(np.float64)


def by_module(runs: Sequence[Run], pattern: str) -> dict[str, str]:
    """Keys of all modules of the runs, `*` in the pattern standing for the module, with the module's name."""
    names = dict.fromkeys(name for run in runs for name in run.modules)
    keys = {pattern.replace("*", name): name for name in names}
    return {key: name for key, name in keys.items() if any(key in run.steps.columns for run in runs)}


def prefixed(runs: Sequence[Run], prefix: str) -> dict[str, str]:
    """Keys that begin with a prefix, with the rest of their names."""
    keys = dict.fromkeys(key for run in runs for key in run.steps.columns if key.startswith(prefix))
    return {key: key.removeprefix(prefix) for key in keys}


def chart(title: str, runs: Sequence[Run], keys: Mapping[str, str], *, scale: float = 1.0, log: bool = False,
          zero: bool = False, note: str = "") -> str:
    """A chart of figures over iterations; nothing where no run has them."""
    return line_chart(title, lines_of(runs, keys, scale=scale), log=log, zero=zero, note=note)


def any_above(runs: Sequence[Run], key: str, bound: float = 0.0) -> bool:
    """Whether a figure is above a bound anywhere."""
    return any(bool((run.steps.get(key) > bound).any()) for run in runs)


def varies(runs: Sequence[Run], key: str) -> bool:
    """Whether a figure changes within a run."""
    return any(run.steps.has(key) and float(np.nanmax(run.steps.get(key))) != float(np.nanmin(run.steps.get(key)))
               for run in runs)
