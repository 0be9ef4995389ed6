"""What watches the steps of a run: timeline, its Gantt, profiler."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.batch import Microbatch
from mimo.checkpoint.agree import gather
from mimo.observe.gantt import Gantt, TimelineSignal
from mimo.observe.profiler import StepProfiler
from mimo.observe.spans import Interval
from mimo.observe.timeline import Timeline
from mimo.training.step import TrainerParts


class StepObserver:
    """Timeline and profiler of one run, step by step.

    Args:
        parts: this rank's trainer.
        writer: the logging rank.
        first, last: the run's iterations here.

    Attributes:
        spans: what the rank does.
        lines: what to tell the reader of the run's log; emptied by whoever tells it.
    """

    def __init__(self, parts: TrainerParts, writer: int, first: int, last: int) -> None:
        grids, flags = parts.grids, parts.config.observe
        self._grids, self.spans, self._watchdog, self._iteration = grids, parts.spans, parts.watchdog, first - 1
        self._handshake, self._last, self._limit_s = parts.handshake, last, 2 * parts.config.train.watchdog_timeout_s
        self._timeline = Timeline(grids.layout, grids.rank, reports_lane=parts.counts_losses)
        self._gantt = Gantt(grids, writer, flags.run_dir, interval=flags.timeline_interval, first=first, last=last)
        self._profiler = StepProfiler(flags, parts.spans, grids.rank, cuda=parts.platform.name == "cuda")
        self._signal = TimelineSignal()
        self._intervals: list[Interval] = []
        self.lines: list[str] = []

    def begin_step(self) -> None:
        """The next iteration begins."""
        self._iteration += 1
        self._profiler.begin_step(self._iteration)
        self.spans.begin_step()

    def end_step(self) -> None:
        """The iteration is over, but for what is told of it. Collective over the world where traces end."""
        self.spans.end_step()
        if not self._profiler.ends_after(self._iteration, self._last):
            return
        if self._profiler.is_running:
            self._handshake.flush()
        # Writing a trace takes its time, which all ranks have to wait for.
        with self._watchdog.limit(self._limit_s), self._watchdog.waiting("traces of --profile-ranks"):
            for line in gather(self._grids, self._profiler.close()):
                self._say(line)

    def row(self, microbatches: Sequence[Microbatch]) -> tuple[list[float], list[float]]:
        """This rank's numbers of the step, of which every rank has to give `figures` what they are over all.

        Returns:
            those whose maxima it wants, and those whose sums.
        """
        requested = float(self._signal.take())
        if not self.spans.enabled:
            return [requested], []
        self._intervals = self.spans.intervals()
        own = self._timeline.own(self._intervals, microbatches)
        return [requested, *own], own

    def figures(self, largest: Sequence[float], summed: Sequence[float]) -> dict[str, float]:
        """The timeline's figures, and the Gantt where it is due. Collective over the world.

        Args:
            largest: the maxima over all ranks of what `row` gave.
            summed: the sums.
        """
        if not self.spans.enabled:
            return {}
        requested, *largest = largest
        if requested or self._gantt.is_due(self._iteration):
            with self._watchdog.waiting("timeline of all ranks"):
                lanes = self._timeline.lanes(summed)
                self._say(self._gantt.write(self._iteration, self._intervals, lanes))
        return self._timeline.figures(largest, summed)

    def close(self, *, failed: bool) -> None:
        """End a trace under way and restore the signal's former handler.

        Args:
            failed: the run ends for an error, here or elsewhere: wait for nobody, leave the trace.
        """
        if not failed and self._profiler.is_running:
            self._handshake.flush()
            self._say(self._profiler.close())
        self._signal.close()

    def _say(self, line: str | None) -> None:
        if line is not None:
            self.lines.append(line)
