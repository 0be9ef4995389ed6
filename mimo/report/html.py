"""Pieces of HTML pages with charts: the page itself, its sections and tables, and figures that Plotly draws.

A page is one file that needs no other file and no network, so Plotly's own script (4.8 MB) is a part of it. A figure is
a plain dictionary of traces and layout (https://plotly.com/javascript/reference) that this script draws in the
browser. Plotly's Python classes are not used, because importing them takes longer than everything else a page needs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any


def section(title: str, blocks: Iterable[str], intro: str = "") -> str:
    """Return a section with its charts, or nothing if none of them shows anything."""
    shown = [block for block in blocks if block]
    if not shown:
        return ""
    lead = f"<p>{intro}</p>" if intro else ""
    return f'<section><h2>{escape(title)}</h2>{lead}<div class="charts">{"".join(shown)}</div></section>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, numeric_from: int = 1,
          wide: bool = True) -> str:
    """Return a table, or nothing if there is no row.

    Args:
        heads: titles of the columns.
        rows: cells of each row, as HTML.
        title: title of the table.
        numeric_from: columns from this one on hold numbers.
        wide: whether the table takes the width of the page, or that of one chart.
    """
    body = list(rows)
    if not body:
        return ""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<figure{' class="wide"' * wide}>{heading}{plain_table(heads, body, numeric_from=numeric_from)}</figure>'


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric_from: int = 1) -> str:
    """Return a table without title and frame. The arguments are those of `table`."""
    css = ['' if index < numeric_from else ' class="num"' for index in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(css, heads, strict=True))
    cells = "".join("<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(css, row, strict=True)) + "</tr>"
                    for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{cells}</table></div>'


def label(text: str) -> str:
    """Return a text from a file, such as the name of a run, so that Plotly shows it as it is."""
    return escape(text, quote=False)


def figure(title: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], *, height: int,
           note: str = "", wide: bool = False) -> str:
    """Return a chart for `document`.

    Args:
        title: title of the chart, with the unit.
        traces: Plotly's traces. A colour may be a variable of the style sheet, such as `var(--ink)`.
        layout: Plotly's layout, as far as it differs from `TEMPLATE`.
        height: height in pixels.
        note: a sentence under the chart.
        wide: whether the chart takes the width of the page.
    """
    data = json.dumps({"data": traces, "layout": layout}, separators=(",", ":"), allow_nan=False)
    # "</script>" in a name must not end the element.
    data = data.replace("<", "\\u003c")
    return (f'<figure{' class="wide"' * wide}><h3>{escape(title)}</h3>'
            f'<div class="chart" role="img" aria-label="{escape(title)}" data-height="{height}"></div>'
            f'<script type="application/json">{data}</script>'
            f'{f"<figcaption>{escape(note)}</figcaption>" if note else ""}</figure>')


def plotly_script() -> str:
    """Return Plotly's script for browsers, out of its Python package but without importing it."""
    package = importlib.util.find_spec("plotly")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("pages with charts need the package plotly; scripts/setup.sh installs it",
                                  name="plotly")
    return (Path(package.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def document(title: str, css: str, body: str) -> str:
    """Return a whole page.

    Title and body are HTML. `css` has rules beside `CSS`.
    """
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" '
            f'content="{POLICY}"><title>{title}</title><style>{CSS}{css}</style></head><body><main>'
            '<noscript><p>The charts of this page are drawn by JavaScript.</p></noscript>'
            f"{body}</main><script>{plotly_script()}</script><script>{SCRIPT}</script></body></html>\n")


# Content security policy, which browsers enforce: nothing on a page may use the network, not even Plotly's script.
# Charts can be saved as images.
POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:")

# Colours of lines (--s0 to --s5) are Okabe and Ito's, which readers with any colour vision tell apart. They are lighter
# on the dark page.
CSS = """
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fdfdfc; --ink: #131312; --soft: #4c4b48; --line: #e2e1da;
  --axis: #a9a79d; --inside: #fff; --warn: #8a4b00; --warn-back: #fff2dc; --warn-line: #e3b76b;
  --s0: #0067a8; --s1: #c94f00; --s2: #007f5b; --s3: #a3457f; --s4: #9c6f00; --s5: #3d8fc4; }
@media (prefers-color-scheme: dark) { :root { --page: #121211; --card: #1b1b1a; --ink: #f3f2ed; --soft: #c5c3ba;
  --line: #31312e; --axis: #6b6962; --inside: #0b0b0b; --warn: #ffcf87; --warn-back: #33270f; --warn-line: #7a5a1c;
  --s0: #58a8e8; --s1: #ff8f4a; --s2: #35c796; --s3: #e793c4; --s4: #e6b93f; --s5: #a5d6f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 6px; }
h3 { font-size: 14px; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 110ch; color: var(--soft); }
code, pre { font: 13px/1.5 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.warn { background: var(--warn-back); border: 1px solid var(--warn-line); color: var(--warn); border-radius: 8px;
  padding: 10px 16px; margin: 14px 0 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 500px), 1fr)); gap: 12px; }
figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px;
  margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
.chart { min-height: 100px; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 600px) { main { padding: 20px 10px 48px; } figure, .card { padding: 12px 10px; }
  .num { white-space: normal; } }
"""

_AXIS = {"automargin": True, "gridcolor": "var(--line)", "zerolinecolor": "var(--line)", "separatethousands": True,
         "exponentformat": "e", "minexponent": 5}
# Layout of every chart, which its own layout overrides.
TEMPLATE = {"layout": {
    "font": {"color": "var(--soft)", "size": 12, "family": 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'},
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "margin": {"l": 10, "r": 16, "t": 26, "b": 10},
    "xaxis": _AXIS, "yaxis": _AXIS, "bargap": 0.25,
    "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "maxheight": 1000},
    "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--axis)", "font": {"color": "var(--ink)"},
                   "align": "left", "namelength": -1},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--axis)", "activecolor": "var(--ink)"},
}}

