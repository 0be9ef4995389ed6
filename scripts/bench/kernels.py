"""Show what a GPU and its host did in a traced step: kernels by kind and by part of the step, and how long both idled.

    python train_hetero.py ... --run-dir RUN --profile-steps 8:8
    python scripts/bench/kernels.py RUN/profile/rank-0.json.gz

The program reads a trace of --profile-steps (torch's profiler). The window lasts from the start of the first kernel to
the end of the last one. The GPU is `busy` while at least one kernel or copy runs on some stream. Otherwise it is
`idle`: it waits for its host or for another rank. The kind of a kernel follows from its name. If streams overlap, the
kinds may sum to more than `busy`, because each kernel counts in full. Parts are the ranges of the schedule, such as
`language stage 0 forward`, summed over microbatches. A kernel belongs to the innermost range that contains its launch.
Kernels of `backward` passes belong to the pass that waits for autograd's thread. `idle before` of a part is the time in
which the GPU had nothing to do until one of its kernels began.

Another table shows where the host's time went in each thread that launched a kernel. Autograd's thread is one of them.
The time of an operation does not include the operations and CUDA calls inside it. `Python` is the time in which no
operation runs. The profiler itself makes a host slower, so compare shares with an untraced step, but not times. The
last line of output is JSON; above it, Markdown tables show the same.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness

# Patterns of kernels' names by kind. They are tried in this order.
KINDS = {
    "communication": r"nccl|ncclDev",
    "copies and memset": r"^Memcpy|^Memset",
    "attention": r"fmha|flash|sdpa|fused_attn|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|wgmma",
    "cross entropy": r"cross_entropy|nll_loss|softmax",
    "norms": r"norm",
    "optimizer": r"multi_tensor|adam",
    "rotary positions": r"rope|rotary",
    "activations": r"gelu|silu|swiglu|dact|gated",
    "embedding and indexing": r"embedding|index|gather|scatter|masked",
    "sums": r"reduce",
    "other elementwise": r"elementwise|vectorized|unrolled|triton_|cat|fill|copy|cast|transpose|add|mul",
}
OTHER = "other"
# Names in the tables are cut, because those of templates fill screens.
NAME_WIDTH = 100
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
HOST_KINDS = (*LAUNCHES, "cpu_op")
MICROBATCH = re.compile(r" microbatch \d+.*$")


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy. Times are in microseconds of the trace's clock."""

    name: str
    kind: str
    begin: float
    end: float
    part: str


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace. Raises ValueError if the file is not a trace or cannot be read."""
    try:
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
        with opened as file:
            return list(json.load(file)["traceEvents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of torch's profiler: {type(error).__name__}: {error}") from error


class Ranges:
    """The schedule's ranges on the host."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        ranges = sorted(((event["ts"], event["ts"] + event["dur"], MICROBATCH.sub("", event["name"]))
                         for event in events if event.get("cat") == "user_annotation" and "dur" in event),
                        key=lambda found: (found[0], -found[1]))
        self._ranges = ranges
        self._begins = [begin for begin, _, _ in ranges]

    def at(self, moment: float) -> str:
        """Return the name of the innermost range at a moment, without its microbatch. Empty outside all ranges."""
        # Ranges are nested a few levels deep, so the innermost one is among the last that began.
        last = bisect_right(self._begins, moment)
        for begin, end, name in reversed(self._ranges[max(0, last - 64):last]):
            if begin <= moment <= end:
                return name
        return ""


def kernels_of(events: Sequence[Mapping[str, Any]]) -> list[Kernel]:
    """Return what the GPU did, sorted by begin. Raises ValueError if the trace has no kernels."""
    ranges = Ranges(events)
    launches = {event["args"]["correlation"]: event["ts"] for event in events
                if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})}
    found = []
    for event in events:
        if event.get("cat") in GPU_KINDS:
            launched = launches.get(event["args"].get("correlation"), event["ts"])
            found.append(Kernel(event["name"], kind_of(event["name"]), event["ts"], event["ts"] + event["dur"],
                                ranges.at(launched)))
    if not found:
        raise ValueError("the trace has no kernels of a GPU: it comes from a CPU, or from a rank that did nothing")
    return sorted(found, key=lambda kernel: kernel.begin)


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Time in which at least one kernel runs. `kernels` are sorted by begin."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return total


