"""Latent mixture of experts without Transformer Engine: the projections around the routed experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, called as Transformer Engine's `duplicated` one.

    Its gradient is summed over the tensor-parallel group where each rank sees its part of the sequence.

    Args:
        input_size: columns of the weight.
        output_size: its rows.
        config: gives `params_dtype` and `sequence_parallel`.
        init_method: fills the weight in place, from the random stream that the group's ranks share.
        bias: not supported.
        options: what only other modes of the layer read.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig,
                 init_method: Callable[[torch.Tensor], Any], bias: bool, **options: Any) -> None:
        super().__init__()
        assert not bias and options.get("parallel_mode") == "duplicated", (bias, options)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype,
                                                     device=torch.cuda.current_device()))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """`hidden` of shape `[..., input_size]` times the weight; there is no bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LocalMoELayer(MoELayer):
    """The wheel's layer with `DuplicatedLinear` where it asks for Transformer Engine: around latent experts."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        with _torch_projections():
            super().__init__(config, *arguments, **options)


@contextmanager
def _torch_projections() -> Iterator[None]:
    names = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = names
