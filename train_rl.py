"""Reinforcement learning of a text or vision-language model: GRPO and its kin, with completions from a vLLM engine.

Examples:
    python train_rl.py --config scripts/configs/rl_arithmetic_model.toml --config scripts/configs/rl_arithmetic.toml
    torchrun --nproc-per-node 2 train_rl.py --config scripts/configs/rl_digits_model.toml \
        --config scripts/configs/rl_digits.toml --load runs/digits_cpu/checkpoints --finetune --save runs/digits_rl
The second starts from what scripts/rl/digits_cpu.sh trains first.
"""

from __future__ import annotations

import os
import sys

from mimo import registry
from mimo.config.cli import parse_as
from mimo.config.rl_run import DESCRIPTION, FIRST_FLAGS, RlRunConfig, validate_rl
from mimo.config.validate import run_world_size
from mimo.config.validate_paths import check_paths
from mimo.observability.startup import begin_imports
from mimo.rl.placement import dry_run_report
from mimo.watchdog.process_exit import command_line, refuse, report_uncaught


def main(argv: list[str] | None = None) -> int:
    """Parse, check, then train or print the plan.

    Returns:
        The exit code: 0, 2 for a run that cannot start, or that of the trainer.
    """
    # A provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    rank = int(os.environ.get("RANK", "0"))
    try:
        with command_line():
            config = parse_as(RlRunConfig, argv, DESCRIPTION, FIRST_FLAGS)
        layout = validate_rl(config, run_world_size(config, os.environ), rank)
        if rank == 0:
            check_paths(config)
        if config.train.dry_run:
            if rank == 0:
                print(dry_run_report(config, layout, registry.model_provider(config.model.model_provider)))
            return 0
        # Imported late: torch and Megatron take seconds, and neither --help nor a dry run needs them.
        begin_imports()
        from mimo.rl.run import run

        # An error once training has begun never comes back here: the rank that meets it reports it and exits.
        return run(config, layout)
    except ValueError as error:
        return refuse(error)


if __name__ == "__main__":
    sys.excepthook = report_uncaught
    sys.exit(main())
