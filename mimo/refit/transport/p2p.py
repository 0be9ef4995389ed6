"""Moves packed messages between the trainer's ranks and the engine's workers, point to point.

It has a process group of its own, in which the trainer's ranks come first. The default groups are not touched.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from mimo.refit import compat
from mimo.refit.rendezvous import MAX_POLL_S, POLL_S, RefitError

CLOSING_TAG = 1  # Transfers use 0.
# Seconds to wait after a broken transfer, until the process that broke it has published the reason.
REASON_S = 1.0


class Wire:
    """A process group of all trainer ranks and workers, or of the trainer's ranks alone.

    Args:
        store: store that all of them use.
        name: name of the group, unique in the store.
        rank: rank of this process in the group.
        names: name of each rank of the group, for errors.
        backend: `gloo` or `nccl`.
        timeout_s: time limit of one transfer.

    Raises:
        ValueError: the backend is NCCL, and there are no CUDA devices.
        RefitError: the others did not connect in time.
    """

    def __init__(self, store: Store, name: str, rank: int, names: Sequence[str], backend: str,
                 timeout_s: float) -> None:
        self.backend = backend
        self.timeout_s = timeout_s
        self._names = names
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError("refit backend 'nccl' needs CUDA devices; use 'gloo'")
        own = PrefixStore(f"wire/{name}", store)
        try:
            if backend == "gloo":
                self._group: Any = ProcessGroupGloo(own, rank, len(names), timedelta(seconds=timeout_s))
            else:
                from torch.distributed import ProcessGroupNCCL  # torch for CPUs does not have it

                # NCCL's own limit ends this process. It is longer than ours, which ends in an error with more
                # information.
                limit = timedelta(seconds=2 * timeout_s + 60)
                self._group = ProcessGroupNCCL(own, rank, len(names), compat.nccl_options(limit))
                # This first collective connects all ranks. Otherwise a transfer between some would wait for the others.
                self._group.allreduce([torch.zeros(1, device="cuda")]).wait()
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise RefitError(f"the {backend} group of {len(names)} trainer ranks and workers did not form within "
                             f"{timeout_s:g} s: {error}") from error

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
                 ) -> list[tuple[str, Any]]:
        """Start sending and receiving a chunk's contiguous messages. Every rank calls it for every chunk, in order.

        Args:
            sends: receiver's rank and message, uint8.
            receives: sender's rank and tensor for its message, uint8.

        Returns:
            Work handles to `wait` for, each with its name.
        """
        if self.backend == "gloo":
            return [(f"send of {message.numel()} bytes to {self._names[rank]}",
                     _started(self._group.send, message, rank)) for rank, message in sends] + [
                        (f"{message.numel()} bytes from {self._names[rank]}",
                         _started(self._group.recv, message, rank)) for rank, message in receives]
        if not sends and not receives:
            return []
        # Outside of one NCCL group, sends and receives would wait for each other.
        works: list[Any] = []
        with compat.one_nccl_group(self._group, works):
            for rank, message in sends:
                self._group.send([message], rank, 0)
            for rank, message in receives:
                self._group.recv([message], rank, 0)
        return [(f"{len(sends)} messages to and {len(receives)} from others", work) for work in works]

    def follow(self, works: Sequence[tuple[str, Any]], check: Callable[[], None]) -> list[tuple[str, Any]]:
        """Let what this thread does next with the messages of an `exchange` come after their transfers.

        With NCCL the current stream waits, and not the host, which can prepare the next chunk meanwhile. Gloo's
        messages are there when this returns.

        Returns:
            Work handles to `wait` for later, because limits are kept there, and most errors are found there.

        Raises:
            RefitError: a transfer has failed already, as in `wait`.
        """
        if self.backend == "gloo":
            self.wait(works, check)
            return []
        try:
            for _, work in works:
                work.wait()
        except RuntimeError:
            self.wait(works, check)  # raises it again, with the cause or the name of the transfer
        return list(works)

    def wait(self, works: Sequence[tuple[str, Any]], check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Wait for the transfers of an `exchange`.

        Args:
            works: result of `exchange`.
            check: called repeatedly; raises an error if another process has failed.
            grace_s: seconds to wait longer than usual.

        Raises:
            RefitError: a transfer failed or took longer than the limit.
        """
        wait = Wait(check, self.timeout_s + grace_s)
        for what, work in works:
            try:
                if self.backend == "gloo":
                    work.wait(timedelta(seconds=max(0.01, wait.deadline - time.monotonic())))
                else:
                    wait.until(what, work.is_completed)
                    work.wait()
            except RuntimeError as error:
                if isinstance(error, RefitError):
                    raise
                check()
                message = str(error)
                if "Timed out" in message:
                    raise RefitError(f"{what}: not done within {wait.limit_s:g} s") from error
                # The process that closed the connection may publish the reason a moment later.
                patience = time.monotonic() + REASON_S
                while time.monotonic() < patience:
                    time.sleep(MAX_POLL_S)
                    check()
                if "closed" in message or "reset" in message:
                    message = "the other side has closed the connection"
                raise RefitError(f"{what}: {message}") from error

    def release(self, check: Callable[[], None], grace_s: float = 0.0) -> None:
        """Give back the memory of a sync after its last chunk: there is none here."""

    def close(self) -> None:
        """End the group. A transfer in progress fails at once, here and on the other side."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):
            if self.backend == "nccl":
                group.abort()
            else:
                # Gloo closes the connections of a group only if a transfer takes too long, so one is made to. Otherwise
                # a waiting peer would wait until its own limit.
                group.recv_anysource([torch.empty(1, dtype=torch.uint8)], CLOSING_TAG).wait(timedelta(milliseconds=1))


class Wait:
    """The waits of one call, with a common deadline."""

    def __init__(self, check: Callable[[], None], limit_s: float) -> None:
        self._check, self.limit_s = check, limit_s
        self.deadline = time.monotonic() + limit_s

    def until(self, what: str, is_done: Callable[[], bool], missing: Callable[[], str] | None = None) -> None:
        """Wait until `is_done` returns True.

        Raises:
            RefitError: another process failed, or the deadline has passed; the error then says what is missing.
        """
        for turn in itertools.count():
            if is_done():
                return
            pause = min(MAX_POLL_S, POLL_S / 10 * 1.5 ** min(turn, 20))
            if pause == MAX_POLL_S:
                self._check()
            if time.monotonic() > self.deadline:
                raise RefitError(f"{what} did not come within {self.limit_s:g} s"
                                 + (f": not yet have {missing()}" if missing else ""))
            time.sleep(pause)


class _Broken:
    """A transfer that could not begin, because the connection was closed before."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        raise self._error


def _started(start: Callable[..., Any], message: torch.Tensor, rank: int) -> Any:
    try:
        return start([message], rank, 0)
    except RuntimeError as error:
        return _Broken(error)
