"""The store where trainer ranks and workers meet: nobody waits for those who have failed, and the silent are named."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mimo.refit.meeting import Meeting, RefitError


def meetings(timeout_s: float = 5.0) -> tuple[Meeting, Meeting]:
    """A trainer's rank that serves the store, and a worker."""
    host = Meeting.open("127.0.0.1", 0, "trainer rank 0", timeout_s, is_host=True)
    return host, Meeting.open("127.0.0.1", host.port, "worker 1", timeout_s)


def test_plain_data_arrives() -> None:
    host, worker = meetings()
    host.publish("table", {"names": ["a" * 1000] * 1000, "sizes": [1, 2]})
    assert worker.read("table", "set-up", "the table") == {"names": ["a" * 1000] * 1000, "sizes": [1, 2]}


def test_the_late_are_named_when_time_is_up() -> None:
    host, worker = meetings(timeout_s=0.3)
    worker.arrive("sync 1", "ready")
    with pytest.raises(RefitError, match=r"sync 1, stage 'ready': trainer rank 0 waits for worker 2, worker 3; "
                                         r"nothing came within 0\.3 s"):
        host.wait_for("sync 1", "ready", ["worker 1", "worker 2", "worker 3"])
    with pytest.raises(RefitError, match="worker 1 waits for the plan of trainer rank 7; nothing came within"):
        worker.read("plan/7", "sync 1", "the plan of trainer rank 7")


def test_a_failure_ends_every_wait_with_its_first_reason() -> None:
    host, worker = meetings(timeout_s=60)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(host.wait_for, "sync 2", "ready", ["worker 1"]),
                 threads.submit(worker.until, "sync 2", lambda: False, lambda: "waits for ever")]
        time.sleep(0.1)
        assert not any(wait.done() for wait in waits)
        worker.fail("sync 2", "out of memory")
        host.fail("sync 2", "something that came of it")
        for wait in waits:
            with pytest.raises(RefitError, match="sync 2 failed: worker 1: out of memory"):
                wait.result(5)
    host.check("sync 3")


def test_who_serves_the_store_has_ended() -> None:
    host, worker = meetings(timeout_s=60)
    del host
    with pytest.raises(RefitError, match="worker 1 has lost the refit store, which the trainer's first rank serves"):
        worker.wait_for("sync 1", "ready", ["trainer rank 0"])
    worker.fail("sync 1", "nobody hears it")  # raises nothing on the way out
    assert worker.glimpse("anything", 0.1) is None


def test_nobody_answers() -> None:
    host, _ = meetings()
    port = host.port
    del host, _
    with pytest.raises(RefitError, match=f"worker 0 cannot reach the refit store at 127.0.0.1:{port}"):
        Meeting.open("127.0.0.1", port, "worker 0", 0.3)


def test_a_glimpse_waits_for_a_while_whatever_has_failed() -> None:
    host, worker = meetings()
    host.fail("sync 1", "no matter")
    assert worker.glimpse("difference", 0.0) is None
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(worker.glimpse, "difference", 5.0)
        time.sleep(0.05)
        host.publish("difference", "item 3")
        assert found.result(5) == "item 3"
