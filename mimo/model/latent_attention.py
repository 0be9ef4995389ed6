"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) as Megatron Core has it, on grids of its own.

Megatron Core's layer takes the tensor-parallel group of two of its collectives from global state, gives one projection
no group, loses part of the rotary key's gradient with column-parallel down projections, asks for a norm that queries
without a low-rank projection do not have, saves replicated projections of Transformer Engine once for each
tensor-parallel rank, and cannot be built with its own PyTorch attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mimo.model import compat
from mimo.model.packed_attention import ContextParallelAttention, PackedDotProductAttention


class LatentDotProductAttention(PackedDotProductAttention):
    """Megatron Core's PyTorch attention for heads whose queries and keys are wider than their values.

    Args:
        config: sizes and dropout.
        layer_number: global number of the layer, from 1.
        attn_mask_type: causal.
        attention_type: `self`.
        softmax_scale: factor of the scores.
        cp_comm_type: no effect, there is no context parallelism here (`LatentContextParallelAttention` has it).
        pg_collection: the module's groups.
        k_channels: channels of a query or key; the tensors themselves say it.
        v_channels: channels of a value; None: as `config.kv_channels`.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, softmax_scale=softmax_scale,
                         pg_collection=pg_collection)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentContextParallelAttention(ContextParallelAttention):
    """`LatentDotProductAttention` of rows that context-parallel ranks share.

    Args:
        k_channels: channels of a query or key; the tensors themselves say it.
        v_channels: channels of a value; None: as `config.kv_channels`.
        attention: arguments of `ContextParallelAttention`.
        options: further arguments of it.
    """

    def __init__(self, *attention: Any, k_channels: int | None = None, v_channels: int | None = None,
                 **options: Any) -> None:
        super().__init__(*attention, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentAttention(MLASelfAttention):
    """Latent attention that builds exactly the layers of its spec and stays inside its own groups.

    On a tensor-parallel grid it needs sequence parallelism: without, each rank would keep the gradient of the rotary
    key that its own heads give.
    """

    config: MLATransformerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Transformer Engine's replicated layers are built without a group and would then count every tensor-parallel
        # rank's copy as the one to save.
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):
                compat.set_tensor_parallel_group(getattr(self, name), self.tp_group)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # In place of Megatron Core's choice, which puts a norm before `linear_q_proj` wherever there is one on keys.
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
        # Megatron Core widens the values of packed rows to the queries' channels, which kernels of Transformer Engine
        # need and the attention in PyTorch does not take.
        if isinstance(self.core_attention, LatentDotProductAttention | LatentContextParallelAttention):
            return self.core_attention(query, key, value, attention_mask, **kwargs)
        return super()._run_core_attention(query, key, value, attention_mask, **kwargs)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed query (the input itself without `q_lora_rank`) and compressed key-value with the rotary key.

        Both `[s, b, columns]`, with sequence parallelism this rank's part of the sequence.
        """
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._whole(self.linear_q_down_proj(hidden_states)[0], self.config.q_lora_rank)
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        return query, self._whole(self.linear_kv_down_proj(hidden_states)[0], width)

    def _whole(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """All columns for this rank's tokens, from a column-parallel or a replicated projection."""
        if part.size(-1) == width:
            return part
        # The rotary key is then gathered over the sequence, whose backward pass sums what each rank's heads give.
        return scatter_to_sequence_parallel_region(
            gather_from_tensor_model_parallel_region(part, group=self.tp_group), group=self.tp_group
        )


def with_epsilon(norm: Any, epsilon: float) -> Callable[..., torch.nn.Module]:
    """A builder of `norm` that takes its own epsilon instead of the layer's."""

    def build(*, config: MLATransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        built: torch.nn.Module = norm(config=config, hidden_size=hidden_size, eps=epsilon)
        return built

    return build
