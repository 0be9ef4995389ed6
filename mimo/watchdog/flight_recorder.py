"""torch's flight recorder: records the last collectives of a rank, so that `torchfrtrace` can find one that hangs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mimo.compat import flight_record, process_group_names
from mimo.watchdog.status import GroupStatus

# Number of collectives that a rank remembers; about 2 MB.
NUM_ENTRIES = 2000
# Present and former name of torch's variable.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def turn_on() -> None:
    """Make torch record, unless the environment sets it already. Call this before any process group exists."""
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = str(NUM_ENTRIES)


def is_on() -> bool:
    """Whether torch records."""
    return any(int(os.environ.get(name, "0")) for name in SIZE_VARIABLES)


def group_statuses(backend: str) -> tuple[GroupStatus, ...]:
    """Return the last and the first unfinished collective of each process group; empty if torch does not record."""
    if not is_on():
        return ()
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for group, name in process_group_names().items()}
    return find_groups(pickle.loads(flight_record(backend)), ranks)


def find_groups(record: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> tuple[GroupStatus, ...]:
    """Read the statuses of groups of several ranks from torch's record.

    Args:
        record: torch's dump, unpickled.
        ranks: ranks of each group, by torch's name of it.
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


def dump(folder: Path, rank: int, backend: str) -> None:
    """Write the record to the file `rank_<rank>` of a folder, if torch records.

    `torchfrtrace <folder>` reads the folder with the dumps of all ranks.

    Raises:
        OSError: the file cannot be written.
    """
    if not is_on():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(flight_record(backend))
