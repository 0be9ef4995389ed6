"""Routers that leave padding out of the load of their experts.

The wheel's routers take a mask of padding, with two faults: the load that moves the expert bias is masked along experts
instead of tokens, which fails, and the tokens that weigh the load-balancing loss are taken for those of one rank,
although the sum over ranks, made in place, has made them those of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

_apply_bias = TopKRouter._apply_expert_bias
_attach_loss = TopKRouter.attach_and_log_load_balancing_loss


def apply_expert_bias(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Count the tokens of each expert.

    Args:
        router: that chose.
        routing_map: bool `[t, experts]`.
        padding_mask: bool `[t]`, True at padding, which does not count.
    """
    _apply_bias(router, routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


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
        kwargs: as the wheel's method.

    Returns:
        `activation`.
    """
    if isinstance(valid_token_count, torch.Tensor):
        valid_token_count = valid_token_count / reduce_group.size()
    return _attach_loss(router, activation, coeff, loss, name, reduce_group, valid_token_count=valid_token_count,
                        **kwargs)


def install_padded_routing() -> None:
    """Have the wheel's routers use these functions."""
    TopKRouter._apply_expert_bias = apply_expert_bias
    TopKRouter.attach_and_log_load_balancing_loss = attach_loss
