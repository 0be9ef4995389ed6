"""Messages through shared memory: every chunk whole and in order, memory gone after each sync, and who is late."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError, Rendezvous
from mimo.refit.transport import ipc
from mimo.refit.transport.base import Opening, Transport, proxies
from mimo.refit.transport.ipc import HOST_NAME, SLOTS, Incoming, TrainerEnd, WorkerEnd, make_staging, open_staging
from tests.support.spawn import forkserver_context

CPU = torch.device("cpu")
TRAINERS = 2
# Of each worker, of each chunk: trainer rank -> bytes. Sizes are odd; rank 0 is proxy of the first and third worker.
TABLES: list[list[dict[int, int]]] = [
    [{0: 1000, 1: 17}, {}, {1: 3}, {0: 40, 1: 5000}, {0: 1}, {0: 2, 1: 2}],
    [{1: 9}, {0: 100}, {0: 70, 1: 70}, {}, {0: 4000, 1: 1}, {1: 800}],
    [{}, {}, {}, {}, {}, {0: 5, 1: 7}]]
NAMES = tuple(f"trainer rank {rank}" for rank in range(TRAINERS)) + tuple(f"worker {each}" for each in range(3))


def nothing_failed() -> None:
    """Nobody has said anything."""


def content(sync: int, number: int, sender: int, rank: int, size: int) -> torch.Tensor:
    """Return a message, unlike every other."""
    seed = ((sync * 31 + number) * 31 + sender) * 31 + rank
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def mappings() -> int:
    """Shared memory that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(HOST_NAME)