def idle_before(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Sum the milliseconds in which no kernel runs, by the part of the next kernel. `kernels` are sorted by begin."""
    found: dict[str, float] = defaultdict(float)
    until = None
    for kernel in kernels:
        if until is not None:
            found[kernel.part] += max(0.0, kernel.begin - until) / 1000
        until = kernel.end if until is None else max(until, kernel.end)
    return found


def summed(kernels: Iterable[Kernel], key: str) -> dict[str, dict[str, float]]:
    """Sum milliseconds and number of kernels by one of their fields, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[getattr(kernel, key)].append((kernel.end - kernel.begin) / 1000)
    return {name: {"ms": sum(found), "kernels": len(found)}
            for name, found in sorted(times.items(), key=lambda item: -sum(item[1]))}


def host_threads(events: Iterable[Mapping[str, Any]], top: int) -> list[dict[str, Any]]:
    """Sum up what the threads that launch kernels do, the busiest first.

    Returns:
        For each thread its launches, `busy_ms` and `python_ms` (from the first operation of any of them to the last),
        and the longest operations with their own time.
    """
    by_thread: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST_KINDS and "dur" in event:
            by_thread[event["pid"], event["tid"]].append(event)
    everything = [event for thread in by_thread.values() for event in thread]
    begin = min((event["ts"] for event in everything), default=0.0)
    end = max((event["ts"] + event["dur"] for event in everything), default=0.0)
    found = []
    for thread in by_thread.values():
        launches = sum(event["cat"] in LAUNCHES and "Launch" in event["name"] for event in thread)
        if not launches:
            continue
        own: dict[str, list[float]] = defaultdict(list)
        busy, open_events = 0.0, list[list[Any]]()
        for event in sorted(thread, key=lambda each: (each["ts"], -each["dur"])):
            while open_events and open_events[-1][0] <= event["ts"]:
                _, name, left = open_events.pop()
                own[name].append(left)
            if open_events:
                open_events[-1][2] -= event["dur"]
            else:
                busy += event["dur"]
            open_events.append([event["ts"] + event["dur"], event["name"], event["dur"]])
        for _, name, left in open_events:
            own[name].append(left)
        longest = sorted(own.items(), key=lambda each: -sum(each[1]))[:top]
        found.append({"launches": launches, "busy_ms": busy / 1000, "python_ms": (end - begin - busy) / 1000,
                      "operations": {name[:NAME_WIDTH]: {"ms": sum(times) / 1000, "calls": len(times)}
                                     for name, times in longest}})
    return sorted(found, key=lambda each: -each["busy_ms"])


def figures(events: Sequence[Mapping[str, Any]], top: int) -> dict[str, Any]:
    kernels = kernels_of(events)
    window_ms = (max(kernel.end for kernel in kernels) - kernels[0].begin) / 1000
    busy_ms = busy_us(kernels) / 1000
    idle = idle_before(kernels)
    parts = {part or "outside the passes": {
        "ms": found["ms"], "kernels": found["kernels"], "idle_before_ms": idle[part],
        "kinds": {kind: times["ms"] for kind, times in summed(
            (kernel for kernel in kernels if kernel.part == part), "kind").items()},
        "longest": _longest((kernel for kernel in kernels if kernel.part == part), top)}
        for part, found in summed(kernels, "part").items()}
    return {"window_ms": window_ms, "busy_ms": busy_ms, "idle_ms": window_ms - busy_ms,
            "kinds": summed(kernels, "kind"), "parts": parts,
            "longest": _longest(kernels, top),
            "host": host_threads(events, top)}


def _longest(kernels: Iterable[Kernel], top: int) -> dict[str, dict[str, float]]:
    """Sum kernels by name and return those that take longest."""
    return {name[:NAME_WIDTH]: found for name, found in list(summed(kernels, "name").items())[:top]}


def table(title: str, rows: Mapping[str, Mapping[str, Any]], window_ms: float, counted: str = "kernels") -> str:
    idle = any("idle_before_ms" in row for row in rows.values())
    return harness.table([[title, "ms", "% of the window", counted, *(["idle before, ms"] if idle else [])],
                          *([name, f"{row['ms']:.2f}", f"{100 * row['ms'] / window_ms:.1f}", row[counted],
                             *([f"{row['idle_before_ms']:.2f}"] if idle else [])] for name, row in rows.items())])


def main(arguments: list[str] | None = None) -> int:
    """Read, print, and return the exit code: 2 if there is nothing to read."""
    parser = harness.argument_parser(__doc__, device=False)
    parser.add_argument("trace", type=Path, help="a file profile/rank-R.json.gz in the folder of a run")
    parser.add_argument("--top", type=int, default=15, help="number of kernels to show by name")
    chosen = parser.parse_args(arguments)
    try:
        found = figures(read_trace(chosen.trace), chosen.top)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    window = found["window_ms"]
    print(f"window {window:.1f} ms, busy {found['busy_ms']:.1f} ms, idle {found['idle_ms']:.1f} ms "
          f"({100 * found['idle_ms'] / window:.1f} %)\n")
    for title, key in (("kind", "kinds"), ("part", "parts"), ("kernel", "longest")):
        print(table(title, found[key], window) + "\n")
    for thread in found["host"]:
        print(f"a thread of the host: {thread['launches']} launches, operations for {thread['busy_ms']:.1f} ms, "
              f"Python or nothing for {thread['python_ms']:.1f} ms\n")
        print(table("operation", thread["operations"], window, "calls") + "\n")
    print(json.dumps({"trace": chosen.trace.name, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
