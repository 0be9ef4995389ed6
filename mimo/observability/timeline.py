"""Shares of a step's time by module and kind, over all ranks, and the Gantt chart of a step."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mimo.comm import gather, gather_at
from mimo.data.batch import Microbatch
from mimo.grid.groups import Grids
from mimo.grid.spec import Layout
from mimo.observability.clock import clock_offsets, host_of_clock
from mimo.observability.spans import Interval, Kind

# Kinds of work that a rank does for one module. If grids share ranks, the others' work is one more part of a module.
OWN_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.GRADIENT_SYNC)
OTHER_MODULES = "other-modules"
STEP = "step"
# Passes at whose end the device had caught up with the host, to within these seconds.
HOST_BOUND, CAUGHT_UP_S = "host-bound", 1e-3
PARTS = (*(str(kind) for kind in Kind), OTHER_MODULES)


def parts_of(intervals: Iterable[Interval], module: str) -> dict[str, float]:
    """Return the seconds of a rank's step in each of `PARTS`, seen from one of its modules. They sum to the step."""
    parts = dict.fromkeys(PARTS, 0.0)
    for interval in intervals:
        label = interval.label
        others = label.module != module and label.kind in OWN_KINDS
        parts[OTHER_MODULES if others else label.kind] += interval.end_s - interval.begin_s
    return parts


def host_bound_s(intervals: Iterable[Interval], module: str) -> float:
    """Return the seconds of a module's passes in which the device waited for the host, at most.

    A device that has caught up at the end of a pass may have waited for any of its launches.
    """
    return sum(each.end_s - each.begin_s for each in intervals
               if each.label.module == module and each.label.kind in (Kind.FORWARD, Kind.BACKWARD)
               and each.lead_s is not None and each.lead_s < CAUGHT_UP_S)


class Timeline:
    """Turns the intervals of all ranks into figures of modules and lanes.

    Each rank computes a row of numbers (`own`). The caller reduces the rows of all ranks to their maximum and their
    sum, from which every rank computes the figures (`figures`). `reports_lane` is true on one rank of each
    lane, and `has_device` where the host queues work on a device.
    """

    def __init__(self, layout: Layout, rank: int, *, reports_lane: bool, has_device: bool) -> None:
        self.layout, self.rank = layout, rank
        self._lane = layout.language.coordinates(rank)["dp"] if reports_lane else None
        self.parts = (*(part for part in PARTS if part != OTHER_MODULES or layout.kind != "disjoint"), STEP,
                      *([HOST_BOUND] if has_device else []))

    def own(self, intervals: Sequence[Interval], microbatches: Sequence[Microbatch]) -> list[float]:
        """Return this rank's row: the parts of each module (0 for modules of other ranks), then tokens of each lane."""
        row: list[float] = []
        for name, grid in self.layout.grids.items():
            if self.rank in grid.ranks:
                parts = parts_of(intervals, name)
                parts[STEP] = intervals[-1].end_s - intervals[0].begin_s
                parts[HOST_BOUND] = host_bound_s(intervals, name)
                row += [parts[part] for part in self.parts]
            else:
                row += [0.0] * len(self.parts)
        for tokens in lane_tokens(microbatches):
            row += [tokens if lane == self._lane else 0.0 for lane in range(self.layout.num_lanes)]
        return row

    def figures(self, largest: Sequence[float], summed: Sequence[float]) -> dict[str, float]:
        """Compute the figures from the maximum and the sum of all ranks' rows.

        Returns:
            `<module>/<part>-s` and `<module>/<part>-max-s`: mean and maximum over the module's ranks, seconds.
            `image-tokens-per-lane/min` and `/max`, `text-tokens-per-lane/...`: tokens of a lane in the step.
        """
        found, index = {}, 0
        for name, grid in self.layout.grids.items():
            for part in self.parts:
                found[f"{name}/{part}-s"] = summed[index] / grid.size
                found[f"{name}/{part}-max-s"] = largest[index]
                index += 1
        for kind, tokens in self.lanes(summed).items():
            found[f"{kind}-tokens-per-lane/min"], found[f"{kind}-tokens-per-lane/max"] = min(tokens), max(tokens)
        return found

    def lanes(self, summed: Sequence[float]) -> dict[str, list[float]]:
        """Return the `image` and `text` tokens of each lane, from the sum of all ranks' rows."""
        images, texts = 2 * self.layout.num_lanes, self.layout.num_lanes
        return {"image": list(summed[-images:-texts]), "text": list(summed[-texts:])}


def lane_tokens(microbatches: Sequence[Microbatch]) -> tuple[float, float]:
    """Count image and text tokens of this rank's lane in a step, padding excluded; zero on ranks without text."""
    images = total = 0
    for batch in microbatches:
        if batch.text is not None:
            images += sum(map(sum, batch.text.token_counts.values()))
            total += batch.text.num_tokens
    return float(images), float(total - images)


