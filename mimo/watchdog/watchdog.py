"""Ends a run that hangs, with a report of what each rank was waiting for."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mimo.grid.spec import Layout
from mimo.text import ranges
from mimo.watchdog import status as stall_status
from mimo.watchdog.diagnosis import RankPlace, write_summary
from mimo.watchdog.process_exit import (
    STDERR_FD,
    WRITE_LIMIT_S,
    end_processes,
    exit_now,
    own_process,
    show_stacks_on_signal,
    stopped_siblings,
    within_limit,
    write_error_file,
    write_report,
)
from mimo.watchdog.status import RankStatus, find_blocked, stack_lines

if TYPE_CHECKING:
    from mimo.grid.groups import Grids
    from mimo.watchdog.gather import Processes, StallStore, Statuses

STALL_EXIT_CODE = 17
# Seconds between checks of the clock. A changed limit takes effect within this time.
POLL_S = 1.0
# Seconds after the limit at which the interpreter's lock must be stuck, because the watchdog's thread has not reacted.
LOCK_SLACK_S = 30.0
# Seconds from a stall until the process has ended, whatever its threads are stuck in.
LEAVE_S = 60.0
# Time limit for reading the state of the process groups.
GROUPS_S = 1.0
# Time limit for reading lines of source code: the file system may be what hangs.
FILES_S = 1.0
OWN_THREADS = ("watchdog", "stall store")

RankSource = Sequence[int] | Callable[[], Sequence[int]] | None
"""Global ranks, or a function that returns them when a report is written."""


class OpenWait:
    """Context of one wait of the main thread; made by `Watchdog.waiting`."""

    __slots__ = ("what", "details", "peers", "group", "on_loader", "is_work", "since", "outer", "_watchdog")

    def __init__(self, watchdog: Watchdog, what: str, peers: RankSource, group: RankSource, on_loader: bool,
                 is_work: bool, details: dict[str, object]) -> None:
        self.what = what
        self.details = details
        self.peers, self.group, self.on_loader, self.is_work = peers, group, on_loader, is_work
        self.since = 0.0
        self.outer: OpenWait | None = None
        self._watchdog = watchdog

    def __enter__(self) -> OpenWait:
        watchdog = self._watchdog
        self.outer = watchdog.current_wait
        self.since = watchdog.moved()
        watchdog.current_wait = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watchdog.current_wait = self.outer
        self._watchdog.moved()

    def status(self, now: float) -> stall_status.Wait:
        """Return the wait as data. Its `str` is `bridge recv_forward (lane 1, peers 0) for 12.0 s`."""
        peers, group = _ranks(self.peers), _ranks(self.group)
        named: dict[str, object] = self.details | {
            "peers": ranges(peers) if peers else None, "group": ranges(group) if group else None}
        details = ", ".join(f"{name} {value() if callable(value) else value}" for name, value in named.items()
                            if value is not None)
        return stall_status.Wait(self.what, details, now - self.since, peers, group, self.on_loader,
                                 self.is_work)


def _ranks(source: RankSource) -> tuple[int, ...]:
    return tuple(source() if callable(source) else source or ())


def thread_stacks() -> str:
    """Format the Python stacks of all threads except the watchdog's own, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    blocks = [f"thread {names.get(ident, ident)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
              for ident, frame in frames if ident != threading.get_ident() and names.get(ident) not in OWN_THREADS]
    return "".join(blocks)


