"""torch's profiler for chosen steps and ranks, NVTX ranges, and snapshots of GPU memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mimo.config.trainer import ObserveConfig
from mimo.observability.spans import Spans
from mimo.watchdog.process_exit import write_report

# Number of allocations that a snapshot of memory remembers.
MAX_MEMORY_ENTRIES = 200_000


class StepProfiler:
    """Runs torch's profiler over --profile-steps, if this rank is one of --profile-ranks.

    A trace shows the stretches of `spans`, such as `language stage 0 forward microbatch 3`.
    """

    def __init__(self, flags: ObserveConfig, spans: Spans, rank: int, *, cuda: bool) -> None:
        self._steps = flags.profiled_steps
        self._is_chosen = rank in (flags.profiled_ranks or (0,))
        self._spans = spans
        self._always = spans.ranges
        self._path = Path(flags.run_dir) / "profile" / f"rank-{rank}.json.gz"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile: profile | None = None

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    def begin_step(self, iteration: int) -> None:
        """Start the trace at the first of the steps, or at a later one in a resumed run."""
        if self._is_chosen and iteration in self._steps and self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._spans.listen(*self._always, record_function)

    def ends_after(self, iteration: int, last: int) -> bool:
        """Return whether traces end after this iteration; the same on all ranks. `last` is the run's last iteration."""
        return iteration in self._steps and iteration in (self._steps[-1], last)

    def close(self) -> str | None:
        """Write the trace, if one is being recorded. Return a line for the log.

        All asynchronous sends of the steps must be complete: gloo writes the end of a send to the trace when somebody
        waits for it, even if the trace no longer exists.
        """
        if self._profile is None:
            return None
        self._spans.listen(*self._always)
        running, self._profile = self._profile, None
        running.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._path))
        except OSError as error:
            return f"trace {self._path}: cannot be written: {error}"
        return f"trace: {self._path}"


class MemorySnapshot:
    """Context of a rank's run on a GPU. Records allocations and writes them at the end, also after out of memory.

    https://pytorch.org/memory_viz shows `RUN_DIR/memory/rank-R.pickle`. --profile-ranks chooses the ranks; the default
    is all.
    """

    def __init__(self, flags: ObserveConfig, rank: int) -> None:
        self._on = flags.memory_snapshot and rank in (flags.profiled_ranks or (rank,))
        self._path = Path(flags.run_dir) / "memory" / f"rank-{rank}.pickle"

    def __enter__(self) -> None:
        if self._on:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_ENTRIES, stacks="python")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After any other error the snapshot is not written, because the rank should report the error at once.
        if not self._on or not (error is None or isinstance(error, torch.OutOfMemoryError)):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))
        except OSError as failure:
            write_report(f"memory snapshot {self._path}: cannot be written: {failure}\n")
        torch.cuda.memory._record_memory_history(enabled=None)
