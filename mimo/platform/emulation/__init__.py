"""The CUDA calls that Megatron makes, and what stands in for each on CPU."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch.utils._device import _device_constructors

from mimo.platform.emulation import collectives, compilation, runtime, tensors

# Dotted name -> function that takes the original attribute (None where this torch build has none) and returns what
# replaces it.
MAPPED_CALLS: dict[str, Callable[[Any], Any]] = {
    **runtime.CALLS,
    **tensors.CALLS,
    **collectives.CALLS,
    **compilation.CALLS,
}


def resolve(name: str) -> tuple[Any, str]:
    """Owner object and attribute name of a dotted name such as `torch.cuda.nvtx.range_push`."""
    first, *rest, attribute = name.split(".")
    owner: Any = importlib.import_module(first)
    for part in rest:
        owner = getattr(owner, part)
    return owner, attribute


class _CpuRngNotice(logging.Filter):
    """Drops Megatron's notice that the CPU generator moved inside a CUDA RNG context: here they are one generator."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install_mapped_calls() -> int:
    """Replace every mapped call in this process; returns how many there are. To be called once."""
    # `with torch.device(...)` finds tensor constructors by identity, in a set built at first use: build it before
    # they are replaced, since the replacements call the originals.
    _device_constructors()
    replacements = []
    for name, build in MAPPED_CALLS.items():
        owner, attribute = resolve(name)
        original = getattr(owner, attribute) if hasattr(owner, attribute) else None
        replacements.append((owner, attribute, build(original)))
    for owner, attribute, replacement in replacements:
        setattr(owner, attribute, replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_CpuRngNotice())
    return len(replacements)
