"""Moving packed messages between the trainer's ranks and the engine's workers, point to point.

The process group is one of its own: neither side's default group is touched, and the trainer's ranks come first in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from mimo.refit import compat
from mimo.refit.rendezvous import MAX_POLL_S, POLL_S, RefitError

BACKENDS = ("gloo", "nccl")
CLOSING_TAG = 1  # transfers have 0
# Seconds after a broken transfer within which whoever broke it has said why.
REASON_S = 1.0


class Wire:
    """A process group of all trainer ranks and workers.

    Args:
        store: connected to all of them.
        name: unique among the groups of a store.
        rank: of this process among all.
        world_size: trainer ranks and workers together.
        backend: `gloo` or `nccl`.
        timeout_s: of one transfer.
        names: what each rank is called in messages.

    Raises:
        ValueError: an unknown backend, or NCCL without CUDA devices.
        RefitError: the others did not come.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int, backend: str, timeout_s: float,
                 names: Sequence[str] = ()) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"refit backend {backend!r}: known are {', '.join(BACKENDS)}")
        self.backend = backend
        self.timeout_s = timeout_s
        self._rank, self._names = rank, names or [f"rank {each}" for each in range(world_size)]
        own = PrefixStore(f"wire/{name}", store)
        try:
            # NCCL's is longer than ours, which ends in an error that says more than the end of this process.
            limit = timeout_s if backend == "gloo" else 2 * timeout_s + 60
            self._group = _open(own, rank, world_size, backend, timedelta(seconds=limit))
            if backend == "nccl":
                # Its first collective connects everybody; a transfer of a few would wait for the others.
                self._group.allreduce([torch.zeros(1, device="cuda")]).wait()
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise RefitError(f"the {backend} group of {world_size} trainer ranks and workers did not form within "
                             f"{timeout_s:g} s: {error}") from error

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
                 ) -> list[tuple[str, Any]]:
        """Start sending and receiving contiguous messages; the works to `wait` for, each with its name.

        Args:
            sends: rank and message, uint8.
            receives: rank and where its message goes, uint8.
        """
        if self.backend == "gloo":
            return [(f"send of {message.numel()} bytes to {self._names[rank]}",
                     _started(self._group.send, message, rank)) for rank, message in sends] + [
                        (f"{message.numel()} bytes from {self._names[rank]}",
                         _started(self._group.recv, message, rank)) for rank, message in receives]
        if not sends and not receives:
            return []
        # NCCL needs all of an exchange in one group, or sends and receives wait for each other.
        works: list[Any] = []
        with compat.one_nccl_group(self._group, works):
            for rank, message in sends:
                self._group.send([message], rank, 0)
            for rank, message in receives:
                self._group.recv([message], rank, 0)
        return [(f"{len(sends)} messages to and {len(receives)} from others", work) for work in works]

    def wait(self, works: Sequence[tuple[str, Any]], check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Wait for works.

        Args:
            works: of `exchange`.
            check: raises where somebody has failed meanwhile; asked again and again.
            grace_s: seconds to wait beyond the limit.

        Raises:
            RefitError: a transfer failed or took longer than the limit.
        """
        limit_s = self.timeout_s + grace_s
        deadline = time.monotonic() + limit_s
        for what, work in works:
            try:
                if self.backend == "gloo":
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
                else:
                    _poll(work, what, deadline, check, limit_s)
            except RuntimeError as error:
                if isinstance(error, RefitError):
                    raise
                check()
                message = str(error)
                if "Timed out" in message:
                    raise RefitError(f"{what}: not done within {limit_s:g} s") from error
                _hear(check)
                if "closed" in message or "reset" in message:
                    message = "the other side has closed the connection"
                raise RefitError(f"{what}: {message}") from error

    def release(self, check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Do nothing: a group takes nothing for a sync that it would have to give back."""

    def close(self) -> None:
        """End the group; a transfer in progress fails at once, here and on the other side."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):
            if self.backend == "nccl":
                group.abort()
            else:
                # Gloo closes all connections of a group in which a transfer takes too long, and only then; a peer that
                # waits for what never comes would wait until its own limit.
                group.recv_anysource([torch.empty(1, dtype=torch.uint8)], CLOSING_TAG).wait(timedelta(milliseconds=1))


def _open(store: Store, rank: int, world_size: int, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return ProcessGroupGloo(store, rank, world_size, timeout)
    if not torch.cuda.is_available():
        raise ValueError("refit backend 'nccl' needs CUDA devices; use 'gloo'")
    from torch.distributed import ProcessGroupNCCL

    return ProcessGroupNCCL(store, rank, world_size, compat.nccl_options(timeout))


class _Broken:
    """A transfer that could not begin: the connection was closed before."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        raise self._error


def _started(start: Callable[..., Any], message: torch.Tensor, rank: int) -> Any:
    try:
        return start([message], rank, 0)
    except RuntimeError as error:
        return _Broken(error)


def _hear(check: Callable[[], None]) -> None:
    """Wait a moment for the reason of a closed connection: it may be published after the connection is closed."""
    deadline = time.monotonic() + REASON_S
    while time.monotonic() < deadline:
        time.sleep(MAX_POLL_S)
        check()


def _poll(work: Any, what: str, deadline: float, check: Callable[[], None], timeout_s: float) -> None:
    pause = POLL_S / 10
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RefitError(f"{what} did not come within {timeout_s:g} s")
        if pause >= MAX_POLL_S:
            check()
        time.sleep(pause)
        pause = min(MAX_POLL_S, pause * 1.5)
    work.wait()
