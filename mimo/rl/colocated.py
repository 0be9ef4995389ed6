"""Trainer and engine on the same GPUs, in turns: what one does not need gives its memory to the other.

The engine sleeps while the trainer trains, its weights and its keys and values gone (vLLM's sleep level 2: each refit
brings all weights anyway). For a refit the trainer's gradients and optimizer state go to the host first, then the
engine takes memory for weights; before the engine takes the rest, the trainer's weights go as well. On the CPU, where
vLLM cannot sleep, only the trainer's memory comes and goes.
"""

from __future__ import annotations

import time

from mimo.checkpoint.agree import from_first_rank, gather
from mimo.grid.groups import Grids
from mimo.refit.replicas import RolloutClient
from mimo.rl.collector import Devices
from mimo.training.offload import Offload

# vLLM's names of what a sleeping engine can take memory for.
WEIGHTS, KV_CACHE = "weights", "kv_cache"


class SharedDevices(Devices):
    """Whose turn it is. Every method is collective over the trainer's world.

    Args:
        grids: process groups.
        offload: of this rank's memory.
        sleeps: the engine can, which it does on GPUs.

    Attributes:
        client: the engine, on the first rank, once it is there.
        seconds: that memory took to come and go since they were last asked for; see `take_seconds`.
    """

    def __init__(self, grids: Grids, offload: Offload, *, sleeps: bool) -> None:
        self.client: RolloutClient | None = None
        self._grids, self._offload, self._sleeps = grids, offload, sleeps
        self.seconds = 0.0

    @property
    def keeps_weights(self) -> bool:
        """Whether an engine keeps its weights while the trainer trains."""
        return not self._sleeps

    def for_engine_start(self) -> None:
        """The engine has the devices to itself: it takes all its memory once, to see that it is there."""
        self._offload.everything()
        gather(self._grids, None)

    def for_refit(self) -> None:
        """Trainer and engine both have their weights."""
        began = time.perf_counter()
        self._offload.gradients()
        self._offload.optimizer()
        gather(self._grids, None)
        self._wake_up(WEIGHTS)
        self.seconds += time.perf_counter() - began

    def for_rollout(self) -> None:
        """The engine has what it needs to generate."""
        began = time.perf_counter()
        self._offload.weights()
        gather(self._grids, None)
        self._wake_up(KV_CACHE)
        self.seconds += time.perf_counter() - began

    def for_training(self) -> None:
        """The trainer has all that it needs; the engine sleeps."""
        began = time.perf_counter()
        if self.client is not None and self._sleeps:
            self.client.sleep()
        from_first_rank(self._grids, None)
        self._offload.bring_back()
        self.seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """`seconds`, which begin anew."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _wake_up(self, tag: str) -> None:
        if self.client is not None and self._sleeps:
            self.client.wake_up(tag)
        from_first_rank(self._grids, None)
