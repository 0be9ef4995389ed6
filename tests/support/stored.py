"""The tensors of a checkpoint as they lie in its files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mimo.checkpoint.reader import CheckedReader, read_index


def safetensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    return found


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every global tensor, whole, by its key."""
    metadata = read_index(folder).state_dict_metadata
    tensors = {
        key: torch.full(tuple(value.size), torch.nan, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=CheckedReader(folder), no_dist=True)
    return tensors
