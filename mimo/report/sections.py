"""The sections of the page: learning, one step of all ranks, where time went, speed, lanes, waits, memory, RL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mimo.observability.spans import Kind
from mimo.report.answers import prefetch_beside
from mimo.report.charts import (
    LETTERS,
    Bar,
    Line,
    chart,
    evaluated,
    gantt_chart,
    line_chart,
    lines_of,
    num_intervals,
    run_name,
    stacked_bars,
)
from mimo.report.html import section, table
from mimo.report.run_reader import EVALUATED, MAX_STEPS, Floats, Run, evenly
from mimo.report.summary import (
    ENGINE_PARTS,
    KIND_OF_PART,
    KIND_OF_RL,
    ORDER,
    OTHER_MODULES,
    OWN_PARTS,
    WORDS,
    ModuleTime,
    Stops,
    finite,
    ideal_s,
    mean,
    median,
    module_times,
    number,
    percent,
    rl_parts,
    rounded,
    seconds,
    size,
    speed,
    steady,
    stops,
    typical,
)

# Intervals of the steps of all ranks on a page: about 1 MB.
MAX_INTERVALS = 6000
NUM_SLOWEST = 5
TYPICAL = "without the first ones, the fastest and the slowest tenth"
# Slower than this multiple of the median is a slow iteration.
SLOW = 1.5
PART_KEY = re.compile(r"timeline/(?P<module>.+)/(?P<part>[^/]+)-max-s")


def by_module(runs: Sequence[Run], pattern: str) -> dict[str, str]:
    """Return the keys of all modules of the runs with the module's name, which `*` in the pattern stands for."""
    names = dict.fromkeys(name for run in runs for name in run.modules)
    keys = {pattern.replace("*", name): name for name in names}
    return {key: name for key, name in keys.items() if any(key in run.steps.columns for run in runs)}


def prefixed(runs: Sequence[Run], prefix: str) -> dict[str, str]:
    """Return the keys that begin with a prefix, with the rest of their names."""
    keys = dict.fromkeys(key for run in runs for key in run.steps.columns if key.startswith(prefix))
    return {key: key.removeprefix(prefix) for key in keys}


def any_above(runs: Sequence[Run], key: str, bound: float = 0.0) -> bool:
    """Whether a figure is above a bound anywhere."""
    return any(bool((run.steps.get(key) > bound).any()) for run in runs)


def varies(runs: Sequence[Run], key: str) -> bool:
    """Whether a figure changes within a run."""
    return any(run.steps.has(key) and float(np.nanmax(run.steps.get(key))) != float(np.nanmin(run.steps.get(key)))
               for run in runs)


def speed_section(runs: Sequence[Run]) -> str:
    """Chart the throughput over iterations."""
    fractions = {"mfu": "MFU"} if any_above(runs, "mfu") else {}
    return section("Speed", [
        chart("Tokens/s per GPU (on a CPU: per process)", runs, {"tokens-per-s-per-gpu": "tokens/s"}, zero=True),
        chart("Time of an iteration (s)", runs, {"iteration-time": "iteration"}, zero=True),
        chart("Model TFLOP/s per GPU (on a CPU: per process)", runs, {"tflops": "TFLOP/s"}, zero=True),
        chart("MFU: share of the peak (%)", runs, fractions, scale=100.0, zero=True),
        chart("Share of the rows' tokens that is not padding", runs, {"packing-utilisation": "not padding"}, zero=True),
        chart("Model FLOPs of an iteration (TFLOP, all ranks)", runs, prefixed(runs, "flops/"), scale=1e-12, zero=True),
    ])


