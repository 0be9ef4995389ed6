"""What both ends of a shared memory know and tell each other: where messages lie in it, and flags in a store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from mimo.refit.meeting import MAX_POLL_S, POLL_S, RefitError
from mimo.refit.messages import ALIGNMENT

# Chunks that the memory holds.
SLOTS = 2


@dataclass(frozen=True)
class Incoming:
    """What comes to a worker, and where each message lies in its staging memory.

    Attributes:
        chunks: of each chunk, trainer rank -> bytes.
    """

    chunks: list[dict[int, int]]

    @property
    def num_bytes(self) -> int:
        """Of the memory."""
        return self._start(SLOTS)

    def place(self, number: int, sender: int) -> slice:
        """Where a trainer rank's message of a chunk lies."""
        chunk = self.chunks[number]
        first = self._start(number % SLOTS) + sum(_aligned(chunk[each]) for each in chunk if each < sender)
        return slice(first, first + chunk[sender])

    def _start(self, slot: int) -> int:
        """Of a slot: each is as long as the longest of its chunks."""
        return sum(max((sum(map(_aligned, chunk.values())) for chunk in self.chunks[each::SLOTS]), default=0)
                   for each in range(slot))

    def as_json(self) -> list[list[list[int]]]:
        """As plain data."""
        return [sorted([sender, size] for sender, size in chunk.items()) for chunk in self.chunks]

    @classmethod
    def from_json(cls, plain: Sequence[Sequence[Sequence[int]]]) -> Incoming:
        """The inverse."""
        return cls([{sender: size for sender, size in chunk} for chunk in plain])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def ready(sync: int, worker: int, number: int) -> str:
    """The proxy's: a chunk lies there; with the memory's handle."""
    return f"{sync}/ready/{worker}/{number}"


def taken(sync: int, worker: int, number: int) -> str:
    """The worker's: it has a copy of the chunk."""
    return f"{sync}/taken/{worker}/{number}"


def released(sync: int, worker: int) -> str:
    """The worker's: it has the memory no longer."""
    return f"{sync}/released/{worker}"


class Flags:
    """Flags in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, flag: str, value: str = "set") -> None:
        """Show it to others."""
        with _reachable():
            self._store.set(flag, value)

    def has(self, flag: str) -> bool:
        """Whether somebody has set it."""
        with _reachable():
            return self._store.check([flag])

    def take(self, flag: str) -> str:
        """Its value; nobody else needs it."""
        with _reachable():
            value = self._store.get(flag).decode()
        self.drop(flag)
        return value

    def drop(self, flag: str) -> None:
        """Forget it."""
        with _reachable():
            self._store.delete_key(flag)


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RefitError(f"the refit store, which the trainer's first rank serves, is gone: {error}") from error


class Wait:
    """Waits of one call, which together take no longer than a limit."""

    def __init__(self, check: Callable[[], None], limit_s: float) -> None:
        self._check, self._limit_s = check, limit_s
        self._deadline = time.monotonic() + limit_s

    def until(self, what: str, is_done: Callable[[], bool], missing: Callable[[], str] | None = None) -> None:
        """Ask again and again.

        Raises:
            RefitError: somebody failed, or it was not so in time; it then says what is missing.
        """
        for turn in itertools.count():
            if is_done():
                return
            pause = min(MAX_POLL_S, POLL_S / 10 * 1.5 ** min(turn, 20))
            if pause == MAX_POLL_S:
                self._check()
            if time.monotonic() > self._deadline:
                raise RefitError(f"{what} did not come within {self._limit_s:g} s"
                                 + (f": not yet have {missing()}" if missing else ""))
            time.sleep(pause)
