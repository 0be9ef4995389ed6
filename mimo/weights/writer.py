"""Safetensors files written tensor by tensor: the format of https://github.com/huggingface/safetensors#format.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes without gaps. Everything
about a tensor but its values is known in advance, so the header comes first and one tensor at a time is held.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mimo.weights.source import DTYPES, INDEX, SINGLE, weight_files

MAX_SHARD_BYTES = 5_000_000_000
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int, str], None]
"""Told after each tensor: how many are done, how many there are, the name of this one."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file and what it holds."""

    file: str
    tensors: tuple[TensorInfo, ...]


def plan_shards(parts: Sequence[Sequence[TensorInfo]], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[list[Shard]]:
    """Files for the tensors of several writers, numbered through.

    Args:
        parts: each writer's tensors, in the order in which they are to lie in its files.
        max_shard_bytes: data of a file, at most; a larger tensor gets a file of its own.

    Returns:
        Each writer's files; `model.safetensors` where one holds everything.

    Raises:
        ValueError: a name occurs twice, a dtype the format does not know, no positive limit.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"a shard of at most {max_shard_bytes} bytes holds nothing")
    counts = Counter(info.name for part in parts for info in part)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"more than one tensor would be called {', '.join(twice)}")
    unknown = [f"{info.name} ({info.dtype})" for part in parts for info in part if info.dtype not in DTYPE_NAMES]
    if unknown:
        raise ValueError(f"safetensors has no dtype for {', '.join(unknown)}")
    cut = [_cut(part, max_shard_bytes) for part in parts]
    total = sum(len(files) for files in cut)
    shards, number = [], 0
    for files in cut:
        mine = []
        for tensors in files:
            number += 1
            file = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            mine.append(Shard(file, tuple(tensors)))
        shards.append(mine)
    return shards


def _cut(tensors: Iterable[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    files: list[list[TensorInfo]] = []
    size = 0
    for info in tensors:
        if not files or (files[-1] and size + info.num_bytes > max_bytes):
            files.append([])
            size = 0
        files[-1].append(info)
        size += info.num_bytes
    return files


class ShardWriter:
    """Writes a list of files into a folder, under temporary names until `publish`.

    A context manager: where the block raises, the temporary files are removed.

    Args:
        folder: made where it is not there.
        shards: the files, from `plan_shards`.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self.folder, self.shards = folder, shards
        self._places: dict[str, tuple[Path, int, TensorInfo]] = {}
        self._left: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for shard in shards:
                self._begin(shard)
        except OSError:
            self.discard()
            raise

    def write(self, name: str, tensor: torch.Tensor, first_row: int = 0) -> bool:
        """Write a tensor, or some rows of it; dtype and shape are those that were announced.

        Args:
            name: the tensor's.
            tensor: its values, or as many of its rows as there are.
            first_row: number of the first one.

        Returns:
            Whether all of the tensor has been written.

        Raises:
            OSError: the disk is full or the file cannot be written.
        """
        path, offset, info = self._places[name]
        if tuple(tensor.shape) != info.shape:
            assert tensor.shape[1:] == info.shape[1:] and first_row + tensor.shape[0] <= info.shape[0], (
                info, tensor.shape, first_row)
            offset += first_row * math.prod(info.shape[1:]) * info.dtype.itemsize
        assert tensor.dtype == info.dtype and tensor.numel() <= self._left[name], (info, tensor.dtype, tensor.shape)
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(memoryview(data))
        self._left[name] -= tensor.numel()
        if not self._left[name]:
            del self._left[name]
        return name not in self._left

    def finish(self) -> None:
        """Make the data safe on the disk. Every tensor must have been written."""
        assert not self._left, f"not written: {sorted(self._left)}"
        for shard in self.shards:
            path = self._temporary(shard.file)
            with path.open("r+b") as file:
                os.fsync(file.fileno())

    def publish(self) -> None:
        """Give the files their names."""
        for shard in self.shards:
            self._temporary(shard.file).replace(self.folder / shard.file)

    def discard(self) -> None:
        """Remove the temporary files that are left."""
        for shard in self.shards:
            self._temporary(shard.file).unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def _temporary(self, file: str) -> Path:
        return self.folder / f".{file}.writing"

    def _begin(self, shard: Shard) -> None:
        """The header, and the file at its full size."""
        # Readers map the file and need every tensor at a multiple of its element's size: the widest come first.
        order = sorted(shard.tensors, key=lambda info: -info.dtype.itemsize)
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        offsets = {}
        for info in order:
            entries[info.name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape),
                                  "data_offsets": [offset, offset + info.num_bytes]}
            offsets[info.name] = offset
            offset += info.num_bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        path = self._temporary(shard.file)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + offset)
        for info in order:
            self._places[info.name] = (path, 8 + len(header) + offsets[info.name], info)
            self._left[info.name] = math.prod(info.shape)


def check_empty(folder: Path) -> None:
    """Raise ValueError where a folder has weights already: what is left of others would be loaded with new ones."""
    found = [path.name for path in weight_files(folder)] if folder.is_dir() else []
    if found or (folder / INDEX).is_file():
        raise ValueError(f"{folder} already holds weights ({', '.join(found[:3]) or INDEX}); give a folder without")


def write_index(folder: Path, shards: Iterable[Shard]) -> None:
    """`model.safetensors.index.json` of all files; none where there is one file only."""
    shards = list(shards)
    if [shard.file for shard in shards] == [SINGLE]:
        return
    located = {info.name: shard.file for shard in shards for info in shard.tensors}
    total = sum(info.num_bytes for shard in shards for info in shard.tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(located.items()))}, indent=2)
    temporary = folder / f".{INDEX}.writing"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(folder / INDEX)
