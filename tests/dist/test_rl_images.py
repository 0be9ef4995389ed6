"""Policy updates of vision-language models are the same on every layout, for every division into microbatches."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mimo.config.rl import RlConfig
from tests.support import vlm_updates
from tests.support.global_state import assemble, worst_errors
from tests.support.marks import fast_only
from tests.support.policy_updates import TOLERANCE, assert_same_updates
from tests.support.spawn import WorkerPool
from tests.support.vlm_updates import LENGTHS, PROMPTS, TOKENS_OF_IMAGE, Outcome

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, entropy_coeff=0.01, importance_cap=1.1)
# name -> ranks, flags, tokens of a microbatch, microbatches of each rank
LAYOUTS = {
    "disjoint": (2, "", 48, 3),
    "fan-out": (3, "--llm-dp 2", 48, 2),
    "fan-in": (3, "--encoder-dp 2", 24, 5),
    "more-microbatches": (1, "--layout colocated", 24, 5),
    "disjoint-2-2": (4, "--encoder-dp 2 --llm-dp 2", 40, 2),
    "fan-in-tp2": (4, "--encoder-dp 2 --llm-tp 2 --sequence-parallel", 48, 3),
    "pipelines": (4, "--encoder-pp 2 --llm-pp 2", 48, 3),
    "colocated-fan-out": (2, "--layout colocated --encoder-tp 2 --llm-dp 2", 48, 2),
    "cp2": (3, "--llm-cp 2", 48, 3),
    "fan-in-cp2": (4, "--encoder-dp 2 --llm-cp 2 --logits-chunk-size 9", 48, 3),
    "colocated-cp2": (2, "--layout colocated --encoder-dp 2 --llm-cp 2", 48, 3),
    "colocated-cp2-pp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-pp 2", 48, 3),
    "colocated-cp2-dp2": (4, "--layout colocated --encoder-tp 2 --encoder-dp 2 --llm-cp 2 --llm-dp 2 --encoder-chunk 1 "
                          "--encoder-activation-gib 0", 48, 2),
    "windows-of-one": (2, "--layout colocated --encoder-dp 2 --llm-dp 2 --encoder-window 1", 48, 2),
    "colocated-fan-in": (2, "--layout colocated --encoder-dp 2 --llm-tp 2", 48, 3),
}


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> Outcome:
    """Reference update of one process in one microbatch."""
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=200)
    (outcome,) = pool.run(vlm_updates.update, ("--layout", "colocated"), 1, config, world_size=1)
    return outcome


# family -> layouts
FAMILIES = {"qwen2_5_vl": ("fan-out", "pipelines", "colocated-fan-in", "more-microbatches"),
            "qwen3_vl": ("fan-out", "pipelines", "colocated-fan-in", "more-microbatches", "colocated-cp2-pp2"),
            "nemotron-moe-vlm-tiny": ("fan-out", "more-microbatches")}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_images_of_any_size_take_the_same_step(pool, family):
    """Positions of three axes, levels of DeepStack and videos, for images of several sizes in one microbatch."""
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=400)
    (expected,) = pool.run(vlm_updates.update, ("--layout", "colocated"), 1, config, 0, family, world_size=1)
    ((loss, gradients),) = pool.run(vlm_updates.plain, config, family, world_size=1)
    assert expected.results[0].metrics["loss"] == pytest.approx(loss, rel=TOLERANCE)
    errors = worst_errors(assemble(gradients), [expected.gradients])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    for layout in FAMILIES[family]:
        world_size, flags, budget, _ = LAYOUTS[layout]
        # Prompts with videos are longer.
        config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=2 * budget)
        found = pool.run(vlm_updates.update, tuple(flags.split()), world_size, config, 0, family, world_size=world_size)
        assert not found[0].error
        assert_same_updates(expected, found, found[0].results[0].num_microbatches)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_plain_formula(pool, expected):
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=200)
    ((loss, gradients),) = pool.run(vlm_updates.plain, config, world_size=1)
    first = expected.results[0]
    assert first.success and first.num_microbatches == 1
    images = sum(prompt.count(vlm_updates.IMAGE_TOKEN) for prompt in PROMPTS)
    assert first.num_tokens == sum(LENGTHS) + 2 * (sum(map(len, PROMPTS)) + (TOKENS_OF_IMAGE - 1) * images)
    assert first.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE)
    errors = worst_errors(assemble(gradients), [expected.gradients])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    assert any("modality_submodules" in name and np.abs(value).max() > 1e-4
               for name, value in assemble(gradients).items()), "the encoder learns from completions"


@pytest.mark.parametrize("layout", fast_only(["fan-out", "colocated-cp2"], LAYOUTS))
def test_every_layout_and_budget_takes_the_same_step(pool, expected, layout):
    world_size, flags, budget, num_microbatches = LAYOUTS[layout]
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=budget)
    found = pool.run(vlm_updates.update, tuple(flags.split()), world_size, config, world_size=world_size)
    assert_same_updates(expected, found, num_microbatches)
    if "layout" not in flags:
        *encoders, language = (outcome.pixels[0] for outcome in found)
        assert language == [], "ranks without an encoder build no pixels"
        assert max(len(drawn) for drawn in encoders) == len(set(max(encoders, key=len))), "each picture once"


@pytest.mark.slow
def test_frozen_parts_do_not_change(pool, expected):
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=48)
    found = pool.run(vlm_updates.update, ("--freeze", "vision,projector"), 2, config, world_size=2)
    first = found[0].results[0]
    assert first.metrics["loss"] == pytest.approx(expected.results[0].metrics["loss"], rel=TOLERANCE)
    after, moved = assemble([piece for outcome in found for piece in outcome.after]), assemble(expected.after)
    same = {name for name, value in after.items() if np.allclose(value, moved[name], rtol=0, atol=1e-6)}
    assert not any("modality_submodules" in name for name in same), "they move where they train"
    assert 0 < first.grad_norm < expected.results[0].grad_norm and math.isfinite(first.grad_norm)


@pytest.mark.slow
def test_an_encoder_rank_whose_prompts_differ_says_so(pool):
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=200)
    (outcome,) = pool.run(vlm_updates.update, ("--layout", "colocated"), 1, config, 1, world_size=1)
    assert outcome.error.startswith("prompt 0 is prompt 0 on an encoder rank and differs from the prompt of "
                                    "completion prompt 0#0"), outcome.error
