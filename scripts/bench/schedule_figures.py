"""Figures of scripts/bench/schedule.py: each grid alone, what a schedule can reach, and where a step's time went.

The time of a step is that of one grid, the one whose passes take longest (`critical`), averaged over its ranks. Every
interval of these ranks goes to one part:

    ideal            seconds of the passes when the grid runs alone, mean over its ranks: no bubble, no straggler
    slower passes    the additional time of the same passes inside the step
    imbalance        waits while another lane or, in the steady part, the other grid has a longer microbatch
    bubble           waits inside the module's own pipeline
    fill and drain   waits before the grid has its first work and after its last, while the other grid works
    bridge           waits for the other grid while nobody computes: the transfer itself
    gradient sync, optimizer, data, other

The part of a wait depends on what the other ranks do at that moment. If nothing that they do explains it, the wait
counts as its own kind: transfer, reduction, or `other`.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mimo.grid.spec import Layout
from mimo.observability.spans import Interval, Kind
from mimo.protocols import LANGUAGE
from scripts.bench.layout_search import split_efficiency


def prefetch_bound(encoder: float, language: float) -> float:
    """Speedup of a microbatch if the encoder's share runs beside the language model's instead of before it.

    (t_enc + t_lm) / max(t_enc, t_lm): 1 if one of them takes no time, 2 if both take the same.
    """
    return (encoder + language) / max(encoder, language)


def prefetch_bound_of_step(encoder: float, language: float, num_microbatches: int, num_stages: int = 1) -> float:
    """Speedup of a step if a frozen encoder runs a step ahead instead of as the stage before the language model.

    As a stage, the encoder works beside the language model's p stages already, except for the pass of the first
    microbatch and the last passes of the language model:
    (t_enc + (M - 1) max(t_enc, t_lm) + p t_lm) / max(M t_enc, (M - 1 + p) t_lm). This is `prefetch_bound` for one
    microbatch, and tends to 1 for many.

    Args:
        encoder: time of a microbatch.
        language: time of a microbatch on one stage.
        num_microbatches: M.
        num_stages: p.
    """
    serial = encoder + (num_microbatches - 1) * max(encoder, language) + num_stages * language
    return serial / max(num_microbatches * encoder, (num_microbatches - 1 + num_stages) * language)


def bound_of_eta(encoder: float, ends: float, language: float, num_microbatches: int, num_stages: int = 1) -> float:
    """Bound of eta for a trained encoder, however far it runs ahead.

    The first microbatch has to be encoded before the language model begins, and the encoder's last backward pass comes
    after it, as do the passes through its other stages. Hence a step takes at least
    max(M t_enc, t_ends + (M - 1 + p) t_lm), and eta is at most M max(t_enc, t_lm) over that.

    Args:
        encoder: time of a microbatch, the mean.
        ends: time of the encoder's first forward and last backward pass.
        language: time of a microbatch on one stage.
        num_microbatches: M.
        num_stages: p.
    """
    step = max(num_microbatches * encoder, ends + (num_microbatches - 1 + num_stages) * language)
    return num_microbatches * max(encoder, language) / step


def straggler_factor(times: Sequence[Sequence[float]]) -> float:
    """Sum over microbatches of the slowest lane's time, over that of the mean lane. `times[microbatch][lane]`."""
    return sum(max(lanes) for lanes in times) / sum(statistics.fmean(lanes) for lanes in times)