# The step whose Gantt chart is always written: late enough for kernels, caches and loaders to be warm.
EARLY_ITERATION = 10


class TimelineSignal:
    """SIGUSR2 to any rank requests the Gantt chart of the current iteration. Main thread only."""

    def __init__(self) -> None:
        self._requested = False
        self._old_handler = signal.signal(signal.SIGUSR2, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def take(self) -> bool:
        """Return whether the signal has come since the last call."""
        requested, self._requested = self._requested, False
        return requested

    def close(self) -> None:
        """Restore the former handler."""
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if self._old_handler is None else self._old_handler)


class Gantt:
    """Writes a step of all ranks, interval by interval, on the logging rank.

    `RUN_DIR/timeline/step-N.json` is for the report, and `step-N.trace.json` for Perfetto. Every `interval`-th
    iteration is written (0: none), and an early one.
    """

    def __init__(self, grids: Grids, writer: int, run_dir: str, *, interval: int, first: int, last: int) -> None:
        self._grids, self._writer, self._interval = grids, writer, interval
        self._folder = Path(run_dir) / "timeline"
        self._early = min(first + EARLY_ITERATION - 1, last)
        self._hosts: list[str] = []

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration is written without a request; the same on all ranks."""
        return iteration == self._early or bool(self._interval) and iteration % self._interval == 0

    def write(self, iteration: int, intervals: Sequence[Interval], lanes: Mapping[str, Sequence[float]]) -> str | None:
        """Write an iteration's files. Collective over the world.

        Returns:
            A line for the run's log, on the writing rank.
        """
        grids = self._grids
        if not self._hosts:
            self._hosts = gather(grids, host_of_clock())
        offsets = clock_offsets(self._hosts, grids.rank, grids.host)
        # Hosts have different clocks: all intervals are moved to that of rank 0.
        offset_s = offsets[grids.rank]
        rows = [{"kind": str(each.label.kind), "name": each.label.name, "module": each.label.module,
                 "microbatch": each.label.microbatch, "begin_s": each.begin_s + offset_s,
                 "end_s": each.end_s + offset_s}
                for each in intervals if each.end_s > each.begin_s]
        gathered = gather_at(grids, (grids.describe(), rows), self._writer)
        if gathered is None:
            return None
        path = self._folder / f"step-{iteration}.json"
        document = self._document(iteration, gathered, lanes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document), encoding="utf-8")
            path.with_suffix(".trace.json").write_text(json.dumps(chrome_trace(document)), encoding="utf-8")
        except OSError as error:
            return f"timeline of iteration {iteration}: cannot be written: {error}"
        return f"timeline of iteration {iteration}: {path}"

    def _document(self, iteration: int, gathered: list[Any], lanes: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        layout = self._grids.layout
        began = min(rows[0]["begin_s"] for _, rows in gathered)
        for _, rows in gathered:
            for row in rows:
                row["begin_s"], row["end_s"] = round(row["begin_s"] - began, 7), round(row["end_s"] - began, 7)
        ranks = []
        for rank, (place, rows) in enumerate(gathered):
            modules = {name: layout.grids[name].coordinates(rank) for name in layout.modules_of(rank)}
            ranks.append({"rank": rank, "place": place, "modules": modules, "intervals": rows})
        return {"iteration": iteration, "tokens_per_lane": {kind: list(tokens) for kind, tokens in lanes.items()},
                "ranks": ranks}


def chrome_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `step-N.json` in the Chrome trace format, which Perfetto (https://ui.perfetto.dev) opens.

    A grid is a process of the trace, and each of its ranks a thread. A rank of several modules is a thread of each,
    with its work for that module. Ids begin at 1, because Perfetto takes 0 for the idle task of the system.
    """
    modules = list(dict.fromkeys(module for rank in document["ranks"] for module in rank["modules"]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{module} grid"}}
        for pid, module in enumerate(modules, 1)]
    tid = 0
    for rank in document["ranks"]:
        for module, coordinates in rank["modules"].items():
            tid += 1
            thread = {"pid": 1 + modules.index(module), "tid": tid}
            place = " ".join(f"{axis} {index}" for axis, index in coordinates.items())
            events += [{"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank['rank']} {place}"}},
                       {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank["rank"]}}]
            for one in rank["intervals"]:
                if one["kind"] == Kind.OTHER or (len(rank["modules"]) > 1 and one["module"] != module):
                    continue
                batch = {} if one["microbatch"] is None else {"microbatch": one["microbatch"]}
                events.append({
                    "ph": "X", "name": " ".join([one["name"], *map(str, batch.values())]), "cat": one["kind"],
                    **thread, "ts": round(1e6 * one["begin_s"], 1),
                    "dur": round(1e6 * (one["end_s"] - one["begin_s"]), 1),
                    "args": {"kind": one["kind"], "module": one["module"], **batch}})
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"iteration": document["iteration"], "tokens_per_lane": document["tokens_per_lane"]}}
