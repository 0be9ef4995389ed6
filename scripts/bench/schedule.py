"""Show where the time of a step on disjoint grids goes, compared with what the slower grid needs alone.

    python scripts/bench/schedule.py --device cuda --encoder-dp 1 --llm-dp 1
    python scripts/bench/schedule.py --device cpu --encoder-dp 1 --llm-pp 2 --synthetic 30,60

The benchmark starts the trainer under torchrun with one process for each rank of the grids. It passes flags that it
does not know to train_hetero.py. They follow the flags of --preset and so override them. An arm is one way to run the
passes, and in every block each arm has its turn. The first arm runs whole steps: --steps of them, after one that does
not count, with data from the run's loader. The next arms run each grid alone on the same microbatches, with its passes
in the order of the schedule and no transfers between grids.

With --encoder-prefetch-depth above 0, which needs a frozen encoder (--freeze), another arm runs whole steps with
prefetch and with the same data from memory. Everything else is measured without prefetch. `speedup` is the step without
prefetch over the step with it, both without their waits for data. `bound` is (t_enc + t_lm) / max(t_enc, t_lm), the
largest speedup of a step of one microbatch. `bound_of_step` is the same for M microbatches: (t_enc + (M - 1) max +
t_lm) / (M max), because without prefetch, too, all passes but the first and the last overlap. `achieved` is the speedup
over these bounds. Likewise, --encoder-run-ahead N adds an arm in which the encoder runs ahead. `run ahead` has eta and
the step without and with it, both without their waits for data.

`ideal` of a grid is the time of its passes, a mean over its ranks, without bubbles and stragglers. `alone` is the time
from its first pass to its last when it runs alone. The critical grid is the one with the larger ideal, and eta is this
ideal over the step. `ends` of a grid is the time of its first forward and its last backward pass in whole steps. `bound
of eta` is the largest eta that a trained encoder can reach, however far it runs ahead: M max over max(M t_enc, t_ends +
(M - 1 + p) t_lm) for p language stages, because the first pass of the encoder comes before all others and its last one
after them. The table splits the step of the critical grid by what its ranks waited for
(scripts/bench/schedule_figures.py says how). If the parts miss the measured step by more than 3 %, that is an error.

    slower passes   the passes inside the step less the same passes alone; below 0 if they are faster inside
    imbalance       waits for another lane's longer microbatch or, in the steady part, the other grid's; `straggler`
                    is the sum over microbatches of the slowest lane's time over that of the mean lane
    bubble          waits in the grid's own pipeline; the table of grids has its share in theory, (p - 1) / (M + p - 1)
    fill and drain  waits for the first and the last pass of the other grid
    bridge          transfers between grids that nothing hides

Times are medians over blocks. The parts are those of the block whose step is the median.

--synthetic ENC_MS,LM_MS[,SPREAD[,ENC_SPREAD]] sets the length of passes on the CPU, so that the benchmark itself can be
checked. A small model sleeps, a third of the time in the forward pass and two thirds in the backward pass. A microbatch
takes ENC_MS on an encoder rank and LM_MS on a stage of the language model. SPREAD is a share by which neighbouring
lanes, and neighbouring microbatches of a lane, take longer and shorter in turn. ENC_SPREAD is the same for pairs of the
encoder's microbatches.

The last line of output is JSON; above it, Markdown tables show the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import MAX_STEPS_AHEAD, num_microbatches, validate
from scripts.bench import presets
from scripts.bench.harness import argument_parser, check_gpus, check_least, table
from scripts.training_runs import num_ranks, quiet, torchrun

# Environment variable with the folder in which the ranks leave their files.
FOLDER = "SCHEDULE_BENCH_DIR"


def parse_synthetic(text: str) -> tuple[float, ...]:
    """Parse `ENC_MS,LM_MS`, with one or both spreads behind it."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if not (2 <= len(found) <= 4 and found[0] >= 0 and found[1] > 0 and all(0 <= each < 1 for each in found[2:])):
        raise argparse.ArgumentTypeError(f"{text} is not ENC_MS,LM_MS[,SPREAD[,ENC_SPREAD]], with ENC_MS at least 0, "
                                         "LM_MS above 0, spreads at least 0 and below 1")
    return found


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", choices=presets.PRESETS,
                        help="model, data and batch (default: h200 on cuda, tiny on cpu, smallest with --synthetic)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks that count, with a turn of every arm in each (5)")
    parser.add_argument("--warmup-blocks", type=int, default=2, help="blocks before them, which do not count (2)")
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in each block (2)")
    parser.add_argument("--synthetic", type=parse_synthetic, metavar="ENC_MS,LM_MS[,SPREAD[,ENC_SPREAD]]",
                        help="let modules sleep this long; needs --device cpu")
    chosen, further = parser.parse_known_args(arguments)
    check_least(parser, chosen, blocks=1, warmup_blocks=0, steps=1)
    if chosen.synthetic is not None and chosen.device != "cpu":
        parser.error(f"--synthetic {','.join(map(str, chosen.synthetic))} needs --device cpu, it is {chosen.device}")
    chosen.preset = chosen.preset or ("smallest" if chosen.synthetic else presets.DEFAULT[chosen.device])
    return chosen, further