class Watchdog:
    """Watches one rank's main thread from a daemon thread.

    The main thread reports where it is with `progress` and `waiting`, which only write attributes. If nothing changes
    until the limit, the watchdog writes a report to standard error and to `report_path`, takes part in the summary of
    all ranks, and exits with code 17. It does the same when another rank's watchdog has reached its limit.

    A call into C that never returns and keeps the interpreter's lock stops the watchdog's thread, too. Therefore the
    watchdog keeps a timer of `faulthandler` armed, which needs no lock. `LOCK_SLACK_S` after the limit it prints the
    stacks and exits with code 1. It also covers an exit that does not complete.

    Attributes:
        who: the rank in words, for example `rank 3 (language grid tp 1 dp 0 pp 0, lane 0)`.
        current_wait: innermost open wait.
        last_change: monotonic time of the last progress or change of waits, seconds.
        longest_s: longest time between two such moments outside `limit` contexts, since `forget_longest`.
        timeout_s: seconds without progress that count as a stall; infinite if nothing does.
        files_timeout_s: seconds without progress that `on_files` contexts allow; may be infinite.
        iteration: the last one reported; None before the first.
        on_stall: functions that are called after the summary of a stall, each for a few seconds at most.
        schedule: returns the state of forward and backward passes, in a trainer.
        loader: returns the state of the data loader.
        groups: returns the states of the process groups, if torch records them.
        on_device: whether kernels of an accelerator run asynchronously to the main thread.
    """

    def __init__(self, timeout_s: float, who: str, *, files_timeout_s: float = 0.0, report_path: Path | None = None,
                 rank: int = 0, conclusion: StallStore | None = None) -> None:
        """Start watching.

        Args:
            timeout_s: seconds without progress that count as a stall; 0 or less switches the watchdog off.
            who: the rank in words.
            files_timeout_s: the same limit for saves and loads.
            report_path: file for the report besides standard error, for example `run_dir/stall-rank3.txt`.
            rank: global rank.
            conclusion: makes one summary of the statuses of all ranks; None for no summary.
        """
        self.who = who
        self.current_wait: OpenWait | None = None
        self.last_change = time.monotonic()
        self.longest_s = 0.0
        self.timeout_s = timeout_s if timeout_s > 0 else math.inf
        self.files_timeout_s = files_timeout_s if files_timeout_s > 0 else math.inf
        self.iteration: int | None = None
        self.on_stall: list[Callable[[], None]] = []
        self.schedule: Callable[[], stall_status.Schedule | None] | None = None
        self.loader: Callable[[], stall_status.LoaderStatus] | None = None
        self.groups: Callable[[], tuple[stall_status.GroupStatus, ...]] | None = None
        self.on_device = False
        self._rank = rank
        self._earlier_schedules = 0  # index of the last one before this iteration
        self._extra_s = 0.0
        self._report_path = report_path
        self._conclusion = conclusion
        self._closed, self._stalled_elsewhere, self._look = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name=OWN_THREADS[0], daemon=True)
            self._thread.start()
            if conclusion is not None:
                conclusion.start(self._on_stall_elsewhere)

    def progress(self, *, iteration: int | None = None) -> None:
        """Report progress. A new `iteration` resets the passes."""
        if iteration is not None:
            if iteration != self.iteration:
                last = self.schedule() if self.schedule is not None else None
                self._earlier_schedules = last.index if last is not None else 0
            self.iteration = iteration
        self.moved()

    def moved(self) -> float:
        """Note a change, and return its monotonic time in seconds."""
        now = time.monotonic()
        if not self._extra_s:
            self.longest_s = max(self.longest_s, now - self.last_change)
        self.last_change = now
        return now

    def forget_longest(self) -> None:
        """Reset `longest_s`: what has taken long so far says nothing about what follows."""
        self.moved()
        self.longest_s = 0.0

    def waiting(self, what: str, *, peers: RankSource = None, group: RankSource = None, on_loader: bool = False,
                is_work: bool = False, **details: object) -> OpenWait:
        """Context of a wait for others: `with watchdog.waiting("bridge recv_forward", peers=[0], lane=1):`.

        Waits can be nested; the report names every open one. Details that are None are left out, and functions among
        them are called when the report is written.

        Args:
            what: what the rank waits for, in words that are the same on all ranks.
            peers: for transfers, the global ranks each of which has to do its part.
            group: for collectives, the global ranks that have to reach the same wait. Blocking calls of
                torch.distributed do not need it, because the stack shows their group.
            on_loader: whether the wait is for this rank's data loader.
            is_work: whether this is work that reports should name, instead of a wait.
            details: more for the reader of a report.
        """
        return OpenWait(self, what, peers, group, on_loader, is_work, details)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Context of a phase that may take `seconds` without progress, such as a checkpoint.

        It never shortens a limit. `math.inf` pauses the watchdog.
        """
        outer = self._extra_s
        self.moved()
        self._extra_s = max(outer, seconds)
        try:
            yield
        finally:
            # In this order, the reverse of `time_left`'s, so that the shorter limit never applies to the time of the
            # phase itself.
            self.moved()
            self._extra_s = outer

    @contextmanager
    def waiting_up_to(self, seconds: float, what: str, **details: Any) -> Iterator[None]:
        """Context of a wait that may take `seconds`; see `limit` and `waiting`."""
        with self.limit(seconds), self.waiting(what, **details):
            yield

    @contextmanager
    def on_files(self, what: str, **details: Any) -> Iterator[None]:
        """Context of a save or a load, which may take `files_timeout_s`; see `waiting`."""
        limit_s = self.files_timeout_s
        flag = None if math.isinf(limit_s) else f"--checkpoint-timeout-s {limit_s:g}"
        with self.waiting_up_to(limit_s, what, **details, limit=flag):
            yield

    def time_left(self, usual_s: float, since: float = -math.inf) -> float:
        """Return the seconds until the main thread has been without progress for too long.

        `usual_s` is the limit outside `limit` contexts. Idleness before the monotonic time `since` does not count.
        """
        allowed_s = max(usual_s, self._extra_s)
        return allowed_s - (time.monotonic() - max(since, self.last_change))

    def waits(self, now: float) -> tuple[stall_status.Wait, ...]:
        """Return the open waits, innermost first."""
        found, wait = [], self.current_wait
        while wait is not None:
            found.append(wait.status(now))
            wait = wait.outer
        return tuple(found)

    def describe(self) -> str:
        """Describe where the main thread is: rank, iteration, passes and every open wait, innermost first."""
        now = time.monotonic()
        where = RankStatus(self._rank, iteration=self.iteration, schedule=self._schedule_status()).where()
        waits = "; inside ".join(map(str, self.waits(now)))
        return (f"{self.who}: no progress for {now - self.last_change:.1f} s{f', {where}' if where else ''}"
                + (f"; waiting for {waits}" if waits else "; not in a tracked wait"))

    def status(self) -> RankStatus:
        """Return the status of this rank as data."""
        now = time.monotonic()
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        stack: list[tuple[str, ...]] = []
        if frame is not None:
            # The second attempt reads no source code, because the file system may be what hangs.
            within_limit(lambda: stack.append(stack_lines(frame)), FILES_S)
            stack.append(stack_lines(frame, code=False))
        read_groups = self.groups
        groups: list[tuple[stall_status.GroupStatus, ...]] = [()]
        if read_groups is not None:
            # With a limit, because the thread that hangs may hold the lock of torch's record.
            within_limit(lambda: groups.append(read_groups()), GROUPS_S)
        return RankStatus(
            self._rank, idle_s=now - self.last_change, iteration=self.iteration, waits=self.waits(now),
            blocked=find_blocked(frame, on_device=self.on_device) if frame is not None else stall_status.Blocked(),
            stack=stack[0] if stack else (),
            schedule=self._schedule_status(),
            loader=self.loader() if self.loader is not None else None, groups=groups[-1],
            on_device=self.on_device, stopped_pids=stopped_siblings())

    def _schedule_status(self) -> stall_status.Schedule | None:
        found = self.schedule() if self.schedule is not None else None
        return found and replace(found, is_over=found.index <= self._earlier_schedules)

    def report(self, headline: str) -> None:
        """Write a headline, the position of the main thread and all stacks to standard error and `report_path`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        write_report(f"{headline} on {self.describe()} [{stamp}]\n{thread_stacks()}", self._report_path)

    def close(self, *, failed: bool = False) -> None:
        """Stop watching. A second call does nothing.

        `failed` says that this rank's part of the run ended with an error, which a summary of the others will say.
        """
        self._closed.set()
        self._look.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._conclusion is not None:
                self._conclusion.close(failed=failed)

    def _on_stall_elsewhere(self) -> None:
        self._stalled_elsewhere.set()
        self._look.set()

    def _watch(self) -> None:
        seen: stall_status.Schedule | None = None
        while not self._closed.is_set():
            if self.schedule is not None and (now := self.schedule()) != seen:
                # A pass has ended. Nobody reports that, and there may be many passes between two waits.
                seen = now
                self.moved()
            left_s = self.time_left(self.timeout_s)
            if left_s <= 0 or self._stalled_elsewhere.is_set():
                self._leave(fired=left_s <= 0)
            if math.isinf(left_s):
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(left_s + POLL_S + LOCK_SLACK_S, exit=True, file=STDERR_FD)
            self._look.wait(min(POLL_S, left_s))
        faulthandler.cancel_dump_traceback_later()

    def _leave(self, *, fired: bool) -> NoReturn:
        """Report, take part in the summary and exit."""
        # Everything below may block, even while it holds the interpreter's lock: files, the store, callers' functions.
        faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=STDERR_FD)
        conclusion = self._conclusion
        try:
            status = self.status()
        except Exception as error:  # Callers' functions may raise anything, and this rank still has to answer.
            status = RankStatus(self._rank, idle_s=time.monotonic() - self.last_change, iteration=self.iteration,
                                stack=(f"its state could not be read: {error!r}",))
        if conclusion is None:
            self.report("stall")
        else:
            # The report is written meanwhile, because other ranks wait for this one's answer.
            talk = threading.Thread(target=self.report, args=("stall" if fired else "stall elsewhere, seen",),
                                    daemon=True)
            talk.start()
            silent = conclusion.conclude(status)
            talk.join(WRITE_LIMIT_S)
            if silent is None:
                write_report(f"{self.who} got no summary of the stall: no answer from {conclusion.holder}\n")
            end_processes(silent or ())
        # If this rank has written the summary, its message stays: a second one changes nothing.
        write_error_file(f"stall: {self.describe()} ends; the summary of the stall says which rank it waits for",
                         is_cause=conclusion is None)
        for action in self.on_stall:
            within_limit(action)
        exit_now(STALL_EXIT_CODE)


