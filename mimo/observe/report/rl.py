"""What only runs of reinforcement learning have: parts of an iteration, and their charts."""

from __future__ import annotations

import numpy as np

from mimo.observe.report.run import Run
from mimo.observe.report.summary import finite, typical

WAIT = "other waits for completions"
# Keys of what the trainer waits for in each iteration, and of its own work, with their words.
ENGINE_PARTS = {"memory-s": "memory to and fro", "refit-s": "refit", "rollout-s": "rollout", "reward-s": "reward"}
OWN_PARTS = {"log-probs-s": "log-probs", "reference-s": "reference", "update-s": "update"}
CSS_OF_RL = {"rollout": "k-bridge-wait", "refit": "k-pipeline-wait", "memory to and fro": "k-data-wait",
             "reward": "k-idle", WAIT: "k-other", "log-probs": "k-backward", "reference": "k-gradient-sync",
             "update": "k-forward", "rest": "k-row"}
# How far parts may exceed what they are parts of, for clocks.
SLACK = 1.02


def _mean(run: Run, key: str) -> float:
    values = finite(typical(run.steps).get(key))
    return float(np.mean(values)) if len(values) else 0.0


def rl_parts(run: Run) -> tuple[dict[str, float], float, float]:
    """Where an iteration went.

    Rollouts beside the update count as far as the trainer waited for them.

    Returns:
        Seconds by part, means over the typical iterations, empty without figures; of the whole iteration; and of the
        trainer's waiting for completions.
    """
    if not run.steps.has("rollout-wait-s"):
        return {}, 0.0, 0.0
    total, waited = _mean(run, "iteration-time"), _mean(run, "rollout-wait-s")
    engine = {name: _mean(run, key) for key, name in ENGINE_PARTS.items()}
    in_turn = sum(engine.values()) <= SLACK * waited
    parts = engine | {WAIT: max(waited - sum(engine.values()), 0.0)} if in_turn else {WAIT: waited}
    parts |= {name: _mean(run, key) for key, name in OWN_PARTS.items()}
    parts["rest"] = max(total - sum(parts.values()), 0.0)
    return {name: value for name, value in parts.items() if value > 0}, total, waited
