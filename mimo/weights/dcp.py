"""Reads a Megatron distributed checkpoint slice by slice, in one process and without a process group."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mimo.boxes import Box
from mimo.checkpoint.reader import CheckedReader


class CheckpointTensors:
    """The tensors of one checkpoint.

    Args:
        folder: the checkpoint's own folder (`iter_0000010`, `release`).

    Attributes:
        tensors: dtype and global shape (stacked axes included) of every tensor by key.

    Raises:
        ValueError: not a checkpoint, or files are missing or too short; names them all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = CheckedReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._entries = {key: entry for key, entry in metadata.state_dict_metadata.items()
                         if isinstance(entry, TensorStorageMetadata)}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            key: (entry.properties.dtype, tuple(entry.size)) for key, entry in self._entries.items()}
        self._check_files()

    def read(self, key: str, index: tuple[int, ...] = ()) -> torch.Tensor:
        """Read the tensor at `index` on the leading axes of `key`, and nothing else of it, to the CPU.

        Raises:
            ValueError: the checkpoint does not hold all of it, or a file is damaged.
        """
        entry = self._entries[key]
        rest = tuple(entry.size)[len(index):]
        target = torch.empty((1,) * len(index) + rest, dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size((*index, *(0 for _ in rest))), torch.Size(target.shape))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise ValueError(f"checkpoint {self.folder} does not hold all of {key} at {list(index)}")
        self._reader.read_data(LoadPlan(items), _SlicePlanner(target))
        return target.reshape(rest)

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for place in self._reader.storage_data.values():
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        problems = []
        for name, size in sorted(needed.items()):
            path = self.folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size < size:
                problems.append(f"{name} is truncated: {path.stat().st_size} of {size} bytes")
        if problems:
            raise ValueError(f"checkpoint {self.folder}: {'; '.join(problems)}")


class _SlicePlanner(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._target[Box.at(read_item.dest_offsets, read_item.lengths).slices]

