"""Private parts of PyTorch 2.13 and Energon 7.4 that reading relies on.

Review it when one of the two is upgraded. tests/unit/test_compat.py fails if a name is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.energon import wrappers
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.packing_dataset import PackingDataset

OVERRIDDEN = {
    # Bad samples are reported with the packs of the buffer for which they were read. Energon could offer a call
    # between two buffers; without ours, samples would be reported too early.
    "megatron.energon.wrappers.packing_dataset.PackingDataset": ("_fill_reading_buffer",),
}
"""Class -> private methods of it that a subclass in `data.energon` overrides."""

# torch's iterator over the rows of worker processes ends its workers one after the other and without a time limit, and
# its error about a dead worker only gives a process id. A public list of its processes would be enough.


def worker_processes(rows: Any) -> list[Any]:
    """Return the worker processes, in the order of their ids."""
    processes: list[Any] = rows._workers
    return processes


def next_worker(rows: Any) -> int | None:
    """Return the id of the worker whose row comes next, or None before that is settled."""
    task = rows._task_info.get(rows._rcvd_idx)
    return task[0] if task else None


def ask_to_end(rows: Any) -> None:
    """Have all workers end after the row that they are making."""
    rows._workers_done_event.set()
    for queue in rows._index_queues:
        queue.put(None)


def release(rows: Any) -> None:
    """Free the iterator's resources of workers that have ended."""
    rows._shutdown_workers()


# Names of the attributes that make up the state of a packing data set of Energon. A subclass has no public way to add
# its own.
PACKING_STATE: tuple[str, ...] = PackingDataset._savable_fields


def packs_left(packing: PackingDataset[Any, Any, Any]) -> int:
    """Return how many packs of the current buffer follow the one that is delivered.

    Energon does not tell a subclass the position of a pack in its buffer.
    """
    return len(packing._pre_packing_lengths)


class RepeatDataset(wrappers.RepeatDataset):
    """Energon's repetitions of a source, which go on after a state of the last sample of a part of a pass.

    Energon keeps the position in that part. With repetitions below 1, the source would never be read again. The name is
    Energon's, because states hold it.
    """

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self._index = 0


def tolerate_any_failure(dataset: MapDataset[Any, Any]) -> None:
    """Keep a mapping from ending its worker after several failures in a row. 0 is Energon's value for no limit.

    Energon's readers build their mappings with a fixed limit of 100.
    """
    dataset._map_failure_handler.tolerance = 0


def replace_sample_loader(leaf: WebdatasetSampleLoaderDataset,
                          replacement: Callable[[Callable[[int], RawSampleData], int], RawSampleData]) -> None:
    """Have a data set read samples by `replacement`, called with its own function and an index.

    Restoring a sample keeps the data set's own function. An error in it ends the worker, because Energon passes errors
    of encoders to the error handler, but not those of its reader.
    """
    load = leaf._get_sample
    leaf._get_sample = partial(replacement, load)
    leaf.restore_sample = lambda restore_key: load(restore_key[1])
