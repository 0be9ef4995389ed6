"""Gathers the statuses of all ranks when one stalls, over the store that the process groups were made with.

The store needs no rank's main thread and no shared file system. Under torchrun it lives in the launcher, so a rank that
is stopped does not take it away; otherwise it lives in rank 0's process. All talk with it is on one thread, through a
connection of its own: a store that does not answer blocks that thread alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Literal, Protocol

from torch.distributed import DistError

from mimo.watchdog.status import RankProcess, RankStatus, status_from_json

# Seconds between looks at whether another rank has stalled; at whether all have answered.
POLL_S, GATHER_POLL_S = 1.0, 0.05
# Seconds that the writer waits for answers; after which another rank writes; and of the whole conversation.
ANSWERS_S, WRITER_S, TALK_S = 3.0, 8.0, 20.0
# Seconds without an answer of the store after which it is not waited for any longer.
STORE_TIMEOUT_S, SILENT_S = 5.0, 4.0
NUM_WRITERS = 2
CLOSE_S = 2.0

Statuses = Mapping[int, RankStatus]
Processes = Mapping[int, RankProcess]
Write = Callable[[Statuses, Processes], None]


class Store(Protocol):
    """The part of torch's stores that is used here; their stubs lack some of it."""

    def set_timeout(self, timeout: timedelta) -> None: ...  # noqa: D102

    def append(self, key: str, value: str) -> None: ...  # noqa: D102

    def check(self, keys: list[str]) -> bool: ...  # noqa: D102

    def add(self, key: str, value: int) -> int: ...  # noqa: D102

    def set(self, key: str, value: str) -> None: ...  # noqa: D102

    def get(self, key: str) -> bytes: ...  # noqa: D102


class StallStore:
    """This rank's end of the conversation about a stall.

    Args:
        store: a connection that nobody else uses, such as a clone of the default process group's store.
        process: of this rank.
        world_size: number of ranks.
        write: writes the summary; called on the one rank that is elected for it.
        holder: who holds the store, in words.
        run: tells this run from others on the same store; the same on all ranks.
    """

    def __init__(self, store: Store, process: RankProcess, world_size: int, write: Write, *, holder: str = "",
                 run: str = "") -> None:
        self.holder = holder
        self._store, self._process, self._world_size, self._write = store, process, world_size, write
        self._prefix = f"mimo/stall/{run}/"
        self._status: RankStatus | None = None
        self._asked, self._told, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._ended: Literal["finished", "failed"] = "finished"
        self._silent: tuple[RankProcess, ...] | None = None
        self._heard, self._writing = time.monotonic(), False
        self._on_stall: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._talk, name="stall store", daemon=True)

    def start(self, on_stall: Callable[[], None]) -> None:
        """Begin to look for stalls of other ranks; `on_stall` is called, on another thread, when there is one."""
        self._on_stall = on_stall
        self._thread.start()

    def conclude(self, status: RankStatus) -> tuple[RankProcess, ...] | None:
        """Answer with this rank's status and wait until the summary is out.

        Returns:
            Processes without an answer that this rank has to end, those of its host if it is the first there that
            answered; None if the store, or whoever was to write the summary, did not answer.
        """
        self._status = status
        self._asked.set()
        begin = time.monotonic()
        while not self._told.wait(GATHER_POLL_S):
            now = time.monotonic()
            if now - begin > TALK_S or (not self._writing and now - max(self._heard, begin) > SILENT_S):
                break
        return self._silent

    def close(self, *, failed: bool = False) -> None:
        """Stop looking, and tell that this rank has ended. A second call does nothing."""
        if not self._closed.is_set():
            self._ended = "failed" if failed else "finished"
        self._closed.set()
        self._asked.set()
        if self._thread.is_alive():
            # Not for ever: the store may have stopped answering.
            self._thread.join(CLOSE_S)

    def _talk(self) -> None:
        try:
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
            self._store.append(self._key("processes"), json.dumps(asdict(self._process)) + "\n")
            while not self._closed.is_set():
                if self._asked.wait(POLL_S) or self._has("stalled"):
                    break
            if self._closed.is_set():
                self._answer(RankStatus(self._process.rank, ended=self._ended))
                return
            self._on_stall()
            asked = self._asked.wait(TALK_S)
            if self._closed.is_set() and self._status is None:
                # It came to its end while another rank's stall was told.
                self._answer(RankStatus(self._process.rank, ended=self._ended))
            elif asked and self._status is not None:
                self._answer(self._status)
                self._silent = self._summarise()
        except DistError:
            # It is gone, with the launcher or with rank 0. `conclude` says so where it matters.
            pass
        finally:
            self._told.set()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _has(self, name: str) -> bool:
        return self._heard_of(self._store.check([self._key(name)]))

    def _heard_of[T](self, answer: T) -> T:
        self._heard = time.monotonic()
        return answer

    def _answer(self, status: RankStatus) -> None:
        self._store.append(self._key("answers"), status.to_json() + "\n")
        self._store.add(self._key("count"), 1)

    def _summarise(self) -> tuple[RankProcess, ...] | None:
        """Write the summary or wait for it; as `conclude`."""
        self._store.set(self._key("stalled"), "1")
        for writer in range(NUM_WRITERS):
            if self._store.add(self._key(f"writer/{writer}"), 1) == 1:
                tasks = self._gather_and_write()
                self._store.set(self._key("done"), json.dumps([[rank, asdict(process)] for rank, process in tasks]))
                return self._own(tasks)
            if self._wait_until(lambda: self._has("done"), WRITER_S):
                return self._own([(rank, RankProcess(**data))
                                  for rank, data in json.loads(self._store.get(self._key("done")))])
        return None

    def _own(self, tasks: list[tuple[int, RankProcess]]) -> tuple[RankProcess, ...]:
        return tuple(process for rank, process in tasks if rank == self._process.rank)

    def _gather_and_write(self) -> list[tuple[int, RankProcess]]:
        """Returns the processes without an answer, each with the rank that has to end it."""
        self._wait_until(lambda: self._heard_of(self._store.add(self._key("count"), 0)) >= self._world_size, ANSWERS_S)
        answers = [status_from_json(line) for line in self._lines("answers")]
        processes = {process.rank: process for process in (RankProcess(**json.loads(line))
                                                           for line in self._lines("processes"))}
        statuses = {status.rank: status for status in answers}
        self._writing = True
        self._write(statuses, processes)
        self._writing = False
        # Whoever answered while it was written ends by itself.
        answered = {status_from_json(line).rank for line in self._lines("answers")}
        first: dict[str, int] = {}
        for rank in sorted(rank for rank, status in statuses.items() if rank in processes and not status.ended):
            first.setdefault(processes[rank].host, rank)
        return [(first[process.host], process) for rank, process in processes.items()
                if rank not in answered and process.host in first]

    def _lines(self, name: str) -> list[bytes]:
        return self._store.get(self._key(name)).splitlines() if self._has(name) else []

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(GATHER_POLL_S)
        return True
