"""Private parts of PyTorch 2.13 and Energon 7.4 that reading relies on.

Look through it when one of the two is upgraded: tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.packing_dataset import PackingDataset

OVERRIDDEN = {
    # Bad samples are reported with the packs of the buffer for which they were read. Energon could offer a call
    # between two buffers; without ours, samples would be reported too early.
    "megatron.energon.wrappers.packing_dataset.PackingDataset": ("_fill_reading_buffer",),
}
"""Class -> private methods of it that a subclass in `data.energon` overrides."""

# torch's iterator over the rows of worker processes. It ends its workers one after the other and without a time limit,
# and its error about a dead worker gives a process id. A public list of its processes would be enough.


def worker_processes(rows: Any) -> list[Any]:
    """Return the worker processes, in the order of their ids. `_MultiProcessingDataLoaderIter._workers`."""
    processes: list[Any] = rows._workers
    return processes


def next_worker(rows: Any) -> int | None:
    """Return the id of the worker whose row comes next, or None before that is settled.

    `_MultiProcessingDataLoaderIter._task_info` and `_rcvd_idx`.
    """
    task = rows._task_info.get(rows._rcvd_idx)
    return task[0] if task else None


def ask_to_end(rows: Any) -> None:
    """Have all workers end after the row that they make.

    `_MultiProcessingDataLoaderIter._workers_done_event` and `_index_queues`.
    """
    rows._workers_done_event.set()
    for queue in rows._index_queues:
        queue.put(None)


def release(rows: Any) -> None:
    """Free what the iterator holds for workers that have ended. `_MultiProcessingDataLoaderIter._shutdown_workers`."""
    rows._shutdown_workers()


# Energon.

# `PackingDataset._savable_fields`: names of the attributes that make up the state of a packing data set. A subclass has
# no public way to add its own.
PACKING_STATE: tuple[str, ...] = PackingDataset._savable_fields


def packs_left(packing: PackingDataset[Any, Any, Any]) -> int:
    """Return how many packs of the present buffer follow the one that is delivered.

    `PackingDataset._pre_packing_lengths`: Energon tells a subclass nothing about the place of a pack in its buffer.
    """
    return len(packing._pre_packing_lengths)


def tolerate_any_failure(dataset: MapDataset[Any, Any]) -> None:
    """Keep a mapping from ending its worker for failures in a row. 0 is Energon's value for no limit.

    `MapDataset._map_failure_handler`: Energon's readers build their mappings with a limit of 100 and pass on no other.
    """
    dataset._map_failure_handler.tolerance = 0


def replace_sample_loader(leaf: WebdatasetSampleLoaderDataset,
                          replacement: Callable[[Callable[[int], RawSampleData], int], RawSampleData]) -> None:
    """Have a data set read samples by `replacement`, called with its own function and an index.

    Restoring a sample keeps the data set's own function.

    `WebdatasetSampleLoaderDataset._get_sample`: an error in it ends the worker; Energon could pass errors of its reader
    to the error handler, as it does for those of encoders.
    """
    load = leaf._get_sample
    leaf._get_sample = partial(replacement, load)
    leaf.restore_sample = lambda restore_key: load(restore_key[1])
