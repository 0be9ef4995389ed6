"""Run Energon's worker processes, whose data set is read, saved and restored worker by worker.

Energon's own savable loader asks its workers for their state when a checkpoint is written. It waits until each of them
is between two rows, and after a restore it forgets the rows that it skipped. Here, a worker sends its state along with
every few rows, and the trainer keeps the states that it may still need. So a checkpoint does not wait, and it is exact
even right after a restore. The data set, its seeds, its shards and its order are Energon's.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import SavableDatasetState
from megatron.energon.wrappers.gc_dataset import gc_init_worker
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.energon import compat
from data.energon.router import Arrival, Checkpoint
from data.energon.state import from_plain, to_plain
from data.energon.worker_status import WorkerStatus, WorkerStatusTable, is_bad_data

# Rows between two states: at most this many are read again after a restore.
CHECKPOINT_EVERY = 16
PREFETCHED_ROWS = 2  # of each worker
STOP_S = 2.0  # time that workers have to end by themselves
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Energon keeps the worker of a process in class variables, so two workers in one process take turns.
ONE_WORKER = threading.Lock()
# --num-workers sets their number; torch warns if there are more than cores.
warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)


@dataclass(frozen=True)
class Failure:
    """Last message of a worker, which it sends instead of a row.

    Attributes:
        worker: global worker id.
        text: the error.
        bad_data: whether the data is at fault.
    """

    worker: int
    text: str
    bad_data: bool


@dataclass(frozen=True)
class Start:
    """Starting point of a worker.

    Attributes:
        checkpoint: state to begin from.
        count: number of rows that were delivered; rows between the checkpoint and this number are built and dropped.
    """

    checkpoint: Checkpoint = Checkpoint()
    count: int = 0


class RowStream(IterableDataset):
    """Rows of the worker that iterates, in a worker process or in this one.

    Args:
        dataset: Energon's data set, whose worker configuration names the workers.
        starts: starting points by global worker id; a worker without one begins at the beginning.
        status: the line on which a worker reports what it does.
    """

    def __init__(self, dataset: SavableDataset, starts: Mapping[int, Start], status: WorkerStatus) -> None:
        self._dataset = dataset
        self._starts = starts
        self._status = status

    def __iter__(self) -> Iterator[Arrival | Failure]:
        worker = self._dataset.worker_config.global_worker_id()
        self._status.worker = worker
        self._status.write("starting")
        if get_worker_info() is None:
            yield from self._rows(worker)
            return
        try:
            yield from self._rows(worker)
        except Exception as error:  # Any error ends the worker, and the trainer raises it with the worker's name.
            bad_data = is_bad_data(error)
            text = str(error) if bad_data else "".join(traceback.format_exception(error))
            yield Failure(worker, text or repr(error), bad_data)

    def _restore(self, start: Start) -> None:
        in_worker = get_worker_info() is not None
        rng = None
        if start.checkpoint.state is not None:
            state: SavableDatasetState = from_plain(start.checkpoint.state)
            self._dataset.restore_state(state.dataset_state)
            rng = state.rng
        # In the trainer's process these generators belong to the trainer.
        if in_worker and rng is not None:
            SystemRng.restore_state(rng)
        elif in_worker:
            SystemRng.seed(self._dataset.worker_config.worker_seed())

    def _rows(self, worker: int) -> Iterator[Arrival]:
        start = self._starts.get(worker, Start())
        self._restore(start)
        count = saved = start.checkpoint.index
        rows = iter(self._dataset)
        while (row := self._next(rows, count)) is not None:
            count += 1
            if count <= start.count:  # delivered before the restore
                continue
            checkpoint = None
            if count - saved >= CHECKPOINT_EVERY:
                checkpoint, saved = Checkpoint(count, self._state(count)), count
            self._status.write(f"waiting for the trainer, after {self._status.place}")
            yield Arrival(worker, count - 1, row, checkpoint)
        raise ValueError("--data-path: the data set ended, but it should start over")

    def _next(self, rows: Iterator[Any], count: int) -> Any:
        config = self._dataset.worker_config
        config.worker_activate(count)
        try:
            return next(rows, None)
        finally:
            config.worker_deactivate()

    def _state(self, count: int) -> Any:
        rng = None if get_worker_info() is None else SystemRng.save_state()
        return to_plain(SavableDatasetState(rng=rng, dataset_state=self._dataset.save_state(), sample_index=count))


def _init_worker(parent: int, _: int) -> None:
    """Turn a fork of the trainer into a worker, which ends with the trainer but ignores signals meant for it."""
    # Schedulers send SIGTERM to every process. The trainer then finishes its step and ends its workers itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel ends this process with the trainer, even if the trainer is killed while this one waits for a disk.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    WorkerConfig.active_worker_config = None  # a thread of the trainer may have set it at the time of the fork
    gc_init_worker(0)  # keeps the trainer's CUDA tensors from being freed here
    gc.freeze()


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


class WorkerProcesses:
    """The workers of a block of lanes, one process each.

    Args:
        dataset: Energon's data set for a worker configuration of all of them.
        workers_per_lane: global worker `w` belongs to lane `w // workers_per_lane`.
        starts: starting points by global worker id.
        statuses: shared memory that workers write on.
        status: the data set's status line.

    Attributes:
        workers: global worker ids.
    """

    def __init__(self, dataset: SavableDataset, workers_per_lane: int, starts: Mapping[int, Start],
                 statuses: WorkerStatusTable, status: WorkerStatus) -> None:
        config = dataset.worker_config
        self.workers = range(config.rank * config.num_workers, (config.rank + 1) * config.num_workers)
        self._workers_per_lane = workers_per_lane
        self._statuses = statuses
        self._loader: DataLoader = DataLoader(
            RowStream(dataset, starts, status),
            batch_size=None,
            num_workers=config.num_workers,
            prefetch_factor=PREFETCHED_ROWS,
            collate_fn=lambda row: row,  # torch's conversion would turn tuples into lists
            multiprocessing_context="fork",
            worker_init_fn=partial(_init_worker, os.getpid()),
            # Starting an iterator draws a seed, by default from torch's generator, which makes dropout on CPUs. A
            # worker sets its generators itself (`RowStream._restore`), so that this seed does not matter.
            generator=torch.Generator(),
        )
        self._rows: Any = None

    def start(self) -> None:
        """Fork the workers, from the main thread."""
        gc.collect()  # before it is copied
        # torch's handler of SIGCHLD raises in the main thread wherever that is. `pull` finds dead workers itself.
        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD) if in_main else None
        self._rows = iter(self._loader)
        if in_main:
            signal.signal(signal.SIGCHLD, handler)
        # This runs before multiprocessing's own handler, which waits for processes that ignore SIGTERM.
        atexit.register(self.close)

    def name(self, worker: int) -> str:
        """Describe a worker for messages: its id, lane and process, and its last report."""
        pid, seconds, text = self._statuses.read(worker)
        rows = self._rows  # another thread may close it
        pid = pid if pid or rows is None else compat.worker_processes(rows)[worker - self.workers.start].pid
        return f"worker {worker} (lane {worker // self._workers_per_lane}, pid {pid}), for {seconds:.0f} s: {text}"

    def holds_up(self, worker: int) -> int:
        """Return the worker that `pull` waits for, which may differ from `worker` because rows come in turn."""
        rows = self._rows
        if rows is None:
            return worker
        for other, process in zip(self.workers, compat.worker_processes(rows), strict=True):
            if _is_stopped(process.pid):  # the next row to be unpickled may be its own, which needs its help
                return other
        number = compat.next_worker(rows)
        return worker if number is None else self.workers[number]

    def pull(self, worker: int) -> Arrival:
        """Return the next row of any of the workers, which are asked in turn.

        Raises:
            ValueError: a worker met data that it cannot read.
            RuntimeError: a worker died, or failed otherwise.
        """
        assert self._rows is not None, "not started"
        try:
            item = next(self._rows)
        except (RuntimeError, OSError, EOFError) as error:  # torch checks its workers every few seconds
            dead = self._dead()
            raise RuntimeError("; ".join(dead) if dead else f"{type(error).__name__}: {error}") from error
        if isinstance(item, Failure):
            name = f"worker {item.worker} (lane {item.worker // self._workers_per_lane})"
            raise (ValueError if item.bad_data else RuntimeError)(f"{name}: {item.text}")
        return item

    def _dead(self) -> list[str]:
        # A broken connection is seen before the process has ended, and the end before its exit code is known.
        processes = compat.worker_processes(self._rows)
        ended = wait([process.sentinel for process in processes], STOP_S)
        dead = []
        for worker, process in zip(self.workers, processes, strict=True):
            if process.sentinel in ended:
                process.join()
                code = process.exitcode
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                dead.append(f"a data worker {how}: {self.name(worker)}")
        return dead

    def close(self) -> None:
        """End the workers, and kill those that do not answer."""
        atexit.unregister(self.close)
        rows, self._rows = self._rows, None
        if rows is None:
            return
        compat.ask_to_end(rows)
        deadline = time.monotonic() + STOP_S
        for process in compat.worker_processes(rows):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        compat.release(rows)


class InProcess:
    """Single worker of a lane, in this process.

    Args:
        dataset: Energon's data set for a worker configuration of one lane with one worker.
        starts: starting points by global worker id.
        statuses: shared memory that it writes on.
        status: the data set's status line.

    Attributes:
        workers: its global worker id.
    """

    def __init__(self, dataset: SavableDataset, starts: Mapping[int, Start], statuses: WorkerStatusTable,
                 status: WorkerStatus) -> None:
        rank = dataset.worker_config.rank
        self.workers = range(rank, rank + 1)
        self._statuses = statuses
        self._stream = RowStream(dataset, starts, status)
        self._rows: Iterator[Any] | None = None

    def start(self) -> None:
        self._rows = iter(self._stream)

    def name(self, worker: int) -> str:
        """Describe the worker for messages."""
        _, seconds, text = self._statuses.read(worker)
        return f"lane {worker}, read in the training process, for {seconds:.0f} s: {text}"

    def holds_up(self, worker: int) -> int:
        """Return the worker that `pull` waits for."""
        return worker

    def pull(self, worker: int) -> Arrival:
        """Return its next row. Errors are raised unchanged."""
        assert self._rows is not None, "not started"
        with ONE_WORKER:
            return next(self._rows)

    def close(self) -> None:
        self._rows = None
