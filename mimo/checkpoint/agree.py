"""Errors that every rank learns of, so that all stop for the reason that one of them has seen."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mimo.grid.groups import Grids
from mimo.observe.errors import ReportedElsewhereError


def gather(grids: Grids, value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    values: list[Any] = [None] * grids.layout.world_size
    dist.all_gather_object(values, value, group=grids.host)
    return values


def from_first_rank(grids: Grids, value: Any) -> Any:
    """`value` of rank 0."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=grids.host)
    return box[0]


def raise_together(grids: Grids, error: str | None) -> None:
    """Raise on every rank if any has an error.

    Raises:
        ValueError: on the first rank that has one; with what the others say where that differs.
        ReportedElsewhereError: on the other ranks.
    """
    raise_any(grids, gather(grids, error))


def raise_any(grids: Grids, errors: list[str | None]) -> None:
    """`raise_together` of errors, in rank order, that every rank knows already."""
    found = [rank for rank, message in enumerate(errors) if message is not None]
    if not found:
        return
    if grids.rank != found[0]:
        raise ReportedElsewhereError(f"rank {found[0]} reports what is wrong")
    message = "\n".join(dict.fromkeys(message for message in errors if message is not None))
    raise ValueError(message)
