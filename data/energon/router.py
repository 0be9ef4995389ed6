"""Send the rows of many workers to the lanes that own them: one loader for several lanes.

A lane owns `num_workers` consecutive global workers and takes their rows in turn: the next row comes from the worker
that has delivered the fewest rows, the lowest id among equals. So a lane's order depends only on its workers, not on
which loader runs them, on the order in which their rows arrive, or on the other lanes that the loader serves. A loader
that reads ahead for one lane keeps the rows of the others in queues, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Most rows of each worker that one read of a lane may take from a loader. torch's loader asks its workers in turn, so
# one is enough unless something is wrong.
PULLS_PER_WORKER = 4


@dataclass(frozen=True)
class Checkpoint:
    """State from which a worker can continue.

    Attributes:
        index: rows that the worker had delivered since the start of the run.
        state: Energon's state as plain objects; None for the start of the data set.
    """

    index: int = 0
    state: Any = None


@dataclass(frozen=True)
class Arrival:
    """A row from a worker.

    Attributes:
        worker: global worker id that the loader states.
        index: index of the row among the worker's rows.
        row: the row; its `worker` is the global worker id that the worker itself states.
        checkpoint: the worker's state after this row; only some rows have it.
    """

    worker: int
    index: int
    row: Any
    checkpoint: Checkpoint | None = None


class Source(Protocol):
    """A loader that runs some workers."""

    workers: range

    def pull(self, worker: int) -> Arrival:
        """Return the next row of any of its workers; of `worker` if it can choose."""
        ...


@dataclass
class WorkerPosition:
    """Progress of one worker's rows.

    Attributes:
        count: rows delivered since the start of the run.
        skipped: bad samples that were skipped before them.
        checkpoints: states to continue from, oldest first. The first precedes every mark that may still be needed.
    """

    count: int = 0
    skipped: int = 0
    checkpoints: deque[Checkpoint] = field(default_factory=lambda: deque([Checkpoint()]))


@dataclass(frozen=True)
class Mark:
    """Position of all workers of a router: `(count, skipped)` by global worker id."""

    positions: Mapping[int, tuple[int, int]]


def lane_blocks(lanes: Sequence[int], num_lanes: int) -> list[range]:
    """Split lanes into the fewest runs that one loader can serve.

    A loader of `k` lanes is rank `r` of `num_lanes / k`, and its workers are those of lanes `r*k` to `r*k + k - 1`.
    """
    wanted, blocks = sorted(set(lanes)), []
    assert wanted and 0 <= wanted[0] and wanted[-1] < num_lanes, (lanes, num_lanes)
    while wanted:
        first = wanted[0]
        size = max(
            count
            for count in range(1, len(wanted) + 1)
            if num_lanes % count == 0 and first % count == 0 and wanted[count - 1] == first + count - 1
        )
        blocks.append(range(first, first + size))
        wanted = wanted[size:]
    return blocks


class Router:
    """Deliver rows lane by lane.

    Args:
        sources: the loaders that run the workers of these lanes.
        workers_per_lane: global worker `w` belongs to lane `w // workers_per_lane`.
        kept_marks: number of marks whose checkpoints are kept.

    Attributes:
        positions: progress of each worker by global worker id.
    """

    def __init__(self, sources: Sequence[Source], workers_per_lane: int, kept_marks: int = 8) -> None:
        self._source_of = {worker: source for source in sources for worker in source.workers}
        self._workers_per_lane = workers_per_lane
        self.positions = {worker: WorkerPosition() for worker in self._source_of}
        self._queues: dict[int, deque[Arrival]] = {worker: deque() for worker in self._source_of}
        self._received = {worker: 0 for worker in self._source_of}
        self._marks: deque[Mark] = deque(maxlen=kept_marks)

    def restore(self, worker: int, position: WorkerPosition) -> None:
        """Continue a worker after `position.count` rows. Call this before the first read."""
        self.positions[worker] = position
        self._received[worker] = position.count

    def next_worker(self, lane: int) -> int:
        """Return the worker of the lane's next row: the first one with the fewest delivered rows."""
        workers = range(lane * self._workers_per_lane, (lane + 1) * self._workers_per_lane)
        return min(workers, key=lambda worker: self.positions[worker].count)

    def read(self, lane: int) -> Any:
        """Return the next row of a lane.

        Raises:
            RuntimeError: a row has no worker id, comes from a worker of another loader or is out of order; or a
                worker delivers nothing while the others do.
        """
        worker = self.next_worker(lane)
        source = self._source_of[worker]
        queue = self._queues[worker]
        budget = PULLS_PER_WORKER * len(source.workers)
        for _ in range(budget):
            if queue:
                break
            self._put(source, source.pull(worker))
        if not queue:
            raise RuntimeError(
                f"lane {lane}: worker {worker} gave no row while the workers {source.workers.start} to "
                f"{source.workers.stop - 1} of its loader gave {budget}"
            )
        arrival = queue.popleft()
        position = self.positions[worker]
        position.count += 1
        position.skipped += len(arrival.row.skipped)
        return arrival.row

    def _put(self, source: Source, arrival: Arrival) -> None:
        """Queue a row for the lane of its worker, after comparing the worker ids of row and loader."""
        worker = arrival.worker
        stated = arrival.row.worker if hasattr(arrival.row, "worker") else None
        if worker not in source.workers or stated != worker:
            raise RuntimeError(
                f"a row states worker {stated} and came from worker {worker} of a loader of the workers "
                f"{source.workers.start} to {source.workers.stop - 1}: no lane may take it"
            )
        if arrival.index != self._received[worker]:
            raise RuntimeError(f"worker {worker} gave row {arrival.index} where {self._received[worker]} was due")
        self._received[worker] += 1
        self._queues[worker].append(arrival)
        if arrival.checkpoint is not None:
            position = self.positions[worker]
            position.checkpoints.append(arrival.checkpoint)
            needed = self._marks[0].positions[worker][0] if self._marks else position.count
            while len(position.checkpoints) > 1 and position.checkpoints[1].index <= needed:
                position.checkpoints.popleft()

    def mark(self) -> Mark:
        """Return the current position of all workers."""
        mark = Mark({worker: (position.count, position.skipped) for worker, position in self.positions.items()})
        self._marks.append(mark)
        return mark

    def position_at(self, worker: int, mark: Mark) -> tuple[int, int, Checkpoint]:
        """Return `(count, skipped, checkpoint)` of a worker at one of the last marks, the checkpoint not after it."""
        count, skipped = mark.positions[worker]
        fitting = [checkpoint for checkpoint in self.positions[worker].checkpoints if checkpoint.index <= count]
        assert fitting, f"worker {worker}: the mark at row {count} is older than the last {self._marks.maxlen}"
        return count, skipped, fitting[-1]
