"""The parts of global tensors that a rank holds, as the wheel's sharded state dict tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from mimo.weights.keys import global_name, is_expert


@dataclass
class ModelPiece:
    """A slice of one global tensor, held by this rank.

    Attributes:
        name: global name, as in `Rule.megatron`.
        shape: shape of the whole tensor.
        slices: this piece in it, one slice an axis.
        tensor: a view of the parameter or buffer: copying into it changes the model.
        is_main: whether this is the copy that a checkpoint would save.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    tensor: torch.Tensor
    is_main: bool


def module_pieces(module: torch.nn.Module, groups: ProcessGroupCollection) -> list[ModelPiece]:
    """Every parameter and saved buffer of a rank's part of a module; gate and up halves are pieces of their own.

    Args:
        module: a module of the model, wrapped or not.
        groups: its process groups.
    """
    state = unwrap_model(module).sharded_state_dict(
        prefix="", sharded_offsets=(), metadata={"dp_cp_group": groups.dp_cp})
    pieces = []
    for entry in nested_values(state):
        built = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        pieces += [_piece(part) for part in built if isinstance(part, ShardedTensor)]
    return pieces


def replica_group(piece: ModelPiece, groups: ProcessGroupCollection) -> Any:
    """The ranks that hold the same piece: data parallel ranks, of the experts' own kind for an expert's tensor."""
    return groups.expt_dp if is_expert(piece.name) else groups.dp_cp


def _piece(entry: ShardedTensor) -> ModelPiece:
    stacked = entry.prepend_axis_num
    assert entry.data is not None
    tensor = entry.data.detach()
    offsets = entry.global_offset[stacked:]
    return ModelPiece(
        name=global_name(entry.key, entry.global_offset[:stacked]),
        shape=tuple(entry.global_shape[stacked:]),
        slices=tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True)),
        tensor=tensor,
        is_main=bool(is_main_replica(entry.replica_id)),
    )
