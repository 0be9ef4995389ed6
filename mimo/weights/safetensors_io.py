"""Reads and writes the tensors of a Hugging Face folder one at a time. Only safetensors, and only local files."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mimo.checkpoint.paths import replace_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
ADAPTER = "adapter_config.json"
# Other formats of weights. They are not read, which errors say, and not copied.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
MAX_OPEN_FILES = 2
# Names of dtypes in the safetensors format.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64,
}


@dataclass(frozen=True)
class SourceTensor:
    """Entry of a tensor in a file's header.

    Attributes:
        shape: sizes of the tensor.
        dtype: dtype of the tensor; None if torch does not have it.
        dtype_name: name of the dtype in the file.
        file: name of the file inside the folder.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str
    file: str


@dataclass(frozen=True)
class Catalog:
    """Contents of a folder without data, which one rank reads and sends to the others."""

    path: str
    tensors: Mapping[str, SourceTensor]
    file_bytes: Mapping[str, int]


class HfSource:
    """A folder of safetensors. Its headers are read at once, its tensors by `read`.

    Args:
        path: folder with `model.safetensors`, `model.safetensors.index.json` or any other `*.safetensors`.
        catalog: contents of the folder if they are known; otherwise every header is read.

    Raises:
        ValueError: names the file: there is no such folder, it has no safetensors, a file of the index is missing, a
            file is truncated or not in the format, or a tensor is not in the file that the index names.
    """

    def __init__(self, path: str | Path, catalog: Catalog | None = None) -> None:
        self.path = folder = Path(path)
        # Files that were read last stay open.
        self._handle = lru_cache(maxsize=MAX_OPEN_FILES)(lambda name: _open_file(folder / name))
        self.catalog = _read_catalog(self.path) if catalog is None else catalog

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self.catalog.tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Read a tensor to the CPU, in the file's dtype.

        Args:
            name: one of `tensors`.
            rows: part of the first axis; None for all of it.

        Raises:
            ValueError: the file is missing or was changed since its header was read.
        """
        entry = self.tensors[name]
        file = self._handle(entry.file)
        try:
            tensor: torch.Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except SafetensorError as error:
            raise ValueError(f"{self.path / entry.file}: {name} cannot be read: {error}") from error
        shape = entry.shape if rows is None else (len(range(*rows.indices(entry.shape[0]))), *entry.shape[1:])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.path / entry.file}: {name} was {list(entry.shape)} when its header was read and "
                             f"gives {list(tensor.shape)} now, not {list(shape)}")
        return tensor

    def missing_files(self) -> list[str]:
        """Return a line for each file of the catalog that is missing here or has another size."""
        problems = []
        for name, size in self.catalog.file_bytes.items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{file} is not there")
            elif file.stat().st_size != size:
                problems.append(f"{file} has {file.stat().st_size} bytes, not {size}")
        return problems

    def close(self) -> None:
        """Close the open files. Reading opens them again."""
        self._handle.cache_clear()


def weight_files(folder: Path) -> list[Path]:
    """Return the files of safetensors in a folder, without their index."""
    return sorted(folder.glob("*.safetensors"))


def is_weights(name: str) -> bool:
    """Whether a file name is that of weights, in any format, or of their index."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin.index.json", *OTHER_FORMATS))


def _read_catalog(folder: Path) -> Catalog:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if (folder / ADAPTER).is_file():
        raise ValueError(f"{folder} has {ADAPTER}: transformers would add an adapter to these weights, which is not "
                         "supported; merge it into the model first, or remove it")
    located = _index(folder)
    files = sorted(set(located.values())) if located is not None else _unindexed(folder)
    tensors: dict[str, SourceTensor] = {}
    for name in files:
        for tensor, entry in _header(folder, name).items():
            if tensor in tensors:
                raise ValueError(f"{folder}: {tensor} is in {tensors[tensor].file} and in {name}")
            tensors[tensor] = entry
    for tensor, name in (located or {}).items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise ValueError(f"{folder / INDEX} says that {tensor} is in {name}, which does not hold it")
    return Catalog(str(folder), tensors, {name: (folder / name).stat().st_size for name in files})


