"""Memory of the ranks of each module."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mimo.grid.groups import Grids
from mimo.platform.base import Platform


def peak_memory_bytes(grids: Grids, platform: Platform) -> dict[str, int]:
    """By module, the highest memory that any of its ranks has had, the same on every rank. Collective over the world.

    Args:
        grids: process groups.
        platform: whose high-water mark is read.
    """
    names, own = list(grids.layout.grids), platform.peak_memory_bytes()
    peaks = torch.tensor([own if name in grids.modules else 0 for name in names], dtype=torch.int64)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=grids.host)
    return dict(zip(names, peaks.tolist(), strict=True))
