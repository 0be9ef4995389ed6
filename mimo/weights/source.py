"""Tensors of a Hugging Face folder: safetensors, read one at a time. Nothing else is ever unpickled or fetched."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
ADAPTER = "adapter_config.json"
# Formats of weights that are recognised, to say that they are not read and to leave them out of copies.
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
MAX_OPEN_FILES = 2
# Names of the safetensors format.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64,
}


@dataclass(frozen=True)
class SourceTensor:
    """What a file's header says of one tensor.

    Attributes:
        shape: its sizes.
        dtype: its dtype; None for one that torch has no equal of.
        dtype_name: as the file spells it.
        file: file name inside the folder.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str
    file: str


@dataclass(frozen=True)
class Catalog:
    """Everything a folder holds, without its data: what one rank reads and tells the others.

    Attributes:
        path: the folder.
        tensors: every tensor by name.
        file_bytes: size of every file of weights by name.
    """

    path: str
    tensors: Mapping[str, SourceTensor]
    file_bytes: Mapping[str, int]


class HfSource:
    """A folder of safetensors: headers are read at once, tensors when they are asked for.

    Args:
        path: folder with `model.safetensors`, `model.safetensors.index.json` or any other `*.safetensors`.
        catalog: what the folder holds where that is known already; else every header is read.

    Raises:
        ValueError: no such folder, no safetensors in it, a file that the index names is missing, a file is truncated or
            is not in the format, a tensor is not in the file that the index names. Names the file.
    """

    def __init__(self, path: str | Path, catalog: Catalog | None = None) -> None:
        self.path = Path(path)
        self._open: OrderedDict[str, Any] = OrderedDict()
        self.catalog = _read_catalog(self.path) if catalog is None else catalog

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by name."""
        return self.catalog.tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor on the CPU, in the file's dtype.

        Args:
            name: one of `tensors`.
            rows: part of the first axis; None for all of it.

        Raises:
            ValueError: the file is gone or was changed since its header was read.
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
        """What differs here from the catalogue, a line for each file: absent, or of another size."""
        problems = []
        for name, size in self.catalog.file_bytes.items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{file} is not there")
            elif file.stat().st_size != size:
                problems.append(f"{file} has {file.stat().st_size} bytes, not {size}")
        return problems

    def close(self) -> None:
        """Let go of the open files; reading opens them again."""
        self._open.clear()

    def _handle(self, name: str) -> Any:
        if name in self._open:
            self._open.move_to_end(name)
        else:
            self._open[name] = _open_file(self.path / name)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[name]


def weight_files(folder: Path) -> list[Path]:
    """Files of safetensors in a folder, without their index."""
    return sorted(folder.glob("*.safetensors"))


def is_weights(name: str) -> bool:
    """Whether a file name is one of weights, in any format, or of their index."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin.index.json", *OTHER_FORMATS))


def _read_catalog(folder: Path) -> Catalog:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; weights are read from a local folder, never from a hub")
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
    """Tensor name to file name; None where the folder has no index."""
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
        # transformers reads the one and vLLM the other.
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
