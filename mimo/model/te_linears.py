"""Linear layers of Transformer Engine for MLPs whose activation does not add the bias. Imports Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELayerNormColumnParallelLinear


class ColumnParallelWithBias(TEColumnParallelLinear):
    """A column-parallel linear layer that adds its bias inside the matrix product.

    The wheel's MLP asks its first layer for the bias instead, to be added together with the activation; for activations
    that it has no such kernel of it then adds it by itself, which reads and writes the widest tensor of all once more.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)


class LayerNormColumnParallelWithBias(TELayerNormColumnParallelLinear):
    """A norm and a `ColumnParallelWithBias`, in one layer."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **further: Any) -> None:
        super().__init__(*sizes, skip_bias_add=False, **further)
