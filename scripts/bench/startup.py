"""What a start costs: from typing torchrun to the end of the first optimizer step, by phase, in cold processes.

    python scripts/bench/startup.py --device cpu --run "disjoint=--encoder-dp 1 --llm-dp 1" \
        --run "colocated=--layout colocated --encoder-dp 2 --llm-dp 2" \
        --model-provider mock --dataset-provider mock --micro-batch-size 2

Each --run is a name and flags of train_hetero.py; all other flags are the same for all, and with no --run there is one
run with these alone. Runs take turns, in one order and then in the other, --repeats times after --warmup-runs times
that are left out (they bring files into the host's memory): each time new processes under torchrun, one for each rank.
Beside them, with as many processes, `baseline` imports torch and what of Megatron any trainer on it imports, plainly
and nothing else: the imports phase over it says what this trainer's own imports add, or what it saves.

Phases are the trainer's own (startup.json of its run folder): each ends when the last rank ends it. Before them comes
`launcher`, from typing the command to the first process of a rank. They sum to the whole; shown are those of the
repetition whose whole is the median. first/steady is the time of the first iteration over the median of those after
--warmup-steps. The last line of output is JSON; above it the same as a Markdown table, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.observability.startup import Phase
from scripts.bench.tables import device_name
from scripts.training_runs import ROOT, num_ranks, quiet, train

LAUNCHER = "launcher"
PARTS = (LAUNCHER, *(phase.value for phase in Phase))
# What a process of a trainer on Megatron cannot do without; prints its age.
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
    "whole_s": "typing the command to the end of the first optimizer step, slowest rank: parts_s summed",
    "first_over_steady": "time of the first iteration over the median of later ones; medians over repetitions",
    "imports_over_baseline": "imports phase over baseline_s; medians over repetitions",
    "baseline_s": "age of the slowest of as many processes when they have plainly imported torch and Megatron",
}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--run", action="append", metavar="NAME=FLAGS", help="may be given several times")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each run (5)")
    parser.add_argument("--warmup-runs", type=int, default=1, help="first starts of each, not in the figures (1)")
    parser.add_argument("--steps", type=int, default=20, help="iterations of each start (20)")
    parser.add_argument("--warmup-steps", type=int, default=5, help="first iterations that are not steady ones (5)")
    chosen, further = parser.parse_known_args(arguments)
    chosen.run = chosen.run or ["run="]
    names = [run.partition("=")[0] for run in chosen.run]
    if not all(names) or len(set(names)) < len(names):
        parser.error(f"--run {' '.join(names)}: give each run a name of its own, NAME=FLAGS")
    if not 1 <= chosen.warmup_steps < chosen.steps:
        parser.error(f"--steps {chosen.steps} --warmup-steps {chosen.warmup_steps}: need 1 <= warmup < steps")
    if chosen.repeats < 1 or chosen.warmup_runs < 0:
        parser.error(f"--repeats {chosen.repeats} --warmup-runs {chosen.warmup_runs}: need at least 1 and 0")
    return chosen, further


def planned(chosen: argparse.Namespace, further: list[str]) -> dict[str, tuple[list[str], RunConfig]]:
    """Flags and configuration of each run, checked. Raises ValueError for what cannot work."""
    runs = {}
    for run in chosen.run:
        name, _, layout = run.partition("=")
        flags = [*shlex.split(layout), *further, "--device", chosen.device]
        config = quiet(parse([*flags, "--train-iters", str(chosen.steps)]))
        validate(config, num_ranks(config))
        runs[name] = (flags, config)
    return runs


def start(config: RunConfig, folder: Path, warmup_steps: int) -> dict[str, Any]:
    """Start a run once and train to its end.

    Returns:
        parts_s: seconds by part; whole_s: their sum; first_s and steady_s: of iterations; process_groups and
        process_groups_of_a_rank.

    Raises:
        RuntimeError: as `scripts.training_runs.train`.
    """
    began = time.time()
    records = train(config, folder)
    found = json.loads((folder / "startup.json").read_text(encoding="utf-8"))
    times = [record["iteration-time"] for record in records]
    return parts(began, found) | {"first_s": times[0], "steady_s": statistics.median(times[warmup_steps:]),
                                  "process_groups": found["num_groups"],
                                  "process_groups_of_a_rank": found["num_groups_of_a_rank"]}


def parts(began_unix_s: float, found: dict[str, Any]) -> dict[str, Any]:
    """`whole_s` and `parts_s` of a start that was typed at `began_unix_s`, from its startup.json."""
    whole_s = found["ended_unix_s"] - began_unix_s
    return {"whole_s": whole_s, "parts_s": {LAUNCHER: whole_s - found["seconds"], **found["phases"]}}


def baseline(ranks: int) -> float:
    """Seconds after which the last of as many processes has imported what it must. Raises RuntimeError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT),
                                                                             os.environ.get("PYTHONPATH")]))}
    processes = [subprocess.Popen([sys.executable, "-c", BASELINE], stdout=subprocess.PIPE, text=True, env=environment)
                 for _ in range(ranks)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("torch and Megatron cannot be imported; see above")
    return max(float(output.split()[-1]) for output in outputs)


def summary(starts: list[dict[str, Any]], baselines: list[float]) -> dict[str, Any]:
    """Figures of all starts of a run."""
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
    """The runs that came to their end as a table."""
    header = ["run", "ranks", "whole", *PARTS, "baseline of imports", "first iteration", "steady", "first/steady",
              "process groups", "of a rank"]
    rows = [header, ["---"] * len(header)]
    for result in results:
        if "error" not in result:
            seconds = [result["whole_s"], *(result["parts_s"].get(part, 0.0) for part in PARTS), result["baseline_s"]]
            rows.append([result["name"], str(result["ranks"]), *(f"{value:.2f}" for value in seconds),
                         f"{result['first_iteration_s']:.3f}", f"{result['steady_iteration_s']:.3f}",
                         f"{result['first_over_steady']:.1f}", str(result["process_groups"]),
                         str(result["process_groups_of_a_rank"])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(chosen: argparse.Namespace, runs: dict[str, tuple[list[str], RunConfig]],
            folder: Path) -> list[dict[str, Any]]:
    """All starts of all runs, in turns; a run that fails once is not started again."""
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
        command = ["torchrun", "--nproc-per-node", str(num_ranks(config)), "train_hetero.py", *flags]
        figures = {"error": errors[name]} if name in errors else summary(starts[name], baselines[name])
        results.append({"name": name, "ranks": num_ranks(config), **figures, "command": shlex.join(command)})
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run all, print, and give the exit code: 1 where a run failed, 2 where one cannot work."""
    chosen, further = parse_arguments(arguments)
    try:
        runs = planned(chosen, further)
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
