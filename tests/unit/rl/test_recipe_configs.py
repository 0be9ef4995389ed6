"""The configurations of scripts/rl are accepted as they are: their runs take minutes, a flag that is gone does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.config.validate import validate

CONFIGS = Path(__file__).parents[3] / "scripts" / "configs"
# Model -> recipe, trainer ranks of its script.
RECIPES = {"arithmetic": ("arithmetic", 1), "digits": ("digits", 2), "digits_qwen3_vl": ("digits", 2),
           "digits_nemotron": ("digits", 2)}


def config_flags(*parts: str) -> list[str]:
    """Flags that name files."""
    return [word for part in parts for word in ("--config", str(CONFIGS / f"rl_{part}.toml"))]


@pytest.mark.parametrize("model", RECIPES)
def test_both_stages_are_accepted(model):
    recipe, ranks = RECIPES[model]
    first = parse(config_flags(f"{model}_model", f"{recipe}_sft"))
    validate(first, ranks)
    then = parse_as(RlRunConfig, config_flags(f"{model}_model", recipe), DESCRIPTION)
    validate_rl(then, ranks)
    assert first.model_family == then.model_family, "the checkpoint fits"
    assert then.rl.eval_prompts > 0, "the last line is the reward on held-out prompts"


def test_only_answers_to_learn_from_are_wrong():
    first = parse(config_flags("arithmetic_model", "arithmetic_sft"))
    then = parse_as(RlRunConfig, config_flags("arithmetic_model", "arithmetic"), DESCRIPTION)
    assert first.dataset.arithmetic_slip_fraction > 0.5 and then.dataset.arithmetic_slip_fraction == 0
    assert first.dataset.arithmetic_max == then.dataset.arithmetic_max
    assert first.dataset.arithmetic_valid_fraction == then.dataset.arithmetic_valid_fraction, "the same are held out"
