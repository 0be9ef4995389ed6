"""Pretraining and fine-tuning of a multimodal model on separate process grids.

Examples:
    torchrun --nproc-per-node 4 train_hetero.py --encoder-dp 2 --llm-tp 2 --micro-batch-size 2 --train-iters 100
    python train_hetero.py --dry-run --world-size 264 --encoder-dp 8 --llm-tp 8 --llm-dp 32 --global-batch-size 64
"""

from __future__ import annotations

import os
import sys

from mimo import registry
from mimo.config.cli import parse
from mimo.config.validate import run_world_size, validate
from mimo.config.validate_paths import check_paths
from mimo.grid.dry_run import dry_run_report
from mimo.observability.startup import begin_imports
from mimo.watchdog.process_exit import command_line, refuse, report_uncaught


def main(argv: list[str] | None = None) -> int:
    """Parse, check, then train or print the plan.

    Returns:
        The exit code: 0, 2 for a run that cannot start, or that of the trainer.
    """
    # A provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        with command_line():
            config = parse(argv)
        layout = validate(config, run_world_size(config, os.environ), int(os.environ.get("RANK", "0")))
        if speaks:
            check_paths(config)
        if config.train.dry_run:
            # Imported late, as a run does not need it.
            from mimo.planner.memory_lines import memory_line

            report = dry_run_report(config, layout, registry.model_provider(config.model.model_provider))
            if speaks:
                print(report, end="\n\n", flush=True)
                print(memory_line(config, layout))
            return 0
        # Imported late: torch and Megatron take seconds, and neither --help nor a dry run needs them.
        begin_imports()
        from mimo.training.run import run

        # An error once training has begun never comes back here: the rank that meets it reports it and exits.
        return run(config, layout)
    except ValueError as error:
        return refuse(error)


if __name__ == "__main__":
    sys.excepthook = report_uncaught
    sys.exit(main())
