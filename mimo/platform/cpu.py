"""CPU with gloo. The real Megatron code runs, with its CUDA calls mapped to CPU ones.

The mapping replaces functions in the `torch` namespaces once per process. A `TorchFunctionMode` would see the same
calls, but it costs Python time on every torch operation and acts in one thread only. Replaced functions cost nothing
on operations that take no device, and also apply in data-loading and checkpoint-writing threads.
"""

from __future__ import annotations

import logging
import os
import sys

import psutil
import torch

from mimo.platform.base import Platform
from mimo.platform.emulation import install_mapped_calls, peak_resident_bytes, reset_peak_resident

logger = logging.getLogger(__name__)


class CpuPlatform(Platform):
    """Platform of ranks that share the CPU cores of a host."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.backend = "gloo"

    def install(self) -> None:
        """Map CUDA calls to CPU. Raises RuntimeError if Megatron was imported before."""
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "CPU emulation must be installed before megatron.core is imported: call "
                "mimo.platform.get_platform first"
            )
        # Megatron's local GELU and SwiGLU fusions go through torch.compile, which would start a C++ compiler per run.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Some virtual machines report AMX and then fault on it in the first bf16 matrix product.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        count = install_mapped_calls()
        logger.info("CPU emulation is on: %d CUDA calls are mapped to CPU, NCCL groups to gloo", count)

    def set_device(self, local_rank: int) -> None:
        """Do nothing, because the processes share the cores."""

    def synchronize(self) -> None:
        """Do nothing, because CPU operations finish before they return."""

    def peak_memory_bytes(self) -> int:
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        reset_peak_resident()

    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes of the host's memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def has_transformer_engine(self) -> bool:
        return False  # its kernels are CUDA only

    def has_mamba_kernels(self) -> bool:
        return False
