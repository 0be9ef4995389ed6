"""torch's flight recorder: the last collectives of a rank, for `torchfrtrace`, which finds the one that hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

# Has no stubs.
_C10D: Any = torch._C._distributed_c10d
# Collectives that a rank remembers; about 2 MB.
NUM_ENTRIES = 2000
# torch's name for it, and the one before.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def turn_on() -> None:
    """Have torch record, unless the environment says how much. Before any process group."""
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = str(NUM_ENTRIES)


def dump(folder: Path, rank: int, backend: str) -> None:
    """Write what was recorded to `rank_<rank>` of a folder; nothing where torch does not record.

    Args:
        folder: of the dumps of all ranks: `torchfrtrace <folder>`.
        rank: this one.
        backend: `nccl` or `gloo`.

    Raises:
        OSError: the file cannot be written.
    """
    if not any(int(os.environ.get(name, "0")) for name in SIZE_VARIABLES):
        return
    record = _C10D._dump_nccl_trace if backend == "nccl" else _C10D._dump_fr_trace
    folder.mkdir(parents=True, exist_ok=True)
    # Without Python stacks, whose symbols may take many seconds; the watchdog's report has those that matter.
    (folder / f"rank_{rank}").write_bytes(record(includeStackTraces=False))
