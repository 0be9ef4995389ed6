"""The store where trainer ranks and workers meet: nobody waits for those who have failed, and the silent are named."""

from __future__ import annotations

import dataclasses
import gc
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from mimo.refit.rendezvous import RefitError, Rendezvous, own_address, without_collections


def joined(timeout_s: float = 5.0) -> tuple[Rendezvous, Rendezvous]:
    """Return a trainer's rank that serves the store, and a worker."""
    host, place = Rendezvous.host("127.0.0.1", "trainer rank 0", timeout_s)
    return host, Rendezvous.join(place, "worker 1", timeout_s)


def test_collections_go_on_after_a_set_up_as_before_even_if_it_fails() -> None:
    @without_collections()
    def fail() -> None:
        raise RefitError(f"enabled: {gc.isenabled()}")

    enabled = [gc.isenabled()]
    with pytest.raises(RefitError, match="enabled: False"):
        fail()
    enabled.append(gc.isenabled())
    gc.disable()
    with without_collections():
        pass
    enabled.append(gc.isenabled())
    gc.enable()
    assert enabled == [True, True, False]


def test_plain_data_arrives() -> None:
    host, worker = joined()
    host.publish("table", {"names": ["a" * 1000] * 1000, "sizes": [1, 2]})
    assert worker.read("table", "set-up", "the table") == {"names": ["a" * 1000] * 1000, "sizes": [1, 2]}


def test_the_late_are_named_when_time_is_up() -> None:
    host, worker = joined(timeout_s=0.3)
    worker.arrive("sync 1", "ready")
    with pytest.raises(RefitError, match=r"sync 1, stage 'ready': trainer rank 0 waits for worker 2, worker 3; "
                                         r"nothing came within 0\.3 s"):
        host.wait_for("sync 1", "ready", ["worker 1", "worker 2", "worker 3"])
    with pytest.raises(RefitError, match="worker 1 waits for the plan of trainer rank 7; nothing came within"):
        worker.read("plan/7", "sync 1", "the plan of trainer rank 7")


def test_a_failure_ends_every_wait_with_its_first_reason() -> None:
    host, worker = joined(timeout_s=60)
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


def test_the_end_of_the_process_that_serves_the_store_is_reported() -> None:
    host, worker = joined(timeout_s=60)
    del host
    with pytest.raises(RefitError, match="worker 1 has lost the refit store, which the trainer's first rank serves"):
        worker.wait_for("sync 1", "ready", ["trainer rank 0"])
    worker.fail("sync 1", "nobody hears it")  # raises nothing on the way out
    assert worker.glimpse("anything", 0.1) is None


def test_nobody_answers() -> None:
    host, place = Rendezvous.host("127.0.0.1", "trainer rank 0", 5.0)
    del host
    with pytest.raises(RefitError, match=f"worker 0 cannot reach the refit store at 127.0.0.1:{place.port}"):
        Rendezvous.join(place, "worker 0", 0.3)


def test_the_store_listens_on_one_address() -> None:
    host, place = Rendezvous.host("localhost", "trainer rank 0", 5.0)
    with socket.create_connection((place.address, place.port), 5):
        pass
    for other in ("127.0.0.2", own_address(socket.gethostname())):
        if other != place.address:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, place.port), 5)
    host.publish("still", "there")


def test_a_process_without_the_secret_cannot_join_or_disturb() -> None:
    host, place = Rendezvous.host("127.0.0.1", "trainer rank 0", 5.0)
    worker = Rendezvous.join(place, "worker 0", 5.0)
    assert place.secret not in repr(place)
    for secret in ("", "guessed"):
        with pytest.raises(RefitError, match=f"the refit store at 127.0.0.1:{place.port} is not that of this run"):
            Rendezvous.join(dataclasses.replace(place, secret=secret), "worker 0", 5.0)
    stranger = TCPStore("127.0.0.1", place.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    stranger.set("sync 1/failed", "out of malice")
    with socket.create_connection(("127.0.0.1", place.port), 5) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n" * 1000)
        worker.arrive("sync 1", "ready")
        host.wait_for("sync 1", "ready", ["worker 0"])
    assert Rendezvous.host("127.0.0.1", "trainer rank 0", 5.0)[1].secret != place.secret


def test_a_machine_that_is_not_this_one_is_told() -> None:
    with pytest.raises(RefitError, match="trainer rank 0 cannot serve the refit store at 192.0.2.1"):
        Rendezvous.host("192.0.2.1", "trainer rank 0", 5.0)


def test_a_glimpse_waits_for_a_while_whatever_has_failed() -> None:
    host, worker = joined()
    host.fail("sync 1", "no matter")
    assert worker.glimpse("difference", 0.0) is None
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(worker.glimpse, "difference", 5.0)
        time.sleep(0.05)
        host.publish("difference", "item 3")
        assert found.result(5) == "item 3"
