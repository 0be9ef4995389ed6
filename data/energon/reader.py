"""Read lanes of Energon shards: the training split through workers, the validation split by index."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.task_encoder.base import TaskEncoder

from data.energon.open import check_size, train_dataset, unread_parts
from data.energon.provider import Config
from data.energon.router import Checkpoint, Mark, Router, WorkerPosition, lane_blocks
from data.energon.worker_status import WorkerStatus, WorkerStatusTable, watch
from data.energon.workers import InProcess, Start, WorkerProcesses
from mimo.protocols import DataRequest, Sample
from mimo.text import counted

logger = logging.getLogger("mimo.data")
FORMAT = "energon"
SHOWN_ERRORS = 3
# Flags that must stay the same for a worker to resume where it was.
STATE_FLAGS = ("packing_buffer_size", "packing_balance", "shuffle_buffer_size", "max_samples_per_sequence", "shuffle")


@dataclass(frozen=True)
class Encoding:
    """How workers turn samples into rows.

    Attributes:
        encoder: Energon's task encoder; its rows have `worker`, the global worker id, and `skipped`, messages.
        on_error: called in a worker with (error, sample, sources) for a sample that cannot be encoded.
        to_sample: converts a row for the trainer.
    """

    encoder: TaskEncoder
    on_error: Callable[[Exception, Any, Any], None]
    to_sample: Callable[[Any], Sample]


class BadSamples:
    """Count the skipped samples of all workers of a reader, and end the run above a limit."""

    def __init__(self, most: int, count: int = 0) -> None:
        self._most = most
        self._count = count
        self._last: deque[str] = deque(maxlen=SHOWN_ERRORS)

    def add(self, messages: Sequence[str]) -> None:
        """Log each sample. Raises ValueError above the limit, with the last few samples."""
        for message in messages:
            logger.warning("bad sample skipped: %s", message)
        self._count += len(messages)
        self._last.extend(messages)
        if self._count > self._most:
            raise ValueError(
                f"--max-bad-samples {self._most}: {counted(self._count, 'sample')} could not be used; the last: "
                + "; ".join(self._last)
            )


class EnergonReader:
    """Read some lanes of the training split without end.

    Args:
        config: the data set's flags.
        request: the run's model and sizes.
        lanes: lane numbers.
        encoding: how the workers turn samples into rows.

    Raises:
        ValueError: the data cannot be opened, or has too few samples for the workers.
    """

    def __init__(self, config: Config, request: DataRequest, lanes: Sequence[int], encoding: Encoding) -> None:
        self._config, self._request, self._encoding = config, request, encoding
        self._lanes = sorted(set(lanes))
        self._num_workers = max(config.num_workers, 1)
        self._sizes = check_size(config, request.num_lanes)
        self._statuses = WorkerStatusTable(worker for lane in self._lanes for worker in self._workers_of(lane))
        self._starts: dict[int, Start] = {}
        blocks = lane_blocks(lanes, request.num_lanes) if config.num_workers else [[lane] for lane in self._lanes]
        self._sources = [self._open(block) for block in blocks]
        self._router = Router(self._sources, self._num_workers)
        self._bad = BadSamples(config.max_bad_samples)
        self._waiting_for: int | None = None
        if 0 in self._lanes and (unread := unread_parts(config, "train")):
            logger.warning("--data-path %s: parts of samples that are neither text nor images by their names are not "
                           "read, unless a sample names them or they begin as an image file does: %s",
                           config.data_path, ", ".join(unread))

    def _workers_of(self, lane: int) -> range:
        return range(lane * self._num_workers, (lane + 1) * self._num_workers)

    def _open(self, lanes: Sequence[int]) -> WorkerProcesses | InProcess:
        """Open the workers of a block of lanes. A worker in this process is worker 0 of 1 and reads the same."""
        worker_config = WorkerConfig(
            rank=lanes[0] // len(lanes),
            world_size=self._request.num_lanes // len(lanes),
            num_workers=self._num_workers * len(lanes),
            seed_offset=self._request.seed,
            global_error_handler=self._encoding.on_error,
        )
        dataset = train_dataset(self._config, worker_config, self._encoding.encoder)
        status = WorkerStatus(self._statuses)
        watch(dataset, status)
        if self._config.num_workers:
            return WorkerProcesses(dataset, self._num_workers, self._starts, self._statuses, status)
        return InProcess(dataset, self._starts, self._statuses, status)

    def start(self) -> None:
        for source in self._sources:
            source.start()

    def read(self, lane: int) -> Sample:
        """Return the next row of a lane.

        Raises:
            ValueError: data cannot be read, or too many samples cannot be used.
            RuntimeError: a worker died; the message names it and what it was reading.
        """
        self._waiting_for = self._router.next_worker(lane)
        row = self._router.read(lane)
        self._waiting_for = None
        self._bad.add(row.skipped)
        return self._encoding.to_sample(row)

    def mark(self) -> Mark:
        """Return the current position of its lanes."""
        return self._router.mark()

    def state_dict(self, mark: Mark) -> dict[int, dict[str, Any]]:
        """Return the state of each lane at one of the last marks.

        It has the rows that each worker had delivered, and an earlier state of Energon. Queued rows are not part of it,
        because they are read again.
        """
        return {lane: self._lane_state(lane, mark) for lane in self._lanes}

    def _lane_state(self, lane: int, mark: Mark) -> dict[str, Any]:
        workers = []
        for worker in self._workers_of(lane):
            count, skipped, checkpoint = self._router.position_at(worker, mark)
            workers.append({"worker": worker, "count": count, "skipped": skipped, "index": checkpoint.index,
                            "state": checkpoint.state})
        return {"format": FORMAT, "lanes": self._request.num_lanes, "workers_per_lane": self._num_workers,
                "flags": self._state_flags(), "sizes": self._sizes, "workers": workers}

    def _state_flags(self) -> dict[str, Any]:
        flags = {name: vars(self._config)[name] for name in STATE_FLAGS} | {"seed": self._request.seed}
        if self._config.packing_buffer_size:
            # Packs leave room for the padding of context parallelism.
            flags |= {"seq_length": self._request.seq_length, "llm_cp": max(self._request.sequence_multiple // 2, 1)}
        return flags

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Continue each worker from a checkpoint, whichever lane owns it now.

        Raises:
            ValueError: the states belong to another data set, or to another total number of workers.
        """
        for lane, state in states.items():
            self._check(lane, state)
        saved = {entry["worker"]: entry for state in states.values() for entry in state["workers"]}
        missing = [worker for lane in self._lanes for worker in self._workers_of(lane) if worker not in saved]
        if missing:
            raise ValueError(f"the checkpoint's data state lacks workers {missing}")
        bad = 0
        for lane in self._lanes:
            for worker in self._workers_of(lane):
                entry = saved[worker]
                checkpoint = Checkpoint(entry["index"], entry["state"])
                position = WorkerPosition(entry["count"], entry["skipped"], deque([checkpoint]))
                self._router.restore(worker, position)
                self._starts[worker] = Start(checkpoint, entry["count"])
                bad += entry["skipped"]
        self._bad = BadSamples(self._config.max_bad_samples, bad)

    def _check(self, lane: int, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise ValueError(
                f"--dataset-provider energon: the checkpoint's data state of lane {lane} belongs to another data set "
                f"(it has {', '.join(sorted(map(str, state)))}); --no-load-data starts the data anew"
            )
        check_workers(state, self._request.num_lanes, self._num_workers)
        flags = self._state_flags()
        # Older states lack llm_cp, because there was no context parallelism.
        stored = {"llm_cp": 1} | state["flags"]
        changed = [f"--{name.replace('_', '-')} {value}: the checkpoint's data was read with {stored.get(name)}"
                   for name, value in flags.items() if stored.get(name) != value]
        if changed:
            raise ValueError("; ".join(changed) + "; --no-load-data starts the data anew")
        if state["sizes"] != self._sizes:
            raise ValueError(f"--data-path {self._config.data_path}: has {self._sizes} samples, the checkpoint's data "
                             f"had {state['sizes']}; --no-load-data starts the data anew")

    def describe(self) -> str:
        """Describe the worker that is waited for, then the others, each with what it reads."""
        waiting = self._waiting_for
        names = {worker: source.name(worker) for source in self._sources for worker in source.workers}
        if waiting is not None:
            source = next(source for source in self._sources if waiting in source.workers)
            waiting = source.holds_up(waiting)
        first = [] if waiting is None else [f"waiting for {names.pop(waiting)}"]
        return "; ".join(first + list(names.values()))

    def close(self) -> None:
        for source in self._sources:
            source.close()


def check_workers(state: Mapping[str, Any], lanes: int, workers_per_lane: int) -> None:
    """Raise ValueError, with what would fit, unless there are as many workers as when the state was saved."""
    old_lanes, old_workers = state["lanes"], state["workers_per_lane"]
    total = old_lanes * old_workers
    if total == lanes * workers_per_lane:
        return
    fits = f"--llm-dp {lanes} --num-workers {total // lanes}" if total % lanes == 0 else (
        f"--llm-dp {old_lanes} --num-workers {old_workers}")
    raise ValueError(
        f"--llm-dp {lanes} --num-workers {workers_per_lane}: the checkpoint's data was read by {old_lanes} lanes of "
        f"{old_workers} workers, and the shards are divided over all {total}; {fits} would continue it"
    )
