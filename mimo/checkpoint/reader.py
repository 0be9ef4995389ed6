"""Reads checkpoints safely: never runs code from a file, and compares every item with its checksum."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import warnings
import zipfile
import zlib
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from mimo.boxes import Box, is_partition
from mimo.checkpoint import compat

CHECKSUMS = "checksums.json"
COMMON = "common.pt"
INDEX = ".metadata"
# Errors of pickle and torch.load about malformed bytes.
_MALFORMED = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, MemoryError, OSError,
              OverflowError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile)
_PLAIN = {("builtins", name) for name in ("set", "frozenset", "slice", "complex")} | {("collections", "OrderedDict")}
_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")


class _DataOnly(pickle.Unpickler):
    """Unpickles the index of a checkpoint: plain data and the classes that describe tensors, no functions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class. Raises UnpicklingError for anything that could run code."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" or module.startswith(("torch.serialization", "pathlib", *_MODULES)):
            found = super().find_class(module, name)
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
            if found in (torch.Size, torch.device):
                return found
            if name == "_get_layout" or module.startswith("pathlib") and name.endswith("Path"):
                return found
            is_data = isinstance(found, type) and (hasattr(found, "__dataclass_fields__") or issubclass(found, Enum))
            if is_data and module.startswith(_MODULES):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not data")


def read_checksums(folder: Path) -> dict[str, dict[str, int]] | None:
    """Read the CRC-32 of each stored item, by file name and offset; None if the checkpoint has none.

    Raises:
        ValueError: the file of checksums is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return None
    try:
        found: dict[str, dict[str, int]] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return found


def require_checksums(folder: Path) -> None:
    """Raise ValueError if a checkpoint has no checksums. This trainer always writes them."""
    if not (folder / CHECKSUMS).is_file():
        raise ValueError(f"{folder}: {CHECKSUMS} is missing, without which damage would not be noticed; a run with "
                         "--no-ckpt-verify loads it all the same")


def damage_of(folder: Path, max_bytes: int) -> str | None:
    """Describe the damage of a checkpoint; None if it has none.

    In a checkpoint of more than `max_bytes`, only the lengths of the files are checked.
    """
    try:
        read_common(folder)
        places = list(read_index(folder).storage_data.values())
        checksums = read_checksums(folder) or {}
        compares = sum(place.length for place in places) <= max_bytes
        for place in places:
            with (folder / place.relative_path).open("rb") as file:
                expected = checksums.get(place.relative_path, {}).get(str(place.offset))
                if os.fstat(file.fileno()).st_size < place.offset + place.length or expected is None or (
                        compares and crc32_of(file, place.offset, place.length) != expected):
                    return f"{place.relative_path} is damaged"
    except (ValueError, OSError) as error:
        return str(error)
    return None


def crc32_of(file: Any, offset: int, length: int) -> int:
    """Compute the CRC-32 of a part of an open file."""
    file.seek(offset)
    checksum = 0
    while length > 0:
        block = file.read(min(length, 1 << 22))
        if not block:
            break
        checksum = zlib.crc32(block, checksum)
        length -= len(block)
    return checksum


def _read_file(path: Path) -> io.BytesIO:
    """Read a whole file. Raises ValueError if it has a checksum that differs."""
    data = path.read_bytes()
    checksums = read_checksums(path.parent)
    if checksums is not None and zlib.crc32(data) != checksums.get(path.name, {}).get("0"):
        raise ValueError(f"{path} is damaged: its bytes are not those that were saved (checksum)")
    return io.BytesIO(data)


def read_index(folder: Path) -> Metadata:
    """Read the index of a checkpoint, `.metadata`: global tensors, their pieces and places.

    Raises:
        ValueError: it is missing, damaged, or holds more than data.
    """
    path = folder / INDEX
    try:
        file = _read_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a checkpoint: it has no {INDEX}") from error
    try:
        metadata = _DataOnly(file).load()
    except _MALFORMED as error:
        raise ValueError(f"{path} is damaged or not the index of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path} is not the index of a checkpoint")
    return metadata


def read_common(folder: Path) -> dict[str, Any]:
    """Read `common.pt`, a checkpoint's state besides tensors and per-rank state.

    Raises:
        ValueError: it is missing, damaged, or holds more than data.
    """
    path = folder / COMMON
    try:
        file = _read_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {COMMON}: not a checkpoint of this trainer, or an incomplete one") from error
    try:
        common = torch.load(file, map_location="cpu", weights_only=True)
    except _MALFORMED as error:
        raise ValueError(f"{path} is damaged: {why_unreadable(error)}") from error
    if not isinstance(common, dict):
        raise ValueError(f"{path} does not hold a dictionary")
    return common


def why_unreadable(error: Exception) -> str:
    """Describe why torch did not read something. Its own message about code in a file suggests to allow that code."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if refused is not None:
        return f"it refers to {refused[1]}, which is not data"
    if isinstance(error, pickle.UnpicklingError) or not str(error):
        return "it is not what torch.save writes"
    return str(error).splitlines()[0]


