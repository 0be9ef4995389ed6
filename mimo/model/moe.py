"""Latent mixture of experts without Transformer Engine: the projections around the routed experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.model import compat


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
        return self._forward_impl(hidden, self.weight), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return torch.nn.functional.linear(input, weight)


class LocalMoELayer(MoELayer):
    """Megatron Core's layer with `DuplicatedLinear` where it asks for Transformer Engine: around latent experts."""

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


# Routers that leave padding out of the load of their experts.
#
# Megatron Core's routers take a mask of padding, with two faults: the load that moves the expert bias is masked along
# experts instead of tokens, which fails, and the tokens that weigh the load-balancing loss are taken for those of one
# rank, although the sum over ranks, made in place, has made them those of all.


_attach_loss = TopKRouter.attach_and_log_load_balancing_loss


def apply_expert_bias(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Count the tokens of each expert.

    Args:
        router: that chose.
        routing_map: bool `[t, experts]`.
        padding_mask: bool `[t]`, True at padding, which does not count.
    """
    compat.apply_expert_bias(router, routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def attach_loss(router: Any, activation: torch.Tensor, coeff: float, loss: torch.Tensor, name: str,
                reduce_group: dist.ProcessGroup, *, valid_token_count: int | torch.Tensor,
                **kwargs: Any) -> torch.Tensor:
    """Attach a load-balancing loss, weighed by the tokens that it is of.

    Args:
        router: whose loss it is.
        activation: what its gradient flows through.
        coeff: already in the loss.
        loss: this rank's part, a scalar.
        name: of the loss in the report.
        reduce_group: ranks over which tokens were counted.
        valid_token_count: of this rank; a tensor where there is padding, and then of the whole group.
        kwargs: as Megatron Core's method.

    Returns:
        `activation`.
    """
    if isinstance(valid_token_count, torch.Tensor):
        valid_token_count = valid_token_count / reduce_group.size()
    return _attach_loss(router, activation, coeff, loss, name, reduce_group, valid_token_count=valid_token_count,
                        **kwargs)


def install_padded_routing() -> None:
    """Have Megatron Core's routers use these functions."""
    compat.replace_apply_expert_bias(apply_expert_bias)
    TopKRouter.attach_and_log_load_balancing_loss = attach_loss
