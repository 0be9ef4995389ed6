"""Where the time of a step on disjoint grids goes, against what the slower grid needs alone.

    python scripts/bench/schedule.py --device cuda --encoder-dp 1 --llm-dp 1
    python scripts/bench/schedule.py --device cpu --encoder-dp 1 --llm-pp 2 --synthetic 30,60

Starts the trainer under torchrun, with as many processes as the grids of the flags have ranks. Flags that are not the
benchmark's are train_hetero.py's; they stand behind those of --preset and so overrule them. In every block each arm
has its turn: whole steps (--steps of them, after one that does not count, with data from the run's loader), then each
grid alone on the same microbatches: forward and backward passes in the order of the schedule, nothing sent between
grids. With --encoder-prefetch-depth above 0 (which needs a frozen encoder, --freeze) whole steps have another turn,
with it and with the same data from memory; all the rest is measured without it. `speedup` is the ratio of both steps,
data waits left out. `bound` is (t_enc + t_lm) / max(t_enc, t_lm), of one microbatch; `bound_of_step` that of M, whose
passes but the first and the last run beside each other already: (t_enc + (M - 1) max + t_lm) / (M max). `achieved` is
the speedup over them.

`ideal` of a grid is the time of its passes, mean over its ranks: no bubble, no straggler; `alone` is from its first
pass to its last when it runs alone. eta is the larger ideal over the step. The step's time is that of the ranks of this
slower grid, the critical one, by what they waited for (scripts/bench/schedule_loss.py says how waits are told apart).
If the parts miss the measured step by more than 3 %, that is an error.

    slower passes   the same passes in the step less those alone; below 0 where they are faster there
    imbalance       waits for another lane's, or in the steady part the other grid's, longer microbatch; beside it
                    `straggler`, the sum over microbatches of the slowest lane's time over that of the mean one
    bubble          waits in the grid's own pipeline; beside it its share in theory, (p - 1) / (M + p - 1)
    fill and drain  waits for the first pass of the other grid and for its last
    bridge          transfers between grids that nothing hides

Times are medians over blocks; the parts are those of the block whose step is the median.

--synthetic ENC_MS,LM_MS[,SPREAD] makes passes take as long as it says, on the CPU: sleeps in a small model, a third of
them in the forward pass, so that the benchmark itself can be judged. A microbatch takes ENC_MS on an encoder rank and
LM_MS on a stage of the language model; by SPREAD, a share, neighbouring lanes are longer and shorter in turns.

The last line of output is JSON; above it the same as Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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
from scripts.training_runs import num_ranks, quiet

# Where the processes of a run leave their files; what it needs nowhere else.
FOLDER = "SCHEDULE_BENCH_DIR"


def parse_synthetic(text: str) -> tuple[float, ...]:
    """`ENC_MS,LM_MS` or `ENC_MS,LM_MS,SPREAD`."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if not (2 <= len(found) <= 3 and found[0] >= 0 and found[1] > 0 and all(0 <= each < 1 for each in found[2:])):
        raise argparse.ArgumentTypeError(f"{text} is not ENC_MS,LM_MS or ENC_MS,LM_MS,SPREAD, with ENC_MS from 0 on, "
                                         "LM_MS above 0, SPREAD from 0 and below 1")
    return found


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--preset", choices=presets.PRESETS,
                        help="model, data and batch; left out: h200 on cuda, tiny on cpu, smallest with --synthetic")
    parser.add_argument("--blocks", type=int, default=5, help="turns of every arm that count (5)")
    parser.add_argument("--warmup-blocks", type=int, default=2, help="turns before them (2)")
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in a block (2)")
    parser.add_argument("--synthetic", type=parse_synthetic, metavar="ENC_MS,LM_MS[,SPREAD]",
                        help="modules that take as long as this says; --device cpu")
    chosen, further = parser.parse_known_args(arguments)
    for name, least in (("blocks", 1), ("warmup_blocks", 0), ("steps", 1)):
        if vars(chosen)[name] < least:
            parser.error(f"--{name.replace('_', '-')} {vars(chosen)[name]} is below {least}")
    if chosen.synthetic is not None and chosen.device != "cpu":
        parser.error(f"--synthetic {','.join(map(str, chosen.synthetic))} needs --device cpu, it is {chosen.device}")
    chosen.preset = chosen.preset or ("smallest" if chosen.synthetic else presets.DEFAULT[chosen.device])
    return chosen, further


