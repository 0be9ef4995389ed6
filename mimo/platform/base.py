"""Device, backend and memory services that the trainer needs."""

from __future__ import annotations

import abc
import datetime
import random
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d


class Platform(abc.ABC):
    """Device, process-group backend, precision, random seeds and memory use of the machine.

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
        """Bind this process to the device of `local_rank`, its rank within the host."""

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
    def drain_allocation_retries(self) -> int:
        """Return how often since the last call device memory was full.

        The allocator then waits for the device, gives back the memory that it keeps for later, and tries again. This
        takes much longer than other allocations do. It is 0 on CPU.
        """

    def set_memory_of_replays(self, size: int) -> None:  # noqa: B027
        """Say how many bytes replays of CUDA graphs use from now on that the allocator takes to be free."""

    @abc.abstractmethod
    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, over all processes that use it; on a CPU, of the host."""

    @abc.abstractmethod
    def has_transformer_engine(self) -> bool:
        """Return whether Transformer Engine layers can run here."""

    @abc.abstractmethod
    def has_mamba_kernels(self) -> bool:
        """Return whether Mamba-2's fused kernels can run here. Otherwise `mimo.model.torch_layers.mamba` is used."""

    @property
    def device_name(self) -> str:
        """Name of the accelerator as its driver gives it; empty if there is none."""
        return ""

    def make_deterministic(self) -> None:  # noqa: B027  (a platform that is deterministic anyway does nothing)
        """Use only kernels and reductions that give the same bits every time. Call it before `set_device`."""

    def leave_default_stream(self) -> None:  # noqa: B027  (a CPU has no streams)
        """Let this thread queue its work on a stream that CUDA graphs may capture. Call it before a model is built.

        Autograd keeps the stream on which it first saw a parameter, and no graph may wait for the default one.
        """

    def init_process_group(self, rank: int, world_size: int, timeout_s: float) -> None:
        """Create the default process group from MASTER_ADDR and MASTER_PORT (`env://`), and limit all later groups.

        A collective gives up after `timeout_s` seconds, in this group and in every later one of this process that is
        made without its own limit.
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
        """Seed python, numpy, torch and Megatron's RNG tracker, without `parallel_state`.

        Ranks with the same `seed` draw the same numbers from the default stream. The tracker's model-parallel stream
        also depends on `tp_rank`, and its expert stream on `ep_rank` and `expt_tp_rank`.

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
        """Return the state of every generator that `seed` sets, as plain objects and CPU byte tensors."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": dict(get_cuda_rng_tracker().get_states()),
        }

    def set_rng_state(self, state: dict[str, Any]) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["device"])
        get_cuda_rng_tracker().set_states(dict(state["tracker"]))
