"""The page of a run: one HTML file that needs no other file and no network."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from mimo.report.advice import advice_section
from mimo.report.answers import compared, did_it_learn, how_fast, who_waited
from mimo.report.charts import LETTERS, run_name
from mimo.report.generations import generations_section
from mimo.report.html import document
from mimo.report.run_reader import Run, began_unix_s
from mimo.report.sections import (
    compare_section,
    gantt_section,
    lanes,
    learned,
    memory,
    prediction_section,
    rl_section,
    speed_section,
    stops_section,
    where_time_went,
)
from mimo.report.summary import finite, joined, module_times, seconds
from mimo.text import counted

AXES = ("tp", "cp", "pp", "dp", "ep")
# The last variables are the colours of parts of a step, named like their kinds.
CSS = """
:root {
  --forward: #0067a8; --backward: #4f9fd4; --gradient-sync: #007f5b; --optimizer: #5b4a9c; --other-modules: #8f9aa3;
  --bridge-wait: #d55e00; --pipeline-wait: #d99100; --data-wait: #bb5a94; --idle: #8a7a1e; --other: #c9c7be;
  --rest: #e4e2da; }
@media (prefers-color-scheme: dark) { :root {
  --forward: #58a8e8; --backward: #a3d1f2; --gradient-sync: #35c796; --optimizer: #b3a4f0; --other-modules: #7f8a92;
  --bridge-wait: #ff8442; --pipeline-wait: #f0b030; --data-wait: #e793c4; --idle: #cdbd55; --other: #55544e;
  --rest: #34342f; } }
p.about { max-width: none; margin: 0 0 4px; }
pre { white-space: pre-wrap; max-height: 26em; overflow-y: auto; margin: 8px 0 0; }
.warn ul { margin: 0; padding-left: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 12px;
  margin-top: 18px; }
.tile, details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px; }
.tile h2 { font-size: 14px; font-weight: 600; color: var(--soft); margin: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.3; margin: 4px 0; overflow-wrap: anywhere; }
.tile p { margin: 0 0 6px; }
.tag { display: inline-block; min-width: 22px; padding: 0 6px; border-radius: 4px; font-size: 13px; font-weight: 700;
  text-align: center; color: var(--inside); background: var(--s0); vertical-align: 2px; }
.tag.b { background: var(--s1); }
details { margin-top: 12px; }
details.wide { grid-column: 1 / -1; min-width: 0; margin: 0; }
details .charts { margin-top: 10px; }
details figure { background: none; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; }
td:has(.said), .prompt { min-width: 9em; }
.prompt { color: var(--soft); margin-bottom: 8px; }
.cut { color: var(--warn); }
.images { display: flex; flex-wrap: wrap; gap: 8px; margin: 6px 0; color: var(--soft); }
.images img { max-width: 100%; max-height: 220px; min-height: 56px; object-fit: contain; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
select { font: inherit; font-size: 14px; padding: 3px 6px; margin: 0 0 8px; }
"""


def _grids(run: Run) -> str:
    """Return `disjoint grids: vision 2 ranks, language 2 ranks`, from a step of all ranks or else from the flags."""
    layout = run.flags.get("layout", {})
    if run.learns_from_rewards and not run.steps.has("encoder-imbalance"):
        kind = "trainer"
    else:
        kind = f"{layout.get('layout', '')} grids".strip()
    timeline = next(iter(run.timelines.values()), None)
    sizes = Counter(module for rank in (timeline["ranks"] if timeline else ()) for module in rank["modules"])
    if sizes:
        return f"{escape(kind)}: " + joined([f"{escape(name)} {counted(count, 'rank')}"
                                             for name, count in sizes.items()])
    flags = [f"--{part}-{axis} {layout[f'{part}-{axis}']}" for part in ("encoder", "llm") for axis in AXES
             if layout.get(f"{part}-{axis}", 1) != 1]
    return escape(" ".join([kind, *flags]))


def _description(run: Run) -> str:
    model, train = run.flags.get("model", {}), run.flags.get("train", {})
    words = [escape(str(model["model-provider"]))] if "model-provider" in model else []
    source = run.flags.get("data", {}).get("dataset-provider")
    if source is not None:
        words.append(f"on {escape(str(source))}")
    parts = [" ".join(words), _grids(run) if run.flags or run.timelines else "",
             f"device {escape(str(train['device']))}" if "device" in train else ""]
    if len(run.steps):
        planned = run.planned_iterations
        parts.append(f"{int(run.steps.iterations[-1]):,}" + (f" of {planned:,}" if planned else "") + " iterations")
        walls, began = finite(run.steps.get("wall_time")), began_unix_s(run.steps)
        if math.isfinite(began):
            parts.append(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(began))} UTC, "
                         f"{seconds(float(walls[-1]) - began)} long")
    return " &middot; ".join(filter(None, parts))


def _tag(runs: Sequence[Run], index: int) -> str:
    """Return a run's letter on its colour; nothing if there is one run."""
    return f'<span class="tag {"b" * index}">{LETTERS[index]}</span> ' if len(runs) > 1 else ""


def _header(runs: Sequence[Run]) -> str:
    lines = []
    for index, run in enumerate(runs):
        path = f"<code>{escape(str(run.path))}</code> &middot; " if len(runs) > 1 else ""
        lines.append(f'<p class="about">{_tag(runs, index)}{path}{_description(run)}</p>')
    return f"<h1>{_title(runs)}</h1>{''.join(lines)}"


def _title(runs: Sequence[Run]) -> str:
    return " against ".join(escape(run.name) for run in runs)


def _tiles(runs: Sequence[Run]) -> str:
    """Return the three answers, each with those of both runs if there are two."""
    learned_more, fast_more = compared(runs) if len(runs) > 1 else ("", "")
    rewarded = all(run.learns_from_rewards for run in runs)
    shown = []
    for question, answer_of, more in (
            ("Did it learn?", did_it_learn, learned_more),
            ("How fast was it?", how_fast, fast_more),
            ("What did the trainer wait for?" if rewarded else "Which grid waited for which?", who_waited, "")):
        body = []
        for index, run in enumerate(runs):
            answer = answer_of(run)
            body.append(f"<b>{_tag(runs, index)}{answer.words}</b><p>{answer.sentences}</p>")
        if more:
            body.append(f"<p>{more}</p>")
        shown.append(f'<div class="tile"><h2>{question}</h2>{"".join(body)}</div>')
    return f'<div class="tiles">{"".join(shown)}</div>'


def _left_out(run: Run) -> list[str]:
    """List what the page does not show of a run, and why."""
    found: list[str] = []
    steps = run.steps
    if not len(steps):
        return found
    if not run.timelines and not run.learns_from_rewards:
        found.append("a step of all ranks: there is no timeline/step-N.json, which runs without --no-timeline write")
    if not module_times(run) and not run.learns_from_rewards:
        found.append("where each grid's time went: the run has no timeline (--no-timeline)")
    if not len(run.evaluations):
        found.append("held-out figures: the run was not evaluated")
    if run.learns_from_rewards and not run.generations:
        found.append("completions: there is no generations.jsonl, which runs without --generations-mib 0 write")
    if not steps.has("tflops") and not run.learns_from_rewards:
        found.append("TFLOP/s: the model provider does not count them")
    elif not steps.has("mfu") and not run.learns_from_rewards:
        found.append("MFU: the device's peak is not known (--peak-tflops says it)")
    return found


def _footer(runs: Sequence[Run]) -> str:
    parts = []
    for index, run in enumerate(runs):
        letter = run_name(runs, index, "")
        missing = _left_out(run)
        if missing:
            parts.append(f"<p>{letter}Not shown: {'; '.join(map(escape, missing))}.</p>")
        if run.stall:
            parts.append(f"<details open><summary>{letter}Report of the stall</summary><pre>{escape(run.stall)}</pre>"
                         "</details>")
        if run.flags:
            flags = "\n".join(f"--{flag} {value}" for section in run.flags.values() for flag, value in section.items())
            parts.append(f"<details><summary>{letter}All flags</summary><pre>{escape(flags)}</pre></details>")
    return f'<section><h2>About the run{"s" * (len(runs) - 1)}</h2>{"".join(parts)}</section>' if parts else ""


def page(runs: Sequence[Run]) -> str:
    """Return the whole page of one run, or of two side by side."""
    problems = [run_name(runs, index, escape(problem)) for index, run in enumerate(runs) for problem in run.problems]
    warning = f'<div class="warn"><ul>{"".join(f"<li>{each}</li>" for each in problems)}</ul></div>' if problems else ""
    body = [_header(runs), warning, _tiles(runs), advice_section(runs), compare_section(runs),
            learned(runs), generations_section(runs), gantt_section(runs), where_time_went(runs), speed_section(runs),
            prediction_section(runs), rl_section(runs), lanes(runs), stops_section(runs), memory(runs), _footer(runs)]
    return document(_title(runs), CSS, "".join(body))
