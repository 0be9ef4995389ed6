"""Rewards of a run under test: one that is easy to raise, and some that end it."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def digits(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Share of the longest completion's characters that are digits."""
    return sum(character.isdigit() for character in completion) / 12


def digits_of_odd_answers(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score like `digits` for prompts whose answer is odd, and all completions of other prompts alike."""
    return digits(prompt, completion, ground_truth, metadata) if int(ground_truth[-1]) % 2 else 0.0


def length(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score the number of characters, for prompts whose tokens are those of texts."""
    return len(completion) / 12


_calls = itertools.count(1)


def ending(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score as many completions as SCORED says, with the reward of this file that LIKE names, then raise."""
    if next(_calls) > int(os.environ["SCORED"]):
        raise KeyError("enough")
    score: float = globals()[os.environ["LIKE"]](prompt, completion, ground_truth, metadata)
    return score


def failing(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Notes the engine's process in the file that PID_FILE names, and raises."""
    (engine,) = multiprocessing.active_children()
    Path(os.environ["PID_FILE"]).write_text(str(engine.pid))
    raise KeyError("no such answer")


def killing(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Kills the engine, whose answers it scores."""
    for engine in multiprocessing.active_children():
        engine.kill()
        engine.join()
    return float(len(completion))


def killing_once(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score like `digits`, and kill the engine, a child or a Ray actor, after the first answer of all."""
    if next(_calls) == 1:
        killing(prompt, completion, ground_truth, metadata)
        killing_actor(prompt, completion, ground_truth, metadata)
    return digits(prompt, completion, ground_truth, metadata)


def stopping_once(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score like `digits`, and stop the engine, a child or a Ray actor, after the first iteration's answers.

    The answers to four held-out prompts come before them. The next refit then hangs.
    """
    if next(_calls) == 4 + 1:
        (engine,) = [psutil.Process(child.pid) for child in multiprocessing.active_children()] or _actors()
        engine.suspend()
    return digits(prompt, completion, ground_truth, metadata)


def killing_starts(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Score like `digits`, and kill the engine after the first answer of all, and the next two while they start."""
    if next(_calls) == 1:
        lost = {engine.pid for engine in multiprocessing.active_children()}
        killing(prompt, completion, ground_truth, metadata)
        threading.Thread(target=_kill_next, args=(2, lost), daemon=True).start()
    return digits(prompt, completion, ground_truth, metadata)


def _kill_next(count: int, known: set[int | None]) -> None:
    """Kill the next engines that this process starts."""
    while count:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.pid not in known and "spawn_main" in " ".join(child.cmdline()):
                    known.add(child.pid)
                    child.kill()
                    count -= 1
        time.sleep(0.05)


def hanging(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Never comes back."""
    time.sleep(1e6)
    return 0.0


def killing_actor(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Kills the Ray actor whose answers it scores."""
    for actor in _actors():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends at one of the next calls
            actor.kill()
    return float(len(completion))


def _actors() -> list[psutil.Process]:
    """Return the Ray actors that hold an engine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "EngineActor" in " ".join(process.cmdline()):
                found.append(process)
    return found