def configure(chosen: argparse.Namespace, further: list[str]) -> RunConfig:
    """Return the checked configuration of the run. Raises ValueError for flags that cannot work."""
    iterations = (chosen.warmup_blocks + chosen.blocks) * (3 * chosen.steps + 3 + MAX_STEPS_AHEAD)
    config = quiet(parse([*presets.flags(chosen.device, chosen.preset), *further, "--train-iters", str(iterations)]))
    layout = validate(config, num_ranks(config))
    if not layout.encoders or layout.kind != "disjoint":
        raise ValueError(f"--layout {config.layout.layout} with {len(layout.encoders)} encoders: only disjoint "
                         "grids with an encoder have a schedule between grids")
    if not config.observe.timeline:
        raise ValueError("--no-timeline: the benchmark measures with the timeline, so leave this flag out")
    check_gpus(chosen.device, layout.world_size)
    return config


def run_rank(chosen: argparse.Namespace, config: RunConfig) -> int:
    """Run one process and return its exit code. The logging rank prints."""
    from mimo.training.run import launch

    codes: list[int] = []

    def body(config: RunConfig, grids: Any, platform: Any) -> None:
        from scripts.bench.schedule_rank import ScheduleLoop

        loop = ScheduleLoop(config, grids, platform, registry.model_provider(config.model.model_provider),
                            config.find_dataset(config.data.dataset_provider))
        loop.settings = {"blocks": chosen.blocks, "warmup_blocks": chosen.warmup_blocks, "steps": chosen.steps,
                         "synthetic": chosen.synthetic}
        loop.run()
        if loop.session.is_logging_rank and len(loop.blocks) == chosen.blocks:
            codes.append(report(chosen, config, grids.layout, loop.blocks, platform.device_name or platform.name))

    launch(config, validate(config, num_ranks(config)), body)
    return max(codes, default=0)


def report(chosen: argparse.Namespace, config: RunConfig, layout: Any, blocks: list[Any], device_name: str) -> int:
    """Print the figures and return the exit code: 1 if the parts do not sum to the step."""
    from scripts.bench.schedule_figures import UnexplainedTimeError, figures

    try:
        found = figures(blocks, layout, num_microbatches(config))
    except UnexplainedTimeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    columns = ("ranks", "ideal_ms", "alone_ms", "microbatch_ms", "straggler_factor", "bubble_share")
    print(table([["grid", *columns], *([name, *(grid[key] for key in columns)]
                                       for name, grid in found["grids"].items())]))
    step = found["step_ms"]
    print(table([[f"step, {found['critical']} grid", "ms", "% of the step"],
                 *([name, value, 100 * value / step] for name, value in found["parts_ms"].items()),
                 ["unexplained", found["unexplained_ms"], 100 * found["unexplained_share"]], ["step", step, 100.0],
                 ["eta", "", 100 * found["eta"]], ["bound of eta", "", 100 * found["bound_of_eta"]]]))
    if found["run_ahead"]:
        print(table([[f"run ahead by {config.layout.encoder_run_ahead}", ""],
                     *([name, value] for name, value in found["run_ahead"].items())]))
    print(table([["encoder prefetch", ""], *([name, value] for name, value in found["prefetch"].items())]))
    parallel = {name: {axis: vars(grid)[axis] for axis in ("tp", "dp", "pp")} for name, grid in layout.grids.items()}
    print(json.dumps({
        "device": chosen.device, "device_name": device_name, "ranks": layout.world_size,
        "seed": config.train.seed, "model": config.model.model_provider, "preset": chosen.preset, "grids_of": parallel,
        "microbatches": num_microbatches(config), "global_batch_size": config.train.global_batch_size,
        "seq_length": config.train.seq_length, "freeze": config.model.freeze,
        "prefetch_depth": config.train.encoder_prefetch_depth,
        "encoder_run_ahead": config.layout.encoder_run_ahead, "synthetic": chosen.synthetic, "blocks": chosen.blocks,
        "warmup_blocks": chosen.warmup_blocks, "steps": chosen.steps, **found}), flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one of them. Returns the exit code."""
    chosen, further = parse_arguments(arguments)
    # As in train_hetero.py: a provider pkg.module:attr may lie in the current folder.
    sys.path.append(os.getcwd())
    try:
        config = configure(chosen, further)
        if "RANK" in os.environ:
            return run_rank(chosen, replace(config, observe=replace(config.observe, run_dir=os.environ[FOLDER])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="schedule-bench-") as folder:
        return torchrun(__file__, num_ranks(config), arguments, **{FOLDER: folder})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
