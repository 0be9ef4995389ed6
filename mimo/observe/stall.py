"""The watchdog of a rank of a run, and the summary that all ranks make together when one of them stalls."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mimo.grid.spec import Layout
from mimo.observe.errors import write_error_file, write_report
from mimo.observe.stall_processes import own_process, show_stacks_on_signal
from mimo.observe.stall_status import RankProcess, RankStatus
from mimo.observe.stall_store import Processes, StallStore, Statuses
from mimo.observe.stall_summary import RankPlace, write_summary
from mimo.observe.watchdog import Conclusion, Watchdog

if TYPE_CHECKING:
    from mimo.grid.groups import Grids

SUMMARY_FILE = "stall-summary.txt"


def open_watchdog(timeout_s: float, grids: Grids, run_dir: str | Path, files_timeout_s: float = 0.0) -> Watchdog:
    """The watchdog of this rank, with the process groups in place. Collective over the world.

    Args:
        timeout_s: seconds without progress that are a stall.
        grids: process groups.
        run_dir: gets `stall-rankN.txt` of every rank and `stall-summary.txt`.
        files_timeout_s: seconds without progress that are one in a save or a load; 0: none are.
    """
    folder, places = Path(run_dir), rank_places(grids.layout)

    def write(statuses: Statuses, processes: Processes) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        summary = write_summary(statuses, processes, places, stamp)
        write_error_file(summary)
        write_report(summary, folder / SUMMARY_FILE)

    process = own_process(grids.rank)
    show_stacks_on_signal()
    conclusion: Conclusion = Alone(process, write)
    if len(places) > 1:
        # Runs share the store: a launcher's restarts, which the launchers of several nodes count apart, and runs one
        # after the other in the same processes. What an earlier one said must not count here.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0, group=grids.host)
        # torch has no public name for the store of `init_process_group`.
        default: Any = dist.distributed_c10d._get_default_store()
        conclusion = StallStore(default.clone(), process, len(places), write, holder=_holder(places),
                                run=name[0])
    return Watchdog(timeout_s, grids.describe(), files_timeout_s=files_timeout_s,
                    report_path=folder / f"stall-rank{grids.rank}.txt", rank=grids.rank, conclusion=conclusion)


def _holder(places: dict[int, RankPlace]) -> str:
    """Who holds the store of the process groups: a launcher that says so, or rank 0."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return "the launcher of the first node, which is stopped or gone, or cannot be reached"
    return f"the process of {places[0].who}, which is stopped or gone, or cannot be reached"


def rank_places(layout: Layout) -> dict[int, RankPlace]:
    """Every rank of the layout in words, with its modules and their pipeline stages as its role."""
    places = {}
    for rank in range(layout.world_size):
        modules = layout.modules_of(rank)
        role = tuple((name, layout.grids[name].coordinates(rank)["pp"]) for name in modules)
        places[rank] = RankPlace(layout.describe(rank), modules, role)
    return places


class Alone:
    """The conclusion of a run of one rank."""

    holder = "nobody"

    def __init__(self, process: RankProcess, write: Callable[[Statuses, Processes], None]) -> None:
        self._process, self._write = process, write

    def start(self, on_stall: Callable[[], None]) -> None:
        """There is no other rank."""

    def conclude(self, status: RankStatus) -> tuple[RankProcess, ...]:
        """Write the summary of the one rank."""
        self._write({status.rank: status}, {status.rank: self._process})
        return ()

    def close(self, *, failed: bool = False) -> None:
        """There is nothing to stop."""
