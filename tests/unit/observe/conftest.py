"""Processes that a test may lose: they stall, are signalled, or leave at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python process from source text, with pipes; it and its children are killed after the test."""
    running: list[subprocess.Popen[str]] = []

    def start_one(source: str, *arguments: object, **extra: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONUNBUFFERED", None)
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **extra}
        # A session of its own, so that its forked children can be ended with it.
        process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **options)
        running.append(process)
        return process

    yield start_one
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