def bubble_share(num_stages: int, num_microbatches: int) -> float:
    """Share of time in which a stage of a 1F1B pipeline without interleaving has nothing to do: (p - 1) / (M + p - 1).

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473), section 2.2.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


IDEAL, SLOWER, IMBALANCE, BUBBLE, FILL = "ideal", "slower passes", "imbalance", "bubble", "fill and drain"
BRIDGE, GRADIENT_SYNC, OPTIMIZER, DATA, OTHER = "bridge", "gradient sync", "optimizer", "data", "other"
PARTS = (IDEAL, SLOWER, IMBALANCE, BUBBLE, FILL, BRIDGE, GRADIENT_SYNC, OPTIMIZER, DATA, OTHER)
PASSES = (Kind.FORWARD, Kind.BACKWARD)
# The part of a wait that nothing explains that other ranks do.
OWN_PART = {Kind.BRIDGE_WAIT: BRIDGE, Kind.PIPELINE_WAIT: BUBBLE, Kind.DATA_WAIT: DATA,
            Kind.GRADIENT_SYNC: GRADIENT_SYNC, Kind.OPTIMIZER: OPTIMIZER, Kind.IDLE: OTHER, Kind.OTHER: OTHER}
WAITS = (Kind.BRIDGE_WAIT, Kind.PIPELINE_WAIT, Kind.GRADIENT_SYNC, Kind.IDLE)

Span = tuple[float, float]


@dataclass(frozen=True)
class RankStep:
    """One rank's intervals in a step.

    Attributes:
        rank: its global rank.
        module: the module that it holds.
        lane: its data-parallel index in the module's grid.
        intervals: the step without gaps, in order, on one clock for all ranks.
    """

    rank: int
    module: str
    lane: int
    intervals: Sequence[Interval]

    @property
    def seconds(self) -> float:
        return self.intervals[-1].end_s - self.intervals[0].begin_s


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch or overlap. The result is in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def cut(span: Span, cover: Sequence[Span]) -> tuple[float, list[Span]]:
    """Return the seconds of `span` inside `cover` (from `merged`), and the pieces of `span` outside it."""
    begin, end = span
    inside, outside = 0.0, []
    index = max(bisect_left(cover, (begin, begin)) - 1, 0)
    while index < len(cover) and cover[index][0] < end:
        first, last = max(cover[index][0], begin), min(cover[index][1], end)
        if last > first:
            if first > begin:
                outside.append((begin, first))
            inside += last - first
            begin = last
        index += 1
    if end > begin:
        outside.append((begin, end))
    return inside, outside


def charge(span: Span, causes: Sequence[tuple[Sequence[Span], str]], own: str, parts: dict[str, float]) -> None:
    """Add the seconds of `span` to `parts`: to the first cause that covers them, the rest to `own`."""
    left = [span]
    for cover, part in causes:
        rest: list[Span] = []
        for piece in left:
            inside, outside = cut(piece, cover)
            parts[part] += inside
            rest += outside
        left = rest
    parts[own] += sum(end - begin for begin, end in left)


def spans_of(steps: Iterable[RankStep], kinds: Sequence[Kind]) -> list[Span]:
    """Times when any of these ranks was in an interval of one of these kinds."""
    return merged((each.begin_s, each.end_s) for step in steps for each in step.intervals if each.label.kind in kinds)


def pass_seconds(step: RankStep) -> float:
    return sum(each.end_s - each.begin_s for each in step.intervals if each.label.kind in PASSES)


def mean_pass_seconds(steps: Sequence[RankStep], module: str) -> float:
    """Mean of `pass_seconds` over a module's ranks: the time of a step in which this grid never waits."""
    own = [pass_seconds(step) for step in steps if step.module == module]
    return sum(own) / len(own)


def microbatch_seconds(steps: Sequence[RankStep], module: str) -> list[list[float]]:
    """Seconds of the passes by microbatch and lane of a module, the mean over the lane's ranks."""
    lanes = sorted({step.lane for step in steps if step.module == module})
    found: dict[int, dict[int, float]] = {}
    for lane in lanes:
        ranks = [step for step in steps if step.module == module and step.lane == lane]
        for step in ranks:
            for each in step.intervals:
                if each.label.kind in PASSES and each.label.microbatch is not None:
                    times = found.setdefault(each.label.microbatch, dict.fromkeys(lanes, 0.0))
                    times[lane] += (each.end_s - each.begin_s) / len(ranks)
    return [list(found[microbatch].values()) for microbatch in sorted(found)]


def end_seconds(steps: Sequence[RankStep], module: str) -> float:
    """Seconds of the first forward and the last backward pass of a module, of the lane where they are shortest.

    For a module of several stages, this is the mean over its ranks, less than the pass takes through all of them.
    """
    lanes: dict[int, list[float]] = {}
    for step in steps:
        if step.module == module:
            passes = [each for each in step.intervals if each.label.kind in PASSES]
            first = min((each.label.microbatch or 0 for each in passes), default=0)
            last = max((each.label.microbatch or 0 for each in passes), default=0)
            lanes.setdefault(step.lane, []).append(sum(
                each.end_s - each.begin_s for each in passes if (each.label.kind, each.label.microbatch or 0) in (
                    (Kind.FORWARD, first), (Kind.BACKWARD, last))))
    return min(statistics.fmean(ranks) for ranks in lanes.values())