def descriptors() -> int:
    """Files that this process has open on shared memory."""
    return sum(HOST_NAME in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


def ends(timeout_s: float = 20.0) -> list[Transport]:
    """Two trainer ranks and three workers, connected."""
    store = HashStore()
    options = RefitOptions(backend="ipc", dtype="float32", timeout_s=timeout_s)

    def connect(rank: int) -> Transport:
        incoming = TABLES[rank - TRAINERS] if rank >= TRAINERS else ()
        rendezvous = Rendezvous(store, NAMES[rank], timeout_s)
        return Opening(rendezvous, "set-up", options, rank, TRAINERS, CPU, NAMES).finish(incoming)

    with ThreadPoolExecutor(len(NAMES)) as threads:
        return list(threads.map(connect, range(len(NAMES))))


def send_all(end: Transport, rank: int, syncs: Sequence[int], window: int = 2) -> None:
    """Send like a trainer, with several chunks under way at a time."""
    for sync in syncs:
        flying: list[Any] = []
        for number in range(len(TABLES[0])):
            messages = [(TRAINERS + worker, content(sync, number, rank, TRAINERS + worker, table[number][rank]))
                        for worker, table in enumerate(TABLES) if rank in table[number]]
            flying.append((end.exchange(messages[::-1], []), messages))
            if len(flying) > window:
                end.wait(flying.pop(0)[0], nothing_failed)
        for works, _ in flying:
            end.wait(works, nothing_failed)
        flying.clear()
        end.release(nothing_failed)


def take_all(end: Transport, rank: int, syncs: Sequence[int], pause_s: float = 0.0) -> int:
    """Receive like a worker and count the messages that are right."""
    right = 0
    for sync in syncs:
        for number, chunk in enumerate(TABLES[rank - TRAINERS]):
            into = {sender: torch.empty(size, dtype=torch.uint8) for sender, size in chunk.items()}
            end.wait(end.exchange([], list(into.items())), nothing_failed)
            right += sum(torch.equal(each, content(sync, number, sender, rank, chunk[sender]))
                         for sender, each in into.items())
            time.sleep(pause_s)
        end.release(nothing_failed)
    return right


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_every_message_of_three_syncs_arrives(pause_s: float) -> None:
    made, syncs = ends(), range(3)
    with ThreadPoolExecutor(len(NAMES)) as threads:
        sends = [threads.submit(send_all, made[rank], rank, syncs) for rank in range(TRAINERS)]
        takes = [threads.submit(take_all, made[rank], rank, syncs, pause_s if rank == 3 else 0.0)
                 for rank in range(TRAINERS, len(NAMES))]
        for each in sends:
            each.result(30)
        assert [each.result(30) for each in takes] == [len(syncs) * sum(map(len, table)) for table in TABLES]
    assert mappings() == descriptors() == 0
    for end in made:
        end.close()


def test_memory_is_there_during_a_sync_only() -> None:
    store = HashStore()
    table = Incoming([{0: 100}, {0: 100}])
    trainer = TrainerEnd(store, 0, {1: 0}, {1: table}, None, CPU, 5.0, ("trainer rank 0", "worker 0"))
    worker = WorkerEnd(store, 1, "trainer rank 0", table, CPU, 5.0)
    keys = store.num_keys()
    assert mappings() == 0
    for _ in range(2):
        for number in range(2):
            trainer.wait(trainer.exchange([(1, torch.full((100,), number, dtype=torch.uint8))], []), nothing_failed)
            assert mappings() == 1 + (number > 0) and descriptors()
            into = torch.empty(100, dtype=torch.uint8)
            worker.wait(worker.exchange([], [(0, into)]), nothing_failed)
            assert (into == number).all() and mappings() == 2
        worker.release(nothing_failed)
        assert mappings() == 1
        trainer.release(nothing_failed)
        assert mappings() == descriptors() == 0
    assert store.num_keys() == keys  # flags do not pile up


def test_a_worker_that_takes_nothing_out_is_named() -> None:
    store = HashStore()
    table = Incoming([{0: 10}] * 3)
    trainer = TrainerEnd(store, 0, {1: 0}, {1: table}, None, CPU, 0.3, ("trainer rank 0", "worker 0"))
    works = [trainer.exchange([(1, torch.ones(10, dtype=torch.uint8))], []) for _ in range(3)]
    trainer.wait(works[0], nothing_failed)
    trainer.wait(works[1], nothing_failed)
    with pytest.raises(RefitError, match=r"room for chunk 2 did not come within 0\.3 s: .* worker 0 taken"):
        trainer.wait(works[2], nothing_failed)
    trainer.close()
    assert mappings() == descriptors() == 0


def test_a_worker_that_keeps_the_memory_is_named() -> None:
    store = HashStore()
    table = Incoming([{0: 10}])
    trainer = TrainerEnd(store, 0, {1: 0}, {1: table}, None, CPU, 0.3, ("trainer rank 0", "worker 0"))
    trainer.wait(trainer.exchange([(1, torch.ones(10, dtype=torch.uint8))], []), nothing_failed)
    with pytest.raises(RefitError, match="worker 0 released the shared memory"):
        trainer.release(nothing_failed)
    trainer.close()
    assert mappings() == descriptors() == 0


def test_a_proxy_that_hands_nothing_over_is_named() -> None:
    worker = WorkerEnd(HashStore(), 1, "trainer rank 7", Incoming([{0: 10}]), CPU, 0.3)
    works = worker.exchange([], [(0, torch.empty(10, dtype=torch.uint8))])
    with pytest.raises(RefitError, match=r"chunk 0 from trainer rank 7 did not come within 0\.3 s"):
        worker.wait(works, nothing_failed)


def test_a_failure_of_somebody_else_ends_every_wait() -> None:
    def failed() -> None:
        raise RefitError("sync 1 failed: worker 1: out of memory")

    store, table = HashStore(), Incoming([{0: 10}] * 3)
    trainer = TrainerEnd(store, 0, {1: 0}, {1: table}, None, CPU, 1000.0, ("trainer rank 0", "worker 0"))
    works = [trainer.exchange([(1, torch.ones(10, dtype=torch.uint8))], []) for _ in range(3)]
    trainer.wait([each for both in works[:2] for each in both], nothing_failed)
    worker = WorkerEnd(HashStore(), 1, "trainer rank 0", table, CPU, 1000.0)
    into = [(0, torch.empty(10, dtype=torch.uint8))]
    for wait in (lambda: trainer.wait(works[2], failed), lambda: worker.wait(worker.exchange([], into), failed)):
        with pytest.raises(RefitError, match="out of memory"):
            wait()
    trainer.close()


def test_ends_that_close_amid_a_sync_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "REASON_S", 20.0)
    store, table = HashStore(), Incoming([{0: 10}] * 3)
    trainer = TrainerEnd(store, 0, {1: 0}, {1: table}, None, CPU, 20.0, ("trainer rank 0", "worker 0"))
    worker = WorkerEnd(store, 1, "trainer rank 0", table, CPU, 20.0)
    trainer.wait(trainer.exchange([(1, torch.ones(10, dtype=torch.uint8))], []), nothing_failed)
    worker.wait(worker.exchange([], [(0, torch.empty(10, dtype=torch.uint8))]), nothing_failed)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(trainer.close)
        time.sleep(0.1)
        assert not closing.done()  # the worker still has it
        worker.close()
        closing.result(10)
    assert mappings() == descriptors() == 0