def configure(chosen: argparse.Namespace, further: list[str]) -> RunConfig:
    """The run's configuration, checked. Raises ValueError for flags that cannot work."""
    iterations = (chosen.warmup_blocks + chosen.blocks) * (2 * chosen.steps + 2 + MAX_STEPS_AHEAD)
    config = quiet(parse([*presets.flags(chosen.device, chosen.preset), *further, "--train-iters", str(iterations)]))
    layout = validate(config, num_ranks(config))
    if not layout.encoders or layout.kind != "disjoint":
        raise ValueError(f"--layout {config.layout.layout} with {len(layout.encoders)} encoders: there is a schedule "
                         "between grids on disjoint ones only")
    if not config.observe.timeline:
        raise ValueError("--no-timeline leaves nothing to measure with")
    presets.check_gpus(chosen.device, layout.world_size)
    return config


def run_rank(chosen: argparse.Namespace, config: RunConfig) -> int:
    """One process of the run; the logging rank prints. Gives its exit code."""
    from mimo.training.run import launch

    codes: list[int] = []

    def body(config: RunConfig, grids: Any, platform: Any) -> None:
        from scripts.bench.schedule_rank import ScheduleLoop

        loop = ScheduleLoop(config, grids, platform, registry.model_provider(config.model.model_provider),
                            config.find_dataset(config.data.dataset_provider))
        loop.settings = {"blocks": chosen.blocks, "warmup_blocks": chosen.warmup_blocks, "steps": chosen.steps,
                         "synthetic": chosen.synthetic}
        loop.run()
        if loop.is_logging_rank and len(loop.blocks) == chosen.blocks:
            codes.append(report(chosen, config, grids.layout, loop.blocks, platform.device_name or platform.name))

    launch(config, validate(config, num_ranks(config)), body)
    return max(codes, default=0)


def table(rows: list[list[Any]]) -> str:
    """Markdown; the first row is the head."""
    shown = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (shown[0], ["---"] * len(rows[0]), *shown[1:]))


def report(chosen: argparse.Namespace, config: RunConfig, layout: Any, blocks: list[Any], device_name: str) -> int:
    """Print the figures; gives the exit code: 1 where the parts do not sum to the step."""
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
                 ["eta", "", 100 * found["eta"]]]))
    print(table([["encoder prefetch", ""], *([name, value] for name, value in found["prefetch"].items())]))
    parallel = {name: {axis: vars(grid)[axis] for axis in ("tp", "dp", "pp")} for name, grid in layout.grids.items()}
    print(json.dumps({
        "device": chosen.device, "device_name": device_name, "ranks": layout.world_size,
        "seed": config.train.seed, "model": config.model.model_provider, "preset": chosen.preset, "grids_of": parallel,
        "microbatches": num_microbatches(config), "global_batch_size": config.train.global_batch_size,
        "seq_length": config.train.seq_length, "freeze": config.model.freeze,
        "prefetch_depth": config.train.encoder_prefetch_depth, "synthetic": chosen.synthetic, "blocks": chosen.blocks,
        "warmup_blocks": chosen.warmup_blocks, "steps": chosen.steps, **found}), flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one of them; gives the exit code."""
    chosen, further = parse_arguments(arguments)
    # As in train_hetero.py: a provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    try:
        config = configure(chosen, further)
        if "RANK" in os.environ:
            return run_rank(chosen, replace(config, observe=replace(config.observe, run_dir=os.environ[FOLDER])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="schedule-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(num_ranks(config)), __file__, *arguments]
        return subprocess.run(command, check=False, env={**os.environ, FOLDER: folder}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
