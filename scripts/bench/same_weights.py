"""Random weights that depend on names alone, so that a model starts alike on every layout.

Megatron draws each rank's shard by itself: the same seed gives another model with another tensor-parallel size. Here
whole tensors are drawn, on the device, and each rank takes its part.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

STD = 0.02


@torch.no_grad()
def set_weights(model: Any, seed: int) -> None:
    """Draw every matrix of this rank's model from a normal distribution; vectors (norms, biases) stay as built.

    Args:
        model: with the wheel's sharded state dict, which says what part of what each rank holds.
        seed: of the run.
    """
    state = model.sharded_state_dict()
    apply_factories(state)
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor) or entry.data is None or not entry.data.is_floating_point():
            continue
        # Layers of one kind may be one tensor with an axis for the layers.
        layers = entry.prepend_axis_num
        shape, offset = entry.global_shape[layers:], entry.global_offset[layers:]
        if len(shape) < 2:
            continue
        name = f"{entry.key.replace('.module.', '.')} {tuple(entry.global_offset[:layers])} {seed}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
        generator = torch.Generator(device=entry.data.device).manual_seed(number)
        whole = torch.randn(tuple(shape), generator=generator, device=entry.data.device) * STD
        for axis, (start, length) in enumerate(zip(offset, entry.data.shape, strict=True)):
            whole = whole.narrow(axis, start, length)
        entry.data.copy_(whole)
