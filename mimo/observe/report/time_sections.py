"""Sections on time: speed, steps of all ranks, where each grid's time went, waits and stops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from mimo.observe.report.answers import prefetch_beside
from mimo.observe.report.bars import Bar, stacked_bars
from mimo.observe.report.gantt_chart import gantt_chart, num_shapes
from mimo.observe.report.html import any_above, by_module, chart, prefixed, run_name, section, table
from mimo.observe.report.kinds import CSS_OF_PART, ORDER, OTHER_MODULES, WORDS
from mimo.observe.report.lines import Line, line_chart
from mimo.observe.report.rl import ENGINE_PARTS, OWN_PARTS
from mimo.observe.report.run import MAX_STEPS, Run, evenly
from mimo.observe.report.summary import (
    ModuleTime,
    Stops,
    finite,
    ideal_s,
    median,
    module_times,
    steady,
    stops,
    typical,
)
from mimo.observe.report.text import percent, seconds
from mimo.observe.spans import Kind

# Rectangles of the steps of all ranks on a page: about 1 MB.
MAX_SHAPES = 6000
NUM_SLOWEST = 5
TYPICAL = "without the first ones, the fastest and the slowest tenth"
# Slower than this multiple of the median is a slow iteration.
SLOW = 1.5
PART_KEY = re.compile(r"timeline/(?P<module>.+)/(?P<part>[^/]+)-max-s")


def speed_section(runs: Sequence[Run]) -> str:
    """Throughput over iterations."""
    fractions = {"mfu": "MFU"} if any_above(runs, "mfu") else {}
    return section("Speed", [
        chart("Tokens/s per GPU (on a CPU: per process)", runs, {"tokens-per-s-per-gpu": "tokens/s"}, zero=True),
        chart("Time of an iteration (s)", runs, {"iteration-time": "iteration"}, zero=True),
        chart("Model TFLOP/s per GPU (on a CPU: per process)", runs, {"tflops": "TFLOP/s"}, zero=True),
        chart("MFU: share of the peak (%)", runs, fractions, scale=100.0, zero=True),
        chart("Share of the rows' tokens that is not padding", runs, {"packing-utilisation": "not padding"}, zero=True),
        chart("Model FLOPs of an iteration (TFLOP, all ranks)", runs, prefixed(runs, "flops/"), scale=1e-12, zero=True),
    ])


def gantt_section(runs: Sequence[Run]) -> str:
    """One step of all ranks, with a choice where there are several."""
    blocks = []
    for index, run in enumerate(runs):
        if not run.timelines:
            continue
        every = list(run.timelines)
        # Rather fewer steps than a part of each.
        fitting = MAX_SHAPES // len(runs) // max(num_shapes(run.timelines[step]) for step in every)
        chosen = [every[place] for place in evenly(len(every), min(max(fitting, 2), MAX_STEPS // len(runs)))]
        shapes = MAX_SHAPES // (len(chosen) * len(runs))
        charts = "".join(f'<div data-step="{step}"{" hidden" * (place > 0)}>'
                         f"{gantt_chart(run.timelines[step], shapes)}</div>" for place, step in enumerate(chosen))
        choice = ""
        if len(chosen) > 1:
            options = "".join(f'<option value="{step}">iteration {step:,}</option>' for step in chosen)
            choice = f'<label>Step: <select data-steps="steps{index}">{options}</select></label>'
        if len(chosen) < run.num_timelines:
            choice += f" {len(chosen)} of {run.num_timelines} recorded steps are here."
        heading = f"<h3>{escape(run_name(runs, index, run.name))}</h3>" if len(runs) > 1 else ""
        blocks.append(f'<div style="grid-column:1/-1;min-width:0">{heading}{choice}<div id="steps{index}">{charts}'
                      "</div></div>")
    return section("One step, all ranks", blocks, "What every rank did from left to right.")


def _bars(times: Mapping[str, ModuleTime], runs: Sequence[Run], index: int) -> list[Bar]:
    return [Bar(run_name(runs, index, name), {WORDS[part]: each.parts[part] for part in ORDER if part in each.parts})
            for name, each in times.items()]


def where_time_went(runs: Sequence[Run]) -> str:
    """Parts of each grid's step, against the ideal."""
    blocks, every = [], [module_times(run) for run in runs]
    axis_s = max((each.step_s for times in every for each in times.values()), default=0.0)
    for index, (run, times) in enumerate(zip(runs, every, strict=True)):
        if not times:
            continue
        title = "Mean step of a rank of each grid" + (f", run {'AB'[index]}" if len(runs) > 1 else "")
        blocks.append(stacked_bars(title, _bars(times, runs, index), CSS_OF_PART,
                                   axis_s=axis_s,
                                   marker=_marker(times), note=f"{_ideal_words(times)}Means over the ranks of a grid "
                                   f"and the typical iterations: {TYPICAL}.{prefetch_beside(times)}"))
        blocks.append(_parts_table(run, times))
    waits = chart("Longest wait of any rank at the bridge (s)", runs, {"bridge-wait-s": "bridge"}, zero=True)
    ahead = chart("Encoder passes ahead of their microbatch, fullest rank (s)", runs,
                  {"encoder-prefetch-s": "passes ahead"}, zero=True,
                  note="Encoder prefetch. They are in the forward part above, unless they run on a stream of their "
                       "own.")
    return section("Where each grid's time went", [*blocks, _shares(runs) or waits, ahead],
                   "Parts sum to the step. Waiting at the bridge is waiting for the other grid, and the transfer "
                   "itself.")


def _marker(times: Mapping[str, ModuleTime]) -> tuple[float, str] | None:
    """The ideal, where it is known."""
    best, longest = ideal_s(times), max(each.step_s for each in times.values())
    return None if best is None else (best, f"ideal {seconds(best)}: {percent(best / longest)} of the step")


