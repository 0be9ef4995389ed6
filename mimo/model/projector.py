"""The two-layer projector from encoder features to language embeddings."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0) ** 2` (So et al., arXiv:2109.08668).

    Not the wheel's: that one is wrapped in torch.compile, which compiles anew as the number of tokens changes.
    """
    return torch.nn.functional.relu(x).square()


class Projector(MLP):
    """`linear_fc2(activation(linear_fc1(norm(x))))`.

    Biases and no norm: LLaVA 1.5 (https://arxiv.org/abs/2310.03744). `linear_fc1` is column parallel and `linear_fc2`
    row parallel; input and output are replicated over tensor-parallel ranks. The wheel's `MultimodalProjector` wraps
    the same MLP one level deeper and adds nothing that is needed here.

    Args:
        config: `hidden_size` is the language width, `ffn_hidden_size` the inner one; `activation_func` is applied
            between; `add_bias_linear` gives the biases; `normalization` and `layernorm_epsilon` belong to the norm.
        submodules: linear layers.
        input_size: width of the encoder's features.
        pg_collection: the encoder's process groups.
        norm: norm class of the features, called as `norm(config=, hidden_size=, eps=)`; None: they are taken as they
            are.
    """

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, input_size: int,
                 pg_collection: ProcessGroupCollection, norm: Any = None) -> None:
        assert not config.sequence_parallel, "the projector's input is replicated over tensor-parallel ranks"
        super().__init__(config, submodules, input_size=input_size, tp_group=pg_collection.tp)
        self.layer_norm = None
        if norm is not None:
            self.layer_norm = norm(config=config, hidden_size=input_size, eps=config.layernorm_epsilon)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project `[tokens, input_size]` to `[tokens, hidden_size]`."""
        if self.layer_norm is not None:
            features = self.layer_norm(features)
        projected, bias = super().forward(features)
        return projected if bias is None else projected + bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (),
                           metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """The wheel's, with the norm under the name it has where a linear layer of Transformer Engine holds it."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.layer_norm is not None:
            # The wheel's MLP tells its parts no group: every tensor-parallel rank would call its copy of the norm the
            # one to save.
            state |= sharded_state_dict_default(self.layer_norm, f"{prefix}layer_norm.", sharded_offsets, metadata,
                                                tp_group=self.tp_group)
        apply_prefix_mapping(state, {f"{prefix}layer_norm.{kind}": f"{prefix}linear_fc1.layer_norm_{kind}"
                                     for kind in ("weight", "bias")})
        return state
