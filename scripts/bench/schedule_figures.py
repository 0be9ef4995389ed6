"""Figures of scripts/bench/schedule.py from what all ranks did: times of grids alone, and where a step's time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mimo.grid.spec import Layout
from mimo.observability.spans import Kind
from mimo.protocols import LANGUAGE
from scripts.bench import bounds
from scripts.bench.schedule_loss import (
    PARTS,
    RankStep,
    alone_seconds,
    mean_pass_seconds,
    microbatch_seconds,
    spans_of,
    split,
)

OFF, ON = "off", "on"
# The parts may miss the measured step by so much, as a share of it.
TOLERANCE = 0.03


@dataclass
class Arm:
    """What a rank, or all of them, did in the steps of an arm of a block.

    Attributes:
        steps: of each step, the ranks' intervals.
        seconds: of each step, from its begin to that of the next, mean over the ranks that are in `steps`.
    """

    steps: list[list[RankStep]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


# Arm name -> what happened: OFF, ON (steps without and with encoder prefetch) or the module that ran alone.
Block = dict[str, Arm]


def merge(blocks: Sequence[Block]) -> Block:
    """The blocks of all ranks as one."""
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
    """Of each step of a grid alone: `mean_pass_seconds`."""
    return [mean_pass_seconds(step, module) for step in arm.steps]


def microbatches_of(arm: Arm, module: str) -> list[list[float]]:
    """`microbatch_seconds` of all steps of a grid alone."""
    return [lanes for step in arm.steps for lanes in microbatch_seconds(step, module)]


def grid_figures(blocks: Sequence[Block], layout: Layout, module: str, num_microbatches: int) -> dict[str, Any]:
    """A grid alone, medians over blocks, milliseconds."""
    times = [microbatches_of(block[module], module) for block in blocks]
    return {
        "ranks": layout.grids[module].size,
        "ideal_ms": 1000 * statistics.median(statistics.fmean(ideal_seconds(block[module], module))
                                             for block in blocks),
        "alone_ms": 1000 * statistics.median(
            statistics.fmean(alone_seconds(step, module) for step in block[module].steps) for block in blocks),
        "microbatch_ms": 1000 * statistics.median(
            statistics.fmean(statistics.fmean(lanes) for lanes in each) for each in times),
        "straggler_factor": statistics.median(bounds.straggler_factor(each) for each in times),
        "bubble_share": bounds.bubble_share(layout.grids[module].pp, num_microbatches),
    }


def block_parts(block: Block, critical: str) -> dict[str, float]:
    """Seconds of a step by part, mean over the steps of a block."""
    steps = [split(step, critical, ideal) for step, ideal in
             zip(block[OFF].steps, ideal_seconds(block[critical], critical), strict=True)]
    return {name: statistics.fmean(step[name] for step in steps) for name in PARTS}


def median_block(seconds: Sequence[float]) -> int:
    """Index of the block in the middle; of an even number, the shorter one of the two there."""
    return sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]


def without_data(arm: Arm) -> list[float]:
    """Seconds of each step less what the rank that waited longest for data waited: one arm's comes from memory."""
    waits = [max(sum(end - begin for begin, end in spans_of([rank], (Kind.DATA_WAIT,))) for rank in step)
             for step in arm.steps]
    return [seconds - wait for seconds, wait in zip(arm.seconds, waits, strict=True)]


def prefetch_figures(blocks: Sequence[Block], encoder_s: float, stage_s: float, num_microbatches: int,
                     num_stages: int) -> dict[str, float]:
    """What encoder prefetch gains, where an arm has it, and what it could.

    Args:
        blocks: all that count.
        encoder_s: of a microbatch, on the encoder.
        stage_s: of a microbatch, on one stage of the language model.
        num_microbatches: of a step.
        num_stages: of the language model.
    """
    found = {
        "bound": bounds.prefetch_bound(encoder_s, num_stages * stage_s),
        "bound_of_step": bounds.prefetch_bound_of_step(encoder_s, stage_s, num_microbatches, num_stages),
    }
    if ON not in blocks[0]:
        return found
    means = [(statistics.fmean(without_data(block[OFF])), statistics.fmean(without_data(block[ON])))
             for block in blocks]
    speedup = statistics.median(off / on for off, on in means)
    return found | {"off_ms": 1000 * statistics.median(off for off, _ in means),
                    "on_ms": 1000 * statistics.median(on for _, on in means), "speedup": speedup,
                    "achieved": speedup / found["bound"], "achieved_of_step": speedup / found["bound_of_step"]}


def figures(blocks: Sequence[Block], layout: Layout, num_microbatches: int) -> dict[str, Any]:
    """All that schedule.py prints.

    Raises:
        UnexplainedTimeError: the parts miss the measured step by more than `TOLERANCE` of it.
    """
    grids = {name: grid_figures(blocks, layout, name, num_microbatches) for name in layout.grids}
    critical = max(grids, key=lambda name: grids[name]["ideal_ms"])
    seconds = [statistics.fmean(block[OFF].seconds) for block in blocks]
    chosen = median_block(seconds)
    parts = block_parts(blocks[chosen], critical)
    gaps = [1 - sum(block_parts(block, critical).values()) / each
            for block, each in zip(blocks, seconds, strict=True)]
    if abs(gaps[chosen]) > TOLERANCE:
        raise UnexplainedTimeError(
            f"the parts of the {critical} grid's step sum to {1000 * sum(parts.values()):.2f} ms, the step took "
            f"{1000 * seconds[chosen]:.2f} ms: {100 * gaps[chosen]:.1f} % are unexplained, more than "
            f"{100 * TOLERANCE:.0f} %")
    encoder_ms = max(grid["microbatch_ms"] for name, grid in grids.items() if name != LANGUAGE)
    return {
        "step_ms": 1000 * seconds[chosen], "ideal_ms": 1000 * parts["ideal"], "critical": critical,
        "eta": statistics.median(statistics.fmean(ideal_seconds(block[critical], critical)) / each
                                 for block, each in zip(blocks, seconds, strict=True)),
        "parts_ms": {name: 1000 * value for name, value in parts.items()},
        "unexplained_ms": 1000 * gaps[chosen] * seconds[chosen], "unexplained_share": gaps[chosen],
        "unexplained_shares": gaps, "step_all_ms": [1000 * each for each in seconds], "grids": grids,
        "eta_split": bounds.split_efficiency({name: grid["ranks"] for name, grid in grids.items()},
                                             {name: grid["ranks"] * grid["ideal_ms"] for name, grid in grids.items()}),
        "prefetch": prefetch_figures(blocks, encoder_ms / 1000, grids[LANGUAGE]["microbatch_ms"] / 1000,
                                     num_microbatches, layout.language.pp),
    }
