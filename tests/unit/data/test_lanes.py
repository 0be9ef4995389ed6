"""The router: every row goes to the lane of the worker that made it, in that lane's own order, or nowhere."""

from collections import deque
from types import SimpleNamespace

import pytest

from data.energon.router import Arrival, Checkpoint, Router, WorkerPosition, lane_blocks


class Workers:
    """Workers that give rows in turn, or in an order of the test's."""

    def __init__(self, workers, turns=None, checkpoint_every=0):
        self.workers = workers
        self.turns = deque(turns if turns is not None else [])
        self.given = dict.fromkeys(range(-1, 99), 0)
        self.endless = turns is None
        self.checkpoint_every = checkpoint_every
        self.pulls = 0

    def pull(self, worker):
        turn = self.workers[self.pulls % len(self.workers)] if self.endless else self.turns.popleft()
        self.pulls += 1
        index = self.given[turn]
        self.given[turn] += 1
        due = self.checkpoint_every and (index + 1) % self.checkpoint_every == 0
        row = SimpleNamespace(worker=turn, key=f"{turn}.{index}", skipped=())
        return Arrival(turn, index, row, Checkpoint(index + 1, f"{turn}@{index + 1}") if due else None)


def read(router, lane, count):
    return [router.read(lane).key for _ in range(count)]


def test_a_lane_takes_its_workers_in_turn_whatever_the_order_of_arrival():
    router = Router([Workers(range(0, 4), turns=[3, 1, 3, 2, 1, 0, 0, 2, 0, 1])], 2)
    assert read(router, 0, 4) == ["0.0", "1.0", "0.1", "1.1"]
    assert read(router, 1, 4) == ["2.0", "3.0", "2.1", "3.1"]


def test_rows_read_ahead_for_another_lane_are_kept_in_order():
    source = Workers(range(0, 2))
    router = Router([source], 1)
    assert read(router, 1, 3) == ["1.0", "1.1", "1.2"]
    assert read(router, 0, 3) == ["0.0", "0.1", "0.2"]
    assert source.pulls == 6


def test_a_row_of_a_worker_of_another_loader_is_refused():
    with pytest.raises(RuntimeError, match="worker 4 of a loader of the workers 0 to 1"):
        Router([Workers(range(0, 2), turns=[4])], 1).read(0)


@pytest.mark.parametrize("stated", [{}, {"worker": 0}])
def test_a_row_that_states_no_worker_or_another_is_refused(stated):
    source = Workers(range(0, 2))
    source.pull = lambda worker: Arrival(1, 0, SimpleNamespace(skipped=(), **stated))
    with pytest.raises(RuntimeError, match=f"a row states worker {stated.get('worker')} and came from worker 1"):
        Router([source], 1).read(1)


def test_a_row_out_of_order_is_refused():
    source = Workers(range(0, 1))
    source.given[0] = 3
    with pytest.raises(RuntimeError, match="worker 0 gave row 3 where 0 was due"):
        Router([source], 1).read(0)


def test_a_silent_worker_is_named_once_the_others_have_given_far_more():
    with pytest.raises(RuntimeError, match="worker 0 gave no row while the workers 0 to 2 of its loader gave 12"):
        Router([Workers(range(0, 3), turns=[1, 2] * 20)], 3).read(0)


def test_a_restored_router_reads_the_workers_that_are_behind_first():
    source = Workers(range(0, 4))
    router = Router([source], 4)
    for worker, count in enumerate([2, 1, 2, 1]):
        source.given[worker] = count
        router.restore(worker, WorkerPosition(count, 0, deque([Checkpoint()])))
    assert read(router, 0, 6) == ["1.1", "3.1", "0.2", "1.2", "2.2", "3.2"]


def test_checkpoints_are_kept_as_far_back_as_marks_go_and_no_further():
    router = Router([Workers(range(0, 1), checkpoint_every=2)], 1, kept_marks=3)
    marks = []
    for _ in range(20):
        read(router, 0, 3)
        marks.append(router.mark())
        for mark in marks[-3:]:
            count, _, checkpoint = router.position_at(0, mark)
            assert count - 2 < checkpoint.index <= count
        assert len(router.positions[0].checkpoints) <= 6


def test_without_marks_only_the_last_checkpoint_is_kept():
    router = Router([Workers(range(0, 1), checkpoint_every=2)], 1)
    read(router, 0, 50)
    assert len(router.positions[0].checkpoints) <= 2
    count, _, checkpoint = router.position_at(0, router.mark())
    assert (count, checkpoint.index) == (50, 50)


@pytest.mark.parametrize(("lanes", "count", "blocks"), [
    ([0, 1, 2, 3], 4, [range(0, 4)]), ([2, 3], 4, [range(2, 4)]), ([1, 2], 4, [range(1, 2), range(2, 3)]),
    ([0, 2], 4, [range(0, 1), range(2, 3)]), ([0, 1, 2], 6, [range(0, 3)]), ([3, 4, 5], 6, [range(3, 6)]),
    ([0, 1, 2], 4, [range(0, 2), range(2, 3)]), ([1, 2, 3], 4, [range(1, 2), range(2, 4)]), ([5], 7, [range(5, 6)])])
def test_lanes_split_into_the_runs_that_one_loader_can_serve(lanes, count, blocks):
    assert lane_blocks(lanes, count) == blocks
