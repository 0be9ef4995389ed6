"""Log-probs and entropy under logits whose vocabulary is split over a tensor-parallel group.

Everything is computed in float32 (float64 for float64 logits), a few rows at a time. Besides the logits themselves, the
memory in use is one or two numbers for each token and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Number of logits that are converted at once: 256 MiB in float32.
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary, and how logits become a distribution.

    Attributes:
        vocab_size: number of tokens; columns from there on are padding and are ignored.
        group: tensor-parallel group, whose rank r holds the r-th of equal ranges of columns; None if all are here.
        temperature: divisor of the logits.

    Raises:
        ValueError: the temperature is not above 0.
    """

    vocab_size: int
    group: dist.ProcessGroup | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"--temperature {self.temperature} is not above 0: greedy choices have no log-probs")

    def first_column(self, num_columns: int) -> int:
        """Return the token id of the first of this rank's `num_columns` columns, padding included."""
        return 0 if self.group is None else self.group.rank() * num_columns

    def num_true_columns(self, num_columns: int) -> int:
        """Count this rank's columns that are tokens, possibly none."""
        size = num_columns if self.group is None else num_columns * self.group.size()
        assert size >= self.vocab_size, f"{size} columns for a vocabulary of {self.vocab_size}"
        return min(max(self.vocab_size - self.first_column(num_columns), 0), num_columns)

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce `values` over the group, in place, and return them. Collective."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values


def compute_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return float64 for float64 logits, otherwise float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield ranges of rows that are small enough to be converted at once."""
    step = max(CHUNK_ELEMENTS // max(num_columns, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def scaled(logits: torch.Tensor, rows: slice, shard: VocabShard) -> torch.Tensor:
    """Divide this rank's columns of some rows, without padding, by the temperature, in the dtype of computation.

    Args:
        logits: `[rows, columns]`.
        rows: the rows.
        shard: columns and temperature.

    Returns:
        The scaled logits. They are a view of the input if nothing changes, so do not write to them.
    """
    own = logits[rows, : shard.num_true_columns(logits.size(-1))].to(compute_dtype(logits))
    return own if shard.temperature == 1.0 else own / shard.temperature


@torch.no_grad()
def log_normaliser(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Compute log(sum(exp(logits / temperature))) over the true vocabulary, without gradient. Collective.

    Log-probs and entropy of the same logits can share the result.

    Args:
        logits: `[..., columns]` of this rank.
        shard: columns, group, temperature.

    Returns:
        `[...]`, float32 (float64 for float64 logits), the same on every rank of the group.
    """
    flat = logits.reshape(-1, logits.size(-1))
    largest = torch.full((len(flat),), -torch.inf, dtype=compute_dtype(flat), device=flat.device)
    has_columns = shard.num_true_columns(flat.size(-1)) > 0
    if has_columns:
        for rows in chunks(*flat.shape):
            largest[rows] = scaled(flat, rows, shard).amax(dim=-1)
    shard.reduce(largest, dist.ReduceOp.MAX)
    total = torch.zeros_like(largest)
    if has_columns:
        for rows in chunks(*flat.shape):
            total[rows] = (scaled(flat, rows, shard) - largest[rows, None]).exp_().sum(dim=-1)
    shard.reduce(total, dist.ReduceOp.SUM)
    return (largest + total.log()).view(logits.shape[:-1])


def log_probs(
    logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard, normaliser: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute log softmax(logits / temperature)[label] of every row. Collective over the shard's group.

    The backward pass keeps the unchanged logits and two numbers for each row, and computes the softmax again. The
    gradient has the dtype of the logits and needs no collective, but every rank of the group must use the same loss.

    Args:
        logits: `[..., columns]` of this rank, such as `[s, b, v / tp]` or `[tokens, v / tp]`; any floating dtype.
        labels: int64 `[...]`, ids of the whole vocabulary, the same on every rank. A negative id means no token: its
            log-prob is 0, without gradient. An id past the vocabulary gives NaN.
        shard: columns, group, temperature.
        normaliser: `log_normaliser` of the same logits, if it was computed already.

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
                # This must precede the conversion to the dtype of the logits: 1 - softmax of a likely token is small.
                part.scatter_add_(1, column[rows, None], torch.where(is_here, weight, 0.0)[rows, None])
                gradient[rows, :true_columns] = part.to(flat.dtype)
        return gradient.view(logits.shape), None, None, None


def _own_columns(
    flat: torch.Tensor, labels: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label on this rank (0 for labels of other ranks), and whether it is here."""
    column = labels - shard.first_column(flat.size(-1))
    is_here = (column >= 0) & (column < shard.num_true_columns(flat.size(-1)))
    return torch.where(is_here, column, 0), is_here


def entropy(logits: torch.Tensor, shard: VocabShard, normaliser: torch.Tensor | None = None) -> torch.Tensor:
    """Compute -sum(p log p) in nats of p = softmax(logits / temperature) for every row. Collective over the group.

    As in `log_probs`, the backward pass keeps the unchanged logits, and the gradient needs no collective.

    Args:
        logits: `[..., columns]` of this rank, any floating dtype.
        shard: columns, group, temperature.
        normaliser: `log_normaliser` of the same logits, if it was computed already.

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
        # A copy, because the caller may write to the result.
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
    """Return p * values, and 0 where p is 0, so that tokens with logits of -inf add nothing instead of NaN."""
    return (p * values).masked_fill_(p == 0, 0.0)
