"""Measure what the step timeline costs: steps with and without it in turn, in one run.

    python scripts/bench/timeline.py --device cpu --encoder-dp 1 --llm-dp 1 --model-provider mock \
        --dataset-provider mock --seq-length 256 --micro-batch-size 2

The benchmark starts the trainer under torchrun with one process for each rank of the grids. It passes flags that it
does not know to train_hetero.py, on a CPU after those for float32 and local layers. Every step trains on the first
global batch, in the order off, on, on, off, so that drift affects both alike. A step lasts until the next one begins.
It includes what the timeline reads and exchanges after the step, and writing the figures: metrics.jsonl (and
TensorBoard with --tensorboard-dir) gets the figures of every step, and those of the timeline in steps that have it. The
first --warmup-steps steps do not count. Each group of four steps gives the time of its two steps with the timeline,
divided by the time of the two without. `ratio` is the median over groups. `ratio_low` and `ratio_high` enclose 95 % of
the medians of resampled groups.
The last line of output is JSON; above it, a Markdown table shows the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from scripts.bench import presets
from scripts.bench.harness import argument_parser, check_gpus, device_name, table
from scripts.training_runs import num_ranks, quiet, torchrun

# Whether each step of four has the timeline.
PATTERN = (False, True, True, False)
RESAMPLES = 1000


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="timed steps, half of them without the timeline")
    parser.add_argument("--warmup-steps", type=int, default=20, help="first steps, which do not count")
    chosen, further = parser.parse_known_args(arguments)
    if chosen.steps < len(PATTERN) or chosen.steps % len(PATTERN) or chosen.warmup_steps < 1:
        parser.error(f"--steps {chosen.steps} --warmup-steps {chosen.warmup_steps}: need a multiple of {len(PATTERN)} "
                     "steps and a warmup of at least 1")
    return chosen, further


def configure(chosen: argparse.Namespace, further: list[str]) -> RunConfig:
    """Return the checked configuration of the run. Raises ValueError for flags that cannot work."""
    # One more step: its begin is the end of the last step that counts.
    iterations = chosen.warmup_steps + chosen.steps + 1
    given = parse([*presets.flags(chosen.device, "none"), *further, "--train-iters", str(iterations)])
    if not given.observe.timeline:
        raise ValueError("--no-timeline: the benchmark measures the timeline, so leave this flag out")
    config = quiet(given)
    config = replace(config, observe=replace(config.observe, tensorboard_dir=given.observe.tensorboard_dir))
    check_gpus(chosen.device, validate(config, num_ranks(config)).world_size)
    return config


def is_on(index: int) -> bool:
    return PATTERN[index % len(PATTERN)]


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the figures of the timed steps, which are in order."""
    def ratio(four: list[float]) -> float:
        on, off = (sum(second for index, second in enumerate(four) if is_on(index) == arm) for arm in (True, False))
        return on / off

    fours = [ratio(seconds[start : start + len(PATTERN)]) for start in range(0, len(seconds), len(PATTERN))]
    draw = random.Random(0)
    ratios = sorted(statistics.median(draw.choices(fours, k=len(fours))) for _ in range(RESAMPLES))
    arms = {name: statistics.median(second for index, second in enumerate(seconds) if is_on(index) == on)
            for name, on in (("on_ms", True), ("off_ms", False))}
    return {**{name: 1000 * value for name, value in arms.items()}, "ratio": statistics.median(fours),
            "ratio_low": ratios[int(0.025 * RESAMPLES)], "ratio_high": ratios[int(0.975 * RESAMPLES) - 1]}


def run_rank(chosen: argparse.Namespace, config: RunConfig) -> int:
    from mimo.training.run import launch

    begins: list[float] = []

    def body(config: RunConfig, grids: Any, platform: Any) -> None:
        from mimo.registry import model_provider
        from mimo.training.loop import StepObserver, TrainingLoop

        class Interleaved(StepObserver):
            def begin_step(self) -> None:
                self.spans.enabled = is_on(len(begins) - chosen.warmup_steps)
                begins.append(time.perf_counter())
                super().begin_step()

        class InterleavedLoop(TrainingLoop):
            observer_type = Interleaved

            def _open(self, split: str, *, prefetch: bool) -> Any:
                loader = super()._open(split, prefetch=False)
                first = loader.next_step()
                loader.next_step = lambda: first
                return loader

        loop = InterleavedLoop(config, grids, platform, model_provider(config.model.model_provider),
                               config.find_dataset(config.data.dataset_provider))
        loop.run()
        if loop.session.is_logging_rank:
            report(chosen, begins[chosen.warmup_steps :], grids.layout.world_size)

    return launch(config, validate(config, num_ranks(config)), body)


def report(chosen: argparse.Namespace, begins: list[float], ranks: int) -> None:
    found = summary([two - one for one, two in zip(begins, begins[1:], strict=False)])
    print(table([list(found), [f"{value:.4f}" for value in found.values()]]))
    print(json.dumps({"device": chosen.device, "device_name": device_name(chosen.device), "ranks": ranks,
                      "steps": chosen.steps, "warmup_steps": chosen.warmup_steps, **found}), flush=True)


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one of them. Returns the exit code."""
    chosen, further = parse_arguments(arguments)
    try:
        config = configure(chosen, further)
        if "RANK" in os.environ:
            run_dir = os.environ["TIMELINE_BENCH_DIR"]
            return run_rank(chosen, replace(config, observe=replace(config.observe, run_dir=run_dir)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="timeline-bench-") as folder:
        return torchrun(__file__, num_ranks(config), arguments, TIMELINE_BENCH_DIR=folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
