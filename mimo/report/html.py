"""Pieces of the page that sections are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from mimo.report.charts import NUM_COLOURS, Line, line_chart
from mimo.report.run_folder import Run, Table

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


# Style sheet and script of the page.


# Colours of lines: Okabe and Ito's, which readers with any colour vision tell apart, lighter on the dark page.
CSS = """
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fdfdfc; --ink: #131312; --soft: #4c4b48; --line: #e2e1da;
  --axis: #a9a79d; --row: #efeee8; --inside: #fff; --around: #00000080;
  --warn: #8a4b00; --warn-back: #fff2dc; --warn-line: #e3b76b;
  --s0: #0067a8; --s1: #c94f00; --s2: #007f5b; --s3: #a3457f; --s4: #9c6f00; --s5: #3d8fc4;
  --forward: #0067a8; --backward: #4f9fd4; --sync: #007f5b; --optimizer: #5b4a9c; --modules: #8f9aa3;
  --bridge: #d55e00; --pipeline: #d99100; --data: #bb5a94; --idle: #8a7a1e; --other: #c9c7be; }
@media (prefers-color-scheme: dark) { :root { --page: #121211; --card: #1b1b1a; --ink: #f3f2ed; --soft: #c5c3ba;
  --line: #31312e; --axis: #6b6962; --row: #262624; --inside: #0b0b0b; --around: #ffffff70;
  --warn: #ffcf87; --warn-back: #33270f;
  --warn-line: #7a5a1c; --s0: #58a8e8; --s1: #ff8f4a; --s2: #35c796; --s3: #e793c4; --s4: #e6b93f; --s5: #a5d6f5;
  --forward: #58a8e8; --backward: #a3d1f2; --sync: #35c796; --optimizer: #b3a4f0; --modules: #7f8a92;
  --bridge: #ff8442; --pipeline: #f0b030; --data: #e793c4; --idle: #cdbd55; --other: #55544e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 6px; }
h3 { font-size: 14px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 110ch; color: var(--soft); }
p.about { max-width: none; margin: 0 0 4px; }
code, pre { font: 13px/1.5 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; max-height: 26em; overflow-y: auto; margin: 8px 0 0; }
.warn { background: var(--warn-back); border: 1px solid var(--warn-line); color: var(--warn); border-radius: 8px;
  padding: 10px 16px; margin: 14px 0 0; }
.warn ul { margin: 0; padding-left: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; margin-top: 18px; }
.tile, figure, .card, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 18px; }
.tile h2 { font-size: 14px; font-weight: 600; color: var(--soft); margin: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.3; margin: 4px 0; overflow-wrap: anywhere; }
.tile p { margin: 0 0 6px; }
.tag { display: inline-block; min-width: 22px; padding: 0 6px; border-radius: 4px; font-size: 13px; font-weight: 700;
  text-align: center; color: var(--inside); background: var(--s0); vertical-align: 2px; }
.tag.b { background: var(--s1); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 500px), 1fr)); gap: 12px; }
figure { margin: 0; min-width: 0; position: relative; }
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure.wide svg { min-width: 760px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px; }
.legend { color: var(--soft); font-size: 13px; margin: 0 0 4px; }
.legend span { margin-right: 16px; white-space: nowrap; display: inline-block; }
.legend i { display: inline-block; width: 14px; height: 11px; border-radius: 3px; margin: 0 6px -1px 0;
  background: var(--c); }
.legend i.dashed { background: repeating-linear-gradient(90deg, var(--c) 0 4px, transparent 4px 6px); }
.legend i.round { width: 10px; height: 10px; border-radius: 50%; }
.legend i.range { opacity: .3; }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .start { text-anchor: start; }
svg .strong { fill: var(--ink); font-weight: 600; }
svg text.inside { fill: var(--inside); stroke: var(--around); stroke-width: 3; paint-order: stroke; font-weight: 600;
  pointer-events: none; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--axis); }