def steady_window(lane: Sequence[RankStep], module: str) -> Span:
    """Return the time in which a lane of a module has its own work to do: after it fills, before it drains.

    For the language model, this is from its first forward pass to the end of its last backward pass. For an encoder, it
    is from its first backward pass to the end of its last forward pass, because it waits for the language model before
    and after. For an encoder without backward passes, it is from its first forward pass to its last.
    """
    times = {kind: [(each.begin_s, each.end_s) for step in lane for each in step.intervals if each.label.kind == kind]
             for kind in PASSES}
    forward, backward = times[Kind.FORWARD], times[Kind.BACKWARD] or times[Kind.FORWARD]
    if not forward:
        return lane[0].intervals[0].begin_s, lane[0].intervals[-1].end_s
    if module == LANGUAGE or not times[Kind.BACKWARD]:
        return min(begin for begin, _ in forward), max(end for _, end in backward)
    return min(begin for begin, _ in backward), max(end for _, end in forward)


# Causes of a wait by its time and, for some, its kind: pairs of a key of `covers` and the part that gets the time. The
# first cause that covers a moment counts.
Causes = list[tuple[str, str]]
# Before a lane has work, a rank without data delays all, then the other grid's first pass.
BEFORE: Causes = [("data", DATA), ("others", FILL), ("lane", BUBBLE), ("lanes", IMBALANCE)]
# While it has work, it waits for the other grid's longer microbatch, or for a stage of the pipeline.
WITHIN: Causes = [("lane", BUBBLE), ("others", IMBALANCE), ("lanes", IMBALANCE)]
WITHIN_BRIDGE: Causes = [("others", IMBALANCE), ("lanes", IMBALANCE), ("lane", BUBBLE)]
# After its work, it waits for other stages, other lanes, the other grid's last passes, the update.
AFTER: Causes = [("lane", BUBBLE), ("lanes", IMBALANCE), ("others", FILL), ("sync", GRADIENT_SYNC),
                 ("update", OPTIMIZER), ("data", DATA)]
AFTER_OF_KIND: dict[Kind, Causes] = {
    Kind.BRIDGE_WAIT: [("others", FILL), ("lane", BUBBLE), ("lanes", IMBALANCE)],
    Kind.GRADIENT_SYNC: [("lane", BUBBLE), ("lanes", IMBALANCE)]}


def split(steps: Sequence[RankStep], critical: str, ideal_s: float) -> dict[str, float]:
    """Split a step into parts, in seconds. They sum to the mean step of the critical grid's ranks.

    Args:
        steps: intervals of all ranks.
        critical: the grid whose time is split.
        ideal_s: its `mean_pass_seconds` when it runs alone.
    """
    own = [step for step in steps if step.module == critical]
    others = spans_of((step for step in steps if step.module != critical), PASSES)
    everywhere = {kind: spans_of(steps, (kind,)) for kind in (Kind.DATA_WAIT, Kind.GRADIENT_SYNC, Kind.OPTIMIZER)}
    parts = dict.fromkeys(PARTS, 0.0)
    passes = 0.0
    for lane in sorted({step.lane for step in own}):
        ranks = [step for step in own if step.lane == lane]
        covers = {"others": others, "lane": spans_of(ranks, PASSES), "data": everywhere[Kind.DATA_WAIT],
                  "lanes": spans_of((step for step in own if step.lane != lane), PASSES),
                  "sync": everywhere[Kind.GRADIENT_SYNC], "update": everywhere[Kind.OPTIMIZER]}
        begin, end = steady_window(ranks, critical)
        for step in ranks:
            passes += pass_seconds(step)
            for each in step.intervals:
                _split_interval(each, (begin, end), covers, parts)
    parts = {name: seconds / len(own) for name, seconds in parts.items()}
    parts[IDEAL], parts[SLOWER] = ideal_s, passes / len(own) - ideal_s
    return parts


