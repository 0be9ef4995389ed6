"""Entropy of the distribution that logits divided over a tensor-parallel group stand for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mimo.rl.vocab import VocabShard, chunks, compute_dtype, log_normaliser, scaled


def entropy(logits: torch.Tensor, shard: VocabShard, normaliser: torch.Tensor | None = None) -> torch.Tensor:
    """-sum(p log p) in nats of p = softmax(logits / temperature), for every row. Collective over the shard's group.

    As for `mimo.rl.logprobs.log_probs`: the logits are kept as they are, and the gradient needs no collective.

    Args:
        logits: `[..., columns]` of this rank, any floating dtype.
        shard: columns, group, temperature.
        normaliser: `log_normaliser` of the same logits, where it is there already.

    Returns:
        `[...]`, float32 (float64 for float64 logits), the same on every rank of the group.
    """
    if normaliser is None:
        normaliser = log_normaliser(logits, shard)
    result: torch.Tensor = _Entropy.apply(logits, normaliser.detach(), shard)
    return result


class _Entropy(torch.autograd.Function):
    """d entropy / d logits = -p (log p + entropy) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, normaliser: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        flat = logits.reshape(-1, logits.size(-1))
        values = torch.zeros(len(flat), dtype=compute_dtype(flat), device=flat.device)
        if shard.num_true_columns(flat.size(-1)):
            for rows in chunks(*flat.shape):
                log_p = scaled(flat, rows, shard) - normaliser.reshape(-1)[rows, None]
                values[rows] = -_weighted(log_p.exp(), log_p).sum(dim=-1)
        values = shard.reduce(values, dist.ReduceOp.SUM).view(logits.shape[:-1])
        # A copy: the caller may write to what it is given.
        ctx.save_for_backward(logits, normaliser, values.clone())
        ctx.shard = shard
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, normaliser, values = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        flat = logits.reshape(-1, logits.size(-1))
        weight = grad_outputs[0].reshape(-1).to(compute_dtype(flat)) / shard.temperature
        gradient = torch.zeros_like(flat)
        true_columns = shard.num_true_columns(flat.size(-1))
        if true_columns:
            for rows in chunks(*flat.shape):
                log_p = scaled(flat, rows, shard) - normaliser.reshape(-1)[rows, None]
                part = _weighted(log_p.exp(), log_p + values.reshape(-1)[rows, None])
                gradient[rows, :true_columns] = part.mul_(-weight[rows, None]).to(flat.dtype)
        return gradient.view(logits.shape), None, None


def _weighted(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """p * values, 0 where p is: a token that logits of -inf forbid adds nothing."""
    return (p * values).masked_fill_(p == 0, 0.0)
