"""Figures of a batch as sums and maxima, which add up over microbatches and ranks before anything is divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Totals:
    """Named float64 scalars of one microbatch, of several, or of the global batch.

    Attributes:
        sums: what adds up, counts among them.
        maxima: what the largest counts of; not below 0.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, sums: Iterable[str], maxima: Iterable[str], device: torch.device) -> Totals:
        """Those of no tokens, for a rank that computes no losses."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(dict.fromkeys(sums, zero), dict.fromkeys(maxima, zero))

    def __or__(self, other: Totals) -> Totals:
        """Both; the names differ."""
        assert not self.sums.keys() & other.sums.keys() and not self.maxima.keys() & other.maxima.keys()
        return Totals(self.sums | other.sums, self.maxima | other.maxima)

    def over_group(self, group: dist.ProcessGroup | None = None) -> Totals:
        """Those of all ranks together: two collectives over the group, the whole world by default.

        Every rank must have the same names; ranks that hold copies of the same tokens must not all bring them.
        """
        return Totals(_reduced(self.sums, dist.ReduceOp.SUM, group), _reduced(self.maxima, dist.ReduceOp.MAX, group))

    def mean(self, name: str, count: str = "tokens") -> float:
        """A sum over a count; 0 where nothing was counted."""
        divisor = self.sums[count].item()
        return self.sums[name].item() / divisor if divisor else 0.0


def add_totals(parts: Sequence[Totals]) -> Totals:
    """Those of several microbatches together; all have the same names."""
    assert parts, "no microbatch"
    for part in parts:
        assert part.sums.keys() == parts[0].sums.keys() and part.maxima.keys() == parts[0].maxima.keys()
    return Totals(
        {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums},
        {name: torch.stack([part.maxima[name] for part in parts]).amax() for name in parts[0].maxima},
    )


def _reduced(
    values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked, op=op, group=group)
    return dict(zip(names, stacked, strict=True))
