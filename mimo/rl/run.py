"""A run of reinforcement learning from flags to exit code. Importing this module imports no Megatron Core."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from mimo.config.rl_run import RlRunConfig
from mimo.grid.spec import Layout
from mimo.platform import get_platform
from mimo.platform.base import Platform
from mimo.registry import model_provider
from mimo.rl.placement import check_placement
from mimo.training.run import launch

if TYPE_CHECKING:
    from mimo.grid.groups import Grids


def run(config: RlRunConfig, layout: Layout) -> int:
    """Train as configured, as one process of a torchrun launch (or alone).

    Returns:
        Exit code: 0 at the end of the run or after SIGTERM.

    Raises:
        ValueError: the device does not exist, or there is no room for the engine; before any process group exists.
    """
    platform = get_platform(config.train.device)
    config = replace(config, train=replace(config.train, device=platform.name))
    check_placement(config, int(os.environ.get("RANK", "0")))

    def loop(config: RlRunConfig, grids: Grids, platform: Platform) -> None:
        # Megatron Core may only be imported once the platform is installed.
        from mimo.rl.loop import RlLoop

        prompts = config.find_dataset(config.data.dataset_provider)
        RlLoop(config, grids, platform, model_provider(config.model.model_provider), prompts).run()

    # Ranks gather weights for a refit, during which any of them may wait for the engine (`Collector.refit`).
    return launch(config, layout, loop, longest_wait_s=2 * config.rollout.refit_timeout_s)
