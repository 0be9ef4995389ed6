"""Megatron Core's multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), for grids with their own groups.

Megatron Core's layer has these faults, which are corrected here:

- It takes the tensor-parallel group of two collectives from global state, and gives one projection no group.
- It loses part of the rotary key's gradient with column-parallel down projections.
- It asks for a norm that queries without a low-rank projection do not have.
- It saves replicated projections of Transformer Engine once for each tensor-parallel rank.
- It cannot be built with Megatron Core's own PyTorch attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mimo.model import compat
from mimo.model.packed_attention import ContextParallelAttention, PackedDotProductAttention


class _WideQueries(DotProductAttention):
    """Base class of PyTorch attention for heads whose queries and keys are wider than their values.

    Args:
        attention: positional arguments of Megatron Core's `DotProductAttention`.
        k_channels: no effect; the tensors themselves show the channels of a query or key.
        v_channels: channels of a value; None: `config.kv_channels`.
        options: keyword arguments of `DotProductAttention`.
    """

    def __init__(self, *attention: Any, k_channels: int | None = None, v_channels: int | None = None,
                 **options: Any) -> None:
        super().__init__(*attention, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentDotProductAttention(_WideQueries, PackedDotProductAttention):
    """Latent attention's scores and weighted values in plain PyTorch."""


class LatentContextParallelAttention(_WideQueries, ContextParallelAttention):
    """The same for rows that context-parallel ranks share."""


class LatentAttention(MLASelfAttention):
    """Latent attention that builds exactly the layers of its spec and stays inside its own groups.

    On a tensor-parallel grid it needs sequence parallelism. Otherwise each rank would only have the part of the rotary
    key's gradient that comes from its own heads.
    """

    config: MLATransformerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Transformer Engine's replicated layers are built without a group. Then every tensor-parallel rank would save
        # its copy.
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):
                compat.set_tensor_parallel_group(getattr(self, name), self.tp_group)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # Megatron Core would put a norm before `linear_q_proj` wherever keys have one.
        assert self.config.sequence_parallel or self.tp_group.size() == 1, "latent attention needs --sequence-parallel"
        return {
            "linear_q_proj": ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": self.tp_group}),
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Megatron Core widens the values of packed rows to the channels of queries and keys. On H100 GPUs the
        # gradients of both were then wrong (tests/gpu/test_context_parallel.py -k latent-packed).
        if kwargs.get("attn_mask_type") is None:
            kwargs["attn_mask_type"] = self.attn_mask_type
        return self.core_attention(query, key, value, attention_mask, **kwargs)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed query, and the compressed key-value with the rotary key.

        Without `q_lora_rank`, the query is the input itself. Both have the shape `[s, b, columns]`, where `s` is this
        rank's part of the sequence with sequence parallelism.
        """
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._whole(self.linear_q_down_proj(hidden_states)[0], self.config.q_lora_rank)
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        return query, self._whole(self.linear_kv_down_proj(hidden_states)[0], width)

    def _whole(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Return all columns for this rank's tokens, given the output of a column-parallel or replicated projection."""
        if part.size(-1) == width:
            return part
        # Megatron Core then gathers the rotary key over the sequence. The backward pass of that gather sums the
        # gradients from each rank's heads.
        return scatter_to_sequence_parallel_region(
            gather_from_tensor_model_parallel_region(part, group=self.tp_group), group=self.tp_group
        )


def with_epsilon(norm: Any, epsilon: float) -> Callable[..., torch.nn.Module]:
    """Return a builder of `norm` that uses `epsilon` instead of the layer's."""

    def build(*, config: MLATransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        built: torch.nn.Module = norm(config=config, hidden_size=hidden_size, eps=epsilon)
        return built

    return build