SUMMARY_FILE = "stall-summary.txt"


def open_watchdog(timeout_s: float, grids: Grids, run_dir: str | Path, files_timeout_s: float = 0.0) -> Watchdog:
    """Start the watchdog of this rank, once the process groups exist. Collective over the world.

    `run_dir` is for every rank's `stall-rankN.txt` and for `stall-summary.txt`. A `files_timeout_s` of 0 stands for no
    limit.
    """
    folder, places = Path(run_dir), rank_places(grids.layout)

    def write(statuses: Statuses, processes: Processes) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        summary = write_summary(statuses, processes, places, stamp)
        write_error_file(summary)
        write_report(summary, folder / SUMMARY_FILE)

    process = own_process(grids.rank)
    show_stacks_on_signal()
    # Imported late: a process of its own that makes a watchdog needs no torch.
    import torch.distributed as dist

    from mimo.compat import default_store
    from mimo.watchdog.gather import StallStore

    store: Any = dist.HashStore()
    holder, name = "this process", [""]
    if len(places) > 1:
        # Several runs may use the same store: restarts by a launcher (whose counts differ between nodes), and runs one
        # after the other in the same processes. A random name keeps their messages apart.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0, group=grids.host)
        holder = f"the process of {places[0].who}, which is stopped or gone, or cannot be reached"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            holder = "the launcher of the first node, which is stopped or gone, or cannot be reached"
        store = default_store().clone()
    conclusion = StallStore(store, process, len(places), write, holder=holder, run=name[0])
    return Watchdog(timeout_s, grids.describe(), files_timeout_s=files_timeout_s,
                    report_path=folder / f"stall-rank{grids.rank}.txt", rank=grids.rank, conclusion=conclusion)


def rank_places(layout: Layout) -> dict[int, RankPlace]:
    """Describe every rank of the layout, with its modules and their pipeline stages as its role."""
    places = {}
    for rank in range(layout.world_size):
        modules = layout.modules_of(rank)
        role = tuple((name, layout.grids[name].coordinates(rank)["pp"]) for name in modules)
        places[rank] = RankPlace(layout.describe(rank), modules, role)
    return places
