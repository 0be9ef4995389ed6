"""The end of a rank that cannot go on: say why in one piece, then leave without waiting for anybody."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

STDERR_FD = 2
# Seconds that an exit waits for its output to be taken: a full pipe that nobody reads must not keep the process alive.
WRITE_LIMIT_S = 5.0
# What gloo and NCCL say of a rank whose process has ended.
LOST_RANK_MARKS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


def within_limit(action: Callable[[], None], limit_s: float = WRITE_LIMIT_S) -> None:
    """Run `action` in a thread and go on without it after the limit."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A closed pipe or stream has nobody left to read it.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write_all(data: bytes) -> None:
    # A closed or broken standard error leaves nowhere to report to.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(STDERR_FD, data):]


def write_report(text: str, path: Path | None = None) -> None:
    """Write `text` to standard error in one piece, and to `path` if given.

    It goes around `sys.stderr`, whose lock a blocked thread may hold. The text names a `path` that cannot be written,
    or not in time: a file system that does not answer must not keep the process alive.
    """
    if path is not None:
        # What is said if the writing below does not come to an end.
        problem: list[str] = ["not written in time"]
        within_limit(lambda: problem.append(_copy(text, path)))
        if problem[-1]:
            text += f"(no copy in {path}: {problem[-1]})\n"
    within_limit(lambda: _write_all(text.encode("utf-8", "backslashreplace")))


def _copy(text: str, path: Path) -> str:
    """Write a file; why it could not be written, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return str(error)
    return ""


def exit_now(code: int) -> NoReturn:
    """Leave the process with `code`: no `atexit`, no join, no process group tear-down, any of which can hang."""
    within_limit(_flush_streams)
    os._exit(code)


def _raised_at(error: BaseException) -> str:
    """Where an error was raised: the last two parts of the path, the line and the function."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f"  raised at {'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}\n"


class ReportedElsewhereError(RuntimeError):
    """This rank stops because of an error that another rank can name, and does."""


def _is_lost_rank(error: BaseException) -> bool:
    """Whether the error is the backend's word that another rank's process has ended."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST_RANK_MARKS)


def format_error(who: str, error: BaseException) -> str:
    """The block that names the rank and the error.

    A rank that stops because of another one says so in one line: the cause must not drown in its consequences.
    A ValueError is something the user can put right, so its message and one line with its place are enough. Anything
    else, subclasses of ValueError that libraries raise included, is followed by its traceback.
    """
    if isinstance(error, ReportedElsewhereError):
        return f"{who} stops: {error}\n"
    if _is_lost_rank(error):
        return f"{who} stops: another rank has ended; its message, if it left one, says why\n"
    block = f"error on {who}: {''.join(traceback.format_exception_only(error))}"
    if type(error) is ValueError:
        return block + _raised_at(error)
    return block + "".join(traceback.format_exception(error))


class FailFast:
    """The context that `fail_fast` returns.

    Attributes:
        who: the rank in words; may be made more precise inside, once the grids are known.
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
        write_report(format_error(self.who, error))
        exit_now(1)


def fail_fast(who: str) -> FailFast:
    """Context of a rank's whole run: an exception inside is printed in one block and ends the process with code 1.

    Nothing is waited for, so the other ranks learn of the failure from the launcher at once and not from a timeout.
    SystemExit passes through; an interrupt from the keyboard exits with code 130.

    Args:
        who: the rank in words, for example `rank 3 (language grid tp 1 dp 0 pp 0, lane 0)`.
    """
    return FailFast(who)
