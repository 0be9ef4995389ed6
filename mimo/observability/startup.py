"""Cost of a start by phase, from the beginning of the process to the end of its first iteration.

Every rank goes through the same phases, without gap or overlap; `STARTUP.enter` begins the next one. For the run as a
whole, a phase ends when the last rank ends it. Faster ranks wait for it in the next phase, because almost every phase
begins with a collective. The phases of the run therefore sum to the time that the slowest rank needed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

logger = logging.getLogger(__name__)

# Phases shorter than this are left out of the log's line.
SHOWN_FROM_S = 0.05


class Phase(StrEnum):
    """Phase of the start. A start may enter the same phase several times.

    Attributes:
        IMPORTS: starting the interpreter, importing all modules, reading and checking flags.
        GROUPS: preparing the device, creating process groups, connecting the grids.
        MODEL: building, casting and wrapping the model.
        OPTIMIZERS: building the optimizers.
        DATA: opening the data, and waiting for the first batch.
        LOAD: looking for a checkpoint or pretrained weights, and loading them.
        RECORDS: opening metrics, TensorBoard and other trackers.
        EVALUATION: making the evaluation that an earlier start of the run has left out.
        PASSES: forward and backward passes of the first iteration, gradient reduction included. NCCL's communicators
            and compiled kernels are made here, at their first use.
        UPDATE: the first optimizer step, and the end of the iteration.
    """

    IMPORTS = "imports"
    GROUPS = "process groups"
    MODEL = "model"
    OPTIMIZERS = "optimizers"
    DATA = "data"
    LOAD = "load"
    RECORDS = "records"
    EVALUATION = "evaluation"
    PASSES = "forward and backward"
    UPDATE = "update"


# Text of the log when a phase begins: the first entry for the first time, and so on. Imports are announced by
# `begin_imports` before there is a log; an update takes too little time to announce.
ACTIVITIES = {
    Phase.GROUPS: ("connecting the ranks and creating process groups", "connecting the grids"),
    Phase.MODEL: ("building the model",),
    Phase.OPTIMIZERS: ("building the optimizers",),
    Phase.DATA: ("opening the data", "waiting for the first batch"),
    Phase.LOAD: ("looking for a checkpoint or pretrained weights, and loading them",),
    Phase.RECORDS: ("opening metrics and trackers",),
    Phase.EVALUATION: ("making the evaluation that was due when the run was stopped",),
    Phase.PASSES: ("first forward and backward pass; it takes longer than later ones, which find kernels and "
                   "connections ready",),
}


@dataclass(frozen=True)
class RankStart:
    """Times of one rank's start.

    Attributes:
        phases: phases in the order in which they took place.
        ends_s: end of each phase, seconds since the process began.
        groups: names of the process groups of which the rank is a member, the default one included.
    """

    phases: tuple[str, ...]
    ends_s: tuple[float, ...]
    groups: tuple[str, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds in each phase; they sum to the end of the last one."""
        return _summed(self.phases, self.ends_s)


@dataclass(frozen=True)
class StartReport:
    """Times of a run's start.

    Attributes:
        seconds: from the start of the process to the end of the first iteration, on the slowest rank.
        phases: `seconds` by phase.
        ended_unix_s: end of the first iteration, seconds since 1970.
        num_groups: number of different process groups of all ranks.
        num_groups_of_a_rank: largest number of groups of which a rank is a member.
        ranks: seconds of each rank in each phase, waits for slower ranks included, in rank order.
    """

    seconds: float
    phases: dict[str, float]
    ended_unix_s: float
    num_groups: int
    num_groups_of_a_rank: int
    ranks: list[dict[str, float]]

    def line(self) -> str:
        """Format the line of the log: `first iteration after 12.3 s: imports 5.1, ...`."""
        parts = ", ".join(f"{name} {value:.1f}" for name, value in self.phases.items() if value >= SHOWN_FROM_S)
        return f"first iteration after {self.seconds:.1f} s: {parts}"

    def write(self, path: Path) -> None:
        """Write everything as JSON. If the disk fails, log a warning instead of ending the run."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("%s: cannot be written: %s", path, error)


class Startup:
    """Records the phases of this process's start. Before `open` and after `close`, `enter` does nothing."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._phases: list[str] = []
        self._ends_s: list[float] = []

    def open(self) -> None:
        """Begin to record. The time since the process began counts as imports."""
        self._began_s = time.monotonic() - process_age_s()
        self._phases, self._ends_s = [Phase.IMPORTS.value], []

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another, unless it is the same one."""
        if not self._phases or self._phases[-1] == phase.value:
            return
        earlier, activities = self._phases.count(phase.value), ACTIVITIES.get(phase, ())
        self._ends_s.append(time.monotonic() - self._began_s)
        self._phases.append(phase.value)
        if earlier < len(activities):
            self.say(activities[earlier])

    def say(self, activity: str) -> None:
        """Log what the start does now and the seconds so far. Only the first rank's log is shown."""
        if self._phases:
            logger.info(_line(time.monotonic() - self._began_s, activity))

    def close(self, groups: Sequence[str]) -> RankStart | None:
        """End the last phase and return the record; None if nothing was recorded."""
        if not self._phases:
            return None
        ends_s = (*self._ends_s, time.monotonic() - self._began_s)
        found = RankStart(tuple(self._phases), ends_s, tuple(groups))
        self._phases, self._ends_s = [], []
        return found


# One object for the whole process, because a process starts once.
STARTUP = Startup()


def begin_imports() -> None:
    """Print on the first rank that the large imports begin, which take seconds; the log is set up after them.

    Python's garbage collector rests until `end_imports`. It would visit half a million new objects again and again,
    for a seventh of the time of the imports, and find nothing.
    """
    gc.disable()
    if os.environ.get("RANK", "0") == "0":
        print(_line(process_age_s(), "importing torch and Megatron Core"), flush=True)


def end_imports() -> None:
    """Have the garbage collector work again, on objects that are made from here on."""
    gc.freeze()
    gc.enable()


def _line(seconds: float, activity: str) -> str:
    return f"[{seconds:5.1f} s] {activity}"


def process_age_s() -> float:
    """Return the age of this process in seconds, to 10 ms: field 22 of /proc/self/stat, see proc_pid_stat(5)."""
    # The command's name, field 2, may hold spaces and parentheses.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    started_s = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)


def report_of(ranks: Sequence[RankStart | None], ended_unix_s: float) -> StartReport | None:
    """Combine the records of all ranks, in rank order; None if a rank has none.

    `ranks` are the results of `Startup.close`.
    """
    starts = [start for start in ranks if start is not None]
    if not starts or len(starts) < len(ranks):
        return None
    phases = starts[0].phases
    assert all(start.phases == phases for start in starts), {start.phases for start in starts}
    ends_s = [max(moments) for moments in zip(*(start.ends_s for start in starts), strict=True)]
    return StartReport(ends_s[-1], _summed(phases, ends_s), ended_unix_s,
                       len({name for start in starts for name in start.groups}),
                       max(len(start.groups) for start in starts), [start.seconds for start in starts])


def _summed(phases: Sequence[str], ends_s: Sequence[float]) -> dict[str, float]:
    """Sum the seconds by phase, in the order in which phases first took place."""
    found = dict.fromkeys(phases, 0.0)
    for phase, begin_s, end_s in zip(phases, (0.0, *ends_s), ends_s, strict=False):
        found[phase] += end_s - begin_s
    return found
