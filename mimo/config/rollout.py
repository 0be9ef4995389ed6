"""Flags of the rollout engine: its layout, what it may generate, how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

# Ranks wait for one another in collectives of the host's group, which end after 1800 s.
MAX_TIMEOUT_S = 1700.0


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: the vLLM engine that completes prompts, and limits of its calls."""

    max_completion_tokens: int = 512
    """Longest completion, its end token included; prompt and completion together are at most --seq-length."""
    engine_tp: int = 1
    """Tensor-parallel workers of the engine."""
    engine_pp: int = 1
    """Pipeline stages of the engine."""
    engine_ep: bool = False
    """The engine's workers hold whole experts each (expert parallelism), not slices of all."""
    engine_max_num_seqs: int = 64
    """Completions that the engine works on at a time."""
    engine_kv_cache_mib: int = 256
    """Memory of each engine worker for keys and values, MiB."""
    engine_start_timeout_s: float = 600.0
    """Seconds that the engine may take to come up."""
    rollout_timeout_s: float = 600.0
    """Seconds that the completions of one step may take."""
    refit_timeout_s: float = 300.0
    """Seconds of each wait while the engine takes the trainer's weights."""
    refit_verify: bool = False
    """Compare checksums of all weights at every refit."""


def check_rollout(config: RolloutConfig, seq_length: int) -> None:
    """Check the flags. Raises ValueError for the first thing found wrong, naming flags and values.

    Args:
        config: the flags.
        seq_length: `--seq-length`.
    """
    for name in ("max_completion_tokens", "engine_tp", "engine_pp", "engine_max_num_seqs", "engine_kv_cache_mib"):
        value = vars(config)[name]
        if value < 1:
            raise ValueError(f"{_flag(name)} {value} is below 1")
    for name in ("engine_start_timeout_s", "rollout_timeout_s", "refit_timeout_s"):
        value = vars(config)[name]
        if not 0 < value <= MAX_TIMEOUT_S:
            raise ValueError(f"{_flag(name)} {value} is not above 0 and at most {MAX_TIMEOUT_S:g}: ranks that wait for "
                             "it give up after 1800 s")
    if config.max_completion_tokens >= seq_length:
        raise ValueError(f"--max-completion-tokens {config.max_completion_tokens} leaves no room for a prompt in "
                         f"--seq-length {seq_length}")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