def is_covered(stored: TensorStorageMetadata) -> bool:
    """Whether the stored pieces of a tensor cover it exactly once."""
    if any(len(chunk.offsets) != len(chunk.sizes) for chunk in stored.chunks):
        return False
    return is_partition(Box.whole(stored.size), (Box.at(chunk.offsets, chunk.sizes) for chunk in stored.chunks))


class CheckedReader(FileSystemReader):
    """FileSystemReader of torch that unpickles data only and verifies checksums.

    With `verify` it compares every item with its checksum. Checkpoints without checksums are read as they are.
    """

    def __init__(self, folder: Path, verify: bool = True) -> None:
        super().__init__(folder)
        self._folder = folder
        self._checksums = read_checksums(folder) if verify else None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index. Raises ValueError as `read_index`."""
        metadata = read_index(self._folder)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan.

        Raises:
            ValueError: names all damaged items: a file is missing or too short, or bytes differ from what was saved.
        """
        problems: list[str] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.storage_index in self.storage_data:
                by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
            else:
                problems.append(f"{item.storage_index.fqn}: the index does not say where a piece of it is")
        for name, items in sorted(by_file.items()):
            self._read_file(name, items, planner, problems)
        if problems:
            raise ValueError(f"{self._folder} is damaged:\n" + "\n".join(f"  {problem}" for problem in problems))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner, problems: list[str]) -> None:
        try:
            file = (self._folder / name).open("rb")
        except OSError as error:
            names = sorted({item.storage_index.fqn for item in items})
            problems.append(f"{name} cannot be read ({error.strerror}); it holds {', '.join(names)}")
            return
        with file:
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            place, value = None, None
            for item in items:
                stored = self.storage_data[item.storage_index]
                if place != stored.offset:  # several items may be parts of one stored tensor, which is read once
                    place, value = stored.offset, self._read_item(file, name, item, stored, problems)
                if value is None:
                    continue
                # Pass the item to the planner as torch's reader does.
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(value))
                    continue
                part = value[Box.at(item.storage_offsets, item.lengths).slices]
                target = planner.resolve_tensor(item).detach()
                assert target.shape == part.shape, (item, target.shape, part.shape)
                target.copy_(part)
                planner.commit_tensor(item, target)

    def _read_item(self, file: Any, name: str, item: ReadItem, stored: Any, problems: list[str]) -> Any:
        """Read a stored tensor, or the bytes of an object. If it is damaged, note that and return None."""
        file.seek(stored.offset)
        data = file.read(stored.length)
        what = f"{item.storage_index.fqn} in {name}"
        if len(data) != stored.length:
            problems.append(f"{what}: the file ends {stored.length - len(data)} bytes early")
            return None
        if self._checksums is not None:
            expected = self._checksums.get(name, {}).get(str(stored.offset))
            if expected != zlib.crc32(data):
                problems.append(f"{what}: the bytes are not those that were saved (checksum)")
                return None
        if item.type == LoadItemType.BYTE_IO:
            return data
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except _MALFORMED as error:
            problems.append(f"{what}: {why_unreadable(error)}")
            return None


class DataOnlyPlanner(torch_strategy.MCoreLoadPlanner):
    """Megatron Core's planner, which never runs code from an object of a checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object. Raises ValueError if it is more than data."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except _MALFORMED as error:
            raise ValueError(f"{name} of the checkpoint is damaged: {why_unreadable(error)}") from error


class DataOnlyLoadStrategy(torch_strategy.TorchDistLoadShardedStrategy):
    """Megatron Core's load strategy over `CheckedReader` and `DataOnlyPlanner`."""

    def __init__(self, verify: bool = True) -> None:
        super().__init__()
        self._verify = verify

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Load in place. Raises ValueError for a damaged checkpoint, naming what is damaged."""
        tensors = [entry for entry in torch_strategy.nested_values(sharded_state_dict)
                   if isinstance(entry, ShardedTensor)]
        by_key, flat_mapping, names = compat.by_stored_key(sharded_state_dict)
        state = torch_strategy.mcore_to_pyt_state_dict(by_key, True)
        planner = DataOnlyPlanner(
            shapes_validation_sharded_tensors=[entry for entry in tensors if not entry.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={entry.key: entry for entry in tensors if entry.allow_shape_mismatch},
            flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = CheckedReader(Path(checkpoint_dir), self._verify)
        with warnings.catch_warnings():
            # Megatron Core passes a deprecated class to torch, and arguments in another order.
            warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
            try:
                # Each rank reads what it needs by itself.
                checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                # torch's exception is no `Exception`, so that the handlers which inform the other ranks would not
                # catch it. Its cause is raised in its place.
                (cause, _), = error.failures.values()
                raise cause from None
        return compat.by_own_key(state, flat_mapping, names, sharded_state_dict)


class CheckpointTensors:
    """The tensors of one checkpoint, read slice by slice, in one process and without a process group.

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
