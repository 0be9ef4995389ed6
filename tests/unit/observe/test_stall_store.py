"""Ranks that talk over a store about a stall, here threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mimo.watchdog import gather as stall_store
from mimo.watchdog.gather import Processes, StallStore, Statuses
from mimo.watchdog.status import RankProcess, RankStatus

WORLD = 4
HOST = "host-a"


class Ranks:
    """The ends of all ranks, and what was written."""

    def __init__(self, count: int, write: Callable[[int], None] = lambda rank: None) -> None:
        self.server: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.written: list[tuple[int, Statuses, Processes]] = []
        self.called = {rank: threading.Event() for rank in range(count)}
        self.ends = {}
        for rank in range(count):
            def note(statuses: Statuses, processes: Processes, rank: int = rank) -> None:
                write(rank)
                self.written.append((rank, statuses, processes))
            self.ends[rank] = StallStore(self.server.clone(), RankProcess(rank, HOST, 100 + rank, 1), WORLD, note)
            self.ends[rank].start(self.called[rank].set)

    def conclude(self, ranks: list[int]) -> dict[int, tuple[RankProcess, ...] | None]:
        """Let the ranks give their statuses at the same time."""
        found = {}

        def one(rank: int) -> None:
            found[rank] = self.ends[rank].conclude(RankStatus(rank, iteration=rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_store, "POLL_S", 0.05)
    monkeypatch.setattr(stall_store, "ANSWERS_S", 0.5)
    monkeypatch.setattr(stall_store, "WRITER_S", 1.0)
    monkeypatch.setattr(stall_store, "SILENT_S", 1.0)
    monkeypatch.setattr(stall_store, "TALK_S", 5.0)


def test_one_rank_that_stalls_makes_all_answer_and_one_of_them_write() -> None:
    ranks = Ranks(WORLD)
    for rank in range(WORLD):
        ranks.ends[rank]._thread.join(0.1)
        assert not ranks.called[rank].is_set(), "nobody stalls yet"
    first = threading.Thread(target=ranks.conclude, args=([2],))
    first.start()
    for rank in (0, 1, 3):
        assert ranks.called[rank].wait(10), "told by the store"
    assert ranks.conclude([0, 1, 3]) == {0: (), 1: (), 3: ()}
    first.join()
    (_, statuses, processes), = ranks.written
    assert {rank: status.iteration for rank, status in statuses.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert {process.pid for process in processes.values()} == {100, 101, 102, 103}


def test_one_rank_of_the_host_has_to_end_a_process_that_does_not_answer() -> None:
    ranks = Ranks(WORLD)
    ranks.ends[3]._thread.join(0.2)
    assert ranks.conclude([0, 1, 2]) == {0: (RankProcess(3, HOST, 103, 1),), 1: (), 2: ()}
    (_, statuses, _), = ranks.written
    assert sorted(statuses) == [0, 1, 2]


def test_a_rank_that_has_closed_counts_as_one_that_has_left() -> None:
    ranks = Ranks(WORLD)
    ranks.ends[3].close()
    ranks.ends[3].close(failed=True)
    assert ranks.conclude([0, 1, 2]) == {0: (), 1: (), 2: ()}
    (_, statuses, _), = ranks.written
    assert [statuses[rank].ended for rank in range(WORLD)] == ["", "", "", "finished"]


def test_another_rank_writes_where_the_first_writer_does_not_come_to_its_end() -> None:
    stuck, lock = threading.Event(), threading.Lock()
    tried: list[int] = []

    def write(rank: int) -> None:
        with lock:
            tried.append(rank)
            first = len(tried) == 1
        if first:
            stuck.wait(3)

    ranks = Ranks(WORLD, write)
    assert [found for rank, found in ranks.conclude([0, 1, 2, 3]).items() if rank != tried[0]] == [()] * 3
    stuck.set()
    assert len(tried) == 2


def test_a_store_that_does_not_answer_or_is_gone_leaves_nobody_waiting() -> None:
    class Silent:
        def set_timeout(self, limit: timedelta) -> None:
            """Never return, like a store whose host is stopped."""
            threading.Event().wait()

    class Gone:
        def set_timeout(self, limit: timedelta) -> None:
            raise dist.DistNetworkError("connection reset")

    stores: list[Any] = [Silent(), Gone()]
    for store in stores:
        end = StallStore(store, RankProcess(0, HOST, 100, 1), WORLD, lambda statuses, processes: None)
        end.start(lambda: None)
        assert end.conclude(RankStatus(0)) is None
        end.close()


def test_a_rank_that_answers_while_the_summary_is_written_is_not_ended() -> None:
    late: list[threading.Thread] = []

    def write(_rank: int) -> None:
        late.append(threading.Thread(target=ranks.conclude, args=([3],)))
        late[0].start()
        deadline = time.monotonic() + 10
        while ranks.server.add("mimo/stall//count", 0) < WORLD and time.monotonic() < deadline:
            time.sleep(0.01)

    ranks = Ranks(WORLD, write)
    told = ranks.conclude([0, 1, 2])
    late[0].join()
    ((_, statuses, _),) = ranks.written
    assert sorted(statuses) == [0, 1, 2] and set(told.values()) == {()}


def test_a_rank_that_comes_to_its_end_while_a_stall_is_told_has_left() -> None:
    ranks = Ranks(WORLD)

    def end() -> None:
        assert ranks.called[3].wait(10)
        ranks.ends[3].close(failed=True)

    ending = threading.Thread(target=end)
    ending.start()
    told = ranks.conclude([0, 1, 2])
    ending.join()
    ((_, statuses, _),) = ranks.written
    assert statuses[3].ended == "failed" and set(told.values()) == {()}
