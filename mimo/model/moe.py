"""Mixtures of experts: latent experts without Transformer Engine, and routers that ignore padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.model import compat


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, with the interface of Transformer Engine's.

    Its gradient is summed over the tensor-parallel group if each rank sees only its part of the sequence.

    Args:
        input_size: columns of the weight.
        output_size: rows of the weight.
        config: gives `params_dtype` and `sequence_parallel`.
        init_method: fills the weight in place, from the random stream that the group's ranks share.
        bias: not supported.
        options: arguments that only other modes of Transformer Engine's layer read.
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
        """Multiply `[..., input_size]` by the weight. The second result is None, because there is no bias."""
        return self._forward_impl(hidden, self.weight), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return torch.nn.functional.linear(input, weight)


class LocalMoELayer(MoELayer):
    """Megatron Core's layer with `DuplicatedLinear` around latent experts, for which it needs Transformer Engine."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        names = moe_layer.HAVE_TE, moe_layer.TELinear
        moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear
        try:
            super().__init__(config, *arguments, **options)
        finally:
            moe_layer.HAVE_TE, moe_layer.TELinear = names


# Megatron Core's routers take a mask of padding, with faults that the functions below correct. The load that moves the
# expert bias is masked along experts instead of tokens, which fails. The number of tokens that weights the
# load-balancing loss is taken for that of one rank, although it has already been summed over the ranks in place. The
# loss of sequences takes those of a microbatch to be equally long. And a number of tokens is a float, which Transformer
# Engine's kernel does not read.


_attach_loss = TopKRouter.attach_and_log_load_balancing_loss


def apply_expert_bias(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Count the tokens of each expert.

    Args:
        router: the router that chose the experts.
        routing_map: bool `[t, experts]`.
        padding_mask: bool `[t]`, True for padding, which does not count.
    """
    compat.apply_expert_bias(router, routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def attach_loss(router: Any, activation: torch.Tensor, coeff: float, loss: torch.Tensor, name: str,
                reduce_group: dist.ProcessGroup, *, valid_token_count: int | torch.Tensor,
                **kwargs: Any) -> torch.Tensor:
    """Attach a load-balancing loss, weighted by its number of tokens.

    Args:
        router: the router.
        activation: tensor through which the gradient of the loss flows.
        coeff: coefficient, which the loss already includes.
        loss: this rank's part, a scalar.
        name: name of the loss in the report.
        reduce_group: ranks over which tokens were counted.
        valid_token_count: tokens of this rank; with padding a tensor, with the tokens of the whole group.
        kwargs: further arguments of Megatron Core's method.

    Returns:
        `activation`.
    """
    if isinstance(valid_token_count, torch.Tensor):
        valid_token_count = valid_token_count / reduce_group.size()
    return _attach_loss(router, activation, coeff, loss, name, reduce_group, valid_token_count=valid_token_count,
                        **kwargs)


def apply_sequence_loss(router: Any, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor,
                        seq_length: int, bsz: int, with_padding_mask: bool = False) -> torch.Tensor:
    """Attach the load-balancing loss of each sequence, weighted by its number of tokens.

    Args:
        router: the router.
        probs: tensor through which the gradient of the loss flows.
        scores_for_aux_loss: `[s * b, experts]`, zero for padding.
        routing_map: bool of the same shape, False for padding.
        seq_length: `s`, with sequence or context parallelism this rank's part of it.
        bsz: `b`.
        with_padding_mask: whether there may be padding.

    Returns:
        `probs`.
    """
    coeff = router.get_aux_loss_coeff("seq_aux_loss")
    if not coeff or not with_padding_mask or bsz == 1:
        result: torch.Tensor = compat.apply_sequence_loss(router, probs, scores_for_aux_loss, routing_map, seq_length,
                                                          bsz, with_padding_mask)
        return result
    experts, topk = routing_map.shape[-1], router.topk
    counts = reduce_from_tensor_model_parallel_region(
        routing_map.reshape(seq_length, bsz * experts).sum(dim=0), router.tp_cp_group).view(bsz, experts)
    tokens = counts.sum(dim=-1) / topk
    sums = scores_for_aux_loss.reshape(seq_length, bsz, experts).sum(dim=0)
    losses = (sums * counts).sum(dim=-1) * (experts * coeff / topk) / tokens**2
    weighted = (losses * tokens).sum() / tokens.sum()
    # The gradient is that of the weighted loss, and the report has the mean over sequences.
    result = router.attach_and_log_load_balancing_loss(
        probs, coeff, weighted + (losses.mean() - weighted).detach(), "seq_load_balancing_loss", router.tp_cp_group,
        valid_token_count=tokens.sum())
    return result


def balancing_loss(*, total_num_tokens: int | torch.Tensor, fused: bool = False, **options: Any) -> torch.Tensor:
    """Compute a load-balancing loss, with a number of tokens that a fused kernel can read.

    Args:
        total_num_tokens: number of tokens; with padding a float scalar on the device.
        fused: whether Transformer Engine's kernel computes the loss.
        options: further arguments of Megatron Core's function.
    """
    if fused and isinstance(total_num_tokens, torch.Tensor):
        total_num_tokens = total_num_tokens.round().long()
    result: torch.Tensor = compat.balancing_loss(total_num_tokens=total_num_tokens, fused=fused, **options)
    return result


def install_padded_routing() -> None:
    """Have Megatron Core's routers ignore padding."""
    compat.replace_apply_expert_bias(apply_expert_bias)
    compat.replace_apply_sequence_loss(apply_sequence_loss)
    compat.replace_balancing_loss(balancing_loss)
    TopKRouter.attach_and_log_load_balancing_loss = attach_loss
