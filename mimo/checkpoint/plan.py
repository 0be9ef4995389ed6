"""Who writes what into which file: planned with the wheel once, then reused by every save of the run."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from mimo.checkpoint.agree import from_first_rank, raise_any
from mimo.grid.groups import Grids


@dataclass
class PlannedFile:
    """One file of this rank.

    Attributes:
        name: its name inside the checkpoint.
        objects: objects at its beginning, each by the unique key that is its `index.fqn`.
        tensors: tensors after them, in order, where they lie in the running model and its optimizers.
    """

    name: str
    objects: list[WriteItem]
    tensors: list[tuple[WriteItem, torch.Tensor]]


@dataclass
class Plan:
    """What this rank writes in every save.

    Attributes:
        files: its files.
        metadata: the index of all ranks' tensors and objects, without places in files; on rank 0 alone.
    """

    files: list[PlannedFile]
    metadata: Metadata | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order of the files."""
        return [tensor for file in self.files for _, tensor in file.tensors]


def make_plan(sharded: dict[str, Any], grids: Grids, files_per_rank: int) -> Plan:
    """Plan a save. Collective over the world.

    Args:
        sharded: sharded tensors and objects of this rank, nested in dictionaries as one likes.
        grids: process groups.
        files_per_rank: most files of a rank; they are of about the same size.

    Raises:
        ValueError: on rank 0; the ranks' slices of a tensor overlap or leave something out.
        ReportedElsewhereError: on the other ranks then.
    """
    tensors = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    # Of other tensors the wheel would plan copies, which later saves would write unchanged.
    strided = [entry.key for entry in tensors if not entry.data.is_contiguous()]
    assert not strided, f"not contiguous: {', '.join(strided)}"
    _check_slices(sharded, grids)
    by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, True)
    state = torch_strategy.mcore_to_pyt_state_dict(by_key, False)
    planner = torch_strategy.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
    is_first = grids.rank == 0
    planner.set_up_planner(state, is_coordinator=is_first)
    local = planner.create_local_plan()
    plans = [None] * grids.layout.world_size if is_first else None
    dist.gather_object(local, plans, dst=0, group=grids.host)
    metadata = planner.create_global_plan(plans)[1] if is_first else None
    files: list[PlannedFile] = []
    for items in _split_by_size_and_type(files_per_rank, local.items):
        if items:
            values = [(item, planner.resolve_data(item)) for item in items if item.type != WriteItemType.BYTE_IO]
            objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
            files.append(PlannedFile(f"__{grids.rank}_{len(files)}.distcp", objects, values))
    plan = Plan(files, metadata)
    assert {tensor.data_ptr() for tensor in plan.tensors} <= {entry.data.data_ptr() for entry in tensors}
    return plan


def _check_slices(sharded: dict[str, Any], grids: Grids) -> None:
    """The ranks' slices make up whole tensors; else `make_plan`'s errors.

    Only rank 0 learns of them: there are as many as ranks times tensors.
    """
    is_first = grids.rank == 0
    slices: list[Any] | None = [None] * grids.layout.world_size if is_first else None
    dist.gather_object([entry.without_data() for entry in nested_values(sharded)], slices, dst=0, group=grids.host)
    error = None
    if slices is not None:
        try:
            validate_sharding_integrity(slices)
        except CheckpointingException as problem:
            error = f"the checkpoint would not be whole: {problem}"
    raise_any(grids, [from_first_rank(grids, error)])


def serialized_objects(sharded: dict[str, Any]) -> dict[str, bytes]:
    """The objects that this rank writes, by unique key, as the wheel stores them."""
    found = {}
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            buffer = io.BytesIO()
            torch.save([entry.data], buffer)
            found[entry.unique_key] = buffer.getvalue()
    return found
