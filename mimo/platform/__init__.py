"""The machine that a process runs on: CUDA, or a CPU on which Megatron's CUDA calls are emulated.

Megatron Core is imported after the platform is installed, without packages that it would not use, and without notices.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

import torch

from mimo.platform.base import Platform
from mimo.platform.cpu import CpuPlatform
from mimo.platform.cuda import CudaPlatform

__all__ = ["Platform", "current_platform", "get_platform", "import_megatron", "quieten_megatron",
           "quieten_transformer_engine"]

# Megatron Core imports these packages wherever they are installed, which takes two seconds at every start. The first
# one is for object storage: Megatron-Energon depends on it, but Megatron Core uses it only if a program asks for it.
# Megatron Core's own timers use the others.
UNUSED = ("multistorageclient", "wandb", "torch.utils.tensorboard")

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


def import_megatron() -> None:
    """Import Megatron Core once the platform is installed. Does nothing if it is imported already."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    # With None in sys.modules, importing the module raises ModuleNotFoundError, which Megatron Core expects.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        importlib.import_module("megatron.core.msc_utils")
        importlib.import_module("megatron.core.timers")
    finally:
        for name in hidden:
            del sys.modules[name]


def quieten_megatron() -> None:
    """Silence import-time notices of Megatron Core, and torch's about it, that users cannot act on.

    `python -W default` and PYTHONWARNINGS=default bring them back.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Megatron Core imports kernels that are never built here, and torch then warns if there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if sys.warnoptions:
        return
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.")
    # Compiling a source file names its path instead of its module.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*megatron")
    # This warning names the module of our subclass, not Megatron Core's.
    warnings.filterwarnings("ignore", category=UserWarning, message=r"\w+ is experimental and still under active")
    # Megatron Core calls functions that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    # Transformer Engine warns about Jax, which is not used here.
    warnings.filterwarnings("ignore", category=RuntimeWarning, message="Detected a Jax installation")


def quieten_transformer_engine() -> None:
    """Silence a warning that Transformer Engine gives because of how Megatron Core calls it.

    Transformer Engine is imported first, because its import makes its deprecations visible again.
    """
    importlib.import_module("transformer_engine.pytorch")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=DeprecationWarning, message="Relying on pointer-based detection")
