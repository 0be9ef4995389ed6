"""Which GPUs and environment variables the rollout engine gets. Decided before anything is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence

from mimo.config.rl_run import RlRunConfig
from mimo.config.rollout import RolloutConfig

# Variables of the trainer that an engine on another node is to have: those that begin like this, and these. What
# belongs to a device, a process or a node is not among them: CUDA_VISIBLE_DEVICES is Ray's to set, RANK and its like
# are torchrun's.
FORWARDED_PREFIXES = ("HF_", "TRANSFORMERS_", "VLLM_", "NCCL_", "FI_", "GLOO_", "TORCH_", "TORCHDYNAMO_",
                      "TORCHINDUCTOR_", "TRITON_")
# Caches and temporary files: the folder of a home may be small, or slow for what many nodes compile at once.
FORWARDED_NAMES = ("CUDA_CACHE_PATH", "OMP_NUM_THREADS", "PYTHONPATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
                   "TMPDIR", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "http_proxy", "https_proxy", "no_proxy")
NOT_FORWARDED = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_LOOPBACK_IP")


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that go with an engine to wherever it runs."""
    return {name: value for name, value in sorted(environment.items())
            if (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES) and name not in NOT_FORWARDED}


def check_placement(config: RlRunConfig, rank: int) -> None:
    """Check what the flags ask for against this machine.

    Args:
        config: the run, `train.device` being `cpu` or `cuda`.
        rank: of this process; the first one's host has the engine.

    Raises:
        ValueError: too few GPUs, GPUs that a rank has, flags of the other device, or Ray is not installed.
    """
    flags = config.rollout
    if flags.engine_placement == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--engine-placement ray needs the package ray, which the extras rl-cpu and rl-gpu bring")
    if config.train.device == "cpu":
        for name, given in (("--engine-gpus", flags.engine_gpus), ("--engine-memory", flags.engine_memory),
                            ("--engine-enforce-eager", flags.engine_enforce_eager),
                            ("--engine-quantization", flags.engine_quantization)):
            if given and given != "none":
                raise ValueError(f"{name} {given} is for GPUs, and this run is on the CPU (--device cpu)")
    elif rank == 0:
        replica_gpus(config)


def replica_gpus(config: RlRunConfig) -> list[list[str]]:
    """What CUDA calls the GPUs of each replica; empty on the CPU, and where a Ray cluster knows better.

    Raises:
        ValueError: there are too few.
    """
    flags = config.rollout
    if config.train.device != "cuda" or flags.ray_address:
        return []
    import torch

    visible = visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    chosen = choose_gpus(flags, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(visible))
    workers = flags.engine_tp * flags.engine_pp
    return [[visible[number] for number in chosen[first:first + workers]] for first in range(0, len(chosen), workers)]


def visible_gpus(count: int, variable: str | None) -> list[str]:
    """What CUDA calls the GPUs that a process sees, in its own order.

    Args:
        count: how many it sees.
        variable: its `CUDA_VISIBLE_DEVICES`: numbers or names; None where it has none.
    """
    names = list(map(str, range(count))) if variable is None else [each.strip() for each in variable.split(",")]
    return names[:count]  # CUDA passes over what stands behind a name that is none


def choose_gpus(flags: RolloutConfig, num_local_ranks: int, num_gpus: int) -> list[int]:
    """GPUs of all workers, replica by replica, as the first rank numbers them; rank i of its host has GPU i.

    Args:
        flags: the engine's.
        num_local_ranks: trainer ranks of the first host.
        num_gpus: that the first rank sees.

    Raises:
        ValueError: there are too few, or a trainer rank has one of them; with the numbers.
    """
    needed = flags.num_engine_workers
    sizes = f"--engine-dp {flags.engine_dp} --engine-tp {flags.engine_tp} --engine-pp {flags.engine_pp}"
    if flags.engine_placement == "colocated":
        if needed > num_local_ranks:
            raise ValueError(f"--engine-placement colocated: {sizes} need {needed} GPUs that trainer ranks have, and "
                             f"the first host has {num_local_ranks} ranks")
        return list(range(needed))
    if flags.gpu_numbers:
        _check_chosen(flags, num_local_ranks, num_gpus)
        return list(flags.gpu_numbers)
    if num_local_ranks + needed > num_gpus:
        raise ValueError(
            f"--engine-placement {flags.engine_placement}: the first host has {num_gpus} GPUs; its {num_local_ranks} "
            f"trainer ranks and the engine's {needed} workers ({sizes}) need {num_local_ranks + needed}")
    return list(range(num_local_ranks, num_local_ranks + needed))


def _check_chosen(flags: RolloutConfig, num_local_ranks: int, num_gpus: int) -> None:
    chosen: Sequence[int] = flags.gpu_numbers
    missing = [number for number in chosen if number >= num_gpus]
    if missing:
        raise ValueError(f"--engine-gpus {flags.engine_gpus}: the first rank sees {num_gpus} GPUs, numbered from 0; "
                         f"there is no {', '.join(map(str, missing))}")
    taken = [number for number in chosen if number < num_local_ranks]
    if taken:
        raise ValueError(f"--engine-gpus {flags.engine_gpus}: the {num_local_ranks} trainer ranks of the first host "
                         f"have GPUs 0 to {num_local_ranks - 1}, and with them {', '.join(map(str, taken))}; "
                         "--engine-placement colocated shares GPUs")
