"""Softmax over a vocabulary whose columns are divided over a tensor-parallel group: what log-probs and entropy share.

Everything is computed in float32 (float64 for float64 logits), a few rows at a time, so that what is held beside the
logits themselves is a number or two a token and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Logits that are converted at a time: 256 MiB in float32.
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary on this rank, and how logits become a distribution.

    Attributes:
        vocab_size: true number of tokens; columns from it on are padding and take no part.
        group: tensor-parallel group, whose rank r holds the r-th of equal ranges of columns; None: all are here.
        temperature: logits are divided by it.

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
        """Token id of the first of this rank's `num_columns` columns, padding included."""
        return 0 if self.group is None else self.group.rank() * num_columns

    def num_true_columns(self, num_columns: int) -> int:
        """How many of this rank's columns stand for tokens; possibly none."""
        size = num_columns if self.group is None else num_columns * self.group.size()
        assert size >= self.vocab_size, f"{size} columns for a vocabulary of {self.vocab_size}"
        return min(max(self.vocab_size - self.first_column(num_columns), 0), num_columns)

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """`values` over the group, in place. Collective."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values


def compute_dtype(logits: torch.Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Ranges of rows that are small enough to be converted at once."""
    step = max(CHUNK_ELEMENTS // max(num_columns, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def scaled(logits: torch.Tensor, rows: slice, shard: VocabShard) -> torch.Tensor:
    """This rank's true columns of some rows over the temperature, in the dtype of computation.

    Args:
        logits: `[rows, columns]`.
        rows: which.
        shard: columns and temperature.

    Returns:
        A view of the logits where nothing changes: not to be written to.
    """
    own = logits[rows, : shard.num_true_columns(logits.size(-1))].to(compute_dtype(logits))
    return own if shard.temperature == 1.0 else own / shard.temperature


@torch.no_grad()
def log_normaliser(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """log(sum(exp(logits / temperature))) over the true vocabulary, without gradient. Collective over the group.

    Log-probs and entropy of the same logits can share it.

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
