"""The plan that `train_rl.py --dry-run` prints: the trainer's grids, the engine and its GPUs, the batch. No torch."""

from __future__ import annotations

import importlib.util

from mimo.config.rl_run import RlRunConfig
from mimo.grid.report import grid_parts
from mimo.grid.spec import Layout
from mimo.grid.text import counted
from mimo.protocols import ModelProvider
from mimo.rl.batching import plan_microbatches


def dry_run_report(config: RlRunConfig, layout: Layout, provider: ModelProvider) -> str:
    """The plan of a run as text.

    Args:
        config: the validated run.
        layout: of its trainer.
        provider: the model provider that `config` names.
    """
    parts = [*grid_parts(config, layout, provider), _engine_lines(config, layout), _batch_lines(config, layout)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _engine_lines(config: RlRunConfig, layout: Layout) -> list[str]:
    """Where the engine's workers run, and how many GPUs there have to be."""
    flags, ranks = config.rollout, layout.world_size
    workers = flags.num_engine_workers
    lines = [f"engine: {counted(flags.engine_dp, 'replica')} of {counted(workers // flags.engine_dp, 'worker')} "
             f"(--engine-tp {flags.engine_tp} * --engine-pp {flags.engine_pp}), {flags.engine_placement}, "
             f"--rollout-mode {flags.rollout_mode}"]
    if config.train.device == "cpu":
        lines.append(f"processes: {counted(ranks, 'trainer rank')} and {counted(workers, 'engine worker')}, on CPUs")
    elif flags.engine_placement == "colocated":
        lines.append(f"GPUs: {ranks}, one for each trainer rank; the engine shares {workers} of the first host's")
    elif flags.engine_placement == "ray":
        lines.append(f"GPUs: {ranks + workers}, {ranks} for the trainer's ranks and {workers} where Ray places the "
                     "engine")
    else:
        which = f"numbers {flags.engine_gpus}" if flags.engine_gpus else "those after the trainer's"
        lines.append(f"GPUs: {ranks + workers}, {ranks} for the trainer's ranks and {workers} for the engine, all of "
                     f"which are on the first rank's host ({which})")
    for package in ("vllm", "ray") if flags.engine_placement == "ray" else ("vllm",):
        if importlib.util.find_spec(package) is None:
            lines.append(f"  the package {package} is not installed here; the sets rl-cpu and rl-gpu of "
                         "scripts/setup.sh bring it")
    return lines


def _batch_lines(config: RlRunConfig, layout: Layout) -> list[str]:
    """Prompts, completions, updates and microbatches of an iteration."""
    train, rl = config.train, config.rl
    per_update = train.global_batch_size // rl.updates_per_rollout
    # All sequences as long as they may be; how many are packed together otherwise is only known with their lengths.
    most = len(plan_microbatches([train.seq_length] * per_update, layout.num_lanes, rl.max_tokens_per_microbatch)[0])
    return [
        f"batch: {counted(config.prompts_per_step, 'prompt')} * {counted(rl.completions_per_prompt, 'completion')} "
        f"(--completions-per-prompt) = {counted(train.global_batch_size, 'completion')} of an iteration "
        "(--global-batch-size)",
        f"updates: {counted(rl.updates_per_rollout, 'update')} an iteration (--updates-per-rollout), "
        f"{counted(per_update, 'completion')} each, {per_update // layout.num_lanes} on each of "
        f"{counted(layout.num_lanes, 'lane')} (--llm-dp)",
        f"microbatches: up to {most} of an update on each lane, where all sequences have --seq-length "
        f"{train.seq_length} tokens (--max-tokens-per-microbatch {rl.max_tokens_per_microbatch}); fewer where they are "
        "shorter",
    ]
