"""A trainer whose engine is a Ray actor, which it kills in the end; inside a worker process."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.rollout.engine import EngineOptions, Rollout, Sampling
from tests.support import refit

DRAWN = Sampling(max_tokens=8, temperature=1.0, n=2, ignore_eos=True)


def draw(client: Any, prompts: dict[str, list[int]]) -> list[list[Rollout]]:
    """Completions of each prompt, from a seed of its own."""
    answers: list[list[Rollout]] = client.generate([{"prompt_token_ids": tokens} for tokens in prompts.values()], DRAWN,
                                                   list(range(len(prompts))))
    return answers


@dataclass
class UnderRay:
    """A trainer's view of its engine under Ray.

    Attributes:
        steps: as `tests.support.refit.sync`.
        drawn: completions after the last one.
        error: error of a call after its process was killed.
        seconds: that this call took.
        signal_is_kept: whether SIGTERM still has the handler of before.
        left: command lines of processes that are there after the end.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[list[Rollout]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    signal_is_kept: bool = False
    left: list[str] = field(default_factory=list)


def sync_under_ray(rank: int, name: str, folder: str, engine: EngineOptions, options: RefitOptions,
                   prompts: dict[str, list[int]], steps: int) -> UnderRay:
    """Start an engine under a Ray of this process, give it weights, ask it, kill it, end Ray."""
    from mimo.rl.placement import forwarded
    from mimo.rollout.launcher import leave_launcher
    from mimo.rollout.ray_actors import RayCluster, RayEngines

    before = signal.getsignal(signal.SIGTERM)
    started = RayEngines([engine], RayCluster(""), "CPU", 900, 300, forwarded(os.environ), leave_launcher, "127.0.0.1")
    found = UnderRay()
    try:
        found.signal_is_kept = signal.getsignal(signal.SIGTERM) == before
        client: Any = started.client
        process = psutil.Process(int(re.findall(r"process (\d+)", client.name)[0]))
        found.steps = refit.sync(rank, name, folder, (), 1, client, options, prompts, steps)
        found.drawn = draw(client, prompts)
        process.kill()
        began = time.monotonic()
        try:
            draw(client, prompts)
        except RefitError as error:
            found.error = str(error)
        found.seconds = time.monotonic() - began
    finally:
        children = psutil.Process().children(recursive=True)
        started.close()
    gone, left = psutil.wait_procs(children, timeout=30)
    assert gone, "Ray has processes"
    found.left = [" ".join(each.cmdline()) for each in left]
    return found
