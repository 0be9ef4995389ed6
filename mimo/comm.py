"""Sends Python objects from rank to rank through host memory, and raises an error of one rank on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mimo.grid.groups import Grids
from mimo.watchdog.process_exit import ReportedElsewhereError


def gather(grids: Grids, value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order, on every rank. Collective over the world."""
    values: list[Any] = [None] * grids.layout.world_size
    dist.all_gather_object(values, value, group=grids.host)
    return values


def gather_at(grids: Grids, value: Any, rank: int) -> list[Any] | None:
    """Return every rank's `value`, in rank order, on `rank`, and None on the others. Collective over the world."""
    values: list[Any] | None = [None] * grids.layout.world_size if grids.rank == rank else None
    dist.gather_object(value, values, dst=rank, group=grids.host)
    return values


def gather_results(grids: Grids, make: Callable[[], Any]) -> list[Any]:
    """Call a function on every rank and return all results, in rank order. Collective over the world.

    An error on one rank stops all ranks at once.

    Raises:
        ValueError: `make` raised it, see `raise_on_any_rank`.
        ReportedElsewhereError: `make` raised it, or another error, on another rank.
        Exception: whatever else `make` raised on this rank.
    """
    value, error = None, None
    try:
        value = make()
    except ValueError as problem:
        error = str(problem)
    except Exception as unknown:  # The other ranks wait for this one, so they have to learn of any error.
        gather(grids, (None, f"{type(unknown).__name__}: {unknown}"))
        raise
    everyone = gather(grids, (value, error))
    raise_known_errors(grids, [message for _, message in everyone])
    return [result for result, _ in everyone]


def broadcast_object(grids: Grids, value: Any) -> Any:
    """Return rank 0's `value` on every rank. Collective over the world."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=grids.host)
    return box[0]


def broadcast_result[T](grids: Grids, make: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result on every rank. Collective over the world.

    Raises:
        ValueError: on rank 0: `make` raised it, or an OSError.
        ReportedElsewhereError: the same, on the other ranks.
    """
    result, error = None, None
    if grids.rank == 0:
        try:
            result = make()
        except (ValueError, OSError) as problem:
            error = str(problem)
    result, error = broadcast_object(grids, (result, error))
    raise_known_errors(grids, [error])
    return result


def broadcast_outcome(grids: Grids, value: Any, failure: Exception | None) -> Any:
    """Return rank 0's `value` on every rank, unless rank 0 has failed. Collective over the world.

    All ranks go on together from a failure, so that they can try again.

    Raises:
        Exception: on rank 0: its failure.
        ReportedElsewhereError: on the other ranks.
    """
    value, has_failed = broadcast_object(grids, (value, failure is not None))
    if failure is not None:
        raise failure
    if has_failed:
        raise ReportedElsewhereError("rank 0 reports what is wrong")
    return value


def raise_on_any_rank(grids: Grids, error: str | None) -> None:
    """Raise on every rank if any has an error.

    Raises:
        ValueError: on the first rank that has one, followed by different errors of the others.
        ReportedElsewhereError: on the other ranks.
    """
    raise_known_errors(grids, gather(grids, error))


@contextmanager
def shared_errors(grids: Grids) -> Iterator[None]:
    """Context whose ValueError on any rank is raised on every rank, by `raise_on_any_rank`. Collective at its end."""
    error = None
    try:
        yield
    except ValueError as problem:
        error = str(problem)
    raise_on_any_rank(grids, error)


def raise_known_errors(grids: Grids, errors: list[str | None]) -> None:
    """Raise like `raise_on_any_rank`, with errors in rank order that every rank knows already."""
    found = [rank for rank, message in enumerate(errors) if message is not None]
    if not found:
        return
    if grids.rank != found[0]:
        raise ReportedElsewhereError(f"rank {found[0]} reports what is wrong")
    message = "\n".join(dict.fromkeys(message for message in errors if message is not None))
    raise ValueError(message)


class HostChannel:
    """Sends Python objects from rank to rank, in order for each pair. Only one thread of a rank may use it.

    Args:
        group: gloo group of the whole world.
        tag: distinguishes this channel from others on the group; the same on all ranks.

    Attributes:
        waits_for: ranks for which this rank waits now, for stall reports.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group = group
        self._tag = tag
        self._pending: list[tuple[dist.Work, torch.Tensor, int]] = []
        self.waits_for: tuple[int, ...] = ()

    def send(self, rank: int, value: Any) -> None:
        """Start sending; `flush` waits for it."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        for tensor in (size, payload):
            work = dist.isend(tensor, rank, group=self._group, tag=self._tag)
            assert work is not None, "the sender is a member of the group"
            self._pending.append((work, tensor, rank))

    def flush(self) -> None:
        """Wait until everything sent has been received."""
        while self._pending:
            work, _, rank = self._pending[0]
            self.waits_for = (rank,)
            work.wait()
            self._pending.pop(0)
        self.waits_for = ()

    def receive(self, rank: int) -> Any:
        """Wait for the next message of `rank` and return it."""
        self.waits_for = (rank,)
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._group, tag=self._tag)
        payload = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.recv(payload, rank, group=self._group, tag=self._tag)
        self.waits_for = ()
        return pickle.loads(payload.numpy().tobytes())
