"""Log-probabilities of given tokens under logits that are divided over a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mimo.rl.vocab import VocabShard, chunks, compute_dtype, log_normaliser, scaled


def log_probs(
    logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard, normaliser: torch.Tensor | None = None
) -> torch.Tensor:
    """log softmax(logits / temperature)[label] of every row. Collective over the shard's group.

    Kept for the backward pass are the logits, as they are, and two numbers a row; the softmax is computed anew. The
    gradient has the dtype of the logits and needs no collective: every rank of the group must go on with the same loss.

    Args:
        logits: `[..., columns]` of this rank, such as `[s, b, v / tp]` or `[tokens, v / tp]`; any floating dtype.
        labels: int64 `[...]`, ids of the whole vocabulary, the same on every rank. A negative one stands for no token:
            its log-prob is 0, without gradient. One past the vocabulary gives NaN.
        shard: columns, group, temperature.
        normaliser: `log_normaliser` of the same logits, where it is there already.

    Returns:
        `[...]`, float32 (float64 for float64 logits), the same on every rank of the group.
    """
    assert labels.shape == logits.shape[:-1], f"labels {list(labels.shape)} for logits {list(logits.shape)}"
    if normaliser is None:
        normaliser = log_normaliser(logits, shard)
    result: torch.Tensor = _LogProbs.apply(logits, labels, normaliser.detach(), shard)
    return result


class _LogProbs(torch.autograd.Function):
    """d logprob / d logits = (1[column = label] - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, normaliser: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, labels, normaliser)
        ctx.shard = shard
        flat, wanted = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        column, is_here = _own_columns(flat, wanted, shard)
        picked = flat.gather(1, column[:, None]).squeeze(1).to(compute_dtype(flat)) / shard.temperature
        picked = shard.reduce(torch.where(is_here, picked, 0.0), dist.ReduceOp.SUM)
        values = picked - normaliser.reshape(-1)
        values = torch.where(wanted >= shard.vocab_size, torch.nan, torch.where(wanted < 0, 0.0, values))
        return values.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, normaliser = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        flat, wanted = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        column, is_here = _own_columns(flat, wanted, shard)
        weight = grad_outputs[0].reshape(-1).to(compute_dtype(flat)) / shard.temperature
        weight = torch.where(wanted < 0, 0.0, weight)
        gradient = torch.zeros_like(flat)
        true_columns = shard.num_true_columns(flat.size(-1))
        if true_columns:
            for rows in chunks(*flat.shape):
                part = (scaled(flat, rows, shard) - normaliser.reshape(-1)[rows, None]).exp_()
                part.mul_(-weight[rows, None])
                # Before the conversion to the dtype of the logits: 1 - softmax of a likely token is small.
                part.scatter_add_(1, column[rows, None], torch.where(is_here, weight, 0.0)[rows, None])
                gradient[rows, :true_columns] = part.to(flat.dtype)
        return gradient.view(logits.shape), None, None, None


def _own_columns(
    flat: torch.Tensor, labels: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label on this rank, 0 where it is elsewhere, and whether it is here."""
    column = labels - shard.first_column(flat.size(-1))
    is_here = (column >= 0) & (column < shard.num_true_columns(flat.size(-1)))
    return torch.where(is_here, column, 0), is_here
