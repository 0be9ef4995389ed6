"""What training costs on several layouts of one host: tokens/s and TFLOP/s per GPU, memory, where the time went.

    python scripts/bench/train.py --steps 50 --run "disjoint=--encoder-dp 1 --llm-dp 1" \
        --run "colocated=--layout colocated --encoder-dp 2 --llm-dp 1 --llm-tp 2 --sequence-parallel" \
        --model-provider mock --dataset-provider mock --micro-batch-size 2

Each --run is a name and the trainer's flags of that layout; all other flags are the same for all. Runs take place one
after the other, under torchrun, with as many processes as their grids have ranks. The first --warmup-steps steps are
left out of the figures, except for the losses. The last line of output is JSON; above it the same as a Markdown table.

Tokens are those of text and images, padding excluded, and TFLOP/s are those of the model, as the runs recorded them
(docs/training.md says what counts). Times of a step, means in ms: `forward_backward` and `optimizer` on the device, of
the slowest rank of each module, the former with gradient reduction and with `bridge_wait`, what the slowest rank
spends on sending, receiving and waiting there; `data_wait` on the host; `rest` is the step less data wait, forward and
backward and optimizer of the language model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from scripts.bench import tables
from scripts.training_runs import num_ranks, quiet, train

COLUMNS = {"layout": "name", "GPUs": "ranks", "ms a step": "step_ms", "tokens/s per GPU": "tokens_per_s_per_gpu",
           "TFLOP/s per GPU": "tflops_per_gpu", "peak memory, GiB": "peak_memory_gib",
           "where the time went, ms": "time_ms", "first loss": "loss_first", "last loss": "loss_last"}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--run", action="append", required=True, metavar="NAME=FLAGS",
                        help="a layout and the trainer's flags of it; may be given several times")
    parser.add_argument("--steps", type=int, default=50, help="iterations of each run")
    parser.add_argument("--warmup-steps", type=int, default=10, help="first iterations, not in the figures")
    parser.add_argument("--out", type=Path, help="folder of the runs; left out: a temporary one, deleted at the end")
    chosen, further = parser.parse_known_args(arguments)
    names = [run.partition("=")[0] for run in chosen.run]
    if not all(names) or len(set(names)) < len(names):
        parser.error(f"--run {' '.join(names)}: give each run a name of its own, NAME=FLAGS")
    if not 0 <= chosen.warmup_steps < chosen.steps:
        parser.error(f"--steps {chosen.steps} --warmup-steps {chosen.warmup_steps}: need 0 <= warmup < steps")
    return chosen, further


def step_flops(records: Sequence[dict[str, Any]]) -> float | None:
    """Model FLOPs of these steps; None where the run did not record them: its provider does not know."""
    found = [value for record in records for name, value in record.items() if name.startswith("flops/")]
    return sum(found) if found else None


def by_module(records: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Means of a figure that each module has."""
    names = [name.removeprefix(f"{key}/") for name in records[0] if name.startswith(f"{key}/")]
    return {name: statistics.mean(record[f"{key}/{name}"] for record in records) for name in names}


def time_ms(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of what a step spends where; see the module's text."""
    def mean(key: str) -> float:
        return statistics.mean(record[key] for record in records)

    schedule, update = by_module(records, "forward-backward-s"), by_module(records, "optimizer-s")
    rest = mean("iteration-time") - mean("data-wait-s") - schedule[LANGUAGE] - update[LANGUAGE]
    seconds = {"data_wait": mean("data-wait-s"), "bridge_wait": mean("bridge-wait-s"),
               **{f"forward_backward/{module}": value for module, value in schedule.items()},
               **{f"optimizer/{module}": value for module, value in update.items()}, "rest": rest}
    return {name: 1000 * value for name, value in seconds.items()}


def figures(config: RunConfig, records: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Return the figures of a run that the documentation shows."""
    timed, ranks = records[warmup:], num_ranks(config)
    seconds = sum(record["iteration-time"] for record in timed)
    tokens = sum(record["image-tokens"] + record["text-tokens"] for record in timed)
    flops = step_flops(timed)
    peaks = {name.partition("/")[2]: max(record[name] for record in records) / 2**30
             for name in records[0] if name.startswith("peak-memory-bytes/")}
    return {
        "ranks": ranks, "step_ms": 1000 * statistics.median(record["iteration-time"] for record in timed),
        "tokens_per_step": tokens / len(timed), "tokens_per_s_per_gpu": tokens / seconds / ranks,
        "tflops_per_gpu": None if flops is None else flops / seconds / ranks / 1e12, "peak_memory_gib": peaks,
        "time_ms": time_ms(timed), "packing_utilisation": statistics.mean(record["packing-utilisation"]
                                                                          for record in timed),
        "loss_first": records[0]["lm loss"], "loss_last": records[-1]["lm loss"],
        "losses": [record["lm loss"] for record in records],
    }


def shown(value: Any) -> str:
    """A figure as a cell of the table."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {number:.1f}" for name, number in value.items())
    return tables.shown(value)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The runs that came to their end as a table."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [[shown(result[key]) for key in COLUMNS.values()] for result in results if "error" not in result]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def planned(chosen: argparse.Namespace, further: list[str]) -> dict[str, tuple[list[str], RunConfig]]:
    """Flags and configuration of each run, checked. Raises ValueError for what cannot work."""
    runs = {}
    for run in chosen.run:
        name, _, layout = run.partition("=")
        flags = [*shlex.split(layout), *further]
        config = quiet(parse([*flags, "--train-iters", str(chosen.steps)]))
        validate(config, num_ranks(config))
        runs[name] = (flags, config)
    return runs


def devices(configs: Iterable[RunConfig]) -> list[str]:
    """`cpu` or `cuda`, what the runs take; both where their flags differ in that."""
    import torch  # for this alone, after the runs

    auto = "cuda" if torch.cuda.is_available() else "cpu"  # as mimo.platform chooses
    return sorted({auto if config.train.device == "auto" else config.train.device for config in configs})


def main(arguments: list[str] | None = None) -> int:
    """Run all, print, and give the exit code: 1 where a run failed, 2 where one cannot work."""
    chosen, further = parse_arguments(arguments)
    try:
        runs = planned(chosen, further)
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
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                result["error"] = str(error).splitlines()[0]
            results.append(result | {"command": shlex.join(
                ["torchrun", "--nproc-per-node", str(num_ranks(config)), "train_hetero.py", *flags])})
    print(markdown(results))
    found = devices(config for _, config in runs.values())
    print(json.dumps({"device": ", ".join(found), "device_name": ", ".join(map(tables.device_name, found)),
                      "steps": chosen.steps, "warmup_steps": chosen.warmup_steps, "runs": results}))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
