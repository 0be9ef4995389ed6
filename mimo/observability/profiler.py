"""Traces of chosen steps and ranks by torch's profiler, NVTX ranges, snapshots of GPU memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mimo.config.trainer import ObserveConfig
from mimo.observability.spans import Spans
from mimo.watchdog.process_exit import write_report

# Allocations that a snapshot of memory reaches back to.
MAX_MEMORY_ENTRIES = 200_000


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """A range that Nsight Systems shows."""
    return torch.cuda.nvtx.range(name)


class StepProfiler:
    """torch's profiler over --profile-steps on this rank; where there is nothing to profile it does nothing.

    A trace shows what `spans` is told: `language stage 0 forward microbatch 3`.

    Args:
        flags: what to profile.
        spans: what the rank does.
        rank: this one.
        cuda: whether kernels of a GPU are traced, too.
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
        """Whether a trace is under way."""
        return self._profile is not None

    def begin_step(self, iteration: int) -> None:
        """Start with the first of the steps. A resumed run may begin inside them."""
        if self._is_chosen and iteration in self._steps and self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._spans.listen(*self._always, record_function)

    def ends_after(self, iteration: int, last: int) -> bool:
        """Whether traces end with this iteration, `last` being the run's; the same on all ranks, traced or not."""
        return iteration in self._steps and iteration in (self._steps[-1], last)

    def close(self) -> str | None:
        """Write the trace, if one is under way. Returns what to tell.

        Every asynchronous send of the steps must have been waited for: on gloo its end is noted in the trace, when it
        is waited for, even if the trace is gone by then.
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
    """Context of a rank's run on a GPU: records allocations and writes them at its end, out of memory included.

    https://pytorch.org/memory_viz shows `RUN_DIR/memory/rank-R.pickle`.

    Args:
        flags: whether to, and on which ranks; all where they are left out.
        rank: this one.
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
        # After any other error than that of memory nothing is waited for: a rank may have to say what went wrong.
        if not self._on or not (error is None or isinstance(error, torch.OutOfMemoryError)):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))
        except OSError as failure:
            write_report(f"memory snapshot {self._path}: cannot be written: {failure}\n")
        torch.cuda.memory._record_memory_history(enabled=None)
