"""Device, backend and memory services that the trainer needs."""

from __future__ import annotations

import abc
import datetime
import importlib.util
import random
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d


class Platform(abc.ABC):
    """Device, process-group backend, precision, seeding and memory figures behind one object.

    Attributes:
        name: `cuda` or `cpu`.
        device: where parameters, activations and batches live.
        backend: process-group backend, `nccl` or `gloo`.
    """

    name: Literal["cuda", "cpu"]
    device: torch.device
    backend: str

    @abc.abstractmethod
    def install(self) -> None:
        """Prepare the process. Called once by `get_platform`, before Megatron is imported."""

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to the device of `local_rank` (rank within its host)."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device has finished."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """High-water mark of memory use in bytes: allocator memory on CUDA, resident set size on CPU."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new high-water mark."""

    @abc.abstractmethod
    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, over all processes that use it; on a CPU, of the host."""

    @abc.abstractmethod
    def has_transformer_engine(self) -> bool:
        """Whether Transformer Engine layers can run here."""

    @abc.abstractmethod
    def has_mamba_kernels(self) -> bool:
        """Tell whether Mamba-2's fused kernels can run here; `mimo.model.torch_layers.mamba` stands in for them."""

    @property
    def device_name(self) -> str:
        """The accelerator's name as its driver gives it; empty where there is none."""
        return ""

    def make_deterministic(self) -> None:  # noqa: B027  (a platform that is so by nature does nothing)
        """Use only kernels and reductions that give the same bits every time. Before `set_device`."""

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Mixed-precision context of the platform's device; `dtype` is that of matrix products (float32: off)."""
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def init_process_group(self, rank: int, world_size: int, timeout_s: float) -> None:
        """Create the default process group from MASTER_ADDR and MASTER_PORT (`env://`), and limit all later groups.

        Args:
            rank: global rank of this process.
            world_size: number of processes.
            timeout_s: seconds after which a collective gives up, of this group and of every later one of the process
                that is made without a limit of its own.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        # A new group takes the limit from here, not from the default group. Megatron Core makes some groups itself, so
        # the limit cannot be an argument.
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
        torch.distributed.init_process_group(
            self.backend,
            init_method="env://",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    def seed(self, seed: int, *, tp_rank: int, ep_rank: int, expt_tp_rank: int) -> None:
        """Seed python, numpy, torch and Megatron's RNG tracker; `parallel_state` is not needed.

        Ranks that agree on `seed` draw alike in the default stream; the tracker's model-parallel stream differs by
        `tp_rank`, its expert stream by `ep_rank` and `expt_tp_rank`.

        Args:
            seed: at least 0.
            tp_rank: rank in the module's tensor-parallel group.
            ep_rank: rank in its expert-parallel group.
            expt_tp_rank: rank in its expert tensor-parallel group.
        """
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if seed < 0:
            raise ValueError(f"--seed {seed} must be at least 0")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(
            seed, tp_rank=tp_rank, ep_rank=ep_rank, etp_rank=expt_tp_rank, force_reset_rng=True
        )

    def rng_state(self) -> dict[str, Any]:
        """State of every generator that `seed` sets, for a checkpoint: plain objects and CPU byte tensors."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": dict(get_cuda_rng_tracker().get_states()),
        }

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `rng_state` returned."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["device"])
        get_cuda_rng_tracker().set_states(dict(state["tracker"]))


def transformer_engine_installed() -> bool:
    """Whether the Transformer Engine package can be found, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def mamba_kernels_installed() -> bool:
    """Whether the packages of Mamba-2's kernels can be found, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("mamba_ssm", "causal_conv1d"))
