"""Stand-ins for `RolloutEngine` where only calls to an engine's process matter.

The process imports this module to find its stand-in, so it must not import Megatron Core, which takes ten seconds.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from mimo.rollout import process as host
from mimo.rollout.engine import EngineOptions, NodePlace


def engine_options(workers: int = 1, load_format: str = "dummy") -> EngineOptions:
    """Return options for an engine of this module, or of `refit_faults.use_plain_engine`."""
    return EngineOptions("plain", "float32", tensor_parallel_size=workers, load_format=load_format)


class EchoEngine:
    """Records the calls of `update_weights`, which may take a while and raise."""

    def __init__(self, options: EngineOptions, place: NodePlace | None = None) -> None:
        self.version = options.model
        self.done: list[str] = []

    def ping(self) -> None:
        """Do nothing."""

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return the lengths of the names of the recorded calls."""
        return [[float(len(name)) for name in self.done]]

    def own_lock(self) -> Any:
        """Return what no process can send to another."""
        return threading.Lock()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a while, raise."""
        name = update_info["name"]
        self.done.append(name)
        time.sleep(update_info.get("seconds", 0.0))
        self.done.append(name)
        if "error" in update_info:
            raise update_info["error"]


def use_echo_engine() -> None:
    """Put `EchoEngine` in place of the engine, in its process before it is made."""
    host.RolloutEngine = EchoEngine  # type: ignore[assignment,misc]


def fail_to_start() -> None:
    """Fail in the engine's process, before the engine is made, after one of its children has said why."""
    subprocess.run(["sh", "-c", "echo a worker finds no model; echo its last words >&2"], check=True)
    raise OSError("there is no such model")


class BreakingEngine(EchoEngine):
    """Does not come up for the model `broken`; takes a while for others."""

    def __init__(self, options: EngineOptions, place: NodePlace | None = None) -> None:
        if options.model == "broken":
            raise OSError("there is no such model")
        super().__init__(options)
        time.sleep(1000)


def use_breaking_engine() -> None:
    """Put `BreakingEngine` in place of the engine, in its process before it is made."""
    host.RolloutEngine = BreakingEngine  # type: ignore[assignment,misc]


class NotingEngine(EchoEngine):
    """Stand-in for `RolloutEngine` that reports what its process is given."""

    def variable(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)

    def start_worker(self) -> int:
        """Start a process that never ends by itself, like a worker that hangs. Return its id."""
        return subprocess.Popen(["sleep", "10000"]).pid


def use_noting_engine() -> None:
    """Replace the engine in its process before it is made."""
    host.leave_launcher()
    host.RolloutEngine = NotingEngine  # type: ignore[assignment,misc]


def sleep_long() -> None:
    """Sleep in an engine's process, so that the engine is never made."""
    time.sleep(1e4)