def _index(folder: Path) -> dict[str, str] | None:
    """Read the index: tensor name to file name; None if the folder has none."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        located = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an index of safetensors: {error!r}") from error
    if not isinstance(located, dict) or not all(isinstance(name, str) for name in located.values()):
        raise ValueError(f"{path} is not an index of safetensors: weight_map must name a file for each tensor")
    missing = sorted({name for name in located.values() if not (folder / name).is_file()})
    if missing:
        raise ValueError(f"{path} names files that are not there: {', '.join(missing)}")
    if (folder / SINGLE).is_file() and SINGLE not in located.values():
        # transformers would read one of them and vLLM the other.
        raise ValueError(f"{folder} has {SINGLE} and {INDEX}, which does not name it: these are two sets of weights; "
                         "remove one of them")
    return located


def _unindexed(folder: Path) -> list[str]:
    found = [path.name for path in weight_files(folder)]
    if SINGLE in found:
        shards = [name for name in found if SHARD.fullmatch(name)]
        if shards:
            raise ValueError(f"{folder} has {SINGLE} and parts of other weights ({', '.join(shards[:4])}"
                             f"{', ...' if len(shards) > 4 else ''}) without {INDEX}; remove what is not the model")
        return [SINGLE]
    if found:
        return found
    others = sorted(path.name for path in folder.iterdir() if path.name.endswith(OTHER_FORMATS))
    if others:
        raise ValueError(f"{folder} has weights as {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}; only "
                         "safetensors is loaded: save the model again with save_pretrained(..., "
                         "safe_serialization=True)")
    raise ValueError(f"{folder} has no weights: neither {SINGLE}, nor {INDEX}, nor any other *.safetensors")


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or is not safetensors: {error}") from error


def _header(folder: Path, name: str) -> dict[str, SourceTensor]:
    file = _open_file(folder / name)
    entries = {}
    for tensor in file.keys():
        part = file.get_slice(tensor)
        dtype_name = str(part.get_dtype())
        entries[tensor] = SourceTensor(tuple(part.get_shape()), DTYPES.get(dtype_name), dtype_name, name)
    return entries


# Safetensors files are written tensor by tensor (https://github.com/huggingface/safetensors#format).
#
# A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes without gaps.
# Everything about a tensor but its values is known in advance, so the header is written first, and only one tensor is
# in memory at a time. The writers of libraries keep all tensors of a file in memory, up to `MAX_SHARD_BYTES`:
# `save_file` of safetensors takes a dictionary of them, as do `save_torch_state_dict` of huggingface_hub and torch's
# `HuggingFaceStorageWriter`. None of them takes some rows of a tensor at a time.


MAX_SHARD_BYTES = 5_000_000_000
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int, str], None]
"""Called after each tensor: number of tensors done, number of all tensors, name of this one."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file and its tensors."""

    file: str
    tensors: tuple[TensorInfo, ...]


def plan_shards(tensors: Sequence[TensorInfo], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """Divide tensors among files, in order. If one file has everything, it is `model.safetensors`.

    A tensor larger than `max_shard_bytes` gets a file of its own.

    Raises:
        ValueError: a name occurs twice, the format does not know a dtype, or the limit is not positive.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"a shard of at most {max_shard_bytes} bytes holds nothing")
    twice = sorted(name for name, count in Counter(info.name for info in tensors).items() if count > 1)
    if twice:
        raise ValueError(f"more than one tensor would be called {', '.join(twice)}")
    unknown = [f"{info.name} ({info.dtype})" for info in tensors if info.dtype not in DTYPE_NAMES]
    if unknown:
        raise ValueError(f"safetensors has no dtype for {', '.join(unknown)}")
    files: list[list[TensorInfo]] = []
    size = 0
    for info in tensors:
        if not files or (files[-1] and size + info.num_bytes > max_shard_bytes):
            files.append([])
            size = 0
        files[-1].append(info)
        size += info.num_bytes
    return [Shard(SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors", tuple(each))
            for number, each in enumerate(files, start=1)]


class ShardWriter:
    """Writes a list of files into a folder, under temporary names until `publish`.

    Use it as a context manager, which removes temporary files that are left. The folder is made if it does not exist.
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
        """Write a tensor, or some rows of it, with the planned dtype and shape.

        Args:
            name: name of the tensor.
            tensor: its values, or the values of some rows.
            first_row: number of the first of these rows.

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
        """Flush all data to the disk. Every tensor must have been written."""
        assert not self._left, f"not written: {sorted(self._left)}"
        for shard in self.shards:
            path = self._temporary(shard.file)
            with path.open("r+b") as file:
                os.fsync(file.fileno())

    def publish(self) -> None:
        """Rename the files to their final names."""
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
        """Write the header of a file and extend the file to its full size."""
        # Readers map the file and need every tensor aligned to its element size, so tensors of wide dtypes come first.
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
    """Raise ValueError if a folder has weights already, because leftover files would be loaded with new ones."""
    found = [path.name for path in weight_files(folder)] if folder.is_dir() else []
    if found or (folder / INDEX).is_file():
        raise ValueError(f"{folder} already holds weights ({', '.join(found[:3]) or INDEX}); give a folder without")


def write_index(folder: Path, shards: Iterable[Shard]) -> None:
    """Write `model.safetensors.index.json` for all files, unless there is only one file."""
    shards = list(shards)
    if [shard.file for shard in shards] == [SINGLE]:
        return
    located = {info.name: shard.file for shard in shards for info in shard.tensors}
    total = sum(info.num_bytes for shard in shards for info in shard.tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(located.items()))}, indent=2)
    replace_file(folder / INDEX, f"{text}\n".encode())
