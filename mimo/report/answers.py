"""The answers at the top of the page, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mimo.observability.spans import Kind
from mimo.report.run_reader import Run
from mimo.report.summary import (
    LEAST_CHANGE,
    LEAST_ERRORS,
    OTHER_MODULES,
    WAITS,
    WORDS,
    Learning,
    ModuleTime,
    ideal_s,
    joined,
    learning,
    lost_since,
    module_times,
    most_waiting,
    number,
    percent,
    rl_parts,
    rounded,
    seconds,
    speed,
)

# At the bridge, waits below the first share of a step do not count. Other waits are mentioned from the second one on.
LEAST_WAIT, MENTIONED_WAIT = 0.05, 0.1
FURTHER_WAITS = (Kind.PIPELINE_WAIT, Kind.DATA_WAIT, Kind.IDLE)
# Held-out figures that describe the evaluation and are not its results.
NO_RESULTS = ("samples",)


@dataclass(frozen=True)
class Answer:
    """An answer as HTML: a few words, and sentences that explain them."""

    words: str
    sentences: str


def _held_out(found: Learning) -> str:
    """Return a sentence like `Held-out: loss 0.12 (at first 0.9), exact match 95.4 %`."""
    parts = []
    for name, value in found.held_out.items():
        if name in NO_RESULTS or (found.key == "reward" and name != "reward"):
            continue
        # `percent` would show 99.6 % as 100 %.
        show = (lambda share: f"{100 * share:.1f} %") if name == "exact match" else rounded
        before = found.held_out_first.get(name)
        words = "loss" if name == found.key == "lm loss" else escape(name)
        parts.append(f"{words} {show(value)}" + (f" (at first {show(before)})" if before is not None else ""))
    text = f" Held-out: {', '.join(parts)}." if parts else ""
    if found.best is not None:
        text += f" It was better before: {rounded(found.best[1])} at iteration {found.best[0]:,}."
    return text


def did_it_learn(run: Run) -> Answer:
    """Answer from the training loss, or from the reward in reinforcement learning."""
    found = learning(run)
    if found is None:
        return Answer("Not known", "No iteration has a loss or a reward.")
    what = "reward" if found.key == "reward" else "loss"
    lost = lost_since(run.steps, found.key)
    if lost is not None:
        return Answer(f"No: the {what} is not finite", f"No {what} is finite from iteration {lost:,} on. Before that, "
                      f"it was {rounded(found.first)} at first and {rounded(found.last)} at last.")
    if len(run.steps) == 1:
        return Answer("Too early to say", f"One iteration, with a {what} of {rounded(found.first)}.{_held_out(found)}")
    words = {1: "Yes", 0: "Not clearly", -1: "No"}[found.change]
    better, worse = ("rose", "fell") if found.key == "reward" else ("fell", "rose")
    verb = {1: better, 0: "did not change clearly:", -1: worse}[found.change]
    over = (f"means over the first and the last {found.window} of {len(run.steps):,} iterations"
            if found.window > 1 else f"first and last of {len(run.steps):,} iterations")
    if found.change == 0 and found.window > 1:
        over += (f"; a change below {100 * LEAST_CHANGE:.0f} % or below {LEAST_ERRORS:.0f} standard errors of the "
                 "difference does not count")
    values = f"{'from ' * (found.change != 0)}{rounded(found.first)} to {rounded(found.last)}"
    return Answer(f"{words}: {what} {rounded(found.first)} to {rounded(found.last)}",
                  f"The {what} {verb} {values} ({over}).{_held_out(found)}")


def how_fast(run: Run) -> Answer:
    """Answer with medians over the steady iterations."""
    found = speed(run)
    if found is None:
        return Answer("Not known", "No iteration has a time.")
    unit = {"cpu": "process", "cuda": "GPU"}.get(run.flags.get("train", {}).get("device", ""), "rank")
    parts = []
    if found.tokens_per_s is not None:
        rate = found.tokens_per_s
        parts.append(f"{number(round(rate)) if rate >= 100 else rounded(rate)} tokens/s per {unit}")
    if found.tflops is not None:
        parts.append(f"{rounded(found.tflops)} model TFLOP/s per {unit}")
    if found.mfu is not None:
        parts.append(f"MFU {percent(found.mfu)}")
    text = f"{joined(parts)}. These are medians" if parts else "This is the median"
    expected = ""
    if run.predicted is not None:
        share = run.predicted.step_s / found.iteration_s - 1
        expected = (f" mimo plan predicted {seconds(run.predicted.step_s)}, {100 * abs(share):.1f} % "
                    f"{'more' if share > 0 else 'less'}.")
    return Answer(f"{seconds(found.iteration_s)} an iteration",
                  f"{text} over the last {found.num_iterations:,} of {len(run.steps):,} iterations. The time between "
                  f"iterations does not count.{expected}")


def _waits(name: str, each: ModuleTime, least: float = MENTIONED_WAIT, kinds: Sequence[Kind] = FURTHER_WAITS) -> str:
    others = [f"{percent(each.share(kind))} {WORDS[kind]}" for kind in kinds if each.share(kind) >= least]
    return f" {name} spent {joined(others)}." if others else ""


def _slower(times: Mapping[str, ModuleTime]) -> str:
    return "slower" if len(times) == 2 else "slowest"


def prefetch_beside(times: Mapping[str, ModuleTime]) -> str:
    """Return a sentence about encoder prefetch that the timeline does not show, or nothing if it shows all."""
    beside_s = max(each.beside_s for each in times.values())
    if not beside_s:
        return ""
    unknown = "" if ideal_s(times) is not None else f": so it cannot be told which grid is the {_slower(times)} one"
    return (f" Encoder prefetch runs up to {seconds(beside_s)} of passes a step on a stream of its own, which the "
            f"timeline does not show{unknown}.")


def _against_ideal(times: Mapping[str, ModuleTime]) -> str:
    longest, best = max(each.step_s for each in times.values()), ideal_s(times)
    if best is None:
        return prefetch_beside(times)
    slowest = escape(max(times, key=lambda name: times[name].passes_s))
    return (f" The {_slower(times)} grid is {slowest}: its passes alone take {seconds(best)}, "
            f"{percent(best / longest)} of a mean step.{prefetch_beside(times)}")


def who_waited(run: Run) -> Answer:
    """Answer from the step timelines; in reinforcement learning, say what the trainer waited for."""
    if run.learns_from_rewards:
        parts, total, waited = rl_parts(run)
        if not parts:
            return Answer("Not known", "The run has no times of its parts.")
        shares = [f"{name} {percent(value / total)}" for name, value in sorted(parts.items(), key=lambda one: -one[1])
                  if value / total >= 0.01]
        return Answer(f"For completions, {percent(waited / total)} of an iteration",
                      f"Of {seconds(total)}: {joined(shares)}.")
    times = module_times(run)
    if not times:
        return Answer("Not known", "The run has no timeline (--no-timeline).")
    if any(OTHER_MODULES in each.parts for each in times.values()):
        # All grids are on the same ranks, so every grid has the same waits.
        own = [f"{percent(each.passes_s / each.step_s)} passes of {escape(name)}" for name, each in times.items()]
        waits = _waits("The ranks", next(iter(times.values())), LEAST_WAIT, WAITS)
        return Answer("None: they share their ranks", f"Of a step, {joined(own)}.{waits}")
    further = "".join(_waits(f"The {escape(name)} grid", each) for name, each in times.items())
    if len(times) == 1:
        return Answer("None: there is one grid", f"{further}{_against_ideal(times)}".strip())
    name = most_waiting(times)
    share = times[name].share(Kind.BRIDGE_WAIT)
    if share < LEAST_WAIT:
        return Answer("Neither" if len(times) == 2 else "None",
                      f"No grid spent more than {percent(share)} of its step at the bridge."
                      f"{further}{_against_ideal(times)}")
    others = [other for other in times if other != name]
    back = joined([f"the {escape(other)} grid {percent(times[other].share(Kind.BRIDGE_WAIT))}" for other in others])
    return Answer(f"{escape(name)} waited for {escape(others[0]) if len(others) == 1 else 'the others'}, "
                  f"{percent(share)} of its step",
                  f"It spent {seconds(times[name].parts[Kind.BRIDGE_WAIT])} of its mean step of "
                  f"{seconds(times[name].step_s)} at the bridge between the grids ({back}). A grid's step lasts from "
                  "its own start to its last wait, so it may be longer than the median iteration."
                  f"{further}{_against_ideal(times)}")


def compared(runs: Sequence[Run]) -> tuple[str, str]:
    """Compare what two runs learned and how fast they were, with a sentence for each, empty without figures."""
    learned, fast = "", ""
    one, two = (learning(run) for run in runs)
    if one is not None and two is not None and one.key == two.key:
        what = "reward" if one.key == "reward" else "loss"
        gap = two.last - one.last
        learned = f"The last {what} of B is {rounded(abs(gap))} {'above' if gap > 0 else 'below'} that of A."
    first, second = (speed(run) for run in runs)
    if first is not None and second is not None:
        fast = f"An iteration of B takes {rounded(second.iteration_s / first.iteration_s)} times as long as one of A"
        if first.tokens_per_s and second.tokens_per_s:
            fast += f", with {rounded(second.tokens_per_s / first.tokens_per_s)} times the tokens/s"
        fast += "."
    return learned, fast
