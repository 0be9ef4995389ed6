"""The CUDA calls that Megatron makes, and what stands in for each on CPU."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from mimo.platform.emulation import collectives, runtime, tensors

# Dotted name -> function that takes the original attribute (None where this torch build has none) and returns what
# replaces it.
MAPPED_CALLS: dict[str, Callable[[Any], Any]] = {**runtime.CALLS, **tensors.CALLS, **collectives.CALLS}


def resolve(name: str) -> tuple[Any, str]:
    """Owner object and attribute name of a dotted name such as `torch.cuda.nvtx.range_push`."""
    parts = name.split(".")
    owner: Any = importlib.import_module(parts[0])
    for part in parts[1:-1]:
        owner = getattr(owner, part)
    return owner, parts[-1]


class _CpuRngNotice(logging.Filter):
    """Drops Megatron's notice that the CPU generator moved inside a CUDA RNG context: here they are one generator."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install_mapped_calls() -> int:
    """Replace every mapped call in this process; returns how many there are."""
    originals = {name: resolve(name) for name in MAPPED_CALLS}
    replacements = {name: MAPPED_CALLS[name](vars(owner).get(attribute) or _inherited(owner, attribute))
                    for name, (owner, attribute) in originals.items()}
    for name, (owner, attribute) in originals.items():
        setattr(owner, attribute, replacements[name])
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_CpuRngNotice())
    return len(replacements)


def _inherited(owner: Any, attribute: str) -> Any:
    """An attribute that a class has from its base; None where there is none."""
    return getattr(owner, attribute) if hasattr(owner, attribute) else None
