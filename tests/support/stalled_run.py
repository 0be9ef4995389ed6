"""`train_hetero.py` with one rank that goes wrong in its second iteration: STALL is `fault:rank`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

FOR_EVER_S = 10_000
STALLS_AT = "stalls at "


def say() -> None:
    """Print when the fault happens, for the reader of the output."""
    os.write(sys.stdout.fileno(), f"{STALLS_AT}{time.time():.2f}\n".encode())  # whole, also from several threads


def sleep_in_forward() -> None:
    """Let the rank sleep for ever in its second microbatch."""
    from mimo.training import loop, step

    forward_step, train_step, calls = step.forward_step, loop.train_step, []

    def forward_that_sleeps(batches: Any, model: Any) -> Any:
        calls.append("forward")
        if calls.count("step") == 2 and calls[-2] == "forward":
            say()
            time.sleep(FOR_EVER_S)
        return forward_step(batches, model)

    def counted_step(*arguments: Any, **options: Any) -> Any:
        calls.append("step")
        return train_step(*arguments, **options)

    step.forward_step, loop.train_step = forward_that_sleeps, counted_step


def leave_a_microbatch_out() -> None:
    """Take a microbatch out of the rank's second iteration."""
    from mimo.training import loop

    train_step = loop.train_step
    calls = []

    def train_step_with_less(parts: Any, microbatches: Any, **options: Any) -> Any:
        calls.append(parts)
        if len(calls) == 2:
            say()
        return train_step(parts, microbatches[:-1] if len(calls) == 2 else microbatches, **options)

    loop.train_step = train_step_with_less


def hold_the_interpreter() -> None:
    """Keep the interpreter's lock in a call into C, in the second iteration."""
    import ctypes

    from mimo.training import loop

    train_step = loop.train_step
    calls = []

    def train_step_in_c(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            # PyDLL, unlike CDLL, keeps the lock during the call. A mutex, unlike sleep, is not left on a signal.
            say()
            mutex = ctypes.create_string_buffer(64)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return train_step(*arguments, **options)

    loop.train_step = train_step_in_c


def stay_in_a_save() -> None:
    """The rank's files of the first checkpoint never come to their end, as on a file system that does not answer."""
    from mimo.checkpoint import writer

    def write_that_stays(*arguments: Any) -> None:
        say()
        time.sleep(FOR_EVER_S)

    writer.write_planned_file = write_that_stays  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": sleep_in_forward, "count": leave_a_microbatch_out, "lock": hold_the_interpreter, "save": stay_in_a_save}

if __name__ == "__main__":
    from train_hetero import main

    fault, _, rank = os.environ["STALL"].partition(":")
    if fault and os.environ["RANK"] == rank:
        from mimo.platform import get_platform

        get_platform(sys.argv[sys.argv.index("--device") + 1])
        FAULTS[fault]()
    sys.exit(main())