def prediction_section(runs: Sequence[Run]) -> str:
    """Show the step and the memory that `mimo plan` predicted beside those of the run."""
    rows, notes = [], []
    for index, run in enumerate(runs):
        found, fast = run.predicted, speed(run)
        if found is None:
            continue
        peaks = [finite(column) for key, column in run.steps.columns.items() if key.startswith("peak-memory-bytes/")]
        peak_gib = max((float(values.max()) / 2**30 for values in peaks if len(values)), default=None)
        step_s = None if fast is None else fast.iteration_s
        for name, predicted, measured, show in (
                ("step", found.step_s, step_s, seconds),
                ("tokens/s per GPU", found.tokens_per_s, None if fast is None else fast.tokens_per_s, rounded),
                (f"peak memory of the fullest rank, GiB ({found.fullest})", found.memory_gib, peak_gib, rounded)):
            cells = [show(measured), f"{100 * (predicted / measured - 1):+.1f} %"] if measured else ["", ""]
            rows.append([escape(run_name(runs, index, name)), show(predicted), *cells])
        if step_s:
            rows.append([escape(run_name(runs, index, "step without transfers, with images shared out evenly")),
                         seconds(found.bound_s), seconds(step_s), f"{percent(found.bound_s / step_s)} of it reached"])
        if found.other_data:
            notes.append(escape(run_name(runs, index, "The prediction has other data than the run, so its images and "
                                                      "lengths may differ.")))
    return section("Prediction and run", [table(["", "mimo plan", "measured", "error of the prediction"], rows)],
                   " ".join(["The measured step is the median over the iterations that count for the speed above. "
                             "Memory is the highest of any iteration.", *notes]))