# Draws a chart when it comes near the window, so that a page with many of them opens quickly, and again in the other
# colours when the system changes between light and dark. The legend gets its height in addition to the chart's, however
# many lines it takes on a phone. A finger scrolls the page and does not zoom; the buttons of a chart do.
SCRIPT = f"const TEMPLATE = {json.dumps(json.dumps(TEMPLATE))};" + r"""
const touched = matchMedia('(pointer: coarse)').matches;
const CONFIG = {displaylogo: false, responsive: true, modeBarButtons: touched
  ? [['zoomIn2d', 'zoomOut2d', 'autoScale2d']]
  : [['toImage'], ['zoom2d', 'pan2d'], ['zoomIn2d', 'zoomOut2d', 'resetScale2d']]};
const charts = [...document.querySelectorAll('.chart')];
function coloured(json) {
  const style = getComputedStyle(document.documentElement);
  return JSON.parse(json.replace(/"var\((--[\w-]+)\)"/g,
    (_, name) => JSON.stringify(style.getPropertyValue(name).trim())));
}
function draw(chart) {
  const {data, layout} = coloured(chart.nextElementSibling.textContent);
  layout.template = coloured(TEMPLATE);
  if (touched) layout.dragmode = false;
  chart.style.height = chart.dataset.height + 'px';
  Plotly.react(chart, data, layout, CONFIG);
  const legend = chart.querySelector('.legend');
  if (!legend) return;
  const above = legend.getBoundingClientRect().height;
  chart.style.height = +chart.dataset.height + above + 'px';
  Plotly.relayout(chart, {autosize: true, 'margin.t': layout.template.layout.margin.t + above});
}
const near = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(entry => {
  near.unobserve(entry.target);
  draw(entry.target);
}), {rootMargin: '800px'});
charts.forEach(chart => near.observe(chart));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change',
  () => charts.filter(chart => chart.data).forEach(draw));
addEventListener('beforeprint', () => charts.filter(chart => chart.offsetParent && !chart.data).forEach(draw));
for (const choice of document.querySelectorAll('select[data-steps]'))
  choice.addEventListener('change', () => {
    for (const step of document.getElementById(choice.dataset.steps).children)
      step.hidden = step.dataset.step !== choice.value;
    charts.filter(chart => chart.data && chart.offsetParent).forEach(chart => Plotly.Plots.resize(chart));
  });
"""