svg .row { fill: var(--row); }
svg .marker { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 5 3; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
svg .line.dashed { stroke-dasharray: 6 4; }
svg .range { fill: var(--c); opacity: .22; }
svg .dot { fill: var(--c); } svg .dot.dashed { fill: var(--card); stroke: var(--c); stroke-width: 1.8; }
svg .zero { stroke: var(--axis); stroke-dasharray: 3 3; }
svg .cursor { stroke: var(--axis); visibility: hidden; }
.c0 { --c: var(--s0); } .c1 { --c: var(--s1); } .c2 { --c: var(--s2); } .c3 { --c: var(--s3); }
.c4 { --c: var(--s4); } .c5 { --c: var(--s5); }
#tip { position: fixed; display: none; pointer-events: none; background: var(--card); border: 1px solid var(--axis);
  border-radius: 6px; padding: 6px 10px; font-size: 13px; line-height: 1.45; z-index: 2; max-width: 420px;
  white-space: pre-line; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; font-size: 14px; }
select { font: inherit; font-size: 14px; padding: 3px 6px; margin: 0 0 8px; }
@media print { #tip { display: none; } }
"""

# Fills of parts of a step: work is solid, waits are hatched.
SOLID = {"k-forward": "forward", "k-backward": "backward", "k-gradient-sync": "sync", "k-optimizer": "optimizer",
         "k-other-modules": "modules", "k-other": "other", "k-row": "row"}
HATCHED = {"k-bridge-wait": "bridge", "k-pipeline-wait": "pipeline", "k-data-wait": "data", "k-idle": "idle"}


def part_css() -> str:
    """Fills of parts in charts and legends."""
    rules = [f"svg .{css} {{ fill: var(--{colour}); }} i.{css} {{ background: var(--{colour}); }}"
             for css, colour in SOLID.items()]
    rules += [f"svg .{css} {{ fill: url(#{css}); }} i.{css} {{ background: repeating-linear-gradient(135deg, "
              f"var(--{colour}) 0 4px, color-mix(in srgb, var(--{colour}) 45%, var(--card)) 4px 6px); }}"
              for css, colour in HATCHED.items()]
    return "\n".join(rules)


def hatches() -> str:
    """The patterns, to stand once on the page."""
    patterns = "".join(
        f'<pattern id="{css}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" style="fill:color-mix(in srgb, var(--{colour}) 45%, var(--card))"/>'
        f'<rect width="4" height="6" style="fill:var(--{colour})"/></pattern>' for css, colour in HATCHED.items())
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{patterns}</defs></svg>'


# Values beside the pointer, and the choice of a step. The page is whole without it.
SCRIPT = """
const tip = document.getElementById('tip');
const say = (event, text) => { tip.textContent = text; tip.style.display = 'block';
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.max(event.clientY - tip.offsetHeight - 10, 4) + 'px'; };
const short = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(3)
  : String(+value.toPrecision(5));
for (const svg of document.querySelectorAll('svg.lines')) {
  const data = JSON.parse(svg.nextElementSibling.textContent), [low, high, start, end] = data.x;
  const cursor = svg.querySelector('.cursor');
  svg.addEventListener('pointermove', event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const wanted = low + (high - low) * (at - start) / (end - start);
    let nearest = null;
    for (const one of data.s) for (const x of one.x)
      if (nearest === null || Math.abs(x - wanted) < Math.abs(nearest - wanted)) nearest = x;
    const lines = [];
    for (const one of data.s) {
      const index = one.x.reduce((best, x, i) => Math.abs(x - nearest) < Math.abs(one.x[best] - nearest) ? i : best, 0);
      if (Math.abs(one.x[index] - nearest) > (high - low) / 100) continue;
      lines.push(one.n + ': ' + short(one.y[index])
        + (one.l ? ' (' + short(one.l[index]) + ' to ' + short(one.h[index]) + ')' : ''));
    }
    const place = start + (nearest - low) / (high - low) * (end - start);
    cursor.setAttribute('x1', place); cursor.setAttribute('x2', place); cursor.style.visibility = 'visible';
    say(event, 'iteration ' + Math.round(nearest).toLocaleString('en') + '\\n' + lines.join('\\n'));
  });
  svg.addEventListener('pointerleave', () => { tip.style.display = 'none'; cursor.style.visibility = 'hidden'; });
}
for (const choice of document.querySelectorAll('select[data-steps]'))
  choice.addEventListener('change', () => { for (const step of document.getElementById(choice.dataset.steps).children)
    step.hidden = step.dataset.step !== choice.value; });
"""
