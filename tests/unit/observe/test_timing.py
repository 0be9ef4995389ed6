from __future__ import annotations

import pytest

from mimo.observe import timing
from mimo.observe.timing import Timers


@pytest.fixture
def sleep(monkeypatch):
    """A clock that advances only by what this is called with, in seconds."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds
    return advance


def test_blocks_add_up_by_name(sleep):
    timers = Timers()
    for _ in range(3):
        with timers("data wait"):
            sleep(1)
        sleep(10)
    with timers("bridge wait"):
        sleep(1)
    assert timers.snapshot() == {"data wait": 3.0, "bridge wait": 1.0}


def test_nested_blocks_of_one_name_count_once(sleep):
    timers = Timers()
    with timers("bridge wait"):
        sleep(1)
        with timers("bridge wait"):
            sleep(2)
        sleep(4)
    assert timers.snapshot() == {"bridge wait": 7.0}


def test_reset_keeps_names_and_a_failing_block_counts(sleep):
    timers = Timers()
    with pytest.raises(RuntimeError), timers("data wait"):
        sleep(1)
        raise RuntimeError("lost")
    assert timers.snapshot() == {"data wait": 1.0}
    timers.reset()
    assert timers.snapshot() == {"data wait": 0.0}
