"""The machine that a process runs on: CUDA, or a CPU on which Megatron's CUDA calls are emulated."""

from __future__ import annotations

import torch

from mimo.platform.base import Platform
from mimo.platform.cpu import CpuPlatform
from mimo.platform.cuda import CudaPlatform

__all__ = ["Platform", "current_platform", "get_platform"]

_installed: Platform | None = None


def get_platform(device: str = "auto") -> Platform:
    """Choose and install the platform; later calls return the same object.

    Call it before anything imports Megatron.

    Args:
        device: value of `--device`: `cuda`, `cpu`, or `auto` (CUDA if there is a GPU).

    Raises:
        ValueError: unknown `device`, or `cuda` on a machine without it.
        RuntimeError: Megatron is imported already, so that the CPU emulation would come too late, or another
            platform is installed in this process.
    """
    global _installed
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {device!r} is not one of auto, cuda, cpu")
    if _installed is not None:
        if device not in ("auto", _installed.name):
            raise RuntimeError(f"--device {device}: this process already runs on platform {_installed.name!r}")
        return _installed
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    platform = CudaPlatform() if device == "cuda" or (device == "auto" and available) else CpuPlatform()
    platform.install()
    _installed = platform
    return platform


def current_platform() -> Platform:
    """Return the platform that `get_platform` installed. Raises RuntimeError before that."""
    if _installed is None:
        raise RuntimeError("no platform is installed: call mimo.platform.get_platform first")
    return _installed
