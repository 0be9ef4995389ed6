"""Flags of the rollout engine: its layout, what it may generate, how long it may take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mimo.config.train import MAX_TIMEOUT_S


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: the vLLM engine that completes prompts, and limits of its calls."""

    rollout_mode: Literal["sync", "one-step-off"] = "sync"
    """sync: completions are drawn by the policy that is trained on them; one-step-off: by the one before, beside the
    update."""
    rollout_seeds: bool = True
    """Draw each prompt's completions from a seed of its own, so that a resumed run draws the same."""
    max_completion_tokens: int = 512
    """Longest completion, its end token included; prompt and completion together are at most --seq-length."""
    engine_placement: Literal["separate", "colocated", "ray"] = "separate"
    """Where the engine runs: separate (beside the first rank, on GPUs that no rank has), colocated (on the trainer's
    own GPUs), ray (where Ray places it)."""
    ray_address: str = ""
    """host:port of a Ray cluster, or auto for the one of this node; left out: --engine-placement ray starts Ray
    here."""
    engine_gpus: str = ""
    """GPUs of separate engines, such as 4,5, as the first rank numbers them; left out: those after the trainer's."""
    engine_dp: int = 1
    """Replicas of the engine, between which prompts are divided."""
    engine_tp: int = 1
    """Tensor-parallel workers of a replica."""
    engine_pp: int = 1
    """Pipeline stages of a replica."""
    engine_ep: bool = False
    """The engine's workers hold whole experts each (expert parallelism), not slices of all."""
    engine_max_num_seqs: int = 64
    """Completions that a replica works on at a time."""
    engine_kv_cache_mib: int = 256
    """Memory of each engine worker for keys and values on the CPU, MiB."""
    engine_memory: float | None = None
    """Part of each of its GPUs that the engine may fill; left out: 0.85, and 0.6 with --engine-placement colocated."""
    engine_quantization: Literal["none", "fp8_per_block"] = "none"
    """fp8_per_block: the engine on GPUs quantises each refit's weights to FP8, with a scale for each block, as it loads
    them; routers stay in bfloat16."""
    engine_enforce_eager: bool = False
    """The engine on GPUs runs without CUDA graphs and compilation: it starts sooner and answers later."""
    engine_start_timeout_s: float = 600.0
    """Seconds that the engine may take to come up."""
    rollout_timeout_s: float = 600.0
    """Seconds that any call of the engine may take, the completions of a step among them."""
    refit_timeout_s: float = 300.0
    """Seconds of each wait while the engine takes the trainer's weights."""
    refit_verify_interval: int = 25
    """Verify the first refit of a run and every n-th after it: checksums of all weights, and log-probs by engine and
    trainer of the same tokens, with the weights as they are and with scrambled ones; 0: verify none."""

    @property
    def num_engine_workers(self) -> int:
        """Workers of all replicas; a GPU each."""
        return self.engine_dp * self.engine_tp * self.engine_pp

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """`--engine-gpus`. Raises ValueError where these are no numbers."""
        numbers = [each.strip() for each in self.engine_gpus.split(",")] if self.engine_gpus else []
        if not all(each.isdecimal() for each in numbers):
            raise ValueError(f"--engine-gpus {self.engine_gpus}: must be numbers with commas between them, such as 4,5")
        return tuple(map(int, numbers))


def check_rollout(config: RolloutConfig, seq_length: int) -> None:
    """Check the flags. Raises ValueError for the first thing found wrong, naming flags and values.

    Args:
        config: the flags.
        seq_length: `--seq-length`.
    """
    for name in ("max_completion_tokens", "engine_dp", "engine_tp", "engine_pp", "engine_max_num_seqs",
                 "engine_kv_cache_mib"):
        value = vars(config)[name]
        if value < 1:
            raise ValueError(f"{_flag(name)} {value} is below 1")
    if config.refit_verify_interval < 0:
        raise ValueError(f"--refit-verify-interval {config.refit_verify_interval} is below 0 (0: verify no refit)")
    for name in ("engine_start_timeout_s", "rollout_timeout_s", "refit_timeout_s"):
        value = vars(config)[name]
        if not 0 < value <= MAX_TIMEOUT_S:
            raise ValueError(f"{_flag(name)} {value} is not above 0 and at most {MAX_TIMEOUT_S:g} (a week)")
    _check_placement(config)
    if config.rollout_timeout_s < config.refit_timeout_s:
        raise ValueError(f"--rollout-timeout-s {config.rollout_timeout_s}, which limits every call of the engine, is "
                         f"below --refit-timeout-s {config.refit_timeout_s}")
    if config.max_completion_tokens >= seq_length:
        raise ValueError(f"--max-completion-tokens {config.max_completion_tokens} leaves no room for a prompt in "
                         f"--seq-length {seq_length}")


def _check_placement(config: RolloutConfig) -> None:
    placement = config.engine_placement
    if config.ray_address and placement != "ray":
        raise ValueError(f"--ray-address {config.ray_address} is for --engine-placement ray, not for {placement}")
    if config.ray_address.startswith("ray://"):
        raise ValueError(f"--ray-address {config.ray_address}: Ray Client is not supported; start Ray on this node as "
                         "one of the cluster's and use auto, or host:port of its GCS")
    if config.ray_address not in ("", "auto") and not re.fullmatch(r".+:\d+", config.ray_address):
        raise ValueError(f"--ray-address {config.ray_address} is neither host:port of a Ray cluster nor auto")
    if config.engine_memory is not None and not 0 < config.engine_memory <= 1:
        raise ValueError(f"--engine-memory {config.engine_memory} is not above 0 and at most 1")
    if config.engine_gpus:
        _check_gpus(config)


def _check_gpus(config: RolloutConfig) -> None:
    if config.engine_placement != "separate":
        raise ValueError(f"--engine-gpus {config.engine_gpus} is for --engine-placement separate, not for "
                         f"{config.engine_placement}")
    numbers = config.gpu_numbers
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"--engine-gpus {config.engine_gpus} has a GPU twice")
    if len(numbers) != config.num_engine_workers:
        raise ValueError(
            f"--engine-gpus {config.engine_gpus} are {len(numbers)}, and --engine-dp {config.engine_dp} --engine-tp "
            f"{config.engine_tp} --engine-pp {config.engine_pp} need {config.num_engine_workers}, one a worker")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
