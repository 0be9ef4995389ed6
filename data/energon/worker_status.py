"""Status lines of Energon workers in shared memory, by which the trainer names a worker that stalls or dies."""

from __future__ import annotations

import inspect
import mmap
import os
import struct
import tarfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.energon.errors import SampleException
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.packing_dataset import PackingDataset

from data.conversation_files.sources import RecordReader
from data.energon import compat

HEADER = struct.Struct("<qdH")  # process id, time of the note, length of the text in bytes
SLOT_BYTES = 512
# Errors of a damaged shard in Energon's reader: a short tar, a wrong index.
DAMAGE = (tarfile.TarError, ValueError, EOFError, IndexError, struct.error)
# If a file is missing, or a disk or the network fails, the sample is not at fault.
READ_ERRORS = (OSError, *DAMAGE)


class DamagedSampleError(ValueError):
    """The shard no longer holds this sample as it was prepared."""


class WorkerStatusTable:
    """One line of text for each worker, in memory that forks share.

    A line may be read while it is being written, which does not matter to the people who read it.

    Args:
        workers: global worker ids.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._offsets = {worker: number * SLOT_BYTES for number, worker in enumerate(workers)}
        self._memory = mmap.mmap(-1, SLOT_BYTES * len(self._offsets))

    def write(self, worker: int, text: str) -> None:
        """Report what `worker`, which is this process, does from now on."""
        data = text.encode()[: SLOT_BYTES - HEADER.size]
        start = self._offsets[worker]
        HEADER.pack_into(self._memory, start, os.getpid(), time.monotonic(), len(data))
        self._memory[start + HEADER.size : start + HEADER.size + len(data)] = data

    def read(self, worker: int) -> tuple[int, float, str]:
        """Return process id, seconds since the last report, and its text; before the first one, the process id is 0."""
        start = self._offsets[worker]
        pid, written_s, size = HEADER.unpack_from(self._memory, start)
        if not pid:
            return 0, 0.0, "not started"
        data = self._memory[start + HEADER.size : start + HEADER.size + size]
        return pid, time.monotonic() - written_s, data.decode(errors="replace")


class WorkerStatus:
    """The line of the worker that runs in this process.

    Attributes:
        worker: global worker id, set when its iteration starts; -1 before.
        place: shard and sample that it read last.
    """

    def __init__(self, statuses: WorkerStatusTable) -> None:
        self._statuses = statuses
        self.worker = -1
        self.place = "nothing was read"

    def write(self, text: str) -> None:
        """Write to this worker's line. Does nothing outside of a worker, for example while a data set is built."""
        if self.worker >= 0:
            self._statuses.write(self.worker, text)


class WatchedReader:
    """Shard reader that reports what it reads, and whose errors name the shard.

    Args:
        reader: Energon's reader of one data set's shards.
        status: line on which it reports.
    """

    def __init__(self, reader: Any, status: WorkerStatus) -> None:
        self._reader = reader
        self._status = status

    def __len__(self) -> int:
        return len(self._reader)

    def close(self) -> None:
        self._reader.close()

    def __str__(self) -> str:
        return str(self._reader)

    def source_of(self, index: int) -> tuple[int, SourceInfo]:
        """Return a sample's index in its shard, and the shard, or the whole reader if it has no list of shards."""
        if isinstance(self._reader, IJsonlReader):
            path = self._reader.jsonl_path
            return index, SourceInfo(dataset_path=path, index=index, shard_name=path.name, file_names=())
        if isinstance(self._reader, RecordReader):
            return self._reader.place(index)[1], self._reader.source_info(index)
        if not hasattr(self._reader, "shard_infos"):
            return index, SourceInfo(dataset_path=self._reader.base_path, index=index, shard_name=str(self._reader),
                                     file_names=())
        starts: Sequence[int] = self._reader.shard_count_cumsum
        shard = bisect_right(starts, index) - 1
        source = SourceInfo(dataset_path=self._reader.base_path, index=index,
                            shard_name=self._reader.shard_infos[shard].name, file_names=())
        return index - starts[shard], source

    def __getitem__(self, index: int) -> Any:
        """Return the raw sample, or None if the split excludes it.

        Raises:
            DamagedSampleError: the shard is too short, or not the one that was prepared.
            ValueError: the shard is missing or cannot be read.
        """
        number, source = self.source_of(index)
        place = f"sample {number} of shard {source.dataset_path}"
        if source.shard_name != source.dataset_path.name:
            place += f"/{source.shard_name}"
        self._status.place = place
        self._status.write(f"reading {place}")
        try:
            sample = self._reader[index]
        except READ_ERRORS as error:
            kind = DamagedSampleError if isinstance(error, DAMAGE) else ValueError
            raise kind(
                f"--data-path: cannot read {place}: {type(error).__name__}: {error}; restore the file, or leave it out "
                "of the split and prepare the data set again"
            ) from error
        if sample is not None:
            self._status.write(f"encoding {sample['__key__']}, {place}")
        elif isinstance(self._reader, IJsonlReader):
            raise DamagedSampleError(f"--data-path: {place} is no longer there; prepare the file again")
        return sample


def skip_damaged_samples(leaf: WebdatasetSampleLoaderDataset) -> None:
    """Let a data set report the samples of a damaged shard as bad ones and continue, where Energon would end.

    A sample in the buffer of a checkpoint cannot be skipped, so restoring it still raises an error.
    """
    readers = leaf.join_readers

    def load_or_report(load: Callable[[int], RawSampleData], index: int) -> RawSampleData:
        try:
            return load(index)
        except DamagedSampleError as error:
            number, source = readers[0].source_of(index)
            sample = {"__key__": f"sample {number}", "__sources__": (source,)}
            leaf.worker_config.global_error_handler(error, sample, [source])
            return RawSampleData(__restore_key__=("Webdataset", index), data=(None,) * len(readers))

    compat.replace_sample_loader(leaf, load_or_report)


def _key_of(sample: Any) -> str:
    if isinstance(sample, dict):
        return str(sample.get("__key__"))
    return str(sample.__key__) if hasattr(sample, "__key__") else type(sample).__name__


def _reporting(function: Callable[[Any], Any], status: WorkerStatus) -> Callable[[Any], Any]:
    def report_and_call(sample: Any) -> Any:
        status.write(f"encoding {_key_of(sample)}")
        return function(sample)

    return report_and_call


def watch(dataset: SavableDataset, status: WorkerStatus) -> None:
    """Have every shard reader and every encoder of a tree of wrappers report before it works."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [WatchedReader(reader, status) for reader in dataset.join_readers]
        skip_damaged_samples(dataset)
    if isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            watch(inner, status)
    if isinstance(dataset, PackingDataset) and dataset.sample_encoder is not None:
        dataset.sample_encoder = _reporting(dataset.sample_encoder, status)
    # The innermost map gets the raw sample, which the reader has just reported.
    elif isinstance(dataset, MapDataset) and not isinstance(dataset.dataset, WebdatasetSampleLoaderDataset):
        # Energon checks whether a mapping is a generator function. A wrapper of one is not.
        if not inspect.isgeneratorfunction(dataset.map_fn):
            dataset.map_fn = _reporting(dataset.map_fn, status)


def is_bad_data(error: BaseException) -> bool:
    """Return whether the data is at fault, rather than the program."""
    return isinstance(error, (SampleException, *READ_ERRORS))