def _split_interval(each: Interval, window: Span, covers: Mapping[str, Sequence[Span]],
                    parts: dict[str, float]) -> None:
    """Add one interval of a rank to `parts`. Passes are left out."""
    kind = each.label.kind
    if kind in PASSES:
        return
    own = OWN_PART[kind]
    if kind not in WAITS:
        parts[own] += each.end_s - each.begin_s
        return
    begin, end = window[0], max(window)
    for first, last, causes in (
            (float("-inf"), begin, BEFORE), (begin, end, WITHIN_BRIDGE if kind == Kind.BRIDGE_WAIT else WITHIN),
            (end, float("inf"), AFTER_OF_KIND.get(kind, AFTER))):
        piece = max(each.begin_s, first), min(each.end_s, last)
        if piece[1] > piece[0]:
            charge(piece, [(covers[name], part) for name, part in causes], own, parts)


def alone_seconds(steps: Sequence[RankStep], module: str) -> float:
    """Time from the first pass of a grid that ran alone to the end of its last, with bubbles and stragglers."""
    spans = spans_of((step for step in steps if step.module == module), PASSES)
    return spans[-1][1] - spans[0][0] if spans else 0.0


OFF, ON, AHEAD = "off", "on", "ahead"
# Largest difference between the sum of the parts and the measured step, as a share of the step.
TOLERANCE = 0.03


