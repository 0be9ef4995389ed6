"""Measure the start of a run by phase, from the torchrun command to the end of the first optimizer step.

    python scripts/bench/startup.py --device cpu --run "disjoint=--encoder-dp 1 --llm-dp 1" \
        --run "colocated=--layout colocated --encoder-dp 2 --llm-dp 2" \
        --model-provider mock --dataset-provider mock --micro-batch-size 2

Each --run is a name and flags of train_hetero.py. All other flags apply to every run; without --run there is one run
with these flags alone. Runs take turns, in one order and then in the other, --repeats times after --warmup-runs times
that do not count because they bring files into the host's memory. Each time, torchrun starts new processes, one for
each rank. Beside them, `baseline` lets as many processes import torch and the parts of Megatron that any trainer on it
imports, and nothing else. The imports phase over it says what this trainer's own imports add or save.

The phases are those in startup.json of the run folder: each ends when the last rank ends it. Before them comes
`launcher`, from the command to the first process of a rank. They sum to the whole. The table has the repetition whose
whole is the median. first/steady is the time of the first iteration over the median of those after --warmup-steps. The
last line of output is JSON; above it, a Markdown table shows the same in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.trainer import RunConfig
from mimo.observability.startup import Phase
from scripts.bench.harness import argument_parser, check_run_names, device_name, plan_runs, table, torchrun_command
from scripts.training_runs import ROOT, num_ranks, train

LAUNCHER = "launcher"
# Only a run that continues may have an evaluation to make first.
PARTS = (LAUNCHER, *(phase.value for phase in Phase if phase != Phase.EVALUATION))
# Imports what a trainer on Megatron cannot do without, then prints the age of the process.
BASELINE = """import logging, warnings; warnings.simplefilter("ignore")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from mimo.observability.startup import process_age_s
print(process_age_s())"""
DEFINITIONS = {
    "whole_s": "from the command to the end of the first optimizer step, slowest rank: the sum of parts_s",
    "first_over_steady": "time of the first iteration over the median of later ones; medians over repetitions",
    "imports_over_baseline": "imports phase over baseline_s; medians over repetitions",
    "baseline_s": "age of the slowest of as many processes once they have imported torch and Megatron alone",
}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the benchmark's own flags, and those that it passes to the trainer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--run", action="append", metavar="NAME=FLAGS",
                        help="a name and the trainer's flags of a run; may be given several times")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each run (5)")
    parser.add_argument("--warmup-runs", type=int, default=1, help="first starts of each, which do not count (1)")
    parser.add_argument("--steps", type=int, default=20, help="iterations of each start (20)")
    parser.add_argument("--warmup-steps", type=int, default=5, help="first iterations, which are not steady yet (5)")
    chosen, further = parser.parse_known_args(arguments)
    chosen.run = chosen.run or ["run="]
    check_run_names(parser, chosen.run)
    if not 1 <= chosen.warmup_steps < chosen.steps:
        parser.error(f"--steps {chosen.steps} --warmup-steps {chosen.warmup_steps}: need 1 <= warmup < steps")
    if chosen.repeats < 1 or chosen.warmup_runs < 0:
        parser.error(f"--repeats {chosen.repeats} --warmup-runs {chosen.warmup_runs}: need at least 1 and 0")
    return chosen, further


def start(config: RunConfig, folder: Path, warmup_steps: int) -> dict[str, Any]:
    """Start a run once and train to its end.

    Returns:
        `parts_s` (seconds by part), `whole_s` (their sum), `first_s` and `steady_s` (of iterations), `process_groups`
        and `process_groups_of_a_rank`.

    Raises:
        RuntimeError: the run failed.
    """
    began = time.time()
    records = train(config, folder)
    found = json.loads((folder / "startup.json").read_text(encoding="utf-8"))
    times = [record["iteration-time"] for record in records]
    return parts(began, found) | {"first_s": times[0], "steady_s": statistics.median(times[warmup_steps:]),
                                  "process_groups": found["num_groups"],
                                  "process_groups_of_a_rank": found["num_groups_of_a_rank"]}


def parts(began_unix_s: float, found: dict[str, Any]) -> dict[str, Any]:
    """Return `whole_s` and `parts_s` of a start at `began_unix_s` from its startup.json."""
    whole_s = found["ended_unix_s"] - began_unix_s
    return {"whole_s": whole_s, "parts_s": {LAUNCHER: whole_s - found["seconds"], **found["phases"]}}


def baseline(ranks: int) -> float:
    """Seconds until the last of `ranks` processes has imported torch and Megatron. Raises RuntimeError if one fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    processes = [subprocess.Popen([sys.executable, "-c", BASELINE], stdout=subprocess.PIPE, text=True, env=environment)
                 for _ in range(ranks)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("torch and Megatron cannot be imported; see above")
    return max(float(output.split()[-1]) for output in outputs)


def summary(starts: list[dict[str, Any]], baselines: list[float]) -> dict[str, Any]:
    middle = sorted(starts, key=lambda one: one["whole_s"])[(len(starts) - 1) // 2]
    imports = statistics.median(one["parts_s"][Phase.IMPORTS] for one in starts)
    return {"whole_s": middle["whole_s"], "parts_s": middle["parts_s"],
            "first_iteration_s": statistics.median(one["first_s"] for one in starts),
            "steady_iteration_s": statistics.median(one["steady_s"] for one in starts),
            "first_over_steady": statistics.median(one["first_s"] / one["steady_s"] for one in starts),
            "baseline_s": statistics.median(baselines), "imports_over_baseline": imports / statistics.median(baselines),
            "process_groups": middle["process_groups"],
            "process_groups_of_a_rank": middle["process_groups_of_a_rank"],
            "all_whole_s": [one["whole_s"] for one in starts]}


def markdown(results: list[dict[str, Any]]) -> str:
    header = ["run", "ranks", "whole", *PARTS, "baseline of imports", "first iteration", "steady", "first/steady",
              "process groups", "of a rank"]
    rows = [header]
    for result in results:
        if "error" not in result:
            seconds = [result["whole_s"], *(result["parts_s"].get(part, 0.0) for part in PARTS), result["baseline_s"]]
            rows.append([result["name"], str(result["ranks"]), *(f"{value:.2f}" for value in seconds),
                         f"{result['first_iteration_s']:.3f}", f"{result['steady_iteration_s']:.3f}",
                         f"{result['first_over_steady']:.1f}", str(result["process_groups"]),
                         str(result["process_groups_of_a_rank"])])
    return table(rows)


def measure(chosen: argparse.Namespace, runs: dict[str, tuple[list[str], RunConfig]],
            folder: Path) -> list[dict[str, Any]]:
    """Start all runs in turns. A run that fails once is not started again."""
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    baselines: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for repeat in range(chosen.warmup_runs + chosen.repeats):
        for name in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
            if name in errors:
                continue
            try:
                bare = baseline(num_ranks(runs[name][1]))
                found = start(runs[name][1], folder / f"{name}-{repeat}", chosen.warmup_steps)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                errors[name] = str(error).splitlines()[0]
                continue
            if repeat >= chosen.warmup_runs:
                starts[name].append(found)
                baselines[name].append(bare)
    results = []
    for name, (flags, config) in runs.items():
        figures = {"error": errors[name]} if name in errors else summary(starts[name], baselines[name])
        results.append({"name": name, "ranks": num_ranks(config), **figures,
                        "command": torchrun_command(flags, config)})
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run all and print. Returns the exit code: 1 if a run failed, 2 if the flags of one cannot work."""
    chosen, further = parse_arguments(arguments)
    try:
        runs = plan_runs(chosen.run, [*further, "--device", chosen.device], chosen.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="startup-bench-") as folder:
        results = measure(chosen, runs, Path(folder))
    print(markdown(results))
    print(json.dumps({"device": chosen.device, "device_name": device_name(chosen.device),
                      "gpus": max(result["ranks"] for result in results) if chosen.device == "cuda" else 0,
                      "repeats": chosen.repeats, "warmup_runs": chosen.warmup_runs, "steps": chosen.steps,
                      "warmup_steps": chosen.warmup_steps, "definitions": DEFINITIONS, "runs": results}))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
