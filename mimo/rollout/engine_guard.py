"""A process that ends an engine whose starter is gone.

`python engine_guard.py PID` has a pipe from the starter as standard input, which ends with the starter, however that
happens. A stopped or hung engine does not notice that, and neither do stopped workers of it.
"""

from __future__ import annotations

import argparse
import select
import sys

import psutil

# Seconds between looks at which processes the engine has started.
LOOK_S = 5.0
# Seconds in which processes may end by themselves once the starter is gone.
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
        # Compares start times, too: another process may have the number by now.
        if process.is_running():
            process.kill()


def _family(pid: int) -> set[psutil.Process]:
    """The engine's process and all that it has started."""
    try:
        engine = psutil.Process(pid)
        return {engine, *engine.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int, help="process of the engine")
    guard(parser.parse_args().pid)
