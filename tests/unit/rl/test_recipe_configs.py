"""The configurations of scripts/rl are accepted as they are: their runs take minutes, a flag that is gone does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.config.validate import validate

CONFIGS = Path(__file__).parents[3] / "scripts" / "configs"
# Name -> trainer ranks of its script.
RECIPES = {"arithmetic": 1, "digits": 2}


def config_flags(recipe: str, *parts: str) -> list[str]:
    """Flags that name its files."""
    return [word for part in parts for word in ("--config", str(CONFIGS / f"rl_{recipe}{part}.toml"))]


@pytest.mark.parametrize(("recipe", "ranks"), RECIPES.items())
def test_both_stages_are_accepted(recipe, ranks):
    first = parse(config_flags(recipe, "_model", "_sft"))
    validate(first, ranks)
    then = parse_as(RlRunConfig, config_flags(recipe, "_model", ""), DESCRIPTION)
    validate_rl(then, ranks)
    assert first.model_family == then.model_family, "the checkpoint fits"
    assert then.rl.eval_prompts > 0, "the last line is the reward on held-out prompts"


def test_only_answers_to_learn_from_are_wrong():
    first = parse(config_flags("arithmetic", "_model", "_sft"))
    then = parse_as(RlRunConfig, config_flags("arithmetic", "_model", ""), DESCRIPTION)
    assert first.dataset.arithmetic_slip_fraction > 0.5 and then.dataset.arithmetic_slip_fraction == 0
    assert first.dataset.arithmetic_max == then.dataset.arithmetic_max
    assert first.dataset.arithmetic_valid_fraction == then.dataset.arithmetic_valid_fraction, "the same are held out"
