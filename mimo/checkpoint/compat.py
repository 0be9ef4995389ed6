"""Private parts of Megatron Core 0.19.2 and PyTorch 2.13 that checkpoints rely on.

Look through it when Megatron Core is upgraded: tests/unit/test_compat.py names what is gone.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from torch.distributed.checkpoint.filesystem import _StorageInfo

# `filesystem_async._split_by_size_and_type` divides a rank's items among files as Megatron Core's own writer does.
split_into_files = _split_by_size_and_type

# `torch.distributed.checkpoint.filesystem._StorageInfo`: file, offset and length of a tensor in the index of a
# torch_dist checkpoint. Only torch's own writer makes them; ours also computes checksums.
StorageInfo = _StorageInfo


def by_stored_key(sharded: ShardedStateDict, keep_only_main_replica: bool = False) -> tuple[dict[str, Any], Any, Any]:
    """Return sharded tensors and objects by the keys under which a checkpoint has them, and what `by_own_key` needs.

    `strategies.torch._replace_state_dict_keys_with_sharded_keys`: Megatron Core's strategies do so before they plan,
    and offer the plan only together with their own writer and reader.
    """
    return torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica)


def by_own_key(loaded: dict[str, Any], flat_mapping: Any, names: Any, sharded: ShardedStateDict) -> ShardedStateDict:
    """Turn what torch loaded back into the structure of the state dict that was asked for.

    `strategies.torch._unwrap_pyt_sharded_tensor`, `_replace_sharded_keys_with_state_dict_keys` and
    `_restore_dict_types`: the end of Megatron Core's own `load`, after its reader.
    """
    values = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
    found = torch_strategy._replace_sharded_keys_with_state_dict_keys(values, flat_mapping, names)
    torch_strategy._restore_dict_types(found, sharded)
    return found
