"""A live rollout engine with the weights of a folder, as a run sets it up; in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mimo.config.rl_run import RlRunConfig
from mimo.rl.launch_engine import engine_options
from mimo.rollout.engine import Rollout, RolloutEngine, Sampling


def answers(config: RlRunConfig, folder: str, prompts: Sequence[Sequence[int]],
            samplings: Sequence[Sampling]) -> list[list[list[Rollout]]]:
    """Return the engine's answers to all prompts for each way of sampling."""
    engine = RolloutEngine(replace(engine_options(config, Path(folder)), load_format="auto"))
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [engine.generate(asked, sampling, seeds=range(len(prompts))) for sampling in samplings]
