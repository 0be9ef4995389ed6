"""Ends a rank that cannot continue: write the reason in one piece, then exit without waiting for others."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mimo.watchdog.status import RankProcess

STDERR_FD = 2
# Seconds that an exit waits until its output is read: a full pipe without a reader must not keep the process alive.
WRITE_LIMIT_S = 5.0
# Seconds that the other ranks wait for rank 0 to report a refusal before the start; ranks may start far apart.
EXIT_DELAY_S = 30.0
# Seconds that a rank waits before it exits because of another one's error. Once torchrun notices the first process that
# has ended, it ends the others, and its summary shows only what had ended by then.
ECHO_DELAY_S = 5.0
# Parts of gloo's and NCCL's errors about a rank whose process has ended.
LOST_RANK_MARKS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


def within_limit(action: Callable[[], None], limit_s: float = WRITE_LIMIT_S) -> None:
    """Run `action` in a thread and go on without it after the limit."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)


def on_daemon_thread[T](call: Callable[[], T], name: str) -> Future[T]:
    """Make a call on a thread of its own and return its result to wait for.

    A call that never ends does not keep the process alive, as it would on the thread of an executor.
    """
    result: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(result, call), name=name, daemon=True).start()
    return result


def map_on_threads[S, T](call: Callable[[S], T], items: Iterable[S], num_threads: int, name: str) -> Iterator[T]:
    """Yield the result of a call for each item, in order, from calls on as many daemon threads.

    With one thread, the calls are made on the calling one, where they may handle signals. After a call that raises an
    error, which is raised in its place, no further ones begin.
    """
    if num_threads == 1:
        yield from map(call, items)
        return
    left = deque((item, Future[T]()) for item in items)
    results = [result for _, result in left]

    def work() -> None:
        while True:
            try:
                item, result = left.popleft()
            except IndexError:
                return
            _fulfil(result, partial(call, item))
            if result.exception() is not None:
                left.clear()  # all items before it have begun, so the caller comes to the error

    try:
        for _ in range(min(num_threads, len(results))):
            threading.Thread(target=work, name=name, daemon=True).start()
        for result in results:
            yield result.result()
    finally:
        left.clear()


def _fulfil[T](result: Future[T], call: Callable[[], T]) -> None:
    try:
        value = call()
    except BaseException as error:  # of any kind: `Future.result` raises it again
        result.set_exception(error)
    else:
        result.set_result(value)


def _write_all(data: bytes) -> None:
    # A closed or broken standard error leaves nowhere to report to.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(STDERR_FD, data):]


def write_report(text: str, path: Path | None = None) -> None:
    """Write `text` to standard error in one piece, and to `path` if given.

    It bypasses `sys.stderr`, whose lock a blocked thread may hold. The text names a `path` that cannot be written,
    or not in time: a file system that does not answer must not keep the process alive.
    """
    if path is not None:
        # The first entry is used if writing does not finish in time.
        problem: list[str] = ["not written in time"]
        within_limit(lambda: problem.append(_copy(text, path)))
        if problem[-1]:
            text += f"(no copy in {path}: {problem[-1]})\n"
    within_limit(lambda: _write_all(text.encode("utf-8", "backslashreplace")))


def _copy(text: str, path: Path) -> str:
    """Write a file. Return why that failed, or an empty string."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return str(error)
    return ""


def write_error_file(message: str, *, is_cause: bool = True) -> None:
    """Write a message for torchrun's summary, if torchrun asks for one. A message that is already there stays.

    The file has the format of `torch.distributed.elastic.multiprocessing.errors`. The summary calls the failure with
    the earliest time, in whole seconds, the root cause. So the time is rounded down on the rank that met the error and
    up on ranks that stop because of it. `is_cause` says whether this rank met the error itself.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    stamp = int(time.time()) + (0 if is_cause else 1)
    text = json.dumps({"message": {"message": message.strip(), "extraInfo": {"timestamp": str(stamp)}}})
    path = Path(name)

    def write() -> None:
        # Renamed when it is complete, because torchrun fails on an incomplete file, but not without one.
        with contextlib.suppress(OSError):
            if not path.exists():
                part = path.with_name(f"{path.name}.{os.getpid()}")
                part.write_text(text, encoding="utf-8")
                part.replace(path)

    within_limit(write)


def _is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def refuse(error: ValueError) -> int:
    """Report why a run cannot start, and return the exit code. Only for errors before any process group exists.

    Every rank usually finds the same error, and rank 0 reports it. The others wait, because torchrun ends them once
    rank 0 has exited; one that is not ended has met an error of its own and reports it.
    """
    rank = int(os.environ.get("RANK", "0"))
    write_error_file(f"error: {error}", is_cause=rank == 0)
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif _is_launched():
        time.sleep(EXIT_DELAY_S)
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    return 2


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Context for parsing a command line. Under torchrun, its errors also appear in torchrun's summary."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured) if _is_launched() else contextlib.nullcontext():
            yield
    except SystemExit as ended:
        rank = int(os.environ.get("RANK", "0"))
        if ended.code:
            write_error_file(captured.getvalue() or "the command line cannot be read; rank 0 reports why",
                             is_cause=rank == 0)
            if rank != 0 and _is_launched():
                time.sleep(EXIT_DELAY_S)
        raise
    finally:
        sys.stderr.write(captured.getvalue())


def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave the traceback of an uncaught exception for torchrun's summary and print it; for `sys.excepthook`."""
    write_error_file("".join(traceback.format_exception(kind, error, trace)))
    sys.__excepthook__(kind, error, trace)