def _ideal_words(times: Mapping[str, ModuleTime]) -> str:
    if ideal_s(times) is None:
        return ""
    if any(OTHER_MODULES in each.parts for each in times.values()):
        return "The ideal is a step in which the ranks do the passes of all modules and nothing else. "
    return "The ideal is a step in which the grid with the longest passes does nothing else. "


def _parts_table(run: Run, times: Mapping[str, ModuleTime]) -> str:
    steps = typical(run.steps)
    rows = []
    for part in ORDER:
        cells = [WORDS[part]]
        for name, each in times.items():
            largest = finite(steps.get(f"timeline/{name}/{part}-max-s"))
            cells += ([seconds(each.parts[part]), percent(each.share(part)),
                       seconds(float(largest.mean())) if len(largest) else ""] if part in each.parts else ["", "", ""])
        if any(each.parts.get(part, 0.0) > 0 for each in times.values()):
            rows.append(cells)
    heads = ["part", *(head for name in times for head in (name, "share", "slowest rank"))]
    return f"<details style='grid-column:1/-1'><summary>As a table</summary>{table(heads, rows)}</details>"


def _shares(runs: Sequence[Run]) -> str:
    """Share of each step that a grid waited at the bridge, over iterations."""
    lines = []
    for place, (key, name) in enumerate(by_module(runs, f"timeline/*/{Kind.BRIDGE_WAIT}-s").items()):
        for index, run in enumerate(runs):
            step = run.steps.get(key.removesuffix(f"{Kind.BRIDGE_WAIT}-s") + "step-s")
            share = np.divide(100 * run.steps.get(key), step, out=np.full(len(step), np.nan), where=step > 0)
            lines.append(Line(run_name(runs, index, name), run.steps.iterations.astype(np.float64), share, place,
                              dashed=index == 1))
    return line_chart("Share of the step that a grid waited at the bridge (%)", lines, zero=True)


def stops_section(runs: Sequence[Run]) -> str:
    """Waits for data, time between iterations, the slowest iterations."""
    blocks = [chart("Longest wait of any rank for data (s)", runs, {"data-wait-s": "data"}, zero=True)]
    between, rows, slowest = [], [], []
    for index, run in enumerate(runs):
        found = stops(run)
        if found is not None and float(found.seconds.max()) > 0:
            between.append(Line(run_name(runs, index, "between iterations"), found.after, found.seconds, index))
            rows += _totals(runs, index, found)
        slowest.append(_slowest(runs, index))
    blocks.append(line_chart("Time between iterations (s)", between, zero=True,
                             note="Evaluations, checkpoints, and in a resumed run the time until it went on."))
    blocks.append(table(["", "total", "share of the run", "longest"], rows, "What an iteration waited for"))
    return section("Waits and stops", [*blocks, *slowest, *_starts(runs)])


def _starts(runs: Sequence[Run]) -> list[str]:
    """What passed before the first iteration was done."""
    found = []
    for index, run in enumerate(runs):
        total = sum(run.start.values())
        rows = [[escape(name), seconds(value), percent(value / total)]
                for name, value in run.start.items() if value > 0]
        title = run_name(runs, index, f"From the start to the end of the first iteration: {seconds(total)}")
        found.append(table(["phase", "time", "share"], rows, title, wide=False))
    return found


def _totals(runs: Sequence[Run], index: int, found: Stops) -> list[list[str]]:
    steps, gaps, checkpoints = runs[index].steps, found.seconds, found.checkpoint_s
    whole = float(gaps.sum()) + float(finite(steps.get("iteration-time")).sum())
    with_evaluation = np.clip(found.evaluation_s - checkpoints, 0.0, np.maximum(gaps - checkpoints, 0.0))
    kinds = {"loader (slowest rank)": finite(steps.get("data-wait-s")), "checkpoints": checkpoints,
             "evaluations": with_evaluation,
             "other time between iterations": np.maximum(gaps - checkpoints - with_evaluation, 0.0)}
    return [[run_name(runs, index, name), seconds(float(values.sum())), percent(float(values.sum()) / whole),
             seconds(float(values.max()))]
            for name, values in kinds.items() if len(values) and float(values.sum()) > 1e-3 * whole]


def _slowest(runs: Sequence[Run], index: int) -> str:
    """The slowest iterations after the first ones, and the part that grew most."""
    table_ = steady(runs[index].steps)
    times, usual = table_.get("iteration-time"), median(table_.get("iteration-time"))
    if usual is None:
        return ""
    order = np.argsort(-np.nan_to_num(times))[:NUM_SLOWEST]
    rows = [[f"{int(table_.iterations[row]):,}", seconds(float(times[row])), f"{float(times[row]) / usual:.1f}",
             _grown(runs[index], row - len(table_))] for row in order.tolist() if times[row] > SLOW * usual]
    title = f"Slowest iterations{f' of {runs[index].name}' if len(runs) > 1 else ''}: usual are {seconds(usual)}"
    return table(["iteration", "time", "times the usual", "what grew most"], rows, title)


def _grown(run: Run, row: int) -> str:
    """Which part took most more than usual in a record, of a module or of an iteration of reinforcement learning."""
    names = dict(ENGINE_PARTS | OWN_PARTS)
    for key in run.steps.columns:
        match = PART_KEY.fullmatch(key)
        if match is not None and match["part"] in WORDS:
            names[key] = f"{match['module']}: {WORDS[match['part']]}"
    most, words = 0.0, ""
    for key, name in names.items():
        column = run.steps.get(key)
        usual = median(column)
        if usual is not None and np.isfinite(column[row]) and column[row] - usual > most:
            most = float(column[row]) - usual
            words = f"{escape(name)}, {seconds(most)} more"
    return words
