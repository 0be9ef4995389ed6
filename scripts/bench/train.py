"""Compare training on several layouts of one host: tokens/s and TFLOP/s per GPU, memory, where the time went.

    python scripts/bench/train.py --steps 50 --run "disjoint=--encoder-dp 1 --llm-dp 1" \
        --run "colocated=--layout colocated --encoder-dp 2 --llm-dp 1 --llm-tp 2 --sequence-parallel" \
        --model-provider mock --dataset-provider mock --micro-batch-size 2

Each --run is a name and the trainer's flags of that layout. All other flags apply to every run. Runs follow one
another under torchrun, each with one process for each rank of its grids. The first --warmup-steps steps count for the
losses alone. The last line of output is JSON; above it, a Markdown table shows the same.

Tokens are those of text and images without padding, and TFLOP/s are those of the model, as the runs recorded them
(docs/flops.md says what counts). `passes` are the FLOPs of each module over the time of its own forward and backward
passes, which comes from the step timeline. Times of a step are means in ms. `forward_backward` and `optimizer` are
times on the device, on the slowest rank of each module. The former includes gradient reduction and `bridge_wait`, the
time that the slowest rank spends on sending, receiving and waiting at the bridge. `data_wait` is measured on the host.
`rest` is the step without the language model's data wait, forward and backward passes and optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo import registry
from mimo.config.trainer import RunConfig
from mimo.grid.layout import build_layout
from mimo.protocols import LANGUAGE
from scripts.bench.harness import (
    argument_parser,
    check_run_names,
    device_name,
    format_value,
    plan_runs,
    table,
    torchrun_command,
)
from scripts.bench.run_series import outcome_of
from scripts.training_runs import num_ranks, train

COLUMNS = {"layout": "name", "GPUs": "ranks", "ms a step": "step_ms", "tokens/s per GPU": "tokens_per_s_per_gpu",
           "TFLOP/s per GPU": "tflops_per_gpu", "passes, TFLOP/s per GPU": "pass_tflops_per_gpu",
           "peak memory, GiB": "peak_memory_gib", "where the time went, ms": "time_ms",
           "first loss": "loss_first", "last loss": "loss_last"}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__, device=False)
    parser.add_argument("--run", action="append", required=True, metavar="NAME=FLAGS",
                        help="a name and the trainer's flags of a layout; may be given several times")
    parser.add_argument("--steps", type=int, default=50, help="iterations of each run")
    parser.add_argument("--warmup-steps", type=int, default=10, help="first iterations, which count for losses alone")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary one, deleted at the end)")
    chosen, further = parser.parse_known_args(arguments)
    check_run_names(parser, chosen.run)
    if not 0 <= chosen.warmup_steps < chosen.steps:
        parser.error(f"--steps {chosen.steps} --warmup-steps {chosen.warmup_steps}: need 0 <= warmup < steps")
    return chosen, further


def pass_tflops(config: RunConfig, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return TFLOP/s per GPU of each module's own passes, for modules with a timeline and known FLOPs."""
    provider = registry.model_provider(config.model.model_provider)
    layout = build_layout(config.layout, 0, provider.encoders(config.model_family))
    found = {}
    for name, grid in layout.grids.items():
        keys = [f"timeline/{name}/{part}-s" for part in ("forward", "backward")]
        seconds = sum(record.get(key, 0.0) for record in records for key in keys)
        if seconds and f"flops/{name}" in records[0]:
            found[name] = sum(record[f"flops/{name}"] for record in records) / seconds / grid.size / 1e12
    return found


def by_module(records: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Mean of a figure for each module."""
    names = [name.removeprefix(f"{key}/") for name in records[0] if name.startswith(f"{key}/")]
    return {name: statistics.mean(record[f"{key}/{name}"] for record in records) for name in names}


def time_ms(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean times of a step by part. The module's docstring defines the parts."""
    def mean(key: str) -> float:
        return statistics.mean(record[key] for record in records)

    schedule, update = by_module(records, "forward-backward-s"), by_module(records, "optimizer-s")
    rest = mean("iteration-time") - mean("data-wait-s") - schedule[LANGUAGE] - update[LANGUAGE]
    seconds = {"data_wait": mean("data-wait-s"), "bridge_wait": mean("bridge-wait-s"),
               **{f"forward_backward/{module}": value for module, value in schedule.items()},
               **{f"optimizer/{module}": value for module, value in update.items()}, "rest": rest}
    return {name: 1000 * value for name, value in seconds.items()}


def figures(config: RunConfig, records: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    timed, ranks = records[warmup:], num_ranks(config)
    outcome = outcome_of(config, records, warmup, ranks)
    peaks = {name.partition("/")[2]: max(record[name] for record in records) / 2**30
             for name in records[0] if name.startswith("peak-memory-bytes/")}
    return {
        "ranks": ranks, "step_ms": outcome.step_ms,
        "tokens_per_step": statistics.mean(record["image-tokens"] + record["text-tokens"] for record in timed),
        "tokens_per_s_per_gpu": outcome.tokens_per_s, "tflops_per_gpu": outcome.tflops,
        "pass_tflops_per_gpu": pass_tflops(config, timed), "peak_memory_gib": peaks, "time_ms": time_ms(timed),
        "packing_utilisation": statistics.mean(record["packing-utilisation"] for record in timed),
        "loss_first": outcome.losses[0], "loss_last": outcome.losses[-1], "losses": outcome.losses,
        "allocation_retries": outcome.allocation_retries,
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Show the runs that did not fail as a table."""
    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name.replace('_', ' ')} {number:.1f}" for name, number in value.items())
        return format_value(value)

    return table([list(COLUMNS), *([cell(result[key]) for key in COLUMNS.values()] for result in results
                                   if "error" not in result)])


def devices(configs: Iterable[RunConfig]) -> list[str]:
    """The devices that the runs use: `cpu`, `cuda`, or both if their flags differ."""
    import torch  # imported late, so that --help is quick

    auto = "cuda" if torch.cuda.is_available() else "cpu"  # as mimo.platform chooses
    return sorted({auto if config.train.device == "auto" else config.train.device for config in configs})


def main(arguments: list[str] | None = None) -> int:
    """Run all and print. Returns the exit code: 1 if a run failed, 2 if the flags of one cannot work."""
    chosen, further = parse_arguments(arguments)
    try:
        runs = plan_runs(chosen.run, further, chosen.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = []
    with tempfile.TemporaryDirectory(prefix="train-bench-") as temporary:
        for name, (flags, config) in runs.items():
            result: dict[str, Any] = {"name": name}
            try:
                records = train(config, (chosen.out or Path(temporary)) / name)
                result |= figures(config, records, chosen.warmup_steps)
                print(f"{name}: {result['step_ms']:.0f} ms a step, {result['tokens_per_s_per_gpu']:,.0f} tokens/s per "
                      f"GPU", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                result["error"] = str(error).splitlines()[0]
            results.append(result | {"command": torchrun_command(flags, config)})
    print(markdown(results))
    found = devices(config for _, config in runs.values())
    print(json.dumps({"device": ", ".join(found), "device_name": ", ".join(map(device_name, found)),
                      "steps": chosen.steps, "warmup_steps": chosen.warmup_steps, "runs": results}))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