@dataclass
class Arm:
    """Steps of one arm in one block, on one rank or on all.

    Attributes:
        steps: intervals of each step by rank.
        seconds: time of each step, from its begin to that of the next; the mean over the ranks in `steps`.
    """

    steps: list[list[RankStep]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


# Arms by name: OFF and ON (steps without and with encoder prefetch), AHEAD (steps with --encoder-run-ahead), or the
# module that ran alone.
Block = dict[str, Arm]


def merge(blocks: Sequence[Block]) -> Block:
    """Merge the blocks of all ranks into one."""
    found = {}
    for name in blocks[0]:
        arms = [block[name] for block in blocks if block[name].steps]
        timed = [arm.seconds for arm in arms if arm.seconds]
        found[name] = Arm([[rank for ranks in step for rank in ranks]
                           for step in zip(*(arm.steps for arm in arms), strict=True)],
                          [sum(each) / len(each) for each in zip(*timed, strict=True)])
    return found


class UnexplainedTimeError(RuntimeError):
    """The parts of a step do not sum to it."""


def ideal_seconds(arm: Arm, module: str) -> list[float]:
    """`mean_pass_seconds` of each step of a grid alone."""
    return [mean_pass_seconds(step, module) for step in arm.steps]


def grid_figures(blocks: Sequence[Block], layout: Layout, module: str, num_microbatches: int) -> dict[str, Any]:
    """Figures of a grid: medians over blocks, in milliseconds.

    All but `ends_ms` are of the grid alone. In whole steps, the host launches the last backward pass while it waits for
    the gradient, so that it takes less time there.
    """
    times = [[lanes for step in block[module].steps for lanes in microbatch_seconds(step, module)] for block in blocks]

    def milliseconds(seconds: Callable[[Sequence[RankStep], str], float], arm: str = module) -> float:
        return 1000 * statistics.median(
            statistics.fmean(seconds(step, module) for step in block[arm].steps) for block in blocks)

    return {
        "ranks": layout.grids[module].size, "ideal_ms": milliseconds(mean_pass_seconds),
        "alone_ms": milliseconds(alone_seconds), "ends_ms": milliseconds(end_seconds, OFF),
        "microbatch_ms": 1000 * statistics.median(
            statistics.fmean(statistics.fmean(lanes) for lanes in each) for each in times),
        "straggler_factor": statistics.median(straggler_factor(each) for each in times),
        "bubble_share": bubble_share(layout.grids[module].pp, num_microbatches),
    }


def block_parts(block: Block, critical: str) -> dict[str, float]:
    """Seconds by part, the mean over the steps of a block."""
    steps = [split(step, critical, ideal) for step, ideal in
             zip(block[OFF].steps, ideal_seconds(block[critical], critical), strict=True)]
    return {name: statistics.fmean(step[name] for step in steps) for name in PARTS}


def without_data(arm: Arm) -> list[float]:
    """Seconds of each step without the longest wait for data, because one arm has its data in memory."""
    waits = [max(sum(end - begin for begin, end in spans_of([rank], (Kind.DATA_WAIT,))) for rank in step)
             for step in arm.steps]
    return [seconds - wait for seconds, wait in zip(arm.seconds, waits, strict=True)]


def prefetch_figures(blocks: Sequence[Block], encoder_s: float, stage_s: float, num_microbatches: int,
                     num_stages: int) -> dict[str, float]:
    """Bounds of what encoder prefetch can gain, and what it gains if an arm has it.

    Args:
        blocks: the timed blocks.
        encoder_s: seconds of a microbatch on the encoder.
        stage_s: seconds of a microbatch on one stage of the language model.
        num_microbatches: microbatches of a step.
        num_stages: stages of the language model.
    """
    found = {
        "bound": prefetch_bound(encoder_s, num_stages * stage_s),
        "bound_of_step": prefetch_bound_of_step(encoder_s, stage_s, num_microbatches, num_stages),
    }
    if ON not in blocks[0]:
        return found
    means = [(statistics.fmean(without_data(block[OFF])), statistics.fmean(without_data(block[ON])))
             for block in blocks]
    speedup = statistics.median(off / on for off, on in means)
    return found | {"off_ms": 1000 * statistics.median(off for off, _ in means),
                    "on_ms": 1000 * statistics.median(on for _, on in means), "speedup": speedup,
                    "achieved": speedup / found["bound"], "achieved_of_step": speedup / found["bound_of_step"]}


def run_ahead_figures(blocks: Sequence[Block], critical: str) -> dict[str, float]:
    """Eta and the step of the arms without and with --encoder-run-ahead, on the same data, if there is such an arm."""
    if AHEAD not in blocks[0]:
        return {}
    found = {}
    for name, arm in (("off", OFF), ("on", AHEAD)):
        seconds = [statistics.fmean(without_data(block[arm])) for block in blocks]
        found[f"{name}_ms"] = 1000 * statistics.median(seconds)
        found[f"eta_{name}"] = statistics.median(
            statistics.fmean(ideal_seconds(block[critical], critical)) / each
            for block, each in zip(blocks, seconds, strict=True))
    return found | {"speedup": found["off_ms"] / found["on_ms"]}


def figures(blocks: Sequence[Block], layout: Layout, num_microbatches: int) -> dict[str, Any]:
    """Return all figures that schedule.py prints.

    Raises:
        UnexplainedTimeError: the parts miss the measured step by more than `TOLERANCE`.
    """
    grids = {name: grid_figures(blocks, layout, name, num_microbatches) for name in layout.grids}
    critical = max(grids, key=lambda name: grids[name]["ideal_ms"])
    seconds = [statistics.fmean(block[OFF].seconds) for block in blocks]
    # The median block; of an even number, the shorter one of the two in the middle.
    chosen = sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]
    parts = block_parts(blocks[chosen], critical)
    gaps = [1 - sum(block_parts(block, critical).values()) / each
            for block, each in zip(blocks, seconds, strict=True)]
    if abs(gaps[chosen]) > TOLERANCE:
        raise UnexplainedTimeError(
            f"the parts of the {critical} grid's step sum to {1000 * sum(parts.values()):.2f} ms, the step took "
            f"{1000 * seconds[chosen]:.2f} ms: {100 * gaps[chosen]:.1f} % are unexplained, more than "
            f"{100 * TOLERANCE:.0f} %")
    encoder_ms, ends_ms = (max(grid[name] for module, grid in grids.items() if module != LANGUAGE)
                           for name in ("microbatch_ms", "ends_ms"))
    return {
        "step_ms": 1000 * seconds[chosen], "ideal_ms": 1000 * parts["ideal"], "critical": critical,
        "eta": statistics.median(statistics.fmean(ideal_seconds(block[critical], critical)) / each
                                 for block, each in zip(blocks, seconds, strict=True)),
        "parts_ms": {name: 1000 * value for name, value in parts.items()},
        "unexplained_ms": 1000 * gaps[chosen] * seconds[chosen], "unexplained_share": gaps[chosen],
        "unexplained_shares": gaps, "step_all_ms": [1000 * each for each in seconds], "grids": grids,
        "eta_split": split_efficiency({name: grid["ranks"] for name, grid in grids.items()},
                                             {name: grid["ranks"] * grid["ideal_ms"] for name, grid in grids.items()}),
        "bound_of_eta": bound_of_eta(encoder_ms, ends_ms, grids[LANGUAGE]["microbatch_ms"], num_microbatches,
                                     layout.language.pp),
        "run_ahead": run_ahead_figures(blocks, critical),
        "prefetch": prefetch_figures(blocks, encoder_ms / 1000, grids[LANGUAGE]["microbatch_ms"] / 1000,
                                     num_microbatches, layout.language.pp),
    }
