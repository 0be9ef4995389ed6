"""Flags of the run: batch, length, evaluation, safety."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A week: limits of waits are numbers that sockets, process groups and timers take.
MAX_TIMEOUT_S = 604800.0


@dataclass(frozen=True)
class TrainConfig:
    """Run: batch sizes, length, evaluation, device, safety."""

    micro_batch_size: int = 1
    """Samples of one lane in one microbatch."""
    global_batch_size: int = 8
    """Samples of all lanes in one iteration; a multiple of micro-batch-size times llm-dp."""
    seq_length: int = 2048
    """Tokens per sample after image expansion and padding."""
    train_iters: int | None = None
    """Length of the run in iterations (exclusive with --train-samples)."""
    train_samples: int | None = None
    """Length of the run in samples; schedules then count samples."""
    eval_interval: int = 0
    """Iterations between evaluations; 0 evaluates only at the end."""
    eval_iters: int = 0
    """Global batches in an evaluation; 0 does not evaluate."""
    num_generations: int = 20
    """Held-out samples decoded greedily and printed after the last evaluation."""
    seed: int = 1234
    """Seed of parameters, dropout and sample order."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA where there is one. cpu runs the same Megatron code under emulation, over gloo."""
    encoder_prefetch_depth: int = 0
    """Microbatches, of coming iterations too, whose features a frozen encoder computes while it waits; 0: none."""
    deterministic_mode: bool = False
    """Only kernels and reductions that give the same bits every time (slower); a resumed run then repeats exactly."""
    check_for_nan_in_loss: bool = True
    """Stop with an error when the loss is not finite."""
    watchdog_timeout_s: float = 600.0
    """Seconds without progress after which a rank says what it waits for and exits."""
    dry_run: bool = False
    """Print grids, lanes, parameters per rank and bridge bytes, then exit; needs no GPU."""
    world_size: int | None = None
    """World size for --dry-run; otherwise torchrun's."""