def _hold(connection: Any, handle: str = "") -> None:
    """Another process: maps memory, or makes some, and waits to be killed."""
    staging = open_staging(handle, 100, CPU) if handle else make_staging(100, CPU)
    staging.memory[0] = 7
    connection.send(staging.handle)
    connection.recv()


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[Any, str]]]:
    """Start a process that holds memory: the process, and the memory's handle."""
    context, running = forkserver_context(["mimo.refit.transport.ipc"]), []

    def start(*arguments: Any) -> tuple[Any, str]:
        here, there = context.Pipe()
        process = context.Process(target=_hold, args=(there, *arguments))
        process.start()
        running.append((process, here))
        assert here.poll(60)
        return process, here.recv()

    yield start
    for process, _ in running:
        process.kill()
        process.join()


def test_memory_of_processes_that_are_killed_is_gone(started: Callable[..., tuple[Any, str]]) -> None:
    own = make_staging(100, CPU)
    worker, _ = started(own.handle)
    assert int(own.memory[0]) == 7
    worker.kill()
    worker.join()
    own.release()
    assert mappings() == descriptors() == 0
    trainer, handle = started()
    assert not [each for each in os.listdir("/dev/shm") if HOST_NAME in each]
    mapped = open_staging(handle, 100, CPU)
    trainer.kill()
    trainer.join()
    assert int(mapped.memory[0]) == 7  # as long as anybody has it
    mapped.release()
    assert mappings() == 0
    with pytest.raises(RefitError, match="cannot be opened"):
        open_staging(handle, 100, CPU)


def test_every_worker_has_the_rank_on_its_gpu() -> None:
    assert proxies(["GPU a", "GPU b"], ["GPU b", "GPU a", "GPU b"]) == [1, 0, 1]
    assert proxies(["GPU a", "GPU a", "GPU b"], ["GPU b"]) == [2]
    assert proxies(["host a", "host b", "host b"], ["host b", "host a", "host b"]) == [1, 0, 1]
    assert proxies(["host a", "host a"], ["host a"] * 3) == [0, 1, 0]
    with pytest.raises(RefitError) as error:
        proxies(["GPU a", "GPU b", "GPU b"], ["GPU c", "GPU a", "GPU b"])
    assert str(error.value) == (
        "refit backend 'ipc' needs one trainer rank on each worker's GPU: worker 0 is on GPU c, where there is none; "
        "worker 2 is on GPU b, where there are trainer ranks 1, 2; the trainer has rank 0 on GPU a, rank 1 on GPU b, "
        "rank 2 on GPU b")


CHUNKS = st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, 100), max_size=4), max_size=6)


@settings(max_examples=100, deadline=None)
@given(CHUNKS)
def test_messages_of_two_chunks_lie_apart(chunks: list[dict[int, int]]) -> None:
    table = Incoming(chunks)
    assert Incoming.from_json(table.as_json()) == table
    for number in range(len(chunks)):
        used: set[int] = set()
        for near in range(number, min(number + SLOTS, len(chunks))):
            for sender, size in chunks[near].items():
                place = table.place(near, sender)
                own = set(range(place.start, place.stop))
                assert len(own) == size and not own & used and place.stop <= table.num_bytes
                assert place.start % 16 == 0
                used |= own