def gantt_section(runs: Sequence[Run]) -> str:
    """Chart one step of all ranks, with a choice if there are several."""
    blocks = []
    for index, run in enumerate(runs):
        if not run.timelines:
            continue
        every = list(run.timelines)
        # Fewer whole steps are better than a part of every step.
        fitting = MAX_INTERVALS // len(runs) // max(1, *(num_intervals(run.timelines[step]) for step in every))
        chosen = [every[place] for place in evenly(len(every), min(max(fitting, 2), MAX_STEPS // len(runs)))]
        most = MAX_INTERVALS // (len(chosen) * len(runs))
        charts = "".join(f'<div data-step="{step}"{" hidden" * (place > 0)}>'
                         f"{gantt_chart(run.timelines[step], most)}</div>" for place, step in enumerate(chosen))
        choice = ""
        if len(chosen) > 1:
            options = "".join(f'<option value="{step}">iteration {step:,}</option>' for step in chosen)
            choice = f'<label>Step: <select data-steps="steps{index}">{options}</select></label>'
        if len(chosen) < run.num_timelines:
            choice += f" {len(chosen)} of {run.num_timelines} recorded steps are here."
        heading = f"<h3>{escape(run_name(runs, index, run.name))}</h3>" if len(runs) > 1 else ""
        blocks.append(f'<div style="grid-column:1/-1;min-width:0">{heading}{choice}<div id="steps{index}">{charts}'
                      "</div></div>")
    return section("One step, all ranks", blocks, "Each row is a rank. Time runs from left to right.")


def where_time_went(runs: Sequence[Run]) -> str:
    """Chart the parts of each grid's step, against the ideal."""
    blocks, every = [], [module_times(run) for run in runs]
    axis_s = max((each.step_s for times in every for each in times.values()), default=0.0)
    for index, (run, times) in enumerate(zip(runs, every, strict=True)):
        if not times:
            continue
        title = "Mean step of a rank of each grid" + (f", run {LETTERS[index]}" if len(runs) > 1 else "")
        bars = [Bar(run_name(runs, index, name),
                    {WORDS[part]: each.parts[part] for part in ORDER if part in each.parts})
                for name, each in times.items()]
        best, marker, note = ideal_s(times), None, ""
        if best is not None:
            longest = max(each.step_s for each in times.values())
            marker = best, f"ideal {seconds(best)}: {percent(best / longest)} of the step"
            shared = any(OTHER_MODULES in each.parts for each in times.values())
            note = ("The ideal is a step in which the ranks do the passes of all modules and nothing else. " if shared
                    else "The ideal is a step in which the grid with the longest passes does nothing else. ")
        note += f"Means over the ranks of a grid and the typical iterations: {TYPICAL}.{prefetch_beside(times)}"
        blocks.append(stacked_bars(title, bars, KIND_OF_PART, axis_s=axis_s, marker=marker, note=note))
        blocks.append(_parts_table(run, times))
    keys = {"bridge-wait-s": "bridge"} if any_above(runs, "bridge-wait-s") else {}
    waits = chart("Longest wait of any rank at the bridge (s)", runs, keys, zero=True)
    ahead = chart("Encoder passes ahead of their microbatch, fullest rank (s)", runs,
                  {"encoder-prefetch-s": "passes ahead"}, zero=True,
                  note="Encoder prefetch. They are in the forward part above, unless they run on a stream of their "
                       "own.")
    words = ["The parts of a grid sum to its step."]
    if any_above(runs, "bridge-wait-s"):
        words.append("Waiting at the bridge is waiting for the other grid, and the transfer itself.")
    if any(run.learns_from_rewards for run in runs):
        words.append("In reinforcement learning, waiting for data is waiting for completions, the refit included.")
    return section("Where each grid's time went", [*blocks, _shares(runs) or waits, ahead], " ".join(words))


def _parts_table(run: Run, times: Mapping[str, ModuleTime]) -> str:
    steps = typical(run.steps)
    rows = []
    for part in ORDER:
        cells = [WORDS[part]]
        for name, each in times.items():
            largest_s = mean(steps.get(f"timeline/{name}/{part}-max-s"))
            cells += ([seconds(each.parts[part]), percent(each.share(part)),
                       "" if largest_s is None else seconds(largest_s)] if part in each.parts else ["", "", ""])
        if any(each.parts.get(part, 0.0) > 0 for each in times.values()):
            rows.append(cells)
    heads = ["part", *(head for name in times for head in (name, "share", "slowest rank"))]
    return f"<details style='grid-column:1/-1'><summary>As a table</summary>{table(heads, rows)}</details>"


def _shares(runs: Sequence[Run]) -> str:
    """Chart the share of each step that a grid waited at the bridge."""
    lines = []
    for place, (key, name) in enumerate(by_module(runs, f"timeline/*/{Kind.BRIDGE_WAIT}-s").items()):
        for index, run in enumerate(runs):
            step = run.steps.get(key.removesuffix(f"{Kind.BRIDGE_WAIT}-s") + "step-s")
            share = np.divide(100 * run.steps.get(key), step, out=np.full(len(step), np.nan), where=step > 0)
            lines.append(Line(run_name(runs, index, name), run.steps.iterations.astype(np.float64), share, place,
                              dashed=index == 1))
    if not any((line.y > 0).any() for line in lines):  # one grid, or grids that share ranks
        return ""
    return line_chart("Share of the step that a grid waited at the bridge (%)", lines, zero=True)


def stops_section(runs: Sequence[Run]) -> str:
    """Show waits for data, time between iterations, and the slowest iterations."""
    blocks = [chart("Longest wait of any rank for data (s)", runs, {"data-wait-s": "data"}, zero=True)]
    between, rows, slowest, starts = [], [], [], []
    for index, run in enumerate(runs):
        found = stops(run)
        if found is not None and float(found.seconds.max()) > 0:
            between.append(Line(run_name(runs, index, "between iterations"), found.after, found.seconds, index))
            rows += _totals(runs, index, found)
        slowest.append(_slowest(runs, index))
        start_s = sum(run.start.values())
        starts.append(table(["phase", "time", "share"], [[escape(name), seconds(value), percent(value / start_s)]
                                                         for name, value in run.start.items() if value > 0],
                            run_name(runs, index, f"From the start to the end of the first iteration: "
                                                  f"{seconds(start_s)}"), wide=False))
    blocks.append(line_chart("Time between iterations (s)", between, zero=True,
                             note="Evaluations and checkpoints lie between iterations. So does the time until a "
                                  "resumed run continued."))
    blocks.append(table(["", "total", "share of the run", "longest"], rows, "What an iteration waited for"))
    return section("Waits and stops", [*blocks, *slowest, *starts])


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
    """List the slowest iterations after the first ones, each with the part that grew most."""
    steps = steady(runs[index].steps)
    times = steps.get("iteration-time")
    usual = median(times)
    if usual is None:
        return ""
    order = np.argsort(-np.nan_to_num(times))[:NUM_SLOWEST]
    rows = [[f"{int(steps.iterations[row]):,}", seconds(float(times[row])), f"{float(times[row]) / usual:.1f}",
             _grown(runs[index], row - len(steps))] for row in order.tolist() if times[row] > SLOW * usual]
    whose = f" of {runs[index].name}" if len(runs) > 1 else ""
    title = f"Slowest iterations{whose} (the median takes {seconds(usual)})"
    return table(["iteration", "time", "times the median", "what took longer"], rows, title)


def _grown(run: Run, row: int) -> str:
    """Name the part of a module's step, or of an RL iteration, that exceeds its usual time most in a record."""
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


# Two runs side by side: the difference of their losses, and of their flags.

NUM_ROWS = 8
# Flags that say where a run is, but not what it is.
NO_FLAGS = ("run-dir", "tensorboard-dir")


@dataclass(frozen=True)
class Difference:
    """Figures of two runs at the iterations that both have.

    Attributes:
        key: key of the figure.
        iterations: iterations in which both figures are finite, float64 `[n]`.
        one, two: finite figures of both runs, float64 `[n]`.
        one_sided: iterations in which only one run's figure is finite, float64.
        lost_by: letter of the run whose figure is not finite at the first of these; empty without one.
        num_shared: iterations that both have, finite or not.
    """

    key: str
    iterations: Floats
    one: Floats
    two: Floats
    one_sided: Floats
    lost_by: str
    num_shared: int

    @property
    def first_unequal(self) -> int | None:
        """First iteration at which the runs differ, if only in what is finite; None if there is none."""
        unequal = [*self.iterations[self.one != self.two][:1], *self.one_sided[:1]]
        return int(min(unequal)) if unequal else None


def difference(one: Run, two: Run) -> Difference | None:
    """Compare losses, or rewards in reinforcement learning; None if no iteration has a finite one."""
    if one.learns_from_rewards != two.learns_from_rewards:
        return None
    key = "reward" if one.learns_from_rewards else "lm loss"
    shared, left, right = np.intersect1d(one.steps.iterations, two.steps.iterations, return_indices=True)
    first, second = one.steps.get(key)[left], two.steps.get(key)[right]
    kept, lost = np.isfinite(first) & np.isfinite(second), np.isfinite(first) != np.isfinite(second)
    if not (kept | lost).any():
        return None
    lost_by = "".join("B" if is_finite else "A" for is_finite in np.isfinite(first[lost])[:1].tolist())
    return Difference(key, shared[kept].astype(np.float64), first[kept], second[kept],
                      shared[lost].astype(np.float64), lost_by, len(shared))


def _gap_words(found: Difference) -> str:
    gap = found.two - found.one
    if not len(gap):
        return ""
    every = len(gap) == found.num_shared
    which = f"{len(gap):,} iterations {'that both have' if every else 'in which both are finite'}"
    if not gap.any():
        return f"They are equal to the last digit in {'all' if every else 'the'} {which}."
    place = int(np.abs(gap).argmax())
    average, same = float(np.abs(gap).mean()), ""
    share = average / (float(np.abs(found.one).mean()) or 1.0)
    if found.first_unequal is not None and found.first_unequal > found.iterations[0]:
        same = f" They are equal to the last digit before iteration {found.first_unequal:,}."
    what = "rewards" if found.key == "reward" else "losses"
    return (f"Over the {which}, their {what} differ by {rounded(average)} on average ({rounded(100 * share)} %), and "
            f"by at most {rounded(float(abs(gap[place])))} (iteration {int(found.iterations[place]):,}).{same}")


def compare_section(runs: Sequence[Run]) -> str:
    """Show how the losses and the flags of two runs differ; nothing for one run."""
    if len(runs) < 2:
        return ""
    found = difference(*runs)
    blocks, intro = [], ""
    if found is not None:
        gap = found.two - found.one
        what = "reward" if found.key == "reward" else "loss"
        if gap.any():
            blocks.append(line_chart(f"Difference of the {what}, B minus A",
                                     [Line("B minus A", found.iterations, gap)], zero=True))
        places = evenly(len(gap), NUM_ROWS)
        rows = [[f"{int(at):,}", number(first), number(second), number(second - first),
                 f"{rounded(100 * (second - first) / first)} %" if first else ""]
                for at, first, second in np.stack([found.iterations, found.one, found.two], 1)[places].tolist()]
        blocks.append(table(["iteration", f"A: {what}", f"B: {what}", "B minus A", "share of A"], rows, wide=False))
        sentences = [_gap_words(found)]
        if len(found.one_sided):
            sentences.append(f"In {len(found.one_sided):,} of the {found.num_shared:,} iterations that both have, only "
                             f"one run's figure is finite, first in iteration {int(found.one_sided[0]):,} "
                             f"({found.lost_by}'s is not).")
        intro = " ".join(filter(None, sentences))
    blocks.append(_flags(*runs))
    if intro and not any(blocks):  # two runs with equal flags and nothing to compare: the sentence is all there is
        blocks, intro = [f"<p>{intro}</p>"], ""
    return section("A against B", blocks, intro)


def _flags(one: Run, two: Run) -> str:
    rows = []
    for name in dict.fromkeys([*one.flags, *two.flags]):
        first, second = one.flags.get(name, {}), two.flags.get(name, {})
        for flag in dict.fromkeys([*first, *second]):
            if flag not in NO_FLAGS and first.get(flag) != second.get(flag):
                shown = [escape(str(values[flag])) if flag in values else "&ndash;" for values in (first, second)]
                rows.append([f"<code>--{escape(flag)}</code>", *shown])
    return table(["flag", "A", "B"], rows, "Flags that differ", numeric_from=3)


# What was learned.


def learned(runs: Sequence[Run]) -> str:
    """Chart losses, held-out figures, learning rates and gradients."""
    rates = prefixed(runs, "learning-rate/") or {"learning-rate": "learning rate"}
    skipped = " Skipped steps have none." if any_above(runs, "skipped-iterations") else ""
    loss_scale = {"loss-scale": "loss scale"} if varies(runs, "loss-scale") else {}
    # Losses of MoE balance and of multi-token prediction's depths.
    further = {key: key for run in runs for key in run.steps.columns
               if key != "lm loss" and (key.endswith(" loss") or key.endswith("_loss")) and not key.startswith("moe/")}
    rewarded = any(run.learns_from_rewards for run in runs)
    key, title = ("reward", "Reward") if rewarded else ("lm loss", "Loss (nats per target token)")
    lines = lines_of(runs, {key: "training"}) + evaluated(runs, key + EVALUATED, "held-out")
    held_out = []
    if not rewarded:  # with rewards, the other held-out figures are those of completions
        names = dict.fromkeys(key.removesuffix(EVALUATED) for run in runs for key in run.evaluations.columns
                              if key.endswith(EVALUATED))
        held_out = [line_chart(f"Held-out: {name}", evaluated(runs, name + EVALUATED, name, colour=0), zero=True)
                    for name in names if name not in ("lm loss", "reward", "samples")]
    return section("Learning", [
        line_chart(title, lines), *held_out,
        chart("Further losses", runs, further),
        chart("Policy loss", runs, {"loss": "policy loss"}) if rewarded else "",
        chart("Learning rate", runs, rates, zero=True),
        chart("Gradient norm, before clipping", runs, {"grad-norm": "gradient norm"}, log=True,
              note=f"Logarithmic axis.{skipped}"),
        chart("Loss scale", runs, loss_scale, log=True, note="Logarithmic axis."),
    ])


def lanes(runs: Sequence[Run]) -> str:
    """Chart how evenly lanes, and with them the ranks of the encoder, are filled."""
    imbalance = chart("Encoder imbalance", runs, {"encoder-imbalance": "as trained",
                                                  "encoder-imbalance-unbalanced": "without balancing"},
                      note="Tokens in the encoder's layers on the fullest lane over the mean of all lanes. With "
                           "encoder windows: work of the busiest replica over the mean. 1 is even.")
    uneven = ("encoder-imbalance", "encoder-imbalance-unbalanced")
    charts = [imbalance if any(any_above(runs, key, 1.0) for key in uneven) else ""]
    for kind in ("image", "text"):
        least, most = (f"timeline/{kind}-tokens-per-lane/{end}" for end in ("min", "max"))
        differs = any(run.steps.has(most) and bool((run.steps.get(least) < run.steps.get(most)).any()) for run in runs)
        if differs:
            charts.append(chart(f"{kind.capitalize()} tokens of a lane", runs, {most: "fullest lane",
                                                                                least: "emptiest lane"}, zero=True))
    return section("Lanes", charts, "A lane is the data of one replica of the language model. The lane with most "
                                    "tokens keeps the others waiting.")


def memory(runs: Sequence[Run]) -> str:
    """Chart the peak memory of each module."""
    return section("Memory", [chart("Peak memory of the fullest rank (GiB)", runs,
                                    by_module(runs, "peak-memory-bytes/*"), scale=2.0**-30, zero=True)])


# Reinforcement learning.


# Figures that are shares of prompts, completions or tokens, with their words.
RL_SHARES = {"equal-reward-prompts": "prompts whose completions have one reward",
             "truncated-completions": "cut by the limit", "importance-clipped-fraction": "clipped importance weights",
             "clipped-low": "clipped low", "clipped-high": "clipped high"}


def rl_section(runs: Sequence[Run]) -> str:
    """Show where an iteration of reinforcement learning went, completions, mismatch and refits."""
    if not any(run.learns_from_rewards for run in runs):
        return ""
    bars = [Bar(run_name(runs, index, "iteration"), parts) for index, run in enumerate(runs)
            if (parts := rl_parts(run)[0])]
    split = stacked_bars("Where an iteration went, mean", bars, KIND_OF_RL,
                         note="Hatched: the trainer waits for completions. Solid: its own work.") if bars else ""
    shares = {key: name for key, name in RL_SHARES.items() if any_above(runs, key)}
    return section("Reinforcement learning", [
        split, _refits(runs),
        chart("gen-kl: trainer against engine (nats per token)", runs, {"gen-kl": "gen-kl"}, log=True,
              note="Logarithmic axis. If it is large, engine and trainer do not compute the same model."),
        chart("Length of completions (tokens)", runs, {"completion-length": "mean", "completion-length-max": "longest"},
              zero=True),
        chart("Entropy (nats per token)", runs, {"entropy": "entropy"}, zero=True),
        chart("Shares of prompts, completions and tokens", runs, shares, zero=True),
        chart("Time of a refit (s)", runs, {"refit-s": "refit"}, zero=True),
        chart("KL divergence from the reference (nats per token)", runs,
              {"reference-kl": "reference-kl"} if any_above(runs, "reference-kl") else {}),
    ])


def _refits(runs: Sequence[Run]) -> str:
    rows = []
    for index, run in enumerate(runs):
        steps = steady(run.steps)
        taken, moved = median(steps.get("refit-s")), median(steps.get("refit-bytes"))
        if taken is None or moved is None:
            continue
        rows.append([escape(run_name(runs, index, run.name)), number(len(finite(run.steps.get("refit-s")))),
                     seconds(taken), seconds(float(np.nanmax(run.steps.get("refit-s")))), size(moved),
                     f"{size(moved / taken)}/s" if taken else ""])
    return table(["", "refits", "median", "longest", "bytes", "rate"], rows, "Refits: weights to the engine")
