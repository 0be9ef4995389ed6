"""Train the same steps on one homogeneous grid and on separate grids, and compare the losses step by step.

    python scripts/parity/run.py --steps 150 --json parity.json --config RUN.toml --encoder-dp 1 --llm-dp 2

The trainer's flags describe the separate grids (--layout disjoint). The homogeneous run has the same language grid, and
the encoder on the same ranks with the same tensor- and data-parallel sizes. So the lanes, and with them the global
batches, are the same. Both runs start from the same weights: those of --load if given, or else those that a first run
of one iteration leaves in OUT/start.

The program prints loss and relative difference, (separate - homogeneous) / homogeneous, of every step, and a summary.
The exit code is 1 if a difference exceeds --tolerance, and 2 if a run is not possible. --json FILE keeps all figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from scripts.training_runs import num_ranks, quiet, train

# The start run ends after its first iteration, because it has exceeded this time by then.
ONE_ITERATION_MINS = 1e-9
HOMOGENEOUS, SEPARATE = "homogeneous", "separate"


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's own flags, and those that it passes to the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=150, help="iterations of each run")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest relative difference of a step's loss")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary one, deleted at the end)")
    chosen, further = parser.parse_known_args(arguments)
    if chosen.steps < 1 or not chosen.tolerance >= 0:
        parser.error(f"--steps {chosen.steps} --tolerance {chosen.tolerance}: need steps >= 1 and tolerance >= 0")
    return chosen, further


def separate_run(flags: list[str], steps: int) -> RunConfig:
    """Return the run that the trainer's flags describe. Raises ValueError if it cannot be compared."""
    config = parse([*flags, "--train-iters", str(steps)])
    if config.checkpoint.save is not None:
        raise ValueError(f"--save {config.checkpoint.save}: the runs are compared, not kept; leave it out")
    if config.layout.layout != "disjoint" or config.layout.llm_only:
        raise ValueError("--layout and --llm-only: the flags describe the separate grids; leave these out")
    return quiet(config)


def homogeneous_run(config: RunConfig) -> RunConfig:
    """Return the same run with the encoder on the ranks of the language model, in the same grid."""
    grid = config.layout
    layout = replace(grid, layout="colocated", encoder_tp=grid.llm_tp, encoder_dp=grid.llm_dp, encoder_pp=1, llm_pp=1,
                     llm_pp_layout=None, llm_offset=None)
    return replace(config, layout=layout)


def from_same_weights(runs: dict[str, RunConfig], folder: Path) -> dict[str, RunConfig]:
    """Let both runs load the same weights. Without --load, a run of one iteration makes them."""
    if runs[SEPARATE].checkpoint.load is not None:
        return runs
    first = runs[HOMOGENEOUS]
    saving = replace(first.checkpoint, save=str(folder), save_optim=False, exit_duration_in_mins=ONE_ITERATION_MINS)
    train(replace(first, checkpoint=saving), folder / "run")
    return {name: replace(config, checkpoint=replace(config.checkpoint, load=str(folder), finetune=True))
            for name, config in runs.items()}


def compare(losses: dict[str, Sequence[float]]) -> dict[str, Any]:
    """Compare the losses of two runs.

    Returns:
        `losses`, the signed `relative_difference` of each step, and `max`, `mean` and `first` of the absolute
        differences. `max_step` is the step of the largest one, counted from 1.
    """
    pairs = list(zip(losses[HOMOGENEOUS], losses[SEPARATE], strict=True))
    relative = [(separate - homogeneous) / homogeneous for homogeneous, separate in pairs]
    sizes = [abs(value) for value in relative]
    return {"losses": {name: list(values) for name, values in losses.items()}, "relative_difference": relative,
            "max": max(sizes), "max_step": sizes.index(max(sizes)) + 1, "mean": sum(sizes) / len(sizes),
            "first": sizes[0]}


def report(figures: dict[str, Any], tolerance: float) -> str:
    rows = zip(figures["losses"][HOMOGENEOUS], figures["losses"][SEPARATE], figures["relative_difference"], strict=True)
    lines = [f"{'step':>6} {HOMOGENEOUS:>12} {SEPARATE:>12} {'relative':>12}"]
    lines += [f"{step:>6} {homogeneous:>12.6f} {separate:>12.6f} {relative:>+12.2e}"
              for step, (homogeneous, separate, relative) in enumerate(rows, start=1)]
    verdict = "within" if figures["max"] <= tolerance else "ABOVE"
    lines.append(f"relative difference: first {figures['first']:.2e}, mean {figures['mean']:.2e}, max "
                 f"{figures['max']:.2e} at step {figures['max_step']}: {verdict} --tolerance {tolerance:g}")
    return "\n".join(lines)


def measure(chosen: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    separate = separate_run(flags, chosen.steps)
    runs = {HOMOGENEOUS: homogeneous_run(separate), SEPARATE: separate}
    for config in runs.values():
        validate(config, num_ranks(config))
    runs = from_same_weights(runs, folder / "start")
    losses = {name: [record["lm loss"] for record in train(config, folder / name)] for name, config in runs.items()}
    return {"flags": flags, "ranks": {name: num_ranks(config) for name, config in runs.items()},
            "tolerance": chosen.tolerance, **compare(losses)}


def main(arguments: list[str] | None = None) -> int:
    chosen, flags = parse_arguments(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
            figures = measure(chosen, flags, chosen.out or Path(temporary))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(figures, chosen.tolerance))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(figures["max"] > chosen.tolerance)


if __name__ == "__main__":
    sys.exit(main())
