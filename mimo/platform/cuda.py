"""NVIDIA GPUs with NCCL."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import tempfile
from pathlib import Path

import torch

from mimo.platform.base import Platform
from mimo.watchdog import flight_recorder

logger = logging.getLogger(__name__)


def keep_compiled_kernels() -> None:
    """Give Triton and TorchInductor cache folders that outlive the process and a restart of the host.

    The folders are in `$XDG_CACHE_HOME/mimo-hetero/HOST`, or else in `~/.cache/mimo-hetero/HOST`, because hosts that
    share a home may have different CPUs and would wait for each other's locks. TorchInductor's own choice is under
    /tmp, and it moves Triton's there as well. Folders that the user has chosen stay.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders = [home / "mimo-hetero" / platform.node() / f"mimo-hetero-{name}" for name in ("inductor", "triton")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"0")
    except (OSError, RuntimeError) as problem:  # there is no home, or it cannot be written
        logger.warning("compiled kernels are not kept for the next start: %s; set XDG_CACHE_HOME", problem)
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folders[0]))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folders[1]))


# Threads touch pinned memory and torch then registers it with CUDA: 7.9 GB/s on a host with one H200, where memory that
# CUDA allocated itself came at 1.4 GB/s. Tens of GB are pinned when training state moves to the host.
PINNED_MEMORY = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def choose_pinned_memory() -> None:
    """Add `PINNED_MEMORY` to the settings of torch's allocator, unless the user has chosen how memory is pinned."""
    # If both variables are set, even to nothing, torch reads the one with the older name alone.
    name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else "PYTORCH_ALLOC_CONF"
    given = os.environ.get(name, "")
    if "pinned_use_cuda_host_register" not in given:
        # The last value of a setting counts, so that a number of threads that the user has chosen stays, too.
        os.environ[name] = ",".join(filter(None, (PINNED_MEMORY, given)))


class CudaPlatform(Platform):
    """Platform of processes with one GPU each."""

    def __init__(self) -> None:
        self.name = "cuda"
        self.device = torch.device("cuda")
        self.backend = "nccl"
        # Bytes that replays use, and the high-water mark of the time when they used another number.
        self._memory_of_replays = self._earlier_peak = 0
        self._earlier_retries = 0

    def install(self) -> None:
        """Set what libraries read when they start: records of NCCL, folders of compilers, how memory is pinned."""
        flight_recorder.turn_on()
        # NCCL registers the buffers of captured collectives as if each lay in one allocation. With expandable segments
        # it does not, and replays end in illegal memory accesses (pytorch/pytorch#158029).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        keep_compiled_kernels()
        choose_pinned_memory()

    def set_device(self, local_rank: int) -> None:
        """Make GPU `local_rank` current. Raises ValueError if the host has fewer GPUs."""
        count = torch.cuda.device_count()
        if not 0 <= local_rank < count:
            raise ValueError(
                f"LOCAL_RANK {local_rank} needs a GPU of its own, but this host has {count}: "
                "start at most that many processes per host (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(local_rank)
        self.device = torch.device("cuda", local_rank)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def make_deterministic(self) -> None:
        """Have torch, cuBLAS, NCCL and Transformer Engine keep to one order of summation.

        The libraries read the variables when they start. A value that the user has set stays.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def leave_default_stream(self) -> None:
        torch.cuda.synchronize()
        # PyTorch's own streams are a few that take turns, so a communicator might get the same one.
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        created, non_blocking = ctypes.c_void_p(), 1
        error = runtime.cudaStreamCreateWithFlags(ctypes.byref(created), non_blocking)
        if error or not created.value:
            raise RuntimeError(f"CUDA could not create a stream: error {error}")
        torch.cuda.set_stream(torch.cuda.ExternalStream(created.value))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int:
        return max(self._earlier_peak, torch.cuda.max_memory_allocated() + self._memory_of_replays)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._earlier_peak = 0

    def drain_allocation_retries(self) -> int:
        total = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
        since, self._earlier_retries = total - self._earlier_retries, total
        return since

    def set_memory_of_replays(self, size: int) -> None:
        peak = self.peak_memory_bytes()
        self.reset_peak_memory()
        self._earlier_peak, self._memory_of_replays = peak, size

    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes of the current GPU; what torch's allocator keeps for later is not free."""
        return torch.cuda.mem_get_info()

    def has_transformer_engine(self) -> bool:
        return importlib.util.find_spec("transformer_engine") is not None

    def has_mamba_kernels(self) -> bool:
        return all(importlib.util.find_spec(name) is not None for name in ("mamba_ssm", "causal_conv1d"))
