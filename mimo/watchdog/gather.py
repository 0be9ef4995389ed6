"""Gathers the statuses of all ranks when one stalls, through the store with which the process groups were made.

The store needs no rank's main thread and no shared file system. Under torchrun it is part of the launcher, so that it
survives a rank that is stopped; otherwise it is in rank 0's process. Only one thread talks to it, through a connection
of its own. If the store does not answer, only that thread blocks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import DistError

from mimo.watchdog.status import RankProcess, RankStatus, status_from_json

# Seconds between checks for a stall of another rank, and between checks whether all ranks have answered.
POLL_S, GATHER_POLL_S = 1.0, 0.05
# Seconds that the writer of the summary waits for answers, seconds after which another rank takes its place, and the
# limit for the whole conversation.
ANSWERS_S, WRITER_S, TALK_S = 3.0, 8.0, 20.0
# The store's own timeout, and the seconds without an answer after which a rank gives up on the store.
STORE_TIMEOUT_S, SILENT_S = 5.0, 4.0
NUM_WRITERS = 2
CLOSE_S = 2.0

Statuses = Mapping[int, RankStatus]
Processes = Mapping[int, RankProcess]
Write = Callable[[Statuses, Processes], None]


class StallStore:
    """This rank's end of the conversation about a stall.

    Args:
        store: a store of torch, through a connection that nobody else uses, such as a clone of the default process
            group's; for a run of one rank, a `HashStore`.
        process: process of this rank.
        world_size: number of ranks.
        write: writes the summary; called on the first rank to arrive, and on another one if that hangs.
        holder: the process that holds the store, in words.
        run: distinguishes this run from others on the same store; the same on all ranks.
    """

    def __init__(self, store: Any, process: RankProcess, world_size: int, write: Write, *, holder: str = "",
                 run: str = "") -> None:
        self.holder = holder
        self._store, self._process, self._world_size, self._write = store, process, world_size, write
        self._prefix = f"mimo/stall/{run}/"
        self._status: RankStatus | None = None
        self._asked, self._concluded, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._ended: Literal["finished", "failed"] = "finished"
        self._silent: tuple[RankProcess, ...] | None = None
        self._heard, self._writing = time.monotonic(), False
        self._on_stall: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._talk, name="stall store", daemon=True)

    def start(self, on_stall: Callable[[], None]) -> None:
        """Begin to watch for stalls of other ranks. `on_stall` is called on another thread when there is one."""
        self._on_stall = on_stall
        self._thread.start()

    def conclude(self, status: RankStatus) -> tuple[RankProcess, ...] | None:
        """Answer with this rank's status and wait until the summary is written.

        Returns:
            Processes that did not answer and that this rank has to end: those of its host, if it is the first rank
            there that answered. None if the store or the writer of the summary did not answer.
        """
        self._status = status
        self._asked.set()
        begin = time.monotonic()
        while not self._concluded.wait(GATHER_POLL_S):
            now = time.monotonic()
            if now - begin > TALK_S or (not self._writing and now - max(self._heard, begin) > SILENT_S):
                break
        return self._silent

    def close(self, *, failed: bool = False) -> None:
        """Stop watching and record that this rank has ended. A second call does nothing."""
        if not self._closed.is_set():
            self._ended = "failed" if failed else "finished"
        self._closed.set()
        self._asked.set()
        if self._thread.is_alive():
            # With a limit, because the store may no longer answer.
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
                # This rank ended its run while another one reported a stall.
                self._answer(RankStatus(self._process.rank, ended=self._ended))
            elif asked and self._status is not None:
                self._answer(self._status)
                self._silent = self._summarise()
        except DistError:
            # The store is gone with the launcher or rank 0. `conclude` returns None then.
            pass
        finally:
            self._concluded.set()

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
        """Write the summary, or wait until another rank has; returns the same as `conclude`."""
        self._store.set(self._key("stalled"), "1")
        # The first rank to arrive writes. If it hangs, another one takes its place.
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
        """Write the summary. Return the processes that did not answer, each with the rank that has to end it."""
        self._wait_until(lambda: self._heard_of(self._store.add(self._key("count"), 0)) >= self._world_size, ANSWERS_S)
        answers = [status_from_json(line) for line in self._lines("answers")]
        processes = {process.rank: process for process in (RankProcess(**json.loads(line))
                                                           for line in self._lines("processes"))}
        statuses = {status.rank: status for status in answers}
        self._writing = True
        self._write(statuses, processes)
        self._writing = False
        # Ranks that answered while the summary was written end by themselves.
        answered = {status_from_json(line).rank for line in self._lines("answers")}
        first: dict[str, int] = {}
        for rank in sorted(rank for rank, status in statuses.items() if rank in processes and not status.ended):
            first.setdefault(processes[rank].host, rank)
        return [(first[process.host], process) for rank, process in processes.items()
                if rank not in answered and process.host in first]

    def _lines(self, name: str) -> list[bytes]:
        lines: list[bytes] = self._store.get(self._key(name)).splitlines() if self._has(name) else []
        return lines

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(GATHER_POLL_S)
        return True
