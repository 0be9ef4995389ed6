"""The tensors of a checkpoint as they lie in its files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mimo.checkpoint.reader import CheckedReader, read_index


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
