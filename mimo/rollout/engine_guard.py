"""A process that ends an engine whose starter is gone.

`python engine_guard.py PID` reads from a pipe whose other end the starter holds, so that standard input ends when the
starter ends, for whatever reason. An engine or worker that hangs or was stopped would not notice this by itself.
"""

from __future__ import annotations

import argparse
import select
import sys

import psutil

# Seconds between searches for processes that the engine has started.
LOOK_S = 5.0
# Seconds in which processes may end by themselves after the starter is gone.
GRACE_S = 3.0


def guard(pid: int) -> None:
    """Wait for the end of standard input, then kill what is left of the engine."""
    family: set[psutil.Process] = set()
    while True:
        family = {each for each in family | _family(pid) if each.is_running()}
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            break
    _, left = psutil.wait_procs(family, timeout=GRACE_S)
    for process in left:
        # This also compares start times, because another process may have the same id by now.
        if process.is_running():
            process.kill()


def _family(pid: int) -> set[psutil.Process]:
    """Return the engine's process and all processes that it has started."""
    try:
        engine = psutil.Process(pid)
        return {engine, *engine.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int, help="process of the engine")
    guard(parser.parse_args().pid)
