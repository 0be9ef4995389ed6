"""A policy update is the same on every layout and for every division into microbatches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable

import numpy as np
import pytest

from mimo.config.rl import RlConfig
from tests.support import policy_updates
from tests.support.global_state import assemble, worst_errors
from tests.support.marks import fast_only
from tests.support.policy_updates import LENGTHS, PROMPTS, TOLERANCE, Outcome, assert_same_updates
from tests.support.spawn import WorkerPool

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, entropy_coeff=0.01, importance_cap=1.1, kl_coeff=0.5)
IN_REWARD = dataclasses.replace(CONFIG, kl_in="reward", kl_type="k1")
# name -> ranks, flags, tokens of a microbatch, microbatches of each rank
LAYOUTS = {"more-microbatches": (1, "", 20, 4), "dp2-ep2": (2, "--llm-dp 2 --llm-ep 2 --logits-chunk-size 5", 24, 2),
           "tp2": (2, "--llm-tp 2 --sequence-parallel --logits-chunk-size 7", 24, 4), "pp2": (2, "--llm-pp 2", 24, 4),
           "cp2-ep2": (2, "--llm-cp 2 --llm-ep 2", 24, 4),
           "cp2-tp2": (4, "--llm-cp 2 --llm-tp 2 --sequence-parallel", 48, 2),
           "cp2-pp2": (4, "--llm-cp 2 --llm-pp 2 --logits-chunk-size 4", 24, 4),
           "cp2-dp2": (4, "--llm-cp 2 --llm-dp 2", 24, 2), "cp4": (4, "--llm-cp 4", 24, 5)}
# In the second update of a rollout, ratios are clipped. The first of these has every term of whole sequences.
TWICE = dataclasses.replace(CONFIG, updates_per_rollout=2)
LOSSES = {
    "sequences": dataclasses.replace(TWICE, kl_in="reward", kl_type="k1", policy_loss="gspo",
                                     loss_aggregation="seq-mean-token-mean", importance_correction="sequence",
                                     importance_low=1.0, importance_high=1.33),
    "gspo": dataclasses.replace(TWICE, policy_loss="gspo", loss_aggregation="seq-mean-token-mean", kl_type="k2",
                                importance_correction="icepop"),
    "cispo": dataclasses.replace(TWICE, policy_loss="cispo", clip_ratio_low=0.01, clip_ratio_high=0.01,
                                 loss_aggregation="seq-mean-token-sum-norm", loss_norm_length=16, kl_type="k1"),
    "ppo": dataclasses.replace(TWICE, clip_ratio_low=0.01, clip_ratio_high=0.01, dual_clip_ratio=1.02),
}


@pytest.fixture(scope="module")
def expected_of(pool: WorkerPool) -> Callable[[RlConfig], Outcome]:
    """Reference update of one process in one microbatch, computed once for each configuration."""

    @functools.cache
    def expected(config: RlConfig) -> Outcome:
        (outcome,) = pool.run(policy_updates.update, (), 1, dataclasses.replace(config, max_tokens_per_microbatch=100),
                              world_size=1)
        return outcome

    return expected


def test_an_update_moves_the_policy_towards_rewarded_completions(expected_of):
    expected = expected_of(CONFIG)
    first, second = expected.results
    assert first.success and first.num_microbatches == 1 and first.grad_norm > 0
    assert first.num_tokens == sum(LENGTHS) + 2 * sum(map(len, PROMPTS))
    # The policy of the loss is that of the log-probs before the update.
    assert first.metrics["ratio"] == pytest.approx(1, abs=1e-6) and first.metrics["clipped_low"] == 0
    assert first.metrics["gen_kl"] > 1e-3 and 0 < first.metrics["importance_clipped_fraction"] < 1
    assert first.metrics["reference_kl"] > 1e-3 and first.reference_s > 0 and "kl_penalty" not in first.metrics
    assert 3 < first.metrics["entropy"] < math.log(policy_updates.VOCAB_SIZE)
    assert all(math.isfinite(value) for each in expected.results for value in each.metrics.values())
    before, after = assemble(expected.before), assemble(expected.after)
    still = [name for name, values in before.items() if np.array_equal(values, after[name])]
    assert still == [] and second.metrics["loss"] != first.metrics["loss"]


@pytest.mark.parametrize("layout", fast_only(["dp2-ep2", "cp2-ep2"], LAYOUTS))
def test_every_layout_and_budget_takes_the_same_step(pool, expected_of, layout):
    world_size, flags, budget, num_microbatches = LAYOUTS[layout]
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=budget)
    found = pool.run(policy_updates.update, tuple(flags.split()), world_size, config, world_size=world_size)
    assert_same_updates(expected_of(CONFIG), found, num_microbatches)


@pytest.mark.parametrize(("kind", "layout"), fast_only(
    [("sequences", "cp2-ep2"), ("gspo", "more-microbatches"), ("cispo", "tp2")], [
        *itertools.product(LOSSES, ("more-microbatches", "dp2-ep2", "tp2", "pp2", "cp2-ep2")),
        ("sequences", "cp2-pp2"), ("sequences", "cp4")]))
def test_every_loss_is_the_same_on_every_layout(pool, expected_of, kind, layout):
    world_size, flags, budget, _ = LAYOUTS[layout]
    config = dataclasses.replace(LOSSES[kind], max_tokens_per_microbatch=budget)
    found = pool.run(policy_updates.update, tuple(flags.split()), world_size, config, world_size=world_size)
    expected = expected_of(LOSSES[kind])
    assert_same_updates(expected, found, found[0].results[0].num_microbatches)
    metrics = expected.results[0].metrics
    assert metrics["clipped_low"] + metrics["clipped_high"] > 0 and metrics["importance_clipped_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["more-microbatches", "dp2-ep2", "pp2"], ids="reward-{}".format)
def test_kl_off_the_reward_is_the_same_for_every_layout_and_budget(pool, expected_of, layout):
    world_size, flags, budget, num_microbatches = LAYOUTS[layout]
    config = dataclasses.replace(IN_REWARD, max_tokens_per_microbatch=budget)
    found = pool.run(policy_updates.update, tuple(flags.split()), world_size, config, world_size=world_size)
    expected = expected_of(IN_REWARD)
    assert_same_updates(expected, found, num_microbatches)
    assert abs(expected.results[0].metrics["kl_penalty"]) > 0.01
    assert expected.results[0].metrics["loss"] != expected_of(CONFIG).results[0].metrics["loss"]


@pytest.mark.slow
def test_updates_of_one_rollout_take_the_ratios_to_the_policy_before_the_first(pool):
    """Against the same done by hand: two updates of one step each, the second with log-probs from before the first."""
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=100)
    (expected,) = pool.run(policy_updates.update_by_halves, config, world_size=1)
    two = dataclasses.replace(config, updates_per_rollout=2)
    (found,) = pool.run(policy_updates.update, (), 1, two, False, 1, world_size=1)
    (result,), (first, second) = found.results, expected.results
    errors = worst_errors(assemble(expected.after), [found.after])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    assert first.metrics["ratio"] == pytest.approx(1, abs=1e-6) and abs(second.metrics["ratio"] - 1) > 1e-3
    assert second.metrics["clipped_low"] + second.metrics["clipped_high"] > 0
    tokens = [sum(LENGTHS[:4]), sum(LENGTHS[4:])]
    for name, value in result.metrics.items():
        of_both = [each.metrics[name] for each in (first, second)]
        mean = max(of_both) if "max" in name else sum(map(operator.mul, of_both, tokens)) / sum(tokens)
        assert value == pytest.approx(mean, rel=1e-4, abs=1e-6), name
    assert result.grad_norm == pytest.approx((first.grad_norm + second.grad_norm) / 2, rel=TOLERANCE)
    assert (result.success, result.num_trained, result.num_microbatches) == (True, len(LENGTHS), 2)
    assert result.num_tokens == first.num_tokens + second.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids="two-updates-{}".format)
def test_every_layout_and_budget_takes_the_same_two_steps(pool, expected_of, layout):
    world_size, flags, budget, _ = LAYOUTS[layout]
    expected = expected_of(TWICE)
    found = pool.run(policy_updates.update, tuple(flags.split()), world_size,
                     dataclasses.replace(TWICE, max_tokens_per_microbatch=budget), world_size=world_size)
    assert_same_updates(expected, found, found[0].results[0].num_microbatches)


@pytest.mark.slow
def test_the_gradient_norm_is_not_multiplied_by_data_parallel_ranks(pool):
    """Bug 9: without a function that sums gradients over ranks, each has its own, and the norm is another."""
    config = dataclasses.replace(CONFIG, kl_coeff=0.0, max_tokens_per_microbatch=100)
    (alone,) = pool.run(policy_updates.watched_update, (), 1, config, world_size=1)
    for found in pool.run(policy_updates.watched_update, ("--llm-dp", "2"), 2, config, world_size=2):
        assert found.finalizes and found.grad_norm == pytest.approx(alone.grad_norm, rel=TOLERANCE)
        assert found.calls == [(1, True), (1, False)] and found.passes == "FB"


@pytest.mark.slow
def test_microbatches_of_a_pipeline_overlap(pool):
    """Bug 10: a call of the schedule for each microbatch leaves one stage waiting for the other."""
    config = dataclasses.replace(CONFIG, kl_coeff=0.0, max_tokens_per_microbatch=24)
    first, last = pool.run(policy_updates.watched_update, ("--llm-pp", "2"), 2, config, world_size=2)
    assert first.calls == last.calls == [(4, True), (4, False)]
    assert (first.passes, last.passes) == ("FFBFBFBB", "FBFBFBFB")


@pytest.mark.slow
def test_a_gen_kl_above_its_limit_updates_nothing(pool, expected_of):
    limit = 0.9 * expected_of(CONFIG).results[0].metrics["gen_kl"]
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=100)
    first, second = pool.run(policy_updates.update, ("--llm-dp", "2"), 2, config, False, 1, limit, world_size=2)
    assert re.match(rf"ValueError: gen-kl \S+ is above --max-gen-kl {limit:g}: on {sum(LENGTHS)} sampled tokens the "
                    r"engine's log-probs differ from the trainer's by \S+ nats on average .* Nothing was updated, and "
                    r"checkpoints from before can be resumed\. Check that --refit-verify-interval 1 passes",
                    first.error), first.error
    assert second.error == "ReportedElsewhereError: rank 0 reports what is wrong"
    before, after = assemble(first.before), assemble(first.after)
    assert all(np.array_equal(values, after[name]) for name, values in before.items())
    (passed,) = pool.run(policy_updates.update, (), 1, config, False, 1, 2 * limit, world_size=1)
    assert passed.error == "" and passed.results[0].success


@pytest.mark.slow
def test_a_loss_that_is_not_finite_updates_nothing_and_is_named(pool):
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=24)
    found = pool.run(policy_updates.update, ("--llm-dp", "2"), 2, config, True, world_size=2)
    for outcome in found:
        assert outcome.error.startswith("ValueError: the policy loss is nan; nothing was updated"), outcome.error
        assert "it comes from completions prompt" in outcome.error and outcome.results == []
