"""torch's flight recorder: the last collectives of a rank, for `torchfrtrace`, which finds the one that hangs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.watchdog.status import GroupStatus

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


def is_on() -> bool:
    """Whether torch records."""
    return any(int(os.environ.get(name, "0")) for name in SIZE_VARIABLES)


def group_statuses(backend: str) -> tuple[GroupStatus, ...]:
    """Which collective of each process group this rank has come to, and which has not ended; none if not recorded.

    Args:
        backend: `nccl` or `gloo`.
    """
    if not is_on():
        return ()
    names = dist.distributed_c10d._world.pg_names
    return find_groups(pickle.loads(_record(backend)),
                       {name: tuple(dist.get_process_group_ranks(group)) for group, name in names.items()})


def find_groups(record: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> tuple[GroupStatus, ...]:
    """The groups of several ranks in a record of torch's.

    Args:
        record: what it dumps, unpickled.
        ranks: of each group, by torch's name of it.
    """
    joined: dict[str, int] = {}
    pending: dict[str, tuple[int, str]] = {}
    for entry in record.get("entries", ()):
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or len(ranks.get(name, ())) < 2:
            continue
        joined[name] = max(joined.get(name, 0), number)
        is_over = entry["retired"] or entry["state"] == "completed"
        if not is_over and (name not in pending or number < pending[name][0]):
            pending[name] = number, entry["profiling_name"]
    return tuple(GroupStatus(name, ranks[name], number, *pending.get(name, (0, ""))) for name, number in joined.items())


def _record(backend: str) -> bytes:
    # Without Python stacks, whose symbols may take many seconds; the watchdog's report has those that matter.
    record = _C10D._dump_nccl_trace if backend == "nccl" else _C10D._dump_fr_trace
    found: bytes = record(includeStackTraces=False)
    return found


def dump(folder: Path, rank: int, backend: str) -> None:
    """Write what was recorded to `rank_<rank>` of a folder; nothing where torch does not record.

    Args:
        folder: of the dumps of all ranks: `torchfrtrace <folder>`.
        rank: this one.
        backend: `nccl` or `gloo`.

    Raises:
        OSError: the file cannot be written.
    """
    if not is_on():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(_record(backend))
