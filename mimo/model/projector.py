"""The two-layer projector from encoder features to language embeddings."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class Projector(MLP):
    """`linear_fc2(activation(linear_fc1(x)))` with biases, as in LLaVA 1.5 (https://arxiv.org/abs/2310.03744).

    `linear_fc1` is column parallel and `linear_fc2` row parallel; input and output are replicated over tensor-parallel
    ranks. The wheel's `MultimodalProjector` wraps the same MLP one level deeper and adds nothing that is needed here.

    Args:
        config: `hidden_size` is the language width, `ffn_hidden_size` the inner one; `activation_func` is applied
            between; `add_bias_linear` gives the biases.
        submodules: linear layers.
        input_size: width of the encoder's features.
        pg_collection: the encoder's process groups.
    """

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, input_size: int,
                 pg_collection: ProcessGroupCollection) -> None:
        assert not config.sequence_parallel, "the projector's input is replicated over tensor-parallel ranks"
        super().__init__(config, submodules, input_size=input_size, tp_group=pg_collection.tp)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project `[tokens, input_size]` to `[tokens, hidden_size]`."""
        projected, bias = super().forward(features)
        return projected if bias is None else projected + bias
