"""Messages between ranks on threads: whoever leaves ends the others' transfers, and each error says with whom."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError, Rendezvous
from mimo.refit.transport.base import Opening
from mimo.refit.transport.p2p import Wire

NAMES = ("trainer rank 0", "trainer rank 1", "worker 0")


def wires(timeout_s: float = 20.0) -> list[Wire]:
    """Connected with each other."""
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(Wire, store, "weights", rank, NAMES, "gloo", timeout_s) for rank in range(3)]
        return [each.result(30) for each in made]


def message(value: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def nothing_failed() -> None:
    """Nobody has said anything."""


def test_messages_arrive_in_order() -> None:
    first, second, worker = wires()
    works = first.exchange([(2, message(1)), (2, message(2))], []) + second.exchange([(2, message(3))], [])
    into = [message(0), message(0), message(0)]
    worker.wait(worker.exchange([], [(0, into[0]), (1, into[2]), (0, into[1])]), nothing_failed)
    first.wait(works, nothing_failed)
    assert [int(each[0]) for each in into] == [1, 2, 3] and all((each == each[0]).all() for each in into)


def test_a_transfer_that_never_comes_says_from_whom() -> None:
    _first, _second, worker = wires()
    worker.timeout_s = 0.3
    with pytest.raises(RefitError, match=r"1000 bytes from trainer rank 1: not done within 0\.3 s"):
        worker.wait(worker.exchange([], [(1, message(0))]), nothing_failed)


def test_closing_a_wire_ends_the_transfers_of_the_others() -> None:
    """Without it they would wait until their own limits: here far longer than the test may take."""
    first, second, worker = wires(timeout_s=1000)
    with ThreadPoolExecutor(2) as threads:
        sends = threads.submit(second.wait, second.exchange([(2, message(1, 50_000_000))], []), nothing_failed)
        receives = threads.submit(worker.wait, worker.exchange([], [(0, message(0))]), nothing_failed)
        time.sleep(0.2)
        assert not sends.done() and not receives.done()
        first.close()
        with pytest.raises(RefitError, match="1000 bytes from trainer rank 0: the other side has closed"):
            receives.result(20)
        worker.close()  # as one does that has failed
        with pytest.raises(RefitError, match="send of 50000000 bytes to worker 0"):
            sends.result(20)
    first.close()


def test_a_broken_transfer_tells_the_cause_where_somebody_gave_it() -> None:
    first, _second, worker = wires()
    first.close()

    def failed() -> None:
        raise RefitError("sync 1 failed: trainer rank 0: out of memory")

    with pytest.raises(RefitError, match="out of memory"):
        worker.wait(worker.exchange([], [(0, message(0))]), failed)


class BrokenWork:
    """Work of NCCL of which the watchdog has seen an error: it is over, and every wait raises the error."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 2")


def test_following_a_broken_transfer_tells_the_cause_or_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimo.refit.transport.p2p.REASON_S", 0.1)
    *_, worker = wires()
    worker.backend = "nccl"

    def failed() -> None:
        raise RefitError("sync 1 failed: trainer rank 0: out of memory")

    works = [("0 messages to and 2 from others", BrokenWork())]
    with pytest.raises(RefitError, match="out of memory"):
        worker.follow(works, failed)
    with pytest.raises(RefitError, match="0 messages to and 2 from others: NCCL communicator was aborted"):
        worker.follow(works, nothing_failed)
    worker.backend = "gloo"


def test_nobody_connects_before_all_are_there() -> None:
    store, names = HashStore(), ["trainer rank 0", "worker 0"]
    options = RefitOptions(backend="gloo", dtype="float32", timeout_s=60)
    before = threading.enumerate()
    opening = Opening(Rendezvous(store, names[0], 60), "set-up", options, 0, 1, torch.device("cpu"), names)
    (thread,) = [each for each in threading.enumerate() if each not in before]
    Rendezvous(store, names[1], 60).fail("set-up", "another model")
    with pytest.raises(RefitError, match="set-up failed: worker 0: another model"):
        opening.finish()
    thread.join(5)  # connections of gloo alone would wait for 60 s, and those of NCCL without a limit
    assert not thread.is_alive()


def test_the_others_never_come() -> None:
    with pytest.raises(RefitError, match=r"the gloo group of 3 trainer ranks and workers did not form within 0\.5 s"):
        Wire(HashStore(), "weights", 0, NAMES, "gloo", 0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_nccl_without_cuda_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="'nccl' needs CUDA devices"):
        Wire(HashStore(), "weights", 0, NAMES, "nccl", 1.0)