def exit_now(code: int) -> NoReturn:
    """Leave the process with `code`: no `atexit`, no join, no process group tear-down, any of which can hang."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            # A closed pipe or stream has nobody left to read it.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    within_limit(flush)
    os._exit(code)


class ReportedElsewhereError(RuntimeError):
    """This rank stops because of an error that another rank can name, and does."""


def _is_lost_rank(error: BaseException) -> bool:
    """Whether the backend reports with this error that another rank's process has ended.

    Errors of other classes do not count, even if they quote such a message: it may come from an engine's process, which
    is not a rank.
    """
    from_backend = type(error) is RuntimeError or (
        isinstance(error, RuntimeError) and type(error).__module__.startswith("torch"))
    return from_backend and any(mark in str(error) for mark in LOST_RANK_MARKS)


LESS_MEMORY = (
    "what needs less memory: --micro-batch-size 1 (train_rl.py: a smaller --max-tokens-per-microbatch), --recompute "
    "full, --encoder-recompute full, a language model split over more GPUs (--llm-tp, --llm-pp); --dry-run shows the "
    "memory of a rank, and mimo plan with the flags of train_hetero.py compares layouts\n")


def error_report(who: str, error: BaseException) -> str:
    """Format an error with the rank that raised it.

    A rank that stops because of another one says so in one line, so that the cause stays visible. A ValueError is
    something the user can correct, so its message and one line with its origin are enough. Everything else is followed
    by its traceback, also subclasses of ValueError that libraries raise.
    """
    if isinstance(error, ReportedElsewhereError):
        return f"{who} stops: {error}\n"
    if _is_lost_rank(error):
        return f"{who} stops: another rank has ended; its message, if it left one, says why\n"
    block = f"error on {who}: {''.join(traceback.format_exception_only(error))}"
    if type(error) is ValueError:
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            place = f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}"
            block += f"  raised at {place} in {frames[-1].name}\n"
        return block
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        block += LESS_MEMORY
    return block + "".join(traceback.format_exception(error))


class FailFast:
    """Context of a rank's whole run: an exception inside is printed in one block and ends the process with code 1.

    The process waits for nothing, so that the launcher ends the other ranks at once, before they run into a timeout.
    Under torchrun the block also appears in its summary. A rank that stops because of another one lets that one end
    first, so that the summary names the right rank. SystemExit passes through; an interrupt from the keyboard exits
    with code 130.

    Attributes:
        who: the rank in words, for example `rank 3 (language grid tp 1 dp 0 pp 0, lane 0)`; may be replaced inside the
            context, once the grids are known.
    """

    def __init__(self, who: str) -> None:
        self.who = who

    def __enter__(self) -> FailFast:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        if isinstance(error, KeyboardInterrupt):
            write_report(f"interrupted: {self.who}\n")
            exit_now(130)
        # A rank that stops only because another one has failed is not the cause.
        is_cause = not (isinstance(error, ReportedElsewhereError) or _is_lost_rank(error))
        block = error_report(self.who, error)
        write_error_file(block, is_cause=is_cause)
        write_report(block)
        if not is_cause and _is_launched():
            # torchrun has to see the rank that met the error end first.
            if threading.current_thread() is threading.main_thread():
                # The run's own handler would let this process go on; torchrun's SIGTERM has to end it.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(ECHO_DELAY_S)
        exit_now(1)


# Other processes of a run on this host.


# On this signal faulthandler prints all stacks, even while a call into C keeps the interpreter's lock.
STACKS_SIGNAL = signal.SIGRTMIN + 7
# Seconds between that signal and SIGKILL, so that the process gets its turn even on an overloaded host.
STACKS_S = 2.0
STOPPED = ("T", "t")


def own_process(rank: int) -> RankProcess:
    return RankProcess(rank, socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def show_stacks_on_signal() -> None:
    """Allow `end_processes` of another rank to make this process print its stacks."""
    faulthandler.register(STACKS_SIGNAL, file=STDERR_FD, all_threads=True)


def stopped_siblings() -> tuple[int, ...]:
    """Find other ranks under the same launcher (children of this process's parent) that a signal has stopped."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{os.getppid()}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    stopped = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if _stat(pid)[0] in STOPPED:
                stopped.append(pid)
    return tuple(stopped)


def end_processes(processes: Iterable[RankProcess]) -> None:
    """End the processes that are on this host and still run, because they do not end by themselves.

    A stopped process would keep its launcher waiting. A hung one prints its stacks first.
    """
    here = socket.gethostname()
    left = [process for process in processes if process.host == here and process.pid != os.getpid()]
    hung = [process for process in left if _state(process) not in ("", *STOPPED)]
    for process in hung:
        _send(process, STACKS_SIGNAL)
    if hung:
        time.sleep(STACKS_S)
    for process in left:
        _send(process, signal.SIGKILL)


def _send(process: RankProcess, number: int) -> None:
    # Another rank of this host may have ended it already.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if _state(process):
            os.kill(process.pid, number)


def _state(process: RankProcess) -> str:
    """Return the letter of a process's state; empty if it has ended."""
    try:
        state, started = _stat(process.pid)
    except ProcessLookupError:
        return ""
    # Its id alone is not enough, because another process may have it by now.
    return state if started == process.started and state != "Z" else ""


def _stat(pid: int) -> tuple[str, int]:
    """Read the state letter and start time of a process. Raises ProcessLookupError if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return fields[0], int(fields[19])
