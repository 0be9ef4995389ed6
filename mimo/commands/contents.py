"""What a checkpoint holds, read from its index and `common.pt` alone: no tensor data, no process group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from mimo.checkpoint.reader import read_common, read_index
from mimo.commands.rows import WEIGHTS, StoredInfo

_OPTIMIZER_STATE = ".optimizer.state."


@dataclass(frozen=True)
class Contents:
    """A checkpoint.

    Attributes:
        folder: its own folder.
        index: what `.metadata` says.
        common: what `common.pt` holds.
        tensors: every tensor, weights in the index's order.
        rng: module -> (pp, dp, tp) sizes of the grid that its generator states are for.
        streams: data streams, `module/lane`.
        files: bytes of every file by name.
    """

    folder: Path
    index: Metadata
    common: Mapping[str, Any]
    tensors: tuple[StoredInfo, ...]
    rng: Mapping[str, tuple[int, ...]]
    streams: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def modules(self) -> list[str]:
        """Names of the modules, in the order of the grids it was saved on."""
        known = [name for name in self.common["grids"] if any(tensor.module == name for tensor in self.tensors)]
        return list(dict.fromkeys([*known, *(tensor.module for tensor in self.tensors)]))

    def of(self, module: str) -> list[StoredInfo]:
        """The tensors of a module."""
        return [tensor for tensor in self.tensors if tensor.module == module]


def read_contents(folder: Path) -> Contents:
    """Read index and `common.pt`.

    Raises:
        ValueError: one of them is missing, damaged, holds more than data, or is not of this trainer.
    """
    common, index = read_common(folder), read_index(folder)
    lacking = sorted({"iteration", "consumed_samples", "config", "frozen", "grids", "optimizer_steps"} - common.keys())
    if lacking:
        raise ValueError(f"{folder}: common.pt is not that of a checkpoint of this trainer, it lacks "
                         f"{', '.join(lacking)}")
    tensors, rng, streams = [], {}, []
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(_tensor(key, entry))
        elif isinstance(entry, BytesStorageMetadata) and key.startswith("mimo."):
            stored = ShardedObject.empty_from_unique_key(key)
            parts = stored.key.split(".")
            if parts[1] == "loader":
                streams.append("/".join(parts[2:]))
            elif parts[2:] == ["rng_state"]:
                rng[parts[1]] = tuple(stored.global_shape)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return Contents(folder, index, common, tuple(tensors), rng, tuple(sorted(streams)), files)


def _tensor(key: str, entry: TensorStorageMetadata) -> StoredInfo:
    dtype, kind = entry.properties.dtype, WEIGHTS
    if key.startswith("mimo.") and _OPTIMIZER_STATE in key:
        module, _, rest = key.removeprefix("mimo.").partition(_OPTIMIZER_STATE)
        kind, _, name = rest.partition(".")
    else:
        module, _, name = key.partition(".")
    return StoredInfo(key, module, kind, name, tuple(entry.size), str(dtype).removeprefix("torch."), len(entry.chunks),
                      math.prod(entry.size) * dtype.itemsize)
